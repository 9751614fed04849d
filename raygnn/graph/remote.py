"""Places that pyarrow.fs opens, as far as reading a partition needs them."""

from __future__ import annotations

import fnmatch
import functools
import io
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from raygnn.config.places import Uri
from raygnn.errors import DataError

_BUFFER = 1 << 20  # bytes asked for at once


class Stat(NamedTuple):
    """Size in bytes; last change in nanoseconds, 0 where the place does not tell."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemotePath:
    """What :class:`pathlib.Path` offers, of a file or directory that a URI names; only to read.

    Its text shows no credentials. It can be pickled.

    Attributes:
        root: says which file system, with the credentials.
        path: the place within that, from its root on.
        seen: facts of all files below a directory, asked for at once; None = look at each.

    Raises:
        DataError: by every method that looks, when the place cannot be reached.
    """

    root: Uri
    path: str
    seen: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, uri: Uri) -> RemotePath:
        return cls(uri, _open(uri)[1].rstrip("/") or "/")

    def __reduce__(self) -> Any:
        return RemotePath, (self.root, self.path)

    def listed(self) -> RemotePath:
        """This directory, all of whose files are known from one look."""
        return replace(self, seen={info.path: info for info in self._list(recursive=True)})

    def __str__(self) -> str:
        return self.root.with_path(self.path)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> RemotePath:
        return replace(self, path=posixpath.dirname(self.path))

    def __truediv__(self, name: str) -> RemotePath:
        if "\0" in name:
            raise ValueError("embedded null byte")  # as pathlib says it
        return replace(self, path=posixpath.join(self.path, name))

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def resolve(self) -> RemotePath:
        return replace(self, path=posixpath.normpath(self.path))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return bool(self._info().is_file)

    def is_dir(self) -> bool:
        from pyarrow.fs import FileType

        return bool(self._info().type == FileType.Directory)

    def stat(self) -> Stat:
        info = self._info()
        return Stat(int(info.size or 0), int(info.mtime_ns or 0))

    def glob(self, pattern: str) -> list[RemotePath]:
        """The files of this directory (not below it) whose names match."""
        names = sorted(info.base_name for info in self._list(recursive=False) if info.is_file)
        return [self / name for name in names if fnmatch.fnmatchcase(name, pattern)]

    def iterdir(self) -> Iterator[RemotePath]:
        return iter(self.glob("*"))

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """A stream of bytes, from the start to the end."""
        assert mode == "rb", "nothing is written here"
        with self.reported("cannot be opened"):
            return io.BufferedReader(_Raw(self), _BUFFER)

    def read_bytes(self) -> bytes:
        with self.open() as stream:
            return bytes(stream.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    @property
    def _fs(self) -> Any:
        return _open(self.root)[0]

    def _list(self, *, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        below = FileSelector(self.path, allow_not_found=True, recursive=recursive)
        with self.reported("cannot be listed"):
            return list(self._fs.get_file_info(below))

    def _info(self) -> Any:
        if self.seen is not None and self.path in self.seen:
            return self.seen[self.path]
        with self.reported("cannot be looked at"):
            return self._fs.get_file_info(self.path)

    def reported(self, message: str) -> AbstractContextManager[None]:
        return _reported(self.root, str(self), message)


class _Raw(io.RawIOBase):
    """An input stream of pyarrow, as Python's buffered reader wants it."""

    def __init__(self, path: RemotePath):
        self._path = path
        self._stream = path._fs.open_input_stream(path.path)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        with self._path.reported("cannot be read"):
            count = int(self._stream.readinto(buffer))
        self._at += count
        return count

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        """Only forward: what lies between is read."""
        to += self._at if whence == io.SEEK_CUR else 0
        if whence == io.SEEK_END or to < self._at:
            raise io.UnsupportedOperation("only forward")
        while self._at < to and self.readinto(bytearray(min(_BUFFER, to - self._at))):
            pass
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


@contextmanager
def _reported(uri: Uri, where: str, message: str) -> Iterator[None]:
    """Turns the file system's errors into ours, without what is secret."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:  # all that pyarrow raises
        # its own cause is left out: it may name the credentials
        raise DataError(
            f"{message}: {uri.hide(str(error))}",
            where=where,
            remedy="check partition.path, the credentials on this node and the connection",
        ) from None


@functools.lru_cache(maxsize=16)
def _open(uri: Uri) -> tuple[Any, str]:
    """The file system and the path in it."""
    from pyarrow.fs import FileSystem

    with _reported(uri, str(uri), "cannot be opened"):
        fs, path = FileSystem.from_uri(uri.text)
        return fs, str(path)


AnyPath: TypeAlias = Path | RemotePath


def any_path(place: str | Path | Uri | RemotePath) -> AnyPath:
    """A local path, absolute, or one that a URI names."""
    if isinstance(place, RemotePath):
        return place
    if isinstance(place, str) and "://" in place:
        place = Uri(place)
    return RemotePath.of(place) if isinstance(place, Uri) else Path(place).absolute()


def within(path: AnyPath, directory: AnyPath) -> str | None:
    """The path relative to the directory, links and ``..`` resolved; None if it leads out."""
    place, above = (str(getattr(p.resolve(), "path", p.resolve())) for p in (path, directory))
    relative = posixpath.relpath(place, above)
    return None if relative.split("/")[0] == ".." else relative
