"""Splits drawn at random: a function of the seed and the node's number, of nothing else."""

from __future__ import annotations

import numpy as np

from raygnn.graph.tables.columns import Array
from raygnn.graph.tables.spec import RandomSplit

_PIECE = 1 << 20


def draw(shares: RandomSplit, num: int) -> Array:
    """Which split each node falls into: int8 ``[num]``, 0 train, 1 val, 2 test, -1 none.

    A node's draw does not change when others come or go after it.
    """
    found = np.full(num, -1, np.int8)
    bounds = [shares.train, shares.train + shares.val]
    bounds.append(1.0 if shares.test is None else min(bounds[1] + shares.test, 1.0))
    key = _mix(np.array([shares.seed], np.uint64))
    for start in range(0, num, _PIECE):
        numbers = np.arange(start, min(start + _PIECE, num), dtype=np.uint64)
        drawn = (_mix(numbers + key) >> np.uint64(11)) * 2.0**-53
        piece = np.searchsorted(bounds, drawn, side="right").astype(np.int8)
        found[start : start + len(piece)] = np.where(piece < 3, piece, -1)
    return found


def _mix(value: Array) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
