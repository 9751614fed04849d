"""Convert columns of a chunk to NumPy arrays: numbers, times, and categories as codes. A value that
cannot be converted raises DataError with its file, row and column.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.config.problems import show
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import SPLITS
from raygnn.graph.tables.description import Category, TimeColumn
from raygnn.graph.tables.reader import Chunk, TableReader

log = logging.getLogger("raygnn")

INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"  # fits int64, and has one spelling for each number
_LARGEST = np.finfo(np.float32).max
_WIDEST = 1 << 20  # numbers in a row's list, at most
_MICROSECONDS = {"d": 86_400e6, "s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}  # by unit
_LATEST = 2.0**62  # microseconds
MAX_CLASSES = 1 << 16
MAX_CATEGORIES = 1 << 20
_SHOWN = 5  # categories listed in an error

Kind: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and row shape


def shown(value: Any) -> str:
    """Return a value, also of Arrow, as errors show it: see `show`."""
    try:
        return show(value.as_py() if isinstance(value, pa.Scalar) else value)
    except (OverflowError, ValueError):  # a time beyond the years of Python's datetime
        return f"{value.value} as {value.type}"


def first(bad: Any) -> int:
    """Return the first true row of a mask, an Arrow or NumPy array."""
    return int(np.argmax(bad if isinstance(bad, np.ndarray) else pc.fill_null(bad, False)))


def to_numpy(array: pa.Array) -> Array:
    """Convert an Arrow array to NumPy, without a copy where possible."""
    return np.asarray(array.to_numpy(zero_copy_only=False))


def is_missing(array: pa.Array) -> Array:
    """Return which values are null or NaN, bool ``[n]``: both mean a missing value."""
    return to_numpy(pc.is_null(array, nan_is_null=True))


def refuse_nulls(chunk: Chunk, column: str, remedy: str) -> pa.Array:
    """Return a column; raises DataError if a row has no value."""
    array = chunk.columns[column]
    if array.null_count:
        raise chunk.error(first(pc.is_null(array)), column, "there is no value", remedy)
    return array


def cast(chunk: Chunk, column: str, array: pa.Array, to: Any, remedy: str, width: int = 1) -> Any:
    """Cast a column's values, ``width`` for each row; raises DataError for the first that fails."""

    def fails(last: int) -> bool:
        try:
            pc.cast(array.slice(0, last + 1), to)
        except pa.ArrowException:
            return True
        return False

    try:
        return pc.cast(array, to)
    except pa.ArrowNotImplementedError:
        raise chunk.error(0, column, f"the column is {array.type}", remedy) from None
    except pa.ArrowException:
        bad = bisect_left(range(len(array)), True, key=fails)
        message = f"the value is {shown(array[bad])}"
        raise chunk.error(bad // width, column, message, remedy) from None


def matrix(
    chunk: Chunk,
    column: str,
    width: int | None = None,
    fill: float | None = None,
    dtype: Any = None,
    array: pa.Array | None = None,
) -> Array:
    """Convert a column of numbers to ``[n, 1]``, or of lists of equal length to ``[n, w]``.

    Args:
        width: width of earlier rows; None = there are no earlier rows.
        fill: replaces missing numbers; None = missing numbers are refused.
        dtype: None = float32, or float16 if the column is float16 and no value is missing.
        array: values to convert in place of the column's.
    """
    array = chunk.columns[column] if array is None else array
    if is_list(array.type):
        array, width = _flat(chunk, column, array, width)
    elif width not in (None, 1):
        message = f"there is one number, expected a list of {width}"
        raise chunk.error(0, column, message, "give all files columns of one kind")
    width, kind = width or 1, array.type
    remedy = "features and weights are numbers: set parts or since for times, onehot for text"
    if pa.types.is_temporal(kind) or pa.types.is_nested(kind):
        raise chunk.error(0, column, f"the column is {kind}", remedy)
    if fill is None and array.null_count:
        raise no_number(chunk, first(pc.is_null(array)) // width, column)
    missing = np.zeros(len(array), bool) if fill is None else is_missing(array)
    if pa.types.is_boolean(kind):
        array = pc.cast(array, pa.uint8())
    if pa.types.is_integer(array.type):
        array = pc.cast(array, pa.float64(), safe=False)  # rounds, as float32 does later
    elif not pa.types.is_floating(kind):
        try:
            array = pc.cast(array, pa.float64())
        except pa.ArrowException:
            array = cast(chunk, column, _without_truths(array), pa.float64(), remedy, width)
    values = to_numpy(array)  # NaN where it is null
    if (bad := ~(np.abs(values) <= _LARGEST) & ~missing).any():
        message = f"the number is {values[first(bad)]}"
        remedy = "numbers must be finite, and fit float32"
        raise chunk.error(first(bad) // width, column, message, remedy)
    if values.dtype != np.float16 or dtype or missing.any():
        values = values.astype(dtype or np.float32, copy=False)
    if missing.any():
        values = np.where(missing, values.dtype.type(fill), values)
    return values.reshape(-1, width)


def _flat(chunk: Chunk, column: str, array: pa.Array, width: int | None) -> tuple[pa.Array, int]:
    """Return the elements of lists of equal length, and the length."""
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
    """Replace true and false by 1 and 0 if the array is text."""
    if not pa.types.is_large_string(array.type):
        return array
    lower = pc.utf8_lower(array)
    ones = pc.if_else(pc.equal(lower, "true"), "1", array)
    return pc.if_else(pc.equal(lower, "false"), "0", ones)


def no_number(chunk: Chunk, row: int, column: str) -> DataError:
    """Build the error for a missing number."""
    remedy = f"impute it, such as {{column: {column}, impute: median}}, or impute: 0 for false"
    return missing_value(chunk, row, column, "number", f"{remedy}; or give fill: 0.0")


def missing_value(chunk: Chunk, row: int, column: str, kind: str, remedy: str) -> DataError:
    """Build the error for a missing value. It reads the files again, to count missing values."""
    missing = total = 0
    reader = chunk.reader
    for other in TableReader(reader.files, [column], reader.delimiter).chunks():
        array = other.columns[column]
        of_chunk = is_missing(array.flatten() if is_list(array.type) else array)
        missing, total = missing + int(of_chunk.sum()), total + len(of_chunk)
    message = f"there is no {kind}; {missing:,} of {total:,} are missing"
    return chunk.error(row, column, message, remedy)


def is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


class WeightColumn:
    """Column of weights, numbers ≥ 0: float32 ``[n]``."""

    kind: Kind = "float32", ()
    missing = 0

    def __init__(self, column: str):
        self.columns = [column]

    def rows(self, chunk: Chunk) -> Array:
        weights = matrix(chunk, self.columns[0], 1, dtype=np.float32)[:, 0]
        if (bad := weights < 0).any():
            message = f"the weight is {weights[first(bad)]:g}"
            raise chunk.error(first(bad), self.columns[0], message, "weights are numbers ≥ 0")
        return weights


class Times:
    """Column of times, int64 ``[n]``: integers unchanged; dates, and numbers with a configured
    unit, as microseconds since 1970."""

    kind: Kind = "int64", ()
    missing = 0

    def __init__(self, column: str, described: TimeColumn | None = None):
        self.columns, self._described = [column], described
        self._unit = None if described is None else described.unit
        self._to: pa.DataType | None = None

    @property
    def in_microseconds(self) -> bool:
        """True if the values read so far are in microseconds: dates, or a configured unit."""
        return self._unit is not None or pa.types.is_timestamp(self._to or pa.null())

    def rows(self, chunk: Chunk) -> Array:
        """Return int64 ``[n]``; raises DataError for nulls, and if the kind of value changes."""
        refuse_nulls(chunk, self.columns[0], "give each row a time, or leave time out")
        if self._unit is not None:
            return _microseconds(chunk, self.columns[0], self._unit)
        return to_numpy(pc.cast(self.array(chunk), pa.int64()))

    def array(self, chunk: Chunk) -> pa.Array:
        """Return int64, or timestamps in microseconds; nulls are kept."""
        array = chunk.columns[column := self.columns[0]]
        if array.null_count == len(array):
            return pa.nulls(len(array), self._to or pa.timestamp("us"))
        remedy = (
            "use integers, or dates such as 2024-05-01 12:30:00.123456, not both; either all "
            "dates have a time zone, or none"
        )
        if self._described is not None:
            remedy += f"; name the unit of other numbers: time: {{column: {column}, unit: s}}"
        kind = array.type
        temporal, text = pa.types.is_temporal(kind), chunk.text(column)
        no_point = pa.types.is_time(kind) or pa.types.is_duration(kind)
        if no_point or not (text or temporal or pa.types.is_integer(kind)):
            raise chunk.error(0, column, f"the column is {kind}", remedy)
        to = self._to = self._to or _time_type(array)
        if pa.types.is_timestamp(kind) and kind.unit == "ns":  # truncate to microseconds
            array = pc.floor_temporal(pc.cast(array, pa.timestamp("ns")), unit="microsecond")
        zones = [getattr(one, "tz", None) is not None for one in (kind, to)]
        if not text and (temporal != pa.types.is_temporal(to) or zones[0] != zones[1]):
            raise chunk.error(0, column, f"the column is {kind}, and was {to}", remedy)
        return cast(chunk, column, array, to, remedy)


def _microseconds(chunk: Chunk, column: str, unit: str) -> Array:
    """Convert numbers with a unit to microseconds, rounded down, int64 ``[n]``."""
    array, scale = chunk.columns[column], _MICROSECONDS[unit]
    kind, remedy = array.type, f"give numbers of {unit} since 1970, or leave the unit out"
    if not (chunk.text(column) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise chunk.error(0, column, f"the column is {kind}", remedy)
    is_whole = scale < 1 or pa.types.is_integer(kind)  # float64 would round them
    to = pa.int64() if is_whole else pa.float64()
    numbers = to_numpy(cast(chunk, column, array, to, remedy))
    if (wrong := ~(np.abs(numbers.astype(np.float64)) * scale < _LATEST)).any():
        row = first(wrong)
        raise chunk.error(row, column, f"{numbers[row]} {unit} is no time", remedy)
    if is_whole:
        return numbers * int(scale) if scale >= 1 else numbers // 1000
    # tolerate float64's rounding error just below a whole microsecond
    return np.floor(numbers * scale + 0.25).astype(np.int64)


def _time_type(array: pa.Array) -> pa.DataType:
    if pa.types.is_temporal(array.type):
        return pa.timestamp("us", getattr(array.type, "tz", None))
    text = str(array.drop_null()[0].as_py())
    if re.match(INTEGER, text):
        return pa.int64()
    zoned = re.search(r"(Z|:[\d.]+[+-]\d\d(:?\d\d)?)$", text)
    return pa.timestamp("us", "UTC" if zoned else None)


class Codes:
    """Column of classes or categories: text or integers, coded in sorted order.

    Args:
        vocabulary: the value of each code 0, 1, …, with None for the bucket of unknown values;
            None = the sorted values of the column.
        category: None = classes, which may be missing.

    Attributes:
        names: the value of each code, set by `fit`: integers if all are, else text; None for the
            bucket, which is code 0.
        missing: code of rows without a value: the bucket, or -1.
    """

    kind: Kind = "int64", ()

    def __init__(
        self, column: str, vocabulary: Sequence[Any] | None, category: Category | None = None
    ):
        self.columns, self._vocabulary, self._category = [column], vocabulary, category
        self._kind = "classes" if category is None else "categories"
        self._bucket = category is not None and category.unknown == "bucket"
        self._found: dict[str | None, list[int]] = {}  # value → number of its rows, first row
        self._integers = True
        self._codes: dict[str, int] = {}
        self.names: list[Any] = []
        self.missing = -1

    def add(self, chunk: Chunk) -> None:
        """Count the values of a chunk's rows."""
        column, (words, rows) = self.columns[0], self._encoded(chunk)
        most = MAX_CLASSES if self._category is None else MAX_CATEGORIES
        counted = np.unique(rows, return_index=True, return_counts=True)
        for code, row, count in np.stack(counted, axis=1).tolist():
            word = None if (value := words[code]) is None else str(value)
            if word is None and self._category is not None and not self._bucket:
                remedy = "fill it with a value, such as none, or set unknown: bucket"
                raise chunk.error(row, column, "there is no value", remedy)
            if word not in self._found and len(self._found) - (None in self._found) == most:
                message = f"{shown(value)} makes more than {most:,} {self._kind}"
                remedy = f"check that this column has {self._kind}, and not ids"
                raise chunk.error(row, column, message, remedy)
            if word is not None:
                self._integers &= type(value) is int or re.match(INTEGER, word) is not None
            self._found.setdefault(word, [0, chunk.first + row])[0] += count

    def fit(self, reader: TableReader, added: int) -> None:
        """Assign codes to the counted values. ``added``: number of nodes without a row."""
        if added:
            self._found.setdefault(None, [0, 0])[0] += added
        words = {w: int(w) if self._integers else w for w in self._found if w is not None}
        self.names = list(self._vocabulary or ())
        if self._vocabulary is None:
            least = 1 if self._category is None else self._category.min_count
            names = sorted(name for word, name in words.items() if self._found[word][0] >= least)
            self.names = [None, *names] if self._bucket else names
        self._codes = {str(name): code for code, name in enumerate(self.names) if name is not None}
        self.missing = 0 if self._bucket and self.names[:1] == [None] else -1
        unseen: dict[str | None, Any] = {w: n for w, n in words.items() if w not in self._codes}
        if self._bucket and self.missing < 0 and None in self._found:
            unseen[None] = None
        if unseen and self.missing < 0:
            raise self._refused(reader, unseen)
        if unseen and self._vocabulary is not None:
            what = "have values that the training data did not have; they are mapped to the bucket"
            where = f"{reader.files[0]}, column {self.columns[0]!r}"
            log.warning(f"{where}: {self._share(unseen)} {what}")
        self._found.clear()  # tasks, to which this is sent, need only the codes

    def rows(self, chunk: Chunk) -> Array:
        """Return the codes of a chunk's rows, int64 ``[n]``."""
        words, rows = self._encoded(chunk)
        codes = [self._codes.get(str(word), self.missing) for word in words[:-1]]
        return np.array([*codes, self.missing], np.int64)[rows]

    def known(self, chunk: Chunk) -> Array:
        """Return which rows have a value, bool ``[n]``."""
        return ~is_missing(chunk.columns[self.columns[0]])

    def _encoded(self, chunk: Chunk) -> tuple[list[Any], Array]:
        column, remedy = self.columns[0], f"{self._kind} are text or integers"
        return encoded(chunk, column, chunk.columns[column], remedy)

    def _share(self, words: Iterable[str | None]) -> str:
        counts = [count for count, _ in self._found.values()]
        return f"{sum(self._found[word][0] for word in words):,} of {sum(counts):,} rows"

    def _refused(self, reader: TableReader, unseen: Mapping[str | None, Any]) -> DataError:
        """Build the error for values that the training data did not have; None = no value."""
        found = {word: self._found[word] for word in unseen}  # in order of appearance
        listed = [
            f"{'no value' if word is None else shown(unseen[word])} ({count:,})"
            for word, (count, _) in found.items()
        ]
        more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
        remedy = "correct them, remove these rows, or train with unknown: bucket"
        if self._category is None:
            remedy = "leave these labels empty, omit label, or train on data that has them"
        elif not self._bucket and (self._vocabulary or [""])[0] is None:
            remedy = "set unknown: bucket for this category, as in the training, or correct them"
        message = f"the training data has none of these {self._kind}: "
        message += f"{', '.join(listed[:_SHOWN])}{more}; {self._share(unseen)}"
        first_row = min(row for _, row in found.values())
        return reader.error(first_row, self.columns[0], message, remedy)


def split_codes(chunk: Chunk, column: str, words: Mapping[str, str] | None) -> Array:
    """Convert a column of train, val, test or nothing to int8 ``[n]``: 0, 1, 2, -1. ``words``:
    other values with their split; None = the table cannot define any."""
    split_of = {**{split: split for split in SPLITS}, **(words or {})}
    found, rows = encoded(chunk, column, chunk.columns[column], "a split is text")
    codes = np.full(len(found), -1, np.int8)
    for at, word in enumerate(found):
        if word in (None, ""):
            continue
        if str(word) not in split_of:
            remedy = f"use {', '.join(split_of)} or nothing"
            remedy += "" if words is None else ", or map it with split_words"
            raise chunk.error(first(rows == at), column, f"{shown(word)} is no split", remedy)
        codes[at] = SPLITS.index(split_of[str(word)])
    return codes[rows]


def encoded(chunk: Chunk, column: str, array: pa.Array, remedy: str) -> tuple[list[Any], Array]:
    """Return the distinct values of a column, followed by None, and for each row the index of its
    value, -1 if it is missing. Values are text, integers, or floats without a fraction (integer
    columns with nulls are often stored so); raises DataError for others."""
    kind = array.type
    if pa.types.is_floating(kind):
        values = to_numpy(pc.cast(array, pa.float64()))
        bad = (values != np.trunc(values)) & ~np.isnan(values) | (np.abs(values) >= 2**53)
        if bad.any():
            row = first(bad)
            raise chunk.error(row, column, f"the value is {values[row]}", remedy)
        array = pa.array(values, pa.int64(), from_pandas=True)  # NaN becomes null
    elif pa.types.is_boolean(kind) or pa.types.is_null(kind):
        array = pc.cast(array, pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_large_string(kind)):
        raise chunk.error(0, column, f"the column is {kind}", remedy)
    found = pc.dictionary_encode(array)
    rows = to_numpy(pc.fill_null(found.indices, -1)).astype(np.int64)
    return [*found.dictionary.to_pylist(), None], rows
