"""Write a graph of any format to disk: read it, check it, scale features, add reverse edges."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import GraphConfig, OgbGraph, TablesGraph
from raygnn.graph import sources
from raygnn.graph.arrays import Array
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, GraphData, NodeFrame
from raygnn.graph.outofcore.disk_graph import (
    RUN,
    Appended,
    DiskArray,
    DiskGraph,
    reversed_runs,
    runs_of,
    spill,
    store,
)
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.sources import add_reverses, has_reverses, normalize, ogb
from raygnn.graph.sources.npz_members import Member
from raygnn.graph.tables.description import EdgeTable, NodeTable
from raygnn.graph.tables.table_stages import extents, read_tables

_ROWS = 1 << 18  # rows converted at once
_BYTES = 1 << 24  # bytes unpacked at once


def read_graph(
    config: GraphConfig, work: Workspace, *, needs_masks: bool, trains: bool
) -> DiskGraph:
    """Write the graph that `raygnn.graph.sources.load_graph` would read to disk. Tables and
    archives are never completely in memory."""
    if isinstance(config, TablesGraph):
        graph = read_tables(config, work)
    elif isinstance(config, OgbGraph):
        graph = _read_archives(config, ogb.archived(config), work)
    else:
        data = sources.load_graph(config, needs_masks=needs_masks, trains=trains)
        return spill(data, work.directory("edges"))
    graph.others["name"] = re.sub(r"[^\w.-]", "_", graph.others["name"])
    trains = trains and not _has_training_edges(graph)
    sources.check(graph.data(), needs_masks=needs_masks, trains=trains)
    graph = _scaled(graph, config.normalize or "none", work)
    return _with_reverses(graph) if has_reverses(config) else graph


def _has_training_edges(graph: DiskGraph) -> bool:
    """Return True if nodes have no masks and an edge is for training: `check` sees no edges."""
    if any("train_mask" in arrays for arrays in graph.node_arrays.values()):
        return False
    runs = [run for runs in graph.runs.values() for run in runs if "train_mask" in run.data]
    return any(run.rows("train_mask").any() for run in runs)


def is_in_place(member: Member) -> bool:
    """True if an array of an archive can be mapped in place."""
    return member.place is not None and not member.fortran and member.dtype.isnative


def _read_archives(graph: OgbGraph, dataset: ogb.Archived, work: Workspace) -> DiskGraph:
    """Return the graph of OGB's archives; see `raygnn.graph.sources.ogb`. Arrays are mapped in
    place; those that are compressed or in Fortran order are unpacked first."""
    packed = [member for member in dataset.members if not is_in_place(member)]
    paths = {m: work.directory("unpack") / str(at) for at, m in enumerate(packed)}
    sizes = [member.nbytes for member in packed]
    work.run("unpack", _unpack, [(member, paths[member]) for member in packed], sizes)

    def array(member: Member) -> DiskArray:
        path, place = (paths[member], 0) if member in paths else (member.file, member.place or 0)
        return DiskArray(path, member.dtype.name, member.shape[1:], place, member.shape[0])

    nodes = {name: array(member) for name, member in dataset.nodes.items()}
    edges = {name: array(member) for name, member in dataset.edges.items()}
    both = array(dataset.ends)
    src, dst = (
        replace(both, row_shape=(), offset=both.offset + row * both.row_bytes, rows=num_edges)
        for row, num_edges in enumerate(both.row_shape * 2)
    )
    runs = runs_of(src, dst, edges, 0, interleaved=graph.undirected)
    tasks = [(dataset, src, dst, run.start, run.stop) for run in runs]
    work.run("edges", _check_ends, tasks, [run.num for run in runs])
    where = work.directory("targets")
    (targets,) = work.run("targets", _read_targets, [(dataset, where)], [dataset.num_nodes])
    for name, (dtype, row_shape) in targets.items():
        nodes[name] = DiskArray(where / name, dtype, tuple(row_shape))
    return DiskGraph(
        {DEFAULT_NTYPE: dataset.num_nodes},
        {DEFAULT_NTYPE: nodes},
        {DEFAULT_ETYPE: runs},
        {"name": graph.name, "origin": dataset.origin},
    )


def _unpack(member: Member, path: Path) -> dict[str, int]:
    """Write an array of an archive in the format of `DiskArray`."""
    with Appended(path) as file:
        for block in member.blocks(_BYTES):
            file.add(block)
    if member.fortran:
        draft, dtype = path.with_suffix(".draft"), member.dtype.newbyteorder("=")
        stored: Array = np.memmap(path, dtype, "r", shape=member.shape[::-1]).T
        ordered = np.memmap(draft, dtype, "w+", shape=member.shape)
        ordered[:] = stored
        ordered.flush()  # other nodes read the file
        draft.replace(path)
    return {"rows": max(member.shape)}


def _check_ends(
    dataset: ogb.Archived, src: DiskArray, dst: DiskArray, start: int, stop: int
) -> None:
    dataset.checked_ends(src.read(start, stop), dst.read(start, stop), start)


def _read_targets(dataset: ogb.Archived, directory: Path) -> dict[str, Any]:
    """Write labels and masks. Returns dtype and row shape of each."""
    stored = {name: store(directory / name, rows) for name, rows in dataset.targets().items()}
    return {name: (array.dtype, array.row_shape) for name, array in stored.items()}


def _scaled(graph: DiskGraph, method: str, work: Workspace) -> DiskGraph:
    if method == "none":
        return graph
    arrays = {t: of["feat"] for t, of in graph.node_arrays.items() if "feat" in of}
    if not arrays:
        normalize(graph.data(), method)  # raises the error
    path, of_nodes, tasks = work.directory("normalize"), dict(graph.node_arrays), []
    for at, (ntype, array) in enumerate(arrays.items()):
        dtype = array.dtype if array.stored.kind == "f" else "float32"
        scaled = DiskArray(path / str(at), dtype, array.row_shape)
        tasks.append((method, array, scaled))
        of_nodes[ntype] = {**of_nodes[ntype], "feat": scaled}
    work.run("normalize", _normalize, tasks, [len(array) for array in arrays.values()])
    return replace(graph, node_arrays=of_nodes)


def _normalize(method: str, array: DiskArray, scaled: DiskArray) -> None:
    """Write a scaled copy of a matrix, computed in at least float32."""
    dtype = np.promote_types(scaled.dtype, np.float32)
    wide = DiskArray(scaled.path.with_suffix(".wide"), str(dtype), array.row_shape)
    _convert(array, wide)
    rows = wide.map(writable=True)
    normalize(GraphData("", {"": NodeFrame(len(rows), {"feat": rows})}, {}), method)
    _convert(wide, scaled)
    wide.path.unlink()


def _convert(array: DiskArray, to: DiskArray) -> None:
    """Write rows in another dtype. They are not written by a memory map, since a full disk would
    kill the process (SIGBUS)."""
    with Appended(to.path) as file:
        for start in range(0, len(array), _ROWS):
            rows = array.read(start, min(start + _ROWS, len(array)))
            file.add(rows.astype(to.dtype, copy=False))


def _with_reverses(graph: DiskGraph) -> DiskGraph:
    """Return the graph with reverse edges; see `add_reverses`."""
    data, runs = graph.data(), dict(graph.runs)
    add_reverses(data)
    for etype, other in data.reverses.items():
        if other not in graph.runs:
            runs[other] = reversed_runs(runs[etype])
    others = graph.others | {"names": data.names, "reverses": data.reverses}
    return replace(graph, runs={etype: runs[etype] for etype in data.edges}, others=others)


# Bytes of processes, as measured with benchmarks/bench_large.py
_TASK = 250 * 2**20  # a Ray worker process with the libraries
_RAY = 900 * 2**20  # Ray's other processes, and the driver
_HELD = 40  # per edge of a run or bucket, while it is sorted
_STREAMED = 60  # per node, in the process that assigns nodes by streaming, and in the driver
_LOOKUP = 65  # per node, in each process that looks up ids of tables
_NODE_OF_TASK = 40  # per node, in each process that writes a part
_METIS = 200  # per edge, beside the graph, as measured with benchmarks/bench_tables.py
_ON_DISK = 80  # per node, beside its arrays: ids and numbers


@dataclass(frozen=True)
class Size:
    """Estimated size of a graph. ``node_bytes``, ``edge_bytes``: arrays of nodes and edges;
    ``unpacked``: bytes of archives to unpack on disk, None = all (tables)."""

    nodes: int
    edges: int
    node_bytes: int
    edge_bytes: int
    unpacked: int | None = None

    @property
    def in_memory(self) -> int:
        """Bytes for reading the graph and METIS in one process, at most."""
        return self.node_bytes + self.edge_bytes + _METIS * self.edges


@dataclass(frozen=True)
class Needs:
    """Estimated requirements of out-of-core partitioning: bytes of memory on each machine, and of
    disk at the partition's directory."""

    memory: int
    disk: int


