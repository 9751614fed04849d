"""The nodes that are trained on or evaluated: found by the ranks that own them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.shard import Shard
from raygnn.sampling.exchange import Exchange


@dataclass(frozen=True)
class Seeds:
    """All seeds, on every rank alike, in the order of their original ids.

    Attributes:
        ids: int64 ``[n]``, reshuffled global ids.
        targets: ``[n, …]``.
    """

    ids: np.ndarray
    targets: Tensor


def owned_nodes(shard: Shard, ntype: str, split: str, targets: Tensor) -> np.ndarray:
    """Positions, among this rank's own nodes, of those in a split that have a target.

    Args:
        split: "train", "val" or "test"; a mask that the partition lacks selects nothing.
        targets: ``[owned]``; below 0 means unknown.

    Returns:
        int64 ``[n]``.
    """
    mask = shard.node_data[ntype].get(f"{split}_mask")
    if mask is None:
        return np.empty(0, np.int64)
    chosen: np.ndarray = torch.nonzero(mask.bool() & (targets >= 0)).flatten().numpy()
    return chosen


def gather_seeds(shard: Shard, exchange: Exchange, ntype: str, targets: Tensor) -> Seeds:
    """The training nodes of all ranks. Collective.

    Sixteen bytes and a target for each on every rank, so that any rank can compute any seed.
    """
    owned = owned_nodes(shard, ntype, "train", targets)
    ids = torch.from_numpy(owned + shard.first(ntype))
    original = torch.from_numpy(shard.original[ntype][owned])
    keys, ids, values = (
        exchange.gather_rows(rows) for rows in (original, ids, targets[torch.from_numpy(owned)])
    )
    order = torch.argsort(keys)
    return Seeds(ids[order].numpy(), values[order])
