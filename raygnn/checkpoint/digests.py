"""Whether a file is as it was written."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from raygnn.util.files import open_regular


def sha256(path: Path) -> str:
    """Of a file's content.

    Raises:
        OSError: it cannot be read, or is none.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def difference(path: Path, size: int, sha: str) -> str | None:
    """What has become of a file since it was written, if anything has.

    Raises:
        OSError: it cannot be read.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        return f"{path.name} is no file"
    if info.st_size != size:
        return f"{path.name} has {info.st_size:,} bytes, and {size:,} were written"
    if sha256(path) != sha:
        return f"{path.name} has changed since it was written: its SHA-256 is another"
    return None
