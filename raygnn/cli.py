"""The command line. A verb reads the configuration, calls one function and prints its result."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from raygnn import __version__
from raygnn.errors import (
    ConfigError,
    InputError,
    Interrupted,
    PreflightError,
    RaygnnError,
    TrainingError,
)
from raygnn.runs.interrupts import stoppable
from raygnn.runs.output import OutputLost, drop_output, open_streams, say

_EXIT_CODES = """\
exit codes: 0 done, 2 bad input or configuration, 3 preflight refused, 4 training failed,
130 interrupted"""

_JSON = """print the result as JSON alone; of an error, {"ok": false, "error": {"what": …, "where":
…, "remedy": …, "rank": …, "run": …}}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code: 0 done, 2 bad input or configuration, 3 preflight refused, 4 training
        failed, 130 interrupted.
    """
    started = time.time()
    open_streams()
    args = _parser().parse_args(argv, argparse.Namespace(started=started))
    with stoppable():
        try:
            _check_directory()
            code: int = args.run(args)
            say("", end="")
            return code
        except OutputLost as error:
            drop_output()
            return error.exit_code if error.quiet else _fail(error, args)
        except RaygnnError as error:
            return _fail(error, args)
        except KeyboardInterrupt:
            return _fail(Interrupted("interrupted"), args)
        except Exception as error:
            trace = traceback.format_exc() if getattr(args, "verbose", False) else None
            internal = TrainingError(
                f"internal error: {type(error).__name__}: {error}",
                remedy=None if trace else "this is a bug; run again with -v for its trace",
                trace=trace,
            )
            return _fail(internal, args)


def _fail(error: RaygnnError, args: argparse.Namespace) -> int:
    from raygnn.runs.display import Display

    facts = {
        name: getattr(error, name, None) for name in ("what", "where", "remedy", "rank", "run")
    }
    try:
        if getattr(args, "json", False):
            say(json.dumps({"ok": False, "error": facts}, indent=2))
        else:
            say("", end="")
    except OutputLost:
        drop_output()
    Display().error(error)
    return error.exit_code


def _check_directory() -> None:
    """Refuse to work where there is nothing.

    Raises:
        InputError: the working directory was removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(
            f"the working directory is gone: {error.strerror}", remedy="cd to one that exists"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raygnn",
        description="Train graph neural networks on partitioned DGL graphs over a Ray cluster.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"raygnn {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    check = _job(
        verbs,
        "check",
        _check,
        "check a configuration, its input and the cluster, or the cluster alone; start nothing",
        optional=True,
    )
    check.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the cluster's head node, as cluster.address; without either, RAY_ADDRESS, else this "
        "machine",
    )
    _job(
        verbs,
        "partition",
        _partition,
        "divide the graph and show the parts, once",
    )
    train = _job(verbs, "train", _train, "run a job: partition where needed, train, test")
    taken = train.add_mutually_exclusive_group()
    taken.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    taken.add_argument(
        "--resume",
        action="store_true",
        help="go on from its newest checkpoint",
    )

    train.add_argument(
        "--profile",
        type=_count,
        default=0,
        metavar="N",
        help="record N steps on every rank with torch's profiler",
    )

    tune = _job(
        verbs,
        "tune",
        _tune,
        "train for some seconds each with other settings, and say which are faster; what changes "
        "results is marked",
    )
    tune.add_argument(
        "--seconds",
        type=_seconds,
        default=3.0,
        metavar="S",
        help="that each trial takes, about (default: 3)",
    )

    runs = _verb(verbs, "runs", _runs, "list the runs in a storage, the latest first")
    runs.add_argument(
        "--storage", default="runs", metavar="DIR", help="where they are (default: runs)"
    )
    runs.add_argument("--json", action="store_true", help=_JSON)

    diagnose = _verb(verbs, "diagnose", _diagnose, "say what happened to a run, and what to do")
    diagnose.add_argument("name", metavar="RUN", help="its directory, or its name in the storage")
    diagnose.add_argument(
        "--storage", default="runs", metavar="DIR", help="where a name is (default: runs)"
    )
    diagnose.add_argument("--json", action="store_true", help=_JSON)

    report = _verb(verbs, "report", _report, "write a run's report.html as the run is now")
    report.add_argument("name", metavar="RUN", help="its directory, or its name in the storage")
    report.add_argument(
        "--storage", default="runs", metavar="DIR", help="where a name is (default: runs)"
    )
    report.add_argument(
        "--out", metavar="FILE", help="where to write it (default: report.html in the run)"
    )
    report.add_argument("--json", action="store_true", help=_JSON)

    _verb(verbs, "config-schema", _config_schema, "print the JSON Schema of a configuration")
    return parser


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1000, got {text}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 600, got {text}")
    return value


def _verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    verb.set_defaults(run=run)
    return verb


def _job(
    verbs: Any, name: str, run: Any, text: str, *, optional: bool = False
) -> argparse.ArgumentParser:
    verb = _verb(verbs, name, run, text)
    verb.add_argument(
        "config", metavar="CONFIG", nargs="?" if optional else None, help="the job's YAML file"
    )
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as train.lr=0.1; may be repeated"
        + ("; without CONFIG, a key of cluster" if optional else ""),
    )
    verb.add_argument(
        "-v", "--verbose", action="store_true", help="show Ray's and Lightning's logs"
    )
    verb.add_argument("--json", action="store_true", help=_JSON)
    return verb


