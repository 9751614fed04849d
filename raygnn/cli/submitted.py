"""The command of a job that `ray job submit` brought: `raygnn train`, after a look at what came."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from raygnn.cli import carry_out, parser
from raygnn.runs.output import open_streams

_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the job server sets it


def main(argv: Sequence[str]) -> int:
    """Run ``raygnn train`` with these arguments; returns its exit code."""
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
