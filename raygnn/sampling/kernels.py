"""The compiled inner loops of sampling (numba, without the GIL, compiled once and cached).

Ids are int64. ``indptr``/``src`` are the in-edge lists (CSC) of the rows at hand.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

ALL = -1  # a fanout that takes every neighbour


@njit(inline="always")
def _mix(value):  # type: ignore[no-untyped-def]
    value = uint64(value) + uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> uint64(27))) * uint64(0x94D049BB133111EB)
    return value ^ (value >> uint64(31))


@njit(inline="always")
def _below(random, bound):  # type: ignore[no-untyped-def]
    """A number in [0, bound) from 64 random bits (bound < 2³², bias below 2⁻³²)."""
    return np.int64(((random >> uint64(32)) * uint64(bound)) >> uint64(32))


@njit(**_COMPILE)
def sample_rows(indptr, src, rows, node_keys, fanout, replace, key):  # type: ignore[no-untyped-def]
    """Draw in-neighbours of ``rows``.

    Without replacement by Floyd's method (Bentley & Floyd, "A sample of brilliance", 1987), so
    the cost is that of the sample, not of the list. The draw for a row depends only on ``key``
    and that row's ``node_keys`` entry.

    Args:
        indptr: ``[R+1]``; src: ``[E]`` global ids of sources.
        rows: ``[B]`` row numbers in the CSC; a row that is negative has no edges.
        node_keys: ``[B]`` what identifies each node (its original id).
        fanout: neighbours per row, or -1 for all.
        replace: draw with replacement (a row without edges still gives none).
        key: uint64, of (seed, epoch, step, hop, edge type).

    Returns:
        ``(out_indptr [B+1], neighbours)``: global source ids, row after row.
    """
    n = rows.shape[0]
    out_indptr = np.empty(n + 1, np.int64)
    out_indptr[0] = 0
    for i in range(n):
        row = rows[i]
        degree = np.int64(0) if row < 0 else indptr[row + 1] - indptr[row]
        if fanout >= 0 and (degree > fanout or (replace and degree > 0)):
            degree = np.int64(fanout)
        out_indptr[i + 1] = out_indptr[i] + degree
    out = np.empty(out_indptr[n], np.int64)
    for i in range(n):
        row = rows[i]
        if row < 0:
            continue
        start = indptr[row]
        degree = indptr[row + 1] - start
        at = out_indptr[i]
        take = out_indptr[i + 1] - at
        if fanout < 0 or (degree <= fanout and not replace):
            for j in range(degree):
                out[at + j] = src[start + j]
            continue
        state = _mix(uint64(key) ^ _mix(uint64(node_keys[i])))
        if replace:
            for j in range(take):
                out[at + j] = src[start + _below(_mix(state + uint64(j)), degree)]
            continue
        # out[at:at+j] holds the positions drawn so far; they become ids at the end
        for j in range(take):
            last = degree - take + j
            pick = _below(_mix(state + uint64(j)), last + 1)
            for seen in range(j):
                if out[at + seen] == pick:
                    pick = last
                    break
            out[at + j] = pick
        for j in range(take):
            out[at + j] = src[start + out[at + j]]
    return out_indptr, out


@njit(**_COMPILE)
def relabel(known, ids):  # type: ignore[no-untyped-def]
    """Number ``ids`` compactly, after ``known``.

    Args:
        known: ``[K]`` distinct ids, which keep the numbers ``0 … K-1``.
        ids: ``[M]``, any ids.

    Returns:
        ``(nodes, local)``: ``nodes`` are ``known`` followed by the ids of ``ids`` not in it, in
        order of first appearance; ``nodes[local] == ids``.
    """
    count = known.shape[0] + ids.shape[0]
    size = 16
    while size < 2 * count:
        size *= 2
    mask = uint64(size - 1)
    slots = np.full(size, -1, np.int64)
    nodes = np.empty(count, np.int64)
    local = np.empty(ids.shape[0], np.int64)
    total = np.int64(0)
    for i in range(known.shape[0]):
        at = _mix(known[i]) & mask
        while slots[at] >= 0:
            at = (at + uint64(1)) & mask
        slots[at] = total
        nodes[total] = known[i]
        total += 1
    for i in range(ids.shape[0]):
        node = ids[i]
        at = _mix(node) & mask
        while slots[at] >= 0 and nodes[slots[at]] != node:
            at = (at + uint64(1)) & mask
        if slots[at] < 0:
            slots[at] = total
            nodes[total] = node
            total += 1
        local[i] = slots[at]
    return nodes[:total].copy(), local


@njit(**_COMPILE)
def ungroup_rows(order, degrees, values):  # type: ignore[no-untyped-def]
    """Put lists that arrived grouped by rank back into the order in which they were asked for.

    Args:
        order: ``[B]``, the asked-for position of each arrived list.
        degrees: ``[B]``, lengths in order of arrival.
        values: ``[sum(degrees)]``, the lists in order of arrival.

    Returns:
        ``(indptr [B+1], values)`` in the order of asking.
    """
    n = order.shape[0]
    indptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        indptr[order[i] + 1] = degrees[i]
    for i in range(n):
        indptr[i + 1] += indptr[i]
    out = np.empty(values.shape[0], np.int64)
    at = 0
    for i in range(n):
        to = indptr[order[i]]
        for j in range(degrees[i]):
            out[to + j] = values[at + j]
        at += degrees[i]
    return indptr, out
