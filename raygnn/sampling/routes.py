"""Which rank owns the rows of a batch's nodes, which rows this rank is asked for, and which nodes
several ranks have.

Worked out once for a batch, where it is made: what then moves rows to and fro needs one
all-to-all each way, and no further word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raygnn.sampling.convert import Ids, as_ids
from raygnn.sampling.exchange import Exchange


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


def count_once(
    ids: Mapping[str, Ids],
    hops: Mapping[str, Sequence[int]],
    bounds: Mapping[str, np.ndarray],
    exchange: Exchange,
) -> dict[str, Tensor]:
    """Which of a batch's nodes this rank counts, so that each node of all ranks' batches is counted
    by one of them: the lowest of the ranks that reach it in the fewest hops. Collective.

    The choice holds for every hop: a rank that reaches a node in the fewest hops has it in all
    further ones.

    Args:
        ids: node type → int64 ``[n]``, distinct global ids in the order in which hops reached them.
        hops: node type → how many of them are reached by each hop or before, the last being n.
        bounds: see `find_routes`.

    Returns:
        node type → bool ``[n]``.
    """
    size = exchange.world.size
    orders, counts = {}, np.zeros((size, len(ids)), np.int64)
    wanted: list[list[Tensor]] = [[] for _ in range(size)]
    for number, (ntype, given) in enumerate(ids.items()):
        nodes, reached = as_ids(given), np.diff([0, *hops[ntype]])
        depth = np.repeat(np.arange(len(reached), dtype=np.int8), reached)
        owner = np.searchsorted(bounds[ntype], nodes, side="right") - 1
        order = orders[ntype] = np.argsort(owner, kind="stable")
        counts[:, number] = np.bincount(owner, minlength=size)
        for column in (nodes, depth):
            pieces = torch.from_numpy(column[order]).split(counts[:, number].tolist())
            wanted = [[*row, piece] for row, piece in zip(wanted, pieces)]
    asked = exchange.counts(counts)
    came = exchange.pieces(wanted, np.repeat(asked, 2, axis=1))
    answers: list[list[Tensor]] = [[] for _ in range(size)]
    for number in range(len(ids)):
        nodes, depth = (torch.cat([row[2 * number + c] for row in came]).numpy() for c in (0, 1))
        order = np.lexsort((depth, nodes))  # stable, and rows came by rank
        ordered = nodes[order]
        first = np.zeros(len(nodes), bool)
        first[order] = np.r_[True, ordered[1:] != ordered[:-1]][: len(nodes)]
        pieces = torch.from_numpy(first).split(asked[:, number].tolist())
        answers = [[*row, piece] for row, piece in zip(answers, pieces)]
    counted = {}
    for ntype, rows in zip(ids, zip(*exchange.pieces(answers, counts))):
        by_owner = torch.cat(rows)
        counted[ntype] = torch.empty_like(by_owner)
        counted[ntype][torch.from_numpy(orders[ntype])] = by_owner
    return counted
