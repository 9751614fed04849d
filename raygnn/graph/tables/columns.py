"""Columns of a chunk as NumPy arrays; what cannot be one is an error with its row."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.reader import Chunk

INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"  # of which int64 has all, each written in one way
LARGEST = float(np.finfo(np.float32).max)
_WIDEST = 1 << 20  # numbers of a row

Array = np.ndarray[Any, Any]


def shown(value: Any) -> str:
    """A value as errors show it, at most 60 characters."""
    text = repr(value.as_py() if isinstance(value, pa.Scalar) else value)
    return text if len(text) <= 60 else text[:60] + "…"


def first(bad: Any) -> int:
    """The first true row of a mask, of Arrow's or NumPy's."""
    return int(np.argmax(bad if isinstance(bad, np.ndarray) else pc.fill_null(bad, False)))


def refuse_nulls(chunk: Chunk, column: str, remedy: str) -> pa.Array:
    """The column, which has a value in each row.

    Raises:
        DataError: it has not.
    """
    array = chunk.columns[column]
    if array.null_count:
        raise chunk.error(first(pc.is_null(array)), column, "there is no value", remedy)
    return array


def numbers(chunk: Chunk, column: str, fill: float | None) -> Array:
    """Finite numbers, float32 ``[n]``.

    Args:
        fill: in place of nulls; None = they are refused.

    Raises:
        DataError: text that is no number, a null, NaN, infinity, or more than float32 holds.
    """
    return _numbers(chunk, column, chunk.columns[column], fill, 1)


def matrix(chunk: Chunk, column: str, fill: float | None, width: int | None) -> Array:
    """A column of numbers as float32 ``[n, 1]``, or one of lists of equal length as ``[n, w]``.

    Args:
        width: of the rows before; None = none were.

    Raises:
        DataError: as `numbers`, or lists that differ in length.
    """
    array = chunk.columns[column]
    kind = array.type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        found = numbers(chunk, column, fill).reshape(-1, 1)
    else:
        array = refuse_nulls(chunk, column, "give a list in every row")
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        expected = int(lengths[0]) if width is None else width
        if (lengths != expected).any():
            row = first(lengths != expected)
            what = f"the list has {lengths[row]} numbers, expected {expected}"
            raise chunk.error(row, column, what, "give lists of one length")
        if not 0 < expected <= _WIDEST:
            what = f"the list has {expected} numbers"
            raise chunk.error(0, column, what, f"give 1 to {_WIDEST} numbers")
        found = _numbers(chunk, column, array.flatten(), fill, expected).reshape(-1, expected)
    if width is not None and found.shape[1] != width:
        what = f"there is one number, expected a list of {width}"
        raise chunk.error(0, column, what, "give all files columns of one kind")
    return found


class Features:
    """Columns joined to one matrix of float32, a chunk after the other."""

    def __init__(self, columns: str | tuple[str, ...], fill: float | None):
        self.columns = [columns] if isinstance(columns, str) else list(columns)
        self.fill = fill
        self._widths: list[int] | None = None
        self._rows: Growing | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows; raises DataError as `matrix` does."""
        widths: Sequence[int | None] = self._widths or [None] * len(self.columns)
        blocks = [matrix(chunk, c, self.fill, w) for c, w in zip(self.columns, widths, strict=True)]
        if self._rows is None:
            self._widths = [block.shape[1] for block in blocks]
            self._rows = Growing(np.float32, sum(self._widths))
        self._rows.append(np.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0])

    def take(self, num: int | None = None) -> Array:
        """float32 ``[N, F]``; filled up to ``num`` rows."""
        rows = self._rows or Growing(np.float32, len(self.columns))
        if num is not None:
            rows.pad(num, self.fill if self.fill is not None else 0.0)
        taken: Array = rows.take()
        return taken


