"""Which edges of a type are for training, validation and test, and which no message may pass along.

What is to be predicted must not be seen: edges for validation and test are in no neighbourhood
and count in no degree. The split is that of the edges' masks, or a keyed share: a function of the
seed and of the two ends as the user numbers them, so that it is the same however the graph is
partitioned, and an edge is never told by another between the same nodes.
"""

from __future__ import annotations

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import MASKS, EdgeType, etype_str
from raygnn.graph.partition.edge_target import NONE, TEST, TRAIN, VAL, EdgeSplit
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.manifest import checked
from raygnn.graph.partition.topology import (
    InEdges,
    read_edge_data,
    read_in_edges,
    read_original,
    read_original_edges,
)
from raygnn.util.hashing import mix, uniform


class Splitter:
    """Reads a partition's files for the split of its edges, one part at a time.

    Memory: one part's edges, and of a graph without masks 8 bytes for each of its nodes.
    """

    def __init__(self, meta: PartitionMeta, split: EdgeSplit):
        self._meta = meta
        self._split = split
        self._original: dict[str, Array] = {}
        if split.shares is not None:
            for ntype in {split.etype[0], split.etype[2]}:
                self._original[ntype] = _everyones(meta, ntype)

    def part(self, part: int) -> tuple[Array, Array, Array]:
        """Sources and destinations int64 ``[E]``, and splits int8 ``[E]`` (`TRAIN` …), of the
        edges into a part's nodes, as its in-edge lists have them.

        Raises:
            DataError: the part is damaged or lacks the masks.
        """
        meta, split = self._meta, self._split
        with checked(meta, meta.files[part].graph) as file:
            edges = read_in_edges(meta, part, file)[split.etype]
        first = int(meta.node_ranges[split.etype[2]][part, 0])
        dst = np.repeat(np.arange(len(edges.indptr) - 1) + first, np.diff(edges.indptr))
        src = edges.src.astype(np.int64)
        if split.shares is None:
            return src, dst, self._masks(part, edges)
        return src, dst, self._keyed(src, dst, split.shares)

    def hidden(self) -> Array:
        """The edges for validation and test of all parts, sorted: ``source · D + destination``,
        where there are D nodes of the destination type. 8 bytes for each."""
        num = self._meta.num_nodes(self._split.etype[2])
        found = [np.empty(0, np.int64)]
        for part in range(self._meta.num_parts):
            src, dst, code = self.part(part)
            found.append((src * num + dst)[code > TRAIN])
        return np.unique(np.concatenate(found))

    def _masks(self, part: int, edges: InEdges) -> Array:
        meta, etype = self._meta, self._split.etype
        with checked(meta, meta.files[part].edge_feats) as file:
            data = read_edge_data(meta, part, file)[etype]
        codes = np.full(len(edges.src), NONE, np.int8)
        if len(codes) and not any(name in data for name in MASKS):
            raise DataError(
                f"edges of type {etype_str(etype)} have no masks",
                where=str(meta.files[part].edge_feats),
                remedy="set task.split, or give them train_mask, val_mask and test_mask",
            )
        for code, name in enumerate(MASKS):
            if name in data:
                mask = data[name].numpy().astype(bool)
                codes[mask if edges.order is None else mask[edges.order]] = code
        return codes

    def _keyed(self, src: Array, dst: Array, shares: tuple[float, float]) -> Array:
        etype = self._split.etype
        one, other = self._original[etype[0]][src], self._original[etype[2]][dst]
        if etype[0] == etype[2]:  # the same for both directions
            one, other = np.minimum(one, other), np.maximum(one, other)
        key = mix(np.array([self._split.seed], np.uint64))
        drawn = mix(mix(one.astype(np.uint64) ^ key) ^ other.astype(np.uint64))
        place = uniform(drawn)
        codes = np.full(len(src), TRAIN, np.int8)
        val, test = shares
        codes[place < val + test] = TEST
        codes[place < val] = VAL
        return codes


def numbers(meta: PartitionMeta, part: int, etype: EdgeType) -> Array:
    """Numbers of the edges in the graph that was partitioned, int64 ``[E]``, as the in-edge lists
    of a part have them; their ids here where the writer did not keep them.

    Raises:
        DataError: the file is damaged.
    """
    with checked(meta, meta.files[part].graph) as file:
        edges = read_in_edges(meta, part, file)[etype]
    path = meta.files[part].orig_eids
    if path is None:
        found = np.arange(len(edges.src)) + int(meta.edge_ranges[etype][part, 0])
    else:
        with checked(meta, path) as file:
            found = read_original_edges(meta, part, file)[etype_str(etype)].numpy()
    return found if edges.order is None else found[edges.order]


def _everyones(meta: PartitionMeta, ntype: str) -> Array:
    """The user's numbers of all nodes of a type."""
    found = []
    for part in range(meta.num_parts):
        path = meta.files[part].orig_nids
        if path is None:
            found.append(np.arange(*meta.node_ranges[ntype][part]))
        else:
            with checked(meta, path) as file:
                found.append(read_original(meta, part, file)[ntype].numpy())
    return np.concatenate(found)


def hides(edge: tuple[Array, Array], hidden: Array, num_sources: int) -> Array:
    """Which edges join the nodes of a hidden one the other way round, bool ``[E]``.

    Args:
        edge: sources and destinations, int64 ``[E]`` each.
        hidden: see `Splitter.hidden`; ``num_sources``: nodes of the edges' source type, which is
            the destination type of the hidden ones.
    """
    src, dst = edge
    wanted = dst * num_sources + src
    at = np.searchsorted(hidden, wanted)
    at[at == len(hidden)] = 0
    found: Array = hidden[at] == wanted if len(hidden) else np.zeros(len(src), bool)
    return found
