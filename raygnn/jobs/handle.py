"""Handle of a training in the background."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from raygnn.errors import DataError, InputError, RaygnnError
from raygnn.jobs.notebook import card
from raygnn.runs.progress_line import ProgressLine
from raygnn.runs.run import Run, open_run

if TYPE_CHECKING:
    import pandas

_ENDED = ("done", "failed", "interrupted")


class Handle(ABC):
    """Handle of a training in another process.

    Attributes:
        name: of its run.
        told: its last progress line.
    """

    name: str
    told: ProgressLine | None = None

    @property
    @abstractmethod
    def status(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    @abstractmethod
    def logs(self, lines: int | None = None) -> str:
        """Return its output, or the last so many lines of it."""

    @abstractmethod
    def stop(self, timeout: float = 120.0) -> None:
        """Interrupt it and wait until it has saved a checkpoint.

        Args:
            timeout: seconds; then a local one is killed, and can resume from an older checkpoint.
        """

    @abstractmethod
    def _wait(self, deadline: float | None) -> None:
        """Wait until it is over, or until a deadline of the monotonic clock."""

    @abstractmethod
    def _error(self) -> RaygnnError:
        """Return the error of a training that failed or was interrupted."""

    @property
    @abstractmethod
    def run(self) -> Run | None:
        """Opened run directory; None before it exists, or if it is not visible from here."""

    @property
    def over(self) -> bool:
        """True if it has ended."""
        return self.status in _ENDED

    def metrics(self) -> pandas.DataFrame:
        """Return one row per record so far, as `Run.metrics`; empty before the first one, and if
        the run directory is not visible from here. Raises DataError if a record is damaged."""
        import pandas

        run = self.run
        return pandas.DataFrame() if run is None else run.metrics

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until it is done, and return its run.

        Args:
            timeout: seconds; None = no limit.

        Raises:
            TimeoutError: it is still in progress.
            RaygnnError: it failed or was interrupted; see `raygnn.train`.
        """
        self._wait(None if timeout is None else time.monotonic() + timeout)
        if not self.over:
            raise TimeoutError(f"{self.name} is still {self.status} after {timeout:g} s")
        if self.status != "done":
            raise self._error()
        run = self.run
        if run is None:
            raise InputError(
                "the run is done, but its directory is not visible from here",
                where=self.name,
                remedy="open it where its storage is mounted",
            )
        return run

    def __repr__(self) -> str:
        told = f": {self.told.text}" if self.told else ""
        try:
            status = self.status
        except RaygnnError as error:  # a debugger shows this, too: it must not raise
            status = error.what
        return f"{type(self).__name__}({self.name!r}, {status}{told})"

    def _repr_html_(self) -> str | None:
        try:
            return card(self.name, self.status, self.told, self.logs(50), self.run)
        except RaygnnError:
            return None  # a notebook shows the plain text instead


def said_error(text: str) -> dict[str, str]:
    """Parse the last error in a command's output, see `Display.error`; {} without one."""
    lines = text.splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith("error: ")), default=None)
    if start is None:
        return {}
    facts = {"what": lines[start].removeprefix("error: ")}
    for line in lines[start + 1 : start + 3]:
        for key, mark in (("where", "  at "), ("remedy", "  → ")):
            if line.startswith(mark):
                facts[key] = line.removeprefix(mark)
    return facts


def begun_by(run: Run, job: str) -> bool:
    """True if the run directory is that job's, and not an earlier or unrelated one of its path."""
    try:
        return run.summary.get("job") == job
    except DataError:
        return False


def opened(path: str | Path) -> Run | None:
    """Open a run directory; None if there is none."""
    try:
        return open_run(path)
    except InputError:
        return None
