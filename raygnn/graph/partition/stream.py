"""Assignment of nodes to parts: by METIS, at random, or by streaming.

Streaming cuts few edges, with memory for the nodes only. Edges are read twice, in any order: to
count degrees, and to write each node's list of neighbours to disk. The lists are read in passes. A
few passes form clusters, each at most a small share of a part, by label propagation (Raghavan et
al. 2007; with capped sizes Meyerhenke, Sanders & Schulz, "Partitioning complex networks via
size-constrained clustering", 2014; on disk Akhremtsev, Sanders & Schulz, "(Semi-)external
algorithms for graph partitioning and clustering", 2015). One pass samples edges between clusters,
and METIS divides that graph. More passes move nodes to the part of most of their neighbours, until
few nodes move, within limits of balance (restreaming: Nishimura & Ugander 2013; balance as a price
in the score: Fennel, Tsourakakis et al. 2014).

Nodes decide one after the other, and see each other's decisions; label propagation in rounds would
oscillate. The result depends on the order of the edges and the groups, but not on chunk sizes.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray, index_type
from raygnn.graph.data import GraphData
from raygnn.graph.outofcore.disk_graph import LEAVE
from raygnn.graph.partition import edge_kernels
from raygnn.graph.partition.metis import Passes, constraints, divide, in_degrees, undirected

# Largest part over the mean, for the nodes of each group and for in-edges.
IMBALANCE = 1.05

_CLUSTER_PASSES, _MOVE_PASSES = 3, 6
# Nodes stop moving when a pass moves fewer than this fraction of them.
_FEW = 0.01
# METIS gets at most so many nodes, or 200 per part, and so many edges, or 64 per node. It must
# balance clusters that it cannot divide, so a cluster is at most 1/50 of a part and 1/4096 of the
# graph.
_COARSE_NODES, _COARSE_EDGES, _EDGES_OF_A_NODE = 1 << 14, 1 << 20, 64
_CLUSTERS_OF_A_PART, _CLUSTERS = 50, 1 << 12
# Fewest nodes of the graph of clusters that METIS divides.
_METIS_NODES = 1 << 10
# A node with more neighbours keeps so many, spread evenly over its list.
_NEIGHBOURS = 1 << 16
_PAIRS, _LISTS = "pairs", "neighbours"  # files
_CHUNK = 1 << 20  # edges or neighbours in memory at once
# Lists are sorted by ranges of nodes: at least so many neighbours each, at most so many ranges.
_RANGE, _RANGES = 1 << 22, 128
_OTHER_EDGES = "the edges have changed since they were counted"


def assign(
    data: GraphData,
    passes: Passes,
    parts: int,
    method: str,
    seed: int,
    scratch: Path,
    progress: Callable[[str], object] | None = None,
) -> dict[str, IntArray]:
    """Assign every node to a part: node type → int64 ``[num]``, ``0 … parts-1``.

    ``metis`` cuts few edges; each part gets an equal share of the nodes of every type and of the
    training nodes, and at most 1.2 times its share of the edges if METIS manages that. ``stream``
    cuts about as few with far less memory (`assign_by_streaming`); no part has more than 1.05 times
    its share. ``random`` deals a permutation sampled with ``seed``; parts differ by at most one
    node. ``stream`` keeps files in the directory ``scratch`` and calls ``progress`` with
    ``"pass 3 of at most 12"``. ``data``: its edges are not read; ``passes`` yields them, in order.
    """
    num, frames = data.num_nodes, list(data.nodes.values())
    if method == "random":
        flat = np.empty(num, np.int64)
        flat[np.random.default_rng(seed).permutation(num)] = np.arange(num) % parts
    elif parts == 1 or parts >= num:  # METIS leaves some nodes without a valid part
        flat = np.arange(num) % parts
    elif method == "stream":
        types = [(frame.num, frame.data.get("train_mask")) for frame in frames]
        groups = balance_groups(types, parts)
        found = assign_by_streaming(num, passes, parts, scratch, groups=groups, progress=progress)
        flat = found.astype(np.int64)
    else:
        graph, loads = undirected(passes, num), in_degrees(passes, num)
        flat = divide(graph, parts, constraints(data, parts), loads, f"the graph {data.name}")
    ends = np.cumsum([frame.num for frame in frames])[:-1]
    return dict(zip(data.nodes, np.split(flat, ends), strict=True))


def assign_by_streaming(
    num_nodes: int,
    passes: Passes,
    parts: int,
    scratch: Path,
    *,
    groups: Array | None = None,
    progress: Callable[[str], object] | None = None,
) -> Array:
    """Assign every node to a part.

    Args:
        num_nodes: of all types, one type after the other.
        parts: from 2 to one less than there are nodes.
        passes: called twice; yields the edges, in the same order: chunks of any size of (source,
            destination) ids, integers ``0 … num_nodes-1``. Loops are ignored; duplicate edges and
            edges in both directions count several times.
        scratch: directory for files of 24 bytes per edge (48 from 2³¹ nodes on), which are removed.
        groups: small unsigned integers ``[num_nodes]``, see `balance_groups`; None = one group.
        progress: called with ``"pass 3 of at most 12"``.

    Returns:
        uint8 ``[num_nodes]``, uint16 from 257 parts on. A part has at most 1.05 times the mean
        number of nodes of each group (or the mean rounded up), and at most 1.05 times the mean
        in-edges, or the mean plus the largest in-degree.

    Memory: about 45 bytes per node, and 80 MB.

    Raises DataError if METIS failed, or if the second pass yields other edges than the first.
    """
    groups = np.zeros(num_nodes, np.uint8) if groups is None else groups
    most = max(_COARSE_NODES, 4 * _CLUSTERS_OF_A_PART * parts)
    reads = 3 + _MOVE_PASSES + _CLUSTER_PASSES * (num_nodes > most)
    notify = progress or (lambda text: None)
    announced = (notify(f"pass {number} of at most {reads}") for number in itertools.count(1))
    try:
        lists = NeighbourLists(num_nodes, passes, scratch, announced)
        balance = Balance(groups, lists.in_degrees, parts)
        clusters, count = _clusters(lists, parts, most)
        coarse = _coarse_graph(lists, clusters, count)
        labels = _divide(coarse, clusters, balance)[clusters].astype(lists.index)
        del clusters, coarse
        balance.count(labels)
        balance.enforce_limits(labels, lists.degrees)
        _refine(lists, balance, labels)
    finally:
        for name in (_PAIRS, _LISTS):
            (scratch / name).unlink(missing_ok=True)
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


class NeighbourLists:
    """The lists of all nodes' neighbours, without loops, in the file ``neighbours`` in ``scratch``.

    Attributes:
        degrees, in_degrees: of the nodes, uint32; ``degrees`` are without loops.
        index: dtype of node ids.
    """

    def __init__(self, num_nodes: int, passes: Passes, scratch: Path, announced: Iterator[object]):
        self._passes, self._announced = passes, announced
        self._pairs, self._file = scratch / _PAIRS, scratch / _LISTS
        self.num_nodes, self.index = num_nodes, index_type(num_nodes)
        self.degrees, self.in_degrees = (np.zeros(num_nodes, np.uint32) for _ in range(2))
        for src, dst in self._chunks():
            edge_kernels.count_degrees(src, dst, self.degrees, self.in_degrees)
        self._write()

    def _chunks(self) -> Iterator[tuple[Array, Array]]:
        next(self._announced)
        for ends in self._passes():
            for begin in range(0, len(ends[0]), _CHUNK):
                src, dst = (ids[begin : begin + _CHUNK].astype(self.index) for ids in ends)
                yield src, dst

    def _write(self) -> None:
        """Write the lists: pairs of a node and a neighbour by ranges of nodes, then each range."""
        before = np.cumsum(self.degrees, dtype=np.int64) - self.degrees
        total = int(self.degrees.sum(dtype=np.int64))
        range_of = (before // max(_RANGE, -(-total // _RANGES))).astype(np.uint8)
        ranges = int(range_of[-1]) + 1
        nodes = np.searchsorted(range_of, np.arange(ranges + 1, dtype=np.uint8))
        starts = np.append(before[nodes[:-1]], total)
        del before
        ends, bytes_of_pair = starts[:-1].copy(), 2 * np.dtype(self.index).itemsize
        with self._pairs.open("wb") as file:
            for src, dst in self._chunks():
                pairs, counts = edge_kernels.pairs_by_range(src, dst, range_of, ranges)
                for number, some in enumerate(np.split(pairs, np.cumsum(counts)[:-1])):
                    file.seek(int(ends[number]) * bytes_of_pair)
                    file.write(some.data)
                ends += counts
        lengths = np.minimum(self.degrees, _NEIGHBOURS)
        if not np.array_equal(ends, starts[1:]):
            raise DataError(_OTHER_EDGES, remedy=LEAVE)
        with self._pairs.open("rb") as source, self._file.open("wb") as file:
            for first, last, num in zip(nodes[:-1], nodes[1:], np.diff(starts), strict=True):
                at = np.cumsum(lengths[first:last], dtype=np.int64) - lengths[first:last]
                ids = np.zeros(int(lengths[first:last].sum(dtype=np.int64)), self.index)
                seen = np.zeros(last - first, np.uint32)
                for begin in range(0, int(num), _CHUNK):
                    pairs = _read(source, self.index, 2 * min(_CHUNK, int(num) - begin))
                    state = first, at, self.degrees, lengths, seen, ids
                    if not edge_kernels.put_neighbours(pairs, *state):
                        raise DataError(_OTHER_EDGES, remedy=LEAVE)
                file.write(ids.data)
        self._pairs.unlink()
        ends = np.cumsum(lengths, dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(_CHUNK, ends[-1], _CHUNK)) + 1
        self._blocks = np.unique([0, *cuts, self.num_nodes])

    def blocks(self) -> Iterator[tuple[int, Array, Array]]:
        """Yield consecutive nodes: the first one, lengths of their lists, and the lists."""
        next(self._announced)
        with self._file.open("rb") as file:
            for first, last in itertools.pairwise(self._blocks.tolist()):
                lengths = np.minimum(self.degrees[first:last], _NEIGHBOURS)
                yield first, lengths, _read(file, self.index, int(lengths.sum()))


def _read(file: BinaryIO, dtype: type[np.integer[Any]], num: int) -> Array:
    """Read ids. Raises OSError if there are fewer, because the kernels do not check bounds."""
    ids = np.fromfile(file, dtype, num)
    if len(ids) < num:  # also after errors of the disk, which NumPy does not report
        raise OSError(errno.EIO, f"only {len(ids)} of {num} ids can be read back", file.name)
    return ids


def _clusters(lists: NeighbourLists, parts: int, most: int) -> tuple[Array, int]:
    num, num_edges = lists.num_nodes, int(lists.in_degrees.sum(dtype=np.int64))
    labels = np.arange(num, dtype=lists.index)
    if num <= most or not num_edges:
        return labels, num
    # nodes and in-edges alike
    weights = 1 + lists.in_degrees.astype(np.int64) * num // num_edges
    cap = max(int(weights.sum()) // max(_CLUSTERS_OF_A_PART * parts, _CLUSTERS), 1)
    weights = np.minimum(weights, cap).astype(lists.index)
    sizes, favourite = weights.copy(), labels.copy()
    for _ in range(_CLUSTER_PASSES):
        for block in lists.blocks():
            edge_kernels.join_clusters(*block, weights, cap, labels, sizes, favourite)
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


def _coarse_graph(lists: NeighbourLists, clusters: Array, count: int) -> csr_array:
    """Build the graph of the clusters from a sample of the edges between them, those with the
    smallest keys, which are hashes of their numbers. Weights count parallel edges."""
    kept = np.empty((2, max(_COARSE_EDGES, _EDGES_OF_A_NODE * count)), lists.index)
    keys = np.empty(kept.shape[1], np.uint32)
    at, limit, number = 0, np.uint32(2**32 - 1), 0
    for block in lists.blocks():
        at, limit = edge_kernels.keep_crossing(
            *block, number, lists.degrees, clusters, kept, keys, at, limit
        )
        number += len(block[2])
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


def _refine(lists: NeighbourLists, balance: Balance, labels: Array) -> None:
    """Move nodes to the parts of most of their neighbours, in place."""
    means = balance.means, balance.mean_load
    limits = balance.groups, balance.size_limits, balance.load_limit, *means
    state = lists.in_degrees, limits, labels, balance.sizes, balance.loads
    for _ in range(_MOVE_PASSES):
        moved = sum(edge_kernels.move_nodes(*block, *state) for block in lists.blocks())
        if moved < _FEW * lists.num_nodes:
            break


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
