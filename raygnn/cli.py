"""The command line. A verb reads the configuration, calls one function and prints its result."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raygnn import __version__
from raygnn.errors import ConfigError, Interrupted, PreflightError, RaygnnError, TrainingError

_EXIT_CODES = """\
exit codes: 0 done, 2 bad input or configuration, 3 preflight refused, 4 training failed,
130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code: 0 done, 2 bad input or configuration, 3 preflight refused, 4 training
        failed, 130 interrupted.
    """
    started = time.time()
    args = _parser().parse_args(argv, argparse.Namespace(started=started))
    try:
        with _terminate_as_interrupt():
            code: int = args.run(args)
            sys.stdout.flush()
            return code
    except RaygnnError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _fail(Interrupted("interrupted"))
    except BrokenPipeError:
        # The reader (head, less) has gone. The interpreter flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        trace = traceback.format_exc() if getattr(args, "verbose", False) else None
        return _fail(
            TrainingError(
                f"internal error: {type(error).__name__}: {error}",
                remedy=None if trace else "this is a bug; run again with -v for its trace",
                trace=trace,
            )
        )


def _fail(error: RaygnnError) -> int:
    from raygnn.runs.display import Display

    sys.stdout.flush()
    Display().error(error)
    return error.exit_code


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM (a job manager's stop) do what Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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

    _job(
        verbs,
        "check",
        _check,
        "check a configuration, its input and the cluster, or the cluster alone; start nothing",
        optional=True,
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

    runs = _verb(verbs, "runs", _runs, "list the runs in a storage, the latest first")
    runs.add_argument(
        "--storage", default="runs", metavar="DIR", help="where they are (default: runs)"
    )
    runs.add_argument("--json", action="store_true", help="print the result as JSON alone")

    _verb(verbs, "config-schema", _config_schema, "print the JSON Schema of a configuration")
    return parser


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
        help="override a key, such as train.lr=0.1; may be repeated",
    )
    verb.add_argument(
        "-v", "--verbose", action="store_true", help="show Ray's and Lightning's logs"
    )
    verb.add_argument("--json", action="store_true", help="print the result as JSON alone")
    return verb


def _load(args: argparse.Namespace) -> Any:
    from raygnn.config.load import load_config

    # As Python does for a script, so that package.module:Class is found where the user stands.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return load_config(args.config, args.set)


def _check(args: argparse.Namespace) -> int:
    config = _load(args) if args.config else None
    from raygnn.training import driver

    options = {"verbose": args.verbose, "display": not args.json}
    if config is not None:
        report = driver.check(config, **options)
    elif args.set:
        raise ConfigError("--set needs a CONFIG to change", remedy="name the job's YAML file")
    else:
        report = driver.inspect(**options)
    _print_json(args, report.to_dict())
    return 0 if report.ok else PreflightError.exit_code


def _partition(args: argparse.Namespace) -> int:
    config = _load(args)
    from raygnn.training import driver

    meta = driver.partition(config, verbose=args.verbose, display=not args.json)
    if args.json:
        from raygnn.graph.manifest import table

        facts = {"directory": str(meta.directory), "digest": meta.digest, "parts": table(meta)}
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
    )
    _print_json(args, run.to_dict())
    return 0


def _runs(args: argparse.Namespace) -> int:
    from raygnn.runs.display import Display
    from raygnn.runs.run import list_runs

    runs = [run.to_dict() for run in list_runs(args.storage)]
    if args.json:
        _print_json(args, runs)
    elif not runs:
        print(f"no runs in {os.path.abspath(args.storage)}")
    else:
        columns = ("name", "status", "started", "steps")
        rows = [(*(run.get(column) for column in columns), _metrics(run)) for run in runs]
        Display().table(f"runs in {os.path.abspath(args.storage)}", (*columns, "metrics"), rows)
    return 0


def _metrics(run: dict[str, Any]) -> str:
    numbers = (run.get("metrics") or {}).items()
    return ", ".join(f"{key} {value:.4f}" for key, value in numbers if isinstance(value, float))


def _config_schema(args: argparse.Namespace) -> int:
    from raygnn.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _print_json(args: argparse.Namespace, facts: Any) -> None:
    if args.json:
        print(json.dumps(facts, indent=2))
