"""Brings each edge to the part that owns it, in two passes over files.

The edges of a part are cut into *buckets* of destinations, in the order of the edges' new ids, so
that a bucket fits in memory. The first pass reads each run of edges, and writes a file in which
they lie by bucket. The second reads what all these files have for one bucket, sorts it by
destination (stable, so that in-edge lists stay in the order of the input), and puts down what the
part needs, and for each other part the edges that come from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raygnn.graph.arrays import Array, IntArray, index_type
from raygnn.graph.data import EdgeType
from raygnn.graph.outofcore.disk_arrays import Appended, DiskArray, store
from raygnn.graph.outofcore.disk_graph import DiskGraph, EdgeRun
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.partition import edge_kernels
from raygnn.graph.partition.assemble import Numbering, homogeneous

BUCKET = 1 << 23  # edges, unless one node has more


@dataclass(frozen=True)
class StoredNumbering:
    """A `Numbering` in files, which tasks map.

    Attributes:
        starts, node_map: as there.
    """

    order: dict[str, DiskArray]
    new_id: dict[str, DiskArray]
    starts: dict[str, IntArray]
    node_map: dict[str, IntArray]

    @classmethod
    def from_numbering(cls, numbering: Numbering, directory: Path) -> StoredNumbering:
        """Put it on disk."""
        types = list(enumerate(numbering.order))
        return cls(
            {t: store(directory / f"order-{i}", numbering.order[t]) for i, t in types},
            {t: store(directory / f"new-{i}", numbering.new_id[t]) for i, t in types},
            numbering.starts,
            numbering.node_map,
        )

    def mapped(self) -> Numbering:
        """The same, its arrays mapped."""
        order = {ntype: array.map() for ntype, array in self.order.items()}
        new_id = {ntype: array.map() for ntype, array in self.new_id.items()}
        return Numbering(self.starts, order, new_id, self.node_map)


@dataclass(frozen=True)
class Bucket:
    """In-edges of some nodes of one part and type that follow one another.

    Attributes:
        part: who owns them.
        first_row, rows: homogeneous id of the first of these nodes, and how many there are.
        first_edge, edges: homogeneous id of the first edge, and how many there are.
    """

    number: int
    etype: EdgeType
    part: int
    first_row: int
    rows: int
    first_edge: int
    edges: int


@dataclass(frozen=True)
class SortedEdges:
    """The content of a bucket, on disk, by destination.

    Attributes:
        src: homogeneous ids of the sources.
        degrees: how many edges each node has.
        numbers: of the edges, in the input.
        data: the rows of their arrays.
        leaving: int64 ``[parts + 1]``: where, in the next three, the edges from each part start.
        out_src, out_dst, out_at: homogeneous ids of the ends, and places in the bucket.
    """

    bucket: Bucket
    src: DiskArray
    degrees: DiskArray
    numbers: DiskArray
    data: dict[str, DiskArray]
    leaving: list[int]
    out_src: DiskArray
    out_dst: DiskArray
    out_at: DiskArray


@dataclass(frozen=True)
class Shuffled:
    """All edges, at their parts.

    Attributes:
        edge_starts: edge type → int64 ``[parts + 1]``, where each part's edges start.
        edges: of all buckets, in the order of their ids.
    """

    edge_starts: dict[EdgeType, IntArray]
    edges: list[SortedEdges]


def shuffle(
    graph: DiskGraph, numbering: Numbering, kept: StoredNumbering, work: Workspace
) -> Shuffled:
    """Bring the edges to their parts; those of the graph are not needed afterwards.

    Args:
        kept: the same numbering in files.
    """
    edge_starts, buckets = _buckets(graph, numbering)
    bounds = numbering.bounds
    etypes = list(graph.runs)
    of_type = {etype: [b for b in buckets if b.etype == etype] for etype in etypes}
    runs = [(etype, run) for etype in etypes for run in graph.runs[etype]]
    directory = work.directory("scatter")
    files = [directory / f"{number}" for number in range(len(runs))]
    tasks = [
        (run, kept.new_id[etype[0]], kept.new_id[etype[2]], _first_rows(of_type[etype]), file)
        for (etype, run), file in zip(runs, files, strict=True)
    ]
    starts = work.run("scatter", _scatter, tasks, [run.num for _, run in runs])
    pieces: dict[EdgeType, list[_Piece]] = {etype: [] for etype in etypes}
    for (etype, run), file, at in zip(runs, files, starts, strict=True):
        pieces[etype].append(_Piece(run, file, at, kept.new_id[etype[0]].dtype))
    place = {b.number: at for of in of_type.values() for at, b in enumerate(of)}
    gathers = [
        (
            _Gather(b, [(p, place[b.number]) for p in pieces[b.etype]], bounds.tolist()),
            index_type(int(edge_starts[b.etype][-1])).__name__,
            work.directory("gather"),
        )
        for b in buckets
    ]
    leaving = work.run("gather", _gather, gathers, [b.edges for b in buckets])
    work.drop("scatter")
    sorted_edges = [
        _sorted(gather, number_type, directory, starts)
        for (gather, number_type, directory), starts in zip(gathers, leaving, strict=True)
    ]
    return Shuffled(edge_starts, sorted_edges)


def _buckets(
    graph: DiskGraph, numbering: Numbering
) -> tuple[dict[EdgeType, IntArray], list[Bucket]]:
    """Return starts of each part's edges, by type, and the buckets in the order of edge ids."""
    parts = len(numbering.bounds) - 1
    cuts: dict[EdgeType, list[tuple[IntArray, IntArray]]] = {}
    edge_starts: dict[EdgeType, IntArray] = {}
    for etype, runs in graph.runs.items():
        order, starts = numbering.order[etype[2]], numbering.starts[etype[2]]
        degrees = np.zeros(len(order) + 1, np.int64)
        for run in runs:
            edge_kernels.add_counts(run.ends()[1], degrees)
        total = np.zeros(len(order) + 1, np.int64)
        np.cumsum(degrees[1:][order], out=total[1:])
        edge_starts[etype] = total[starts]
        cuts[etype] = [_cut(total, int(starts[p]), int(starts[p + 1])) for p in range(parts)]
    edge_map = homogeneous(edge_starts)
    buckets: list[Bucket] = []
    for part in range(parts):
        for etype, of_parts in cuts.items():
            rows, ends = of_parts[part]
            row_shift = numbering.node_map[etype[2]][part, 0] - numbering.starts[etype[2]][part]
            edge_shift = edge_map[etype][part, 0] - edge_starts[etype][part]
            for at in np.flatnonzero(np.diff(ends)):
                first_row, first_edge = int(rows[at] + row_shift), int(ends[at] + edge_shift)
                size, num = int(rows[at + 1] - rows[at]), int(ends[at + 1] - ends[at])
                buckets.append(Bucket(len(buckets), etype, part, first_row, size, first_edge, num))
    return edge_starts, buckets


