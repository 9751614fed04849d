"""Crash recorder of a rank, for ``raygnn diagnose``: state file, crash dump, traceback of a crash.

A process has at most one recorder. The functions of the module do nothing without one, so that any
code may call them, also in a rank that a test runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil

from raygnn.errors import DataError
from raygnn.graph.available_memory import memory
from raygnn.runs.diagnose.state_file import (
    BOX,
    CRASH,
    DONE,
    FAILURE,
    LIFE,
    PREFETCH,
    STATE,
    TRAINING,
    WORDS,
    Life,
    RankAttempt,
    State,
    ThreadPhase,
    file_of,
    pack_words,
    read_state,
)
from raygnn.util.files import write_atomic
from raygnn.worker.blackbox import flight
from raygnn.worker.control import RankProgress

PREFETCH_THREAD = "raygnn-prefetch"
TEST = "test"  # the phase after training

_SLOW = 1e-3  # seconds of a write above which only the watcher writes
_APART = 5e-3  # seconds between a thread's own writes; the watcher writes the rest
_LARGEST = 900_000  # characters of a crash dump
_LONGEST = 4000  # characters of a reason
_WITNESSES = 3.0  # seconds that a failed rank waits for the other ranks' crash dumps
_POLL = 0.1
_LATE = 0.8  # share of the timeout that a collective may wait before a crash dump is written


class Recorder:
    """Records this rank's phases in ``logs``, so that a failure can be explained afterwards.

    A lack of storage raises nothing here: training continues without records. The state file is not
    memory-mapped, since a page that a full disk cannot store ends the process (SIGBUS).

    Args:
        command: when the command began, seconds since the epoch.
        timeout: of a collective, seconds.
        own: top-level packages of the user's classes.
    """

    def __init__(
        self,
        logs: Path,
        *,
        rank: int,
        world: int,
        attempt: int = 1,
        command: float = 0.0,
        timeout: float = 1800.0,
        own: Collection[str] = (),
    ):
        self._logs = logs
        self._own = own
        self._timeout = timeout
        self._training = threading.get_ident()
        host = socket.gethostname()
        self._start = RankAttempt(attempt, rank, world, os.getpid(), command, time.time(), host)
        self._places = {TRAINING: ThreadPhase(), PREFETCH: ThreadPhase()}
        self._life = self._breath(0.0)
        self._written = {TRAINING: 0.0, PREFETCH: 0.0}  # when, by the monotonic clock
        self._lock = threading.RLock()  # of the file; held briefly, since `note` waits for it
        self._boxing = threading.Lock()  # one crash dump at a time
        self._batch: Callable[[], Any] | None = None
        self._before: dict[str, Any] | None = None
        self._final = False  # the crash dump is of this rank's own failure
        self._oom_kills = oom_kills()
        self._seen = self._signs()  # of an earlier start
        self._next_look = 0.0
        self._file = self._open()
        self._slow = self._cost() > _SLOW
        self._crash = self._catch_crashes()

    def note(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Record the phase that this thread begins; None keeps the epoch or step.

        Only the training thread and the prefetch thread are recorded. A phase may reach the file
        with the next `watch`, since most are too short for a write.
        """
        at = self._slot()
        if at is None:
            return
        last = self._places[at]
        place = ThreadPhase(
            phase,
            last.epoch if epoch is None else epoch,
            last.step if step is None else step,
            time.time(),
            time.monotonic(),
        )
        self._places[at] = place
        if not self._slow and place.mono - self._written[at] >= _APART:
            self._write_place(at)

    def remember(self, describe: Callable[[], Any]) -> None:
        """Keep the function that describes the current batch as plain JSON, if that is needed."""
        self._batch = describe

    def progress(self) -> RankProgress:
        """Return the heartbeat for the driver."""
        start, place = self._start, self._places[TRAINING]
        rank = (start.attempt, start.rank, start.host, start.pid)
        return RankProgress(*rank, place.phase, place.epoch, place.step, place.wall)

    def watch(self) -> None:
        """Update the state file, and write a crash dump if another rank failed or a collective
        has waited for most of its timeout. Call it about once a second."""
        self._life = self._breath(self._life.boxed)
        self._write(LIFE, self._life.pack())
        self._write_places()
        signs = self._signs()
        news = {name for name, stamp in signs.items() if self._seen.get(name) != stamp}
        self._seen = signs
        if news:
            other = min(news).partition(".")[0].replace("-", " ")
            self.write(f"{other} recorded a failure")
        elif time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._timeout / 10
            if not self._life.boxed and (waited := flight.longest_wait()) > _LATE * self._timeout:
                self.write(f"a collective has waited for {waited:.0f} s")

    def write(self, reason: str, *, final: bool = False) -> None:
        """Write the crash dump, in place of an earlier one. ``final``: ``reason`` is this rank's
        own failure; later calls write nothing."""
        with self._boxing:
            if self._final:
                return
            self._final = final
            self._write_places()
            if final:
                self._write(WORDS, pack_words(reason))
            with contextlib.suppress(OSError):
                path = file_of(self._logs, self._start.rank, BOX)
                write_atomic(path, self._content(reason[:_LONGEST], times=1 if final else 4))
                self._life = self._breath(time.time())
                self._write(LIFE, self._life.pack())
                self._sync()

    def await_others(self, seconds: float = _WITNESSES) -> None:
        """Wait until the other ranks have written their crash dumps, or have ended; bounded."""
        deadline = time.monotonic() + seconds
        others = [r for r in range(self._start.world) if r != self._start.rank]
        while others and self._file is not None and time.monotonic() < deadline:
            others = [rank for rank in others if self._is_awaited(rank)]
            time.sleep(_POLL if others else 0)

    def close(self) -> None:
        """Record that the rank has finished."""
        self.note(DONE)
        with self._lock:
            self._write_places()
            if self._crash is not None:
                faulthandler.enable()  # to standard error, where Ray wants it
                self._crash.close()
                self._crash = None
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _slot(self) -> int | None:
        if threading.get_ident() == self._training:
            return TRAINING
        return PREFETCH if threading.current_thread().name == PREFETCH_THREAD else None

    def _breath(self, boxed: float) -> Life:
        return Life(time.time(), time.monotonic(), *memory_usage(), boxed)

    def _is_awaited(self, rank: int) -> bool:
        try:
            state = read_state(file_of(self._logs, rank, STATE))
        except DataError:
            return False
        if state is None or state.start.attempt != self._start.attempt:
            return True
        if state.life.boxed or state.training.phase == DONE:
            return False
        return state.start.host != self._start.host or Path(f"/proc/{state.start.pid}").exists()

    def _signs(self) -> dict[str, int]:
        """Return the other ranks' failure records and crash dumps, with their times."""
        mine = f"rank-{self._start.rank}."
        found = {}
        with contextlib.suppress(OSError), os.scandir(self._logs) as entries:
            for entry in entries:
                if entry.name.endswith((FAILURE, BOX)) and not entry.name.startswith((mine, ".")):
                    found[entry.name] = entry.stat().st_mtime_ns
        return found

    def _content(self, reason: str, times: int) -> str:
        roles = {self._training: "training"}
        roles |= {
            thread.ident: "prefetch"
            for thread in threading.enumerate()
            if thread.name == PREFETCH_THREAD and thread.ident is not None
        }
        box: dict[str, Any] = {
            **{name: getattr(self._start, name) for name in ("rank", "attempt", "world", "host")},
            "time": time.time(),
            "reason": reason,
            "training": self._places[TRAINING].__dict__,
            "prefetch": self._places[PREFETCH].__dict__,
            "memory": dict(zip(("rss", "used", "limit"), memory_usage())),
            "oom_kills": oom_kills() - self._oom_kills,
            "batch": self._described(),
            "collectives": flight.collectives(self._own),
            "threads": flight.sample(roles, self._own, times=times),
            "before": self._before,  # the previous crash dump's collectives
        }
        self._before = {key: box[key] for key in ("time", "reason", "collectives")}
        text = json.dumps(box, default=str)
        for name in ("before", "batch", "threads", "collectives"):
            if len(text) > _LARGEST:
                text = json.dumps({**box, name: None}, default=str)
                box[name] = None
        return text

    def _described(self) -> Any:
        try:
            return None if self._batch is None else self._batch()
        except Exception as error:
            return f"cannot be described: {type(error).__name__}: {error}"

    def _open(self) -> int | None:
        with contextlib.suppress(OSError):
            path = file_of(self._logs, self._start.rank, STATE)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            data = replace(State(self._start), life=self._life).pack()
            if os.pwrite(file, data, 0) == len(data):
                return file
            os.close(file)
        return None

    def _cost(self) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            self._write(TRAINING, ThreadPhase().pack())
            times.append(time.perf_counter() - begin)
        return min(times)

    def _write(self, at: int, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                os.pwrite(self._file, data, at)

    def _sync(self) -> None:
        with self._lock:  # released for the sync, since that can take long
            if self._file is None:
                return
            copy = os.dup(self._file)
        try:
            os.fsync(copy)
        finally:
            os.close(copy)

    def _write_place(self, at: int) -> None:
        with self._lock:  # read under the lock, so that no older value replaces a newer one
            self._written[at] = time.monotonic()
            self._write(at, self._places[at].pack())

    def _write_places(self) -> None:
        for at in self._places:
            self._write_place(at)

    def _catch_crashes(self) -> IO[str] | None:
        """Let SIGSEGV, SIGABRT and similar signals write a traceback of all threads to a file."""
        with contextlib.suppress(OSError, ValueError):
            path = file_of(self._logs, self._start.rank, CRASH)
            file = open(path, "a")  # noqa: SIM115
            file.write(f"start {self._start.attempt} pid {self._start.pid}\n")
            file.flush()
            # a second `enable` alone would keep a handler that Ray's core has installed since
            faulthandler.disable()
            faulthandler.enable(file)
            return file
        return None


def memory_usage() -> tuple[int, int, int]:
    """Return the bytes resident in this process, used of the machine or container, and in all."""
    total, available = memory()
    return psutil.Process().memory_info().rss, total - available, total


def oom_kills() -> int:
    """Return the number of processes that this machine has killed for memory; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


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
