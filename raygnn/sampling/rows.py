"""Rows of node arrays, wherever they are: on this rank, cached, or on the rank that owns them.

One look-up, one gather and, with several ranks, one all-to-all of ids and one per array.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.shard import Shard
from raygnn.sampling.exchange import Exchange

FEATURES = "features"


def degree_column(etype: EdgeType) -> str:
    """Name of the column with the in-degrees of ``etype`` in its destination's store."""
    return f"degree:{etype_str(etype)}"


class BufferRing:
    """Output buffers that are used again after ``depth`` gathers.

    A gather into fresh memory spends most of its time in page faults. A tensor handed out is
    overwritten by the ``depth``-th gather after it, so ``depth`` must exceed the number of
    batches alive at once.
    """

    def __init__(self, depth: int):
        self._depth = depth
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._turn: dict[str, int] = {}

    def take(self, name: str, rows: int, like: Tensor) -> Tensor:
        """A buffer ``[rows, *like.shape[1:]]`` of ``like``'s dtype, with arbitrary content."""
        turn = self._turn.get(name, 0)
        self._turn[name] = (turn + 1) % self._depth
        buffer = self._buffers.get((name, turn))
        if buffer is None or len(buffer) < rows:
            buffer = torch.empty((rows + rows // 4, *like.shape[1:]), dtype=like.dtype)
            self._buffers[name, turn] = buffer
        return buffer[:rows]


class RowStore:
    """The arrays of one node type, spread over the ranks by ownership.

    Args:
        bounds: int64 ``[W+1]``; rank r holds the ids ``bounds[r] … bounds[r+1]-1``.
        exchange: the data plane's collectives.
        columns: name → ``[owned, …]``.
        cached: ids owned elsewhere whose rows are fetched once, now, and kept. Collective:
            either every rank gives some (it may be none) or no rank does.
        ring: where gathers put their output; None = fresh memory each time.

    Attributes:
        asked, hits: remote rows needed so far, and how many of them the cache had.
    """

    def __init__(
        self,
        bounds: np.ndarray,
        exchange: Exchange,
        columns: dict[str, Tensor],
        *,
        cached: np.ndarray | None = None,
        ring: BufferRing | None = None,
    ):
        self._bounds = bounds
        self._exchange = exchange
        self._columns = columns
        self._ring = ring
        rank = exchange.world.rank
        self._first = int(bounds[rank])
        self._owned = int(bounds[rank + 1]) - self._first
        self._cached = np.empty(0, np.int64)
        self.asked = 0
        self.hits = 0
        if cached is not None:
            self._fill_cache(np.sort(cached))

    def over(self, exchange: Exchange) -> RowStore:
        """The same rows and cache, fetched over another group, into fresh memory."""
        twin = copy.copy(self)
        twin._exchange, twin._ring = exchange, None
        return twin

    def gather(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Rows of every column for ``ids`` (int64 ``[n]``, global), in that order.

        Collective: every rank calls it the same number of times.
        """
        slots = ids - self._first
        elsewhere = np.flatnonzero((slots < 0) | (slots >= self._owned))
        if elsewhere.size:
            remote = ids[elsewhere]
            self.asked += remote.size
            at = np.searchsorted(self._cached, remote)
            known = at < len(self._cached)
            known[known] = self._cached[at[known]] == remote[known]
            slots[elsewhere] = np.where(known, self._owned + at, 0)
            self.hits += int(known.sum())
            elsewhere = elsewhere[~known]
        index = torch.from_numpy(slots)
        out = {name: self._local(name, table, index) for name, table in self._columns.items()}
        self._fetch(ids, elsewhere, out)
        return out

    def _local(self, name: str, table: Tensor, index: Tensor) -> Tensor:
        if not len(table):  # every row is elsewhere
            return table.new_empty((len(index), *table.shape[1:]))
        if self._ring is None:
            return table.index_select(0, index)
        return torch.index_select(table, 0, index, out=self._ring.take(name, len(index), table))

    def _fetch(self, ids: np.ndarray, where: np.ndarray, out: dict[str, Tensor]) -> None:
        """Fill ``out[name][where]`` with the rows of ``ids[where]`` from their owners."""
        exchange = self._exchange
        if exchange.world.size == 1:
            return
        owner = np.searchsorted(self._bounds, ids[where], side="right") - 1
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=exchange.world.size).tolist()
        receive = exchange.counts(send)
        where = where[order]
        wanted = exchange.rows(torch.from_numpy(ids[where]), send, receive)
        wanted = wanted - self._first
        target = torch.from_numpy(where)
        for name, table in self._columns.items():
            rows = exchange.rows(table.index_select(0, wanted), receive, send)
            out[name].index_copy_(0, target, rows)

    def _fill_cache(self, cached: np.ndarray) -> None:
        ring, self._ring = self._ring, None
        rows = self.gather(cached)
        self._ring = ring
        self._columns = {n: torch.cat([t, rows[n]]) for n, t in self._columns.items()}
        self._cached = cached
        self.asked = 0


def hottest_remote(sources: np.ndarray, bounds: np.ndarray, rank: int, share: float) -> np.ndarray:
    """The remote nodes that this rank's edges name most often: what a static cache should hold.

    Args:
        sources: int64, source ids of this rank's in-edges.
        share: of the remote nodes, 0 to 1.

    Returns:
        Their ids, int64, at most ``share`` of the remote nodes.
    """
    first, last, total = int(bounds[rank]), int(bounds[rank + 1]), int(bounds[-1])
    uses = np.bincount(sources, minlength=total)
    uses[first:last] = 0
    count = min(int(share * (total - (last - first))), int(np.count_nonzero(uses)))
    if count == 0:
        return np.empty(0, np.int64)
    return np.argpartition(uses, total - count)[total - count :].astype(np.int64)


def as_matrix(rows: Tensor) -> Tensor:
    """``[n]`` → ``[n, 1]``; ``[n, …]`` → ``[n, F]``."""
    return rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)


def build_stores(
    shard: Shard,
    exchange: Exchange,
    *,
    features: str,
    dtype: torch.dtype,
    degree_etypes: Sequence[EdgeType],
    cache: float,
    ring: int,
) -> dict[str, RowStore]:
    """A store per node type, with its features and, where wanted, its in-degrees. Collective.

    Args:
        features: name of the input array; its rows are flattened to one dimension.
        dtype: of the features from here on; other arrays keep theirs.
        degree_etypes: edge types whose in-degrees go into their destination type's store.
        cache: share of the remote rows kept here, 0 to 1.
        ring: gathers after which an output buffer is used again.
    """
    stores = {}
    for ntype in shard.ntypes:
        columns = {FEATURES: as_matrix(shard.node_data[ntype][features]).to(dtype)}
        for etype in degree_etypes:
            if etype[2] == ntype:
                columns[degree_column(etype)] = shard.in_degree(etype)
        cached = None
        if cache and exchange.world.size > 1:
            sources = [shard.own_sources(etype) for etype in shard.etypes if etype[0] == ntype]
            bounds = shard.bounds[ntype]
            joined = np.concatenate([np.empty(0, np.int64), *sources])
            cached = hottest_remote(joined, bounds, shard.rank, cache)
        stores[ntype] = RowStore(
            shard.bounds[ntype], exchange, columns, cached=cached, ring=BufferRing(ring)
        )
    return stores
