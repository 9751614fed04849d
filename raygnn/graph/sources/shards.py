"""Graphs that ``dgl.save_graphs`` wrote with labels, in one file or several.

The files are read without DGL, whose own reader trusts every length in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raygnn.errors import DataError
from raygnn.graph.data import GraphData, NodeFrame
from raygnn.graph.partition.dgl_file import StoredGraph, open_graphs
from raygnn.graph.sources.dgl import read_edges
from raygnn.graph.sources.many import GraphSet

MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")


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
    return GraphData(where, nodes, read_edges(stored, nodes, where))
