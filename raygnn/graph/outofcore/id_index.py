"""The users' ids of nodes in files, and a hash table of them that many processes map.

The table has a slot of 8 bytes for each ⅔ of a node. What a slot leads to is compared with the id
that is looked for, byte by byte, so that two ids are never taken for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit, uint64

from raygnn.graph.arrays import Array
from raygnn.graph.outofcore.disk_arrays import Appended, DiskArray, store
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.reader import Chunk, TableReader
from raygnn.util import hashing

_ROWS = 1 << 20  # ids that are converted at once
_TAG, _ROW = np.int64(0x7FFFFF) << np.int64(40), (np.int64(1) << np.int64(40)) - np.int64(1)
_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

_mix = njit(inline="always")(hashing.mix)


@dataclass(frozen=True)
class StoredIds:
    """The ids of one node type in files: whole numbers, or text as ``offsets`` and bytes.

    Attributes:
        text: whether they are text, whose bytes are in ``values``.
        slots: the hash table.
    """

    ntype: str
    text: bool
    values: DiskArray
    offsets: DiskArray
    slots: DiskArray

    @classmethod
    def from_directory(cls, directory: Path, ntype: str, *, text: bool) -> StoredIds:
        """Open the ids stored in a directory."""
        values = DiskArray(directory / "values", "uint8" if text else "int64")
        offsets = DiskArray(directory / "offsets", "int64")
        return cls(ntype, text, values, offsets, DiskArray(directory / "slots", "int64"))

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.text else len(self.values)

    def array(self) -> pa.Array:
        """int64 or large_string ``[num]``, mapped."""
        values = self.values.map()
        if not self.text:
            return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])
        offsets = self.offsets.map()
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)

    def index(self) -> IndexedIds:
        """The ids, to look ends of edges up."""
        return IndexedIds(self)


class IdsToDisk(Ids):
    """Ids of the nodes of one type that are put into files while they are read."""

    def __init__(self, ntype: str, directory: Path):
        super().__init__(ntype)
        self._directory = directory
        self._numbers = Appended(directory / "values")
        self._text: tuple[Appended, Appended] | None = None  # values and offsets
        self._end = 0
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def add(self, chunk: Chunk, column: str) -> None:
        array = self.of_nodes(chunk, column)
        self.num += len(array)
        if self._text is None and pa.types.is_int64(array.type):
            self._numbers.add(array.to_numpy())
            return
        if self._text is None:
            self._become_text()
        self._add_text(pc.cast(array, pa.large_string()))

    def close(self, reader: TableReader, column: str) -> None:
        """Number what was added, and see that no id is there twice."""
        for file in self._text or (self._numbers,):
            file.close()
        stored = StoredIds.from_directory(self._directory, self.ntype, text=self._text is not None)
        self.values = stored.array()
        slots = np.full(self.num + self.num // 2 + 1, -1, np.int64)
        row, before = _fill(*_parts(self.values), stored.text, slots)
        if row >= 0:
            raise self.twice(reader, column, row, before)
        store(self._directory / "slots", slots)

    def _become_text(self) -> None:
        """Put the numbers that came before down as text."""
        self._numbers.close()
        numbers = DiskArray(self._directory / "values", "int64")
        path = self._directory / "numbers"
        numbers.path.rename(path)
        self._text = Appended(self._directory / "values"), Appended(self._directory / "offsets")
        self._text[1].add(np.zeros(1, np.int64))
        numbers = DiskArray(path, "int64")
        for start in range(0, len(numbers), _ROWS):
            piece = numbers.read(start, min(start + _ROWS, len(numbers)))
            self._add_text(pc.cast(pa.array(piece), pa.large_string()))
        path.unlink()

    def _add_text(self, array: pa.Array) -> None:
        assert self._text is not None
        offsets, values = _text_of(array)
        self._text[0].add(values[offsets[0] : offsets[-1]])
        self._text[1].add(offsets[1:] - offsets[0] + self._end)
        self._end += int(offsets[-1] - offsets[0])


class IndexedIds(Ids):
    """Ids in files, looked up in the hash table of them."""

    def __init__(self, stored: StoredIds):
        super().__init__(stored.ntype)
        self.values = stored.array()
        self._slots = stored.slots.map()

    def _find(self, ends: pa.Array) -> pa.Array:
        absent = np.asarray(pc.is_null(ends))
        if pa.types.is_int64(ends.type):
            ends = pc.fill_null(ends, 0)
        numbers = np.empty(len(ends), np.int64)
        text = not pa.types.is_int64(self.values.type)
        _look_up(*_parts(ends), *_parts(self.values), text, self._slots, numbers)
        return pa.array(numbers, mask=absent | (numbers < 0))


def _parts(array: pa.Array) -> tuple[Array, Array]:
    """Offsets, and bytes or numbers."""
    if pa.types.is_int64(array.type):
        return np.zeros(len(array) + 1, np.int64)[:0], array.to_numpy()
    return _text_of(array)


def _text_of(array: pa.Array) -> tuple[Array, Array]:
    """Offsets int64 ``[num + 1]`` and bytes of large_string."""
    _, offsets, values = array.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    return bounds, np.frombuffer(values or b"", np.uint8)


@njit(inline="always")
def _hash(offsets, values, is_text, row):  # type: ignore[no-untyped-def]
    if not is_text:
        return _mix(uint64(values[row]))
    code = uint64(0xCBF29CE484222325)
    for at in range(offsets[row], offsets[row + 1]):  # FNV-1a
        code = (code ^ uint64(values[at])) * uint64(0x100000001B3)
    return _mix(code)


@njit(inline="always")
def _same(offsets, values, row, others, theirs, other, is_text):  # type: ignore[no-untyped-def]
    if not is_text:
        return values[row] == theirs[other]
    length = offsets[row + 1] - offsets[row]
    if length != others[other + 1] - others[other]:
        return False
    for at in range(length):  # noqa: SIM110 (not compiled as a generator)
        if values[offsets[row] + at] != theirs[others[other] + at]:
            return False
    return True


@njit(**_COMPILE)
def _fill(offsets, values, is_text, slots):  # type: ignore[no-untyped-def]
    """Enter all ids into empty slots. Returns the first row with an id that was there before, and
    the row where it was; or -1 twice."""
    num = len(offsets) - 1 if is_text else len(values)
    for row in range(num):
        code = _hash(offsets, values, is_text, row)
        tag = np.int64(code >> uint64(1)) & _TAG
        at = np.int64(code % uint64(len(slots)))
        while slots[at] >= 0:
            if slots[at] & _TAG == tag:
                other = slots[at] & _ROW
                if _same(offsets, values, row, offsets, values, other, is_text):
                    return row, other
            at = at + 1 if at + 1 < len(slots) else 0
        slots[at] = tag | row
    return -1, -1


@njit(**_COMPILE)
def _look_up(asked, ends, offsets, values, is_text, slots, numbers):  # type: ignore[no-untyped-def]
    """The row of each id that is asked for; -1 where there is none."""
    for row in range(len(numbers)):
        code = _hash(asked, ends, is_text, row)
        tag = np.int64(code >> uint64(1)) & _TAG
        at = np.int64(code % uint64(len(slots)))
        numbers[row] = -1
        while slots[at] >= 0:
            if slots[at] & _TAG == tag:
                other = slots[at] & _ROW
                if _same(asked, ends, row, offsets, values, other, is_text):
                    numbers[row] = other
                    break
            at = at + 1 if at + 1 < len(slots) else 0
