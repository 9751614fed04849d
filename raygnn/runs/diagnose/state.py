"""A rank's state file: where it is, in a record of fixed size that outlives the rank.

The rank overwrites parts of the record in place while it runs, each with one write, so that what
it was doing can be read after it was killed, and while it is stopped. Little-endian; times are
seconds, of the epoch (``wall``) and of the rank's own monotonic clock (``mono``).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from raygnn.errors import DataError
from raygnn.util.files import read_regular

SIZE = 1024  # bytes of the file
TRAINING, PREFETCH, LIFE, WORDS = 128, 192, 256, 384  # where parts begin; the first, at 0

_MAGIC = b"raygnnS1"
_START = struct.Struct("<8sIIIIdd64s")
_PLACE = struct.Struct("<32sqqdd")
_LIFE = struct.Struct("<ddQQQd")
_UNKNOWN = -1  # an epoch or a step that was not said

STATE, BOX, CRASH, FAILURE = ".state", ".blackbox.json", ".crash", ".failure.json"
DRIVER = "driver.json"

DONE = "done"  # the phase of a rank that came to its end


def file_of(logs: Path, rank: int, kind: str) -> Path:
    """``<logs>/rank-<r><kind>``, for the kinds above."""
    return logs / f"rank-{rank}{kind}"


@dataclass(frozen=True)
class Place:
    """What one of a rank's threads does, since when; epoch and step are None until known."""

    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    wall: float = 0.0
    mono: float = 0.0

    def pack(self) -> bytes:
        numbers = (_UNKNOWN if n is None else n for n in (self.epoch, self.step))
        return _PLACE.pack(_text(self.phase, 32), *numbers, self.wall, self.mono)

    @classmethod
    def unpack(cls, data: bytes) -> Place:
        phase, epoch, step, wall, mono = _PLACE.unpack(data)
        epoch, step = (None if n == _UNKNOWN else n for n in (epoch, step))
        return cls(_read(phase), epoch, step, wall, mono)


@dataclass(frozen=True)
class Start:
    """One start of a rank.

    Attributes:
        attempt: which start of the run this is, from 1.
        command: when the command began that it belongs to.
        begun: when this rank began.
    """

    attempt: int
    rank: int
    world: int
    pid: int
    command: float
    begun: float
    host: str

    def pack(self) -> bytes:
        numbers = (self.attempt, self.rank, self.world, self.pid, self.command, self.begun)
        return _START.pack(_MAGIC, *numbers, _text(self.host, 64))

    @classmethod
    def unpack(cls, data: bytes) -> Start:
        _, attempt, rank, world, pid, command, begun, host = _START.unpack(data)
        return cls(attempt, rank, world, pid, command, begun, _read(host))


@dataclass(frozen=True)
class Life:
    """A rank's last sign of life, about one each second, and its node's memory then, in bytes.

    Attributes:
        rss: of this process; ``used`` and ``limit``: of the machine or container; 0 = unknown.
        boxed: when the black box was written; 0 = not yet.
    """

    wall: float = 0.0
    mono: float = 0.0
    rss: int = 0
    used: int = 0
    limit: int = 0
    boxed: float = 0.0

    def pack(self) -> bytes:
        return _LIFE.pack(self.wall, self.mono, self.rss, self.used, self.limit, self.boxed)

    @classmethod
    def unpack(cls, data: bytes) -> Life:
        return cls(*_LIFE.unpack(data))


@dataclass(frozen=True)
class State:
    """The whole record; ``words``: what it died of, which may find no room elsewhere."""

    start: Start
    training: Place = Place()
    prefetch: Place = Place()
    life: Life = Life()
    words: str = ""

    def pack(self) -> bytes:
        data = bytearray(SIZE)
        for at, part in (
            (0, self.start),
            (TRAINING, self.training),
            (PREFETCH, self.prefetch),
            (LIFE, self.life),
        ):
            packed = part.pack()
            data[at : at + len(packed)] = packed
        data[WORDS:] = pack_words(self.words)
        return bytes(data)


def read_state(path: Path) -> State | None:
    """The record in the file; None when there is no file.

    Raises:
        DataError: it is cut off, or something else.
    """
    try:
        data = read_regular(path, SIZE, cut=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(data) < SIZE or not data.startswith(_MAGIC):
        raise DataError("not a whole record of a rank's state", where=str(path))
    found = State(
        Start.unpack(data[: _START.size]),
        Place.unpack(data[TRAINING : TRAINING + _PLACE.size]),
        Place.unpack(data[PREFETCH : PREFETCH + _PLACE.size]),
        Life.unpack(data[LIFE : LIFE + _LIFE.size]),
        _read(data[WORDS:SIZE]),
    )
    parts = (found.start, found.training, found.prefetch, found.life)
    times = [value for part in parts for value in vars(part).values() if isinstance(value, float)]
    if not all(map(math.isfinite, times)):
        raise DataError("not the times of a rank's state", where=str(path))
    return found


def pack_words(text: str) -> bytes:
    """The last words, cut to the room there is."""
    return _text(text, SIZE - WORDS).ljust(SIZE - WORDS, b"\0")


def _text(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size]


def _read(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
