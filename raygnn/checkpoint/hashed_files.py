"""Files whose size and SHA-256 are recorded when they are written and compared when they are read.

Slow storage is no error; storage that takes no bytes for long is one.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

from raygnn.util.files import open_regular, sync
from raygnn.util.hashing import digest

T = TypeVar("T")

_PIECE = 1 << 20  # bytes that are written at once; storage that takes them is alive
_SYNCED = 8  # pieces that are made durable at once, so that no single sync takes long


class Write(Generic[T]):
    """A write in a thread of its own.

    Args:
        act: writes; calls its argument whenever the storage has taken something.
        name: of the thread.
    """

    def __init__(self, act: Callable[[Callable[[], None]], T], name: str):
        self._act = act
        self._result: T | None = None
        self._error: Exception | None = None
        self._moved()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    @property
    def silence(self) -> float:
        """Seconds for which the storage has taken nothing; 0 after the end."""
        return time.monotonic() - self._at if self.busy else 0.0

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether it came."""
        self._thread.join(seconds)
        return not self.busy

    def result(self) -> T:
        """Return what ``act`` returned, or raise what it raised; the write must have ended."""
        assert not self.busy
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def _moved(self) -> None:
        self._at = time.monotonic()

    def _run(self) -> None:
        try:
            self._result = self._act(self._moved)
        except Exception as error:
            self._error = error


class Hashed(io.RawIOBase):
    """Stream that writes to a file in pieces, durably, and computes the SHA-256.

    torch's writer, which is C++, cannot handle exceptions: the first one is kept as ``error``, and
    nothing is written after it.

    Args:
        moved: called after each piece.
    """

    def __init__(self, file: IO[bytes], moved: Callable[[], None] = lambda: None):
        self._file = file
        self._moved = moved
        self._unsynced = 0
        self.sha = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        for start in range(0, len(view), _PIECE):
            self._put(view[start : start + _PIECE])
        return len(view)

    def _put(self, piece: memoryview) -> None:
        if self.error is None:
            try:
                self._file.write(piece)
                self._unsynced += len(piece)
                if self._unsynced >= _SYNCED * _PIECE:
                    self._file.flush()
                    os.fdatasync(self._file.fileno())
                    self._unsynced = 0
                self._moved()
            except OSError as error:
                self.error = error
        self.sha.update(piece)
        self.bytes += len(piece)


def write_hashed(
    path: Path, fill: Callable[[Hashed], None], moved: Callable[[], None] = lambda: None
) -> Hashed:
    """Write a file, durably.

    Args:
        fill: writes its content.
        moved: called whenever the storage has taken something.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "wb") as file:
        hashed = Hashed(file, moved)
        fill(hashed)
        if hashed.error is not None:
            raise hashed.error
    sync(path)
    return hashed


def save_tensors(value: Any, path: Path, moved: Callable[[], None] = lambda: None) -> Hashed:
    """Write a file for torch.load, with all tensors as CPU tensors; see `write_hashed`."""
    import torch
    from lightning_utilities.core.apply_func import apply_to_collection

    value = apply_to_collection(value, torch.Tensor, torch.Tensor.cpu)
    return write_hashed(path, lambda file: torch.save(value, cast(IO[bytes], file)), moved)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return digest(file)


def difference(path: Path, size: int, sha: str) -> str | None:
    """Describe how a file differs from its recorded size and SHA-256; None if it does not.

    Raises:
        OSError: it cannot be read.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        return f"{path.name} is not a regular file"
    if info.st_size != size:
        return f"{path.name} has {info.st_size:,} bytes instead of {size:,}"
    if sha256(path) != sha:
        return f"{path.name} has changed since it was written: its SHA-256 differs"
    return None
