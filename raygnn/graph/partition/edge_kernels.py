"""Compiled passes over edge lists (numba, GIL released, compiled once and cached).

An edge list may be in any order; *lists* are its in-edge lists: ``indptr`` ``[rows+1]``, and
``order`` ``[E]``, the edges' positions in the input. An empty ``order`` means that the input is
sorted already, as most are, which saves the memory for it and a random access.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from raygnn.graph.arrays import IntArray, index_type
from raygnn.util import hashing

IndexArray = np.ndarray[Any, Any]  # int32 if that is wide enough, else int64

_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

_mix = njit(inline="always")(hashing.mix)


def group(keys: IndexArray, groups: int) -> tuple[IntArray, IndexArray]:
    """Sort stably by counting: starts of the groups, int64 ``[groups+1]``, and positions by
    group."""
    starts = starts_of(keys, groups)
    order = np.empty(len(keys), dtype=index_type(len(keys)))
    _scatter(keys, starts[:-1].copy(), order)
    return starts, order


def in_lists(dst: IndexArray, num: int) -> tuple[IntArray, IndexArray]:
    """Build the in-edge lists of an edge list: see the module's docstring."""
    if rising(dst):
        return starts_of(dst, num), np.empty(0, dtype=index_type(len(dst)))
    return group(dst, num)


def starts_of(keys: IndexArray, groups: int) -> IntArray:
    """Return the start of each key's run in the sorted keys, int64 ``[groups+1]``."""
    starts = np.zeros(groups + 1, dtype=np.int64)
    add_counts(keys, starts)
    return np.cumsum(starts, out=starts)


@njit(**_COMPILE)
def rising(keys):  # type: ignore[no-untyped-def]
    """Return True if the keys are sorted."""
    for i in range(1, len(keys)):  # noqa: SIM110 (slower as a generator)
        if keys[i] < keys[i - 1]:
            return False
    return True


@njit(**_COMPILE)
def add_counts(keys, starts):  # type: ignore[no-untyped-def]
    """Count each key at ``starts[key + 1]``."""
    for key in keys:
        starts[key + 1] += 1


@njit(**_COMPILE)
def _scatter(keys, cursor, order):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        order[cursor[keys[i]]] = i
        cursor[keys[i]] += 1


@njit(**_COMPILE)
def is_symmetric(indptr, ids):  # type: ignore[no-untyped-def]
    """Return True if lists are sorted, and the graph symmetric without loops and multiple edges.

    Each edge has its reverse if the sums of hashes of both directions agree; they agree otherwise
    with probability 2⁻⁶⁴. Searching for reverses would take a random access per edge.
    """
    total = uint64(0)
    for row in range(len(indptr) - 1):
        last = np.int64(-1)
        for k in range(indptr[row], indptr[row + 1]):
            other = np.int64(ids[k])
            if other == row or other <= last:
                return False
            last = other
            if row < other:
                total += _mix(_mix(uint64(row)) + uint64(other))
            else:
                total -= _mix(_mix(uint64(other)) + uint64(row))
    return total == uint64(0)


@njit(**_COMPILE)
def count_ends(src, dst, src_first, dst_first, starts):  # type: ignore[no-untyped-def]
    """Add each edge to ``starts[node + 1]`` of both its ends."""
    for i in range(len(src)):
        starts[src[i] + src_first + 1] += 1
        starts[dst[i] + dst_first + 1] += 1


@njit(**_COMPILE)
def put_ends(src, dst, src_first, dst_first, cursor, ids):  # type: ignore[no-untyped-def]
    """Put each end of each edge into the list of the other one."""
    for i in range(len(src)):
        a, b = src[i] + src_first, dst[i] + dst_first
        ids[cursor[a]] = b
        cursor[a] += 1
        ids[cursor[b]] = a
        cursor[b] += 1


@njit(**_COMPILE)
def sort_lists(indptr, ids, out):  # type: ignore[no-untyped-def]
    """Sort each list of a symmetric graph by transposing the graph, which yields the same graph."""
    cursor = indptr[:-1].copy()
    for row in range(len(indptr) - 1):
        for k in range(indptr[row], indptr[row + 1]):
            out[cursor[ids[k]]] = row
            cursor[ids[k]] += 1


@njit(**_COMPILE)
def drop_repeats(indptr, ids):  # type: ignore[no-untyped-def]
    """Drop loops and repeated ids from sorted lists, in place; ``ids`` is valid up to the end of
    the new ``indptr``."""
    kept, begin = 0, 0
    for row in range(len(indptr) - 1):
        end = indptr[row + 1]
        last = row
        for k in range(begin, end):
            if ids[k] != row and ids[k] != last:
                last = ids[k]
                ids[kept] = last
                kept += 1
        begin = end
        indptr[row + 1] = kept
