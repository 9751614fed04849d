"""Commands about runs: runs, diagnose, report; and with their models: predict, recommend, embed,
evaluate, explain, serve, export."""

from __future__ import annotations

import argparse
import os
from typing import Any

from raygnn.cli.options import (
    command,
    overrides,
    print_json,
    print_result,
    run_command,
    storage,
)
from raygnn.runs.output import say


def add(commands: Any) -> None:
    """Add them to the parser."""
    runs = command(
        commands,
        "runs",
        _runs,
        "list the runs in a storage, the latest first, and a cluster's jobs: their state, how far "
        "they are, a metric, and how long ago they began",
    )
    runs.add_argument(
        "--address",
        metavar="URL",
        help="of a cluster's job server: list its jobs, too (default: RAY_API_SERVER_ADDRESS)",
    )
    runs.add_argument(
        "--compare",
        metavar="RUN",
        nargs="+",
        help="these runs side by side: settings that differ, metrics, speed, versions; and the "
        "mean if they differ in train.seed alone",
    )
    runs.add_argument("--html", metavar="FILE", help="write the comparison as a page, too")
    storage(runs, "where they are (default: runs)")
    run_command(commands, "diagnose", _diagnose, "say what happened to a run, and what to do")
    report = run_command(commands, "report", _report, "write a run's report.html as the run is now")
    report.add_argument(
        "--out", metavar="FILE", help="where to write it (default: report.html in the run)"
    )
    _add_models(commands)


def _add_models(commands: Any) -> None:
    predict = run_command(
        commands,
        "predict",
        _predict,
        "predict with a run's tested weights, and write a row for each node or graph",
    )
    predict.add_argument("--scores", action="store_true", help="also a probability for each class")
    predict.add_argument(
        "--calibrated",
        action="store_true",
        help="probabilities that come true, as fitted to the validation split",
    )
    predict.add_argument(
        "--ids",
        metavar="LIST",
        help="predict for the nodes or graphs in a file alone: an id in each line, or Parquet",
    )
    predict.add_argument(
        "--since",
        metavar="TIME",
        help="only edges at this time or later, a time as of --at; with --new-data, without "
        "--split and --at: those later than all of the training",
    )

    recommend = run_command(
        commands,
        "recommend",
        _recommend,
        "write the best targets of each source, by a run of link prediction",
    )
    recommend.add_argument("--k", type=int, default=10, help="how many (default: 10)")
    recommend.add_argument(
        "--ids", metavar="LIST", help="only for these sources: an id in each line, or Parquet"
    )
    recommend.add_argument(
        "--candidates",
        metavar="LIST",
        help="choose from these targets, as --ids; or array:NAME, those where this array of their "
        "node type is not 0",
    )
    recommend.add_argument(
        "--known",
        choices=("exclude", "keep"),
        default="exclude",
        help="targets that the source has an edge to (default: exclude)",
    )
    recommend.add_argument("--relation", metavar="NAME", help="of the edges, if there are several")

    embed = run_command(
        commands,
        "embed",
        _embed,
        "write what a run's tested model makes of each node or graph before its last step",
    )
    embed.add_argument("--ntype", metavar="TYPE", help="of nodes; default: the task's own")

    evaluate = run_command(
        commands,
        "evaluate",
        _evaluate,
        "measure a run's tested weights again, as when training ended",
    )
    evaluate.add_argument("--task", metavar="NAME", help="one of several tasks; without: all")

    explain = run_command(
        commands,
        "explain",
        _explain,
        "write how much features, neighbours and edges contribute to predictions for nodes",
    )
    explain.add_argument(
        "--ids", metavar="LIST", required=True, help="nodes: an id in each line, or Parquet"
    )
    explain.add_argument(
        "--k", type=int, default=20, help="contributions of each kind per node (default: 20)"
    )

    serve = run_command(
        commands,
        "serve",
        _serve,
        "answer requests over HTTP with a run's selected weights, on Ray Serve, until Ctrl-C",
    )
    serve.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster's head node")
    serve.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="to listen on (default: 8000)")
    serve.add_argument(
        "--replicas", type=_replicas, default=1, metavar="N|auto", help="of the model (default: 1)"
    )
    serve.add_argument(
        "--token-file", metavar="FILE", help="whose text each request must carry as Bearer token"
    )
    serve.add_argument(
        "--updates", action="store_true", help="keep the rows that are sent to /nodes and /edges"
    )

    export = run_command(
        commands,
        "export",
        _export,
        "write a run's tested model as programs of torch's, to serve it without raygnn",
    )
    _out(export, "the directory to write", "DIR")
    for parser in (predict, recommend, embed, explain):
        _out(parser, "the Parquet file to write")
    _split(predict, None, "train, val, test or all (default: all, but see --since)")
    _split(embed, "all", "train, val, test or all (default: all)")
    _split(evaluate, None, "train, val, test, or all of new graphs (default: test; of new graphs "
           "all)")  # fmt: skip
    for parser in (predict, explain):
        parser.add_argument(
            "--fanout",
            metavar="N,N…",
            type=_fanout,
            help="draw so many neighbours for the nodes of --ids, from them outward; without: all",
        )
    for parser, what in ((predict, "entity and time"), (evaluate, "entity, time and target")):
        parser.add_argument(
            "--rows",
            metavar="FILE",
            help=f"rows with {what}, CSV or Parquet, in place of those of the training table "
            "(task.table)",
        )
    serve.add_argument("--task", metavar="NAME", help="one of several tasks; without: all")
    for parser in (predict, recommend, explain):
        parser.add_argument("--task", metavar="NAME", help="which task, of a run with several")
    for parser in (predict, recommend, embed, evaluate, explain, serve):
        if parser not in (explain, serve):
            parser.add_argument(
                "--new-data",
                action="store_true",
                help="for a graph, or graphs, that it was not trained on: --set graph.path=…",
            )
        parser.add_argument(
            "--at",
            metavar="TIME",
            help="from what was before this time, such as 2026-01-31, or a number in the units of "
            "the data's times; without: of each at its own (sampling.time)",
        )
        parser.add_argument(
            "--trust",
            action="store_true",
            help="import the classes that the run names, though another user or machine trained it",
        )
        overrides(parser, "override a key of the run, such as cluster.workers=1; may be repeated")


