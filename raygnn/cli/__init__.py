"""Command line: a module for each group of commands, which read arguments, call one function and
print its result."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from raygnn import __version__
from raygnn.cli import job_commands, run_commands, train_commands
from raygnn.errors import InputError, Interrupted, RaygnnError, TrainingError
from raygnn.runs.interrupts import stoppable, take_pending
from raygnn.runs.output import LOGGER_THREAD, OutputLost, drop_output, open_streams, say
from raygnn.util.files import storage_error

_EXIT_CODES = """\
exit codes: 0 done, 2 bad input or configuration, 3 preflight refused, 4 training failed,
130 interrupted"""
_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the job server sets it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments; None = the arguments of the process.

    Returns:
        The exit code: 0 done, 2 bad input or configuration, 3 preflight refused, 4 training
        failed, 130 interrupted.
    """
    started = time.time()
    open_streams()
    code = carry_out(parser().parse_args(argv, argparse.Namespace(started=started)))
    if argv is None and any(t.name.startswith(LOGGER_THREAD) for t in threading.enumerate()):
        # a logger that hangs would also hang at the exit of the process
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    return code


def carry_out(args: argparse.Namespace) -> int:
    """Call ``args.run``, show the error that it raises, and return the exit code."""
    try:
        with stoppable():
            return _carry_out(args)
    except KeyboardInterrupt:  # before the command, or after its result or error
        return Interrupted.exit_code


def _carry_out(args: argparse.Namespace) -> int:
    try:
        try:
            os.getcwd()
        except OSError as error:
            why = f"the working directory is gone: {error.strerror}"
            raise InputError(why, remedy="cd to an existing directory") from None
        code: int = args.run(args)
        say("", end="")
        return code
    except OutputLost as error:
        drop_output()
        return error.exit_code if error.quiet else _fail(error, args)
    except RaygnnError as error:
        return _fail(storage_error(error) or error, args)
    except MemoryError as error:
        what = f"this process ran out of memory: {error}".rstrip(": ")
        remedy = "free memory, or use a machine with more; raygnn check estimates what a job needs"
        return _fail(TrainingError(what, remedy=remedy), args)
    except (KeyboardInterrupt, Exception) as error:
        # a library may have replaced the interrupt that was raised within it
        if isinstance(error, KeyboardInterrupt) or take_pending():
            return _fail(Interrupted("interrupted"), args)
        if away := storage_error(error):
            return _fail(away, args)
        trace = traceback.format_exc() if getattr(args, "verbose", False) else None
        what = f"internal error: {type(error).__name__}: {error}"
        hint = None if trace else "this is a bug; run again with -v for its trace"
        return _fail(TrainingError(what, remedy=hint, trace=trace), args)


def _fail(error: RaygnnError, args: argparse.Namespace) -> int:
    from raygnn.runs.display import Display

    names = ("what", "where", "remedy", "rank", "run")
    facts = {name: getattr(error, name, None) for name in names}
    failed = json.dumps({"ok": False, "error": facts}, indent=2) + "\n"
    try:
        say(failed if getattr(args, "json", False) else "", end="")
    except OutputLost:
        drop_output()
    Display(verbose=getattr(args, "verbose", False)).error(error)
    return error.exit_code


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="raygnn",
        description="Train graph neural networks on partitioned DGL graphs over a Ray cluster.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"raygnn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (train_commands, job_commands, run_commands):
        module.add(commands)
    return parser


def launched() -> int:
    """Train for `raygnn.launch`; returns the exit code. Standard input is one line of JSON, the
    request. Its end, which comes when the parent ends, interrupts the training as SIGTERM does: it
    saves a checkpoint first."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="raygnn-parent", daemon=True).start()

    def train(args: argparse.Namespace) -> int:
        from raygnn.config.load import load_config
        from raygnn.driver.train import train

        options = {key: request[key] for key in ("overwrite", "resume", "verbose")}
        train(load_config(request["config"]), started=args.started, **options)
        return 0

    return carry_out(argparse.Namespace(run=train, verbose=request["verbose"], started=time.time()))


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def submitted(argv: Sequence[str]) -> int:
    """Run ``raygnn train`` with these arguments, after a check of the job of `ray job submit`;
    returns its exit code."""
    started = time.time()
    open_streams()
    args = parser().parse_args(["train", *argv], argparse.Namespace(started=started))
    train = args.run

    def run(args: argparse.Namespace) -> int:
        if os.environ.get(_IN_A_JOB):
            from raygnn.jobs.submit import check_storage

            check_storage(args.config, args.set)
        code: int = train(args)
        return code

    args.run = run
    return carry_out(args)
