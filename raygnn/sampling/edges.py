"""Edges as seeds: a batch is some edges of one type, and the neighbourhoods of their ends.

An edge is known by its position: all parts' in-edge lists of its type, one after the other.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from raygnn.graph.data import EdgeType
from raygnn.graph.shard import Shard
from raygnn.sampling import kernels
from raygnn.sampling.convert import Ids, as_ids
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.sampler import Banned
from raygnn.sampling.seeds import Start


class EdgeSeeds:
    """Edges of one type as seeds.

    Args:
        bounds: int64 ``[W+1]``, the positions that each rank owns.
        positions: int64 ``[n]``, the edges to train on, on every rank alike; None = all.
        exclude: which edges a batch may not sample, so that it does not see what it is to
            predict: None, "self" (the seeds) or "reverse" (and the same pairs the other way
            round). They are left out by their ends, so parallel edges do not give them away.
        reverse: the edge type that holds the reverses, where it is not the seeds' own.
    """

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        etype: EdgeType,
        bounds: np.ndarray,
        positions: Ids | None = None,
        *,
        exclude: Literal["self", "reverse"] | None = None,
        reverse: EdgeType | None = None,
    ):
        self.etype = etype
        self.num = int(bounds[-1]) if positions is None else len(positions)
        self._shard = shard
        self._exchange = exchange
        self._bounds = bounds
        self._positions = None if positions is None else as_ids(positions)
        self._exclude = exclude
        self._reverse = reverse or etype

    def ids(self, index: Ids) -> np.ndarray:
        found = as_ids(index)
        return found if self._positions is None else self._positions[found]

    def start(self, index: np.ndarray) -> Start:
        src, dst = self.ends(self.ids(index))
        nodes, pairs = _end_nodes(self.etype, src, dst)
        return Start(nodes, torch.ones(len(index)), torch.from_numpy(pairs), self._banned(src, dst))

    def ends(self, positions: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Source and destination ids (int64 ``[B]`` each), asked of the owners. Collective."""
        positions = as_ids(positions)
        exchange = self._exchange
        size = exchange.world.size
        owner = np.searchsorted(self._bounds, positions, side="right") - 1
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=size).reshape(size, 1)
        ends = np.concatenate([[0], np.cumsum(send)])
        asked = exchange.counts(send)
        by_owner = torch.from_numpy(positions[order])
        pieces = [[by_owner[ends[r] : ends[r + 1]]] for r in range(size)]
        wanted = torch.cat([piece for (piece,) in exchange.pieces(pieces, asked)]).numpy()
        here = _own_ends(self._shard, self.etype, wanted)
        stops = np.concatenate([[0], np.cumsum(asked)])
        answer = [
            [torch.from_numpy(end[stops[r] : stops[r + 1]]) for end in here] for r in range(size)
        ]
        came = exchange.pieces(answer, np.repeat(send, 2, axis=1))
        found = np.empty((2, len(positions)), np.int64)
        for column in range(2):
            found[column, order] = torch.cat([row[column] for row in came]).numpy()
        return found[0], found[1]

    def _banned(self, src: np.ndarray, dst: np.ndarray) -> Banned | None:
        if self._exclude is None:
            return None
        if self._exclude == "self":
            return Banned({self.etype: (src, dst)})
        if self._reverse != self.etype:
            return Banned({self.etype: (src, dst), self._reverse: (dst, src)})
        return Banned({self.etype: (np.concatenate([src, dst]), np.concatenate([dst, src]))})


def gather_edge_seeds(
    shard: Shard,
    exchange: Exchange,
    etype: EdgeType,
    *,
    split: str | None = None,
    exclude: Literal["self", "reverse"] | None = None,
    reverse: EdgeType | None = None,
) -> EdgeSeeds:
    """The edges of one type, or those of them in a split. Collective.

    Their order is that of the partition's edges: the same for any number of workers.

    Args:
        split: "train", "val" or "test": those with ``<split>_mask``, which must be among the
            edge arrays that the shard was loaded with; None = all.
        exclude, reverse: see `EdgeSeeds`.
    """
    indptr = _own_rows(shard, etype)
    stop = shard.edge_first(etype) + int(indptr[-1])
    stops = exchange.gather_rows(torch.tensor([stop])).numpy()
    positions = None
    if split is not None:
        mask = shard.topology[etype].data[f"{split}_mask"][indptr[0] : indptr[-1]]
        own = np.flatnonzero(mask) + int(indptr[0]) + shard.edge_first(etype)
        positions = exchange.gather_rows(torch.from_numpy(own)).numpy()
    bounds = np.concatenate([[0], stops])
    return EdgeSeeds(shard, exchange, etype, bounds, positions, exclude=exclude, reverse=reverse)


def _own_rows(shard: Shard, etype: EdgeType) -> np.ndarray:
    """Row pointers of the owned nodes' in-edges, ``[owned+1]``."""
    rows = shard.topology[etype]
    low = shard.first(etype[2]) - rows.first
    return rows.indptr[low : low + shard.owned(etype[2]) + 1]


def _own_ends(
    shard: Shard, etype: EdgeType, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of own edges."""
    at = positions - shard.edge_first(etype)
    dst = np.searchsorted(_own_rows(shard, etype), at, side="right") - 1
    return shard.topology[etype].src[at].astype(np.int64), dst + shard.first(etype[2])


def _end_nodes(
    etype: EdgeType, src: np.ndarray, dst: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The nodes at the ends of edges, each once by type, and ``pairs`` as `Batch` has them."""
    nobody = np.empty(0, np.int64)
    if etype[0] == etype[2]:
        nodes, local = kernels.relabel(nobody, np.concatenate([src, dst]))
        return {etype[0]: nodes}, local.reshape(2, -1)
    sources, first = kernels.relabel(nobody, src)
    targets, second = kernels.relabel(nobody, dst)
    return {etype[0]: sources, etype[2]: targets}, np.stack([first, second])
