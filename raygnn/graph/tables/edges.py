"""One table of edges: ends, weights, times, features, labels, splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.graph.data import EdgeFrame, EdgeType
from raygnn.graph.tables.columns import Array, Features, Times, numbers
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.nodes import Nodes
from raygnn.graph.tables.reader import Chunk, Reader
from raygnn.graph.tables.spec import EdgeTable
from raygnn.graph.tables.targets import Targets


def read_edges(
    etype: EdgeType,
    table: EdgeTable,
    files: Sequence[Path],
    nodes: Mapping[str, Nodes],
    vocabulary: Mapping[str, Sequence[Any]],
) -> tuple[dict[EdgeType, EdgeFrame], dict[str, list[Any]]]:
    """The edges of a table, and the reversed ones if it asks for them, with the same data.

    ``weight`` is float32 ``[E]``, ``time`` int64 ``[E]``, features float32 ``[E, F]``, labels and
    masks as :meth:`Targets.take` gives them. Both directions of an edge are in one split.

    Args:
        nodes: by type, read; ids that they lack are added where the table says so.
        vocabulary: see `Nodes`.

    Returns:
        Edge type → its edges, and array → what its codes stand for.

    Raises:
        DataError: naming file, row and column.
    """
    ends = [(table.source, nodes[etype[0]].ids), (table.target, nodes[etype[2]].ids)]
    features = {name: Features(columns, table.fill) for name, columns in table.features.items()}
    single: dict[str, Growing] = {}
    if table.weight is not None:
        single["weight"] = Growing(np.float32)
    if table.time is not None:
        single["time"] = Growing(np.int64)
    times = Times()
    targets = Targets(table, "edge", vocabulary.get("label"))
    reader = edge_reader(table, files)
    found = [Growing(np.int64), Growing(np.int64)]
    kept: list[Array] = []  # where rows are dropped
    for chunk in reader.chunks(lambda: max(ids.batch() for _, ids in ends)):
        keep = np.ones(chunk.num, bool)
        both = []
        if table.missing == "add":
            for new in {id(ids): ids for _, ids in ends}.values():
                new.learn(chunk, [column for column, ids in ends if ids is new])
        for column, ids in ends:
            places, dropped = ids.numbers(chunk, column, table.missing)
            both.append(places)
            if dropped is not None:
                keep &= ~dropped
        if table.weight is not None:
            single["weight"].append(_weights(chunk, table.weight)[keep])
        if table.time is not None:
            single["time"].append(times.of(chunk, table.time)[keep])
        for each in features.values():
            each.add(chunk)
        targets.add(chunk)
        for growing, places in zip(found, both, strict=True):
            growing.append(places[keep])
        kept.append(keep)
    data: dict[str, Any] = {name: growing.take() for name, growing in single.items()}
    whole = {name: each.take() for name, each in features.items()}
    whole |= targets.take(reader.num, reader)
    some = None if all(keep.all() for keep in kept) else np.concatenate(kept)
    data |= {name: rows if some is None else rows[some] for name, rows in whole.items()}
    frame = EdgeFrame(found[0].take(), found[1].take(), data)
    return _directions(etype, table, frame), targets.names


def edge_reader(table: EdgeTable, files: Sequence[Path]) -> Reader:
    """A reader of the table's columns."""
    columns = [table.source, table.target, table.weight, table.time]
    columns += Targets(table, "edge").columns
    for named in table.features.values():
        columns += [named] if isinstance(named, str) else named
    return Reader(files, [c for c in columns if c is not None], table.delimiter)


def _directions(etype: EdgeType, table: EdgeTable, edges: EdgeFrame) -> dict[EdgeType, EdgeFrame]:
    if table.reverse is not None:
        back = EdgeFrame(edges.dst, edges.src, dict(edges.data))
        return {etype: edges, (etype[2], table.reverse, etype[0]): back}
    if not table.undirected:
        return {etype: edges}
    back = edges.src != edges.dst  # a loop stays one edge
    source = np.concatenate((edges.src, edges.dst[back]))
    target = np.concatenate((edges.dst, edges.src[back]))
    data = {name: np.concatenate((rows, rows[back])) for name, rows in edges.data.items()}
    return {etype: EdgeFrame(source, target, data)}


def _weights(chunk: Chunk, column: str) -> Array:
    found = numbers(chunk, column, None)
    if (found < 0).any():
        row = int(np.argmax(found < 0))
        what = f"the weight is {found[row]:g}"
        raise chunk.error(row, column, what, "weights are numbers from 0")
    return found
