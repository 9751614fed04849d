"""Ranks that are frozen: found by the driver, named, and ended, so that all are started again.

A process that was stopped, that hangs in the kernel or in storage, or whose machine swaps, says
nothing, and Ray takes it for well. The others meet it when ``comm.timeout`` ends their wait, and
even then it keeps its place.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raygnn.checkpoint import store
from raygnn.driver import signals
from raygnn.errors import DataError
from raygnn.runs.diagnose.causes import FROZEN, REMEDIES
from raygnn.runs.diagnose.state_file import DONE, FAILURE, STATE, State, file_of, read_state
from raygnn.runs.display import Display
from raygnn.util.files import write_atomic
from raygnn.worker import failures as faults
from raygnn.worker.job import attempts, last_start

_EVERY = 1.0  # seconds between looks; a rank gives a sign of life about as often
_FRESH = 3.0  # seconds for which a sign shows that storage works
_MOST = 3.0  # seconds that one look can add to a silence
_HURRIED = 10.0  # seconds of silence that are enough when another rank's wait has failed
_ANSWER = 60.0  # seconds for another node to answer; sooner Ray may not know that it is lost


@dataclass(frozen=True)
class Sign:
    """A rank's newest sign of life.

    Attributes:
        state: all that it says: a thread that comes to say what it does lives, too.
        awaited: whether there should be more: it neither failed nor came to its end.
    """

    state: State
    awaited: bool = True


class Silence:
    """For how long each rank has given no sign of life, by this process's own clock.

    No clock of a rank counts. Time is added up from look to look, and only while storage works,
    without which no sign could be seen:

    - a look counts if any rank's sign has changed in the last few seconds;
    - if none has, and all that are awaited are on one host, it counts if this process can write
      to the storage itself, and read that back;
    - if none has, of several hosts, it does not: what they have in common is away, not they;
    - one look counts for a few seconds at most, however long ago the last one was: this process
      may have been stopped itself, or waited for storage.
    """

    def __init__(self) -> None:
        self._seen: dict[int, State] = {}
        self._silent: dict[int, float] = {}
        self._looked: float | None = None
        self._moved = 0.0

    def look(
        self, now: float, signs: Mapping[int, Sign], works: Callable[[], bool]
    ) -> dict[int, float]:
        """Seconds of silence of each rank that is awaited.

        Args:
            now: seconds of a monotonic clock.
            signs: of each rank whose sign can be read.
            works: whether this process can use the storage.
        """
        elapsed = 0.0 if self._looked is None else min(now - self._looked, _MOST)
        self._looked = now
        moved = {rank for rank, sign in signs.items() if self._seen.get(rank) != sign.state}
        self._seen.update({rank: signs[rank].state for rank in moved})
        awaited = {rank: sign for rank, sign in signs.items() if sign.awaited}
        if moved:
            self._moved = now
        elif now - self._moved > _FRESH:
            one_host = len({sign.state.start.host for sign in awaited.values()}) == 1
            elapsed = elapsed if one_host and works() else 0.0
        self._silent = {
            rank: 0.0 if rank in moved else self._silent.get(rank, 0.0) + elapsed
            for rank in awaited
        }
        return dict(self._silent)


class _Starts(Protocol):
    """What is to be known of a launch."""

    @property
    def starts(self) -> int: ...


class Heartbeat:
    """Watches the signs of life of a job's ranks; `look` is to be called often.

    Args:
        limit: seconds of silence that no rank may reach.
        launch: counts how often this command started the ranks.
    """

    def __init__(self, run_dir: Path, limit: float, show: Display, launch: _Starts):
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._limit = limit
        self._show = show
        self._launch = launch
        self._attempt = 0
        self._silence = Silence()
        self._met: set[int] = set()  # ranks of this attempt that were seen to
        self._under_way: list[_Ending] = []
        self._next = 0.0

    def look(self) -> None:
        """See to the ranks that are frozen. Storage that cannot be read freezes nobody."""
        now = time.monotonic()
        if now < self._next or self._launch.starts < 1:
            return
        with contextlib.suppress(OSError):
            self._look(now)
        self._next = time.monotonic() + _EVERY

    def _look(self, now: float) -> None:
        if (attempt := attempts(self._run_dir)) != self._attempt:
            self._begin(attempt)
        failures = [f for f in faults.recorded(self._run_dir) if f.attempt == attempt]
        failed = {failure.rank for failure in failures}
        states = self._states()
        signs = {
            rank: Sign(state, state.training.phase != DONE and rank not in failed | self._met)
            for rank, state in states.items()
        }
        silent = self._silence.look(now, signs, self._storage_works)
        hurried = any(failure.is_consequence for failure in failures)
        limit = min(self._limit, _HURRIED) if hurried else self._limit
        for rank, seconds in silent.items():
            if seconds >= limit:
                self._met.add(rank)
                self._under_way.append(_Ending(self._run_dir, states[rank], seconds, self._show))
        self._under_way = [ending for ending in self._under_way if not ending.is_over()]

    def _begin(self, attempt: int) -> None:
        """What was frozen in an earlier start shall not be taken for what ends this one."""
        for failure in faults.recorded(self._run_dir):
            if failure.kind == FROZEN and failure.attempt != attempt:
                file_of(self._logs, failure.rank, FAILURE).unlink(missing_ok=True)
        self._attempt, self._silence, self._met = attempt, Silence(), set()

    def _states(self) -> dict[int, State]:
        """The ranks' states in this start, as far as they can be read."""
        found = {}
        for path in self._logs.glob(f"rank-*{STATE}"):
            with contextlib.suppress(DataError):
                state = read_state(path)
                if state is not None and state.start.attempt == self._attempt:
                    found[state.start.rank] = state
        return found

    def _storage_works(self) -> bool:
        file, token = self._logs / ".heartbeat", uuid.uuid4().hex
        try:
            write_atomic(file, token)
            return file.read_text() == token
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                file.unlink()


