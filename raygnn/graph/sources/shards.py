"""Graphs that ``dgl.save_graphs`` wrote with labels, in one file or several.

The files are read without DGL, whose own reader trusts every length in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raygnn.errors import DataError
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.dglfile import StoredGraph, open_graphs
from raygnn.graph.sources import convert
from raygnn.graph.sources.dgl import _ends
from raygnn.graph.sources.many import GraphSet

MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
_REMEDY = "Save the graphs again with dgl.save_graphs."


@contextmanager
def read(file: Path) -> Iterator[GraphSet]:
    """The graphs of one file, with their types, their edges in the order of their ids, and all
    data as stored.

    Raises:
        DataError: the file is damaged, an edge ends outside of its graph, or there is not one
            label for each graph; here, or when a graph is taken.
    """
    with open_graphs(file) as stored:
        for name, array in stored.labels.items():
            shape = tuple(array.shape)
            if not shape or shape[0] != stored.count:
                raise DataError(
                    f"the labels have shape {shape}, but there are {stored.count} graphs",
                    where=f"{file}: labels {name!r}",
                    remedy="Give dgl.save_graphs one label for each graph.",
                )
        graphs = (
            _to_data(graph, f"{file}: graph {number}") for number, graph in enumerate(stored.graphs)
        )
        yield GraphSet(file, stored.count, stored.labels, graphs)


def _to_data(stored: StoredGraph, where: str) -> GraphData:
    nodes = {
        ntype: NodeFrame(num, arrays)
        for ntype, num, arrays in zip(stored.ntypes, stored.num_nodes, stored.ndata, strict=True)
    }
    if len(nodes) != len(stored.ntypes):
        raise _damaged(where, "holds two node types of one name")
    edges: dict[EdgeType, EdgeFrame] = {}
    for relation, name, arrays in zip(stored.relations, stored.etypes, stored.edata, strict=True):
        if not all(0 <= end < len(nodes) for end in (relation.src_type, relation.dst_type)):
            raise _damaged(where, f"holds the relation {name!r} between types that do not exist")
        etype = (stored.ntypes[relation.src_type], name, stored.ntypes[relation.dst_type])
        if etype in edges:
            raise _damaged(where, f"holds two relations called {etype_str(etype)}")
        place = f"{where}: {etype_str(etype)}"
        source, target = _ends(relation, place)
        source = convert.to_ids(source, nodes[etype[0]].num, place, "source")
        target = convert.to_ids(target, nodes[etype[2]].num, place, "destination")
        edges[etype] = EdgeFrame(source, target, arrays)
    return GraphData(where, nodes, edges)


def _damaged(where: str, what: str) -> DataError:
    return DataError(what, where=where, remedy=_REMEDY)
