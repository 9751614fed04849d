"""Number the nodes of each part, and move each edge to the part that owns it, in two passes.

As in DGL, homogeneous ids are ordered by part, then by type. A part owns the in-edges of its nodes,
and its graph has every edge that touches one of its nodes, so also out-edges to other parts (one
hop of halo). Within a part, nodes of a type keep their original order, and edges are ordered by
type, destination and original id, so in-edge lists have the same order for any partition.

The edges of a part are divided by destination into *buckets* that fit into memory, in the order of
the edges' new ids. The first pass writes the edges of each run by bucket. The second reads a bucket
from all runs, sorts its edges by destination (stable, which keeps lists in input order), and writes
them for the part, and those that come from another part also for that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from raygnn.graph.arrays import Array, IntArray, index_type
from raygnn.graph.data import EdgeType
from raygnn.graph.outofcore.disk_graph import DiskArray, DiskGraph, EdgeRun, store
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.partition import edge_kernels
from raygnn.graph.partition.edge_kernels import IndexArray

BUCKET = 1 << 23  # edges, unless a single node has more

# A bucket's edges in one run: number of the run's first edge, first and last row, arrays
_Piece: TypeAlias = tuple[int, int, int, dict[str, DiskArray]]


@dataclass(frozen=True)
class Numbering:
    """Nodes of each part and their new ids, by node type. Large arrays are in files, which tasks
    map.

    Attributes:
        starts: int64 ``[parts + 1]``, start of each part's nodes in ``order``.
        order: input ids, part by part.
        new_id: homogeneous ids, by input id.
        node_map: int64 ``[parts, 2]``, homogeneous id ranges, as in DGL's JSON.
    """

    starts: dict[str, IntArray]
    order: dict[str, DiskArray]
    new_id: dict[str, DiskArray]
    node_map: dict[str, IntArray]

    @classmethod
    def from_assignment(
        cls, assignment: Mapping[str, IndexArray], parts: int, directory: Path
    ) -> Numbering:
        """Number the nodes of each part. ``assignment``: node type → part of each node."""
        groups = {t: edge_kernels.group(part, parts) for t, part in assignment.items()}
        starts = {ntype: group[0] for ntype, group in groups.items()}
        node_map = homogeneous(starts)
        index = index_type(sum(map(len, assignment.values())))
        order, new_id = dict[str, DiskArray](), dict[str, DiskArray]()
        for number, (ntype, (_, ids)) in enumerate(groups.items()):
            shift = (node_map[ntype][:, 0] - starts[ntype][:-1]).astype(index)
            new = np.empty(len(ids), dtype=index)
            new[ids] = np.repeat(shift, np.diff(starts[ntype])) + np.arange(len(ids))
            order[ntype] = store(directory / f"order-{number}", ids)
            new_id[ntype] = store(directory / f"new-{number}", new)
        return cls(starts, order, new_id, node_map)

    @property
    def bounds(self) -> IntArray:
        """First homogeneous node id of each part, int64 ``[parts + 1]``."""
        return np.concatenate([[0], np.max([m[:, 1] for m in self.node_map.values()], 0)])

    def nodes(self, ntype: str, part: int) -> IntArray:
        """Return the input ids of a part's nodes of a type."""
        return self.order[ntype].read(*self.starts[ntype][part : part + 2]).astype(np.int64)

    def describe(self, nodes: IntArray) -> tuple[IndexArray, IntArray]:
        """Return type number (int32) and part (int64) of homogeneous node ids."""
        starts = np.stack([m[:, 0] for m in self.node_map.values()], axis=1).reshape(-1)
        at = np.searchsorted(starts, nodes, side="right") - 1
        return (at % len(self.node_map)).astype(np.int32), at // len(self.node_map)


