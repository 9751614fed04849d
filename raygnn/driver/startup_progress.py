"""What the ranks do before their first step, or in place of steps, from the state that each of them
keeps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from raygnn.errors import DataError
from raygnn.runs.diagnose.state_file import STATE, file_of, read_state
from raygnn.worker.job import ranks

_APART = 1.0  # seconds between looks
_MOST = 256  # ranks that are looked at

# phase of a rank → how it is told
_WORDS = {
    "": "starting",
    "imports": "importing libraries",
    "partition": "waiting for the partition",
    "staging": "staging parts",
    "setup": "setting up",
    "batch": "preparing the first batch",
    "predict": "predicting",
}


class Coming:
    """Tells how far the ranks have come.

    Args:
        started: when the command began: the state of an earlier one's ranks says nothing.
        tell: takes the words.
        before: what to tell before there is a rank.
    """

    def __init__(
        self,
        run_dir: Path,
        started: float,
        tell: Callable[[str], object],
        before: Callable[[], str],
    ):
        self._run_dir = run_dir
        self._started = started
        self._tell = tell
        self._before = before
        self._next = 0.0

    def look(self) -> None:
        """Tell, if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _APART
        if detail := told(self._phases()) or self._before():
            self._tell(detail)

    def _phases(self) -> list[str]:
        """Of the ranks that this command started."""
        found = []
        for rank in range(min(ranks(self._run_dir) or 0, _MOST)):
            try:
                state = read_state(file_of(self._run_dir / "logs", rank, STATE))
            except DataError:
                continue
            if state is not None and state.start.command == self._started:
                found.append(state.training.phase)
        return found


def told(phases: list[str]) -> str:
    """``staging parts, 1 of 2 workers``: what those do that are least far, and how many do it;
    empty where there are none."""
    if not phases:
        return ""
    order = list(_WORDS)
    counts = Counter(phase if phase in _WORDS else "batch" for phase in phases)
    first = min(counts, key=order.index)
    return f"{_WORDS[first]}, {counts[first]} of {len(phases)} workers"
