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
    """Sort stably by counting: starts of the groups, ``[groups+1]``, and positions by group."""
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


# --- sketches, for `raygnn.graph.partition.stream`
#
# A node's *sketch* counts the labels of its neighbours in few bytes. Slot 0 counts the node's own
# label exactly, the other slots the most frequent others (Misra & Gries, "Finding repeated
# elements", 1982): a label of more than 1 / slots of the neighbours is always among them, and all
# counts are exact while there are no more labels than slots.

_FULL = np.uint16(np.iinfo(np.uint16).max)


@njit(**_COMPILE)
def count_degrees(src, dst, degrees, in_degrees):  # type: ignore[no-untyped-def]
    """Count each edge in ``in_degrees``, and at both ends in ``degrees`` unless it is a loop."""
    for i in range(len(src)):
        in_degrees[dst[i]] += 1
        if src[i] != dst[i]:
            degrees[src[i]] += 1
            degrees[dst[i]] += 1


@njit(**_COMPILE)
def first_turns(degrees, seed, left):  # type: ignore[no-untyped-def]
    """Set ``left``, the number of edges before a node's first decision: half to all of its own."""
    for node in range(len(degrees)):
        late = _mix(uint64(seed) ^ uint64(node)) % uint64(degrees[node] // 2 + 1)
        left[node] = degrees[node] - late


@njit(**_COMPILE)
def _see(node, label, names, counts, left, done, at):  # type: ignore[no-untyped-def]
    """Count a neighbour's label; add the node to ``done`` once it has seen all of its edges."""
    left[node] -= 1
    if left[node] == 0:
        done[at] = node
        at += 1
    slots = names.shape[1]
    slot, free = 0, -1
    while slot < slots and (names[node, slot] != label or (slot and not counts[node, slot])):
        if slot and not counts[node, slot]:
            free = slot
        slot += 1
    if slot == slots and free < 0:
        for other in range(1, slots):
            counts[node, other] -= 1
        return at
    if slot == slots:
        slot = free
        names[node, slot] = label
    counts[node, slot] += 1
    if counts[node, slot] == _FULL:
        for other in range(slots):
            counts[node, other] >>= 1
    return at


@njit(**_COMPILE)
def see_edges(src, dst, labels, names, counts, left, share, shares, done):  # type: ignore[no-untyped-def]
    """Show the edges to their ends in one of ``shares`` shares of the nodes. Return the number of
    nodes in ``done``. A node's sketch depends only on the order of its edges, not on the shares."""
    at = 0
    for i in range(len(src)):
        a, b = src[i], dst[i]
        if a == b:
            continue
        if (a >> 4) % shares == share:
            at = _see(a, labels[b], names, counts, left, done, at)
        if (b >> 4) % shares == share:
            at = _see(b, labels[a], names, counts, left, done, at)
    return at


@njit(**_COMPILE)
def _restart(node, label, degrees, labels, names, counts, left):  # type: ignore[no-untyped-def]
    labels[node] = label
    left[node] = degrees[node]
    names[node, 0] = label
    counts[node, :] = 0


@njit(**_COMPILE)
def join_clusters(nodes, degrees, weights, cap, labels, sizes, favourite, names, counts, left):  # type: ignore[no-untyped-def]
    """Let each node join the cluster of most of its neighbours among those below ``cap``;
    ``favourite[node]`` is the cluster without that limit."""
    for node in nodes:
        own = labels[node]
        best, most, like, likes = own, counts[node, 0], own, counts[node, 0]
        for slot in range(1, names.shape[1]):
            label, count = names[node, slot], counts[node, slot]
            if count > likes:
                like, likes = label, count
            if count > most and sizes[label] + weights[node] <= cap:
                best, most = label, count
        favourite[node] = like
        if best != own:
            sizes[own] -= weights[node]
            sizes[best] += weights[node]
        _restart(node, best, degrees, labels, names, counts, left)


@njit(**_COMPILE)
def pack(sizes, cap):  # type: ignore[no-untyped-def]
    """Return the bin of each cluster, in order; a cluster that does not fit opens the next bin."""
    bins = np.zeros(len(sizes), np.int64)
    current, filled = 0, 0
    for i in range(len(sizes)):
        if filled and filled + sizes[i] > cap:
            current, filled = current + 1, 0
        bins[i] = current
        filled += sizes[i]
    return bins


@njit(**_COMPILE)
def keep_crossing(src, dst, first, begin, threshold, clusters, kept, keys, at):  # type: ignore[no-untyped-def]
    """Append edges between clusters whose key is at most ``threshold``, from ``at`` on.

    The key of an edge is the hash of its number; ``first``: number of the block's first edge.
    Returns (end of the kept edges, edges of the block read), not all of which fit if it is full.
    """
    for i in range(begin, len(src)):
        a, b = clusters[src[i]], clusters[dst[i]]
        if a != b:
            key = np.uint32(_mix(uint64(first + i)) >> uint64(32))
            if key <= threshold:
                if at == len(keys):
                    return at, i
                kept[0, at], kept[1, at], keys[at] = a, b, key
                at += 1
    return at, len(src)


@njit(**_COMPILE)
def _overload(part, group, sizes, loads, means, mean_load):  # type: ignore[no-untyped-def]
    """Return by which share a part exceeds the mean of a group's nodes or of in-edges."""
    return max(sizes[part, group] / means[group] - 1, loads[part] / mean_load - 1, 0.0)


@njit(**_COMPILE)
def move_nodes(nodes, degrees, in_degrees, limits, labels, sizes, loads, names, counts, left):  # type: ignore[no-untyped-def]
    """Let each node move to the part of most of its neighbours within the limits; a part's excess
    over the mean, times the node's degree, is subtracted from its count. ``limits``: see
    `raygnn.graph.partition.stream.Balance`."""
    groups, size_limits, load_limit, means, mean_load = limits
    for node in nodes:
        own, group, load = labels[node], groups[node], np.int64(in_degrees[node])
        degree = np.float64(degrees[node])
        crowded = _overload(own, group, sizes, loads, means, mean_load)
        best, most = own, counts[node, 0] - degree * crowded
        for slot in range(1, names.shape[1]):
            part, count = names[node, slot], counts[node, slot]
            full = sizes[part, group] >= size_limits[group] or loads[part] + load > load_limit
            if count > 0 and not full:
                score = count - degree * _overload(part, group, sizes, loads, means, mean_load)
                if score > most:
                    best, most = part, score
        if best != own:
            sizes[own, group] -= 1
            sizes[best, group] += 1
            loads[own] -= load
            loads[best] += load
        _restart(node, best, degrees, labels, names, counts, left)


@njit(**_COMPILE)
def give_away(nodes, groups, in_degrees, size_limits, labels, sizes, loads):  # type: ignore[no-untyped-def]
    """Move nodes of parts with too many of their group to the least loaded part within limits."""
    for node in nodes:
        own, group, load = labels[node], groups[node], np.int64(in_degrees[node])
        if sizes[own, group] <= size_limits[group]:
            continue
        best = own
        for part in range(len(loads)):
            room = sizes[part, group] < size_limits[group]
            if room and (best == own or loads[part] < loads[best]):
                best = part
        sizes[own, group] -= 1
        sizes[best, group] += 1
        loads[own] -= load
        loads[best] += load
        labels[node] = best
