"""Graphs saved with ``dgl.save_graphs``: one of a file, or all of them with labels.

The files are read without DGL, whose own reader trusts every length in them: a truncated file can
abort the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import DglGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.partition.dgl_format import StoredGraph, open_graphs, read_graphs
from raygnn.graph.sources import input_files

VERSION = 1

_REMEDY = "save the graph again with dgl.save_graphs"


@dataclass(frozen=True)
class GraphSet:
    """Graphs of one file or dataset, each read when it is requested.

    Attributes:
        file: where they come from, for errors.
        num: how many there are.
        labels: name → array ``[num, …]`` of any dtype, a torch tensor where that is bfloat16;
            complete once all graphs have been read.
        graphs: to be read once and in order; their names are their locations, for errors.
        splits: split → numbers of graphs; None if they have none.
    """

    file: Path | str
    num: int
    labels: Mapping[str, Any]
    graphs: Iterator[GraphData]
    splits: Mapping[str, Array] | None = None


def files(graph: DglGraph) -> list[Path]:
    return [Path(graph.path)]


def read(graph: DglGraph) -> GraphData:
    """Read the graph with its types, edges ordered by id, and data as stored.

    ``label`` becomes int64 ``[N]`` and the three masks bool ``[N]``; everything else keeps its
    dtype (bfloat16, which numpy lacks, as a torch tensor).
    """
    file = Path(graph.path)
    graphs = read_graphs(file)
    if graph.index >= len(graphs):
        message = f"graph.index is {graph.index}, but it holds {len(graphs)} graphs"
        remedy = f"choose graph.index from 0 to {len(graphs) - 1}"
        raise DataError(message, where=str(file), remedy=remedy)
    nodes, edges = _frames(graphs[graph.index], str(file))
    input_files.to_targets(nodes, str(file))
    return GraphData(file.stem, nodes, edges, {"": str(file)})


@contextmanager
def read_all(file: Path) -> Iterator[GraphSet]:
    """Open the graphs of one file, with their types, edges ordered by id, and data as stored."""
    with open_graphs(file) as stored:
        for name, array in stored.labels.items():
            input_files.require_rows(array, stored.count, f"{file}: labels {name!r}", "graphs")

        def to_data(number: int, graph: StoredGraph) -> GraphData:
            origin = f"{file}: graph {number}"
            return GraphData(origin, *_frames(graph, origin))

        graphs = (to_data(number, graph) for number, graph in enumerate(stored.graphs))
        yield GraphSet(file, stored.count, stored.labels, graphs)


def _frames(
    stored: StoredGraph, origin: str
) -> tuple[dict[str, NodeFrame], dict[EdgeType, EdgeFrame]]:
    """Return the nodes and edges of each type, edges ordered by id, with all data as stored."""
    nodes: dict[str, NodeFrame] = {}
    for ntype, num, arrays in zip(stored.ntypes, stored.num_nodes, stored.ndata, strict=True):
        nodes[ntype] = NodeFrame(num, arrays)
    if len(nodes) != len(stored.ntypes):
        raise _damaged(origin, "holds two node types of one name")
    edges: dict[EdgeType, EdgeFrame] = {}
    for relation, name, arrays in zip(stored.relations, stored.etypes, stored.edata, strict=True):
        if not all(0 <= end < len(nodes) for end in (relation.src_type, relation.dst_type)):
            message = f"holds the relation {name!r} between node types that do not exist"
            raise _damaged(origin, message)
        etype = (stored.ntypes[relation.src_type], name, stored.ntypes[relation.dst_type])
        if etype in edges:
            raise _damaged(origin, f"holds two relations called {etype_str(etype)}")
        place = f"{origin}: {etype_str(etype)}"
        source, target, ids = relation.ends(partial(_damaged, place))
        if len(ids):  # in the order of the ids
            order = _inverse(ids, place)
            source, target = source[order], target[order]
        edges[etype] = EdgeFrame(source, target, arrays)
    input_files.check_frames(nodes, edges, origin)
    return nodes, edges


def _inverse(order: Array, origin: str) -> Array:
    """Invert a permutation of ``0 … E-1``."""
    num = len(order)
    place = np.full(num, -1, dtype=np.int64)
    outside = (order < 0) | (order >= num)
    if not outside.any():
        place[order] = np.arange(num)
        outside = place < 0
    if outside.any():
        raise _damaged(origin, f"holds edge ids that are not 0 to {num - 1}, each once")
    return place


def _damaged(origin: Path | str, message: str) -> DataError:
    return DataError(message, where=str(origin), remedy=_REMEDY)
