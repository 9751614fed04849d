"""Which rank owns the rows of a batch's nodes, and which rows this rank is asked for.

Worked out once for a batch, where it is made: what then moves rows to and fro needs one
all-to-all each way, and no further word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raygnn.sampling.exchange import Exchange

Ids = np.ndarray | Tensor


@dataclass(frozen=True)
class Routes:
    """The ways of the rows of one batch. R rows come here, G rows of this rank go out.

    On the wire rows lie by rank, then by node type, then in the order in which they were named.

    Attributes:
        num: node type → how many of its rows come.
        order: int64 ``[R]``: which of the named nodes, all types one after the other, comes at
            each place of the wire.
        receive, send: rows from each rank and to each, ``[W]``.
        given: node type → int64 ``[G_t]``, the rows that are asked for, counted from this rank's
            first; places: where each goes on the wire.
    """

    num: dict[str, int]
    order: Tensor
    receive: list[int]
    send: list[int]
    given: dict[str, Tensor]
    places: dict[str, Tensor]


def find_routes(
    ids: Mapping[str, Ids], bounds: Mapping[str, np.ndarray], exchange: Exchange
) -> Routes:
    """Tell the owners which rows are wanted. Collective.

    Args:
        ids: node type → int64 ``[n]``, global ids, on any device.
        bounds: node type → int64 ``[W+1]``, see `raygnn.graph.shard.Shard`.
    """
    size, rank = exchange.world.size, exchange.world.rank
    found = {t: as_ids(each) for t, each in ids.items()}
    owner = {t: np.searchsorted(bounds[t], each, side="right") - 1 for t, each in found.items()}
    counts = np.stack([np.bincount(o, minlength=size) for o in owner.values()], axis=1)
    wanted: list[Sequence[Tensor]] = [[] for _ in range(size)]
    for t, each in found.items():
        by_owner = each[np.argsort(owner[t], kind="stable")]
        pieces = torch.from_numpy(by_owner).split(np.bincount(owner[t], minlength=size).tolist())
        wanted = [[*row, piece] for row, piece in zip(wanted, pieces)]
    asked = exchange.counts(counts)
    came = exchange.pieces(wanted, asked)
    kinds = np.repeat(np.tile(np.arange(len(found)), size), asked.ravel())
    order = np.argsort(np.concatenate(list(owner.values())), kind="stable")
    return Routes(
        num={t: len(each) for t, each in found.items()},
        order=torch.from_numpy(order),
        receive=counts.sum(1).tolist(),
        send=asked.sum(1).tolist(),
        given={
            t: torch.cat([row[i] for row in came]) - int(bounds[t][rank])
            for i, t in enumerate(found)
        },
        places={t: torch.from_numpy(np.flatnonzero(kinds == i)) for i, t in enumerate(found)},
    )


def as_ids(ids: Ids) -> np.ndarray:
    """Ids as look-ups take them, int64 ``[n]`` in the memory of the CPU: by one explicit transfer
    where they are a tensor of another device."""
    if isinstance(ids, Tensor):
        ids = ids.detach().to("cpu").numpy()
    return np.ascontiguousarray(ids, np.int64)
