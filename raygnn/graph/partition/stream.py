"""Assignment of nodes to parts: by METIS, at random, or by streaming.

Streaming cuts few edges, with memory for the nodes only. Edges are read in passes, in any order,
and never kept. One pass counts degrees. A few passes form clusters, each at most a small share of a
part, by label propagation (Raghavan et al. 2007; with capped sizes Meyerhenke, Sanders & Schulz,
"Partitioning complex networks via size-constrained clustering", 2014; semi-external Akhremtsev,
Sanders & Schulz, "(Semi-)external algorithms for graph partitioning and clustering", 2015). One
pass samples edges between clusters, and METIS divides that graph. More passes move nodes to the
part of most of their neighbours, until few nodes move, within limits of balance (restreaming:
Nishimura & Ugander 2013; balance as a price in the score: Fennel, Tsourakakis et al. 2014).

Each node keeps a sketch of its neighbours' labels (`edge_kernels`; label propagation with such
sketches: Sahu 2024) and decides whenever it has seen all of its edges once. It begins to count at a
random point of the stream, so that nodes decide at different times in any order of the edges and
see each other's decisions; label propagation in rounds would oscillate.

The result depends on the order of the edges, the groups and the seed, but not on chunk sizes, the
number of threads or earlier work of the process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from raygnn.graph.arrays import Array, IntArray, index_type
from raygnn.graph.data import GraphData
from raygnn.graph.partition import edge_kernels
from raygnn.graph.partition.metis import constraints, divide, first_ids, in_degrees, undirected

# Yields the edges as chunks of (source ids, destination ids), the same ones at each call.
Passes = Callable[[], Iterable[tuple[Array, Array]]]

# Largest part over the mean, for the nodes of each group and for in-edges.
IMBALANCE = 1.05

_SLOTS = 8  # labels that a node counts at a time, 6 bytes each
_CLUSTER_PASSES, _MOVE_PASSES = 3, 6
# Nodes stop moving when a pass moves fewer than this fraction of them.
_FEW = 0.01
# METIS gets at most so many nodes, or 200 per part, and so many edges, or as many as there are
# nodes. It must balance clusters that it cannot divide, so a cluster is at most 1/50 of a part
# and 1/4096 of the graph.
_COARSE_NODES, _COARSE_EDGES = 1 << 14, 1 << 20
_CLUSTERS_OF_A_PART, _CLUSTERS = 50, 1 << 12
# Fewest nodes of the graph of clusters that METIS divides.
_METIS_NODES = 1 << 10
# Edges of a block, between which nodes decide; in a small graph, 1/64 of its edges.
_BLOCK, _SMALL_BLOCK = 1 << 18, 1 << 6
_THREADED_BLOCK = 1 << 15
_MAX_THREADS = 8
_CHUNK = 1 << 18  # edges copied at a time


def assign(
    data: GraphData,
    parts: int,
    method: str,
    seed: int,
    progress: Callable[[str], object] | None = None,
    passes: Passes | None = None,
) -> dict[str, IntArray]:
    """Assign every node to a part: node type → int64 ``[num]``, ``0 … parts-1``.

    ``metis`` cuts few edges; each part gets an equal share of the nodes of every type and of the
    training nodes, and at most 1.2 times its share of the edges if METIS manages that. ``stream``
    cuts about as few with far less memory (`assign_by_streaming`); no part has more than 1.05 times
    its share. ``random`` deals a permutation sampled with ``seed``; parts differ by at most one
    node. With ``stream``, ``progress`` is called with ``"pass 3 of at most 11"``, and ``passes``
    yields the edges, in order, if those of ``data`` are not in memory.
    """
    num, frames = data.num_nodes, list(data.nodes.values())
    if parts == 1:
        flat = np.zeros(num, np.int64)
    elif method == "random":
        flat = np.empty(num, np.int64)
        flat[np.random.default_rng(seed).permutation(num)] = np.arange(num) % parts
    elif method == "stream":
        masks = [(frame.num, frame.data.get("train_mask")) for frame in frames]
        types = [(n, None if mask is None else np.asarray(mask, bool)) for n, mask in masks]
        groups, passes = balance_groups(types, parts), passes or partial(in_one_space, data)
        found = assign_by_streaming(num, passes, parts, groups=groups, seed=seed, progress=progress)
        flat = found.astype(np.int64)
    elif parts >= num:  # METIS leaves some nodes without a valid part
        flat = np.arange(num)
    else:
        graph, weights, loads = undirected(data), constraints(data, parts), in_degrees(data)
        flat = divide(graph, parts, weights, loads, f"the graph {data.name}")
    ends = np.cumsum([frame.num for frame in frames])[:-1]
    return dict(zip(data.nodes, np.split(flat, ends), strict=True))


def in_one_space(data: GraphData) -> Iterator[tuple[Array, Array]]:
    """Yield sources and destinations of all edges in chunks. Ids are offset by type, in order."""
    offsets = first_ids(data)
    for (src_type, _, dst_type), edges in data.edges.items():
        for first in range(0, edges.num, _CHUNK):
            chunk = slice(first, first + _CHUNK)
            yield edges.src[chunk] + offsets[src_type], edges.dst[chunk] + offsets[dst_type]


def assign_by_streaming(
    num_nodes: int,
    passes: Passes,
    parts: int,
    *,
    groups: Array | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[str], object] | None = None,
) -> Array:
    """Assign every node to a part, reading the edges 6 to 11 times.

    Args:
        num_nodes: of all types, one type after the other.
        passes: each call yields the edges again, in the same order: chunks of any size of
            (source, destination) ids, integers ``0 … num_nodes-1``. Loops are ignored; duplicate
            edges and edges in both directions count several times.
        groups: small unsigned integers ``[num_nodes]``, see `balance_groups`; None = one group.
        threads: None = one per core, at most 8.
        progress: called with ``"pass 3 of at most 11"``.

    Returns:
        uint8 ``[num_nodes]``, uint16 from 257 parts on. A part has at most 1.05 times the mean
        number of nodes of each group (or the mean rounded up), and at most 1.05 times the mean
        in-edges, or the mean plus the largest in-degree.

    Memory: about 85 bytes per node, and 80 MB.

    Raises:
        ValueError: ids are out of range, or a pass yields other edges than the first.
        DataError: METIS failed.
    """
    groups = np.zeros(num_nodes, np.uint8) if groups is None else groups
    assert len(groups) == num_nodes, "a group for every node"
    if parts == 1 or parts >= num_nodes:
        ids = np.arange(num_nodes) if parts > 1 else np.zeros(num_nodes)
        return ids.astype(np.min_scalar_type(parts - 1))
    most = max(_COARSE_NODES, 4 * _CLUSTERS_OF_A_PART * parts)
    reads = 2 + _MOVE_PASSES + _CLUSTER_PASSES * (num_nodes > most)
    tell = progress or (lambda text: None)
    announced = (tell(f"pass {number} of at most {reads}") for number in itertools.count(1))
    threads = threads or min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    edges = _EdgePasses(num_nodes, passes, seed, threads, announced)
    balance = Balance(groups, edges.in_degrees, parts)
    clusters, count = _clusters(edges, parts, most)
    coarse = _coarse_graph(edges, clusters, count)
    labels = _divide(coarse, clusters, balance)[clusters].astype(edges.index)
    del clusters, coarse
    balance.count(labels)
    balance.enforce_limits(labels, edges.degrees)
    _refine(edges, balance, labels)
    return labels.astype(np.min_scalar_type(parts - 1))


def balance_groups(types: Iterable[tuple[int, Array | None]], parts: int) -> Array:
    """Return the group of each node from number and training mask (bool) of each type's nodes: one
    per type, or two, of training nodes and of the others, if a part gets at least 8 of them."""
    made: list[Array] = []
    last = 0
    for num, train in types:
        group = np.full(num, last, np.uint16)
        if train is not None and 8 * parts <= np.count_nonzero(train) < num:
            last += 1
            group[train] = last
        made.append(group)
        last += 1
    groups = np.concatenate(made)
    return groups.astype(np.min_scalar_type(max(last - 1, 0)))


class _EdgePasses:
    """Edges, read in passes, and the nodes' sketches of them; ``degrees`` are without loops."""

    def __init__(
        self, num_nodes: int, passes: Passes, seed: int, threads: int, announced: Iterator[object]
    ):
        self._passes, self._seed, self._announced = passes, seed, announced
        self.num = -1  # until they have been counted
        self.index = index_type(num_nodes)
        self.num_nodes = num_nodes
        self.degrees, self.in_degrees = (np.zeros(num_nodes, np.uint32) for _ in range(2))
        num = 0
        for src, dst in self.blocks(_BLOCK):
            edge_kernels.count_degrees(src, dst, self.degrees, self.in_degrees)
            num += len(src)
        self.num = num
        self._block = min(max(num // 64, _SMALL_BLOCK), _BLOCK)
        self._threads = threads if self._block >= _THREADED_BLOCK else 1

    def blocks(self, size: int) -> Iterator[tuple[Array, Array]]:
        """Yield the edges in blocks of equal size, except the last, for any size of the chunks."""
        next(self._announced)
        buffer = np.empty((2, size), self.index)
        at = seen = 0
        for src, dst in self._passes():
            for ids in (src, dst):
                if len(ids) and (ids.min() < 0 or ids.max() >= self.num_nodes):
                    raise ValueError(f"ids of nodes are not all from 0 to {self.num_nodes - 1}")
            begin = 0
            while begin < len(src):
                step = min(size - at, len(src) - begin)
                buffer[0, at : at + step] = src[begin : begin + step]
                buffer[1, at : at + step] = dst[begin : begin + step]
                at, begin = at + step, begin + step
                if at == size:
                    yield buffer[0], buffer[1]
                    at = 0
            seen += len(src)
        if at:
            yield buffer[0, :at], buffer[1, :at]
        if self.num not in (-1, seen):
            raise ValueError(f"a pass has {seen} edges, the first had {self.num}")

    def propagate(
        self, labels: Array, passes: int, decide: Callable[..., None], few: float = 0.0
    ) -> None:
        """Propagate labels: show nodes their neighbours' labels, and let them decide on their own.

        ``decide(nodes, names, counts, left)`` is called between blocks with the nodes that have
        seen all of their edges, in ascending order; it sets their labels and resets their sketches.
        A pass that changes fewer labels than this fraction of the nodes is the last one.
        """
        names = np.zeros((self.num_nodes, _SLOTS), self.index)
        names[:, 0] = labels
        counts = np.zeros((self.num_nodes, _SLOTS), np.uint16)
        left = np.zeros(self.num_nodes, np.uint32)
        edge_kernels.first_turns(self.degrees, self._seed, left)
        ready = np.empty((self._threads, 2 * self._block), self.index)

        def see(share: int, block: tuple[Array, Array]) -> Array:
            end = edge_kernels.see_edges(
                *block, labels, names, counts, left, share, self._threads, ready[share]
            )
            return ready[share, :end]

        with ThreadPoolExecutor(self._threads, "stream") as pool:
            for _ in range(passes):
                changed = 0
                for block in self.blocks(self._block):
                    shares = list(pool.map(see, range(self._threads), itertools.repeat(block)))
                    nodes = np.concatenate(shares)
                    nodes.sort()
                    before = labels[nodes]
                    decide(nodes, names, counts, left)
                    changed += int(np.count_nonzero(labels[nodes] != before))
                if changed < few * self.num_nodes:
                    break


def _clusters(edges: _EdgePasses, parts: int, most: int) -> tuple[Array, int]:
    num = edges.num_nodes
    labels = np.arange(num, dtype=edges.index)
    if num <= most or not edges.num:
        return labels, num
    # nodes and in-edges alike
    weights = 1 + edges.in_degrees.astype(np.int64) * num // edges.num
    cap = max(int(weights.sum()) // max(_CLUSTERS_OF_A_PART * parts, _CLUSTERS), 1)
    weights = np.minimum(weights, cap).astype(edges.index)
    sizes, favourite = weights.copy(), labels.copy()

    def join(nodes: Array, *sketches: Array) -> None:
        edge_kernels.join_clusters(
            nodes, edges.degrees, weights, cap, labels, sizes, favourite, *sketches
        )

    edges.propagate(labels, _CLUSTER_PASSES, join)
    return _merge(labels, sizes, favourite, cap, most)


def _merge(labels: Array, sizes: Array, favourite: Array, cap: int, most: int) -> tuple[Array, int]:
    """Number the clusters; if there are too many, merge those with the same favourite, such as
    leaves of a hub whose cluster is full (two-hop clustering, LaSalle et al. 2015)."""
    present = np.zeros(len(labels), np.bool_)
    present[labels] = True
    names = np.flatnonzero(present)
    count = len(names)
    numbers = np.cumsum(present, dtype=labels.dtype)[labels] - 1
    if count <= most:
        return numbers, count
    by_favourite = np.argsort(labels[favourite[names]], kind="stable")
    low, high = 1, cap
    while low < high:  # the smallest size that yields few enough
        middle = (low + high) // 2
        if edge_kernels.pack(sizes[names][by_favourite], middle)[-1] < most:
            high = middle
        else:
            low = middle + 1
    bins = np.empty(count, labels.dtype)
    bins[by_favourite] = edge_kernels.pack(sizes[names][by_favourite], high)
    return bins[numbers], int(bins.max()) + 1


def _coarse_graph(edges: _EdgePasses, clusters: Array, count: int) -> csr_array:
    """Build the graph of the clusters from a sample of the edges between them, those with the
    smallest keys, which are hashes of their numbers. Weights count parallel edges."""
    kept = np.empty((2, max(_COARSE_EDGES, edges.num_nodes)), edges.index)
    keys = np.empty(kept.shape[1], np.uint32)
    threshold, at, first = np.uint32(2**32 - 1), 0, 0
    for src, dst in edges.blocks(_BLOCK):
        begin = 0
        while begin < len(src):
            at, begin = edge_kernels.keep_crossing(
                src, dst, first, begin, threshold, clusters, kept, keys, at
            )
            if begin < len(src):  # the sample is full
                threshold >>= np.uint32(1)
                small = np.flatnonzero(keys <= threshold)
                at = len(small)
                kept[:, :at], keys[:at] = kept[:, small], keys[small]
        first += len(src)
    src, dst = kept[:, :at]
    ends = np.concatenate([src, dst]), np.concatenate([dst, src])
    ones = np.ones(2 * at, np.int32)
    return csr_array((ones, ends), shape=(count, count))  # sums duplicates


def _divide(coarse: csr_array, clusters: Array, balance: Balance) -> IntArray:
    parts, count = len(balance.sizes), coarse.shape[0]
    loads = np.bincount(clusters, balance.in_degrees, count).astype(np.int64)
    if count < _METIS_NODES:
        order = reverse_cuthill_mckee(coarse, symmetric_mode=True)
        sizes = np.bincount(clusters, minlength=count)
        share = sizes / sizes.sum() + loads / max(loads.sum(), 1)
        assigned = np.empty(count, np.int64)
        middle = np.cumsum(share[order]) - share[order] / 2
        assigned[order] = np.minimum(middle / share.sum() * parts, parts - 1)
        return assigned
    weights = np.zeros((count, len(balance.means) + 1), np.int64)
    np.add.at(weights, (clusters, balance.groups), 1)
    weights[:, -1] = loads  # a part at its limit of in-edges would accept no more nodes
    what = f"{count} clusters of nodes"
    return divide((coarse.indptr, coarse.indices), parts, weights, None, what, coarse.data)


def _refine(edges: _EdgePasses, balance: Balance, labels: Array) -> None:
    """Move nodes to the parts of most of their neighbours, in place."""
    means = balance.means, balance.mean_load
    limits = balance.groups, balance.size_limits, balance.load_limit, *means

    def move(nodes: Array, *sketches: Array) -> None:
        counts = labels, balance.sizes, balance.loads
        edge_kernels.move_nodes(nodes, edges.degrees, edges.in_degrees, limits, *counts, *sketches)

    edges.propagate(labels, _MOVE_PASSES, move, _FEW)


class Balance:
    """Sizes of the parts (int64 ``[parts, groups]`` nodes), loads (``[parts]`` in-edges), and their
    limits; groups and in-degrees are of each node."""

    def __init__(self, groups: Array, in_degrees: Array, parts: int):
        self.groups, self.in_degrees = groups, in_degrees
        totals = np.bincount(groups)
        self.means = np.maximum(totals / parts, 1e-9)
        self.mean_load = max(float(in_degrees.sum(dtype=np.int64)) / parts, 1e-9)
        exact = -(-totals // parts)  # the mean rounded up, which can always be met
        self.size_limits = np.maximum((IMBALANCE * self.means).astype(np.int64), exact)
        self.load_limit = int(IMBALANCE * self.mean_load)
        self.sizes = np.zeros((parts, len(totals)), np.int64)
        self.loads = np.zeros(parts, np.int64)

    def count(self, labels: Array) -> None:
        """Set sizes and loads to those of a partition."""
        parts, groups = self.sizes.shape
        cells = labels.astype(np.int64) * groups + self.groups
        self.sizes[:] = np.bincount(cells, minlength=parts * groups).reshape(parts, groups)
        self.loads[:] = np.bincount(labels, self.in_degrees, parts)

    def enforce_limits(self, labels: Array, degrees: Array) -> None:
        """Move nodes, those with few edges first, until all limits are met, in place."""
        over = self.sizes > self.size_limits
        nodes = np.flatnonzero(over[labels, self.groups])
        nodes = nodes[np.argsort(degrees[nodes], kind="stable")]
        edge_kernels.give_away(
            nodes, self.groups, self.in_degrees, self.size_limits, labels, self.sizes, self.loads
        )
        # The two parts differ by more in-edges than any node has, so an exchange always helps.
        limit = max(self.load_limit, int(self.mean_load) + int(self.in_degrees.max()))
        while self.loads.max() > limit:
            self._exchange(labels, int(self.loads.argmax()), int(self.loads.argmin()))

    def _exchange(self, labels: Array, most: int, least: int) -> None:
        """Exchange nodes of one group between two parts, so that their loads differ less."""
        gap = int(self.loads[most] - self.loads[least])
        for group in range(len(self.means)):
            ours, theirs = (
                np.flatnonzero((labels == part) & (self.groups == group)) for part in (most, least)
            )
            ours = ours[np.argsort(self.in_degrees[ours], kind="stable")[::-1]]
            theirs = theirs[np.argsort(self.in_degrees[theirs], kind="stable")]
            given = self.in_degrees[ours].astype(np.int64)
            free = np.zeros(int(self.size_limits[group] - self.sizes[least, group]), np.int64)
            taken = np.concatenate([free, self.in_degrees[theirs].astype(np.int64)])
            pairs = min(len(given), len(taken))
            # descending, and below the gap: see `enforce_limits`
            shift = given[:pairs] - taken[:pairs]
            swaps = int(np.searchsorted(np.cumsum(np.maximum(shift, 0)), gap // 2, side="right"))
            swaps = min(max(swaps, 1), int(np.count_nonzero(shift > 0)))
            if swaps:
                labels[ours[:swaps]] = least
                labels[theirs[: max(swaps - len(free), 0)]] = most
                self.count(labels)
                return
