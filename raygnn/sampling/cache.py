"""Selection of remote rows for a host's cache: those that its ranks' batches read most often.

The rows are chosen once, from the graph and the sampling settings, so that nothing is tracked or
moved during training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numba import njit

from raygnn.graph.staging.shard import Shard
from raygnn.sampling.exchange import Ids, as_ids
from raygnn.sampling.host_memory import Host
from raygnn.sampling.kernels import COMPILE
from raygnn.sampling.plan import Fanout

Scores = dict[str, np.ndarray]  # node type → float32 [nodes]

_TINY = float(np.finfo(np.float32).tiny)
_BLOCK = 1 << 26  # nodes of a hop that are computed in one pass over the edges


def inclusion(
    shard: Shard,
    seeds: Mapping[str, Ids],
    batch_size: int,
    fanouts: Sequence[Fanout],
    *,
    replace: bool,
) -> Scores:
    """Estimate each node's probability to be in a batch of this rank.

    Vertex-inclusion probabilities as in SALIENT++ (Kaler et al., MLSys 2023): a seed is in a
    batch with ``batch_size / seeds``; a node is in the next frontier if it was in this one, or
    if it is sampled by one of its out-neighbours there. Samples are assumed independent, and
    weights equal. Hops follow the rows that the rank holds: all with a replicated topology, else
    its own rows, which misses the samples of remote nodes.

    Memory: 4 bytes for each node of the graph, each row that the rank holds and each node of a
    block of 2²⁶.

    Args:
        seeds: node type → ids of the seeds that this rank mostly computes, on any device.
        batch_size: seeds of a batch.
        fanouts: neighbours per hop, from the seeds outward.
    """
    num = sum(len(ids) for ids in seeds.values())
    chance = {t: np.zeros(shard.num_nodes(t), np.float32) for t in shard.ntypes}
    for ntype, ids in seeds.items():
        chance[ntype][as_ids(ids)] = min(1.0, batch_size / max(num, 1))
    topology = shard.topology.items()
    for fanout in fanouts:
        held = {e[2]: chance[e[2]][r.first : r.first + r.num].copy() for e, r in topology}
        for ntype, everyone in chance.items():
            for first in range(0, len(everyone), _BLOCK):
                p = everyone[first : first + _BLOCK]
                missed = np.zeros(len(p), np.float32)
                for e, rows in topology:
                    if e[0] == ntype:
                        drawn = held[e[2]], fanout[e], replace
                        _spread(rows.indptr, rows.src, *drawn, missed, first)
                _include(p, missed)
    return chance


def choose_for_host(
    scores: Scores, bounds: Mapping[str, np.ndarray], host: Host, share: float
) -> Scores:
    """Call `choose` with the sum of the scores of a host's ranks. Collective; the result is the
    same on all ranks of the host, in shared memory."""
    chosen = {}
    for ntype, score in scores.items():
        together = {ntype: host.add_up(score)}
        nothing = np.empty(0, np.int64)
        best = choose(together, bounds, host.ranks, share)[ntype] if host.leads else nothing
        chosen[ntype] = host.publish(best)
    return chosen


def choose(
    scores: Scores, bounds: Mapping[str, np.ndarray], ranks: Sequence[int], share: float
) -> Scores:
    """Return the remote nodes with the highest scores, in id order.

    Args:
        ranks: ranks whose nodes are not remote.
        share: of the remote nodes of each type, 0 to 1; nodes with score 0 are never chosen, and
            of equal scores the first ids.

    Returns:
        node type → int64 ids.
    """
    chosen = {}
    for ntype, score in scores.items():
        others = [rank for rank in range(len(bounds[ntype]) - 1) if rank not in ranks]
        spans = np.array([bounds[ntype][rank : rank + 2] for rank in others], np.int64)
        away = sum(int(stop - start) for start, stop in spans)
        reached = sum(int(np.count_nonzero(score[start:stop])) for start, stop in spans)
        count = min(int(share * away), reached)
        chosen[ntype] = _highest(score, spans, count) if count else np.empty(0, np.int64)
    return chosen


def choose_near(
    scores: Scores,
    bounds: Mapping[str, np.ndarray],
    ranks: Sequence[int],
    cached: Mapping[str, np.ndarray],
    share: float,
) -> Scores:
    """Return the nodes with the highest scores among those with rows on a host, in id order.

    Args:
        ranks: of the host; cached: node type → int64 ids of remote nodes that it caches.
        share: of the host's rows of each type, 0 to 1.
    """
    chosen = {}
    for ntype, score in scores.items():
        here = np.zeros(len(score), bool)
        for rank in ranks:
            here[bounds[ntype][rank] : bounds[ntype][rank + 1]] = True
        here[cached.get(ntype, np.empty(0, np.int64))] = True
        part = share * (np.count_nonzero(here) / max(1, len(here)))
        kept = {ntype: np.where(here, score, np.float32(0))}
        chosen[ntype] = choose(kept, bounds, (), part)[ntype]
    return chosen


def _highest(score: np.ndarray, spans: np.ndarray, count: int) -> np.ndarray:
    """Return the ascending indices of the ``count`` highest scores within ``spans [K, 2]``, the
    first of equal ones. Memory: the result, and a few bytes for each node of a block of 2²⁶."""
    starts = [(first, stop) for start, stop in spans for first in range(start, stop, _BLOCK)]
    blocks = [(first, score[first : min(first + _BLOCK, stop)]) for first, stop in starts]
    top = np.empty(0, np.float32)
    for _, block in blocks:
        top = np.append(top, block)
        top = np.partition(top, -min(count, len(top)))[-count:]
    limit = top.min()
    left = count - np.count_nonzero(top > limit)
    chosen = []
    for first, block in blocks:
        equal = np.flatnonzero(block == limit)[:left]
        left -= len(equal)
        chosen.append(np.sort(np.append(np.flatnonzero(block > limit), equal)) + first)
    return np.concatenate(chosen)


@njit(**COMPILE)
def _include(chance, log_missed):  # type: ignore[no-untyped-def]
    """Add the probabilities of being sampled to ``chance``: see `_spread`."""
    for i in range(chance.shape[0]):
        # 1 - x loses an x near 1
        chance[i] -= (np.float32(1) - chance[i]) * np.float32(np.expm1(log_missed[i]))


@njit(**COMPILE)
def _spread(  # type: ignore[no-untyped-def]
    indptr, src, chance, fanout, replace, log_missed, first
):
    """Compute one hop of vertex-inclusion probabilities (SALIENT++, sec. 3).

    Args:
        indptr: ``[R+1]``; src: ids of the sources.
        chance: float32 ``[R]``, that each row's node is in the frontier.
        fanout: neighbours sampled per row, -1 = all.
        log_missed: float32, by source id from ``first`` on; the log of the probability that no row
            samples it is added.
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
        # probabilities below float32's range count as its smallest
        missed = np.float32(min(np.log1p(-min(chance[row] * drawn, 0.999999)), -_TINY))
        for j in range(indptr[row], indptr[row + 1]):
            place = src[j] - first
            if 0 <= place < log_missed.shape[0]:
                log_missed[place] += missed