def _cut(total: IntArray, first: int, last: int) -> tuple[IntArray, IntArray]:
    """Rows ``first`` to ``last``, cut so that each piece has about `BUCKET` edges at most: the
    bounds of the pieces, and how many edges there are before each."""
    goals = np.arange(total[first] + BUCKET, total[last], BUCKET)
    rows = np.searchsorted(total[first : last + 1], goals, side="right") + first - 1
    rows = np.unique(np.concatenate([[first], rows, [last]])).astype(np.int64)
    return rows, total[rows]


def _first_rows(buckets: Sequence[Bucket]) -> list[int]:
    return [bucket.first_row for bucket in buckets]


def _scatter(
    run: EdgeRun, new_src: DiskArray, new_dst: DiskArray, first_rows: list[int], file: Path
) -> list[int]:
    """Write a run's edges by bucket: new ids of their ends, places in the run, and their data.
    Returns where each bucket's edges start, and their number."""
    src, dst = run.ends()
    src, dst = new_src.map()[src], new_dst.map()[dst]
    of_bucket = np.searchsorted(np.array(first_rows), dst, side="right") - 1
    starts, order = edge_kernels.group(of_bucket, len(first_rows))
    with Appended(file) as out:
        for column in (src[order], dst[order], order.astype(np.int32)):
            out.add(column)
        for name in run.data:
            out.add(run.rows(name)[order])
    return [int(start) for start in starts]


