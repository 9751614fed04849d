"""A training in a process of its own, for `raygnn.launch`: it ends when the one that began it ends.

Standard input brings one line of JSON, the request, and then nothing; its end asks for ours, as
SIGTERM does: a checkpoint is written first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from raygnn.cli import carry_out


def main() -> int:
    """Do what the request says; returns the exit code."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="raygnn-parent", daemon=True).start()
    os.set_inheritable(request["outcome"], False)  # or its end would be that of all that we start
    outcome = os.fdopen(request["outcome"], "w")

    def tell(facts: dict[str, Any]) -> None:
        with suppress(OSError), outcome:  # who began it may be gone
            json.dump(facts, outcome)

    args = argparse.Namespace(
        run=_train, request=request, verbose=request["verbose"], started=time.time(), tell=tell
    )
    return carry_out(args)


def _train(args: argparse.Namespace) -> int:
    from raygnn.config.load import load_config
    from raygnn.driver import train

    request = args.request
    train.train(
        load_config(request["config"]),
        overwrite=request["overwrite"],
        resume=request["resume"],
        verbose=args.verbose,
        started=args.started,
        profile=request["profile"],
    )
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
