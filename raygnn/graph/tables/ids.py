"""The numbers of nodes by their ids: whole numbers or text, in order of appearance.

What reads a chunk raises DataError, naming file, row and column, for an id that is missing, of
another kind, there twice, or of no node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.tables.columns import (
    INTEGER,
    cast,
    first,
    refuse_nulls,
    shown,
    to_numpy,
)
from raygnn.graph.tables.reader import ROWS, Chunk, TableReader

_ALIKE = "write the ids of nodes and of edges alike"
_REMEDY = "ids are whole numbers or text, one for each node"


class Ids:
    """Ids of the nodes of one type.

    Text of CSV is taken for whole numbers where all of it is such.

    Args:
        values: int64 or large_string, where nodes have theirs already.
        remedy: for an id that no node has.
    """

    def __init__(self, ntype: str, values: pa.Array | None = None, remedy: str = ""):
        self.ntype = ntype
        self.values: pa.Array = pa.array([], pa.int64()) if values is None else values
        self._remedy = remedy
        self._chunks: list[pa.Array] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, chunk: Chunk, column: str) -> None:
        """Append the ids of a table of nodes; they are numbered once `close` is called."""
        self._chunks.append(self.of_nodes(chunk, column))

    def of_nodes(self, chunk: Chunk, column: str) -> pa.Array:
        """The ids of a chunk of a table of nodes: int64 or large_string."""
        array = refuse_nulls(chunk, column, "give each node an id")
        if not chunk.text(column):
            array = _integers(chunk, column, array)
        elif pc.any(empty := pc.equal(array, "")).as_py():
            raise chunk.error(first(empty), column, "the id is empty text", "give each node an id")
        elif chunk.csv and pc.all(pc.match_substring_regex(array, INTEGER)).as_py():
            array = pc.cast(array, pa.int64())
        return array

    def close(self, reader: TableReader, column: str) -> None:
        """Number what was added."""
        self.values = _joined(self._chunks)
        self._chunks = []
        if pc.count_distinct(self.values).as_py() == len(self.values):
            return
        places = pc.dictionary_encode(self.values).indices.to_numpy()
        _, firsts = np.unique(places, return_index=True)
        again = np.ones(len(places), bool)
        again[firsts] = False
        row = first(again)
        raise self.twice(reader, column, row, int(firsts[places[row]]))

    def twice(self, reader: TableReader, column: str, row: int, before: int) -> DataError:
        """The error of an id that an earlier row has, too."""
        message = f"the id {shown(self.values[row])} is there already, in {reader.place(before)}"
        return reader.error(row, column, message, "give each node one row")

    def numbers(self, chunk: Chunk, column: str, missing: str) -> tuple[Array, Array | None]:
        """Numbers of the nodes in a column of ends of edges, int64 ``[n]``.

        Args:
            missing: whether to ``drop`` ids that no node has; else they are refused.

        Returns:
            The numbers, and which rows are to be dropped (bool ``[n]``); None = none.
        """
        ends = self._ends(chunk, column, missing)
        numbers = self._find(ends)
        unknown = pc.is_null(numbers)
        if not numbers.null_count:
            return to_numpy(numbers).astype(np.int64), None
        if missing != "drop":
            row = first(unknown)
            remedy = f"add it to the nodes of {self.ntype}, or set missing to drop"
            remedy += ", or to add with partition.engine: local"
            message = f"{shown(ends[row])} is no {self.ntype}"
            raise chunk.error(row, column, message, self._remedy or remedy)
        return to_numpy(pc.fill_null(numbers, 0)).astype(np.int64), to_numpy(unknown)

    def learn(self, chunk: Chunk, columns: Sequence[str]) -> None:
        """Number the ids in columns of ends that no node has yet, row by row."""
        ends = [self._ends(chunk, column, "add") for column in columns]
        by_row = np.arange(len(ends) * chunk.num).reshape(len(ends), -1).T.reshape(-1)
        mentioned = pa.concat_arrays(ends).take(pa.array(by_row))
        new = pc.unique(mentioned.filter(pc.is_null(self._find(mentioned))))
        self.values = _joined([self.values, new]) if len(self) else new

    def batch(self) -> int:
        """Number of edges to look up at once, since each look-up passes over all ids."""
        return max(ROWS, len(self.values) // 4)

    def _find(self, ends: pa.Array) -> pa.Array:
        if not len(self):
            return pa.nulls(len(ends), pa.int32())
        return pc.index_in(ends, value_set=self.values)

    def _ends(self, chunk: Chunk, column: str, missing: str) -> pa.Array:
        """Ends as the ids are: all whole numbers, or all text."""
        ends = refuse_nulls(chunk, column, "an edge has two ends: fill it in, or drop the row")
        numeric = pa.types.is_int64(self.values.type if len(self) else ends.type)
        if not chunk.text(column):
            ends = _integers(chunk, column, ends)
            if numeric:
                return ends
            message = f"{shown(ends[0])} is a number, and the ids of {self.ntype} are text"
            raise chunk.error(0, column, message, _ALIKE)
        if not numeric:
            return ends
        good = pc.match_substring_regex(ends, INTEGER)
        if chunk.csv and missing == "drop":
            ends = pc.if_else(good, ends, pa.scalar(None, ends.type))
        elif not chunk.csv or not pc.all(good, min_count=0).as_py():
            row = first(pc.invert(good)) if chunk.csv else 0
            message = f"{shown(ends[row])} is text, and the ids of {self.ntype} are whole numbers"
            raise chunk.error(row, column, message, _ALIKE)
        return pc.cast(ends, pa.int64())


class Numbers(Ids):
    """Nodes, or relations, that are called by their numbers, from 0 to ``count`` - 1."""

    def __init__(self, ntype: str, count: int, remedy: str):
        super().__init__(ntype, pa.array([0]), remedy)
        self._count = count

    def _find(self, ends: pa.Array) -> pa.Array:
        there = pc.and_(pc.greater_equal(ends, 0), pc.less(ends, self._count))
        return pc.if_else(there, ends, pa.scalar(None, pa.int64()))


def _integers(chunk: Chunk, column: str, array: pa.Array) -> pa.Array:
    if not pa.types.is_integer(array.type):
        raise chunk.error(0, column, f"the column is {array.type}", _REMEDY)
    return cast(chunk, column, array, pa.int64(), _REMEDY)


def _joined(chunks: list[pa.Array]) -> pa.Array:
    if len({chunk.type for chunk in chunks}) > 1:
        chunks = [pc.cast(chunk, pa.large_string()) for chunk in chunks]
    return pa.concat_arrays(chunks) if chunks else pa.array([], pa.int64())
