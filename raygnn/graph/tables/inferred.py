"""Columns of CSV whose kind nobody says: found in their text, as pandas would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.tables.columns import (
    INTEGER,
    LARGEST,
    Array,
    cast,
    first,
    refuse_nulls,
    shown,
)
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.reader import Chunk

_TRUTHS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_VECTOR = r"[,\[(]"  # in the text of a list
_REMEDY = (
    "write a number, true or false, or numbers such as '0.1, 0.2' in every row; for words use "
    "format: tables with categories"
)


class Inferred:
    """One column: truth values, whole numbers, numbers, or vectors of them.

    The first value says which; whole numbers become numbers where others follow.

    Args:
        nulls: whether values may be missing where they are numbers; they are NaN.
    """

    def __init__(self, column: str, *, nulls: bool = False):
        self.column = column
        self._nulls = nulls
        self._kind: str | None = None  # truth, number, vector
        self._width = 1
        self._dtype = np.dtype(np.int64)
        self._rows = Growing(self._dtype, 1)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows.

        Raises:
            DataError: a value that is none of these, or not of the kind of those before.
        """
        array = chunk.columns[self.column]
        if self._kind is None:
            self._decide(chunk, array)
        if array.null_count and (not self._nulls or self._kind in ("truth", "vector")):
            refuse_nulls(chunk, self.column, "fill it in")
        if self._kind == "truth":
            self._append(self._truths(chunk, array))
        elif self._kind == "vector":
            self._append(self._vectors(chunk, array))
        else:
            self._append(self._scalars(chunk, array, 1))

    def take(self) -> Array:
        """bool or int64 ``[N]``, or float32 ``[N]``; of vectors ``[N, W]``."""
        rows = self._rows.take()
        if self._kind == "truth":
            rows = rows.astype(np.bool_)
        elif rows.dtype == np.float64:
            rows = rows.astype(np.float32)
        found: Array = rows if self._kind == "vector" else rows[:, 0]
        return found

    def _decide(self, chunk: Chunk, array: pa.Array) -> None:
        known = array.drop_null()
        if not len(known):
            return  # it is decided by a later chunk; until then they are missing numbers
        start = known[0].as_py()
        if start in _TRUTHS:
            self._kind = "truth"
        else:
            vector = pc.match_substring_regex(known[:1], _VECTOR)[0].as_py()
            self._kind = "vector" if vector else "number"
        if self._rows.num and self._kind != "number":
            what = f"the value is {shown(start)}, and rows before have none"
            raise chunk.error(first(pc.is_valid(array)), self.column, what, "fill them in")

    def _append(self, rows: Any) -> None:
        if not self._rows.num:
            self._rows = Growing(rows.dtype, self._width)
        elif rows.dtype == np.float64 and self._dtype == np.int64:
            before = self._rows.take()
            self._rows = Growing(np.float64, self._width)
            self._rows.append(before)
        self._dtype = np.promote_types(rows.dtype, self._dtype)
        self._rows.append(rows)

    def _truths(self, chunk: Chunk, array: pa.Array) -> Array:
        encoded = pc.dictionary_encode(array)
        known = encoded.dictionary.to_pylist()
        rows = encoded.indices.to_numpy(zero_copy_only=False)
        for at, value in enumerate(known):
            if value not in _TRUTHS:
                what = f"{shown(value)} is no truth value, and others are"
                raise chunk.error(first(rows == at), self.column, what, _REMEDY)
        return np.array([_TRUTHS[value] for value in known], np.int64)[rows].reshape(-1, 1)

    def _scalars(self, chunk: Chunk, array: pa.Array, width: int) -> Array:
        """int64 or float64 ``[n, width]`` from the text of each number."""
        if not array.null_count and pc.all(pc.match_substring_regex(array, INTEGER)).as_py():
            found = pc.cast(array, pa.int64())
        else:
            found = cast(chunk, self.column, array, pa.float64(), _REMEDY, width)
        if found.null_count:
            found = pc.fill_null(found, np.nan)
        rows = np.asarray(found.to_numpy(zero_copy_only=False))
        if rows.dtype == np.float64 and (bad := np.isfinite(rows) & (np.abs(rows) > LARGEST)).any():
            what = f"the number is {rows[first(bad)]}"
            raise chunk.error(first(bad) // width, self.column, what, "numbers must fit float32")
        return rows.reshape(-1, width)

    def _vectors(self, chunk: Chunk, array: pa.Array) -> Array:
        bare = pc.utf8_rtrim(pc.utf8_trim(array, " []()\t"), ", ")
        lists = pc.split_pattern(bare, ",")
        widths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        width = int(widths[0]) if not self._rows.num else self._width
        if (widths != width).any():
            row = first(widths != width)
            what = f"{shown(array[row])} has {widths[row]} numbers, expected {width}"
            raise chunk.error(row, self.column, what, "give each row as many numbers")
        self._width = width
        return self._scalars(chunk, pc.utf8_trim_whitespace(lists.flatten()), width)
