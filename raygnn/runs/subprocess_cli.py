"""The command line run from Python, in a process of its own: for what the layers above know, and
for a process that ends whatever state this one is in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from raygnn.errors import TrainingError, error_of

_LAST = 4000  # characters of what it said, where it left no result
_GRACE = 90.0  # seconds to end Ray and its workers in


def run_verb(verb: str, *args: str, timeout: float) -> dict[str, Any]:
    """Run ``raygnn VERB … --json`` and return what it prints.

    Args:
        timeout: seconds.

    Raises:
        RaygnnError: what the command raised: `InputError`, `PreflightError`, `TrainingError` or
            `Interrupted`.
        TrainingError: it took longer, or ended without a word.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "raygnn", verb, *args, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        what = f"raygnn {verb} took longer than {timeout:g} s"
        raise TrainingError(what, remedy="raise the timeout") from None
    except BaseException:
        _end(process)
        raise
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError:
        raise TrainingError(
            f"raygnn {verb} ended with {process.returncode} and no result",
            remedy="run it on the command line, with -v",
            trace=(err or out)[-_LAST:],
        ) from None
    if process.returncode:
        raise error_of(process.returncode, result.get("error") or {})
    return result


def _end(process: subprocess.Popen[str]) -> None:
    """End it as Ctrl-C does, so that it leaves nothing behind."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_GRACE)
    except BaseException as error:
        process.kill()
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
