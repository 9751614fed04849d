"""Which remote rows a rank keeps: those that its batches will ask for most often.

The choice is made once, from the structure and the way batches are drawn, so that nothing has to
be tracked or moved while training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numba import njit

from raygnn.graph.staging.shard import Shard
from raygnn.sampling.exchange import Ids, as_ids
from raygnn.sampling.plan import Fanout

Scores = dict[str, np.ndarray]  # node type → float32 [nodes]

_TINY = float(np.finfo(np.float32).tiny)


def inclusion(
    shard: Shard,
    seeds: Mapping[str, Ids],
    batch_size: int,
    fanouts: Sequence[Fanout],
    *,
    replace: bool,
) -> Scores:
    """The chance of each node to be in one of this rank's batches.

    Vertex-inclusion probabilities as in SALIENT++ (Kaler et al., MLSys 2023): a seed is in a
    batch with ``batch_size / seeds``; a node is in the next frontier if it was in this one, or
    if one of its out-neighbours there draws it. Draws are taken as independent, and weighted
    ones as even. Hops are followed through the rows that the rank holds: all of them with a
    replicated topology, else its own, which leaves out what remote nodes would draw.

    Args:
        seeds: node type → ids of the seeds that this rank mostly computes, on any device.
        batch_size: seeds of a batch.
        fanouts: neighbours per hop, from the seeds outward.
    """
    num = sum(len(ids) for ids in seeds.values())
    chance = {t: np.zeros(shard.num_nodes(t), np.float32) for t in shard.ntypes}
    for ntype, ids in seeds.items():
        chance[ntype][as_ids(ids)] = min(1.0, batch_size / max(num, 1))
    for fanout in fanouts:
        missed = {t: np.zeros(len(p), np.float32) for t, p in chance.items()}
        for etype, rows in shard.topology.items():
            held = chance[etype[2]][rows.first : rows.first + rows.num]
            _spread(rows.indptr, rows.src, held, fanout[etype], replace, missed[etype[0]])
        for ntype, p in chance.items():
            chance[ntype] = p - (1 - p) * np.expm1(missed[ntype])  # 1 - x loses an x near 1
    return chance


def degrees(shard: Shard) -> Scores:
    """How many of the edges that this rank holds come from each node: the baseline."""
    counts = {t: np.zeros(shard.num_nodes(t), np.float32) for t in shard.ntypes}
    for etype in shard.etypes:
        sources = shard.own_sources(etype)
        counts[etype[0]] += np.bincount(sources, minlength=len(counts[etype[0]]))
    return counts


def choose(scores: Scores, bounds: Mapping[str, np.ndarray], rank: int, share: float) -> Scores:
    """The remote nodes with the highest scores, in id order.

    Args:
        share: of the remote nodes of each type, 0 to 1; nodes with score 0 are never chosen.

    Returns:
        node type → int64 ids.
    """
    chosen = {}
    for ntype, score in scores.items():
        first, last = int(bounds[ntype][rank]), int(bounds[ntype][rank + 1])
        remote = score.copy()
        remote[first:last] = 0
        count = min(int(share * (len(score) - (last - first))), int(np.count_nonzero(remote)))
        chosen[ntype] = np.empty(0, np.int64)
        if count:
            top = np.argpartition(remote, len(remote) - count)[len(remote) - count :]
            chosen[ntype] = np.sort(top)
    return chosen


@njit(cache=True, nogil=True, boundscheck=False)
def _spread(indptr, src, chance, fanout, replace, log_missed):  # type: ignore[no-untyped-def]
    """One hop of vertex-inclusion probabilities (SALIENT++, sec. 3).

    Args:
        indptr: ``[R+1]``; src: ids of the sources.
        chance: float32 ``[R]``, that each row's node is in the frontier.
        fanout: neighbours drawn per row, -1 = all.
        log_missed: float32, by source id: added to is the log of the chance that no row draws it.
    """
    for row in range(chance.shape[0]):
        degree = indptr[row + 1] - indptr[row]
        if chance[row] <= 0 or degree == 0 or fanout == 0:
            continue
        drawn = 1.0
        if replace:
            drawn = 1.0 - (1.0 - 1.0 / degree) ** fanout
        elif 0 <= fanout < degree:
            drawn = fanout / degree
        # a chance below what float32 has is one, too
        missed = np.float32(min(np.log1p(-min(chance[row] * drawn, 0.999999)), -_TINY))
        for j in range(indptr[row], indptr[row + 1]):
            log_missed[src[j]] += missed
