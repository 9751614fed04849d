"""``logs/events.jsonl``, ``scaling.jsonl`` and ``loggers.jsonl``: what else happens to a run, for
who watches; ``logs/told.jsonl``: what was told, by all commands that started it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

from raygnn.util.files import Appender, plain

EVENTS = "events.jsonl"  # of rank 0
SCALING = "scaling.jsonl"  # of what decides how many ranks there are
LOGGERS = "loggers.jsonl"  # of what passes records on
TOLD = "told.jsonl"  # of the command, which keeps what the others left word of, too
_MOST_WAITING = 2**20  # bytes


class Events:
    """Writes events; what the storage does not take now is tried again with the next one.

    Threads may share one.

    Args:
        path: the file; its directory exists.
    """

    def __init__(self, path: Path):
        self._file = Appender(path)
        self._lock = threading.Lock()

    def tell(self, text: str, **facts: object) -> None:
        """Add an event: its text, the time, and facts of plain JSON types."""
        event = {"time": round(time.time(), 3), "text": text, **facts}
        with self._lock, contextlib.suppress(OSError):
            full = len(self._file.waiting) > _MOST_WAITING
            self._file.add(b"" if full else json.dumps(plain(event)).encode() + b"\n")

    def flush(self) -> None:
        """Try again to write what could not be written."""
        with self._lock, contextlib.suppress(OSError):
            self._file.flush()

    def close(self) -> None:
        """Close the file; what could not be written is given up."""
        with self._lock:
            self._file.close()
