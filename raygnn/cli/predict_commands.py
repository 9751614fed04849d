"""Verbs that ask a trained model, or take it along: predict, evaluate, export."""

from __future__ import annotations

import argparse
from typing import Any

from raygnn.cli.options import here, overrides, print_json, run_verb
from raygnn.runs.output import say


def add(verbs: Any) -> None:
    """Add them to the parser."""
    predict = run_verb(
        verbs,
        "predict",
        _predict,
        "predict with a run's tested weights, and write a row for each node or graph",
    )
    predict.add_argument("--out", metavar="FILE", required=True, help="the Parquet file to write")
    _split(predict, ("train", "val", "test", "all"), "all")
    predict.add_argument("--scores", action="store_true", help="also a probability for each class")
    predict.add_argument(
        "--ids",
        metavar="LIST",
        help="predict for the nodes or graphs in a file alone: an id in each line, or Parquet",
    )
    predict.add_argument(
        "--fanout",
        metavar="N,N…",
        type=_fanout,
        help="draw so many neighbours for the nodes of --ids, from them outward; without: all",
    )

    embed = run_verb(
        verbs,
        "embed",
        _embed,
        "write what a run's tested model makes of each node or graph before its last step",
    )
    embed.add_argument("--out", metavar="FILE", required=True, help="the Parquet file to write")
    embed.add_argument("--ntype", metavar="TYPE", help="of nodes; default: the task's own")
    _split(embed, ("train", "val", "test", "all"), "all")
    for verb in (predict, embed):
        verb.add_argument("--overwrite", action="store_true", help="replace FILE")

    evaluate = run_verb(
        verbs,
        "evaluate",
        _evaluate,
        "measure a run's tested weights again, as when training ended",
    )
    evaluate.add_argument(
        "--split",
        metavar="SPLIT",
        help="train, val, test, or all of new graphs (default: test; of new graphs all)",
    )
    predict.add_argument("--task", metavar="NAME", help="which task, of a run with several")
    evaluate.add_argument("--task", metavar="NAME", help="one of several tasks; without: all")

    export = run_verb(
        verbs,
        "export",
        _export,
        "write a run's tested network as a program of torch's, to serve it without raygnn",
    )
    export.add_argument("--out", metavar="FILE", required=True, help="the file to write (.pt2)")
    export.add_argument("--overwrite", action="store_true", help="replace FILE")

    for verb in (predict, embed, evaluate):
        verb.add_argument(
            "--new-data",
            action="store_true",
            help="for a graph, or graphs, that it was not trained on: --set graph.path=…",
        )
        overrides(verb, "override a key of the run, such as cluster.workers=1; may be repeated")


def _split(verb: argparse.ArgumentParser, splits: tuple[str, ...], default: str) -> None:
    verb.add_argument(
        "--split",
        metavar="SPLIT",
        default=default,
        help=f"{', '.join(splits[:-1])} or {splits[-1]} (default: {default})",
    )


def _fanout(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.lstrip("-").isdecimal() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers such as 10,10, got {text}")
    return [int(part) for part in parts]


def _predict(args: argparse.Namespace) -> int:
    here()
    from raygnn.prediction.driver_side import predict

    made = predict(
        args.name,
        out=args.out,
        task=args.task,
        scores=args.scores,
        ids=args.ids,
        fanout=args.fanout,
        overwrite=args.overwrite,
        **_common(args),
    )
    print_json(args, made.to_dict())
    return 0


def _embed(args: argparse.Namespace) -> int:
    here()
    from raygnn.prediction.driver_side import embed

    made = embed(
        args.name, out=args.out, ntype=args.ntype, overwrite=args.overwrite, **_common(args)
    )
    print_json(args, made.to_dict())
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    here()
    from raygnn.prediction.driver_side import evaluate

    metrics = evaluate(args.name, task=args.task, **_common(args))
    split = next(iter(metrics)).partition("/")[0]
    print_json(args, {"split": split, "metrics": metrics})
    return 0


def _export(args: argparse.Namespace) -> int:
    here()
    from raygnn.prediction.export import export

    made = export(args.name, out=args.out, storage=args.storage, overwrite=args.overwrite)
    if args.json:
        print_json(args, made.to_dict())
    else:
        say(f"{made.path}: {made.target} → {made.out_features}")
    return 0


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "split": args.split,
        "new_data": args.new_data,
        "storage": args.storage,
        "overrides": args.set,
        "verbose": args.verbose,
        "display": not args.json,
        "started": args.started,
    }
