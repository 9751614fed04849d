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
import timeit
from collections.abc import Sequence
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
    STATE,
    State,
    file_of,
    read_state,
)
from raygnn.util.files import write_atomic
from raygnn.worker.blackbox import flight
from raygnn.worker.control import RankProgress

TEST = "test"  # the phase after training

_SLOW = 1e-3  # seconds of a write above which only the watcher writes
_APART = 5e-3  # seconds between writes of phases; the watcher writes the rest
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
        own: path suffixes of the user's modules.
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
        own: Sequence[str] = (),
    ):
        self._logs = logs
        self._own = own
        self._timeout = timeout
        self._training = threading.get_ident()
        host = socket.gethostname()
        self._state = State(attempt, rank, world, os.getpid(), command, time.time(), host)
        self._at: tuple[str, int | None, int | None, float] = ("", None, None, 0.0)
        self._lock = threading.RLock()  # of the file; held briefly, since `note` waits for it
        self._boxing = threading.Lock()  # one crash dump at a time
        self._before: dict[str, Any] | None = None
        self._final = False  # the crash dump is of this rank's own failure
        self._oom_kills = oom_kills()
        self._seen = self._signs()  # of an earlier start
        self._next_look = 0.0
        self._file = self._open()
        self._beat()
        self._slow = min(timeit.repeat(self._write, number=1, repeat=3)) > _SLOW
        self._written = 0.0  # when a phase was, by the monotonic clock
        self._crash = self._catch_crashes()

    def note(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Record the phase that the training thread begins; None keeps the epoch or step. Other
        threads record nothing.

        A phase may reach the file with the next `watch`, since most are too short for a write.
        """
        if threading.get_ident() != self._training:
            return
        _, last_epoch, last_step, _ = self._at
        epoch, step = last_epoch if epoch is None else epoch, last_step if step is None else step
        self._at = phase, epoch, step, time.time()
        if not self._slow and time.monotonic() - self._written >= _APART:
            self._write()

    def progress(self) -> RankProgress:
        """Return the heartbeat for the driver."""
        state = self._state
        return RankProgress(state.attempt, state.rank, state.host, state.pid, *self._at)

    def watch(self) -> None:
        """Update the state file, and write a crash dump if another rank failed or a collective
        has waited for most of its timeout. Call it about once a second."""
        self._beat()
        signs = self._signs()
        news = {name for name, stamp in signs.items() if self._seen.get(name) != stamp}
        self._seen = signs
        if news:
            other = min(news).partition(".")[0].replace("-", " ")
            self.write(f"{other} recorded a failure")
        elif time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._timeout / 10
            if not self._state.boxed and (waited := flight.longest_wait()) > _LATE * self._timeout:
                self.write(f"a collective has waited for {waited:.0f} s")

    def write(self, reason: str, *, final: bool = False) -> None:
        """Write the crash dump, in place of an earlier one. ``final``: ``reason`` is this rank's
        own failure; later calls write nothing."""
        with self._boxing:
            if self._final:
                return
            self._final = final
            self._beat(words=reason if final else "")
            with contextlib.suppress(OSError):
                path = file_of(self._logs, self._state.rank, BOX)
                write_atomic(path, self._content(reason[:_LONGEST]))
                self._beat(boxed=time.time())
                if (file := self._file) is not None:
                    os.fsync(file)  # without the lock of the file, since that can take long

    def await_others(self, seconds: float = _WITNESSES) -> None:
        """Wait until the other ranks have written their crash dumps, or have ended; bounded."""
        deadline = time.monotonic() + seconds
        others = [r for r in range(self._state.world) if r != self._state.rank]
        while others and self._file is not None and time.monotonic() < deadline:
            others = [rank for rank in others if self._is_awaited(rank)]
            time.sleep(_POLL if others else 0)

    def close(self) -> None:
        """Record that the rank has finished."""
        self.note(DONE)
        with self._lock:
            self._write()
            if self._crash is not None:
                faulthandler.enable()  # to standard error, where Ray wants it
                self._crash.close()
                self._crash = None
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _is_awaited(self, rank: int) -> bool:
        try:
            state = read_state(file_of(self._logs, rank, STATE))
        except DataError:
            return False
        if state is None or state.attempt != self._state.attempt:
            return True
        if state.boxed or state.phase == DONE:
            return False
        return state.host != self._state.host or Path(f"/proc/{state.pid}").exists()

    def _signs(self) -> dict[str, int]:
        """Return the other ranks' failure records and crash dumps, with their times."""
        mine = f"rank-{self._state.rank}."
        found = {}
        with contextlib.suppress(OSError), os.scandir(self._logs) as entries:
            for entry in entries:
                if entry.name.endswith((FAILURE, BOX)) and not entry.name.startswith((mine, ".")):
                    found[entry.name] = entry.stat().st_mtime_ns
        return found

    def _content(self, reason: str) -> str:
        box: dict[str, Any] = {
            **{name: value for name, value in vars(self._state).items() if name != "words"},
            "time": time.time(),
            "reason": reason,
            "oom_kills": oom_kills() - self._oom_kills,
            "collectives": flight.collectives(self._own),
            "threads": flight.stacks(self._training, self._own),
            "before": self._before,  # the previous crash dump's collectives
        }
        self._before = {key: box[key] for key in ("time", "reason", "collectives")}
        text = json.dumps(box, default=str)
        for name in ("before", "threads", "collectives"):
            if len(text) > _LARGEST:
                box[name] = None
                text = json.dumps(box, default=str)
        return text

    def _open(self) -> int | None:
        with contextlib.suppress(OSError):
            path = file_of(self._logs, self._state.rank, STATE)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return None

    def _beat(self, **facts: Any) -> None:
        """Write the state, with the memory in use now and these attributes."""
        names = ("rss", "used", "limit")
        self._write(beat=time.time(), **dict(zip(names, memory_usage())), **facts)

    def _write(self, **facts: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._written = time.monotonic()
            # read under the lock, so that no older phase replaces a newer one
            facts |= zip(("phase", "epoch", "step", "since"), self._at)
            self._state = replace(self._state, **facts)
            if self._file is not None:
                os.pwrite(self._file, self._state.pack(), 0)

    def _catch_crashes(self) -> IO[str] | None:
        """Let SIGSEGV, SIGABRT and similar signals write a traceback of all threads to a file."""
        with contextlib.suppress(OSError, ValueError):
            path = file_of(self._logs, self._state.rank, CRASH)
            file = open(path, "a")  # noqa: SIM115
            file.write(f"start {self._state.attempt} pid {self._state.pid}\n")
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
    """Create this process's recorder; for the options see `Recorder`."""
    global _current
    _current = Recorder(logs, **options)
    return _current


def note(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """See `Recorder.note`."""
    if _current is not None:
        _current.note(phase, epoch=epoch, step=step)


def tidy(logs: Path) -> None:
    """Remove the files that only a failure needs, after a run that finished."""
    for path in logs.glob(f"rank-*{STATE}"):
        path.unlink(missing_ok=True)
    for path in logs.glob(f"rank-*{CRASH}"):
        if "Fatal" not in path.read_text(errors="replace"):
            path.unlink(missing_ok=True)
