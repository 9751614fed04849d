"""Feeding one logger from a thread of its own: what fails is tried again, what hangs is told."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from raygnn.config.places import without_users
from raygnn.driver.loggers.kinds import Kind, Status
from raygnn.runs.metrics_files import MetricsTail, Record
from raygnn.runs.run_directory import METRICS

_POLL = 0.5  # seconds between looks at the records
_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds until another try after one that failed
_SILENT = 60.0  # seconds in one call until that is told
_SHOWN = 300  # characters of an error


class Feeder(threading.Thread):
    """Hands the records of a run to a logger in order; a daemon.

    Args:
        run: its directory.
        tell: takes a sentence for the user.
        step: of the first record that is not of an earlier command.

    Attributes:
        done: whether the logger has got all records, and ended.
    """

    def __init__(self, kind: Kind, run: Path, tell: Callable[[str], None], step: int):
        super().__init__(name=kind.name, daemon=True)
        self.done = False
        self._kind = kind
        self._tell = tell
        self._file = run / METRICS
        self._step = -1 if kind.whole or kind.fresh else step
        self._tail, self._order = MetricsTail(self._file), Order()
        self._waiting: deque[Record] = deque()
        self._reopen = self._unflushed = False
        self._failing = False
        self._status: Status | None = None
        self._ended = threading.Event()
        self._since: float | None = None  # when the present call began
        self._silent = False

    def finish(self, status: Status) -> None:
        """Log what there is, and end."""
        self._status = status
        self._ended.set()

    def look(self) -> None:
        """Say that the logger does not come back, if it has not for long."""
        since = self._since
        if since is not None and time.monotonic() - since > _SILENT and not self._silent:
            self._silent = True
            self._tell(f"{self.name} has not answered for {_SILENT:.0f} s; training goes on")

    def run(self) -> None:
        pause = _PAUSE
        while True:
            last = self._ended.is_set()
            worked = self._try(last)
            if last:
                self.done = worked
                return
            self._ended.wait(_POLL if worked else pause)
            pause = _PAUSE if worked else min(2 * pause, _LONGEST_PAUSE)

    def _try(self, last: bool) -> bool:
        """Log what there is; whether that worked."""
        self._since = time.monotonic()
        try:
            self._log()
            if last:
                self._kind.close(self._status)
        except Exception as error:
            if not self._failing:
                said = without_users(f"{type(error).__name__}: {error}")
                reason = " ".join(said.split())[:_SHOWN]
                self._tell(f"{self.name} gets no records: {reason}; training goes on")
            self._failing = True
            self._reopen |= not self._kind.remote  # a file may have got half a record
            return False
        finally:
            self._since = None
        if self._failing or self._silent:
            self._tell(f"{self.name} gets records again")
        self._failing = self._silent = False
        return True

    def _log(self) -> None:
        kind = self._kind
        while self._waiting or self._take():
            if self._reopen:
                self._close()
                continue
            if kind.logger is None:
                kind.open(int(self._waiting[0]["step"]))
            self._unflushed = True
            kind.log(self._waiting[0])
            self._waiting.popleft()
        if self._unflushed:
            kind.flush()
        self._unflushed = False

    def _take(self) -> bool:
        """Read on; whether there is something to log."""
        while records := self._tail.poll():
            records = [record for record in records if isinstance(record.get("step"), int)]
            if (back := self._order.goes_back(records)) is not None:
                self._step = min(self._step, back)
                self._reopen = True
            self._waiting.extend(record for record in records if record["step"] >= self._step)
            if self._waiting:
                return True
        return False

    def _close(self) -> None:
        self._reopen = False
        if self._kind.whole:
            self._waiting.clear()
            self._tail, self._order = MetricsTail(self._file), Order()
        self._kind.close()


class Order:
    """Notices that a run went on from an earlier step."""

    def __init__(self) -> None:
        self._step = -1
        self._kinds: set[frozenset[str]] = set()  # which values the records of that step had

    def goes_back(self, records: Sequence[Record]) -> int | None:
        """The step, if it did."""
        back = [record["step"] for record in records if self._is_back(record)]
        return min(back) if back else None

    def _is_back(self, record: Record) -> bool:
        step, values = record["step"], frozenset(record)
        again = step < self._step or (step == self._step and values in self._kinds)
        self._kinds = {values} if step != self._step else self._kinds | {values}
        self._step = step
        return again