class Times:
    """Whole numbers as they are, points in time as microseconds since 1970, int64."""

    def __init__(self) -> None:
        self._to: pa.DataType | None = None

    def of(self, chunk: Chunk, column: str) -> Array:
        """int64 ``[n]``; raises DataError for what is neither, or not what came before."""
        array = refuse_nulls(chunk, column, "give each edge a time, or leave time out")
        remedy = "give whole numbers, or points in time such as 2024-05-01 12:30:00, not both"
        kind = array.type
        if not (chunk.text(column) or pa.types.is_integer(kind) or pa.types.is_temporal(kind)):
            raise chunk.error(0, column, f"the column is {kind}", remedy)
        if pa.types.is_time(kind) or pa.types.is_duration(kind):
            raise chunk.error(0, column, f"the column is {kind}", remedy)
        to = self._to or _type_of_time(array)
        if pa.types.is_temporal(kind) and pa.types.is_temporal(to):  # finer ones are cut
            found = pc.cast(array, to, safe=False)
        elif pa.types.is_temporal(kind) or (pa.types.is_temporal(to) and not chunk.text(column)):
            raise chunk.error(0, column, f"the column is {kind}, and was {to}", remedy)
        else:
            found = cast(chunk, column, array, to, remedy)
        self._to = to
        return np.asarray(pc.cast(found, pa.int64()).to_numpy(zero_copy_only=False))


def _type_of_time(array: pa.Array) -> pa.DataType:
    if pa.types.is_temporal(array.type):
        return pa.timestamp("us", getattr(array.type, "tz", None))
    text = str(array[0].as_py())
    if re.match(INTEGER, text):
        return pa.int64()
    return pa.timestamp("us", "UTC" if re.search(r"(Z|:\d\d[+-]\d\d:?\d\d)$", text) else None)


def cast(chunk: Chunk, column: str, array: pa.Array, to: Any, remedy: str, width: int = 1) -> Any:
    """Convert a column's values, ``width`` for each row.

    Raises:
        DataError: naming the first that cannot be.
    """

    def fails(part: pa.Array) -> bool:
        try:
            pc.cast(part, to)
        except pa.ArrowException:
            return True
        return False

    try:
        return pc.cast(array, to)
    except pa.ArrowNotImplementedError:
        raise chunk.error(0, column, f"the column is {array.type}", remedy) from None
    except pa.ArrowException:
        at = first_failing(array, fails)
        what = f"the value is {shown(array[at])}"
        raise chunk.error(at // width, column, what, remedy) from None


def first_failing(array: pa.Array, fails: Callable[[pa.Array], bool]) -> int:
    """The first value with which an array fails, found by halving."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if fails(array.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low


def _numbers(chunk: Chunk, column: str, array: pa.Array, fill: float | None, width: int) -> Array:
    """float32, ``width`` of them for each row."""
    remedy = "features and weights are numbers; words can be categories"
    kind = array.type
    if pa.types.is_temporal(kind) or pa.types.is_nested(kind):
        raise chunk.error(0, column, f"the column is {kind}", remedy)
    if array.null_count and fill is None:
        row = first(pc.is_null(array)) // width
        raise chunk.error(row, column, "there is no number", "fill it in, or give fill: 0.0")
    if pa.types.is_boolean(kind):
        array = pc.cast(array, pa.uint8())
    if pa.types.is_integer(array.type):
        array = pc.cast(array, pa.float64(), safe=False)  # rounded, as float32 will be anyway
    elif not (pa.types.is_float32(kind) or pa.types.is_float64(kind)):
        array = cast(chunk, column, array, pa.float64(), remedy, width)
    if array.null_count:
        array = pc.fill_null(array, pa.scalar(fill, array.type))
    found = array.to_numpy(zero_copy_only=False)
    bad = ~(np.abs(found) <= LARGEST)
    if bad.any():
        at = first(bad)
        what = f"the number is {found[at]}"
        raise chunk.error(at // width, column, what, "numbers must be finite, and fit float32")
    return np.asarray(found, np.float32)