@dataclass(frozen=True)
class _Piece:
    """Output of `_scatter` for a run. ``starts``: of the buckets' edges; ``index``: dtype of the
    ends."""

    run: EdgeRun
    file: Path
    starts: list[int]
    index: str

    def columns(self) -> dict[str, DiskArray]:
        """Its columns: ``src``, ``dst``, ``place`` and, by ``data/<name>``, the arrays."""
        kinds: dict[str, tuple[str, tuple[int, ...]]]
        kinds = {"src": (self.index, ()), "dst": (self.index, ()), "place": ("int32", ())}
        kinds |= {f"data/{n}": (a.dtype, a.row_shape) for n, a in self.run.data.items()}
        columns, offset = {}, 0
        for name, (dtype, shape) in kinds.items():
            columns[name] = DiskArray(self.file, dtype, shape, offset, self.run.num)
            offset += self.run.num * columns[name].row_bytes
        return columns


@dataclass(frozen=True)
class _Gather:
    """Edges of a bucket: the pieces that hold them, in the order of their numbers, and the bucket's
    number in each; ``bounds`` of the parts' nodes."""

    bucket: Bucket
    pieces: list[tuple[_Piece, int]]
    bounds: list[int]


def _gather(gather: _Gather, number_type: str, directory: Path) -> list[int]:
    """Sort the edges of a bucket and write what `SortedEdges` names. Returns ``leaving``."""
    bucket, columns = gather.bucket, _columns(gather)
    starts, order = edge_kernels.group(columns["dst"] - bucket.first_row, bucket.rows)
    src, dst = columns["src"][order], columns["dst"][order]
    source_part = np.searchsorted(np.array(gather.bounds), src, side="right") - 1
    source_part[source_part == bucket.part] = len(gather.bounds) - 1  # the last: stays here
    leaving, by_part = edge_kernels.group(source_part, len(gather.bounds))
    by_part = by_part[: leaving[-2]]
    written = {
        "src": src,
        "degrees": np.diff(starts).astype(number_type),
        "numbers": columns["number"][order].astype(number_type),
        "out-src": src[by_part],
        "out-dst": dst[by_part],
        "out-at": by_part,
    }
    written |= {n: rows[order] for n, rows in columns.items() if n.startswith("data/")}
    for name, array in written.items():
        with Appended(_file(directory, bucket, name)) as out:
            out.add(array)
    return [int(start) for start in leaving[:-1]]


def _columns(gather: _Gather) -> dict[str, Array]:
    """Concatenate the pieces' columns of the bucket, with the edges' ``number`` for ``place``."""
    blocks: dict[str, list[Array]] = {}
    for piece, at in gather.pieces:
        start, stop = piece.starts[at], piece.starts[at + 1]
        for name, column in piece.columns().items():
            rows = column.read(start, stop)
            if name == "place":
                name, rows = "number", rows.astype(np.int64) + piece.run.first
            blocks.setdefault(name, []).append(rows)
    return {name: np.concatenate(arrays) for name, arrays in blocks.items()}


def _sorted(gather: _Gather, number_type: str, directory: Path, leaving: list[int]) -> SortedEdges:
    """Open the output of `_gather`."""
    index = index_type(gather.bounds[-1]).__name__
    bucket = gather.bucket

    def at(name: str, dtype: str, shape: tuple[int, ...] = ()) -> DiskArray:
        return DiskArray(_file(directory, bucket, name), dtype, shape)

    arrays = gather.pieces[0][0].run.data
    return SortedEdges(
        bucket,
        at("src", index),
        at("degrees", number_type),
        at("numbers", number_type),
        {name: at(f"data/{name}", array.dtype, array.row_shape) for name, array in arrays.items()},
        leaving,
        at("out-src", index),
        at("out-dst", index),
        at("out-at", index_type(bucket.edges).__name__),
    )


def _file(directory: Path, bucket: Bucket, column: str) -> Path:
    return directory / f"{bucket.number}.{column.replace('/', '-')}"
