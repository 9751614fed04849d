"""Keyed randomness: a random number is a function of what it is for, not of who asks for it.

Everything that is drawn while sampling is ``mix(key(seed, epoch, step, …), node, draw)``. So any
rank, thread or topology that asks the same question gets the same answer, and a run that is
resumed or has another number of workers draws what it would have drawn. ``mix`` is the finaliser
of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).

And `digest`, of what files hold.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_PIECE = 1 << 20  # bytes
# as numpy's words they are constants to numba, too, and cost it nothing to compile
_ADD, _BY, _AND_BY, _30, _27, _31 = np.array([GOLDEN, FIRST, SECOND, 30, 27, 31], np.uint64)


def mix(value: UInt64Array) -> UInt64Array:
    """The SplitMix64 finaliser on uint64 numbers.

    Modules of compiled loops compile this very function; it loads no numba for who has arrays.
    """
    value = value + _ADD
    value = (value ^ (value >> _30)) * _BY
    value = (value ^ (value >> _27)) * _AND_BY
    return value ^ (value >> _31)


def uniform(value: UInt64Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """uint64 numbers as float64 in [0, 1)."""
    return (value >> np.uint64(11)) * 2.0**-53


def mix_int(value: int) -> int:
    """`mix` of one Python integer below 2⁶⁴; an array of one would cost ten times as much."""
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * FIRST) & _MASK
    value = ((value ^ (value >> 27)) * SECOND) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """One 64-bit key from any number of integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix_int(key ^ mix_int(part & _MASK))
    return key


def digest(stream: Any) -> str:
    """SHA-256, in hex, of what is left of a binary stream."""
    sha = hashlib.sha256()
    while piece := stream.read(_PIECE):
        sha.update(piece)
    return sha.hexdigest()
