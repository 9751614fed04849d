"""Crash recorder of a rank, for ``raygnn diagnose``.

A process has at most one recorder. The functions here do nothing without one, so that any code may
call them, also in a rank that a test runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raygnn.runs.diagnose.state_file import CRASH, STATE
from raygnn.worker.blackbox.recorder import DONE, Recorder

TEST = "test"  # the phase after training

__all__ = ["DONE", "TEST", "Recorder", "note", "remember", "start", "tidy"]

_current: Recorder | None = None


def start(logs: Path, **options: Any) -> Recorder:
    """Create this process's recorder; the options are those of `Recorder`."""
    global _current
    _current = Recorder(logs, **options)
    return _current


def note(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """See `Recorder.note`."""
    if _current is not None:
        _current.note(phase, epoch=epoch, step=step)


def remember(describe: Callable[[], Any]) -> None:
    """See `Recorder.remember`."""
    if _current is not None:
        _current.remember(describe)


def tidy(logs: Path) -> None:
    """Remove the files that only a failure needs, after a run that finished."""
    for path in logs.glob(f"rank-*{STATE}"):
        path.unlink(missing_ok=True)
    for path in logs.glob(f"rank-*{CRASH}"):
        if "Fatal" not in path.read_text(errors="replace"):
            path.unlink(missing_ok=True)
