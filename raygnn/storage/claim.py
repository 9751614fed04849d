"""The claim of a run's name in a place without locks.

Who wants the name puts a file of its own into ``<run>/.claims/``, and looks afterwards who else has
one there: of two, the one whose file came later sees the other's, and gives way. That takes no more
than that a place lists what was written before, as S3, Google's, Azure's and HDFS do. A holder
writes its file again every few seconds; one that has not for long, by the place's own clock, gives
way, and finds its file gone when it comes back.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict

from raygnn.errors import DataError, InputError
from raygnn.storage.remote import RemotePath, Stat
from raygnn.util.locks import Holder, parse_holder

CLAIMS = ".claims"
BEAT = 20.0  # seconds between signs of life
SILENCE = 90.0  # seconds without one after which a claim is stale
_LOOK = 1.0  # seconds between looks for one
_TRIES = 8  # of commands that want the name at the same moment
_NS = 1e9


class Claim:
    """Held from :meth:`acquire` until :meth:`release`, or until it is :attr:`lost`.

    Attributes:
        lost: whether another command has taken it over.
        stale: whose claim gave way to this one, if one did.
    """

    def __init__(self, run: RemotePath):
        self._run = run
        self._directory = run / CLAIMS
        self._name = uuid.uuid4().hex
        self._stale: set[str] = set()
        self._released = threading.Event()
        self._beats: threading.Thread | None = None
        self.lost = False
        self.stale: str | None = None

    def acquire(self, tell: Callable[[str], object] = lambda text: None) -> None:
        """Take it; a holder that may be dead is waited for.

        Args:
            tell: is told for whom, and how long.

        Raises:
            InputError: another command has it.
            DataError: the place cannot be read or written.
        """
        for _ in range(_TRIES):
            self._write()
            others = {n: s for n, s in self._directory.files().items() if n not in self._stale}
            mine = others.pop(self._name, None)
            if mine is not None and not others:
                self._beats = threading.Thread(target=self._beat, name="raygnn-claim", daemon=True)
                self._beats.start()
                return
            (self._directory / self._name).remove()
            for name, seen in others.items():
                self._await_end(name, seen, mine, tell)
            time.sleep(random.random())
        raise self._busy(_name(None))

    def release(self) -> None:
        """Give it back; harmless when not held."""
        self._released.set()
        if self._beats is not None:
            self._beats.join()
            self._beats = None
            with contextlib.suppress(DataError):  # it is stale soon
                (self._directory / self._name).remove()

    def _await_end(
        self, name: str, seen: Stat, mine: Stat | None, tell: Callable[[str], object]
    ) -> None:
        """Wait until another's claim is gone, or stale.

        Raises:
            InputError: it gives a sign of life.
        """
        file, began = self._directory / name, time.monotonic()
        holder = None
        with contextlib.suppress(DataError):
            holder = parse_holder(file.read_bytes())
        age = 0.0 if mine is None else (mine.st_mtime_ns - seen.st_mtime_ns) / _NS
        who = _name(holder)
        if holder is None or holder.alive():
            seconds = max(0.0, SILENCE - age)
            tell(f"{who} holds {self._run}: waiting up to {seconds:.0f} s for a sign of life")
        while holder is None or holder.alive():
            if not file.is_file():
                return
            if file.stat() != seen:
                raise self._busy(who)
            if seen.st_mtime_ns and age + time.monotonic() - began > SILENCE:
                break
            time.sleep(_LOOK)
        self.stale = who
        self._stale.add(name)
        file.remove()

    def _beat(self) -> None:
        mine = self._directory / self._name
        while not self._released.wait(BEAT):
            with contextlib.suppress(DataError):  # the place is away for a while
                if not mine.is_file():
                    self.lost = True
                    return
                self._write()
                for name in self._stale:  # written again while it was taken over
                    (self._directory / name).remove()

    def _write(self) -> None:
        (self._directory / self._name).write(json.dumps(asdict(Holder.here())).encode())

    def _busy(self, who: str) -> InputError:
        return InputError(
            f"{who} is writing into this run",
            where=str(self._run),
            remedy="wait for it, stop it, or choose another name",
        )


def _name(holder: Holder | None) -> str:
    return f"process {holder.pid} on {holder.host}" if holder else "another command"


def held_by(files: Mapping[str, Stat]) -> str | None:
    """The file of the command that holds the name, by this machine's clock; None = nobody does.

    Args:
        files: of the run, as `RemotePath.files` lists them.
    """
    for name, stat in files.items():
        at = stat.st_mtime_ns
        if name.startswith(f"{CLAIMS}/") and (not at or time.time() - at / _NS < 2 * SILENCE):
            return name
    return None