def _load(args: argparse.Namespace, **sections: Any) -> Any:
    from raygnn.config.load import load_config

    # As Python does for a script, so that package.module:Class is found where the user stands.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return load_config(args.config, args.set, **sections)


def _check(args: argparse.Namespace) -> int:
    options = {"verbose": args.verbose, "display": not args.json}
    if args.config:
        sections = {"cluster": {"address": args.address}} if args.address else {}
        config = _load(args, **sections)
        from raygnn.training import driver

        report = driver.check(config, **options)
    else:
        for override in args.set:
            if not override.startswith("cluster."):
                raise ConfigError(
                    "--set needs a CONFIG to change",
                    where=f"--set {override.partition('=')[0]}",
                    remedy="name the job's YAML file, or set keys of cluster alone",
                )
        from raygnn.training import driver

        report = driver.inspect(args.address, args.set, **options)
    _print_json(args, report.to_dict())
    return 0 if report.ok else PreflightError.exit_code


def _partition(args: argparse.Namespace) -> int:
    config = _load(args)
    from raygnn.training import driver

    meta = driver.partition(config, verbose=args.verbose, display=not args.json)
    if args.json:
        from raygnn.training.inputs import table

        key = "collection" if config.task.of_graphs else "parts"
        facts = {"directory": str(meta.directory), "digest": meta.digest, key: table(meta)}
        _print_json(args, facts)
    return 0


def _train(args: argparse.Namespace) -> int:
    config = _load(args)
    from raygnn.training import driver

    run = driver.train(
        config,
        overwrite=args.overwrite,
        resume=args.resume,
        verbose=args.verbose,
        display=not args.json,
        started=args.started,
        profile=args.profile,
    )
    _print_json(args, run.to_dict())
    return 0


def _tune(args: argparse.Namespace) -> int:
    config = _load(args)
    from raygnn.training.tune import tune

    found = tune(
        config,
        seconds=args.seconds,
        verbose=args.verbose,
        display=not args.json,
        started=args.started,
    )
    _print_json(args, found.to_dict())
    return 0


def _runs(args: argparse.Namespace) -> int:
    from raygnn.runs.display import Display
    from raygnn.runs.run import list_runs

    runs = [run.to_dict() for run in list_runs(args.storage)]
    if args.json:
        _print_json(args, runs)
    elif not runs:
        say(f"no runs in {os.path.abspath(args.storage)}")
    else:
        columns = ("name", "status", "started", "steps")
        rows = [(*(run.get(column) for column in columns), _metrics(run)) for run in runs]
        Display().table(f"runs in {os.path.abspath(args.storage)}", (*columns, "metrics"), rows)
    return 0


def _diagnose(args: argparse.Namespace) -> int:
    from raygnn.runs.diagnose import diagnose

    found = diagnose(args.name, args.storage)
    if args.json:
        _print_json(args, found.to_dict())
    else:
        from raygnn.runs.diagnose.text import show
        from raygnn.runs.display import Display

        show(found, Display())
    return 0


def _report(args: argparse.Namespace) -> int:
    from raygnn.runs.run import open_run, remains

    try:
        run = open_run(args.name, args.storage)
    except InputError:
        left = remains(args.name, args.storage)
        if left is None:
            raise
        run = left
    file = run.report(args.out)
    if args.json:
        _print_json(args, {"report": str(file)})
    else:
        say(str(file))
    return 0


def _metrics(run: dict[str, Any]) -> str:
    numbers = (run.get("metrics") or {}).items()
    return ", ".join(f"{key} {value:.4f}" for key, value in numbers if isinstance(value, float))


def _config_schema(args: argparse.Namespace) -> int:
    from raygnn.config.schema import json_schema

    say(json.dumps(json_schema(), indent=2))
    return 0


def _print_json(args: argparse.Namespace, facts: Any) -> None:
    if args.json:
        say(json.dumps(facts, indent=2))
