"""What one worker sees of a partitioned graph.

A worker owns one contiguous range of ids of every node type. The ranges follow the parts, and
cut through one where the number of workers does not divide the number of parts, so that any
number of workers can train on any partition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeSplit, EdgeType, etype_str
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.mapped import map_rows
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.parts import Staged

SPLIT, NUMBER = "split", "number"  # arrays of the edges to predict


@dataclass(frozen=True)
class Rows:
    """In-edge lists of a contiguous range of destination nodes.

    All of it is mapped and read-only. The rows may be a window on those that the node holds, so
    ``indptr`` need not begin with 0, and ``src`` may reach beyond the rows at both ends.

    Attributes:
        first: global id of the first row.
        indptr: int64 ``[R+1]``; row i has the entries ``indptr[i] … indptr[i+1]-1`` of ``src``.
        src: int32, or int64 where the source type needs it; global ids of the sources, in
            original edge order per row.
        keys: int32 or int64 ``[R]``, what sampling is keyed by: the original id of each row's
            node (its global id where a partition does not record original ids).
        data: edge array → ``[len(src), …]``, aligned with ``src``.
    """

    first: int
    indptr: np.ndarray
    src: np.ndarray
    keys: np.ndarray
    data: dict[str, np.ndarray]

    @property
    def num(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return int(self.indptr[-1] - self.indptr[0])

    @property
    def nbytes(self) -> int:
        """Of these rows alone."""
        per_edge = [array[:0] for array in (self.src, *self.data.values())]
        widths = (math.prod(array.shape[1:]) * array.itemsize for array in per_edge)
        return int(self.indptr.nbytes + self.keys.nbytes) + self.num_edges * sum(widths)


@dataclass(frozen=True)
class Shard:
    """One worker's share.

    Attributes:
        bounds: node type → int64 ``[W+1]``; rank r owns the ids ``bounds[r] … bounds[r+1]-1``.
        topology: edge type → the in-edge lists that this worker holds: of the nodes it owns, or
            of all nodes when the topology is replicated.
        node_data: node type → name → tensor ``[owned, …]`` as stored, mapped.
        original: node type → int32 or int64 ``[owned]`` original ids, mapped.
        replicated: whether every rank holds the in-edge lists of all nodes: the same on all ranks.
        staged: where it is mapped from.
        span, held: the parts, first and one past the last, that have owned nodes, and those
            whose edges are mapped.
    """

    rank: int
    ntypes: list[str]
    etypes: list[EdgeType]
    bounds: dict[str, np.ndarray]
    topology: dict[EdgeType, Rows]
    node_data: dict[str, dict[str, Tensor]]
    original: dict[str, np.ndarray]
    replicated: bool
    staged: Staged
    span: tuple[int, int]
    held: tuple[int, int]

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
        """Source ids of all in-edges of the owned nodes, mapped, as :class:`Rows` has them."""
        return self.topology[etype].src[slice(*self.own_edges(etype))]

    def own_edges(self, etype: EdgeType) -> tuple[int, int]:
        """Where in ``topology[etype].src``, and in the arrays of edges, those into owned nodes
        stand: the first, and one past the last."""
        rows, ntype = self.topology[etype], etype[2]
        low = self.first(ntype) - rows.first
        return int(rows.indptr[low]), int(rows.indptr[low + self.owned(ntype)])

    def edge_first(self, etype: EdgeType) -> int:
        """Where the first of ``topology[etype].src`` stands in the order of all parts' in-edge
        lists, one after the other: its position and those after it name edges alike in every
        topology and for any number of workers."""
        return int(self.staged.meta.edge_ranges[etype][self.held[0], 0])

    def table(
        self,
        ntype: str,
        names: Sequence[str],
        dtype: torch.dtype,
        spare: int,
        *,
        resident: bool = False,
    ) -> Tensor:
        """The owned rows of node arrays side by side, and room for rows of other workers.

        Args:
            names: arrays of floats or whole numbers; each is flattened to ``[owned, …]``.
            spare: rows to append, zero at first.
            resident: copy the owned rows into this process's memory: see `map_rows`.

        Returns:
            ``[owned + spare, F]``. Unless resident, the owned rows are mapped and shared with the
            other workers of the node; what is written to them stays in this process.

        Raises:
            DataError: a name that the type does not have, or an array of truth values.
        """
        entry, name = self.staged.table(self.span, ntype, names, dtype)
        start = int(self.staged.meta.node_ranges[ntype][self.span[0], 0])
        return map_rows(
            entry.file(name),
            entry.arrays[name],
            self.first(ntype) - start,
            self.owned(ntype),
            spare,
            keep=entry,
            resident=resident,
        )


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


def load_shard(
    meta: PartitionMeta,
    rank: int,
    workers: int,
    *,
    replicated: bool,
    stage: Stage,
    edge_arrays: Sequence[str] = (),
    split: EdgeSplit | None = None,
    hide: Sequence[EdgeSplit] = (),
) -> Shard:
    """What worker ``rank`` of ``workers`` needs, mapped from its node's cache.

    Args:
        replicated: hold the in-edge lists of all nodes, not only of the owned ones.
        stage: the cache; what it lacks is made there, or waited for.
        edge_arrays: names of edge arrays to hold; edge types that lack one go without.
        split: of the edges to predict: their type has also the arrays `SPLIT` int8 and `NUMBER`
            int64, in the user's graph.
        hide: whose edges for validation and test, and their reverses, to leave out.

    Raises:
        DataError: a part is missing, unreadable or changed, parts differ in an array's dtype or
            shape, or the cache cannot be written.
    """
    bounds = {t: ownership(meta.node_ranges[t], workers) for t in meta.ntypes}
    # one part at least, also for a worker that owns nothing: it must know dtypes and shapes
    span = rank * meta.num_parts // workers, -(-(rank + 1) * meta.num_parts // workers)
    staged = Staged(stage, meta)
    held = (0, meta.num_parts) if replicated else span
    assert split is None or not hide  # positions of edges are of all of them
    if hide:
        topology = staged.messages(held, edge_arrays, hide)
    else:
        topology = staged.topology(held, edge_arrays)
    nodes = staged.node_data(span)
    rows = {}
    for etype in meta.etypes:
        ntype, name = etype[2], etype_str(etype)
        start = int(meta.node_ranges[ntype][held[0], 0])
        first, last = (0, meta.num_nodes(ntype)) if replicated else bounds[ntype][rank : rank + 2]
        rows[etype] = Rows(
            first=int(first),
            indptr=topology.array(f"indptr/{name}")[first - start : last - start + 1],
            src=topology.array(f"src/{name}"),
            keys=topology.array(f"keys/{ntype}")[first - start : last - start],
            data={n: topology.array(key) for n, key in topology.below(f"edge/{name}/").items()},
        )
    if split is not None:
        codes = staged.edge_split(held, split)
        rows[split.etype].data.update({name: codes.array(name) for name in (SPLIT, NUMBER)})
    own = {
        t: slice(
            *(int(bound) - int(meta.node_ranges[t][span[0], 0]) for bound in b[rank : rank + 2])
        )
        for t, b in bounds.items()
    }
    return Shard(
        rank=rank,
        ntypes=meta.ntypes,
        etypes=meta.etypes,
        bounds=bounds,
        topology=rows,
        node_data={
            t: {n: nodes.tensor(key)[own[t]] for n, key in nodes.below(f"data/{t}/").items()}
            for t in meta.ntypes
        },
        original={t: nodes.array(f"original/{t}")[own[t]] for t in meta.ntypes},
        replicated=replicated,
        staged=staged,
        span=span,
        held=held,
    )


def describe_shard(shard: Shard) -> str:
    """One line for a rank's log."""
    nodes = ", ".join(f"{shard.owned(t):,} of {shard.num_nodes(t):,} {t}" for t in shard.ntypes)
    edges = ", ".join(f"{r.num_edges:,} {etype_str(e)}" for e, r in shard.topology.items())
    return f"owns {nodes} nodes; holds {edges} edges"
