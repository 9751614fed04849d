"""Splits drawn at random: a function of the seed and the node's number, of nothing else."""

from __future__ import annotations

import numpy as np

from raygnn.graph.tables.columns import Array
from raygnn.graph.tables.spec import RandomSplit
from raygnn.util.hashing import mix, uniform

_PIECE = 1 << 20


def draw(shares: RandomSplit, num: int) -> Array:
    """Which split each node falls into: int8 ``[num]``, 0 train, 1 val, 2 test, -1 none.

    A node's draw does not change when others come or go after it.
    """
    found = np.full(num, -1, np.int8)
    bounds = [shares.train, shares.train + shares.val]
    bounds.append(1.0 if shares.test is None else min(bounds[1] + shares.test, 1.0))
    key = mix(np.array([shares.seed], np.uint64))
    for start in range(0, num, _PIECE):
        numbers = np.arange(start, min(start + _PIECE, num), dtype=np.uint64)
        drawn = uniform(mix(numbers + key))
        piece = np.searchsorted(bounds, drawn, side="right").astype(np.int8)
        found[start : start + len(piece)] = np.where(piece < 3, piece, -1)
    return found
