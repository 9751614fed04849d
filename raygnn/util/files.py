"""Atomic writes of files and directories, JSON, and storage errors with a remedy."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from raygnn.errors import DataError, InputError, RaygnnError, TrainingError
from raygnn.util.locks import is_alive

LARGEST_JSON = 64 * 2**20  # bytes
FULL = {errno.ENOSPC, errno.EDQUOT}  # errors of a full disk or quota
_LASTING = {*FULL, errno.EROFS}  # errors that a restart would meet again
_NUMBERS = "EIO ESTALE ETIMEDOUT ENOTCONN EHOSTDOWN EHOSTUNREACH ENETUNREACH ECONNRESET ENODEV"
AWAY = {getattr(errno, name) for name in _NUMBERS.split()}  # errors of an unavailable file system
_RETRY_EVERY = 1.0  # seconds

T = TypeVar("T")


def storage_trouble(error: OSError, instead: str = "change storage") -> tuple[str, str]:
    """Return problem and remedy for an error of storage; ``instead``: alternative to repairing
    it."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        what = f"the disk or the quota is full: {reason}"
        return what, f"free space or raise the quota there, or {instead}"
    return f"it cannot be written: {reason}", f"make it writable for this user, or {instead}"


@contextmanager
def storage_errors(
    path: Path, kind: type[RaygnnError] = TrainingError, instead: str = "change storage"
) -> Iterator[None]:
    """Raise an error of ``kind`` for an OSError about ``path``; see `storage_trouble`. A
    `TrainingError` about full or read-only storage is final."""
    try:
        yield
    except OSError as error:
        what, remedy = storage_trouble(error, instead)
        ours = kind(what, where=str(path), remedy=remedy)
        if isinstance(ours, TrainingError):
            ours.final = error.errno in _LASTING
        raise ours from error


def is_away(error: Exception) -> bool:
    """True if an error, or the cause of an `InputError`, means an unavailable file system."""
    cause = error.__cause__ or error.__context__ if isinstance(error, InputError) else error
    return isinstance(cause, OSError) and cause.errno in AWAY


def storage_error(error: Exception) -> TrainingError | None:
    """Return the error to report for unavailable storage; None for any other error. Callers that
    can wait for the storage have waited already."""
    where = getattr(error, "where", None) or getattr(error, "filename", None)
    if not is_away(error) or where is None:  # without a path it may be a network error
        return None
    what = getattr(error, "what", f"the storage does not answer: {getattr(error, 'strerror', '')}")
    remedy = "restore the storage, then run this again, with --resume if the run had begun"
    return TrainingError(what, where=str(where), remedy=remedy)


def retry(
    act: Callable[[], T], seconds: float, passes: Callable[[Exception], object] | None = None
) -> T:
    """Call ``act`` until it succeeds, for at most ``seconds`` after its first failure.

    Args:
        passes: true for an error that may be temporary; default: any OSError.

    Raises:
        Exception: the last error, or the first that is not temporary.
    """
    deadline = None
    while True:
        try:
            return act()
        except Exception as error:
            deadline = deadline or time.monotonic() + seconds
            passing = passes(error) if passes else isinstance(error, OSError) or is_away(error)
            if not passing or time.monotonic() >= deadline:
                raise
            time.sleep(min(_RETRY_EVERY, seconds))


def write_atomic(path: Path, text: str) -> None:
    """Replace the file by ``text`` (UTF-8) in one step; see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace the file by a value's `json_text`; see `replacing`."""
    write_atomic(path, json_text(value))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` at the end of the block: a reader sees the complete
    old or new content. Raises OSError if it cannot be written. After any error, nothing is left
    behind."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_file(file: IO[Any]) -> None:
    """Make the content of an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make a file's contents, or a directory's list of files, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Appender:
    """Appends bytes to a file in order; bytes that cannot be written wait for the next call.

    The file is opened at the first use, and no other process may write to it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self.waiting = b""  # bytes that are not in the file yet

    def open(self) -> int:
        """Return the descriptor of the file. Raises OSError if it cannot be opened."""
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def add(self, data: bytes) -> None:
        """Append bytes. Raises OSError if not all could be written."""
        self.waiting += data
        self.flush()

    def flush(self) -> None:
        """Write the waiting bytes. Raises OSError if not all could be written."""
        while self.waiting:
            self.waiting = self.waiting[os.write(self.open(), self.waiting) :]

    def close(self) -> None:
        """Close the file and drop the waiting bytes."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def json_text(value: Any) -> str:
    """Return JSON with two spaces, unescaped UTF-8, and null for numbers that are not finite."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Return plain JSON types: scalars of numpy and torch unwrapped, non-finite numbers as None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError if it cannot be read, or is a FIFO, a device or a
    directory, which could block if opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # it may have been replaced since
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_regular(path: Path, most: int, *, cut: bool = False) -> bytes:
    """Read a file of at most ``most`` bytes; ``cut``: read the first ``most`` bytes of a larger
    file instead of refusing it.

    Raises:
        OSError: it is larger; or see `open_regular`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not cut and size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
        content = file.read(most)
        if len(content) < min(size, most):  # a truncated file would have a smaller size, too
            raise OSError(errno.EIO, "the storage returned only part of the file", str(path))
        return content


def read_json(path: Path, most: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a JSON object; ``{}`` if there is no file. Raises DataError if the file is unreadable,
    larger than ``most`` bytes, or holds no JSON object."""
    try:
        value = json.loads(read_regular(path, most))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"not readable as JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise DataError(f"not a JSON object but a {type(value).__name__}", where=str(path))
    return value


def is_vacant(place: Any) -> bool:
    """True if a local or remote path does not exist or is an empty directory. Raises DataError if
    it cannot be read."""
    try:
        return not place.exists() or (place.is_dir() and not any(place.iterdir()))
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}",
            where=str(place),
            remedy="correct the path, or the permissions of its directories",
        ) from error


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``target``, for `publish`; if it is not published, it is
    removed with the parents that were created for it. Leftovers of killed processes of this host
    are removed first."""
    made = [path for path in target.parents if not path.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target)
    name = f"{_prefix(target)}{os.getpid()}-{_host()}{secrets.token_hex(4)}"
    temporary = target.parent / name
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()


def publish(temporary: Path, target: Path) -> bool:
    """Make a finished directory, whose files are durable, visible as ``target`` in one step.
    Returns False, and changes nothing, if ``target`` is not empty (another process was first)."""
    for directory in (path for path in temporary.rglob("*") if path.is_dir()):
        sync(directory)
    sync(temporary)
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    sync(target.parent)
    return True


def _prefix(target: Path) -> str:
    return f".{target.name}.tmp-"


def _host() -> str:
    """Return a digest of the host and the namespace within which process ids are unique."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def remove_stale(target: Path) -> None:
    """Remove the temporary directories for ``target`` that killed processes of this host left."""
    name = re.compile(rf"{re.escape(_prefix(target))}(\d+)-{_host()}[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if (match := name.fullmatch(path.name)) and not is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
