"""Split of the edges to predict into training, validation and test.

Held-out edges must not leak: those for validation and test are in no neighbourhood and count in no
degree. The split follows masks or times of the edges, or is random: a function of the seed and the
original ids of both ends, so that it is the same for any partition, and all edges between two
nodes are in one split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray
from raygnn.graph.data import MASKS, EdgeSplit, etype_str
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.read import (
    read_edge_data,
    read_in_edges,
    read_original_edges,
    read_original_nodes,
)
from raygnn.graph.times import codes_since, since
from raygnn.util.hashing import mix, uniform

TRAIN, VAL, TEST, NONE = 0, 1, 2, -1  # in the order of `raygnn.graph.data.SPLITS`


@dataclass(frozen=True)
class SplitEdges:
    """Edges of the split's type into a part's nodes, in the order of its in-edge lists: type-wise
    ids of the ends, codes (`TRAIN` …, int8), and original ids as of `read_original_edges`."""

    src: IntArray
    dst: IntArray
    codes: Array
    numbers: IntArray


class Splitter:
    """Split of a partition's edges, read one part at a time.

    Memory: one part's edges, and for a random split 8 bytes for each node. Its methods raise
    DataError if a part is damaged or lacks the masks.
    """

    def __init__(self, meta: PartitionMeta, split: EdgeSplit):
        self._meta = meta
        self._split = split
        self._original: dict[str, Array] = {}
        self._since: tuple[int, int] | None = None
        if split.time is not None:
            assert split.shares is not None
            times = [self._times(part, None) for part in range(meta.num_parts)]
            self._since = since(np.concatenate(times), *split.shares)
        elif split.shares is not None:
            for ntype in {split.etype[0], split.etype[2]}:
                ids = [read_original_nodes(meta, part)[ntype] for part in range(meta.num_parts)]
                self._original[ntype] = np.concatenate(ids)

    def part(self, part: int) -> SplitEdges:
        meta, etype = self._meta, self._split.etype
        edges = read_in_edges(meta, part)[etype]
        first = int(meta.node_ranges[etype[2]][part, 0])
        dst = np.repeat(np.arange(len(edges.indptr) - 1) + first, np.diff(edges.indptr))
        src = edges.src.astype(np.int64)
        numbers = read_original_edges(meta, part)[etype]
        if edges.order is not None:
            numbers = numbers[edges.order]
        if self._since is not None:
            codes = codes_since(self._times(part, edges.order), self._since)
        elif self._split.shares is None:
            codes = self._by_masks(part, len(src), edges.order)
        else:
            val, test = self._split.shares
            codes = self._by_key(src, dst, (float(val), float(test)))
        return SplitEdges(src, dst, codes, numbers)

    def hidden(self) -> IntArray:
        """Return the edges for validation and test of all parts, sorted, as int64 ``source · D +
        destination`` with D nodes of the destination type."""
        num = self._meta.num_nodes(self._split.etype[2])
        hidden = [np.empty(0, np.int64)]
        for part in range(self._meta.num_parts):
            edges = self.part(part)
            hidden.append((edges.src * num + edges.dst)[edges.codes > TRAIN])
        return np.unique(np.concatenate(hidden))

    def _times(self, part: int, order: Array | None) -> IntArray:
        etype, name = self._split.etype, str(self._split.time)
        stored = read_edge_data(self._meta, part)[etype].get(name)
        if stored is None and not len(read_in_edges(self._meta, part)[etype].src):
            return np.empty(0, np.int64)  # a part without edges may lack their arrays
        if stored is None or stored.is_floating_point() or stored.dim() != 1:
            has = "no array" if stored is None else f"{stored.dtype} {list(stored.shape)} as"
            message = f"edges of type {etype_str(etype)} have {has} {name!r}, to be split by time"
            remedy = "name an array of one whole number for each edge (task.split.time)"
            raise DataError(message, where=str(self._meta.files[part].edge_feats), remedy=remedy)
        times = stored.numpy().astype(np.int64)
        return times if order is None else times[order]

    def _by_masks(self, part: int, count: int, order: Array | None) -> Array:
        etype = self._split.etype
        data = read_edge_data(self._meta, part)[etype]
        codes = np.full(count, NONE, np.int8)
        if count and not any(name in data for name in MASKS):
            message = f"edges of type {etype_str(etype)} have no masks"
            remedy = "set task.split, or give them train_mask, val_mask and test_mask"
            raise DataError(message, where=str(self._meta.files[part].edge_feats), remedy=remedy)
        for code, name in enumerate(MASKS):
            if name in data:
                mask = data[name].numpy().astype(bool)
                codes[mask if order is None else mask[order]] = code
        return codes

    def _by_key(self, src: IntArray, dst: IntArray, shares: tuple[float, float]) -> Array:
        etype = self._split.etype
        one, other = self._original[etype[0]][src], self._original[etype[2]][dst]
        if etype[0] == etype[2]:  # the same for both directions
            one, other = np.minimum(one, other), np.maximum(one, other)
        key = mix(np.array([self._split.seed], np.uint64))
        place = uniform(mix(mix(one.astype(np.uint64) ^ key) ^ other.astype(np.uint64)))
        codes = np.full(len(src), TRAIN, np.int8)
        val, test = shares
        codes[place < val + test] = TEST
        codes[place < val] = VAL
        return codes


def is_reverse_of_hidden(src: IntArray, dst: IntArray, hidden: IntArray, num_sources: int) -> Array:
    """Return which edges reverse one of `Splitter.hidden`, whose destinations are of their source
    type, with ``num_sources`` nodes: bool ``[E]``."""
    if not len(hidden):
        return np.zeros(len(src), bool)
    reverse = dst * num_sources + src
    matches: Array = hidden.take(np.searchsorted(hidden, reverse), mode="clip") == reverse
    return matches
