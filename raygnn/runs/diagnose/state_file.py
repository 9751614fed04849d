"""State file of a rank: its present phase, in a record of fixed size that outlives the rank.

The rank overwrites the record in place with one write, so that it can be read after the rank was
killed, or while it is stopped. Little-endian; times are seconds since the epoch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygnn.errors import DataError
from raygnn.util.files import read_regular

_MAGIC = b"raygnnS2"
_FORMAT = struct.Struct("<8sIIIIdd64s32sqqddQQQd640s")
SIZE = _FORMAT.size  # bytes of the file
_UNKNOWN = -1  # epoch or step

STATE, BOX, CRASH, FAILURE = ".state", ".blackbox.json", ".crash", ".failure.json"
DRIVER = "driver.json"

DONE = "done"  # the phase of a rank that has finished


def file_of(logs: Path, rank: int, kind: str) -> Path:
    """Return ``<logs>/rank-<r><kind>`` for one of the kinds above."""
    return logs / f"rank-{rank}{kind}"


@dataclass(frozen=True)
class State:
    """State of a rank, in the order of the record; text is truncated to its field."""

    attempt: int = 0  # number of the run's attempt, from 1
    rank: int = 0
    world: int = 0
    pid: int = 0
    command: float = 0.0  # when its command began
    begun: float = 0.0  # when this rank began
    host: str = ""
    phase: str = ""  # of the training thread
    epoch: int | None = None  # None until known, as is the step
    step: int | None = None
    since: float = 0.0  # when the phase began
    beat: float = 0.0  # last heartbeat, about one per second
    # memory in bytes: of this process; used and in all of the machine or container; 0 = unknown
    rss: int = 0
    used: int = 0
    limit: int = 0
    boxed: float = 0.0  # when the crash dump was written; 0 = not yet
    words: str = ""  # the rank's error, for which other storage may be full

    def pack(self) -> bytes:
        return _FORMAT.pack(_MAGIC, *map(_packed, vars(self).values()))


def read_state(path: Path) -> State | None:
    """Read the file; None if it is missing. Raises DataError if it is not a complete state file."""
    try:
        record = read_regular(path, SIZE, cut=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(record) < SIZE or not record.startswith(_MAGIC):
        raise DataError("not a complete record of a rank's state", where=str(path))
    return State(*map(_unpacked, _FORMAT.unpack(record)[1:]))


def _packed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace")
    return _UNKNOWN if value is None else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.rstrip(b"\0").decode(errors="replace")
    return None if isinstance(value, int) and value == _UNKNOWN else value
