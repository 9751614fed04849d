"""Lines at the end of a file, of which none is ever torn by storage that is full for a while."""

from __future__ import annotations

import os
from pathlib import Path


class Appender:
    """Adds bytes to a file in order; what the storage does not take waits for the next call.

    The file is opened when it is first needed. Nothing else may write to it meanwhile.

    Attributes:
        waiting: bytes that are not in the file yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self.waiting = b""

    def open(self) -> int:
        """The descriptor of the file.

        Raises:
            OSError: it cannot be opened.
        """
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def add(self, data: bytes) -> None:
        """Add bytes, and write all there are.

        Raises:
            OSError: not all could be written.
        """
        self.waiting += data
        self.flush()

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: not all could be written.
        """
        while self.waiting:
            self.waiting = self.waiting[os.write(self.open(), self.waiting) :]

    def close(self) -> None:
        """Close the file; what waits is given up."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
