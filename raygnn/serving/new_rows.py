"""Rows of tables in requests and updates: new nodes and edges of the graph."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from raygnn.graph.staging.neighbourhood import AddedEdges, NewEdges, NewNodes, concatenated
from raygnn.graph.tables.description import EdgeTable, KeyTable, NodeTable, Table, read_description
from raygnn.graph.tables.frames import TableArrays, fit_to
from raygnn.graph.tables.reader import TableReader
from raygnn.serving.questions import RequestError, Row, Rows, Update, UserId, request_errors
from raygnn.serving.served_run import ServedModel
from raygnn.worker.planes.vocabulary import edge_reads

MOST = {"nodes": 1000, "edges": 10_000}  # rows of a request
_ERROR = re.compile(r", row (\d+), column (.+)", re.DOTALL)

Placed = list[tuple[int, Row]]  # rows of a table with their positions in the request
NewNumbers = Mapping[str, Mapping[UserId, int]]  # node type → id → global number of each new node


@dataclass(frozen=True)
class NewRows:
    """New nodes and edges of the graph.

    Attributes:
        nodes, edges: see `raygnn.graph.staging.neighbourhood.neighbourhood`.
        numbers: global numbers of the new nodes, in the order of their arrays.
        count: number of rows of the tables.
    """

    nodes: NewNodes = field(default_factory=dict)
    edges: NewEdges = field(default_factory=dict)
    numbers: NewNumbers = field(default_factory=dict)
    count: int = 0


class AllRows:
    """New rows that all requests to a model see, to which a request's rows are added.

    Attributes:
        kept: rows that all requests see.
        count: number of updates with these rows.
    """

    def __init__(self, model: ServedModel):
        self._model = model
        self.kept, self.count = NewRows(), 0

    @cached_property
    def reader(self) -> RowReader:
        """Reader of new rows. Raises RequestError if the run's graph cannot have any."""
        served = self._model.served
        if (why := served.fixed) is not None:
            raise RequestError(why, where="nodes, edges", remedy="ask for nodes of the graph")
        with request_errors():
            return RowReader(self._model)

    def beside(self, nodes: Rows, edges: Rows) -> NewRows:
        """Return the kept rows followed by these. Raises RequestError if these cannot be read."""
        if not (nodes or edges):
            return self.kept
        for section, given in (("nodes", nodes), ("edges", edges)):
            if sum(map(len, given.values())) > MOST[section]:
                what = f"a request has at most {MOST[section]:,} rows of {section}"
                raise RequestError(what, where=section, remedy="send fewer")
        return self._read(nodes, edges, self.kept)

    def _read(self, nodes: Rows, edges: Rows, known: NewRows) -> NewRows:
        """See `RowReader.read`."""
        try:
            return self.reader.read(nodes, edges, known)
        except (ValueError, TypeError) as error:  # such as lists where numbers are scaled
            what, remedy = f"the rows cannot be read: {error}", "give values as in /schema"
            raise RequestError(what, where="nodes, edges", remedy=remedy) from None

    def keep(self, first: int, updates: Sequence[Update]) -> None:
        """Keep the rows of updates, numbered from ``first``, that are not kept yet."""
        updates = updates[max(self.count - first, 0) :]
        nodes, edges = defaultdict[str, list[Row]](list), defaultdict[str, list[Row]](list)
        for one in updates:
            for every, tables in ((nodes, one.nodes), (edges, one.edges)):
                for table, rows in tables.items():
                    every[table] += rows
        try:
            kept = self._read(nodes, edges, self.kept) if updates else self.kept
        except RequestError:  # such as a number in one update, and text in another
            kept = self.kept
            for one in updates:
                kept = self._read(one.nodes, one.edges, kept)
        self.kept, self.count = kept, self.count + len(updates)


