"""The numbers of nodes by their ids: whole numbers or text, in order of appearance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.tables.columns import INTEGER, Array, cast, first, refuse_nulls, shown
from raygnn.graph.tables.reader import ROWS, Chunk, Reader

_ALIKE = "write the ids of nodes and of edges alike"
_REMEDY = "ids are whole numbers or text, one for each node"


class Ids:
    """Ids of the nodes of one type.

    Text of CSV is taken for whole numbers where all of it is such.
    """

    def __init__(self, ntype: str):
        self.ntype = ntype
        self.values: pa.Array = pa.array([], pa.int64())
        self._chunks: list[pa.Array] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, chunk: Chunk, column: str) -> None:
        """Append the ids of a table of nodes; they are numbered once `close` is called.

        Raises:
            DataError: one is missing, or neither text nor a whole number.
        """
        self._chunks.append(_ids(chunk, column))

    def close(self, reader: Reader, column: str) -> None:
        """Number what was added.

        Raises:
            DataError: an id is there twice.
        """
        self.values = _joined(self._chunks)
        self._chunks = []
        if pc.count_distinct(self.values).as_py() == len(self.values):
            return
        places = pc.dictionary_encode(self.values).indices.to_numpy()
        _, firsts = np.unique(places, return_index=True)
        again = np.ones(len(places), bool)
        again[firsts] = False
        row = first(again)
        before = reader.place(int(firsts[places[row]]))
        what = f"the id {shown(self.values[row])} is there already, in {before}"
        raise reader.error(row, column, what, "give each node one row")

    def sort(self) -> Array:
        """Number the ids anew in their order, whole numbers by value and text by character.

        Returns:
            int64 ``[N]``: for each new number, the one that it was.
        """
        order = pc.sort_indices(self.values)
        self.values = self.values.take(order)
        return _numpy(order)

    def numbers(self, chunk: Chunk, column: str, missing: str) -> tuple[Array, Array | None]:
        """Numbers of the nodes in a column of ends of edges, int64 ``[n]``.

        Args:
            missing: whether to ``drop`` ids that no node has; else they are refused.

        Returns:
            The numbers, and which rows are to be dropped (bool ``[n]``); None = none.

        Raises:
            DataError: an end is missing or not of the kind of the ids, or there is no such node.
        """
        wanted = self._end(chunk, column, missing)
        found = self._find(wanted)
        unknown = pc.is_null(found)
        if not found.null_count:
            return _numpy(found), None
        if missing != "drop":
            row = first(unknown)
            raise chunk.error(
                row,
                column,
                f"{shown(wanted[row])} is no {self.ntype}",
                f"add it to the nodes of {self.ntype}, or set missing to drop or add",
            )
        return _numpy(pc.fill_null(found, 0)), unknown.to_numpy(zero_copy_only=False)

    def learn(self, chunk: Chunk, columns: Sequence[str]) -> None:
        """Number the ids in columns of ends that no node has yet, row by row.

        Raises:
            DataError: as `numbers` does.
        """
        ends = [self._end(chunk, column, "add") for column in columns]
        by_row = np.arange(len(ends) * chunk.num).reshape(len(ends), -1).T.reshape(-1)
        wanted = pa.concat_arrays(ends).take(pa.array(by_row))
        new = pc.unique(wanted.filter(pc.is_null(self._find(wanted))))
        self.values = _joined([self.values, new]) if len(self) else new

    def batch(self) -> int:
        """How many edges should be looked up at once: each time costs a pass over all ids."""
        return max(ROWS, len(self.values) // 4)

    def _find(self, wanted: pa.Array) -> pa.Array:
        if not len(self):
            return pa.nulls(len(wanted), pa.int32())
        return pc.index_in(wanted, value_set=self.values)

    def _end(self, chunk: Chunk, column: str, missing: str) -> pa.Array:
        """Ends as the ids are: all whole numbers, or all text."""
        wanted = refuse_nulls(chunk, column, "an edge has two ends: fill it in, or drop the row")
        numeric = pa.types.is_int64(self.values.type if len(self) else wanted.type)
        if not chunk.text(column):
            wanted = _integers(chunk, column, wanted)
            if numeric:
                return wanted
            what = f"{shown(wanted[0])} is a number, and the ids of {self.ntype} are text"
            raise chunk.error(0, column, what, _ALIKE)
        if not numeric:
            return wanted
        good = pc.match_substring_regex(wanted, INTEGER)
        if chunk.csv and missing == "drop":
            wanted = pc.if_else(good, wanted, pa.scalar(None, wanted.type))
        elif not chunk.csv or not pc.all(good, min_count=0).as_py():
            row = first(pc.invert(good)) if chunk.csv else 0
            what = f"{shown(wanted[row])} is text, and the ids of {self.ntype} are whole numbers"
            raise chunk.error(row, column, what, _ALIKE)
        return pc.cast(wanted, pa.int64())


def _ids(chunk: Chunk, column: str) -> pa.Array:
    array = refuse_nulls(chunk, column, "give each node an id")
    if not chunk.text(column):
        return _integers(chunk, column, array)
    empty = pc.equal(array, "")
    if pc.any(empty).as_py():
        raise chunk.error(first(empty), column, "the id is empty text", "give each node an id")
    if chunk.csv and pc.all(pc.match_substring_regex(array, INTEGER)).as_py():
        return pc.cast(array, pa.int64())
    return array


def _integers(chunk: Chunk, column: str, array: pa.Array) -> pa.Array:
    if not pa.types.is_integer(array.type):
        raise chunk.error(0, column, f"the column is {array.type}", _REMEDY)
    return cast(chunk, column, array, pa.int64(), _REMEDY)


def _joined(chunks: list[pa.Array]) -> pa.Array:
    if len({chunk.type for chunk in chunks}) > 1:
        chunks = [pc.cast(chunk, pa.large_string()) for chunk in chunks]
    if not chunks:
        return pa.array([], pa.int64())
    return pa.concat_arrays(chunks)


def _numpy(found: pa.Array) -> Array:
    return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)
