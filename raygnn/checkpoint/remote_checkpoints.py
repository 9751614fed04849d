"""Checkpoints of a run in an object store, or in another file system that pyarrow.fs opens."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raygnn.checkpoint import weights
from raygnn.checkpoint.hashed_files import Write
from raygnn.checkpoint.store import (
    MANIFEST,
    NAME,
    SENDING,
    STATE,
    Checkpoint,
    put_aside,
    read,
    read_manifest,
)
from raygnn.config.places import Uri
from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.runs.run_directory import CHECKPOINTS, Events
from raygnn.storage.remote import RemotePath
from raygnn.util.files import new_directory, publish

_AGAIN = 5.0  # seconds before a failed upload is tried again
_SILENCE = 20.0  # seconds without progress after which an upload is reported
_POLL = 1.0  # seconds between polls for progress

log = logging.getLogger("raygnn")


class RemoteCheckpoints:
    """Remote checkpoint store: ``<run>/checkpoints/step-<n>/`` with all files of each checkpoint.

    The nodes have only copies, and each rank uploads the files that it has written (`put`). A
    checkpoint is complete once it has its manifest, which is uploaded last. ``run``: location of
    the run; secrets in it are never shown.
    """

    def __init__(self, run: Uri):
        self._uri = run / CHECKPOINTS

    @classmethod
    def from_config(cls, config: Config) -> RemoteCheckpoints | None:
        """Return the job's remote checkpoint store; None if its storage is a directory."""
        return None if config.store is None else cls(config.store / config.name)

    def __str__(self) -> str:
        return str(self._uri)

    def names(self) -> list[str]:
        """Return the names of all complete checkpoints, oldest first. Raises DataError if the store
        cannot be read."""
        parents = (path.split("/") for path in self._directory.files())
        return sorted(n for n, *rest in parents if rest == [MANIFEST] and NAME.fullmatch(n))

    def put(self, file: Path, name: str, moved: Callable[[], None] = lambda: None) -> None:
        """Upload a file of a checkpoint. Raises OSError if it cannot be read or uploaded.

        Args:
            name: name of the checkpoint.
            moved: called after each piece.
        """
        with as_storage():
            (self._directory / name / file.name).upload(file, moved)

    def put_weights(self, directory: Path) -> None:
        """Upload the weights of a run. Their description is removed first and uploaded last, so
        that it never describes other weights. Raises OSError if a file cannot be read or uploaded.
        """
        with as_storage():
            (self._directory / weights.ABOUT).remove()
        for name in (weights.FILE, weights.ABOUT):
            self.put(directory / name, "")

    def send(
        self, checkpoint: Path, keep: int, name: str = "", moved: Callable[[], None] = lambda: None
    ) -> None:
        """Upload a checkpoint, and remove the oldest ones, so that ``keep`` remain.

        Args:
            name: name of the checkpoint, if its directory has another.
            moved: called after each piece.

        Raises:
            DataError: the upload failed, and the other checkpoints remain; or the manifest is
                damaged.
            OSError: the checkpoint cannot be read.
        """
        name = name or checkpoint.name
        target, files = self._directory / name, read_manifest(checkpoint).files
        (target / MANIFEST).remove()
        for file, size, _ in (*files, (MANIFEST, 0, "")):
            there = target / file
            # ranks have uploaded their rows; a failed upload may have left part of a file
            if file == STATE or not there.is_file() or there.stat().st_size != size:
                there.upload(checkpoint / file, moved)
        names = self.names()
        kept = [other for other in names if other <= name][-keep:]
        for other in self._directory.folders():
            if other < kept[0] and NAME.fullmatch(other):
                (self._directory / other).remove()
                moved()

    def fetch_newest(
        self, directory: Path, judge: Callable[[Path], Checkpoint], above: str = ""
    ) -> tuple[Checkpoint | None, dict[str, str]]:
        """Download the newest usable checkpoint to ``directory``.

        Args:
            judge: reads a checkpoint; raises DataError if it is unusable.
            above: only checkpoints that are newer than the one of this name are considered.

        Returns:
            The checkpoint, or None; and name → reason of each newer one, which is unusable.

        Raises:
            DataError, OSError: see `fetch`.
        """
        rejected: dict[str, str] = {}
        for name in reversed(self.names()):
            if name <= above:
                break
            fetched = self.fetch(name, directory)
            try:
                return judge(fetched), rejected
            except DataError as error:
                put_aside(fetched)
                rejected[name] = error.what
        return None, rejected

    def pass_over(self, names: Iterable[str]) -> None:
        """Rename the manifests of checkpoints, so that they are passed over; their files remain.
        Raises DataError if the store cannot be written."""
        for name in names:
            about = self._directory / name / MANIFEST
            about.with_name(f"passed-over-{MANIFEST}").write(about.read_bytes())
            about.remove()

    def fetch(self, name: str, directory: Path) -> Path:
        """Download a checkpoint to ``directory``, unless an intact copy exists; a damaged copy is
        put aside. One of several processes downloads, and the others wait.

        Raises:
            DataError: the store cannot be read.
            OSError: the directory cannot be written.
        """
        source, final = self._directory / name, directory / name
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with new_directory(final) as draft:
                (source / MANIFEST).download(draft / MANIFEST)
                with suppress(OSError, DataError):  # no copy, or a damaged one
                    if (final / MANIFEST).read_bytes() == (draft / MANIFEST).read_bytes():
                        return read(final).state.parent
                files = [(STATE, 0, "")]
                with suppress(DataError):  # reading the checkpoint reports a damaged manifest
                    files = read_manifest(draft).files
                for file, _, _ in files:
                    (source / file).download(draft / file)
                if final.exists():
                    put_aside(final)
                publish(draft, final)
        return final

    @functools.cached_property
    def _directory(self) -> RemotePath:
        return RemotePath.of(self._uri, "storage")