def size_of(graph: GraphConfig | None) -> Size | None:
    """Estimate the size of tables and archives, from their headers; None for other formats."""
    if isinstance(graph, OgbGraph):
        dataset, times = ogb.archived(graph), 2 if graph.undirected else 1
        unpacked = sum(member.nbytes for member in dataset.members if not is_in_place(member))
        node_bytes = sum(m.nbytes for m in dataset.nodes.values()) + 11 * dataset.num_nodes
        edge_bytes = sum(m.nbytes for m in (dataset.ends, *dataset.edges.values())) * times
        edges = dataset.ends.shape[1] * times
        return Size(dataset.num_nodes, edges, node_bytes, edge_bytes, unpacked)
    if not isinstance(graph, TablesGraph):
        return None
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
    """Estimate the requirements of `partition_out_of_core`. ``tasks``: tasks at a time per
    machine."""
    streams = method == "stream"
    per_node = _LOOKUP if size.unpacked is None else _NODE_OF_TASK
    held = max(_HELD * min(RUN, size.edges), per_node * size.nodes)
    memory = _RAY + max(_TASK + _STREAMED * size.nodes * streams, tasks * (_TASK + held))
    index = 4 if max(size.nodes, size.edges) < 2**31 else 8
    data = max(size.edge_bytes // max(size.edges, 1) - 16, 0)  # per edge, beside its ends
    if (unpacked := size.unpacked) is None:
        unpacked = size.edges * (2 * index + data)
    # streaming cuts at most about half as many edges as a random assignment
    cut = (parts - 1) / parts * (0.5 if streams else 1)
    stages = 2 * index + data + cut * 3 * index
    written = 25 + 8 + data + cut * 25
    # ``node_bytes`` of tables are twice the stored bytes of features: once in a stage, once in the
    # partition
    of_node = _ON_DISK + 17 * (1 + cut * parts)
    disk = unpacked + size.node_bytes + size.nodes * of_node + size.edges * (stages + written)
    return Needs(int(memory), int(disk))
