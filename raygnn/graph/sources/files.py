"""Input files: refused before they are opened when they can not be what was asked for."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from raygnn.config.places import size
from raygnn.errors import DataError
from raygnn.graph.available_memory import memory

_CHUNK = 1 << 22
_MORE_MEMORY = "If the file is not damaged, free memory, or use a machine with more of it."


def check_file(path: Path) -> int:
    """The size in bytes of ``path``, a regular, readable file with something in it.

    Raises:
        DataError: it is missing, a directory, not a regular file (a FIFO would block for ever),
            unreadable or empty.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError(
            "the file does not exist",
            where=str(path),
            remedy="Check the path; a relative one is taken from the directory of the config file.",
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(
            "it is a directory, not a file", where=str(path), remedy="Name the file itself."
        )
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            "it is not a regular file",
            where=str(path),
            remedy="Name a file on disk; pipes and devices can not be read twice.",
        )
    if not os.access(path, os.R_OK):
        raise DataError(
            "the file can not be read: permission denied",
            where=str(path),
            remedy="Give this user the right to read it.",
        )
    if status.st_size == 0:
        raise DataError("the file is empty", where=str(path), remedy="Get or write the file again.")
    return status.st_size


def read_bytes(path: Path) -> bytes:
    """The contents of a small file; raises DataError as :func:`check_file` does."""
    check_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def unpacked_size(path: Path) -> int:
    """The size in bytes of a file's content, as far as the end of a ``.gz`` says it: modulo
    4 GiB, and of its last member alone. Raises DataError as :func:`check_file` does."""
    packed = check_file(path)
    if path.suffix != ".gz" or packed < 4:
        return packed
    try:
        with path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            return max(packed, int.from_bytes(file.read(4), "little"))
    except OSError as error:
        raise _unreadable(path, error) from None


def update_digest(digest: hashlib._Hash, path: Path) -> None:
    """Feed the contents of a file into a hash, a few megabytes at a time."""
    check_file(path)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None


def check_fits_memory(num_bytes: int, what: str, where: str) -> None:
    """Refuse an array that a header claims and that does not fit into the available memory.

    A few bytes of a damaged or hostile header can claim terabytes; asking the operating system
    for them may succeed and get the process killed later.
    """
    _, available = memory()
    if available is not None and num_bytes > available:
        raise DataError(
            f"{what} would take {size(num_bytes)}, more than the {size(available)} of memory "
            "that are available",
            where=where,
            remedy=_MORE_MEMORY,
        )


def out_of_memory(where: str, error: MemoryError) -> DataError:
    """What is said of input that took more memory than there was."""
    detail = " ".join(str(error).split())[:200]
    return DataError(
        "there is not enough memory to read it" + (f": {detail}" if detail else ""),
        where=where,
        remedy=_MORE_MEMORY,
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"the file can not be read: {error.strerror or error}",
        where=str(path),
        remedy="Check the path, the rights and the disk.",
    )
