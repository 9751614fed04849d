"""Files and directories at a URI, by pyarrow.fs."""

from __future__ import annotations

import fnmatch
import functools
import io
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from raygnn.config.places import Uri
from raygnn.errors import DataError
from raygnn.util.files import replacing

_BUFFER = 1 << 20  # bytes per request
_FLAT = ("s3", "gcs", "abfs")  # stores without directories
# Options of the S3 client: an outage is an error after some 20 s, and at most one part of a file is
# in memory. The defaults would try 30 times in 100 s, and hold a complete file in memory.
_S3 = {"connect_timeout": 5.0, "request_timeout": 6.0, "background_writes": False}
_S3_TRIES = 3
# errors of an unknown host, or of one without TLS; their texts differ between versions
_ELSEWHERE = re.compile(r"curlCode: (6|35), ")


class Stat(NamedTuple):
    """Size in bytes, and time of the last change in nanoseconds, 0 if unknown."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemotePath:
    """File or directory at a URI, with methods of `pathlib.Path`.

    An object store shows a file once it is complete; a file system such as HDFS may show it
    earlier. ``str`` hides credentials. It can be pickled.

    Raises:
        DataError: from every method with a request, if the store cannot be reached.
    """

    root: Uri  # URI of the file system, with the credentials
    path: str  # path within it, from its root
    # configuration key of the location, for errors
    key: str = field(default="partition.path", compare=False)
    # sizes and times of all files below a directory, from one request; None = one request per file
    seen: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, uri: Uri, key: str = "partition.path") -> RemotePath:
        return cls(uri, _open(uri, key)[1].rstrip("/") or "/", key)

    def __reduce__(self) -> Any:
        return RemotePath, (self.root, self.path, self.key)

    def listed(self) -> RemotePath:
        """Return this directory with sizes and times of all its files, from one request."""
        return replace(self, seen={info.path: info for info in self._list(recursive=True)})

    def __str__(self) -> str:
        return self.root.with_path(self.path)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> RemotePath:
        return replace(self, path=posixpath.dirname(self.path))

    def __truediv__(self, name: str) -> RemotePath:
        if "\0" in name:
            raise ValueError("embedded null byte")  # as pathlib does
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
        return _stat(self._info())

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return the files of this directory, not below it, whose names match."""
        names = sorted(info.base_name for info in self._list(recursive=False) if info.is_file)
        return [self / name for name in names if fnmatch.fnmatchcase(name, pattern)]

    def iterdir(self) -> Iterator[RemotePath]:
        return iter(self.glob("*"))

    def files(self) -> dict[str, Stat]:
        """Return all files below this directory by their relative paths."""
        return {
            posixpath.relpath(info.path, self.path): _stat(info)
            for info in self._list(recursive=True)
            if info.is_file
        }

    def folders(self) -> list[str]:
        """Return the names of the directories in this one."""
        from pyarrow.fs import FileType

        infos = self._list(recursive=False)
        return sorted(i.base_name for i in infos if i.type == FileType.Directory)

    def write(self, data: bytes) -> None:
        """Write or replace the file."""
        with self._writing() as stream, self._reported("cannot be written"):
            stream.write(data)

    def upload(self, source: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Upload a local file; ``moved``: called after each piece. Raises OSError if the local file
        cannot be read."""
        with open(source, "rb") as file, self._writing() as stream:
            while piece := file.read(_BUFFER):
                with self._reported("cannot be written"):
                    stream.write(piece)
                moved()

    def download(self, target: Path) -> None:
        """Download to a local file in one step; raises OSError if it cannot be written."""
        with self.open() as source, replacing(target) as file:
            while piece := source.read(_BUFFER):
                file.write(piece)

    def remove(self) -> None:
        """Remove the file, or the directory with its content, if it exists."""
        from pyarrow.fs import FileType

        with self._reported("cannot be removed"):
            kind = self._fs.get_file_info(self.path).type
            if kind == FileType.Directory:
                self._fs.delete_dir(self.path)
            elif kind != FileType.NotFound:
                self._fs.delete_file(self.path)

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """Open the file for reading."""
        assert mode == "rb", "see `write` and `upload`"
        with self._reported("cannot be opened"):
            return io.BufferedReader(_Raw(self, self._fs.open_input_file(self.path)), _BUFFER)

    def read_bytes(self) -> bytes:
        with self.open() as stream:
            return bytes(stream.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open_anywhere(self) -> Any:
        """Open a pyarrow file with random access."""
        with self._reported("cannot be opened"):
            return self._fs.open_input_file(self.path)

    @property
    def _fs(self) -> Any:
        return _open(self.root, self.key)[0]

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._reported("cannot be written"):
            if self._fs.type_name not in _FLAT:
                self._fs.create_dir(posixpath.dirname(self.path), recursive=True)
            stream = self._fs.open_output_stream(self.path)
        try:
            yield stream
        finally:
            with self._reported("cannot be written"):
                stream.close()

    def _list(self, *, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        below = FileSelector(self.path, allow_not_found=True, recursive=recursive)
        with self._reported("cannot be listed"):
            return list(self._fs.get_file_info(below))

    def _info(self) -> Any:
        if self.seen is not None and self.path in self.seen:
            return self.seen[self.path]
        with self._reported("cannot be read"):
            return self._fs.get_file_info(self.path)

    def _reported(self, message: str) -> AbstractContextManager[None]:
        return _reported(self.root, str(self), message, self.key)


def _stat(info: Any) -> Stat:
    return Stat(int(info.size or 0), int(info.mtime_ns or 0))


class _Raw(io.RawIOBase):
    def __init__(self, path: RemotePath, file: Any):
        self._path = path
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._path._reported("cannot be read"):
            return int(self._file.readinto(buffer))

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(to, whence))

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _reported(root: Uri, where: str, message: str, key: str) -> Iterator[None]:
    """Raise DataError, without secrets, for an error of the file system."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:  # all that pyarrow raises
        # raised without its cause, which may name the credentials
        text = root.hide(str(error))
        remedy = f"check {key}, the credentials on this node and the connection"
        if "NO_SUCH_BUCKET" in text:
            text, remedy = "the bucket does not exist", "create the bucket, or name another"
        elif root.text.startswith("s3:") and _ELSEWHERE.search(text):
            remedy += "; a server of your own, not Amazon's, is named in the URI: "
            remedy += "s3://BUCKET/DIRECTORY?endpoint_override=HOST:PORT&scheme=http"
        raise DataError(f"{message}: {text}", where=where, remedy=remedy) from None


@functools.lru_cache(maxsize=16)
def _open(uri: Uri, key: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    with _reported(uri, str(uri), "cannot be opened", key):
        fs, path = FileSystem.from_uri(uri.text)
        return (_impatient(fs) if fs.type_name == "s3" else fs), str(path)


def _impatient(fs: Any) -> Any:
    """Return the S3 file system with the options above, which a URI cannot express."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    (options,) = fs.__reduce__()[1]  # the options that it is pickled with
    retries = AwsStandardS3RetryStrategy(max_attempts=_S3_TRIES)
    return S3FileSystem(**{**options, **_S3, "retry_strategy": retries})


AnyPath: TypeAlias = Path | RemotePath


def any_path(place: str | Path | Uri | RemotePath) -> AnyPath:
    """Return the absolute local path, or the path at the URI."""
    if isinstance(place, RemotePath):
        return place
    if isinstance(place, str) and "://" in place:
        place = Uri(place)
    return RemotePath.of(place) if isinstance(place, Uri) else Path(place).absolute()


def within(path: AnyPath, directory: AnyPath) -> str | None:
    """Return the path relative to the directory, after links and ``..`` are resolved; None if it is
    outside."""
    place, above = (str(getattr(p.resolve(), "path", p.resolve())) for p in (path, directory))
    relative = posixpath.relpath(place, above)
    return None if relative.split("/")[0] == ".." else relative
