"""A graph saved with ``dgl.save_graphs``, of any number of node and edge types.

The file is read without DGL, whose own reader trusts every length in it: a truncated file can
abort the whole process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import DglGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import csr_rows
from raygnn.graph.data import MASKS, EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.partition.dgl_file import Relation, StoredGraph, read_graphs
from raygnn.graph.sources import convert
from raygnn.graph.sources.convert import Array
from raygnn.graph.sources.files import check_file

VERSION = 1
DEFAULT_NORMALIZE = "none"

_MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
_REMEDY = "Save the graph again with dgl.save_graphs."


def files(graph: DglGraph) -> list[Path]:
    """The one file."""
    return [Path(graph.path)]


def read(graph: DglGraph) -> GraphData:
    """The graph with its types, its edges in the order of their ids, and its data as stored.

    ``label`` becomes int64 ``[N]`` and the three masks bool ``[N]``; everything else keeps its
    dtype (bfloat16, which numpy lacks, as a torch tensor).

    Raises:
        DataError: the file is missing, damaged or not of ``dgl.save_graphs``, has no graph
            ``graph.index``, or holds an edge or label that can not be (the first is named).
    """
    file = Path(graph.path)
    _check_ends(file, check_file(file))
    graphs = read_graphs(file)
    if graph.index >= len(graphs):
        raise DataError(
            f"graph.index is {graph.index}, but it holds {len(graphs)} graphs",
            where=str(file),
            remedy=f"Choose graph.index from 0 to {len(graphs) - 1}.",
        )
    return _to_data(graphs[graph.index], file)


def _check_ends(file: Path, size: int) -> None:
    """Refuse another format or a truncated file by its first and last few bytes, before the
    minutes that a large one takes to read."""
    with file.open("rb") as stream:
        head = stream.read(32)
        stream.seek(max(size - 8, 0))
        tail = stream.read(8)
    if head[:8] != _MAGIC:
        raise DataError(
            "it is not a file that dgl.save_graphs wrote", where=str(file), remedy=_REMEDY
        )
    # The last word is the size of the table of graphs before it: its length and a word for each.
    count, table = int.from_bytes(head[24:], "little"), int.from_bytes(tail, "little")
    if len(head) < 32 or table != 8 + 8 * count:
        raise DataError(
            "it is truncated: it does not end as dgl.save_graphs ends a file",
            where=str(file),
            remedy="Copy the file or save the graph again.",
        )


def _to_data(stored: StoredGraph, file: Path) -> GraphData:
    nodes: dict[str, NodeFrame] = {}
    origin = {"": str(file)}
    for ntype, num, arrays in zip(stored.ntypes, stored.num_nodes, stored.ndata, strict=True):
        data = {}
        for name, array in arrays.items():
            origin[f"{ntype}/{name}"] = f"{file}: {ntype}/{name}"
            data[name] = _node_array(array, name, num, origin[f"{ntype}/{name}"])
        nodes[ntype] = NodeFrame(num, data)
    edges = read_edges(stored, nodes, str(file))
    for etype, frame in edges.items():
        where = f"{file}: {etype_str(etype)}"
        origin |= {f"{etype_str(etype)}/{key}": f"{where}/{key}" for key in frame.data}
        origin |= {f"{etype_str(etype)}/{end}": where for end in ("src", "dst")}
    return GraphData(file.stem, nodes, edges, origin)


def read_edges(
    stored: StoredGraph, nodes: Mapping[str, NodeFrame], where: str
) -> dict[EdgeType, EdgeFrame]:
    """The edges of each type in the order of their ids, with all data as stored.

    Args:
        nodes: of each type, in the order of the stored types.
        where: the graph, for messages.

    Raises:
        DataError: types are not what they should be, or an edge ends outside of the graph.
    """
    if len(nodes) != len(stored.ntypes):
        raise _damaged(where, "holds two node types of one name")
    edges: dict[EdgeType, EdgeFrame] = {}
    for relation, name, arrays in zip(stored.relations, stored.etypes, stored.edata, strict=True):
        if not all(0 <= end < len(nodes) for end in (relation.src_type, relation.dst_type)):
            raise _damaged(
                where, f"holds the relation {name!r} between node types that do not exist"
            )
        etype = (stored.ntypes[relation.src_type], name, stored.ntypes[relation.dst_type])
        if etype in edges:
            raise _damaged(where, f"holds two relations called {etype_str(etype)}")
        place = f"{where}: {etype_str(etype)}"
        source, target = _ends(relation, place)
        source = convert.to_ids(source, nodes[etype[0]].num, place, "source")
        target = convert.to_ids(target, nodes[etype[2]].num, place, "destination")
        edges[etype] = EdgeFrame(source, target, arrays)
    return edges


def _node_array(array: Any, name: str, num: int, origin: str) -> Any:
    convert.require_rows(array, num, origin, "nodes")
    if isinstance(array, np.ndarray) and name == "label":
        return convert.to_labels(array, origin)
    if isinstance(array, np.ndarray) and name in MASKS:
        return convert.to_mask(array, origin)
    return array


def _ends(relation: Relation, where: str) -> tuple[Array, Array]:
    """Sources and destinations of a relation in the order of its edge ids."""
    kind = next(kind for kind in ("coo", "csc", "csr") if kind in relation.formats)
    first, second, order = relation.formats[kind]
    if kind != "coo":
        first = csr_rows(first, len(second), partial(_damaged, where))
    if len(first) != len(second) or len(order) not in (0, len(second)):
        raise _damaged(
            where,
            f"holds {len(first)} sources, {len(second)} destinations and {len(order)} edge ids",
        )
    source, target = (second, first) if kind == "csc" else (first, second)
    if not len(order):
        return source, target
    place = _inverse(order, where)
    return source[place], target[place]


def _inverse(order: Array, where: str) -> Array:
    """The inverse of a permutation of ``0 … E-1``."""
    num = len(order)
    place = np.full(num, -1, dtype=np.int64)
    outside = (order < 0) | (order >= num)
    if not outside.any():
        place[order] = np.arange(num)
        outside = place < 0
    if outside.any():
        raise _damaged(where, f"holds edge ids that are not 0 to {num - 1}, each once")
    return place


def _damaged(where: Path | str, what: str) -> DataError:
    return DataError(what, where=str(where), remedy=_REMEDY)
