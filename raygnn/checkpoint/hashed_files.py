"""Files whose size and SHA-256 are recorded when they are written and compared when they are read.

Slow storage is no error; storage that accepts no bytes for long is one.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

from raygnn.util.files import open_regular, sync
from raygnn.util.hashing import digest

T = TypeVar("T")

_PIECE = 1 << 20  # bytes per write; each is a heartbeat of the storage
_SYNCED = 8  # pieces between two syncs, so that no single sync takes long


class Write(Generic[T]):
    """Write in a background thread.

    Args:
        act: writes; calls its argument after each piece that was written.
        name: name of the thread.
    """

    def __init__(self, act: Callable[[Callable[[], None]], T], name: str):
        self._act = act
        self._future: Future[T] = Future()
        self._moved()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return not self._future.done()

    @property
    def silence(self) -> float:
        """Seconds since the last piece was written; 0 after the end."""
        return time.monotonic() - self._at if self.busy else 0.0

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return True if the write has ended."""
        wait([self._future], seconds)
        return not self.busy

    def result(self) -> T:
        """Return what ``act`` returned, or raise what it raised; the write must have ended."""
        return self._future.result(timeout=0)

    def _moved(self) -> None:
        self._at = time.monotonic()

    def _run(self) -> None:
        try:
            self._future.set_result(self._act(self._moved))
        except BaseException as error:
            self._future.set_exception(error)


class Hashed(io.RawIOBase):
    """Stream that writes to a file in pieces, durably, and computes the SHA-256.

    torch's writer is C++ and cannot handle exceptions: the first one is stored in ``error``, and
    nothing is written after it. ``moved``: called after each piece.
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
    """Write a file, durably. Raises OSError if it cannot be written.

    Args:
        fill: writes its content.
        moved: called after each piece.
    """
    with open(path, "wb") as file:
        hashed = Hashed(file, moved)
        fill(hashed)
        if hashed.error is not None:
            raise hashed.error
    sync(path)
    return hashed


def save_tensors(value: Any, path: Path, moved: Callable[[], None] = lambda: None) -> Hashed:
    """Write a file for torch.load, all tensors of it on the CPU; see `write_hashed`."""
    import torch
    from lightning_utilities.core.apply_func import apply_to_collection

    value = apply_to_collection(value, torch.Tensor, torch.Tensor.cpu)
    return write_hashed(path, lambda file: torch.save(value, cast(IO[bytes], file)), moved)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError if it cannot be read, or is no regular
    file."""
    with open_regular(path) as file:
        return digest(file)


def difference(path: Path, size: int, sha: str) -> str | None:
    """Describe how a file differs from its recorded size and SHA-256; None if it does not. Raises
    OSError if it cannot be read."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        return f"{path.name} is not a regular file"
    if info.st_size != size:
        return f"{path.name} has {info.st_size:,} bytes instead of {size:,}"
    if sha256(path) != sha:
        return f"{path.name} has changed since it was written: its SHA-256 differs"
    return None