def _out(parser: argparse.ArgumentParser, text: str, metavar: str = "FILE") -> None:
    parser.add_argument("--out", metavar=metavar, required=True, help=text)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {metavar}")


def _split(parser: argparse.ArgumentParser, default: str | None, text: str) -> None:
    parser.add_argument("--split", metavar="SPLIT", default=default, help=text)


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
    if not args.json:
        for title, rows in tables.items():
            _table(title, rows)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from raygnn.runs.comparison import compare, show, write_html
    from raygnn.runs.display import Display
    from raygnn.runs.run import open_run
    from raygnn.runs.run_directory import local_path

    compared = compare([open_run(name, args.storage) for name in args.compare])
    if args.html:
        write_html(compared, local_path(args.html, "--html"))
    print_json(args, compared)
    if not args.json:
        show(compared, Display())
    return 0


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    from raygnn.runs.display import Display

    if rows:
        Display().table(title, list(rows[0]), [list(row.values()) for row in rows])
    else:
        say(f"no {title}")


def _diagnose(args: argparse.Namespace) -> int:
    from raygnn.runs.diagnose import diagnose, show

    diagnosis = diagnose(args.name, args.storage)
    if args.json:
        print_json(args, diagnosis.to_dict())
    else:
        from raygnn.runs.display import Display

        show(diagnosis, Display())
    return 0


def _report(args: argparse.Namespace) -> int:
    from raygnn.runs.run import open_remains

    file = str(open_remains(args.name, args.storage).report(args.out))
    print_result(args, {"report": file}, file)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from raygnn.prediction.driver_side import predict

    names: tuple[str, ...] = ("out", "split", "task", "scores", "calibrated", "ids", "rows")
    names += ("fanout", "since", "overwrite", "new_data")
    print_json(args, predict(args.name, **_options(args, *names)).to_dict())
    return 0


def _recommend(args: argparse.Namespace) -> int:
    from raygnn.prediction.driver_side import recommend

    names = ("out", "k", "ids", "candidates", "known", "relation", "task", "overwrite", "new_data")
    print_json(args, recommend(args.name, **_options(args, *names)).to_dict())
    return 0


def _embed(args: argparse.Namespace) -> int:
    from raygnn.prediction.driver_side import embed

    print_json(
        args,
        embed(
            args.name, **_options(args, "out", "split", "ntype", "overwrite", "new_data")
        ).to_dict(),
    )
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from raygnn.prediction.driver_side import evaluate

    metrics = evaluate(args.name, **_options(args, "split", "task", "rows", "new_data"))
    split = next(iter(metrics)).partition("/")[0]
    print_json(args, {"split": split, "metrics": metrics})
    return 0


def _explain(args: argparse.Namespace) -> int:
    from raygnn.serving.explain_command import explain

    names = ("out", "k", "fanout", "task", "overwrite", "at", "trust", "storage")
    options = {name: getattr(args, name) for name in names}
    found = explain(args.name, args.ids, overrides=args.set, **options)
    told = {"path": str(args.out), "rows": len(found)}
    print_result(args, told, f"{len(found):,} contributions in {args.out}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from raygnn.serving.serve_command import serve

    names = ("address", "host", "port", "replicas", "token_file", "updates", "task")
    serve(args.name, **_options(args, *names))
    return 0


def _export(args: argparse.Namespace) -> int:
    from raygnn.prediction.export import export

    made = export(args.name, out=args.out, storage=args.storage, overwrite=args.overwrite)
    print_result(args, made.to_dict(), f"{made.path}: {', '.join(made.programs)}")
    return 0


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    names += ("at", "trust", "storage", "verbose", "started")
    options = {name: getattr(args, name) for name in names}
    return {**options, "overrides": args.set, "display": not args.json}