def homogeneous(starts: dict[Any, IntArray]) -> dict[Any, IntArray]:
    """Convert starts of each type's parts, type-wise ``[parts+1]``, to homogeneous ranges
    ``[parts, 2]``."""
    sizes = np.stack([np.diff(each) for each in starts.values()], axis=1)  # [parts, types]
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    return {
        kind: np.stack([ends[:, i] - sizes[:, i], ends[:, i]], axis=1)
        for i, kind in enumerate(starts)
    }


@dataclass(frozen=True)
class Bucket:
    """In-edges of consecutive nodes of one part and type, on disk, sorted by destination.

    Attributes:
        first_row, first_edge: homogeneous ids of the first node and edge.
        rows, edges: numbers of nodes and edges.
        arrays: ``src`` (homogeneous ids of the sources), ``degrees`` (in-degree of each node),
            ``numbers`` (edge numbers in the input), ``data/<name>`` (edge arrays); for edges from
            other parts, by part, ``out-src`` and ``out-dst`` (homogeneous ids), and ``out-at``
            (positions in the bucket).
        leaving: ``[parts + 1]``, start of the edges from each part in the ``out-`` arrays.
    """

    number: int
    etype: EdgeType
    part: int
    first_row: int
    rows: int
    first_edge: int
    edges: int
    arrays: dict[str, DiskArray] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)

    def leaving_from(self, part: int, name: str) -> IntArray:
        """Return ``src``, ``dst`` or ``at`` of the edges whose source is in a part, int64."""
        return self.arrays[f"out-{name}"].read(*self.leaving[part : part + 2]).astype(np.int64)


def shuffle(
    graph: DiskGraph, numbering: Numbering, work: Workspace
) -> tuple[dict[EdgeType, IntArray], list[Bucket]]:
    """Move the edges to their parts. Returns the start of each part's edges, int64 ``[parts + 1]``
    by type, and the buckets, in the order of their edges' new ids."""
    edge_starts, buckets = _buckets(graph, numbering)
    of_type = {etype: [b for b in buckets if b.etype == etype] for etype in graph.runs}
    runs = [(etype, run) for etype, of in graph.runs.items() for run in of if run.num]
    index = next(iter(numbering.new_id.values())).dtype
    kinds = {"src": index, "dst": index, "place": "int32"}
    directory, scatters = work.directory("scatter"), []
    for at, (etype, run) in enumerate(runs):
        first_rows = [bucket.first_row for bucket in of_type[etype]]
        ends = numbering.new_id[etype[0]], numbering.new_id[etype[2]]
        scatters.append((run, *ends, first_rows, _files(directory / str(at), kinds, run.data)))
    starts = work.run("scatter", _scatter, scatters, [run.num for _, run in runs])
    pieces: dict[EdgeType, list[Any]] = {etype: [] for etype in of_type}
    for (etype, run), of_buckets, task in zip(runs, starts, scatters, strict=True):
        pieces[etype].append((run.first, of_buckets, task[-1]))
    directory, gathers = work.directory("gather"), []
    for etype, of in of_type.items():
        number = index_type(int(edge_starts[etype][-1])).__name__
        for at, bucket in enumerate(of):
            mine = [(first, *rows[at : at + 2], data) for first, rows, data in pieces[etype]]
            kinds = {"src": index, "degrees": number, "numbers": number}
            kinds |= {"out-src": index, "out-dst": index, "out-at": number}
            arrays = _files(directory / str(bucket.number), kinds, graph.runs[etype][0].data)
            gathers.append((replace(bucket, arrays=arrays), mine, numbering.bounds.tolist()))
    gathers.sort(key=lambda task: task[0].number)
    gathered = work.run("gather", _gather, gathers, [b.edges for b in buckets])
    work.drop("scatter")
    done = zip(gathers, gathered, strict=True)
    return edge_starts, [replace(task[0], leaving=leaving) for task, leaving in done]


