"""Claim of a run's name in an object store, which has no locks.

A command writes a file into ``<run>/.claims/`` and then lists that directory: the later of two
commands sees the other's file and gives way. The store must list files right after they were
written, as S3, Google's, Azure's and HDFS do. The holder rewrites its file as a heartbeat; a claim
without a heartbeat, by the store's clock, is removed, which a suspended holder notices later.
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
BEAT = 20.0  # seconds between heartbeats
SILENCE = 90.0  # seconds without one after which a claim is stale
_POLL = 1.0  # seconds
_TRIES = 8  # attempts, if several commands claim the name at the same moment
_NS = 1e9


class Claim:
    """Claim of a run's name, held from `acquire` until `release`, or until it is `lost`."""

    def __init__(self, run: RemotePath):
        self._run = run
        self._directory = run / CLAIMS
        self._name = uuid.uuid4().hex
        self._stale: set[str] = set()
        self._released = threading.Event()
        self._beats: threading.Thread | None = None
        self.lost = False  # True if another command has taken it over
        self.stale: str | None = None  # holder whose stale claim was taken over, if any

    def acquire(self, notify: Callable[[str], object] = lambda text: None) -> None:
        """Acquire the claim; wait for a heartbeat of a holder that may be dead.

        Args:
            notify: called with a message about the holder and the longest wait.

        Raises:
            InputError: another command has the name.
            DataError: the store cannot be read or written.
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
                self._await_end(name, seen, mine, notify)
            time.sleep(random.random())
        raise self._busy(_name(None))

    def release(self) -> None:
        self._released.set()
        if self._beats is not None:
            self._beats.join()
            self._beats = None
            with contextlib.suppress(DataError):  # the claim becomes stale
                (self._directory / self._name).remove()

    def _await_end(
        self, name: str, seen: Stat, mine: Stat | None, notify: Callable[[str], object]
    ) -> None:
        """Wait until another claim is gone, or remove it if it is stale. Raises InputError if it
        has a heartbeat."""
        file, began, holder = self._directory / name, time.monotonic(), None
        with contextlib.suppress(DataError):
            holder = parse_holder(file.read_bytes())
        age = 0.0 if mine is None else (mine.st_mtime_ns - seen.st_mtime_ns) / _NS
        who = _name(holder)
        if holder is None or holder.alive():
            seconds = max(0.0, SILENCE - age)
            notify(f"{who} holds {self._run}: waiting up to {seconds:.0f} s for a heartbeat")
        while holder is None or holder.alive():
            if not file.is_file():
                return
            if file.stat() != seen:
                raise self._busy(who)
            if seen.st_mtime_ns and age + time.monotonic() - began > SILENCE:
                break
            time.sleep(_POLL)
        self.stale = who
        self._stale.add(name)
        file.remove()

    def _beat(self) -> None:
        mine = self._directory / self._name
        while not self._released.wait(BEAT):
            with contextlib.suppress(DataError):  # the store is unreachable for a while
                if not mine.is_file():
                    self.lost = True
                    return
                self._write()
                for name in self._stale:  # its holder may have rewritten it meanwhile
                    (self._directory / name).remove()

    def _write(self) -> None:
        (self._directory / self._name).write(json.dumps(asdict(Holder.here())).encode())

    def _busy(self, who: str) -> InputError:
        remedy = "wait for it, stop it, or choose another name"
        return InputError(f"{who} is writing into this run", where=str(self._run), remedy=remedy)


def _name(holder: Holder | None) -> str:
    return f"process {holder.pid} on {holder.host}" if holder else "another command"


def held_by(files: Mapping[str, Stat]) -> str | None:
    """Return the name of a claim that is not stale by this machine's clock, if any; ``files``: the
    files of the run, as `RemotePath.files` lists them."""
    for name, stat in files.items():
        at = stat.st_mtime_ns
        if name.startswith(f"{CLAIMS}/") and (not at or time.time() - at / _NS < 2 * SILENCE):
            return name
    return None