@contextmanager
def as_storage() -> Iterator[None]:
    """Raise OSError for an error of the object store."""
    try:
        yield
    except DataError as error:
        raise OSError(errno.EIO, f"{error.where}: {error.what}") from error


@dataclass
class Courier:
    """Uploads checkpoints in a background thread, so that a store that is slow, or hangs, blocks
    nothing else. If several checkpoints wait, only the newest is uploaded. A failed upload is
    repeated until there is a newer checkpoint.

    Attributes:
        sending: called with True if an upload is in progress or waiting, else False.
        is_current: returns False if a later attempt of the run has taken over.
        before: called before each upload, to send other files that a resumed run needs.
    """

    remote: RemoteCheckpoints
    keep: int
    events: Events
    sending: Callable[[bool], None]
    is_current: Callable[[], bool] = lambda: True
    before: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._busy = False
        self._failing = False
        self._thread: threading.Thread | None = None

    def send(self, checkpoint: Path) -> None:
        """Upload a checkpoint in the background."""
        with self._changed:
            self._waiting = checkpoint
            self.sending(True)
            if self._thread is None:
                name = "raygnn-courier"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, seconds: float) -> None:
        """Wait until all uploads have ended; report if that takes longer."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._busy or self._waiting), seconds):
                where, limit = self.remote, f"{seconds:g} s"
                self.events.notify(
                    f"the last checkpoints are not in {where}: uploads take longer than {limit}"
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if self._waiting is None:
                    self.sending(False)
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None)
                checkpoint, self._waiting, self._busy = self._waiting, None, True
            assert checkpoint is not None
            if not self._send(checkpoint):
                with self._changed:
                    self._waiting = self._waiting or checkpoint
                    self._changed.wait(_AGAIN)

    def _send(self, checkpoint: Path) -> bool:
        held = checkpoint.with_name(f"{SENDING}{checkpoint.name}")
        try:
            # hard links, since later checkpoints may remove this one during the upload
            shutil.rmtree(held, ignore_errors=True)
            shutil.copytree(checkpoint, held, copy_function=os.link)
            try:
                self.before()
            except Exception:  # a checkpoint is useful without the records, too
                log.warning("the records of %s cannot be uploaded", checkpoint.name, exc_info=True)
            if self.is_current():
                self._watch(held, checkpoint.name)
            if self._failing:
                self.events.notify(f"{checkpoint.name} is in {self.remote} again")
            self._failing = False
        except Exception as error:
            replaced = not checkpoint.exists()  # newer checkpoints replaced it
            local = isinstance(error, OSError) or getattr(error, "where", "") == str(held)
            if replaced and local:  # an error of the local disk
                return True
            log.warning("%s is not in %s", checkpoint.name, self.remote, exc_info=True)
            reason = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
            self._tell_failure(checkpoint.name, reason)
            return replaced
        finally:
            shutil.rmtree(held, ignore_errors=True)
        return True

    def _watch(self, path: Path, name: str) -> None:
        """Upload a checkpoint; report if the store accepts nothing for long."""
        send = functools.partial(self.remote.send, path, self.keep, name)
        write = Write(send, "raygnn-send")
        while not write.wait(_POLL):
            if write.silence >= _SILENCE:
                self._tell_failure(name, f"it has accepted nothing for {_SILENCE:g} s")
        write.result()

    def _tell_failure(self, name: str, reason: str) -> None:
        if not self._failing:
            self.events.notify(f"{name} is not in {self.remote}: {reason}; training continues")
        self._failing = True