class RowReader:
    """Reader of new rows, with the transforms and categories of the run's tables."""

    def __init__(self, model: ServedModel):
        section = {**model.served.graph, "vocabulary": model.served.request.weights.about}
        graph = TablesGraph.model_validate(section, strict=False)
        self._tables = read_description(Path(graph.path))
        self._to, self._meta = fit_to(graph, self._tables), model.served.partition
        self._model, self._ids = model, model.ids

    def schema(self) -> dict[str, Any]:
        """Return the columns of the tables to which a request may add rows, as plain JSON types."""
        of: dict[str, Mapping[str, Table]] = {
            "nodes": self._tables.nodes,
            "edges": self._tables.edges,
        }
        return {
            section: {key: self._kinds(key, one) for key, one in some.items() if not _refused(one)}
            for section, some in of.items()
        }

    def _kinds(self, key: str, table: Table) -> dict[str, str]:
        """Return column → kind of values."""
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

    def read(self, nodes: Rows, edges: Rows, known: NewRows) -> NewRows:
        """Return the known rows followed by these. Raises RequestError, with row and column."""
        self._check("nodes", nodes, self._tables.nodes)
        self._check("edges", edges, self._tables.edges)
        numbers = dict(known.numbers)
        for ntype, new in nodes.items():
            numbers[ntype] = self._numbers(ntype, new, known.numbers.get(ntype, {}))
        found: dict[EdgeType, AddedEdges] = {}
        with TemporaryDirectory(prefix="raygnn-") as place:
            arrays = {
                t: self._arrays(f"nodes.{t}", t, self._tables.nodes[t], [*enumerate(new)], place)
                for t, new in nodes.items()
            }
            for (_, key, *_), (etype, table) in self._tables.edge_tables.items():
                where, rows = f"edges.{key}", [*enumerate(edges.get(str(key), ()))]
                if isinstance(table, KeyTable):
                    where, rows = f"nodes.{etype[0]}", [*enumerate(nodes.get(etype[0], ()))]
                    rows = [one for one in rows if one[1].get(table.target) not in (None, "")]
                if not rows:
                    continue
                src = self._ends(etype[0], table.source, where, rows, numbers)
                dst = self._ends(etype[2], table.target, where, rows, numbers)
                reverse = table.reverse and (etype[2], table.reverse, etype[0])
                names = [etype_str(one) for one in (etype, reverse) if one]
                words = next((name for name in names if name in self._to.vocabulary), "")
                data = self._arrays(where, names[0], table, rows, place, words)
                found[etype] = AddedEdges(src, dst, data)
                if reverse:
                    found[reverse] = AddedEdges(dst, src, data)
                if table.undirected:
                    # both directions of a row are adjacent, as in the graph
                    one, other = np.stack([src, dst], 1), np.stack([dst, src], 1)
                    once = np.stack([np.ones(len(src), bool), src != dst], 1)
                    order = np.repeat(np.arange(len(src)), once.sum(1))
                    data = {name: array[order] for name, array in data.items()}
                    found[etype] = AddedEdges(one[once], other[once], data)
        for etype, reverse in self._meta.reverses.items():  # also reverse edges by graph.reverse
            if etype in found and reverse not in found:
                found[reverse] = AddedEdges(found[etype].dst, found[etype].src, found[etype].data)
        shard = self._model.plane.shard
        for t, new_arrays in arrays.items():
            _check_widths(f"nodes.{t}", new_arrays, shard.node_data[t])
        time, clock = edge_reads(self._model.served.one).time, self._model.plane.clock
        for etype, added in found.items():
            where = etype_str(etype)
            _check_widths(where, added.data, shard.topology[etype].data)
            if time is not None and time in added.data:
                with request_errors():  # raised for times in other units than the graph's
                    clock.check(added.data[time], where, time, note=" (of this request)")
        nodes_of = {t: concatenated(known.nodes.get(t, {}), new) for t, new in arrays.items()}
        edges_of = {e: known.edges.get(e, AddedEdges()).and_then(new) for e, new in found.items()}
        count = known.count + sum(map(len, (*nodes.values(), *edges.values())))
        return NewRows({**known.nodes, **nodes_of}, {**known.edges, **edges_of}, numbers, count)

    def _check(self, section: str, given: Rows, tables: Mapping[str, Table]) -> None:
        """Raise RequestError for an unknown table or column."""
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
                    what, remedy = "the table has no such column", f"choose of {', '.join(known)}"
                    raise RequestError(what, where=f"{where}[{at}].{column}", remedy=remedy)

    def _numbers(
        self, ntype: str, rows: Sequence[Row], before: Mapping[UserId, int]
    ) -> dict[UserId, int]:
        """Return id → global number of each new node, after the nodes of ``before``."""
        known, numbers = self._ids(ntype), dict(before)
        column = str(self._tables.nodes[ntype].id)
        for at, row in enumerate(rows):
            one: Any = row.get(column)
            what = None
            if type(one) is not (int if known.whole else str) or one == "":
                what = f"the ids of {ntype} are {'whole numbers' if known.whole else 'text'}"
            elif one in numbers or known.position(one) is not None:
                what = f"{one!r} exists already"
            if what is not None:
                where = f"nodes.{ntype}[{at}].{column}"
                raise RequestError(what, where=where, remedy="give each new node a unique id")
            numbers[one] = self._meta.num_nodes(ntype) + len(numbers)
        return numbers

    def _ends(
        self, ntype: str, column: str, where: str, rows: Placed, numbers: NewNumbers
    ) -> Array:
        """Return the global numbers of the nodes at one end of edges."""
        known, new, found = self._ids(ntype), numbers.get(ntype, {}), list[int]()
        for at, row in rows:
            one: Any = row.get(column)
            number = None
            if type(one) in (int, str):
                number = new[one] if one in new else known.position(one)
            if number is None:
                remedy = f"name a node of the graph, or send it in nodes.{ntype}"
                place = f"{where}[{at}].{column}"
                raise RequestError(f"{one!r} is no {ntype}", where=place, remedy=remedy)
            found.append(number)
        return np.array(found)

    def _arrays(
        self, where: str, kind: str, table: Table, rows: Placed, place: str, words: str = ""
    ) -> dict[str, Array]:
        """Return the arrays of a table's rows."""
        arrays = TableArrays(_of_inputs(table), self._to.vocabulary.get(words or kind))
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


def _check_widths(where: str, new: Mapping[str, Array], stored: Mapping[str, Any]) -> None:
    """Raise RequestError if lists of an array have another length than the graph's."""
    for name, array in new.items():
        width = math.prod(array.shape[1:])
        if name in stored and width != (of_graph := math.prod(stored[name].shape[1:])):
            what = f"{name!r} has {width} numbers in each row, and {of_graph} in the graph"
            raise RequestError(what, where=where, remedy="give lists as long as in the tables")


def _of_inputs(table: Table) -> Table:
    """Return the table without targets and splits, which predictions do not read."""
    return table.model_copy(update={"label": None, "labels": {}, "split": None, "splits": None})


def _refused(table: Table) -> str | None:
    """Return why a request may not add rows to a table; None if it may."""
    if isinstance(table, NodeTable) and table.id is None:
        return "the nodes of this table have no column of ids"
    return "this table has text columns, which a request cannot encode" if table.text else None


def _column(where: str, column: str, rows: Placed) -> pa.Array:
    try:
        return pa.array([row.get(column) for _, row in rows])
    except (pa.ArrowException, OverflowError) as error:
        what, remedy = f"the values cannot be read: {error}", "give numbers, or text, in all rows"
        raise RequestError(what, where=f"{where}.{column}", remedy=remedy) from None
