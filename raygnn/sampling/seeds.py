"""What a batch starts from: seeds, the same on every rank, whichever rank computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.shard import Shard
from raygnn.sampling.convert import Ids, as_ids
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.sampler import Banned


@dataclass(frozen=True)
class Start:
    """Where the blocks of one batch start.

    Attributes:
        nodes: node type → distinct ids, the last block's destinations.
        y: targets of the seeds.
        pairs, relation, instead: as `Batch` has them.
        banned: edges that no hop may draw.
        etype: of the seeds, where these are edges.
    """

    nodes: Mapping[str, np.ndarray]
    y: Tensor
    pairs: Tensor | None = None
    banned: Banned | None = None
    relation: Tensor | None = None
    instead: Mapping[str, Tensor] = field(default_factory=dict)
    etype: EdgeType | None = None


@dataclass(frozen=True)
class Turn:
    """Which seeds a rank has in one step.

    Attributes:
        chosen: numbers of all ranks' seeds, int64 ``[≤ global batch]``.
        mine: which of them are this rank's, int64 ``[B]``.
        epoch, step: of the run.
    """

    chosen: np.ndarray
    mine: np.ndarray
    epoch: int
    step: int

    @property
    def index(self) -> np.ndarray:
        """Numbers of this rank's seeds."""
        return self.chosen[self.mine]


class Seeds(Protocol):
    """Numbered seeds; the numbers are what a `SeedPlan` deals in."""

    num: int

    def ids(self, index: np.ndarray) -> np.ndarray:
        """What the seeds numbered ``index`` are called: contiguous per rank that owns them."""
        ...

    def start(self, turn: Turn) -> Start:
        """Where a rank's batch starts. Collective."""
        ...


class NodeSeeds:
    """Nodes of one type, in the order of their original ids.

    Args:
        ids: int64 ``[n]``, reshuffled global ids, on any device.
        targets: ``[n, …]``.
    """

    def __init__(self, ntype: str, ids: Ids, targets: Tensor):
        self.ntype = ntype
        self.targets = targets
        self.num = len(ids)
        self._ids = as_ids(ids)

    def ids(self, index: Ids) -> np.ndarray:
        return self._ids[as_ids(index)]

    def start(self, turn: Turn) -> Start:
        index = turn.index
        return Start({self.ntype: self._ids[index]}, self.targets[torch.from_numpy(index)])


def owned_nodes(shard: Shard, ntype: str, split: str, targets: Tensor) -> np.ndarray:
    """Positions, among this rank's own nodes, of those in a split that have a target.

    Args:
        split: "train", "val" or "test"; a mask that the partition lacks selects nothing.
        targets: ``[owned]`` classes, below 0 where unknown, or numbers ``[owned, …]``, NaN where
            unknown.

    Returns:
        int64 ``[n]``.
    """
    mask = shard.node_data[ntype].get(f"{split}_mask")
    if mask is None:
        return np.empty(0, np.int64)
    chosen: np.ndarray = torch.nonzero(mask.bool() & known(targets)).flatten().numpy()
    return chosen


def known(targets: Tensor) -> Tensor:
    """Which of some classes or numbers are known, bool ``[n]``: see `owned_nodes`."""
    if not targets.is_floating_point():
        return targets >= 0
    return ~targets.flatten(1).isnan().any(1) if targets.dim() > 1 else ~targets.isnan()


def gather_seeds(shard: Shard, exchange: Exchange, ntype: str, targets: Tensor) -> NodeSeeds:
    """The training nodes of all ranks. Collective.

    Sixteen bytes and a target for each on every rank, so that any rank can compute any seed.
    """
    owned = owned_nodes(shard, ntype, "train", targets)
    ids = torch.from_numpy(owned + shard.first(ntype))
    original = torch.from_numpy(shard.original[ntype][owned].astype(np.int64))
    keys, ids, values = (
        exchange.gather_rows(rows) for rows in (original, ids, targets[torch.from_numpy(owned)])
    )
    order = torch.argsort(keys)
    return NodeSeeds(ntype, ids[order].numpy(), values[order])
