"""Words and whole numbers as codes: classes and categories from 0, and splits.

What reads a chunk raises DataError, naming file, row and column, for a value that is neither text
nor a whole number, or that may not be.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.arrays import Array
from raygnn.graph.data import SPLITS
from raygnn.graph.outofcore.disk_graph import Appended, DiskArray
from raygnn.graph.tables.columns import INTEGER, first, nan_to_null, shown, to_numpy
from raygnn.graph.tables.description import Category
from raygnn.graph.tables.reader import Chunk, TableReader

log = logging.getLogger("raygnn")

MAX_CLASSES = 1 << 16
MAX_CATEGORIES = 1 << 20
_SHOWN = 5  # words in an error


class Codes:
    """Column of classes or categories: text or whole numbers, numbered in sorted order.

    Args:
        vocabulary: what 0, 1, … are to stand for, None the bucket of unknown words; None = the
            words of the column, sorted.
        file: where the codes are stored.
        category: None = classes, of which a row may have none.
    """

    def __init__(
        self,
        column: str,
        vocabulary: Sequence[Any] | None,
        file: Path,
        category: Category | None = None,
    ):
        self.column, self._vocabulary, self._category = column, vocabulary, category
        self._kind = "classes" if category is None else "categories"
        self._bucket = category is not None and category.unknown == "bucket"
        self._code_of: dict[str, int] = {}  # in the order of their first rows
        self._integers = True
        self._rows = Appended(file, "int64")

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows."""
        most = MAX_CLASSES if self._category is None else MAX_CATEGORIES

        def code_of(value: Any) -> int:
            word = str(value)
            if word not in self._code_of and len(self._code_of) == most:
                message = f"{shown(value)} makes more than {most:,} {self._kind}"
                raise _Refused(
                    message, f"see that this is the column of {self._kind}, not one of ids"
                )
            self._integers &= type(value) is int or re.match(INTEGER, word) is not None
            return self._code_of.setdefault(word, len(self._code_of))

        remedy, required = f"{self._kind} are text or whole numbers", ""
        if self._category is not None and not self._bucket:
            required = "give it a word of its own, such as none, or set unknown: bucket"
        self._rows.add(_mapped(chunk, self.column, remedy, code_of, -1, required))

    def finish(self, reader: TableReader, num: int) -> tuple[DiskArray, list[Any]]:
        """Return the codes, int64 ``[num]``, also of rows that were never added, which have no
        value; and for each code what it stands for: integers where all are, else text, and None for
        the bucket, which is 0. A row without a value is in the bucket; where there is none it is
        -1.
        """
        self._rows.pad(num, -1)
        array = self._rows.close()
        rows, ordered = array.map(writable=True), self._vocabulary
        names: list[Any] = list(self._code_of)
        if self._integers:
            names = [int(name) for name in names]
        if ordered is None:
            counts = np.bincount(rows + 1, minlength=len(names) + 1)[1:]
            least = 1 if self._category is None else self._category.min_count
            ordered = sorted(name for name, count in zip(names, counts) if count >= least)
            ordered = [None, *ordered] if self._bucket else ordered
        place = {str(name): at for at, name in enumerate(ordered) if name is not None}
        bucket = 0 if self._bucket and ordered[:1] == [None] else -1
        unseen = np.array([*(str(name) not in place for name in names), False], bool)
        if bucket < 0:
            unseen[-1] = self._bucket  # which the training did not have
            self._refuse(reader, rows, unseen, names)
        elif self._vocabulary is not None and (bad := unseen[rows]).any():
            what = "rows have words that the training did not have, and are in the bucket"
            where = f"{reader.files[0]}, column {self.column!r}"
            log.warning(f"{where}: {bad.sum():,} of {len(rows):,} {what}")
        final = np.array([*(place.get(str(name), bucket) for name in names), bucket], np.int64)
        np.take(final, rows, out=rows)
        return array, list(ordered)

    def _refuse(self, reader: TableReader, rows: Array, unseen: Array, names: list[Any]) -> None:
        """Raise DataError for rows with codes that are ``unseen``, of which the last is for rows
        without a value."""
        bad = unseen[rows]
        if not bad.any():
            return
        codes, at, counts = np.unique(rows[bad], return_index=True, return_counts=True)
        listed = [
            f"{shown(names[code]) if code >= 0 else 'no value'} ({count:,})"
            for _, code, count in sorted(zip(at, codes.tolist(), counts.tolist(), strict=True))
        ]
        more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
        remedy = (
            "correct them, leave these rows out, or train with unknown: bucket for this category, "
            "which keeps a row for unknown ones"
        )
        if self._category is None:
            remedy = (
                "leave the value of these rows empty, which is unknown, leave out label to predict "
                "without, or train on data that have these classes"
            )
        elif not self._bucket and (self._vocabulary or [""])[0] is None:
            remedy = "set unknown: bucket for this category, as the training did, or correct them"
        raise reader.error(
            first(bad),
            self.column,
            f"the training has none of these {self._kind}: {', '.join(listed[:_SHOWN])}{more}; "
            f"{int(bad.sum()):,} of {len(rows):,} rows",
            remedy,
        )


