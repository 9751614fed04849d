"""Columns of a chunk as NumPy arrays; what cannot be one is an error with its row."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.tables.description import TimeColumn
from raygnn.graph.tables.reader import Chunk

INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"  # of which int64 has all, each written in one way
_LARGEST = float(np.finfo(np.float32).max)
_WIDEST = 1 << 20  # numbers of a row
_MICROSECONDS = {"d": 86_400e6, "s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}  # of a unit
_LATEST = 2.0**62  # microseconds


def shown(value: Any) -> str:
    """A value as errors show it, at most 60 characters."""
    try:
        text = repr(value.as_py() if isinstance(value, pa.Scalar) else value)
    except (OverflowError, ValueError):  # a point in time of no year that Python knows
        text = f"{value.value} as {value.type}"
    return text if len(text) <= 60 else text[:60] + "…"


def first(bad: Any) -> int:
    """The first true row of a mask, of Arrow's or NumPy's."""
    return int(np.argmax(bad if isinstance(bad, np.ndarray) else pc.fill_null(bad, False)))


def to_numpy(array: pa.Array) -> Array:
    """An array of Arrow's as one of NumPy's, copied where it must be."""
    return np.asarray(array.to_numpy(zero_copy_only=False))


def nan_to_null(array: pa.Array) -> pa.Array:
    """Replace NaN in floats by null: both mean a missing value."""
    if not pa.types.is_floating(array.type):
        return array
    return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)


def refuse_nulls(chunk: Chunk, column: str, remedy: str) -> pa.Array:
    """The column, which has a value in each row; raises DataError if it has not."""
    array = chunk.columns[column]
    if array.null_count:
        raise chunk.error(first(pc.is_null(array)), column, "there is no value", remedy)
    return array


def cast(chunk: Chunk, column: str, array: pa.Array, to: Any, remedy: str, width: int = 1) -> Any:
    """Convert a column's values, ``width`` for each row."""
    try:
        return pc.cast(array, to)
    except pa.ArrowNotImplementedError:
        raise chunk.error(0, column, f"the column is {array.type}", remedy) from None
    except pa.ArrowException:
        low, high = 0, len(array)
        while high - low > 1:  # the first value that fails, by halving
            middle = (low + high) // 2
            try:
                pc.cast(array.slice(low, middle - low), to)
                low = middle
            except pa.ArrowException:
                high = middle
        message = f"the value is {shown(array[low])}"
        raise chunk.error(low // width, column, message, remedy) from None


def matrix(
    chunk: Chunk,
    column: str,
    width: int | None = None,
    fill: float | None = None,
    dtype: Any = None,
    array: pa.Array | None = None,
) -> Array:
    """A column of numbers as ``[n, 1]``, or one of lists of equal length as ``[n, w]``.

    Args:
        width: of the rows before; None = none were.
        fill: in place of missing numbers; None = there may be none.
        dtype: None = float32, or float16 where it is stored so and nothing is missing.
        array: in place of the column as it is.
    """
    array = chunk.columns[column] if array is None else array
    if is_list(array.type):
        array, width = _flat(chunk, column, array, width)
    elif width not in (None, 1):
        message = f"there is one number, expected a list of {width}"
        raise chunk.error(0, column, message, "give all files columns of one kind")
    width = width or 1
    kind, remedy = array.type, "say parts or since, which make numbers of points in time"
    if not pa.types.is_temporal(kind):
        remedy = (
            "features and weights are numbers; words can be categories, or features with onehot"
        )
    if pa.types.is_temporal(kind) or pa.types.is_nested(kind):
        raise chunk.error(0, column, f"the column is {kind}", remedy)
    if fill is not None:
        array = nan_to_null(array)
    elif array.null_count:
        raise no_number(chunk, first(pc.is_null(array)) // width, column)
    if pa.types.is_float16(kind) and (dtype or array.null_count):
        array = pc.cast(array, pa.float32())
    if pa.types.is_boolean(kind):
        array = pc.cast(array, pa.uint8())
    if pa.types.is_integer(array.type):
        array = pc.cast(array, pa.float64(), safe=False)  # rounded, as float32 will be anyway
    elif not pa.types.is_floating(array.type):
        try:
            array = pc.cast(array, pa.float64())
        except pa.ArrowException:
            array = cast(chunk, column, _without_truths(array), pa.float64(), remedy, width)
    values = to_numpy(pc.fill_null(array, 0) if array.null_count else array)
    bad = ~np.isfinite(values)
    if values.dtype == np.float64:
        bad |= np.abs(values) > _LARGEST
    if bad.any():
        message = f"the number is {values[first(bad)]}"
        remedy = "numbers must be finite, and fit float32"
        raise chunk.error(first(bad) // width, column, message, remedy)
    if values.dtype != np.float16:
        values = values.astype(dtype or np.float32, copy=False)
    if array.null_count:
        values = np.where(to_numpy(pc.is_null(array)), values.dtype.type(fill), values)
    return values.reshape(-1, width)


def _flat(chunk: Chunk, column: str, array: pa.Array, width: int | None) -> tuple[pa.Array, int]:
    """Return the elements of lists of equal length, and that length."""
    if array.null_count:
        row, remedy = first(pc.is_null(array)), "give a list in every row"
        raise chunk.error(row, column, "there is no value", remedy)
    lengths = to_numpy(pc.list_value_length(array))
    expected = int(lengths[0]) if width is None else width
    if (lengths != expected).any():
        row = first(lengths != expected)
        message = f"the list has {lengths[row]} numbers, expected {expected}"
        raise chunk.error(row, column, message, "give lists of one length")
    if not 0 < expected <= _WIDEST:
        message = f"the list has {expected} numbers"
        raise chunk.error(0, column, message, f"give 1 to {_WIDEST} numbers")
    return array.flatten(), expected


def _without_truths(array: pa.Array) -> pa.Array:
    """1 and 0 in place of true and false, where the array is text."""
    if not pa.types.is_large_string(array.type):
        return array
    lower = pc.utf8_lower(array)
    ones = pc.if_else(pc.equal(lower, "true"), "1", array)
    return pc.if_else(pc.equal(lower, "false"), "0", ones)


def no_number(chunk: Chunk, row: int, column: str) -> DataError:
    """The error of a missing number."""
    array, value = chunk.columns[column], "median}"
    if pa.types.is_large_string(array.type):
        array = pc.unique(pc.utf8_lower(array.drop_null()))
        truths = {"true", "false"}.issuperset(array.to_pylist())
    else:
        truths = pa.types.is_boolean(array.type)
    if truths:
        value = "0}, which is false"
    remedy = f"impute it, such as {{column: {column}, impute: {value}, or give fill: 0.0"
    return missing_value(chunk, row, column, "number", remedy)


def missing_value(chunk: Chunk, row: int, column: str, kind: str, remedy: str) -> DataError:
    """The error of a missing value, which says how many are: the files are read once more."""
    missing = total = 0
    for other in chunk.reader.again(column).chunks():
        array = other.columns[column]
        array = nan_to_null(array.flatten() if is_list(array.type) else array)
        missing, total = missing + array.null_count, total + len(array)
    message = f"there is no {kind}; {missing:,} of {total:,} are missing"
    return chunk.error(row, column, message, remedy)


def is_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list or pa.types.is_fixed_size_list(kind))


class Times:
    """Whole numbers as they are, points in time, and numbers whose unit is named, as microseconds
    since 1970, int64."""

    def __init__(self, time: TimeColumn | None = None):
        self._unit = None if time is None else time.unit
        self._names_unit = time is not None
        self._to: pa.DataType | None = None

    @property
    def in_microseconds(self) -> bool:
        """True if what was read is known to be in microseconds: its unit is named, or dates."""
        return self._unit is not None or pa.types.is_timestamp(self._to or pa.null())

    def of(self, chunk: Chunk, column: str) -> Array:
        """int64 ``[n]``; raises DataError for what is neither, or not what came before, and for
        nulls."""
        refuse_nulls(chunk, column, "give each row a time, or leave time out")
        if self._unit is not None:
            return _microseconds(chunk, column, self._unit)
        return to_numpy(pc.cast(self.array(chunk, column), pa.int64()))

    def array(self, chunk: Chunk, column: str) -> pa.Array:
        """int64, or timestamps in microseconds; nulls stay."""
        array = chunk.columns[column]
        if array.null_count == len(array):
            return pa.nulls(len(array), self._to or pa.timestamp("us"))
        remedy = (
            "give whole numbers, or points in time such as 2024-05-01 12:30:00.123456, not both; "
            "of these all with a zone, or none"
        )
        if self._names_unit:
            remedy += f"; name the unit of other numbers: time: {{column: {column}, unit: s}}"
        kind = array.type
        temporal, text = pa.types.is_temporal(kind), chunk.text(column)
        no_point = pa.types.is_time(kind) or pa.types.is_duration(kind)
        if no_point or not (text or temporal or pa.types.is_integer(kind)):
            raise chunk.error(0, column, f"the column is {kind}", remedy)
        to = self._to = self._to or _time_type(array)
        if pa.types.is_timestamp(kind) and kind.unit == "ns":  # what is finer is cut
            array = pc.floor_temporal(pc.cast(array, pa.timestamp("ns")), unit="microsecond")
        zones = [getattr(one, "tz", None) is not None for one in (kind, to)]
        if not text and (temporal != pa.types.is_temporal(to) or zones[0] != zones[1]):
            raise chunk.error(0, column, f"the column is {kind}, and was {to}", remedy)
        return cast(chunk, column, array, to, remedy)


def _microseconds(chunk: Chunk, column: str, unit: str) -> Array:
    """Return numbers of a unit as microseconds, cut downwards, int64 ``[n]``."""
    array, scale = chunk.columns[column], _MICROSECONDS[unit]
    kind, remedy = array.type, f"give numbers of {unit} since 1970, or leave the unit out"
    if not (chunk.text(column) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise chunk.error(0, column, f"the column is {kind}", remedy)
    if scale < 1 or pa.types.is_integer(kind):  # whole numbers, which float64 would round
        numbers = to_numpy(cast(chunk, column, array, pa.int64(), remedy))
    else:
        numbers = to_numpy(cast(chunk, column, array, pa.float64(), remedy))
    wrong = ~(np.abs(numbers.astype(np.float64)) * scale < _LATEST)
    if wrong.any():
        row = first(wrong)
        raise chunk.error(row, column, f"{numbers[row]} {unit} is no time", remedy)
    if numbers.dtype == np.int64:
        return numbers * int(scale) if scale >= 1 else numbers // 1000
    # a microsecond that float64 misses by a little is that microsecond
    return np.floor(numbers * scale + 0.25).astype(np.int64)


def _time_type(array: pa.Array) -> pa.DataType:
    if pa.types.is_temporal(array.type):
        return pa.timestamp("us", getattr(array.type, "tz", None))
    text = str(array.drop_null()[0].as_py())
    if re.match(INTEGER, text):
        return pa.int64()
    zoned = re.search(r"(Z|:[\d.]+[+-]\d\d(:?\d\d)?)$", text)
    return pa.timestamp("us", "UTC" if zoned else None)
