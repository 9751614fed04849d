"""What can be told of a place before anything is written there."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

# said by those who look at free space
_FULL = (errno.ENOSPC, errno.EDQUOT)


def nearest(path: Path) -> Path:
    """The path, or else the nearest above it that exists: it will be made there.

    Raises:
        OSError: it may not be looked at, or is no possible name.
    """
    for part in (path, *path.parents):
        try:
            part.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return part
    return path  # a relative path, in a directory that is gone


def unreachable(path: Path) -> str | None:
    """Why it cannot even be seen whether the path exists; None where that can be seen."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None


def unwritable(path: Path) -> str | None:
    """Why no file can be written to the directory, there or yet to be made; None = one can.

    A file without a name is opened where it would be made, which leaves nothing: permissions do
    not tell of file systems that are read-only, or that hold no files of anybody's.
    """
    try:
        there = nearest(path)
        if not there.is_dir():
            return f"{there} is not a directory"
        with tempfile.TemporaryFile(dir=there):
            return None
    except FileNotFoundError:
        return f"nothing can be made in {there}"
    except OSError as error:
        return None if error.errno in _FULL else (error.strerror or str(error))
