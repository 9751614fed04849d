"""Keyed randomness over arrays: a number is a function of what it is for."""

from __future__ import annotations

import numpy as np

from raygnn.graph.arrays import Array


def mix(value: Array) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, 2014), on uint64 numbers."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def uniform(value: Array) -> Array:
    """uint64 numbers as float64 in [0, 1)."""
    return (value >> np.uint64(11)) * 2.0**-53
