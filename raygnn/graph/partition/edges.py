"""Which edges are predicted, and which of them are for training, validation and test.

What is to be predicted must not be seen: edges for validation and test are in no neighbourhood
and count in no degree. The split is that of the edges' masks, or a keyed share: a function of the
seed and of the two ends as the user numbers them, so that it is the same however the graph is
partitioned, and an edge is never told by another between the same nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray
from raygnn.graph.data import MASKS, EdgeSplit, etype_str
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.times import codes_since, since
from raygnn.util.hashing import mix, uniform

TRAIN, VAL, TEST, NONE = 0, 1, 2, -1  # in the order of `raygnn.graph.data.SPLITS`


@dataclass(frozen=True)
class SplitEdges:
    """The edges of the split's type into a part's nodes, as its in-edge lists have them.

    Attributes:
        src, dst: int64 ``[E]``, type-wise ids.
        codes: int8 ``[E]``, `TRAIN` ….
        numbers: int64 ``[E]``, in the graph that was partitioned; their ids here where the
            writer did not keep them.
    """

    src: IntArray
    dst: IntArray
    codes: Array
    numbers: IntArray


class Splitter:
    """Reads a partition's files for the split of its edges, one part at a time.

    Memory: one part's edges, and of a graph without masks 8 bytes for each of its nodes.

    Raises:
        DataError: by its methods, when a part is damaged or lacks the masks.
    """

    def __init__(self, meta: PartitionMeta, split: EdgeSplit):
        from raygnn.graph.partition.read import read_original_nodes

        self._meta = meta
        self._split = split
        self._original: dict[str, Array] = {}
        self._since: tuple[int, int] | None = None
        if split.time is not None:
            self._since = self._moments(split.time)
        elif split.shares is not None:
            for ntype in {split.etype[0], split.etype[2]}:
                ids = [read_original_nodes(meta, part)[ntype] for part in range(meta.num_parts)]
                self._original[ntype] = np.concatenate(ids)

    def part(self, part: int) -> SplitEdges:
        """The edges into one part's nodes."""
        from raygnn.graph.partition.read import read_in_edges, read_original_edges

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
        """The edges for validation and test of all parts, sorted: ``source · D + destination``,
        where there are D nodes of the destination type. 8 bytes for each."""
        num = self._meta.num_nodes(self._split.etype[2])
        hidden = [np.empty(0, np.int64)]
        for part in range(self._meta.num_parts):
            edges = self.part(part)
            hidden.append((edges.src * num + edges.dst)[edges.codes > TRAIN])
        return np.unique(np.concatenate(hidden))

    def _moments(self, name: str) -> tuple[int, int]:
        """From when on edges are for validation, and for test."""
        assert self._split.shares is not None
        times = [np.empty(0, np.int64)]
        if not all(isinstance(share, int) for share in self._split.shares):
            times += [self._times(part, None) for part in range(self._meta.num_parts)]
        return since(np.concatenate(times), *self._split.shares)

    def _times(self, part: int, order: Array | None) -> IntArray:
        """When each edge of a part is."""
        from raygnn.graph.partition.read import read_edge_data, read_in_edges

        etype, name = self._split.etype, str(self._split.time)
        stored = read_edge_data(self._meta, part)[etype].get(name)
        if stored is None and not len(read_in_edges(self._meta, part)[etype].src):
            return np.empty(0, np.int64)  # a part without edges need not have their arrays
        if stored is None or stored.is_floating_point() or stored.dim() != 1:
            has = "no array" if stored is None else f"{stored.dtype} {list(stored.shape)} as"
            raise DataError(
                f"edges of type {etype_str(etype)} have {has} {name!r}, to be split by time",
                where=str(self._meta.files[part].edge_feats),
                remedy="name an array of one whole number for each edge (task.split.time)",
            )
        times = stored.numpy().astype(np.int64)
        return times if order is None else times[order]

    def _by_masks(self, part: int, count: int, order: Array | None) -> Array:
        from raygnn.graph.partition.read import read_edge_data

        etype = self._split.etype
        data = read_edge_data(self._meta, part)[etype]
        codes = np.full(count, NONE, np.int8)
        if count and not any(name in data for name in MASKS):
            raise DataError(
                f"edges of type {etype_str(etype)} have no masks",
                where=str(self._meta.files[part].edge_feats),
                remedy="set task.split, or give them train_mask, val_mask and test_mask",
            )
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
    """Which edges join the nodes of a hidden one the other way round, bool ``[E]``.

    Args:
        src, dst: int64 ``[E]``.
        hidden: see `Splitter.hidden`; ``num_sources``: nodes of the edges' source type, which is
            the destination type of the hidden ones.
    """
    if not len(hidden):
        return np.zeros(len(src), bool)
    reverse = dst * num_sources + src
    at = np.searchsorted(hidden, reverse)
    at[at == len(hidden)] = 0
    matches: Array = hidden[at] == reverse
    return matches
