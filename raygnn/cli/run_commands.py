"""Commands about runs: runs, diagnose, report; and with their models: predict, recommend, embed,
evaluate, explain, serve, export."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raygnn.cli.options import (
    Handler,
    command,
    overrides,
    print_json,
    print_result,
    run_command,
    storage,
)


def add(commands: Any) -> None:
    """Add them to the parser."""
    text = "list the runs in a storage, and a cluster's jobs, with state, progress and a metric"
    runs = command(commands, "runs", _runs, text)
    text = "a cluster's job server, to also list its jobs (default: RAY_API_SERVER_ADDRESS)"
    _option([runs], "--address", "URL", text)
    text = (
        "compare these runs: settings that differ, metrics, speed, versions; and the mean if they "
        "differ in train.seed alone"
    )
    _option([runs], "--compare", "RUN", text, nargs="+")
    _option([runs], "--html", "FILE", "also write the comparison as a page")
    storage(runs, "storage of the runs (default: runs)")
    run_command(commands, "diagnose", _diagnose, "report what happened to a run, and what to do")
    report = run_command(commands, "report", _report, "write a run's report.html from its files")
    _option([report], "--out", "FILE", "the page (default: report.html in the run)")
    _add_models(partial(run_command, commands))


def _add_models(add: Callable[[str, Handler, str], argparse.ArgumentParser]) -> None:
    predict = add("predict", _write_rows, "write a run's predictions for nodes, edges or graphs")
    text = "write the best targets of each source, by a run of link prediction"
    recommend = add("recommend", _write_rows, text)
    embed = add("embed", _write_rows, "write embeddings of nodes or graphs by a run's model")
    evaluate = add("evaluate", _evaluate, "compute the metrics of a run's tested weights again")
    text = "write how much features, neighbours and edges contribute to predictions for nodes"
    explain = add("explain", _explain, text)
    text = "answer requests over HTTP with a run's selected weights, on Ray Serve, until Ctrl-C"
    serve = add("serve", _serve, text)
    text = "write a run's model as programs of torch's, to serve it without raygnn"
    export = add("export", _export, text)
    _predict_options(predict)
    _recommend_options(recommend)

    _option([embed], "--ntype", "TYPE", "node type (default: the node type of the task)")
    text = "train, val, test or all (default: all)"
    _option([embed], "--split", "SPLIT", text, default="all")
    text = "train, val, test, or all of new graphs (default: test; of new graphs all)"
    _option([evaluate], "--split", "SPLIT", text)

    text = "nodes: an id in each line, or Parquet"
    _option([explain], "--ids", "LIST", text, required=True)
    text = "contributions of each kind per node (default: 20)"
    _option([explain], "--k", None, text, type=int, default=20)

    _option([serve], "--address", "HOST:PORT", "address of a Ray cluster's head node")
    _option(
        [serve], "--host", None, "address to listen on (default: 127.0.0.1)", default="127.0.0.1"
    )
    _option([serve], "--port", None, "port to listen on (default: 8000)", type=int, default=8000)
    text = "copies of the model (default: 1)"
    _option([serve], "--replicas", "N|auto", text, type=_replicas, default=1)
    text = "file with the text that each request must carry as Bearer token"
    _option([serve], "--token-file", "FILE", text)
    _flag([serve], "--updates", "keep the rows that are sent to /nodes and /edges")

    _option([export], "--out", "DIR", "the directory to write", required=True)
    rows = [predict, recommend, embed, explain]
    _option(rows, "--out", "FILE", "the Parquet file to write", required=True)
    _flag([*rows, export], "--overwrite", "replace it if it exists")
    text = "number of neighbours to sample for the nodes of --ids, from them outward (default: all)"
    _option([predict, explain], "--fanout", "N,N…", text, type=_fanout)
    for parser, what in ((predict, "entity and time"), (evaluate, "entity, time and target")):
        text = f"CSV or Parquet with {what} of rows in place of the training table's (task.table)"
        _option([parser], "--rows", "FILE", text)
    _option([serve, evaluate], "--task", "NAME", "one of several tasks (default: all)")
    _option([predict, recommend, explain], "--task", "NAME", "which task, of a run with several")
    text = "for a graph, or graphs, that the run was not trained on: --set graph.path=…"
    _flag([predict, recommend, embed, evaluate], "--new-data", text)
    queries = [*rows, evaluate, serve]
    text = (
        "from edges before this time, such as 2026-01-31, or a number in the units of the data's "
        "times (default: for each node or edge its own time, sampling.time)"
    )
    _option(queries, "--at", "TIME", text)
    text = "import the classes that the run names, even if another user or machine trained it"
    _flag(queries, "--trust", text)
    for parser in queries:
        overrides(parser, "override a key of the run, such as cluster.workers=1; may be repeated")


def _predict_options(predict: argparse.ArgumentParser) -> None:
    _flag([predict], "--scores", "also write the probability of each class")
    text = "calibrated probabilities, as fitted to the validation split"
    _flag([predict], "--calibrated", text)
    text = "predict only for the nodes or graphs in a file: an id in each line, or Parquet"
    _option([predict], "--ids", "LIST", text)
    text = (
        "only edges at this time or later, as in --at; default with --new-data, without --split "
        "and --at: edges later than all training edges"
    )
    _option([predict], "--since", "TIME", text)
    text = "train, val, test or all (default: all, but see --since)"
    _option([predict], "--split", "SPLIT", text)


def _recommend_options(recommend: argparse.ArgumentParser) -> None:
    _option([recommend], "--k", None, "length of the lists (default: 10)", type=int, default=10)
    text = "only for these sources: an id in each line, or Parquet"
    _option([recommend], "--ids", "LIST", text)
    text = (
        "choose from these targets, as --ids; or array:NAME, targets for which this array of their "
        "node type is not 0"
    )
    _option([recommend], "--candidates", "LIST", text)
    text = "targets that the source has an edge to (default: exclude)"
    choices = ("exclude", "keep")
    _option([recommend], "--known", None, text, choices=choices, default="exclude")
    _option([recommend], "--relation", "NAME", "relation of the edges, if there are several")


def _option(
    parsers: Sequence[argparse.ArgumentParser],
    name: str,
    metavar: str | None,
    text: str,
    **more: Any,
) -> None:
    for parser in parsers:
        parser.add_argument(name, metavar=metavar, help=text, **more)


def _flag(parsers: Sequence[argparse.ArgumentParser], name: str, text: str) -> None:
    for parser in parsers:
        parser.add_argument(name, action="store_true", help=text)


def _fanout(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.lstrip("-").isdecimal() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers such as 10,10, got {text}")
    return [int(part) for part in parts]


def _replicas(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and 0 < int(text) < 10**4):
        raise argparse.ArgumentTypeError(f"expected a number from 1 or auto, got {text}")
    return text if text == "auto" else int(text)


def _runs(args: argparse.Namespace) -> int:
    from raygnn.runs.comparison import row_of
    from raygnn.runs.display import Display
    from raygnn.runs.run import list_runs
    from raygnn.runs.run_directory import read_storage

    if args.compare:
        return _compare(args)
    runs = list_runs(args.storage)
    facts: Any = [run.to_dict() for run in runs]
    tables = {f"runs in {read_storage(args.storage)}": [row_of(run) for run in runs]}
    if address := args.address or os.environ.get("RAY_API_SERVER_ADDRESS"):
        from raygnn.jobs.server import JobServer
        from raygnn.jobs.submit import rows_of

        server = JobServer(address)
        jobs = rows_of(server)
        facts = {"runs": facts, "jobs": jobs}
        tables = {f"jobs on {server.address}": jobs, **(tables if runs else {})}
    print_json(args, facts)
    for title, rows in tables.items() if not args.json else ():
        Display().table(title, list(rows[0] if rows else ()), [[*row.values()] for row in rows])
    return 0


def _compare(args: argparse.Namespace) -> int:
    from raygnn.runs.comparison import compare, tables, write_html
    from raygnn.runs.display import Display
    from raygnn.runs.run import open_run
    from raygnn.runs.run_directory import local_path

    compared = compare([open_run(name, args.storage) for name in args.compare])
    if args.html:
        write_html(compared, local_path(args.html, "--html"))
    print_json(args, compared)
    for table in tables(compared) if not args.json else ():
        Display().table(*table)
    return 0


def _diagnose(args: argparse.Namespace) -> int:
    from raygnn.runs.diagnose.judge import diagnose, show
    from raygnn.runs.display import Display

    diagnosis = diagnose(args.name, args.storage)
    print_json(args, diagnosis.to_dict())
    if not args.json:
        show(diagnosis, Display())
    return 0


def _report(args: argparse.Namespace) -> int:
    from raygnn.runs.run import open_remains

    file = str(open_remains(args.name, args.storage).report(args.out))
    print_result(args, {"report": file}, file)
    return 0


def _write_rows(args: argparse.Namespace) -> int:
    from raygnn.prediction import driver_side

    write = getattr(driver_side, args.verb)
    print_json(args, write(args.name, **_options(args)).to_dict())
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from raygnn.prediction import driver_side

    metrics = driver_side.evaluate(args.name, **_options(args))
    split = next(iter(metrics)).partition("/")[0]
    print_json(args, {"split": split, "metrics": metrics})
    return 0


def _explain(args: argparse.Namespace) -> int:
    from raygnn.serving.commands import explain

    unused = ("verbose", "started", "display")
    options = {name: value for name, value in _options(args).items() if name not in unused}
    count = len(explain(args.name, **options))
    facts = {"path": str(args.out), "rows": count}
    print_result(args, facts, f"{count:,} contributions in {args.out}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from raygnn.serving.commands import serve

    serve(args.name, **_options(args))
    return 0


def _export(args: argparse.Namespace) -> int:
    from raygnn.prediction.export import export

    made = export(args.name, out=args.out, storage=args.storage, overwrite=args.overwrite)
    print_result(args, made.to_dict(), f"{made.path}: {', '.join(made.programs)}")
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command as arguments of its function."""
    ours = ("run", "verb", "json", "name", "set")
    options = {name: value for name, value in vars(args).items() if name not in ours}
    return {**options, "overrides": args.set, "display": not args.json}
