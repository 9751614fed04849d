"""Keyed randomness: a random number is a function of what it is for, not of who asks for it.

Everything that is drawn while sampling is ``mix(key(seed, epoch, step, …), node, draw)``. So any
rank, thread or topology that asks the same question gets the same answer, and a run that is
resumed or has another number of workers draws what it would have drawn. ``mix`` is the finaliser
of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """The SplitMix64 finaliser on one unsigned 64-bit integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """One 64-bit key from any number of integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & _MASK))
    return key
