"""Neighbour sampling on a GPU: the same blocks as `NeighborSampler`, as tensors of the GPU.

For a replicated topology without times, weights, banned edges and arrays of edges. The structure is
in the GPU's memory, or page-locked in the host's, where the GPU reads it row by row. The host needs
the lengths of a block's tensors, so it waits for the GPU once per hop, twice if a hop takes all
neighbours: in the thread that prepares batches, for its stream alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.batch import Adjacency, Block
from raygnn.sampling.device import device_kernels
from raygnn.sampling.device.device_features import put
from raygnn.sampling.drawing import ALL
from raygnn.sampling.exchange import Ids, as_ids
from raygnn.sampling.plan import Fanout
from raygnn.util.hashing import derive_key

if TYPE_CHECKING:
    import numpy as np

    from raygnn.sampling.sampler import Banned

DeviceFrontier = dict[str, Tensor]  # node type → distinct global ids, int64 on the GPU
# edge type → int64 [D+1], and the sampled sources of each destination, padded with -1
DeviceDraws = dict[EdgeType, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Lists:
    """In-edge lists in memory that a GPU reads; fields as in `InEdgeLists`."""

    first: int
    indptr: Tensor
    src: Tensor
    keys: Tensor


@dataclass(eq=False)
class DeviceSampler:
    """Samples blocks on a GPU.

    Attributes:
        shard: with a replicated topology.
        device: the GPU; a CPU with Triton's interpreter.
        pinned: keep the structure in the host's memory, page-locked.
        seed, replace, once: see `NeighborSampler`.
    """

    shard: Shard
    device: torch.device
    pinned: bool = False
    seed: int = 0
    replace: bool = False
    once: bool = False

    def __post_init__(self) -> None:
        assert self.shard.replicated
        self._lists = {}
        for etype in self.shard.etypes:
            rows = self.shard.topology[etype]
            assert not rows.carried
            arrays = [put(a, self.device, self.pinned) for a in (rows.indptr, rows.src, rows.keys)]
            self._lists[etype] = Lists(rows.first, *arrays)

    def sample(
        self,
        seeds: Mapping[str, Ids],
        fanouts: Sequence[Fanout],
        *,
        epoch: int,
        step: int,
        banned: Banned | None = None,
        times: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[list[Block], DeviceFrontier]:
        """See `NeighborSampler.sample`; ``banned`` and ``times`` are None."""
        assert banned is None
        assert times is None
        frontier = {}
        for ntype in self.shard.ntypes:
            ids = torch.from_numpy(as_ids(seeds.get(ntype, torch.empty(0))))
            frontier[ntype] = ids.to(self.device, non_blocking=True)
        blocks: list[Block] = []
        for hop, fanout in enumerate(fanouts):
            key = derive_key(self.seed, epoch, step, 0 if self.once else hop)
            block, frontier = self.hop(frontier, fanout, key)
            blocks.insert(0, block)
        return blocks, frontier

    def hop(
        self, nodes: DeviceFrontier, fanout: Fanout, key: int = 0
    ) -> tuple[Block, DeviceFrontier]:
        """Sample one block with the destinations ``nodes``; return it and its source nodes."""
        draws = self._draw(nodes, fanout, key)
        numbered: DeviceFrontier = {}
        local: dict[str, tuple[list[EdgeType], Tensor, Tensor]] = {}
        for ntype, known in nodes.items():
            etypes = [e for e in draws if e[0] == ntype]
            ids = torch.cat([known[:0], *(draws[e][1] for e in etypes)])
            numbered[ntype], numbers, count = device_kernels.relabel(known, ids)
            counts = [count, *(draws[e][0][-1] for e in etypes)]
            local[ntype] = etypes, numbers, torch.stack(counts)
        sizes = iter(torch.cat([counts for _, _, counts in local.values()]).tolist())  # waits
        adj, sources = dict[EdgeType, Adjacency](), dict[str, Tensor]()
        for ntype, (etypes, numbers, _) in local.items():
            sources[ntype] = numbered[ntype][: next(sizes)]
            start = 0
            for etype in etypes:
                indptr, drawn = draws[etype]
                adj[etype] = Adjacency(indptr, numbers[start : start + next(sizes)])
                start += len(drawn)
        block = Block(
            adj={e: adj[e] for e in draws},
            num_src={t: len(ids) for t, ids in sources.items()},
            num_dst={t: len(ids) for t, ids in nodes.items()},
        )
        return block, sources

    def _draw(self, nodes: DeviceFrontier, fanout: Fanout, key: int) -> DeviceDraws:
        rows = {e: nodes[e[2]] - lists.first for e, lists in self._lists.items()}
        spans = {
            e: device_kernels.spans(lists.indptr, rows[e], fanout[e], self.replace)
            for e, lists in self._lists.items()
        }
        whole = [e for e in spans if fanout[e] == ALL]
        totals: dict[EdgeType, int] = {}
        if whole:
            ends = torch.stack([spans[e][1][-1] for e in whole])
            totals = dict(zip(whole, ends.tolist()))  # waits
        draws: DeviceDraws = {}
        for number, (etype, lists) in enumerate(self._lists.items()):
            start, indptr = spans[etype]
            if etype in totals:
                ids = device_kernels.all_of(lists.src, start, indptr, totals[etype])
            else:
                given = lists.indptr, lists.src, lists.keys, rows[etype], indptr
                how = fanout[etype], self.replace, derive_key(key, number)
                ids = device_kernels.draw_rows(*given, *how)
            draws[etype] = indptr, ids
        return draws


def difference(blocks: Sequence[Block], others: Sequence[Block]) -> str | None:
    """Describe the first difference of two lists of blocks, on any devices; None if equal."""
    if len(blocks) != len(others):
        return f"{len(blocks)} and {len(others)} blocks"
    for number, (one, other) in enumerate(zip(blocks, others)):
        if (one.num_src, one.num_dst, [*one.adj]) != (other.num_src, other.num_dst, [*other.adj]):
            return f"the nodes or the edge types of block {number}"
        for etype, adj in one.adj.items():
            pairs = zip((adj.indptr, adj.src), (other.adj[etype].indptr, other.adj[etype].src))
            if not all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs):
                return f"the edges of {etype} in block {number}"
    return None
