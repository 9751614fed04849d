"""Neighbour sampling over a partitioned graph, the same whoever does it.

Which neighbours a node gives is keyed by (seed, epoch, step, hop, edge type, node), so that the
replicated and the partitioned topology, and any number of workers, draw the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from raygnn.graph.data import EdgeType
from raygnn.graph.shard import Shard
from raygnn.sampling import kernels
from raygnn.sampling.batch import Adjacency, Block
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.keys import derive_key

Frontier = dict[str, np.ndarray]  # node type → distinct global ids


class NeighborSampler:
    """Draws the blocks of a minibatch.

    Args:
        shard: this worker's graph; sampling stays local where it holds all rows.
        exchange: the data plane's collectives. With a partitioned topology every rank calls
            the sampler the same number of times.
        seed: of the run.
        replace: draw with replacement.
    """

    def __init__(self, shard: Shard, exchange: Exchange, *, seed: int = 0, replace: bool = False):
        self._shard = shard
        self._exchange = exchange
        self._seed = seed
        self._replace = replace
        self._remote = exchange.world.size > 1 and any(
            rows.num < shard.num_nodes(etype[2]) for etype, rows in shard.topology.items()
        )

    def sample(
        self, ntype: str, seeds: np.ndarray, fanouts: Sequence[int], *, epoch: int, step: int
    ) -> tuple[list[Block], Frontier]:
        """The blocks for ``seeds``, from the input nodes to the seeds.

        Args:
            ntype: the seeds' type.
            seeds: int64 ``[B]``, distinct global ids.
            fanouts: neighbours per edge type and hop, from the seeds outward; -1 = all.

        Returns:
            ``(blocks, input ids per node type)``; the seeds are the last block's destinations,
            in the given order.
        """
        frontier: Frontier = {t: np.empty(0, np.int64) for t in self._shard.ntypes}
        frontier[ntype] = seeds
        blocks = []
        for hop, fanout in enumerate(fanouts):
            block, frontier = self.hop(frontier, fanout, derive_key(self._seed, epoch, step, hop))
            blocks.append(block)
        return blocks[::-1], frontier

    def hop(self, frontier: Frontier, fanout: int, key: int = 0) -> tuple[Block, Frontier]:
        """One block whose destinations are ``frontier``; returns it and its source nodes."""
        drawn: dict[EdgeType, tuple[np.ndarray, np.ndarray]] = {}
        for number, etype in enumerate(self._shard.etypes):
            nodes = frontier[etype[2]]
            drawn[etype] = self._neighbors(etype, nodes, fanout, derive_key(key, number))
        adj: dict[EdgeType, Adjacency] = {}
        sources: Frontier = {}
        for ntype, known in frontier.items():
            etypes = [e for e in drawn if e[0] == ntype]
            ids = [drawn[e][1] for e in etypes]
            joined = ids[0] if len(ids) == 1 else np.concatenate([known[:0], *ids])
            sources[ntype], local = kernels.relabel(known, joined)
            start = 0
            for etype in etypes:
                indptr, neighbors = drawn[etype]
                piece = local[start : start + len(neighbors)]
                start += len(neighbors)
                adj[etype] = Adjacency(torch.from_numpy(indptr), torch.from_numpy(piece))
        block = Block(
            adj={e: adj[e] for e in self._shard.etypes},
            num_src={t: len(ids) for t, ids in sources.items()},
            num_dst={t: len(ids) for t, ids in frontier.items()},
        )
        return block, sources

    def _neighbors(
        self, etype: EdgeType, nodes: np.ndarray, fanout: int, key: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._remote:
            return self._ask_owners(etype, nodes, fanout, key)
        return self._local(etype, nodes, fanout, key)

    def _local(
        self, etype: EdgeType, nodes: np.ndarray, fanout: int, key: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self._shard.topology[etype]
        index = nodes - rows.first
        return kernels.sample_rows(
            rows.indptr, rows.src, index, rows.keys[index], fanout, self._replace, np.uint64(key)
        )

    def _ask_owners(
        self, etype: EdgeType, nodes: np.ndarray, fanout: int, key: int
    ) -> tuple[np.ndarray, np.ndarray]:
        exchange, bounds = self._exchange, self._shard.bounds[etype[2]]
        owner = np.searchsorted(bounds, nodes, side="right") - 1
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=exchange.world.size).tolist()
        receive = exchange.counts(send)
        asked = exchange.rows(torch.from_numpy(nodes[order]), send, receive).numpy()

        indptr, neighbors = self._local(etype, asked, fanout, key)
        degrees = exchange.rows(torch.from_numpy(np.diff(indptr)), receive, send).numpy()
        ends = np.cumsum([0, *receive])
        per_asker = np.diff(indptr[ends]).tolist()
        starts = np.concatenate([[0], np.cumsum(degrees)])
        per_owner = np.diff(starts[np.cumsum([0, *send])]).tolist()
        arrived = exchange.rows(torch.from_numpy(neighbors), per_asker, per_owner).numpy()
        return kernels.ungroup_rows(order, degrees, arrived)
