"""Estimate of memory and disk for a partition, from sizes and headers of the input only."""

from __future__ import annotations

from dataclasses import dataclass

from raygnn.config.graph import GraphConfig, OgbGraph, TablesGraph
from raygnn.graph.outofcore.disk_graph import RUN
from raygnn.graph.outofcore.graph_stages import is_in_place
from raygnn.graph.sources import ogb
from raygnn.graph.tables.description import EdgeTable, NodeTable
from raygnn.graph.tables.table_stages import extents

# bytes: of arrays by their sizes, of processes as seen in benchmarks/bench_large.py
_TASK = 250 * 2**20  # of a process of Ray's with the libraries
_RAY = 900 * 2**20  # of Ray's other processes and the driver
_HELD = 48  # for each edge of a run or bucket, while it is sorted
_STREAMED = 110  # for each node, in the process that assigns nodes by streaming, and in the driver
_NODE_OF_TASK = 40  # for each node, in each process that writes a part
_METIS = 200  # for each edge in memory, beside the graph, as benchmarks/bench_tables.py has it
_ON_DISK = 80  # for each node, beside its arrays: ids, their table and numbers
# seconds of a machine that does nothing else: until Ray is there, and edges a second of one core
_START, _RATE, _STREAM_RATE = 20, 600_000, 150_000


@dataclass(frozen=True)
class Size:
    """About how large a graph is.

    Attributes:
        node_bytes, edge_bytes: of what is read for all nodes, and for all edges.
        unpacked: bytes of archives that are unpacked on disk; None of tables, which all are.
    """

    nodes: int
    edges: int
    node_bytes: int
    edge_bytes: int
    unpacked: int | None = None

    @property
    def in_memory(self) -> int:
        """Bytes that reading it and METIS take at most, in one process."""
        return self.node_bytes + self.edge_bytes + _METIS * self.edges


@dataclass(frozen=True)
class Needs:
    """About what it takes to partition a graph out of core: bytes on one machine, bytes where the
    partition will lie, seconds."""

    memory: int
    disk: int
    seconds: int


def size_of(graph: GraphConfig) -> Size | None:
    """Return the size of tables and archives, from their headers; None for other formats, which
    are read in memory.
    """
    if isinstance(graph, TablesGraph):
        return _of_tables(graph)
    if isinstance(graph, OgbGraph):
        return _of_archives(ogb.archived(graph), times=2 if graph.undirected else 1)
    return None


def _of_archives(dataset: ogb.Archived, times: int) -> Size:
    unpacked = sum(member.nbytes for member in dataset.members if not is_in_place(member))
    node_bytes = sum(member.nbytes for member in dataset.nodes.values()) + 11 * dataset.num_nodes
    edge_bytes = sum(m.nbytes for m in (dataset.ends, *dataset.edges.values())) * times
    num_edges = dataset.ends.shape[1] * times
    return Size(dataset.num_nodes, num_edges, node_bytes, edge_bytes, unpacked)


def _of_tables(graph: TablesGraph) -> Size:
    nodes = edges = node_bytes = edge_bytes = 0
    for table, rows, size in extents(graph):
        if isinstance(table, NodeTable):
            nodes, node_bytes = nodes + rows, node_bytes + size
        elif isinstance(table, EdgeTable):
            times = 2 if table.undirected or table.reverse else 1
            edges += times * rows * (2 if graph.reverse else 1)
            edge_bytes += times * size
    return Size(nodes, edges, node_bytes, edge_bytes)


def needs(size: Size, parts: int, tasks: int, method: str) -> Needs:
    """Return what `partition_out_of_core` needs with so many tasks per machine and in all."""
    streams = method == "stream"
    held = max(_HELD * min(RUN, size.edges), _NODE_OF_TASK * size.nodes)
    memory = _RAY + max(_TASK + _STREAMED * size.nodes * streams, tasks * (_TASK + held))
    index = 4 if max(size.nodes, size.edges) < 2**31 else 8
    data = max(size.edge_bytes // max(size.edges, 1) - 16, 0)  # of an edge, beside its ends
    if (unpacked := size.unpacked) is None:
        unpacked = size.edges * (2 * index + data)
    # by streaming half of what a random assignment cuts, where there are communities less
    cut = (parts - 1) / parts * (0.5 if streams else 1)
    stages = 2 * index + data + cut * 3 * index
    written = 25 + 8 + data + cut * 25
    # ``node_bytes`` of tables are twice those of features as they are stored: once in a stage, once
    # written
    of_node = _ON_DISK + 17 * (1 + cut * parts)
    disk = unpacked + size.node_bytes + size.nodes * of_node + size.edges * (stages + written)
    rate = (_STREAM_RATE if streams else _RATE) * max(tasks, 1)
    return Needs(int(memory), int(disk), _START + size.edges // rate)