def splits(chunk: Chunk, column: str, words: Mapping[str, str] | None) -> Array:
    """A column of the words train, val and test, or nothing, as int8 ``[n]``: 0, 1, 2, -1.

    Args:
        words: what else stands for them; None = nothing can.
    """
    split_of = {**{split: split for split in SPLITS}, **(words or {})}

    def code_of(value: Any) -> int:
        if value == "":
            return -1
        if str(value) not in split_of:
            remedy = f"use {', '.join(split_of)} or nothing"
            remedy += "" if words is None else ", or say with split_words what it means"
            raise _Refused(f"{shown(value)} is no split", remedy)
        return SPLITS.index(split_of[str(value)])

    return _mapped(chunk, column, "a split is a word", code_of, -1).astype(np.int8)


class _Refused(Exception):
    """A value that may not be: what is wrong with it, and the remedy."""


def _mapped(
    chunk: Chunk,
    column: str,
    remedy: str,
    code_of: Callable[[Any], int],
    null: int,
    required: str = "",
) -> Array:
    """The code of each row's value, int64 ``[n]``.

    Args:
        code_of: called once for each different value, in the order of their first rows; may raise
            `_Refused`.
        null: the code of rows without a value.
        required: what to do about such rows where there may be none.
    """
    array = discrete(chunk, column, remedy, chunk.columns[column])
    if required and array.null_count:
        raise chunk.error(first(pc.is_null(array)), column, "there is no value", required)
    encoded = pc.dictionary_encode(array)
    rows = to_numpy(pc.fill_null(encoded.indices, -1))
    codes = np.full(len(encoded.dictionary) + 1, null, np.int64)
    for at, value in enumerate(encoded.dictionary.to_pylist()):
        try:
            codes[at] = code_of(value)
        except _Refused as refused:
            raise chunk.error(first(rows == at), column, *refused.args) from None
    return codes[rows]


def discrete(chunk: Chunk, column: str, remedy: str, array: pa.Array) -> pa.Array:
    """A column's values as text or int64, with nulls; whole floats, as a column of integers with
    nulls often is, too. Raises DataError for others."""
    array = nan_to_null(array)
    kind = array.type
    if pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return pc.cast(array, pa.int64())
    if pa.types.is_floating(kind):
        values = to_numpy(pc.cast(array, pa.float64()))
        bad = (values != np.trunc(values)) & ~np.isnan(values) | (np.abs(values) >= 2**53)
        if bad.any():
            row = first(bad)
            raise chunk.error(row, column, f"the value is {values[row]}", remedy)
        return pc.cast(array, pa.int64())
    if pa.types.is_integer(kind) or pa.types.is_large_string(kind):
        return array
    raise chunk.error(0, column, f"the column is {kind}", remedy)
