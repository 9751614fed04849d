"""Keyed randomness, a function of a number's purpose, and `digest` of files.

All samples are ``mix(key(seed, epoch, step, …), node, draw)``, the same on any rank, thread or
topology, in a run that is resumed or has another number of workers. ``mix`` is the finaliser of
SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# as uint64 they are constants to numba, too
_ADD, _BY, _AND_BY, _30, _27, _31 = np.array([GOLDEN, FIRST, SECOND, 30, 27, 31], np.uint64)


def mix(value: UInt64Array) -> UInt64Array:
    """Return the SplitMix64 finaliser of uint64 numbers. Numba compiles this very function; arrays
    do not need numba."""
    value = value + _ADD
    value = (value ^ (value >> _30)) * _BY
    value = (value ^ (value >> _27)) * _AND_BY
    return value ^ (value >> _31)


def uniform(value: UInt64Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Map uint64 numbers to float64 in [0, 1)."""
    return (value >> np.uint64(11)) * np.float64(2.0**-53)


def mix_int(value: int) -> int:
    """Return `mix` of one integer below 2⁶⁴, ten times as fast as with an array of one."""
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * FIRST) & _MASK
    value = ((value ^ (value >> 27)) * SECOND) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key of any number of integers, whose order matters."""
    key = 0
    for part in parts:
        key = mix_int(key ^ mix_int(part & _MASK))
    return key


def digest(stream: Any) -> str:
    """Return SHA-256, in hex, of the rest of a binary stream."""
    return hashlib.file_digest(stream, "sha256").hexdigest()
