"""What one worker sees of a partitioned graph.

A worker owns one contiguous range of ids of every node type. The ranges follow the parts, and
cut through one where the number of workers does not divide the number of parts, so that any
number of workers can train on any partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.layout import Part, PartitionMeta, load_part


@dataclass(frozen=True)
class Rows:
    """In-edge lists of a contiguous range of destination nodes.

    Attributes:
        first: global id of the first row.
        indptr: int64 ``[R+1]``.
        src: int64 ``[E]``, global ids of the sources, in original edge order per row.
        keys: int64 ``[R]``, what sampling is keyed by: the original id of each row's node (its
            global id where a partition does not record original ids).
    """

    first: int
    indptr: np.ndarray
    src: np.ndarray
    keys: np.ndarray

    @property
    def num(self) -> int:
        return len(self.indptr) - 1

    @property
    def nbytes(self) -> int:
        return int(self.indptr.nbytes + self.src.nbytes + self.keys.nbytes)


@dataclass(frozen=True)
class Shard:
    """One worker's share.

    Attributes:
        bounds: node type → int64 ``[W+1]``; rank r owns the ids ``bounds[r] … bounds[r+1]-1``.
        topology: edge type → the in-edge lists that this worker holds: of the nodes it owns, or
            of all nodes when the topology is replicated.
        node_data: node type → name → tensor ``[owned, …]`` as stored.
        original: node type → int64 ``[owned]`` original ids.
    """

    rank: int
    ntypes: list[str]
    etypes: list[EdgeType]
    bounds: dict[str, np.ndarray]
    topology: dict[EdgeType, Rows]
    node_data: dict[str, dict[str, Tensor]]
    original: dict[str, np.ndarray]

    def first(self, ntype: str) -> int:
        """Global id of the first node of ``ntype`` that this worker owns."""
        return int(self.bounds[ntype][self.rank])

    def owned(self, ntype: str) -> int:
        """How many nodes of ``ntype`` this worker owns."""
        return int(self.bounds[ntype][self.rank + 1]) - self.first(ntype)

    def num_nodes(self, ntype: str) -> int:
        return int(self.bounds[ntype][-1])

    def in_degree(self, etype: EdgeType) -> Tensor:
        """In-edges of every owned node of the destination type, int64 ``[owned]``."""
        rows, ntype = self.topology[etype], etype[2]
        low = self.first(ntype) - rows.first
        indptr = rows.indptr[low : low + self.owned(ntype) + 1]
        return torch.from_numpy(np.diff(indptr))

    def own_sources(self, etype: EdgeType) -> np.ndarray:
        """Source ids of all in-edges of the owned nodes, int64."""
        rows, ntype = self.topology[etype], etype[2]
        low = self.first(ntype) - rows.first
        return rows.src[rows.indptr[low] : rows.indptr[low + self.owned(ntype)]]


def ownership(ranges: np.ndarray, workers: int) -> np.ndarray:
    """Cut the parts' ranges ``[P, 2]`` of one node type into one range per worker.

    Returns:
        int64 ``[workers+1]``. Worker r gets the parts ``r·P/W … (r+1)·P/W``; a fraction of a part
        is that fraction of its nodes.
    """
    parts = len(ranges)
    bounds = np.empty(workers + 1, np.int64)
    for r in range(workers):
        part, rest = divmod(r * parts, workers)
        start, end = ranges[part]
        bounds[r] = start + (end - start) * rest // workers
    bounds[workers] = ranges[-1, 1]
    return bounds


def load_shard(meta: PartitionMeta, rank: int, workers: int, *, replicated: bool) -> Shard:
    """Read what worker ``rank`` of ``workers`` needs.

    Args:
        replicated: hold the in-edge lists of all nodes, not only of the owned ones.

    Raises:
        DataError: a part is missing or unreadable, or parts differ in a feature's dtype or shape.
    """
    bounds = {t: ownership(meta.node_ranges[t], workers) for t in meta.ntypes}
    mine = {t: (int(b[rank]), int(b[rank + 1])) for t, b in bounds.items()}
    whole = {t: (0, int(b[-1])) for t, b in bounds.items()}
    # a worker that owns nothing still reads one part, to know the arrays' dtypes and shapes
    overlapping = [p for p in range(meta.num_parts) if _overlaps(meta, p, mine)] or [0]
    needed = range(meta.num_parts) if replicated else overlapping
    parts = {p: load_part(meta, p) for p in needed}

    topology = {
        etype: _rows(meta, parts, etype, whole if replicated else mine) for etype in meta.etypes
    }
    own = [parts[p] for p in overlapping]
    node_data = {t: _node_data(meta, own, t, mine[t]) for t in meta.ntypes}
    original = {t: _original(meta, own, t, mine[t]) for t in meta.ntypes}
    return Shard(rank, meta.ntypes, meta.etypes, bounds, topology, node_data, original)


def _overlaps(meta: PartitionMeta, part: int, wanted: dict[str, tuple[int, int]]) -> bool:
    return any(
        max(low, int(meta.node_ranges[t][part, 0])) < min(high, int(meta.node_ranges[t][part, 1]))
        for t, (low, high) in wanted.items()
    )


def _window(meta: PartitionMeta, part: int, ntype: str, wanted: tuple[int, int]) -> slice:
    """The rows of a part that fall into the wanted range of ids."""
    start, end = (int(v) for v in meta.node_ranges[ntype][part])
    low, high = max(start, wanted[0]), min(end, wanted[1])
    return slice(low - start, max(low, high) - start)


def _rows(
    meta: PartitionMeta,
    parts: dict[int, Part],
    etype: EdgeType,
    wanted: dict[str, tuple[int, int]],
) -> Rows:
    ntype = etype[2]
    degrees, sources, keys = [], [], []
    for p, part in parts.items():
        csc, cut = part.csc[etype], _window(meta, p, ntype, wanted[ntype])
        indptr = csc.indptr[cut.start : cut.stop + 1].numpy()
        degrees.append(np.diff(indptr))
        sources.append(csc.src[int(indptr[0]) : int(indptr[-1])].numpy())
        keys.append(_ids(meta, part, ntype)[cut])
    first, last = wanted[ntype]
    indptr = np.zeros(last - first + 1, np.int64)
    np.cumsum(_join(degrees), out=indptr[1:])
    return Rows(first, indptr, _join(sources), _join(keys))


def _node_data(
    meta: PartitionMeta, parts: Sequence[Part], ntype: str, wanted: tuple[int, int]
) -> dict[str, Tensor]:
    columns: dict[str, list[Tensor]] = {}
    for part in parts:
        cut = _window(meta, part.part, ntype, wanted)
        for name, values in part.node_data.get(ntype, {}).items():
            columns.setdefault(name, []).append(values[cut])
    for name, pieces in columns.items():
        kinds = {(piece.dtype, piece.shape[1:]) for piece in pieces}
        if len(kinds) > 1 or len(pieces) != len(parts):
            raise DataError(
                f"{ntype}/{name} differs between the parts: {sorted(map(str, kinds))}",
                where=str(meta.config_file),
                remedy="partition the graph again, with one dtype and shape for each array",
            )
    return {name: torch.cat(pieces) for name, pieces in columns.items()}


def _original(
    meta: PartitionMeta, parts: Sequence[Part], ntype: str, wanted: tuple[int, int]
) -> np.ndarray:
    return _join(
        [_ids(meta, part, ntype)[_window(meta, part.part, ntype, wanted)] for part in parts]
    )


def _ids(meta: PartitionMeta, part: Part, ntype: str) -> np.ndarray:
    if part.orig_nids is not None:
        return part.orig_nids[ntype].numpy()
    start, end = meta.node_ranges[ntype][part.part]
    return np.arange(start, end, dtype=np.int64)


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def describe_shard(shard: Shard) -> str:
    """One line for a rank's log."""
    nodes = ", ".join(f"{shard.owned(t):,} of {shard.num_nodes(t):,} {t}" for t in shard.ntypes)
    edges = ", ".join(f"{len(r.src):,} {etype_str(e)}" for e, r in shard.topology.items())
    return f"owns {nodes} nodes; holds {edges} edges"
