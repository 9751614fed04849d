"""State file of a rank: its present phase, in a record of fixed size that outlives the rank.

The rank overwrites sections of the record in place, each with one write, so that it can be read
after the rank was killed, or while it is stopped. Little-endian; times are seconds, of the epoch
(``wall``) and of the rank's monotonic clock (``mono``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from raygnn.errors import DataError
from raygnn.util.files import read_regular

if TYPE_CHECKING:
    from typing import Self

SIZE = 1024  # bytes of the file
TRAINING, PREFETCH, LIFE, WORDS = 128, 192, 256, 384  # offsets of sections; the first is at 0

_MAGIC = b"raygnnS1"
_UNKNOWN = -1  # epoch or step

STATE, BOX, CRASH, FAILURE = ".state", ".blackbox.json", ".crash", ".failure.json"
DRIVER = "driver.json"

DONE = "done"  # the phase of a rank that has finished


def file_of(logs: Path, rank: int, kind: str) -> Path:
    """Return ``<logs>/rank-<r><kind>`` for one of the kinds above."""
    return logs / f"rank-{rank}{kind}"


class _StateSection:
    """Section of the record, packed field by field; text is truncated to its field."""

    _FORMAT: ClassVar[struct.Struct]

    def pack(self) -> bytes:
        return self._FORMAT.pack(*map(_packed, vars(self).values()))

    @classmethod
    def read(cls, record: bytes, at: int) -> Self:
        return cls(*map(_unpacked, cls._FORMAT.unpack_from(record, at)))


@dataclass(frozen=True)
class ThreadPhase(_StateSection):
    """Present phase of a rank's thread, and when it began; epoch and step are None until known."""

    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    wall: float = 0.0
    mono: float = 0.0

    _FORMAT = struct.Struct("<32sqqdd")


@dataclass(frozen=True)
class RankAttempt(_StateSection):
    attempt: int  # number of the run's attempt, from 1
    rank: int
    world: int
    pid: int
    command: float  # when its command began
    begun: float  # when this rank began
    host: str

    _FORMAT = struct.Struct("<IIIIdd64s")


@dataclass(frozen=True)
class Life(_StateSection):
    """Last heartbeat of a rank, about one per second, and memory in bytes."""

    wall: float = 0.0
    mono: float = 0.0
    # of this process; ``used`` and ``limit``: of the machine or container; 0 = unknown
    rss: int = 0
    used: int = 0
    limit: int = 0
    boxed: float = 0.0  # when the crash dump was written; 0 = not yet

    _FORMAT = struct.Struct("<ddQQQd")


@dataclass(frozen=True)
class State:
    """Complete record; ``words``: the rank's error, for which other storage may be full."""

    start: RankAttempt
    training: ThreadPhase = ThreadPhase()
    prefetch: ThreadPhase = ThreadPhase()
    life: Life = Life()
    words: str = ""

    def pack(self) -> bytes:
        record = bytearray(SIZE)
        for at, part in (
            (0, _MAGIC + self.start.pack()),
            (TRAINING, self.training.pack()),
            (PREFETCH, self.prefetch.pack()),
            (LIFE, self.life.pack()),
            (WORDS, pack_words(self.words)),
        ):
            record[at : at + len(part)] = part
        return bytes(record)


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
    return State(
        RankAttempt.read(record, len(_MAGIC)),
        ThreadPhase.read(record, TRAINING),
        ThreadPhase.read(record, PREFETCH),
        Life.read(record, LIFE),
        _unpacked(record[WORDS:]),
    )


def pack_words(text: str) -> bytes:
    """Pack the error, truncated to its section."""
    room = SIZE - WORDS
    return text.encode(errors="replace")[:room].ljust(room, b"\0")


def _packed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace")
    return _UNKNOWN if value is None else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.rstrip(b"\0").decode(errors="replace")
    return None if isinstance(value, int) and value == _UNKNOWN else value
