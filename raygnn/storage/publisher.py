"""Brings what a run writes on this machine to the place where runs are kept."""

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

_EVERY = 5.0  # seconds between looks for what has changed
_RATE = 2**20  # bytes a second that files cost which grow

log = logging.getLogger("raygnn")


class Publisher:
    """Brings the files of a directory to a place, as they change, in a thread of its own. A place
    that is away is tried again until it takes them; meanwhile they wait where they are.

    Args:
        tell: is told, once, that the place takes nothing, and when it does again.
        is_lost: whether the place is another command's by now.
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
        """Begin.

        Args:
            known: files that the place has, as `bring` found them.
        """
        self._sent = {name: (stat, 0.0) for name, stat in known.items() if travels(name)}
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        """Bring all that is left, for at most so long; whether all is there."""
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
                log.warning("the run's files wait", exc_info=True)
            if self._ended.wait(_EVERY):
                return

    def _round(self, *, at_end: bool = False) -> bool:
        """Bring what has changed; whether there was no failure."""
        files, now = files_of_run(self._directory), time.monotonic()
        gone = [name for name in self._sent if name not in files]
        due = [n for n, stat in files.items() if at_end or self._is_due(n, stat, now)]
        due = [n for n in due if n not in self._sent or self._sent[n][0] != files[n]]
        due.sort(key=lambda name: name != FIRST)
        try:
            for name in due[:1]:  # whether the place is there, before many wait for it
                self._send(name, files[name])
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda name: self._send(name, files[name]), due[1:]))
                list(pool.map(self._remove, gone))
        except DataError as error:
            if not self._failing:
                self._tell(
                    f"what the run writes waits in {self._directory}: {error.where}: {error.what}"
                )
            self._failing = True
            return False
        if self._failing and (due or gone):
            self._tell(f"what the run writes is brought to {self._place} again")
            self._failing = False
        return True

    def _is_due(self, name: str, stat: Stat, now: float) -> bool:
        """Whether a file that has changed is brought now: the larger, the more seldom."""
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
