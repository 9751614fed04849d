"""Words and whole numbers as codes from 0, in sorted order: classes, categories, splits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.tables.columns import INTEGER, Array, first, refuse_nulls, shown
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.reader import Chunk

MAX_CLASSES = 1 << 16
MAX_CATEGORIES = 1 << 20


class Codes:
    """A column of words or whole numbers.

    Args:
        most: how many different ones there may be.
        what: they are: ``classes``.
        nulls: whether a row may have none, which is -1.
    """

    def __init__(self, column: str, most: int, what: str, *, nulls: bool):
        self.column = column
        self._most, self._what, self._nulls = most, what, nulls
        self._known: dict[Any, int] = {}
        self._rows = Growing(np.int64)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows.

        Raises:
            DataError: a value that is neither text nor a whole number, a null that may not be, or
                more different values than allowed.
        """
        array = _discrete(chunk, self.column, f"{self._what} are text or whole numbers")
        if not self._nulls and array.null_count:
            refuse_nulls(chunk, self.column, "give it a word of its own, such as unknown")
        encoded = pc.dictionary_encode(array)
        codes = np.empty(len(encoded.dictionary) + 1, np.int64)
        codes[-1] = -1
        rows = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        for at, value in enumerate(encoded.dictionary.to_pylist()):
            if value not in self._known and len(self._known) == self._most:
                what = f"{shown(value)} makes more than {self._most:,} {self._what}"
                remedy = f"see that this is the column of {self._what}, not one of ids"
                raise chunk.error(first(rows == at), self.column, what, remedy)
            codes[at] = self._known.setdefault(value, len(self._known))
        self._rows.append(codes[rows])

    def take(self, num: int | None = None) -> tuple[Array, list[Any]]:
        """Codes, int64 ``[N]``, -1 for none (also of the rows up to ``num``); and for each code
        what it stands for: integers where all are, else text."""
        if num is not None:
            self._rows.pad(num, -1)
        names = list(self._known)
        if all(type(name) is int or re.match(INTEGER, name) for name in names):
            names = [int(name) for name in names]
        else:
            names = [str(name) for name in names]
        ordered = sorted(set(names))
        place = {name: at for at, name in enumerate(ordered)}
        final = np.array([*(place[name] for name in names), -1], np.int64)
        rows = self._rows.take()
        np.take(final, rows, out=rows)
        return rows, ordered


def splits(chunk: Chunk, column: str, words: Mapping[str, str], codes: Mapping[str, int]) -> Array:
    """A column of the words train, val and test, or nothing, as int8 ``[n]``.

    Args:
        words: what else stands for them.
        codes: what is put for each; -1 for nothing.

    Raises:
        DataError: another word.
    """
    known = {**{name: name for name in codes}, **words}
    encoded = pc.dictionary_encode(_discrete(chunk, column, "a split is a word"))
    found = np.empty(len(encoded.dictionary) + 1, np.int8)
    found[-1] = -1
    rows = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    for at, value in enumerate(encoded.dictionary.to_pylist()):
        if str(value) not in known and value != "":
            remedy = f"use {', '.join(known)} or nothing, or say with split_words what it means"
            raise chunk.error(first(rows == at), column, f"{shown(value)} is no split", remedy)
        found[at] = codes[known[str(value)]] if value != "" else -1
    return found[rows]


def truths(chunk: Chunk, column: str) -> Array:
    """A column of truth values, or of 0 and 1, as bool ``[n]``; null is false.

    Raises:
        DataError: another value.
    """
    array = _discrete(chunk, column, "a mask is true or false, or 1 or 0")
    if chunk.text(column):
        array = pc.utf8_lower(array)
    encoded = pc.dictionary_encode(array)
    values = {"true": True, "1": True, "false": False, "0": False}
    rows = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    found = np.zeros(len(encoded.dictionary) + 1, np.bool_)
    for at, value in enumerate(encoded.dictionary.to_pylist()):
        if str(value) not in values:
            remedy = "write true or false, or 1 or 0"
            raise chunk.error(first(rows == at), column, f"the value is {shown(value)}", remedy)
        found[at] = values[str(value)]
    return found[rows]


def _discrete(chunk: Chunk, column: str, remedy: str) -> pa.Array:
    """Text or int64, with nulls; whole floats, as a column of integers with nulls often is, too."""
    array = chunk.columns[column]
    kind = array.type
    if pa.types.is_boolean(kind):
        return pc.cast(array, pa.int64())
    if pa.types.is_floating(kind):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, kind), array)
        if not kind.equals(pa.float64()):
            array = pc.cast(array, pa.float64())
        known = array.to_numpy(zero_copy_only=False)
        bad = (known != np.trunc(known)) & ~np.isnan(known) | (np.abs(known) >= 2**53)
        if bad.any():
            row = first(bad)
            raise chunk.error(row, column, f"the value is {known[row]}", remedy)
        return pc.cast(array, pa.int64())
    if pa.types.is_integer(kind) or chunk.text(column):
        return array
    raise chunk.error(0, column, f"the column is {kind}", remedy)
