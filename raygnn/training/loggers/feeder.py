"""Feeding one logger from a thread of its own: what it does not take waits, what hangs is told."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from raygnn.config.secret import without_users
from raygnn.runs.metrics import Record
from raygnn.training.loggers.kinds import Kind, Status

_MOST_WAITING = 50_000  # records
_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds until another try after one that failed
_SILENT = 60.0  # seconds in one call until that is told
_SHOWN = 300  # characters of an error


class Feeder(threading.Thread):
    """Hands records to a logger in order, one try after another; a daemon.

    Args:
        tell: takes a sentence for the user.
        step: of the first record that is not of an earlier command.
    """

    def __init__(self, kind: Kind, tell: Callable[[str], None], step: int | None):
        super().__init__(name=f"raygnn-{kind.name}", daemon=True)
        self._kind = kind
        self._tell = tell
        self._step = step
        self._waiting: deque[Record] = deque()
        self._reopen = False
        self._lost = 0
        self._failing = False
        self._status: Status | None = None
        self._since: float | None = None  # when the present call began
        self._silent = False
        self._change = threading.Condition()

    def add(self, records: Iterable[Record]) -> None:
        """More to log."""
        with self._change:
            for record in records:
                self._waiting.append(record)
                if len(self._waiting) > _MOST_WAITING:
                    self._waiting.popleft()
                    self._lost += 1
            self._change.notify()

    def go_back(self, step: int, records: Iterable[Record]) -> None:
        """The run went on from an earlier step: what was logged from here on is replaced.

        Args:
            records: to log now.
        """
        with self._change:
            self._step, self._reopen = step, True
            self._waiting.clear()
            self._change.notify()
        self.add(records)

    def finish(self, status: Status) -> None:
        """Log what waits, and end."""
        with self._change:
            self._status = status
            self._change.notify()

    def look(self) -> None:
        """Say that the logger does not come back, if it has not for long."""
        since = self._since
        if since is not None and time.monotonic() - since > _SILENT and not self._silent:
            self._silent = True
            self._tell(f"{self._kind.name} has not answered for {_SILENT:.0f} s; training goes on")

    def has_room(self) -> bool:
        """Whether more can come and nothing is lost; a logger that fails is not waited for."""
        return self._failing or self._silent or len(self._waiting) < _MOST_WAITING // 2

    def left(self) -> int:
        """Records that it has not got."""
        return self._lost + len(self._waiting)

    def run(self) -> None:
        pause = _PAUSE
        while True:
            with self._change:
                while not (self._waiting or self._reopen or self._status):
                    self._change.wait()
                last = self._status is not None
            worked = self._try()
            if last:
                return
            if worked:
                pause = _PAUSE
                continue
            with self._change:
                self._change.wait_for(lambda: self._status is not None, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try(self) -> bool:
        """Log what waits; whether that worked."""
        self._since = time.monotonic()
        try:
            self._log()
        except Exception as error:
            if not self._failing:
                said = without_users(f"{type(error).__name__}: {error}")
                reason = " ".join(said.split())[:_SHOWN]
                self._tell(f"{self._kind.name} gets no records: {reason}; training goes on")
            self._failing = True
            return False
        finally:
            self._since = None
        if self._failing or self._silent:
            self._tell(f"{self._kind.name} gets records again")
        self._failing = self._silent = False
        return True

    def _log(self) -> None:
        kind = self._kind
        with self._change:
            reopen, self._reopen = self._reopen, False
        if reopen:
            kind.close()
        if kind.logger is None and self._waiting:
            kind.open(self._step)
        while self._waiting and not self._reopen:
            with self._change:
                record = self._waiting[0] if self._waiting else None
            if record is None:
                break
            kind.log(record)
            with self._change:
                # it may have been dropped meanwhile
                if self._waiting and self._waiting[0] is record:
                    self._waiting.popleft()
        if kind.logger is not None:
            kind.flush()
        if self._status is not None and not self._waiting:
            kind.close(self._status)
