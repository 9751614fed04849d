"""Small files of a run directory, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from raygnn.config.secret import without_users
from raygnn.errors import DataError, InputError, RaygnnError, TrainingError

LARGEST_JSON = 64 * 2**20  # bytes
_SHOWN = 200  # characters of a path that is none
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LASTING = {*_FULL, errno.EROFS}  # what a new start would meet again
_APART = 1.0  # seconds between tries

T = TypeVar("T")


def storage_path(storage: str | Path) -> Path:
    """The absolute local directory that ``storage`` names: a path or a ``file://`` URI.

    Raises:
        InputError: for any other URI, and what no directory can be called.
    """
    text = str(storage)
    if "://" not in text:
        return local_path(text, "storage")
    uri = urlsplit(text)
    if uri.scheme != "file" or uri.netloc not in ("", "localhost") or not uri.path:
        raise InputError(
            f"storage {without_users(text)[:_SHOWN]!r} is neither a directory nor a file:///path",
            where="storage",
            remedy="give a directory that every node sees",
        )
    return Path(unquote(uri.path))


def local_path(text: str, where: str) -> Path:
    """The absolute path that a text names.

    Raises:
        InputError: it can be none; ``where`` says what it was given for.
    """
    try:
        if "\0" not in text:
            return Path(text).expanduser().absolute()
    except RuntimeError:
        pass  # ~name of no user
    raise InputError(
        f"{text[:_SHOWN]!r} is no path here",
        where=where,
        remedy="give a path; ~name needs a user of that name",
    )


def storage_trouble(error: OSError, instead: str = "change storage") -> tuple[str, str]:
    """What is wrong with storage, in our words, and what to do about it.

    Args:
        instead: what else the user can do than to mend that place.
    """
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        what = f"the disk or the quota is full: {reason}"
        return what, f"free space or raise the quota there, or {instead}"
    return f"it cannot be written: {reason}", f"make it writable for this user, or {instead}"


@contextmanager
def storage_errors(
    path: Path, kind: type[RaygnnError] = TrainingError, instead: str = "change storage"
) -> Iterator[None]:
    """Turn an :class:`OSError` about ``path`` into an error of ``kind`` in our words.

    A :class:`TrainingError` of storage that is full or read-only is final.

    Args:
        instead: see :func:`storage_trouble`.
    """
    try:
        yield
    except OSError as error:
        what, remedy = storage_trouble(error, instead)
        ours = kind(what, where=str(path), remedy=remedy)
        if isinstance(ours, TrainingError):
            ours.final = error.errno in _LASTING
        raise ours from error


def insist(act: Callable[[], T], seconds: float) -> T:
    """Do it, again and again for so many seconds while the storage is full or away.

    Raises:
        OSError: of the last try.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(min(_APART, seconds))


def write_atomic(path: Path, text: str) -> None:
    """Replace the file by ``text`` (UTF-8): a reader sees the old or the new content, whole.

    Raises:
        OSError: when it cannot be written; nothing is left behind then.
    """
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, to write, that takes the place of ``path`` when the block has ended.

    Raises:
        OSError: when it cannot be written; nothing is left behind then, nor if the block raises.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb", opener=_no_link) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def remove(path: Path) -> None:
    """Remove whatever it is, if it is there.

    Raises:
        TrainingError: it cannot be removed.
    """
    with storage_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def json_text(value: Any) -> str:
    """JSON as we write it: two spaces, UTF-8 as it is, no NaN (a null stands for it)."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Plain JSON types: scalars of numpy and torch unwrapped, non-finite numbers as None."""
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
    """The file, to read.

    Raises:
        OSError: it cannot be read, or is a FIFO, a device or a directory, of which none is
            opened: that could wait for ever.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # it may have been replaced since
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_regular(path: Path, most: int, *, cut: bool = False) -> bytes:
    """The file's content, at most ``most`` bytes of it.

    Args:
        cut: take the first ``most`` bytes of a larger file instead of refusing it.

    Raises:
        OSError: it is larger, or for the reasons of :func:`open_regular`.
    """
    with open_regular(path) as file:
        if not cut and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
        return file.read(most)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, ``{}`` when there is no file.

    Raises:
        DataError: when the file is unreadable, larger than 64 MiB, or holds no JSON object.
    """
    try:
        value = json.loads(read_regular(path, LARGEST_JSON))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"not readable as JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise DataError(f"not a JSON object but a {type(value).__name__}", where=str(path))
    return value
