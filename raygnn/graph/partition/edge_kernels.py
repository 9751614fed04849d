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


# --- for `raygnn.graph.partition.stream`


@njit(**_COMPILE)
def count_degrees(src, dst, degrees, in_degrees):  # type: ignore[no-untyped-def]
    """Count each edge in ``in_degrees``, and at both ends in ``degrees`` unless it is a loop."""
    for i in range(len(src)):
        in_degrees[dst[i]] += 1
        if src[i] != dst[i]:
            degrees[src[i]] += 1
            degrees[dst[i]] += 1


@njit(**_COMPILE)
def pairs_by_range(src, dst, range_of, ranges):  # type: ignore[no-untyped-def]
    """Return each edge as two pairs of a node and its neighbour, ``[pairs, 2]``, sorted by the
    ranges of the nodes, and the number of pairs of each range. Loops are skipped."""
    counts = np.zeros(ranges, np.int64)
    for i in range(len(src)):
        if src[i] != dst[i]:
            counts[range_of[src[i]]] += 1
            counts[range_of[dst[i]]] += 1
    cursor = np.cumsum(counts) - counts
    pairs = np.empty((counts.sum(), 2), src.dtype)
    for i in range(len(src)):
        a, b = src[i], dst[i]
        if a != b:
            at = cursor[range_of[a]]
            cursor[range_of[a]] += 1
            pairs[at, 0], pairs[at, 1] = a, b
            at = cursor[range_of[b]]
            cursor[range_of[b]] += 1
            pairs[at, 0], pairs[at, 1] = b, a
    return pairs, counts


@njit(**_COMPILE)
def put_neighbours(pairs, first, starts, degrees, lengths, seen, ids):  # type: ignore[no-untyped-def]
    """Put neighbours into the lists of the nodes from ``first`` on; ``seen`` counts those of each.
    A list shorter than the degree gets neighbours from all of the stream. Return False if there
    are more than ``degrees``, or of other nodes."""
    for i in range(0, len(pairs), 2):
        node = pairs[i]
        row = node - first
        if row < 0 or row >= len(seen) or seen[row] == degrees[node]:
            return False
        at = np.uint64(seen[row]) * np.uint64(lengths[node]) // np.uint64(degrees[node])
        ids[starts[row] + np.int64(at)] = pairs[i + 1]
        seen[row] += 1
    return True


@njit(**_COMPILE)
def _count_labels(neighbours, labels, slots, names, counts):  # type: ignore[no-untyped-def]
    """Count the neighbours' labels: ``names`` and ``counts``, in the order of the list. Return the
    number of labels. ``slots`` is a hash table of positions in ``names``, all -1."""
    size = 2
    while size < 2 * len(neighbours):
        size *= 2
    num = 0
    for neighbour in neighbours:
        label = labels[neighbour]
        slot = np.int64(label) * 0x9E3779B1 & (size - 1)
        while slots[slot] >= 0 and names[slots[slot]] != label:
            slot = (slot + 1) & (size - 1)
        if slots[slot] < 0:
            slots[slot], names[num], counts[num] = num, label, 0
            num += 1
        counts[slots[slot]] += 1
    slots[:size] = -1
    return num


@njit(**_COMPILE)
def _tables(lengths, dtype):  # type: ignore[no-untyped-def]
    """Allocate the hash table, names and counts of `_count_labels`, for lists of these lengths."""
    longest = np.int64(max(lengths.max(), 1))
    return np.full(4 * longest, -1, np.int32), np.empty(longest, dtype), np.empty(longest, np.int64)


@njit(**_COMPILE)
def join_clusters(first, lengths, ids, weights, cap, labels, sizes, favourite):  # type: ignore[no-untyped-def]
    """Let each node join the cluster of most of its neighbours among those below ``cap``;
    ``favourite[node]`` is the cluster without that limit."""
    slots, names, counts = _tables(lengths, labels.dtype)
    end = np.int64(0)
    for row in range(len(lengths)):
        begin, end, node = end, end + np.int64(lengths[row]), first + row
        own, num = labels[node], _count_labels(ids[begin:end], labels, slots, names, counts)
        most = 0
        for i in range(num):
            if names[i] == own:
                most = counts[i]
        best, like, likes = own, own, most
        for i in range(num):
            if counts[i] > likes:
                like, likes = names[i], counts[i]
            if counts[i] > most and sizes[names[i]] + weights[node] <= cap:
                best, most = names[i], counts[i]
        favourite[node] = like
        if best != own:
            sizes[own] -= weights[node]
            sizes[best] += weights[node]
            labels[node] = best


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
def keep_crossing(first, lengths, ids, number, degrees, clusters, kept, keys, at, limit):  # type: ignore[no-untyped-def]
    """Append edges between clusters whose key is at most ``limit``, from ``at`` on, and halve the
    limit whenever they are too many.

    The key is the hash of the neighbour's number, ``number`` for the first one. An edge is taken
    from the shorter of its two lists, which is complete. Return the end of the kept edges and the
    limit.
    """
    end = np.int64(0)
    for row in range(len(lengths)):
        begin, end, node = end, end + np.int64(lengths[row]), first + row
        for i in range(begin, end):
            other = ids[i]
            a, b = clusters[node], clusters[other]
            if a == b or degrees[node] > degrees[other]:
                continue
            key = np.uint32(_mix(uint64(number + i)) >> uint64(32))
            if key > limit or (degrees[node] == degrees[other] and node > other):
                continue
            while at == len(keys):
                limit >>= np.uint32(1)
                at = 0
                for k in range(len(keys)):
                    if keys[k] <= limit:
                        kept[0, at], kept[1, at], keys[at] = kept[0, k], kept[1, k], keys[k]
                        at += 1
            if key <= limit:
                kept[0, at], kept[1, at], keys[at] = a, b, key
                at += 1
    return at, limit


@njit(**_COMPILE)
def _overload(part, group, sizes, loads, means, mean_load):  # type: ignore[no-untyped-def]
    """Return by which share a part exceeds the mean of a group's nodes or of in-edges."""
    return max(sizes[part, group] / means[group] - 1, loads[part] / mean_load - 1, 0.0)


@njit(**_COMPILE)
def move_nodes(first, lengths, ids, in_degrees, limits, labels, sizes, loads):  # type: ignore[no-untyped-def]
    """Let each node move to the part of most of its neighbours within the limits; a part's excess
    over the mean, times the length of the list, is subtracted from its count. ``limits``: see
    `raygnn.graph.partition.stream.Balance`. Return the number of nodes that moved."""
    groups, size_limits, load_limit, means, mean_load = limits
    slots, names, counts = _tables(lengths, labels.dtype)
    end, moved = np.int64(0), 0
    for row in range(len(lengths)):
        begin, end, node = end, end + np.int64(lengths[row]), first + row
        own, group, load = labels[node], groups[node], np.int64(in_degrees[node])
        num = _count_labels(ids[begin:end], labels, slots, names, counts)
        length = np.float64(lengths[row])
        best, most = own, -length * _overload(own, group, sizes, loads, means, mean_load)
        for i in range(num):
            if names[i] == own:
                most += counts[i]
        for i in range(num):
            part = names[i]
            full = sizes[part, group] >= size_limits[group] or loads[part] + load > load_limit
            if part != own and not full:
                crowded = _overload(part, group, sizes, loads, means, mean_load)
                score = counts[i] - length * crowded
                if score > most:
                    best, most = part, score
        if best != own:
            sizes[own, group] -= 1
            sizes[best, group] += 1
            loads[own] -= load
            loads[best] += load
            labels[node] = best
            moved += 1
    return moved


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
