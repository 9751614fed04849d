"""Compiled inner loops of sampling (numba, without the GIL, compiled once and cached).

``indptr``/``src`` are in-edge lists (CSC). Ids are int64; stored ids are int32 if they fit.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types, uint64
from numba.extending import intrinsic

from raygnn.util import hashing

COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

_AHEAD = 32  # rows between asking for one and reading it

mix = njit(inline="always")(hashing.mix)  # of a uint64


@njit(inline="always")
def below(random, bound):  # type: ignore[no-untyped-def]
    """Return a number in [0, bound) from 64 random bits (bound < 2³², bias below 2⁻³²)."""
    return np.int64(((random >> uint64(32)) * uint64(bound)) >> uint64(32))


@intrinsic
def prefetch(context, array, index):  # type: ignore[no-untyped-def]
    """Prefetch the cache line of ``array[index]`` (contiguous)."""

    def build(context, builder, signature, values):  # type: ignore[no-untyped-def]
        whole = context.make_array(signature.args[0])(context, builder, values[0])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = builder.bitcast(builder.gep(whole.data, [values[1]]), byte)
        builder.call(call, [place, flag(0), flag(3), flag(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, index), build


@njit(**COMPILE)
def permuted(positions, size, half, keys):  # type: ignore[no-untyped-def]
    """Apply a Feistel network of ``2 · half`` bits, one round for each of ``keys``, until the image
    is below ``size``: see `raygnn.sampling.plan.permute`."""
    mask, shift = (uint64(1) << uint64(half)) - uint64(1), uint64(half)
    out = np.empty(positions.shape[0], np.int64)
    for i in range(positions.shape[0]):
        block = uint64(positions[i])
        while True:
            left, right = block >> shift, block & mask
            for key in keys:
                left, right = right, left ^ (mix(right ^ key) & mask)
            block = (left << shift) | right
            if block < uint64(size):
                break
        out[i] = block
    return out


@njit(**COMPILE)
def shuffled(size, key):  # type: ignore[no-untyped-def]
    """Return ``0 … size-1`` shuffled (Fisher & Yates)."""
    out = np.arange(size)
    for i in range(size - 1, 0, -1):
        j = below(mix(key + uint64(i)), i + 1)
        out[i], out[j] = out[j], out[i]
    return out


@njit(**COMPILE)
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
        at = mix(uint64(known[i])) & mask
        while slots[at] >= 0:
            at = (at + uint64(1)) & mask
        slots[at] = total
        nodes[total] = known[i]
        total += 1
    for i in range(ids.shape[0]):
        node = ids[i]
        at = mix(uint64(node)) & mask
        while slots[at] >= 0 and nodes[slots[at]] != node:
            at = (at + uint64(1)) & mask
        if slots[at] < 0:
            slots[at] = total
            nodes[total] = node
            total += 1
        local[i] = slots[at]
    return nodes[:total].copy(), local


@njit(inline="always")
def find(keys, key):  # type: ignore[no-untyped-def]
    """Return the place of a key in a table of `hash_slots`; a free one if it has none."""
    mask = uint64(keys.shape[0] - 1)
    at = mix(uint64(key)) & mask
    while keys[at] >= 0 and keys[at] != key:
        at = (at + uint64(1)) & mask
    return at


@njit(inline="always")
def _owner(bounds, node):  # type: ignore[no-untyped-def]
    """Return the rank that owns a node. `np.searchsorted` would take numba 0.2 s to compile."""
    low, high = 0, bounds.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if bounds[middle] <= node:
            low = middle
        else:
            high = middle
    return low


@njit(**COMPILE)
def locate(ids, bounds, starts, cache_ids, cache_slots, base):  # type: ignore[no-untyped-def]
    """Return the slots of the rows of ``ids``, and the rows to fetch first.

    Args:
        ids: int64 ``[n]``, with repetitions.
        bounds: int64 ``[W+1]``, rank r owns ``bounds[r] … bounds[r+1]-1``.
        starts: int64 ``[W]``, the slot of each rank's first row, -1 = remote; at least one rank's
            rows are local.
        cache_ids, cache_slots: see `hash_slots`.
        base: the slot of the first fetched row.

    Returns:
        ``(slots [n], wanted, counts [W], remote, hits)``: ``wanted`` are the distinct ids to
        fetch, by rank; the j-th goes to slot ``base + j``. ``remote`` is the number of distinct
        ids that are not local, ``hits`` how many of them are cached.
    """
    n, ranks = ids.shape[0], bounds.shape[0] - 1
    low, high = np.int64(0), ranks  # the ranks whose rows are local are among these
    while starts[low] < 0:
        low += 1
    while starts[high - 1] < 0:
        high -= 1
    first, last = bounds[low], bounds[high]
    slots = np.empty(n, np.int64)
    counts = np.zeros(ranks, np.int64)
    for i in range(n):
        node = ids[i]
        slots[i] = -1
        if first <= node < last:
            owner = low
            while node >= bounds[owner + 1]:
                owner += 1
            if starts[owner] >= 0:
                slots[i] = starts[owner] + node - bounds[owner]
    away = np.flatnonzero(slots < 0)
    remote, number = relabel(ids[:0], ids[away])
    found, hits = remote.shape[0], np.int64(0)
    place = np.empty(found, np.int64)
    for j in range(found):
        at = find(cache_ids, remote[j])
        if cache_ids[at] >= 0:
            place[j] = cache_slots[at]
            hits += 1
        else:
            owner = _owner(bounds, remote[j])
            counts[owner] += 1
            place[j] = -1 - owner
    turn = np.zeros(ranks, np.int64)
    for r in range(1, ranks):
        turn[r] = turn[r - 1] + counts[r - 1]
    wanted = np.empty(found - hits, np.int64)
    for j in range(found):
        if place[j] < 0:
            owner = -1 - place[j]
            wanted[turn[owner]] = remote[j]
            place[j] = base + turn[owner]
            turn[owner] += 1
    for i in range(away.shape[0]):
        slots[away[i]] = place[number[i]]
    return slots, wanted, counts, found, hits


@njit(**COMPILE)
def hash_slots(ids, first):  # type: ignore[no-untyped-def]
    """Build a hash table from distinct ``ids`` to ``first``, ``first + 1``, …: ids and slots, -1 =
    free. It is at most half full, so that a search ends."""
    size = np.int64(16)
    while size < 2 * ids.shape[0]:
        size *= 2
    keys, slots = np.full(size, -1, np.int64), np.empty(size, np.int64)
    for i in range(ids.shape[0]):
        at = find(keys, ids[i])
        keys[at] = ids[i]
        slots[at] = first + i
    return keys, slots


@njit(**COMPILE)
def mark_sources(indptr, src, rows, first, marks):  # type: ignore[no-untyped-def]
    """Mark the sources of ``rows`` (numbers of rows in the CSC) among a rank's own nodes.

    Args:
        marks: bool, of the ids from ``first`` on; written to.

    Returns:
        The sources that other ranks own, int64, with repetitions.
    """
    total = np.int64(0)
    for i in range(rows.shape[0]):
        total += indptr[rows[i] + 1] - indptr[rows[i]]
    others = np.empty(total, np.int64)
    count = np.int64(0)
    for i in range(rows.shape[0]):
        for j in range(indptr[rows[i]], indptr[rows[i] + 1]):
            own = src[j] - first
            if 0 <= own < marks.shape[0]:
                marks[own] = True
            else:
                others[count] = src[j]
                count += 1
    return others[:count].copy()


@njit(**COMPILE)
def take_lists(indptr, values, order):  # type: ignore[no-untyped-def]
    """Return the lists numbered ``order`` as ``(indptr, values)``."""
    out_indptr = np.zeros(order.shape[0] + 1, np.int64)
    for i in range(order.shape[0]):
        out_indptr[i + 1] = out_indptr[i] + indptr[order[i] + 1] - indptr[order[i]]
    out = np.empty(out_indptr[-1], values.dtype)
    for i in range(order.shape[0]):
        start = indptr[order[i]]
        for j in range(out_indptr[i + 1] - out_indptr[i]):
            out[out_indptr[i] + j] = values[start + j]
    return out_indptr, out


@njit(**COMPILE)
def take_words(words, width, order, out):  # type: ignore[no-untyped-def]
    """Copy rows of ``width`` words each, numbered ``order``, to ``out``.

    Rows are prefetched, unlike in torch's index_select: a third of its time with 16 bytes a row.
    """
    for i in range(order.shape[0] + _AHEAD):
        if i < order.shape[0]:
            prefetch(words, order[i] * width)
        if i >= _AHEAD:
            start = order[i - _AHEAD] * width
            for j in range(width):
                out[(i - _AHEAD) * width + j] = words[start + j]


@njit(**COMPILE)
def scale_rows(bits, by):  # type: ignore[no-untyped-def]
    """Multiply rows of bf16 numbers in place, rounding to nearest even.

    torch converts to other tensors and back, at eight times the cost. Numbers that are not finite
    stay so.

    Args:
        bits: uint16 ``[n, F]``, contiguous, the numbers' bits.
        by: float32 ``[n]``, finite.
    """
    for i in range(bits.shape[0]):
        row = bits[i]
        for j in range(row.shape[0]):
            value = np.uint32(np.uint32(row[j]) << np.uint32(16)).view(np.float32) * by[i]
            wide = np.float32(value).view(np.uint32)
            odd = (wide >> np.uint32(16)) & np.uint32(1)
            if (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                wide = np.uint32(0x7FC00000)  # NaN, whose payload must not carry over
                odd = np.uint32(0)
            row[j] = np.uint16((wide + np.uint32(0x7FFF) + odd) >> np.uint32(16))