def _files(
    path: Path, kinds: Mapping[str, str], data: Mapping[str, DiskArray]
) -> dict[str, DiskArray]:
    """Return files beginning with ``path`` for columns, by dtype, and for edge arrays like
    ``data``."""
    files = {name: DiskArray(Path(f"{path}.{name}"), kind) for name, kind in kinds.items()}
    for at, (name, array) in enumerate(data.items()):
        files[f"data/{name}"] = DiskArray(Path(f"{path}.data-{at}"), array.dtype, array.row_shape)
    return files


def _buckets(
    graph: DiskGraph, numbering: Numbering
) -> tuple[dict[EdgeType, IntArray], list[Bucket]]:
    """Return the start of each part's edges, by type, and the buckets in the order of edge ids."""
    parts = len(numbering.bounds) - 1
    cuts: dict[EdgeType, list[tuple[IntArray, IntArray]]] = {}
    edge_starts: dict[EdgeType, IntArray] = {}
    for etype, runs in graph.runs.items():
        order, starts = numbering.order[etype[2]].map(), numbering.starts[etype[2]]
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
    """Divide rows ``first`` to ``last`` into pieces of at most about `BUCKET` edges. Returns the
    bounds of the pieces, and the number of edges before each bound."""
    goals = np.arange(total[first] + BUCKET, total[last], BUCKET)
    rows = np.searchsorted(total[first : last + 1], goals, side="right") + first - 1
    rows = np.unique(np.concatenate([[first], rows, [last]])).astype(np.int64)
    return rows, total[rows]


def _scatter(
    run: EdgeRun,
    new_src: DiskArray,
    new_dst: DiskArray,
    first_rows: list[int],
    to: dict[str, DiskArray],
) -> list[int]:
    """Write a run's edges by bucket: new ids of their ends, positions in the run, and edge arrays.
    Returns the start of each bucket's edges."""
    src, dst = run.ends()
    src, dst = new_src.map()[src], new_dst.map()[dst]
    of_bucket = np.searchsorted(np.array(first_rows), dst, side="right") - 1
    starts, order = edge_kernels.group(of_bucket, len(first_rows))
    for name, rows in {"src": src[order], "dst": dst[order], "place": order}.items():
        to[name].write(rows)
    for name in run.data:
        to[f"data/{name}"].write(run.rows(name)[order])
    return list(starts.tolist())


def _gather(bucket: Bucket, pieces: Sequence[_Piece], bounds: list[int]) -> list[int]:
    """Sort the edges of a bucket, from its pieces in input order. Returns `Bucket.leaving`."""
    columns = _columns(pieces)
    starts, order = edge_kernels.group(columns["dst"] - bucket.first_row, bucket.rows)
    src, dst = columns["src"][order], columns["dst"][order]
    source_part = np.searchsorted(np.array(bounds), src, side="right") - 1
    source_part[source_part == bucket.part] = len(bounds) - 1  # local edges come last
    leaving, by_part = edge_kernels.group(source_part, len(bounds))
    by_part = by_part[: leaving[-2]]
    written = {
        "src": src,
        "degrees": np.diff(starts),
        "numbers": columns["number"][order].astype(bucket.arrays["numbers"].dtype),
        "out-src": src[by_part],
        "out-dst": dst[by_part],
        "out-at": by_part,
    }
    for name, array in bucket.arrays.items():
        array.write(written[name] if name in written else columns[name][order])
    return list(leaving[:-1].tolist())


def _columns(pieces: Sequence[_Piece]) -> dict[str, Array]:
    """Concatenate the columns of pieces, with the edges' ``number`` in place of ``place``."""
    blocks: dict[str, list[Array]] = {}
    for first, start, stop, arrays in pieces:
        for name, column in arrays.items():
            rows = column.read(start, stop)
            if name == "place":
                name, rows = "number", rows.astype(np.int64) + first
            blocks.setdefault(name, []).append(rows)
    return {name: np.concatenate(arrays) for name, arrays in blocks.items()}
