"""Copies of checkpoints in a second place, which pyarrow.fs opens: a directory or a URI."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raygnn.config.schema import Config
from raygnn.config.uri import Uri
from raygnn.errors import DataError
from raygnn.graph.atomic import sync
from raygnn.training.checkpoint import MANIFEST, NAME, STATE

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


class Mirror:
    """``<place>/<run>/step-<n>/`` with the files of the checkpoint; the manifest, which comes
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

    def send(self, checkpoint: Path, keep: int) -> None:
        """Copy a checkpoint there. Later ones, which the run has passed over, go, and of the
        others the oldest beyond ``keep``.

        Raises:
            DataError: it cannot be written; older ones are there still.
        """
        with self._opened() as (fs, base):
            target = posixpath.join(base, checkpoint.name)
            fs.create_dir(target, recursive=True)
            fs.delete_dir_contents(target)
            for name in (STATE, MANIFEST):
                with (
                    open(checkpoint / name, "rb") as source,
                    fs.open_output_stream(posixpath.join(target, name)) as sink,
                ):
                    shutil.copyfileobj(source, sink, 1 << 20)
            there = self._names(fs, base)
            older = [name for name in there if name <= checkpoint.name]
            for name in {*there} - {*older[-keep:]}:
                fs.delete_dir(posixpath.join(base, name))

    def fetch(self, directory: Path) -> str | None:
        """Copy its newest checkpoint to ``directory``, if none there is as new.

        Returns:
            The name of the copy, or None.

        Raises:
            DataError: the place cannot be read.
            OSError: the directory cannot be written.
        """
        with self._opened() as (fs, base):
            there = self._names(fs, base)
            here = sorted(path.name for path in directory.glob("step-*"))
            if not there or (here and here[-1] >= there[-1]):
                return None
            name = there[-1]
            draft = directory / f".{name}.tmp"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            try:
                for file in (STATE, MANIFEST):
                    with (
                        fs.open_input_stream(posixpath.join(base, name, file)) as source,
                        open(draft / file, "wb") as sink,
                    ):
                        shutil.copyfileobj(source, sink, 1 << 20)
                    sync(draft / file)
                os.rename(draft, directory / name)
                sync(directory)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            return name

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

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[FileSystem, str]]:
        """The file system, and the run's directory in it."""
        from pyarrow.fs import FileSystem, LocalFileSystem

        try:
            if isinstance(self._place, Uri):
                fs, path = FileSystem.from_uri(self._place.text)
            else:
                fs, path = LocalFileSystem(), str(self._place)
            yield fs, posixpath.join(path, self._name)
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
