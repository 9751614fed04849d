"""Trainings that begin otherwise than by `raygnn train`: as a child of `raygnn.launch`, and as the
command of `ray job submit`."""

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
from pathlib import Path
from typing import Any

from raygnn.cli import carry_out, parser
from raygnn.runs.output import open_streams

_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the job server sets it


def launched() -> int:
    """Do what `raygnn.launch` asks for, and end when the process that began this one ends.

    Standard input brings one line of JSON, the request, and then nothing; its end asks for ours, as
    SIGTERM does: a checkpoint is written first. Returns the exit code.
    """
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="raygnn-parent", daemon=True).start()
    os.set_inheritable(request["outcome"], False)  # or its end would be that of all that we start
    outcome = os.fdopen(request["outcome"], "w")

    def tell(facts: dict[str, Any]) -> None:
        with suppress(OSError), outcome:  # who began it may be gone
            json.dump(facts, outcome)

    def train(args: argparse.Namespace) -> int:
        from raygnn.config.load import load_config
        from raygnn.driver.train import train

        options = {key: request[key] for key in ("overwrite", "resume", "verbose", "profile")}
        train(load_config(request["config"]), started=args.started, **options)
        return 0

    return carry_out(
        argparse.Namespace(run=train, verbose=request["verbose"], started=time.time(), tell=tell)
    )


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def submitted(argv: Sequence[str]) -> int:
    """Run ``raygnn train`` with these arguments, after a look at what `ray job submit` brought;
    returns its exit code."""
    started = time.time()
    open_streams()
    args = parser().parse_args(["train", *argv], argparse.Namespace(started=started))
    train = args.run

    def run(args: argparse.Namespace) -> int:
        if os.environ.get(_IN_A_JOB):
            from raygnn.jobs.submit import check_storage
            from raygnn.jobs.upload import check_unpacked

            check_unpacked(Path.cwd())
            check_storage(args.config, args.set)
        code: int = train(args)
        return code

    args.run = run
    return carry_out(args)


if __name__ == "__main__":
    sys.exit(launched())