class _Ending:
    """A rank that seems to be frozen: make sure of it, say so, and end it.

    Only a process that is still there is frozen: one that has gone is Ray's to tell of.
    """

    def __init__(self, run_dir: Path, state: State, silent: float, show: Display):
        self._run_dir = run_dir
        self._state = state
        self._silent = silent
        self._show = show
        self._file = file_of(run_dir / "logs", state.start.rank, STATE)
        self._there: signals.Sent | None = None
        self._deadline = 0.0
        self._told = False

    def is_over(self) -> bool:
        """Do what can be done now; whether that was all."""
        if self._there is None:
            return self._begin()
        try:
            answer = self._there.answer()
        except Exception as error:
            return self._fail(f"{type(error).__name__}: {error}".splitlines()[0])
        if answer is None and time.monotonic() < self._deadline:
            return False
        if answer is None:
            self._there.give_up()
            return self._fail(f"its node has not answered for {_ANSWER:g} s")
        if self._told or not answer or self._moved():
            return True
        self._tell()
        return self._ask(signal.SIGKILL)

    def _begin(self) -> bool:
        start = self._state.start
        if start.host == socket.gethostname():
            try:
                if signals.send(self._file, start.pid, 0) and not self._moved():
                    self._tell()
                    signals.send(self._file, start.pid, signal.SIGKILL)
                    return True
            except PermissionError:
                pass  # Ray may be another user's
        return self._ask(0)  # it has gone, or is in another container

    def _ask(self, number: int) -> bool:
        """Let the rank's node send it a signal; whether nobody can be asked."""
        start = self._state.start
        node = (last_start(self._run_dir / "logs", start.rank) or {}).get("node")
        if node is None:
            return True
        self._deadline = time.monotonic() + _ANSWER
        try:
            self._there = signals.Sent(node, self._file, start.pid, number)
        except Exception as error:
            return self._fail(f"{type(error).__name__}: {error}".splitlines()[0])
        return False

    def _moved(self) -> bool:
        """Whether there was a sign of life in the meantime."""
        try:
            return read_state(self._file) != self._state
        except DataError:
            return True

    def _fail(self, why: str) -> bool:
        rank, host = self._state.start.rank, self._state.start.host
        if self._told:
            self._show.note(f"rank {rank} could not be ended: {why}")
        else:
            self._show.note(
                f"rank {rank} on {host} gave no sign of life for {self._silent:.0f} s, and cannot "
                f"be ended: {why}"
            )
        return True

    def _tell(self) -> None:
        """To the user, and to those who ask later, on behalf of the rank."""
        self._told = True
        start, place = self._state.start, self._state.training
        phase = f"phase {place.phase}" if place.phase else "no phase yet"
        if place.step is not None:
            phase += f", epoch {place.epoch}, step {place.step}"
        if place.wall:
            phase += time.strftime(", since %H:%M:%S", time.localtime(place.wall))
        what = (
            f"rank {start.rank} gave no sign of life for {self._silent:.0f} s while storage "
            "worked: it is frozen"
        )
        where = f"{start.host}, pid {start.pid}, {phase}"
        faults.record(
            self._run_dir,
            faults.Failure(
                rank=start.rank,
                time=time.time(),
                what=what,
                trace="",
                remedy=REMEDIES["frozen"],
                where=where,
                reached=store.newest(self._run_dir / "checkpoints"),
                kind=FROZEN,
                attempt=start.attempt,
            ),
        )
        faults.log_failure(self._run_dir, start.rank, f"{what} ({where})")
        self._show.note(f"{what} ({where}); its process is ended, to start again")
