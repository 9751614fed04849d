"""Words and whole numbers as codes: classes and categories from 0, and splits.

What reads a chunk raises DataError, naming file, row and column, for a value that is neither text
nor a whole number, or that may not be.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import SPLITS
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
        category: None = classes, of which a row may have none.

    Attributes:
        names: for each code what it stands for, once `fit` has numbered the words: integers where
            all are, else text, and None for the bucket, which is 0.
        missing: code of rows without a value: the bucket, or -1.
    """

    kind: tuple[str, tuple[int, ...]] = "int64", ()

    def __init__(
        self, column: str, vocabulary: Sequence[Any] | None, category: Category | None = None
    ):
        self.columns, self._vocabulary, self._category = [column], vocabulary, category
        self._kind = "classes" if category is None else "categories"
        self._bucket = category is not None and category.unknown == "bucket"
        self._found: dict[str | None, list[int]] = {}  # word → number of its rows, and the first
        self._integers = True
        self._codes: dict[str, int] = {}
        self.names: list[Any] = []
        self.missing = -1

    def add(self, chunk: Chunk) -> None:
        """Count the words of a chunk's rows."""
        column, words, rows = self.columns[0], *self._encoded(chunk)
        most = MAX_CLASSES if self._category is None else MAX_CATEGORIES
        counted = np.unique(rows, return_index=True, return_counts=True)
        for code, row, count in zip(*(array.tolist() for array in counted), strict=True):
            word = None if (value := words[code]) is None else str(value)
            if word is None and self._category is not None and not self._bucket:
                remedy = "give it a word of its own, such as none, or set unknown: bucket"
                raise chunk.error(row, column, "there is no value", remedy)
            if word not in self._found and len(self._found) - (None in self._found) == most:
                message = f"{shown(value)} makes more than {most:,} {self._kind}"
                remedy = f"see that this is the column of {self._kind}, not one of ids"
                raise chunk.error(row, column, message, remedy)
            if word is not None:
                self._integers &= type(value) is int or re.match(INTEGER, word) is not None
            self._found.setdefault(word, [0, chunk.first + row])[0] += count

    def fit(self, reader: TableReader, added: int) -> None:
        """Number the words of the rows that were counted, and so many nodes without a value."""
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
            what = "have words that the training did not have, and are in the bucket"
            where = f"{reader.files[0]}, column {self.columns[0]!r}"
            log.warning(f"{where}: {self._share(unseen)} {what}")
        self._found.clear()  # tasks are handed the codes alone

    def rows(self, chunk: Chunk) -> Array:
        """Return the codes of a chunk's rows, int64 ``[n]``."""
        words, rows = self._encoded(chunk)
        codes = [self._codes.get(str(word), self.missing) for word in words[:-1]]
        return np.array([*codes, self.missing], np.int64)[rows]

    def known(self, chunk: Chunk) -> Array:
        """Return which rows have a value, bool ``[n]``."""
        return to_numpy(pc.is_valid(nan_to_null(chunk.columns[self.columns[0]])))

    def _encoded(self, chunk: Chunk) -> tuple[list[Any], Array]:
        remedy = f"{self._kind} are text or whole numbers"
        return encoded(chunk, self.columns[0], remedy, chunk.columns[self.columns[0]])

    def _share(self, words: Iterable[str | None]) -> str:
        counts = [count for count, _ in self._found.values()]
        return f"{sum(self._found[word][0] for word in words):,} of {sum(counts):,} rows"

    def _refused(self, reader: TableReader, unseen: Mapping[str | None, Any]) -> DataError:
        """Return the error of words that the training did not have, None for no value."""
        first_row = {word: self._found[word][1] for word in unseen}
        listed = [
            f"{'no value' if word is None else shown(unseen[word])} ({self._found[word][0]:,})"
            for word in sorted(unseen, key=first_row.__getitem__)
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
        message = f"the training has none of these {self._kind}: {', '.join(listed[:_SHOWN])}{more}"
        message = f"{message}; {self._share(unseen)}"
        return reader.error(min(first_row.values()), self.columns[0], message, remedy)


def splits(chunk: Chunk, column: str, words: Mapping[str, str] | None) -> Array:
    """A column of the words train, val and test, or nothing, as int8 ``[n]``: 0, 1, 2, -1.

    Args:
        words: what else stands for them; None = nothing can.
    """
    split_of = {**{split: split for split in SPLITS}, **(words or {})}
    found, rows = encoded(chunk, column, "a split is a word", chunk.columns[column])
    codes = np.full(len(found), -1, np.int8)
    for at, word in enumerate(found):
        if word in (None, ""):
            continue
        if str(word) not in split_of:
            remedy = f"use {', '.join(split_of)} or nothing"
            remedy += "" if words is None else ", or say with split_words what it means"
            raise chunk.error(first(rows == at), column, f"{shown(word)} is no split", remedy)
        codes[at] = SPLITS.index(split_of[str(word)])
    return codes[rows]


def encoded(chunk: Chunk, column: str, remedy: str, array: pa.Array) -> tuple[list[Any], Array]:
    """Return the words of a column and None, and for each row the place of its word among them,
    -1 without a value; raises as `discrete`."""
    found = pc.dictionary_encode(discrete(chunk, column, remedy, array))
    rows = to_numpy(pc.fill_null(found.indices, -1)).astype(np.int64)
    return [*found.dictionary.to_pylist(), None], rows


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
