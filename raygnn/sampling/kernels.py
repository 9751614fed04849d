"""The compiled inner loops of sampling (numba, without the GIL, compiled once and cached).

``indptr``/``src`` are in-edge lists (CSC). Ids are int64, and where they lie int32 if they fit.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types, uint64
from numba.extending import intrinsic

from raygnn.util import hashing

_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

ALL = -1  # a fanout that takes every neighbour

_AHEAD = 16  # rows between asking for entries and reading them
_LINE = 8  # entries of 8 bytes in a cache line

mix = njit(inline="always")(hashing.mix)  # of a uint64


@njit(inline="always")
def below(random, bound):  # type: ignore[no-untyped-def]
    """A number in [0, bound) from 64 random bits (bound < 2³², bias below 2⁻³²)."""
    return np.int64(((random >> uint64(32)) * uint64(bound)) >> uint64(32))


@njit(inline="always")
def floyd(out, at, take, count, state):  # type: ignore[no-untyped-def]
    """Write ``take`` distinct numbers in [0, count) to ``out[at:]``."""
    for j in range(take):
        last = count - take + j
        pick = below(mix(state + uint64(j)), last + 1)
        for seen in range(j):
            if out[at + seen] == pick:
                pick = last
                break
        out[at + j] = pick


@njit
def smallest(values, kept):  # type: ignore[no-untyped-def]
    """The n-th smallest of at least n values, n being the length of ``kept``, which is scratch.

    By keeping the n smallest so far; numpy's partition takes numba too long to compile.
    """
    kept[:] = values[: kept.shape[0]]
    worst = np.argmax(kept)
    for j in range(kept.shape[0], values.shape[0]):
        if values[j] < kept[worst]:
            kept[worst] = values[j]
            worst = np.argmax(kept)
    return kept[worst]


@intrinsic
def prefetch(context, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line that ``array[index]`` (contiguous) is in."""

    def build(context, builder, signature, values):  # type: ignore[no-untyped-def]
        whole = context.make_array(signature.args[0])(context, builder, values[0])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = builder.bitcast(builder.gep(whole.data, [values[1]]), byte)
        builder.call(call, [place, flag(0), flag(3), flag(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, index), build


@njit(**_COMPILE)
def permuted(positions, size, half, keys):  # type: ignore[no-untyped-def]
    """See `raygnn.sampling.plan.permute`: a Feistel network of ``2 · half`` bits, round by round
    with ``keys``, applied until the image is below ``size``."""
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


@njit(**_COMPILE)
def shuffled(size, key):  # type: ignore[no-untyped-def]
    """See `raygnn.sampling.plan.permute`: all of ``0 … size-1``, shuffled (Fisher & Yates)."""
    out = np.arange(size)
    for i in range(size - 1, 0, -1):
        j = below(mix(key + uint64(i)), i + 1)
        out[i], out[j] = out[j], out[i]
    return out


@njit(**_COMPILE)
def sample_rows(  # type: ignore[no-untyped-def]
    indptr, src, values, rows, node_keys, fanout, replace, key
):
    """Draw in-neighbours of ``rows``.

    Without replacement by Floyd's method (Bentley & Floyd, "A sample of brilliance", 1987), so
    the cost is that of the sample, not of the list. The draw for a row depends only on ``key``
    and that row's ``node_keys`` entry.

    Args:
        indptr: ``[R+1]``; src: ``[E]`` global ids of sources.
        values: int64 ``[E]``, a number of each edge; empty = none is wanted.
        rows: ``[B]`` row numbers in the CSC; a row that is negative has no edges.
        node_keys: ``[B]`` what identifies each node (its original id).
        fanout: neighbours per row, or -1 for all.
        replace: draw with replacement (a row without edges still gives none).
        key: uint64, of (seed, epoch, step, hop, edge type).

    Returns:
        ``(out_indptr [B+1], neighbours, values)``: global source ids, row after row, and the
        numbers of the edges they were drawn by.
    """
    n = rows.shape[0]
    valued = values.shape[0] > 0
    out_indptr = np.empty(n + 1, np.int64)
    out_indptr[0] = 0
    for i in range(n):
        row = rows[i]
        degree = np.int64(0) if row < 0 else indptr[row + 1] - indptr[row]
        if fanout >= 0 and (degree > fanout or (replace and degree > 0)):
            degree = np.int64(fanout)
        out_indptr[i + 1] = out_indptr[i] + degree
    # The places to read are drawn, and asked for, some rows before they are read: nearly every one
    # is a cache miss.
    out = np.empty(out_indptr[n], np.int64)
    drawn = np.empty(out_indptr[n] if valued else 0, np.int64)
    for i in range(n + _AHEAD):
        if i < n and out_indptr[i + 1] > out_indptr[i]:
            at, take = out_indptr[i], out_indptr[i + 1] - out_indptr[i]
            start = indptr[rows[i]]
            degree = indptr[rows[i] + 1] - start
            if fanout < 0 or (degree <= fanout and not replace):
                for j in range(degree):
                    out[at + j] = start + j
                for j in range(0, degree, _LINE):
                    prefetch(src, start + j)
            else:
                state = mix(uint64(key) ^ mix(uint64(node_keys[i])))
                if replace:
                    for j in range(take):
                        out[at + j] = below(mix(state + uint64(j)), degree)
                else:
                    floyd(out, at, take, degree, state)
                for j in range(take):
                    out[at + j] += start
                    prefetch(src, out[at + j])
        if i >= _AHEAD:
            for j in range(out_indptr[i - _AHEAD], out_indptr[i - _AHEAD + 1]):
                if valued:
                    drawn[j] = values[out[j]]
                out[j] = src[out[j]]
    return out_indptr, out, drawn


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


@njit(**_COMPILE)
def draw_rows(  # type: ignore[no-untyped-def]
    indptr, src, values, weight, rows, node_keys, fanout, replace, key, banned_indptr, banned
):
    """`sample_rows` for lists whose entries are not alike, or not all allowed.

    Without replacement, weighted entries are drawn by exponential clocks: the ``fanout`` entries
    with the smallest ``-log(u) / weight`` (Efraimidis & Spirakis, "Weighted random sampling with
    a reservoir", 2006), which is drawing one after the other in proportion to what is left.

    Args:
        indptr, src, values, rows, node_keys, fanout, replace, key: as `sample_rows`; a row draws
            the same there as here where nothing is banned and nothing weighted.
        weight: ``[E]`` of the edges, at least 0, entries with 0 are never drawn; empty = alike.
        banned_indptr, banned: ``[B+1]`` and source ids: for each row those that it may not draw.

    Returns:
        ``(out_indptr [B+1], neighbours, values)``.
    """
    n = rows.shape[0]
    weighted = weight.shape[0] > 0
    longest = np.int64(0)
    room = np.int64(0)
    for i in range(n):
        if rows[i] >= 0:
            degree = np.int64(indptr[rows[i] + 1] - indptr[rows[i]])
            longest = max(longest, degree)
            room += degree if fanout < 0 or (degree < fanout and not replace) else fanout
    at_list = np.empty(longest, np.int64)  # the entries of a row that may be drawn
    clock = np.empty(longest, np.float64)
    first = np.empty(max(fanout, 1), np.float64)
    out = np.empty(room, np.int64)
    out_indptr = np.zeros(n + 1, np.int64)
    at = np.int64(0)
    for i in range(n):
        row = rows[i]
        if row >= 0:
            start, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            count = np.int64(0)
            for j in range(start, end):
                if weighted and not weight[j] > 0:
                    continue
                allowed = True
                for b in range(banned_indptr[i], banned_indptr[i + 1]):
                    if banned[b] == src[j]:
                        allowed = False
                        break
                if allowed:
                    at_list[count] = j
                    count += 1
            state = mix(uint64(key) ^ mix(uint64(node_keys[i])))
            if count == 0:
                pass
            elif fanout < 0 or (count <= fanout and not replace):
                for j in range(count):
                    out[at + j] = at_list[j]
                at += count
            elif replace:
                total = 0.0
                if weighted:
                    for j in range(count):
                        total += weight[at_list[j]]
                        clock[j] = total
                for j in range(fanout):
                    random = mix(state + uint64(j))
                    if weighted:
                        mark = np.float64(random >> uint64(11)) * 2.0**-53 * total
                        pick = min(np.searchsorted(clock[:count], mark, side="right"), count - 1)
                    else:
                        pick = below(random, count)
                    out[at + j] = at_list[pick]
                at += fanout
            elif weighted:
                for j in range(count):
                    # by place in the list, so that a ban does not change the others' clocks
                    random = mix(state + uint64(at_list[j] - start))
                    uniform = (np.float64(random >> uint64(11)) + 0.5) * 2.0**-53
                    clock[j] = -np.log(uniform) / weight[at_list[j]]
                limit = smallest(clock[:count], first)
                taken = np.int64(0)
                for j in range(count):
                    if clock[j] <= limit and taken < fanout:
                        out[at + taken] = at_list[j]
                        taken += 1
                at += taken
            else:
                floyd(out, at, fanout, count, state)
                for j in range(fanout):
                    out[at + j] = at_list[out[at + j]]
                at += fanout
        out_indptr[i + 1] = at
    drawn = np.empty(at if values.shape[0] > 0 else 0, np.int64)
    for j in range(drawn.shape[0]):
        drawn[j] = values[out[j]]
    for j in range(at):
        out[j] = src[out[j]]
    return out_indptr, out[:at].copy(), drawn


@njit(**_COMPILE)
def locate(ids, bounds, rank, cache_ids, cache_slots, base):  # type: ignore[no-untyped-def]
    """Where the rows of ``ids`` are, or will be once they have been fetched.

    A table holds a rank's own rows, then its cached ones, then, from ``base`` on, fetched ones.

    Args:
        ids: int64 ``[n]``, any number of times each.
        bounds: int64 ``[W+1]``, rank r owns ``bounds[r] … bounds[r+1]-1``.
        rank: the one that asks.
        cache_ids, cache_slots: see `hash_slots`.

    Returns:
        ``(slots [n], wanted, counts [W], remote, hits)``: ``wanted`` are the distinct ids to
        fetch, rank by rank; the j-th goes to slot ``base + j``. ``remote`` is the number of
        distinct ids owned elsewhere, ``hits`` how many of them the cache has.
    """
    n, ranks = ids.shape[0], bounds.shape[0] - 1
    first, last = bounds[rank], bounds[rank + 1]
    slots = np.empty(n, np.int64)
    counts = np.zeros(ranks, np.int64)
    away = np.int64(0)
    for i in range(n):
        node = ids[i]
        if first <= node < last:
            slots[i] = node - first
        else:
            slots[i] = -1
            away += 1
    if away == 0:
        return slots, np.empty(0, np.int64), counts, np.int64(0), np.int64(0)
    size = np.int64(16)
    while size < 2 * away:
        size *= 2
    mask = uint64(size - 1)
    table = np.full(size, -1, np.int64)
    remote = np.empty(away, np.int64)
    found = np.int64(0)
    for i in range(n):
        if slots[i] < 0:
            node = ids[i]
            at = mix(uint64(node)) & mask
            while table[at] >= 0 and remote[table[at]] != node:
                at = (at + uint64(1)) & mask
            if table[at] < 0:
                table[at] = found
                remote[found] = node
                found += 1
            slots[i] = -1 - table[at]
    hits = np.int64(0)
    place = np.empty(found, np.int64)
    cache_mask = uint64(cache_ids.shape[0] - 1)
    for j in range(found):
        at = mix(uint64(remote[j])) & cache_mask
        while cache_ids[at] >= 0 and cache_ids[at] != remote[j]:
            at = (at + uint64(1)) & cache_mask
        if cache_ids[at] >= 0:
            place[j] = cache_slots[at]
            hits += 1
        else:
            owner = np.searchsorted(bounds, remote[j], side="right") - 1
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
    for i in range(n):
        if slots[i] < 0:
            slots[i] = place[-1 - slots[i]]
    return slots, wanted, counts, found, hits


@njit(**_COMPILE)
def hash_slots(ids, first):  # type: ignore[no-untyped-def]
    """A hash table from distinct ``ids`` to ``first``, ``first + 1``, …: ids and slots, -1 = free.

    At most half full, so that a search ends.
    """
    size = np.int64(16)
    while size < 2 * ids.shape[0]:
        size *= 2
    mask = uint64(size - 1)
    keys, slots = np.full(size, -1, np.int64), np.empty(size, np.int64)
    for i in range(ids.shape[0]):
        at = mix(uint64(ids[i])) & mask
        while keys[at] >= 0:
            at = (at + uint64(1)) & mask
        keys[at] = ids[i]
        slots[at] = first + i
    return keys, slots


@njit(**_COMPILE)
def take_lists(indptr, values, order):  # type: ignore[no-untyped-def]
    """The lists numbered ``order``, one after the other: ``(indptr, values)`` of them."""
    out_indptr = np.zeros(order.shape[0] + 1, np.int64)
    for i in range(order.shape[0]):
        out_indptr[i + 1] = out_indptr[i] + indptr[order[i] + 1] - indptr[order[i]]
    out = np.empty(out_indptr[-1], values.dtype)
    for i in range(order.shape[0]):
        start = indptr[order[i]]
        for j in range(out_indptr[i + 1] - out_indptr[i]):
            out[out_indptr[i] + j] = values[start + j]
    return out_indptr, out


@njit(**_COMPILE)
def scale_rows(bits, by):  # type: ignore[no-untyped-def]
    """Multiply rows of bf16 numbers, in place, and round to the nearest (ties to even).

    torch converts there and back in tensors of their own, at eight times the cost. Numbers that
    are not finite stay so.

    Args:
        bits: uint16 ``[n, F]``, contiguous, the numbers as they lie.
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
