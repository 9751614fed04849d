"""A worker's shard of a partitioned graph.

A worker owns one contiguous range of ids of every node type. The ranges follow the parts, and cut
through parts if their number is no multiple of the number of workers, so that any number of
workers can train on any partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeSplit, EdgeType, etype_str
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.mapped import PAGE, FileRows, map_table, outgrows
from raygnn.graph.staging.node_cache import CacheEntry, Stage
from raygnn.graph.staging.parts import Staged

_EDGES = 0.15  # share of the available memory up to which a rank's edges are read ahead
SPLIT, NUMBER = "split", "number"  # arrays of the edges to predict
# edge data in `InEdgeLists.carried`
RELATION, FEATURES, CATEGORY, TIME = "relation", "features", "category:", "time"


@dataclass(frozen=True)
class EdgeReads:
    """Names of edge arrays that messages and sampling read; an edge type may lack some.

    Attributes:
        features: numbers, concatenated and converted to ``dtype``.
        categories: integers that stand for categories.
        whole: keep integer features as categories, each by itself.
        relation: integers that stand for relations.
        weight: sampling weights of neighbours.
        time: integer times; lists ascend by them.
        elapsed: models read the age of edges.
    """

    features: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    categories: tuple[str, ...] = ()
    whole: bool = False
    relation: str | None = None
    weight: str | None = None
    time: str | None = None
    elapsed: bool = False

    @property
    def arrays(self) -> list[str]:
        single = (self.relation, self.weight, self.time)
        return sorted({*self.features, *self.categories, *(name for name in single if name)})


@dataclass(frozen=True)
class InEdgeLists:
    """In-edge lists of a contiguous range of destination nodes, mapped read-only.

    They may be a window on the lists of the node's cache, so ``indptr`` need not begin with 0, and
    ``src`` may extend beyond the rows at both ends.

    Attributes:
        first: global id of the first row.
        indptr: int64 ``[R+1]``; row i has the entries ``indptr[i] … indptr[i+1]-1`` of ``src``.
        src: global ids of the sources, int32 or, if needed, int64; in original edge order per row.
        keys: int32 or int64 ``[R]``, keys for sampling: the original id of each row's node (its
            global id if the partition does not record original ids).
        data: edge array → ``[len(src), …]``, aligned with ``src``.
        carried: edge data that blocks carry, aligned with ``src``: `RELATION` and `CATEGORY` +
            name, integers ``[E]``; `FEATURES` ``[E, F]`` in the compute dtype; `TIME` ``[E]`` if
            models read it.
        times: integers ``[len(src)]``, ascending within each list; None if edges have no times, or
            they are not requested.
        weights: sampling weights ``[len(src)]``, at least 0, and their alias tables, uint64
            ``[len(src)]`` (see `alias_tables`); None without weights.
    """

    first: int
    indptr: np.ndarray
    src: np.ndarray
    keys: np.ndarray
    data: dict[str, np.ndarray]
    carried: dict[str, Tensor] = field(default_factory=dict)
    times: np.ndarray | None = None
    weights: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def num(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return int(self.indptr[-1] - self.indptr[0])

    @property
    def nbytes(self) -> int:
        """Size of these rows in bytes."""
        per_edge = [array[:0] for array in (self.src, *self.data.values())]
        widths = (math.prod(array.shape[1:]) * array.itemsize for array in per_edge)
        return int(self.indptr.nbytes + self.keys.nbytes) + self.num_edges * sum(widths)


@dataclass(frozen=True)
class TableLayout:
    """Positions of a node type's rows in its tables: see `map_table`.

    Attributes:
        starts: int64 ``[W]``, first row of each rank; -1 = its rows must be fetched.
        cached: first cached row.
        permanent: first row fetched by a batch, private to the process.
        total: number of rows; only touched ones take memory.
    """

    starts: np.ndarray
    cached: int
    permanent: int
    total: int

    @staticmethod
    def local_only(bounds: np.ndarray, rank: int) -> TableLayout:
        """Build the layout of a table with a rank's owned rows and space for all others."""
        own = int(bounds[rank + 1] - bounds[rank])
        starts = np.where(np.arange(len(bounds) - 1) == rank, 0, -1)
        return TableLayout(starts, own, own, int(bounds[-1]))


