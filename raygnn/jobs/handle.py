"""The handle of a training that goes on while this process does something else."""

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
    """One training, elsewhere.

    Attributes:
        name: of its run.
        told: the last line that it printed of its progress.
    """

    name: str
    told: ProgressLine | None = None

    @property
    @abstractmethod
    def status(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    @abstractmethod
    def logs(self, lines: int | None = None) -> str:
        """What it has printed; the last so many lines of it, or all."""

    @abstractmethod
    def stop(self, timeout: float = 120.0) -> None:
        """Have it write a checkpoint and end, and wait for that.

        Args:
            timeout: seconds; afterwards it is ended without waiting for a checkpoint.
        """

    @abstractmethod
    def _wait(self, deadline: float | None) -> None:
        """Return when it is over, or the deadline of the monotonic clock has passed."""

    @abstractmethod
    def _error(self) -> RaygnnError:
        """Why it did not end as it should."""

    @property
    @abstractmethod
    def run(self) -> Run | None:
        """Its run directory, opened; None before there is one, or where it cannot be seen."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in _ENDED

    def metrics(self) -> pandas.DataFrame:
        """One row per record so far, as `Run.metrics`; empty before the first one, and where the
        run directory cannot be seen from here.

        Raises:
            DataError: a record is damaged.
        """
        import pandas

        run = self.run
        return pandas.DataFrame() if run is None else run.metrics

    def wait(self, timeout: float | None = None) -> Run:
        """Return its run when it is done.

        Args:
            timeout: seconds; None = for as long as it takes.

        Raises:
            TimeoutError: it goes on.
            RaygnnError: it ended otherwise, for the reason that it gave: the classes are those
                of `raygnn.train`.
        """
        self._wait(None if timeout is None else time.monotonic() + timeout)
        if not self.over:
            raise TimeoutError(f"{self.name} goes on after {timeout:g} s; it is {self.status}")
        if self.status != "done":
            raise self._error()
        run = self.run
        if run is None:
            raise InputError(
                "the run is done, and its directory cannot be seen from here",
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
    """The facts of the last error in a command's output, see `Display.error`; {} without one."""
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
    """Whether the run directory is of that job, and none of the same name before it, or that
    happens to lie here under the same path."""
    try:
        return run.summary.get("job") == job
    except DataError:
        return False


def opened(path: str | Path) -> Run | None:
    """The run directory, if there is one and it can be seen."""
    try:
        return open_run(path)
    except InputError:
        return None
