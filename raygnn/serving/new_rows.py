"""Rows of tables in a request: nodes and edges that the graph does not have."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.neighbourhood import AddedEdges, NewEdges, NewNodes
from raygnn.graph.tables.description import (
    EdgeTable,
    KeyTable,
    NodeTable,
    Table,
    read_description,
)
from raygnn.graph.tables.frames import TableArrays, fit_to, vocabulary_of
from raygnn.graph.tables.reader import TableReader
from raygnn.serving.questions import NodeIds, RequestError, Row, Rows, UserId

_MOST = {"nodes": 1000, "edges": 10_000}  # rows of a request
_ERROR = re.compile(r", row (\d+), column (.+)", re.DOTALL)

Placed = list[tuple[int, Row]]  # rows of a table, and their places in the request


class RowReader:
    """Reads rows of a request as the run's tables were read, with their transforms and words.

    Args:
        section: ``graph``, of tables, with the training's ``vocabulary``.
        ids: node type → ids of the graph's nodes.
        meta: of the graph's partition.
    """

    def __init__(
        self, section: Mapping[str, Any], ids: Callable[[str], NodeIds], meta: PartitionMeta
    ):
        graph = TablesGraph.model_validate(section, strict=False)
        self._tables = read_description(Path(graph.path))
        self._words, self._to = vocabulary_of(graph), fit_to(graph, self._tables)
        self._ids, self._meta = ids, meta

    def schema(self) -> dict[str, Any]:
        """Return the columns of the tables whose rows a request can have, as plain JSON types."""
        of: dict[str, Mapping[str, Table]] = {"nodes": self._tables.nodes, "edges": self._own_edges}
        return {
            section: {key: self._kinds(key, one) for key, one in some.items() if not _refused(one)}
            for section, some in of.items()
        }

    @property
    def _own_edges(self) -> dict[str, EdgeTable]:
        edges = self._tables.edges.items()
        return {key: table for key, table in edges if not isinstance(table, KeyTable)}

    def _kinds(self, key: str, table: Table) -> dict[str, str]:
        """Return column → kind of its values."""
        kinds = dict.fromkeys(TableArrays(_of_inputs(table)).columns, "time")
        for one in (column for columns in table.features.values() for column in columns):
            if not (one.parts or one.cyclic or one.since):
                kinds[one.column] = "word" if one.of_words else "number"
        if isinstance(table, NodeTable):
            kinds |= {one.column: "word" for one in table.categories.values()}
            kinds |= {column: f"id of {one.table}" for column, one in table.keys.items()}
            kinds[str(table.id)] = f"id of {key}"
        if isinstance(table, EdgeTable):
            source, _, target = self._tables.edge_type(key)
            kinds |= {table.source: f"id of {source}", table.target: f"id of {target}"}
            kinds |= {} if table.weight is None else {table.weight: "number"}
        return kinds

    def read(
        self, nodes: Mapping[str, Rows], edges: Mapping[str, Rows]
    ) -> tuple[tuple[NewNodes, NewEdges], dict[str, dict[UserId, int]]]:
        """Return the arrays of new nodes and edges, and node type → id → global number of each new
        node. Raises RequestError, naming row and column."""
        self._check("nodes", nodes, self._tables.nodes)
        self._check("edges", edges, self._own_edges)
        numbers = {ntype: self._numbers(ntype, rows) for ntype, rows in nodes.items()}
        found: dict[EdgeType, AddedEdges] = {}
        with TemporaryDirectory(prefix="raygnn-") as place:
            arrays = {
                t: self._arrays(f"nodes.{t}", t, self._tables.nodes[t], [*enumerate(rows)], place)
                for t, rows in nodes.items()
            }
            for key, table in self._tables.edges.items():
                etype, rows = self._tables.edge_type(key), [*enumerate(edges.get(key, ()))]
                where, ends = f"edges.{key}", (table.source, table.target)
                if isinstance(table, KeyTable):
                    where, rows = f"nodes.{etype[0]}", [*enumerate(nodes.get(etype[0], ()))]
                    rows = [(at, row) for at, row in rows if row.get(table.target) is not None]
                if not rows:
                    continue
                src, dst = (
                    np.array([self._end(t, c, where, at, row, numbers) for at, row in rows])
                    for t, c in zip(etype[::2], ends)
                )
                reverse = table.reverse and (etype[2], table.reverse, etype[0])
                kind = etype_str(etype)
                if reverse and kind not in self._words and etype_str(reverse) in self._words:
                    kind = etype_str(reverse)
                data = self._arrays(where, etype_str(etype), table, rows, place, kind)
                found[etype] = AddedEdges(src, dst, data)
                if reverse:
                    found[reverse] = AddedEdges(dst, src, data)
                if table.undirected:
                    back = np.flatnonzero(src != dst)
                    order = np.concatenate([np.arange(len(src)), back])
                    both = np.append(src, dst[back]), np.append(dst, src[back])
                    found[etype] = AddedEdges(*both, {n: rows[order] for n, rows in data.items()})
        for etype, reverse in self._meta.reverses.items():  # graph.reverse adds some, too
            if etype in found and reverse not in found:
                found[reverse] = AddedEdges(found[etype].dst, found[etype].src, found[etype].data)
        return (arrays, found), numbers

    def _check(self, section: str, given: Mapping[str, Rows], tables: Mapping[str, Table]) -> None:
        """Raise RequestError for tables and columns that there are not, and for too many rows."""
        if sum(map(len, given.values())) > _MOST[section]:
            what = f"a request has at most {_MOST[section]:,} rows of {section}"
            raise RequestError(what, where=section, remedy="send fewer")
        for key, rows in given.items():
            where = f"{section}.{key}"
            if key not in tables:
                remedy = f"choose of {', '.join(tables)}" if tables else "leave it out"
                raise RequestError("there is no such table", where=where, remedy=remedy)
            if (why := _refused(tables[key])) is not None:
                raise RequestError(why, where=where, remedy="use predict with --new-data")
            known = self._kinds(key, tables[key])
            ignored = {*TableArrays(tables[key]).columns, tables[key].split}
            for at, row in enumerate(rows):
                for column in row.keys() - known.keys() - ignored:
                    remedy = f"choose of {', '.join(known)}"
                    what = "the table has no such column"
                    raise RequestError(what, where=f"{where}[{at}].{column}", remedy=remedy)

    def _numbers(self, ntype: str, rows: Rows) -> dict[UserId, int]:
        """Return id → global number of each new node."""
        known, numbers = self._ids(ntype), dict[UserId, int]()
        column = str(self._tables.nodes[ntype].id)
        for at, row in enumerate(rows):
            one: Any = row.get(column)
            what = None
            if type(one) is not (int if known.whole else str) or one == "":
                what = f"the ids of {ntype} are {'whole numbers' if known.whole else 'text'}"
            elif one in numbers or known.position(one) is not None:
                what = f"{one!r} is there already"
            if what is not None:
                where = f"nodes.{ntype}[{at}].{column}"
                raise RequestError(what, where=where, remedy="give each new node an id of its own")
            numbers[one] = self._meta.num_nodes(ntype) + len(numbers)
        return numbers

    def _end(
        self,
        ntype: str,
        column: str,
        where: str,
        at: int,
        row: Row,
        numbers: Mapping[str, Mapping[UserId, int]],
    ) -> int:
        """Return the global number of the node at an end of an edge."""
        one: Any = row.get(column)
        found = None
        if type(one) in (int, str):
            found = numbers.get(ntype, {}).get(one)
            found = self._ids(ntype).position(one) if found is None else found
        if found is None:
            what = f"{one!r} is no {ntype}"
            remedy = f"name one of the graph or of nodes.{ntype} of this request"
            raise RequestError(what, where=f"{where}[{at}].{column}", remedy=remedy)
        return found

    def _arrays(
        self,
        where: str,
        kind: str,
        table: Table,
        rows: Placed,
        place: str,
        words: str | None = None,
    ) -> dict[str, Array]:
        """Return the arrays of a table's rows."""
        arrays = TableArrays(_of_inputs(table), self._words.get(words or kind))
        columns = dict.fromkeys(arrays.columns)
        if not columns or not rows:
            return {}
        file = Path(place) / "rows.parquet"
        made = {column: _column(where, column, rows) for column in columns}
        pq.write_table(pa.table(made), file)
        try:
            arrays.fit(kind, [file], self._to, Path(place))
            chunks = TableReader([file], arrays.columns).chunks()
            found = [arrays.rows(chunk, chunk.first) for chunk in chunks]
        except DataError as error:
            if (match := _ERROR.search(error.where or "")) is not None:
                name = next(column for column in columns if repr(column) == match[2])
                where = f"{where}[{rows[int(match[1]) - 1][0]}].{name}"
            raise RequestError(error.what, where=where, remedy=error.remedy) from None
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def _of_inputs(table: Table) -> Table:
    """Return the table without targets and splits, which nothing predicts with."""
    return table.model_copy(update={"label": None, "labels": {}, "split": None, "splits": None})


def _refused(table: Table) -> str | None:
    """Return why a request cannot have rows of a table; None if it can."""
    if isinstance(table, NodeTable) and table.id is None:
        return "the nodes of this table have no column of ids"
    return "text of this table is encoded by a stage of its own" if table.text else None


def _column(where: str, column: str, rows: Placed) -> pa.Array:
    values = [row.get(column) for _, row in rows]
    if (array := _array(values)) is not None:
        return array
    ends = range(1, len(values) + 1)
    at = bisect.bisect_left(ends, True, key=lambda end: _array(values[:end]) is None)
    what = f"{str(values[at])[:60]!r} is of another type than values before it, or too large"
    place = f"{where}[{rows[at][0]}].{column}"
    raise RequestError(what, where=place, remedy="give numbers, or text, in all rows")


def _array(values: Sequence[Any]) -> pa.Array | None:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return None