@dataclass(frozen=True)
class Shard:
    """One worker's shard, mapped from ``staged``.

    Attributes:
        bounds: node type → int64 ``[W+1]``; rank r owns the ids ``bounds[r] … bounds[r+1]-1``.
        topology: edge type → in-edge lists of the owned nodes, or of all nodes if ``replicated``,
            which is the same on all ranks.
        node_data: node type → name → tensor ``[owned, …]`` as stored, mapped.
        original: node type → int32 or int64 ``[owned]`` original ids, mapped.
        held: first and one past the last of the parts whose edges are mapped.
    """

    rank: int
    ntypes: list[str]
    etypes: list[EdgeType]
    bounds: dict[str, np.ndarray]
    topology: dict[EdgeType, InEdgeLists]
    node_data: dict[str, dict[str, Tensor]]
    original: dict[str, np.ndarray]
    replicated: bool
    staged: Staged
    held: tuple[int, int]

    def first(self, ntype: str) -> int:
        """Return the global id of the first owned node of ``ntype``."""
        return int(self.bounds[ntype][self.rank])

    def owned(self, ntype: str) -> int:
        """Return the number of owned nodes of ``ntype``."""
        return int(self.bounds[ntype][self.rank + 1]) - self.first(ntype)

    def num_nodes(self, ntype: str) -> int:
        return int(self.bounds[ntype][-1])

    def in_degree(self, etype: EdgeType) -> Tensor:
        """Return the in-degree of every owned node of the destination type, int64 ``[owned]``."""
        rows, ntype = self.topology[etype], etype[2]
        low = self.first(ntype) - rows.first
        indptr = rows.indptr[low : low + self.owned(ntype) + 1]
        return torch.from_numpy(np.diff(indptr))

    def own_sources(self, etype: EdgeType) -> np.ndarray:
        """Return the sources of all in-edges of the owned nodes, mapped: see `InEdgeLists.src`."""
        return self.topology[etype].src[slice(*self.own_edges(etype))]

    def own_edges(self, etype: EdgeType) -> tuple[int, int]:
        """Return the range of edges into owned nodes in ``topology[etype].src`` and the arrays of
        edges: the first, and one past the last."""
        rows, ntype = self.topology[etype], etype[2]
        low = self.first(ntype) - rows.first
        return int(rows.indptr[low]), int(rows.indptr[low + self.owned(ntype)])

    def edge_first(self, etype: EdgeType) -> int:
        """Return the position of the first edge of ``topology[etype]`` in the concatenated in-edge
        lists of all parts. Such positions identify edges in every topology, for any number of
        workers."""
        return int(self.staged.meta.edge_ranges[etype][self.held[0], 0])

    def layout(self, ntype: str, ranks: Sequence[int], cached: int = 0) -> TableLayout:
        """Build the layout of a table with the rows of some ranks, its own too, and a cache."""
        bounds, end = self.bounds[ntype], 0
        starts = np.full(len(bounds) - 1, -1)
        for rank in ranks:
            starts[rank] = _next_piece(end) + self._skipped(ntype, rank) % PAGE
            end = int(starts[rank] + bounds[rank + 1] - bounds[rank])
        at = _next_piece(end)
        permanent = _next_piece(at + cached)
        fetched = int(bounds[-1]) - sum(int(bounds[r + 1] - bounds[r]) for r in ranks)
        return TableLayout(starts, at, permanent, permanent + fetched)

    def table(
        self,
        ntype: str,
        names: Sequence[str],
        dtype: torch.dtype,
        layout: TableLayout,
        handle: int | None = None,
    ) -> Tensor:
        """Map a table of node arrays, concatenated to ``[layout.total, F]``: rows of the layout's
        ranks are shared by all workers of the node; writing to them is private to this process.
        """
        files = []
        for rank in np.flatnonzero(layout.starts >= 0).tolist():
            entry, name, first, rows = self._staged(ntype, names, dtype, rank)
            at, tail = int(layout.starts[rank]), entry.arrays[name].shape[1:]
            files.append(FileRows(at, entry.file(name), first, rows, keep=entry))
        return map_table(dtype, tail, layout.total, files, shared=layout.permanent, handle=handle)

    def rows(self, ntype: str, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Map the owned rows of `table`, ``[owned, F]``."""
        entry, name, first, rows = self._staged(ntype, names, dtype, self.rank)
        return entry.tensor(name)[first : first + rows]

    def _staged(
        self, ntype: str, names: Sequence[str], dtype: torch.dtype, rank: int
    ) -> tuple[CacheEntry, str, int, int]:
        """Return entry and name of the array with a rank's rows, the first, and their number."""
        workers, parts = len(self.bounds[ntype]) - 1, self.staged.meta.num_parts
        entry, name = self.staged.table(_span(rank, workers, parts), ntype, names, dtype)
        first, last = self.bounds[ntype][rank : rank + 2]
        return entry, name, self._skipped(ntype, rank), int(last - first)

    def _skipped(self, ntype: str, rank: int) -> int:
        """Return how many rows of a rank's first part precede its owned rows."""
        ranges, bounds = self.staged.meta.node_ranges[ntype], self.bounds[ntype]
        return int(bounds[rank] - ranges[_span(rank, len(bounds) - 1, len(ranges))[0], 0])


def _next_piece(end: int) -> int:
    """Return the next row at which other rows may begin: on a new page, however wide rows are."""
    return (end // PAGE + 2) * PAGE if end else 0


def _span(rank: int, workers: int, parts: int) -> tuple[int, int]:
    """Return the parts with a rank's nodes; at least one, from which a rank without nodes learns
    dtypes and shapes."""
    return rank * parts // workers, -(-(rank + 1) * parts // workers)


def ownership(ranges: np.ndarray, workers: int) -> np.ndarray:
    """Divide the parts' ranges ``[P, 2]`` of one node type among workers: bounds, int64
    ``[workers+1]``. Worker r gets the parts ``r·P/W … (r+1)·P/W``; a fraction of a part is that
    fraction of its nodes."""
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
    reads: EdgeReads = EdgeReads(),
    split: EdgeSplit | None = None,
    hide: Sequence[EdgeSplit] = (),
) -> Shard:
    """Map the shard of worker ``rank`` of ``workers`` from its node's cache.

    Args:
        replicated: hold the in-edge lists of all nodes, not only of the owned ones.
        stage: the cache; missing entries are built, or waited for.
        edge_arrays: names of edge arrays to hold; edge types may lack some.
        reads: arrays that messages and sampling read, which are held as well.
        split: split of the edges to predict, whose type gets the arrays `SPLIT` int8 and `NUMBER`
            int64, in the user's graph.
        hide: splits whose edges for validation and test, and their reverses, are left out.
    """
    bounds = {t: ownership(meta.node_ranges[t], workers) for t in meta.ntypes}
    span = _span(rank, workers, meta.num_parts)
    staged = Staged(stage, meta)
    held = (0, meta.num_parts) if replicated else span
    assert split is None or not hide  # positions of edges count all of them
    topology = staged.lists(held, [*edge_arrays, *reads.arrays], hide, reads.time)
    nodes = staged.node_data(span)
    rows = {}
    for etype in meta.etypes:
        first, last = bounds[etype[2]][rank : rank + 2].tolist()
        targets = (0, meta.num_nodes(etype[2])) if replicated else (first, last)
        rows[etype] = _map_lists(staged, topology, held, etype, targets, reads)
    if split is not None:
        codes = staged.edge_split(held, split)
        rows[split.etype].data.update({name: codes.array(name) for name in (SPLIT, NUMBER)})
    own = {
        t: slice(*(b[rank : rank + 2] - meta.node_ranges[t][span[0], 0]).tolist())
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
        held=held,
    )


def _map_lists(
    staged: Staged,
    topology: CacheEntry,
    held: tuple[int, int],
    etype: EdgeType,
    nodes: tuple[int, int],
    reads: EdgeReads,
) -> InEdgeLists:
    """Map the in-edge lists of one type. ``nodes``: the first destination, and one past the last;
    ``held``: see `Shard`."""
    ntype, kind = etype[2], etype_str(etype)
    src, names = f"src/{kind}", topology.below(f"edge/{kind}/")
    start = int(staged.meta.node_ranges[ntype][held[0], 0])
    first, last = (node - start for node in nodes)
    arrays = {name: topology.tensor(key) for name, key in names.items()}
    weights = None
    if reads.weight in names:
        weights = staged.weights(topology, held, etype, reads.weight)
    return InEdgeLists(
        first=nodes[0],
        indptr=topology.array(f"indptr/{kind}")[first : last + 1],
        src=topology.array(src, at_random=outgrows(topology.arrays[src].bytes, _EDGES)),
        keys=topology.array(f"keys/{ntype}")[first:last],
        data={name: topology.array(key) for name, key in names.items()},
        carried=carried_arrays(
            reads,
            arrays,
            lambda features: staged.edge_table(topology, held, etype, features, reads.dtype),
        ),
        times=topology.array(names[reads.time]) if reads.time in names else None,
        weights=weights,
    )


def carried_arrays(
    reads: EdgeReads, arrays: Mapping[str, Tensor], table: Callable[[list[str]], Tensor]
) -> dict[str, Tensor]:
    """Return `InEdgeLists.carried` of the edges of a type with these arrays; ``table`` concatenates
    features."""
    carried = {}
    if reads.relation is not None and reads.relation in arrays:
        carried[RELATION] = arrays[reads.relation].flatten()
    features = [name for name in reads.features if name in arrays]
    whole = [n for n in features if reads.whole and not arrays[n].is_floating_point()]
    if features := [name for name in features if name not in whole]:
        carried[FEATURES] = table(features)
    for name in whole:
        carried[CATEGORY + name] = arrays[name]
    for name in reads.categories:
        if name in arrays:
            carried[CATEGORY + name] = arrays[name].flatten()
    if reads.elapsed and reads.time is not None and reads.time in arrays:
        carried[TIME] = arrays[reads.time]
    return carried


def describe_shard(shard: Shard) -> str:
    """Describe the shard in one line, for a rank's log."""
    nodes = ", ".join(f"{shard.owned(t):,} of {shard.num_nodes(t):,} {t}" for t in shard.ntypes)
    edges = ", ".join(f"{r.num_edges:,} {etype_str(e)}" for e, r in shard.topology.items())
    return f"owns {nodes} nodes; holds {edges} edges"
