"""Uploads a run directory to an object store while the run is in progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raygnn.errors import DataError
from raygnn.storage.remote import RemotePath, Stat
from raygnn.storage.replica import AT_ONCE, FIRST, files_of_run, travels

_EVERY = 5.0  # seconds between checks for changed files
_RATE = 2**20  # bytes per second that a growing file is uploaded with

log = logging.getLogger("raygnn")


class Publisher:
    """Uploads the files of a directory as they change, in a thread. If the store is unreachable, it
    tries again until uploads succeed.

    Args:
        tell: called once when uploads start to fail, and once when they succeed again.
        is_lost: returns True if another command has taken over the run.
    """

    def __init__(
        self,
        directory: Path,
        place: RemotePath,
        tell: Callable[[str], object],
        is_lost: Callable[[], bool],
    ):
        self._directory = directory
        self._place = place
        self._tell = tell
        self._is_lost = is_lost
        self._sent: dict[str, tuple[Stat, float]] = {}  # and when, by the monotonic clock
        self._failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raygnn-publisher", daemon=True)

    def start(self, known: Mapping[str, Stat]) -> None:
        """Start the thread; ``known``: files in the store, as `bring` found them."""
        self._sent = {name: (stat, 0.0) for name, stat in known.items() if travels(name)}
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        """Upload what is left, for at most so long; returns True if all is in the store."""
        self._ended.set()
        deadline = time.monotonic() + seconds
        self._thread.join(seconds)
        while not self._thread.is_alive() and not self._is_lost():
            if self._round(at_end=True):
                return True
            if time.monotonic() >= deadline:
                break
            time.sleep(min(_EVERY, seconds))
        return False

    def _run(self) -> None:
        while not self._is_lost():
            try:
                self._round()
            except Exception:
                log.warning("the run's files could not be uploaded; retrying", exc_info=True)
            if self._ended.wait(_EVERY):
                return

    def _round(self, *, at_end: bool = False) -> bool:
        """Upload changed files; returns True if none failed."""
        files, now = files_of_run(self._directory), time.monotonic()
        gone = [name for name in self._sent if name not in files]
        due = [n for n, stat in files.items() if at_end or self._is_due(n, stat, now)]
        due = [n for n in due if n not in self._sent or self._sent[n][0] != files[n]]
        due.sort(key=lambda name: name != FIRST)
        try:
            for name in due[:1]:  # checks the connection before many wait for it
                self._send(name, files[name])
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda name: self._send(name, files[name]), due[1:]))
                list(pool.map(self._remove, gone))
        except DataError as error:
            if not self._failing:
                why = f"{error.where}: {error.what}"
                self._tell(f"uploads fail, and the run's files wait in {self._directory}: {why}")
            self._failing = True
            return False
        if self._failing and (due or gone):
            self._tell(f"the run's files are uploaded to {self._place} again")
            self._failing = False
        return True

    def _is_due(self, name: str, stat: Stat, now: float) -> bool:
        """True if a changed file is uploaded now; larger files are uploaded less often."""
        return name not in self._sent or now - self._sent[name][1] >= stat.st_size / _RATE

    def _send(self, name: str, stat: Stat) -> None:
        try:
            (self._place / name).upload(self._directory / name)
        except FileNotFoundError:
            return  # removed this moment
        self._sent[name] = stat, time.monotonic()

    def _remove(self, name: str) -> None:
        (self._place / name).remove()
        del self._sent[name]
