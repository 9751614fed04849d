"""Commands that take a configuration, or help to write one: check, partition, train, tune,
config-schema, tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from raygnn.cli.options import (
    command,
    job_command,
    load,
    overwrite_or_resume,
    print_json,
    print_result,
)
from raygnn.errors import ConfigError, PreflightError
from raygnn.runs.output import say


def add(commands: Any) -> None:
    """Add them to the parser."""
    text = "check a configuration, its input and the cluster, or the cluster alone; start nothing"
    check = job_command(commands, "check", _check, text, optional=True)
    text = "the cluster's head node, as cluster.address (default: RAY_ADDRESS, else this machine)"
    check.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "partition the graph, unless that is done, and show the parts"
    job_command(commands, "partition", _partition, text)
    train = job_command(commands, "train", _train, "run a job: partition where needed, train, test")
    overwrite_or_resume(train)
    text = (
        "train once for each seed, the first N from 0 or these, as NAME-seed-N; print mean and "
        "deviation"
    )
    train.add_argument("--seeds", metavar="N|N,N…", type=_seeds, help=text)
    text = "search the values of the section search for the best validation metric, on Ray Tune"
    tune = job_command(commands, "tune", _tune, text)
    text = "search, as NAME-speed, for the fastest values of keys that do not change results"
    tune.add_argument("--objective", choices=("speed",), help=text)
    overwrite_or_resume(tune)
    text = "propose the YAML that describes CSV and Parquet files, or a database, as a graph"
    tables = command(commands, "tables", _tables, text)
    text = "the directory, or a database: env:NAME, a variable with its URL, or sqlite:///FILE"
    tables.add_argument("source", metavar="DIR", help=text)
    tables.add_argument("--out", metavar="FILE", type=Path, help="write it there, a new file")
    command(commands, "config-schema", _config_schema, "print the JSON Schema of a configuration")


def _tables(args: argparse.Namespace) -> int:
    from raygnn.graph.tables.proposal import propose

    base = args.out.absolute().parent if args.out else Path(args.source)
    text = propose(args.source, base if base.is_dir() else Path.cwd())
    if args.out:
        try:
            with args.out.open("x") as file:
                file.write(text)
        except OSError as error:
            message = f"the file cannot be created: {error.strerror}"
            raise ConfigError(message, where=str(args.out), remedy="name a new file") from None
    print_result(args, {"yaml": text}, str(args.out or text))
    return 0


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("verbose", *names)} | {"display": not args.json}


def _check(args: argparse.Namespace) -> int:
    config = None
    if args.config:
        sections = {"cluster": {"address": args.address}} if args.address else {}
        config = load(args, **sections)
    elif others := [key for key in args.set if not key.startswith("cluster.")]:
        what, where = "--set needs a CONFIG to change", f"--set {others[0].partition('=')[0]}"
        remedy = "name the job's YAML file, or set only keys of cluster"
        raise ConfigError(what, where=where, remedy=remedy)
    from raygnn.driver import train as driver

    if config is None:
        report = driver.inspect(args.address, args.set, **_options(args))
    else:
        report = driver.check(config, **_options(args))
    print_json(args, report.to_dict())
    return 0 if report.ok else PreflightError.exit_code


def _partition(args: argparse.Namespace) -> int:
    config = load(args)
    from raygnn.driver import train as driver

    meta = driver.partition(config, **_options(args))
    if args.json:
        from raygnn.driver.job_plan import stored_table

        key = "collection" if config.task.of_graphs else "parts"
        facts = {"directory": str(meta.directory), "digest": meta.digest, key: stored_table(meta)}
        print_json(args, facts)
    return 0


def _seeds(text: str) -> list[int]:
    parts = text.split(",")
    seeds = [int(part) for part in parts if part.isdecimal() and len(part) < 11]
    seeds = list(range(seeds[0])) if len(parts) == len(seeds) == 1 and seeds[0] < 1000 else seeds
    if len(seeds) < 2 or len(set(seeds)) < max(len(seeds), len(parts)):
        raise argparse.ArgumentTypeError(f"expected a number from 2, or seeds as 0,1,2, got {text}")
    return seeds


def _train(args: argparse.Namespace) -> int:
    config = load(args)
    from raygnn.driver import train as driver

    options = _options(args, "overwrite", "resume")
    if args.seeds is None:
        print_json(args, driver.train(config, started=args.started, **options).to_dict())
        return 0
    from raygnn.runs.comparison import mean_of, mean_table
    from raygnn.runs.display import Display

    runs = driver.train_seeds(config, args.seeds, **options)
    mean = mean_of(runs)
    print_json(args, {"runs": [run.to_dict() for run in runs], "mean": mean})
    if not args.json:
        Display().table(*mean_table(mean, len(runs)))
    return 0


def _tune(args: argparse.Namespace) -> int:
    config = load(args)
    from raygnn.search.run_search import tune

    result = tune(config, **_options(args, "overwrite", "resume", "objective", "started"))
    print_json(args, {**result.to_dict(), "path": str(result.path)})
    return 0


def _config_schema(args: argparse.Namespace) -> int:
    from raygnn.config.load import json_schema

    say(json.dumps(json_schema(), indent=2))
    return 0
