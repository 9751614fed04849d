"""The black box: what a rank leaves behind, however it ends, for ``raygnn diagnose``.

A process has one recorder at most; the functions here do nothing where it has none, so that they
can be called from anywhere, also in a rank that a test runs.
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
    """Make this process's recorder; the options are those of `Recorder`."""
    global _current
    _current = Recorder(logs, **options)
    return _current


def note(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """Say what this thread does from now on; one of the training or the prefetch thread."""
    if _current is not None:
        _current.note(phase, epoch=epoch, step=step)


def remember(describe: Callable[[], Any]) -> None:
    """Keep what can describe the batch at hand: its names, dtypes and shapes."""
    if _current is not None:
        _current.remember(describe)


def tidy(logs: Path) -> None:
    """Remove what only a failure needs, after a run that came to its end."""
    for path in logs.glob(f"rank-*{STATE}"):
        path.unlink(missing_ok=True)
    for path in logs.glob(f"rank-*{CRASH}"):
        if "Fatal" not in path.read_text(errors="replace"):
            path.unlink(missing_ok=True)
