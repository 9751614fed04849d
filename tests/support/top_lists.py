"""Metrics per source of plain Python, one source at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def by_hand(ranks: Sequence[float], k: int) -> dict[str, float]:
    """Compute the metrics of one source from the ranks of its true targets."""
    ordered, count = sorted(ranks), len(ranks)
    found = [rank for rank in ordered if rank <= k]
    ideal = sum(1 / math.log2(1 + rank) for rank in range(1, min(count, k) + 1))
    # a target's place among the source's own, with ties as in ranks
    places = [
        (sum(o < rank for o in ranks) + 1 + sum(o <= rank for o in ranks)) / 2 for rank in found
    ]
    return {
        f"recall@{k}": len(found) / count,
        f"ndcg@{k}": sum(1 / math.log2(1 + rank) for rank in found) / ideal,
        f"map@{k}": sum(place / rank for place, rank in zip(places, found)) / min(count, k),
        f"precision@{k}": len(found) / k,
        f"hit_rate@{k}": float(bool(found)),
    }


def rank_of(scores: np.ndarray, target: int, left_out: set[int]) -> float:
    """Return the mean of the best and the worst rank of a target."""
    others = [scores[i] for i in range(len(scores)) if i != target and i not in left_out]
    best = 1 + sum(other > scores[target] for other in others)
    return best + sum(other == scores[target] for other in others) / 2
