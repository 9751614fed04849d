"""Copies of checkpoints in a second place, which pyarrow.fs opens: a directory or a URI."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from raygnn.checkpoint.store import MANIFEST, NAME, STATE, files_of, put_aside
from raygnn.config.places import Uri
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError
from raygnn.runs.run_directory import Events
from raygnn.util.files import sync, sync_file

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_PIECE = 1 << 20  # bytes that are copied at once

log = logging.getLogger("raygnn")


class Mirror:
    """``<place>/<run>/step-<n>/`` with all files of the checkpoint; the manifest, which comes
    last, makes it one.

    Args:
        place: where; what is secret in a URI is never shown.
        name: of the run.
    """

    def __init__(self, place: Path | Uri, name: str):
        self._place = place
        self._name = name

    @classmethod
    def of(cls, config: Config) -> Mirror | None:
        """That of a job, if it has one."""
        place = config.fault.mirror
        return None if place is None else cls(place, config.name)

    def __str__(self) -> str:
        return f"{str(self._place).rstrip('/')}/{self._name}"

    def check(self, directory: Path) -> None:
        """Refuse to copy checkpoints to where they are.

        Raises:
            ConfigError: the mirror is the directory of the run's checkpoints.
        """
        place = self._place
        if isinstance(place, Uri):
            if not place.text.startswith("file://"):
                return
            place = Path(unquote(urlsplit(place.text).path))
        if (place / self._name).resolve() == directory.resolve():
            raise ConfigError(
                "the mirror is the directory of the run's own checkpoints",
                where=f"fault.mirror: {self}",
                remedy="give another place, best on another disk or machine",
            )

    def names(self) -> list[str]:
        """Of the checkpoints there, oldest first.

        Raises:
            DataError: the place cannot be read.
        """
        with self._saying():
            return self._names(*self._open())

    def send(self, checkpoint: Path, keep: int) -> None:
        """Copy a checkpoint there; of older ones, the oldest go, so that ``keep`` are left.

        Raises:
            DataError: it cannot be written; the others are there still.
            OSError: the checkpoint cannot be read.
        """
        from pyarrow.fs import LocalFileSystem, copy_files

        with self._saying():
            fs, base = self._open()
            target = posixpath.join(base, checkpoint.name)
            fs.create_dir(target, recursive=True)
            fs.delete_dir_contents(target)
        for name in (*files_of(checkpoint), MANIFEST):
            open(checkpoint / name, "rb").close()  # what is gone here is not the mirror's fault
            source, copy = str(checkpoint / name), posixpath.join(target, name)
            with self._saying():
                copy_files(source, copy, LocalFileSystem(), fs)
        with self._saying():
            older = [name for name in self._names(fs, base) if name <= checkpoint.name]
            for name in older[:-keep]:
                fs.delete_dir(posixpath.join(base, name))

    def fetch(self, name: str, directory: Path) -> Path:
        """Copy one of its checkpoints to ``directory``; one of that name there is put aside.

        Raises:
            DataError: it cannot be read.
            OSError: the directory cannot be written.
        """
        draft, final, files = directory / f".{name}.tmp", directory / name, [STATE]
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            with self._saying():
                fs, base = self._open()
            self._copy(fs, posixpath.join(base, name), MANIFEST, draft)
            # of a manifest that is damaged the state comes along, and whoever looks at it will see
            with contextlib.suppress(OSError):
                files = files_of(draft)
            for file in files:
                self._copy(fs, posixpath.join(base, name), file, draft)
            if final.exists():
                put_aside(final)
            sync(draft)
            os.rename(draft, final)
            sync(directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return final

    def clear(self) -> None:
        """Remove all that it has of the run.

        Raises:
            DataError: that cannot be done.
        """
        with self._saying():
            fs, base = self._open()
            for name in self._names(fs, base):
                fs.delete_dir(posixpath.join(base, name))

    def _copy(self, fs: FileSystem, source: str, name: str, target: Path) -> None:
        """Copy a file to here, where the disk's errors are not the mirror's."""
        with open(target / name, "wb") as sink:
            with self._saying():
                stream = fs.open_input_stream(posixpath.join(source, name))
            with contextlib.closing(stream):
                while piece := self._read(stream):
                    sink.write(piece)
            sync_file(sink)

    def _read(self, source: Any) -> bytes:
        with self._saying():
            return bytes(source.read(_PIECE))

    def _names(self, fs: FileSystem, base: str) -> list[str]:
        """Of its checkpoints that have a manifest, oldest first."""
        from pyarrow.fs import FileSelector

        below = FileSelector(base, allow_not_found=True, recursive=True)
        parents = (
            posixpath.basename(posixpath.dirname(info.path))
            for info in fs.get_file_info(below)
            if info.is_file and info.base_name == MANIFEST
        )
        return sorted(name for name in parents if NAME.fullmatch(name))

    def _open(self) -> tuple[FileSystem, str]:
        """The file system, and the run's directory in it."""
        from pyarrow.fs import FileSystem, LocalFileSystem

        if isinstance(self._place, Uri):
            fs, path = FileSystem.from_uri(self._place.text)
        else:
            fs, path = LocalFileSystem(), str(self._place)
        return fs, posixpath.join(path, self._name)

    @contextlib.contextmanager
    def _saying(self) -> Iterator[None]:
        """Turn the file system's errors into ours, without what is secret."""
        try:
            yield
        # pyarrow's errors are OSErrors, ValueErrors or NotImplementedErrors
        except (OSError, ValueError, NotImplementedError) as error:
            said = str(error)
            if isinstance(self._place, Uri):
                said = self._place.hide(said)
            raise DataError(
                f"the mirror of the checkpoints failed: {said}",
                where=f"fault.mirror: {self}",
                remedy="check fault.mirror, the credentials on this node and the connection, or go "
                "on without it (--set fault.mirror=null)",
            ) from None


class Courier:
    """Sends checkpoints to a mirror in a thread of its own: a place that is slow, or hangs, holds
    up nothing else. Of those that wait meanwhile, only the newest is sent.

    Args:
        sending: is told whether something is to be sent.
    """

    def __init__(self, mirror: Mirror, keep: int, events: Events, sending: Callable[[bool], None]):
        self._mirror = mirror
        self._keep = keep
        self._events = events
        self._sending = sending
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._busy = False
        self._failing = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, config: Config, events: Events, sending: Callable[[bool], None]) -> Courier | None:
        """That of a job, if it has a mirror."""
        mirror = Mirror.of(config)
        return None if mirror is None else cls(mirror, config.fault.keep, events, sending)

    def send(self, checkpoint: Path) -> None:
        """Have it sent."""
        with self._changed:
            self._waiting = checkpoint
            self._sending(True)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raygnn-mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, seconds: float) -> None:
        """Wait until all is sent, and tell if that takes longer."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._busy or self._waiting), seconds):
                self._events.tell(
                    f"the last checkpoints are not in {self._mirror}: it takes more than "
                    f"{seconds:g} s"
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if self._waiting is None:
                    self._sending(False)
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None)
                checkpoint, self._waiting, self._busy = self._waiting, None, True
            assert checkpoint is not None
            try:
                self._mirror.send(checkpoint, self._keep)
                if self._failing:
                    self._events.tell(f"{checkpoint.name} is in {self._mirror} again")
                self._failing = False
            except Exception as error:
                if not checkpoint.exists():
                    continue  # newer ones have taken its place
                log.warning("%s is not in the mirror", checkpoint.name, exc_info=True)
                reason = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
                if not self._failing:
                    self._events.tell(f"{checkpoint.name} is not in {self._mirror}: {reason}")
                self._failing = True
