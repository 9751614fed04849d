"""Entry points of trainings in a child of `raygnn.launch`, and in `ray job submit`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from raygnn.cli import carry_out, parser
from raygnn.runs.output import open_streams

_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the job server sets it


def launched() -> int:
    """Train for `raygnn.launch`; returns the exit code. Standard input is one line of JSON, the
    request. Its end, which comes when the parent ends, interrupts the training as SIGTERM does: it
    saves a checkpoint first."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="raygnn-parent", daemon=True).start()
    os.set_inheritable(request["outcome"], False)  # or it would stay open in child processes
    outcome = os.fdopen(request["outcome"], "w")

    def tell(facts: dict[str, Any]) -> None:
        with suppress(OSError), outcome:  # the parent may be gone
            json.dump(facts, outcome)

    def train(args: argparse.Namespace) -> int:
        from raygnn.config.load import load_config
        from raygnn.driver.train import train

        options = {key: request[key] for key in ("overwrite", "resume", "verbose")}
        train(load_config(request["config"]), started=args.started, **options)
        return 0

    return carry_out(
        argparse.Namespace(run=train, verbose=request["verbose"], started=time.time(), tell=tell)
    )


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


if __name__ == "__main__":
    sys.exit(launched())
