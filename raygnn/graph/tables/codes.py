"""Words and whole numbers as codes from 0, in sorted order: classes, categories, splits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.tables.columns import INTEGER, Array, first, shown
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.reader import Chunk, Reader
from raygnn.graph.tables.spec import Category

MAX_CLASSES = 1 << 16
MAX_CATEGORIES = 1 << 20
_SHOWN = 5  # words in an error


class Codes:
    """A column of words or whole numbers.

    Args:
        most: how many different ones there may be.
        what: they are: ``classes``.
        vocabulary: what 0, 1, … are to stand for, None the bucket of unknown words; None = the
            words of the column, sorted.
        nulls: whether a row may have no value.
        bucket: whether the column wants a bucket for unknown words and missing values.
        min_count: rows that a word needs to get a code, where there is no vocabulary.
    """

    def __init__(
        self,
        column: str,
        most: int,
        what: str,
        vocabulary: Sequence[Any] | None,
        *,
        nulls: bool,
        bucket: bool = False,
        min_count: int = 1,
    ):
        self.column = column
        self._most, self._what = most, what
        self._vocabulary, self._nulls = vocabulary, nulls
        self._bucket, self._min_count = bucket, min_count
        self._known: dict[Any, int] = {}  # in the order of their first rows
        self._rows = Growing(np.int64)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows.

        Raises:
            DataError: a value that is neither text nor a whole number, a null that may not be, or
                more different values than allowed.
        """
        array = _discrete(chunk, self.column, f"{self._what} are text or whole numbers")
        if not self._nulls and array.null_count:
            remedy = "give it a word of its own, such as none, or set unknown: bucket"
            raise chunk.error(first(pc.is_null(array)), self.column, "there is no value", remedy)
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

    def take(self, reader: Reader, num: int | None = None) -> tuple[Array, list[Any]]:
        """Codes, int64 ``[N]``, also of the rows up to ``num``, which have no value; and for each
        code what it stands for: integers where all are, else text, and None for the bucket, which
        is 0. A row without a value is in the bucket; where there is none it is -1.

        Raises:
            DataError: a word that the vocabulary does not have, and no bucket.
        """
        if num is not None:
            self._rows.pad(num, -1)
        rows = self._rows.take()
        names = list(self._known)
        if all(type(name) is int or re.match(INTEGER, name) for name in names):
            names = [int(name) for name in names]
        else:
            names = [str(name) for name in names]
        counts = np.bincount(rows + 1, minlength=len(names) + 1)[1:]
        ordered = self._vocabulary
        if ordered is None:
            total = Counter[Any]()
            for name, count in zip(names, counts.tolist(), strict=True):
                total[name] += count
            ordered = sorted(name for name, count in total.items() if count >= self._min_count)
            ordered = [None, *ordered] if self._bucket else ordered
        place = {str(name): at for at, name in enumerate(ordered) if name is not None}
        bucket = 0 if self._bucket and ordered[:1] == [None] else -1
        final = np.array([*(place.get(str(name), bucket) for name in names), bucket], np.int64)
        unseen = [str(name) not in place for name in names]
        if bucket < 0 and (any(unseen) or self._bucket):
            self._refuse(reader, rows, np.array([*unseen, self._bucket]), names)
        np.take(final, rows, out=rows)
        return rows, list(ordered)

    def _refuse(self, reader: Reader, rows: Array, unseen: Array, names: list[Any]) -> None:
        """Raises DataError for rows with codes that are ``unseen``, of which the last is for rows
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
        raise reader.error(
            first(bad),
            self.column,
            f"the training has none of these {self._what}: {', '.join(listed[:_SHOWN])}{more}; "
            f"{int(bad.sum()):,} of {len(rows):,} rows",
            self._remedy(),
        )

    def _remedy(self) -> str:
        raise NotImplementedError


class Classes(Codes):
    """A column of classes; a row may have none, which is -1."""

    def __init__(self, column: str, vocabulary: Sequence[Any] | None):
        super().__init__(column, MAX_CLASSES, "classes", vocabulary, nulls=True)

    def _remedy(self) -> str:
        return (
            "leave the value of these rows empty, which is unknown, leave out label to predict "
            "without, or train on data that have these classes"
        )


class Categories(Codes):
    """A column of categories; a row has one, or there is a bucket for those that have none."""

    def __init__(self, category: Category, vocabulary: Sequence[Any] | None):
        bucket = category.unknown == "bucket"
        super().__init__(
            category.column,
            MAX_CATEGORIES,
            "categories",
            vocabulary,
            nulls=bucket,
            bucket=bucket,
            min_count=category.min_count,
        )

    def _remedy(self) -> str:
        if not self._bucket and (self._vocabulary or [""])[0] is None:
            return "set unknown: bucket for this category, as the training did, or correct them"
        return (
            "correct them, leave these rows out, or train with unknown: bucket for this category, "
            "which keeps a row for unknown ones"
        )


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
    if pa.types.is_boolean(kind) or pa.types.is_null(kind):
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
