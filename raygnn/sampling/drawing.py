"""Compiled inner loops that sample neighbours (numba, without the GIL, compiled once and cached).

A list of entries is given by its start and length, so that part of a list is sampled like a
complete one. The sample of a row depends only on the key of the draw, the row's own key and its
list, never on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, uint64

from raygnn.graph.staging.parts import position_bits
from raygnn.sampling.kernels import COMPILE, below, find, hash_slots, mix, prefetch, take_lists

ALL = -1  # a fanout that takes every neighbour

_AHEAD = 16  # rows between prefetching entries and reading them
_LINE = 8  # entries of 8 bytes in a cache line
_TRIES = 4  # draws per wanted entry before the complete list is read
_HALF = 0xFFFFFFFF  # mask of half of the bits of a random number
_MOST = 64  # the same limit where times exclude a part of the list


@njit(**COMPILE)
def spans(indptr, rows):  # type: ignore[no-untyped-def]
    """Return the starts and lengths of the lists of ``rows`` (rows of the CSC, negative = without
    edges), int64 ``[B]`` each."""
    start, degree = np.zeros(rows.shape[0], np.int64), np.zeros(rows.shape[0], np.int64)
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            start[i] = indptr[rows[i]]
            degree[i] = indptr[rows[i] + 1] - start[i]
    return start, degree


@njit(**COMPILE)
def spans_before(indptr, times, rows, bounds, window):  # type: ignore[no-untyped-def]
    """Return `spans` of the entries with ``bound - window <= time < bound``.

    Args:
        times: whole numbers ``[E]``, ascending within each list.
        bounds: int64 ``[B]``, of the rows.
        window: in the units of the times; negative = unlimited.
    """
    start, degree = spans(indptr, rows)
    for i in range(-_AHEAD, rows.shape[0]):
        ahead = i + _AHEAD
        if ahead < rows.shape[0]:
            for j in range(0, min(degree[ahead], _LINE * _LINE), _LINE):
                prefetch(times, start[ahead] + j)
        if i >= 0 and degree[i] > 0:
            low, high = start[i], start[i] + degree[i]
            high = _first_from(times, low, high, bounds[i])
            if window >= 0:
                low = _first_from(times, low, high, bounds[i] - window)
            start[i], degree[i] = low, high - low
    return start, degree


@njit(inline="always")
def _first_from(times, low, high, time):  # type: ignore[no-untyped-def]
    """Return the first place in ``[low, high)`` with this time or a later one; ``high`` = none.

    Without branches: the processor could not predict them.
    """
    count = high - low
    while count > 0:
        half = (count + 1) // 2
        low += half * np.int64(times[low + half - 1] < time)
        count -= half
    return low


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


@njit(inline="always")
def _draw_alike(out, at, take, start, degree, replace, state):  # type: ignore[no-untyped-def]
    """Write ``take`` places of a list with equally likely entries to ``out[at:]``."""
    if replace:
        for j in range(take):
            out[at + j] = below(mix(state + uint64(j)), degree)
    else:
        floyd(out, at, take, degree, state)
    for j in range(at, at + take):
        out[j] += start


@njit(inline="always")
def _uniform(random):  # type: ignore[no-untyped-def]
    return (np.float64(random >> uint64(11)) + 0.5) * 2.0**-53


class RowLists(NamedTuple):
    """Lists of entries to draw from, one for each of B rows.

    Attributes:
        start, degree: int64 ``[B]``, see `spans`.
        src: ``[E]``, global ids of sources.
        keys: ``[B]``, identity of each row (original id of its node).
    """

    start: np.ndarray
    degree: np.ndarray
    src: np.ndarray
    keys: np.ndarray


class DrawBias(NamedTuple):
    """Weights of entries and entries that may not be drawn.

    Attributes:
        start, degree: int64 ``[B]``, the complete lists, whose parts are in `RowLists`.
        weight: ``[E]``, at least 0; entries with 0 are never drawn. Empty = all alike.
        alias: uint64 ``[E]``, see `raygnn.graph.staging.parts.alias_tables`; empty with
            ``weight``.
        banned_indptr, banned: ``[B+1]`` and source ids, ascending for each row: not to be drawn.
    """

    start: np.ndarray
    degree: np.ndarray
    weight: np.ndarray
    alias: np.ndarray
    banned_indptr: np.ndarray
    banned: np.ndarray


@njit(**COMPILE)
def sample_rows(lists, fanout, replace, key, keep):  # type: ignore[no-untyped-def]
    """Sample `RowLists` whose entries are equally likely.

    Without replacement by Floyd's method (Bentley & Floyd, "A sample of brilliance", 1987), so
    the cost depends on the sample, not on the list.

    Args:
        fanout: entries per row, or -1 for all.
        replace: sample with replacement (a row without entries still gives none).
        key: uint64, of (seed, epoch, step, hop, edge type).
        keep: return the places of the entries, too.

    Returns:
        ``(out_indptr [B+1], neighbours, places)``: source ids, row after row, and the position of
        each in ``src``; no places unless ``keep``.
    """
    start, degree, src, row_keys = lists
    n = start.shape[0]
    out_indptr = np.empty(n + 1, np.int64)
    out_indptr[0] = 0
    for i in range(n):
        take = degree[i]
        if fanout >= 0 and (take > fanout or (replace and take > 0)):
            take = np.int64(fanout)
        out_indptr[i + 1] = out_indptr[i] + take
    # places are drawn and prefetched some rows before they are read: nearly each is a cache miss
    out = np.empty(out_indptr[n], np.int64)
    places = np.empty(out_indptr[n] if keep else 0, np.int64)
    for i in range(n + _AHEAD):
        if i < n and out_indptr[i + 1] > out_indptr[i]:
            at, take = out_indptr[i], out_indptr[i + 1] - out_indptr[i]
            if fanout < 0 or (degree[i] <= fanout and not replace):
                for j in range(take):
                    out[at + j] = start[i] + j
                for j in range(0, take, _LINE):
                    prefetch(src, start[i] + j)
            else:
                state = mix(uint64(key) ^ mix(uint64(row_keys[i])))
                _draw_alike(out, at, take, start[i], degree[i], replace, state)
                for j in range(at, at + take):
                    prefetch(src, out[j])
        if i >= _AHEAD:
            first, last = out_indptr[i - _AHEAD], out_indptr[i - _AHEAD + 1]
            _read(src, src, False, out, places, first, last, keep)
    return out_indptr, out, places


@njit(inline="always")
def _read(src, alias, held, out, places, low, high, keep):  # type: ignore[no-untyped-def]
    for j in range(low, high):
        if keep:
            places[j] = out[j]
        out[j] = np.int64(alias[out[j]]) & _HALF if held else src[out[j]]


@njit(**COMPILE)
def lists_of(keys, values, nodes):  # type: ignore[no-untyped-def]
    """Return the values of each node as ``(indptr [B+1], values)``.

    Args:
        keys: int64 ``[n]``, ascending; values: ``[n]``.
        nodes: int64 ``[B]``, with repetitions.
    """
    distinct = np.unique(keys)
    table, first = hash_slots(distinct, 0)
    indptr = np.full(distinct.shape[0] + 2, keys.shape[0], np.int64)  # the last list is empty
    starts = np.searchsorted(keys, distinct)
    for i in range(starts.shape[0]):
        indptr[i] = starts[i]
    numbers = np.full(nodes.shape[0], distinct.shape[0], np.int64)
    for i in range(nodes.shape[0]):
        at = find(table, nodes[i])
        if table[at] >= 0:
            numbers[i] = first[at]
    return take_lists(indptr, values, numbers)


@njit(**COMPILE)
def count_banned(start, degree, src, banned_indptr, banned):  # type: ignore[no-untyped-def]
    """Return the number of banned entries of each list, int64 ``[B]``; arguments as in `DrawBias`.

    Lists with banned sources are read completely: a source can occur several times, or never.
    """
    counts = np.zeros(start.shape[0], np.int64)
    for i in range(start.shape[0]):
        mine = banned[banned_indptr[i] : banned_indptr[i + 1]]
        if mine.shape[0] > 0:
            for j in range(start[i], start[i] + degree[i]):
                counts[i] += _has(mine, src[j])
    return counts


@njit(inline="always")
def _has(banned, node):  # type: ignore[no-untyped-def]
    low, high = 0, banned.shape[0]
    while low < high:
        middle = (low + high) // 2
        if banned[middle] < node:
            low = middle + 1
        else:
            high = middle
    return low < banned.shape[0] and banned[low] == node


@njit
def _fill(  # type: ignore[no-untyped-def]
    out, start, degree, src, weight, replace, state, banned, taken
):
    """Sample by reading every entry of a list, where few are left to draw.

    Without replacement by exponential clocks: those with the smallest ``-log(u) / weight``
    (Efraimidis & Spirakis, "Weighted random sampling with a reservoir", 2006), which equals drawing
    one after the other in proportion to the remaining weights.

    Args:
        out: receives the drawn places.
        state: of the row, past the random numbers already used.
        banned: source ids, ascending.
        taken: places already drawn, none if ``replace``.

    Returns:
        Number of places drawn: the length of ``out``, or fewer if the list has no more.
    """
    allowed, clock = np.empty(degree, np.int64), np.empty(degree, np.float64)
    count, total, taken = 0, 0.0, np.sort(taken)
    for j in range(start, start + degree):
        share = np.float64(weight[j]) if weight.shape[0] > 0 else 1.0
        if not share > 0 or _has(banned, src[j]) or _has(taken, j):
            continue
        total += share
        # by place in the list, so that a ban does not change the other entries' clocks
        ticks = -np.log(_uniform(mix(state + uint64(j - start)))) / share
        allowed[count], clock[count] = j, total if replace else ticks
        count += 1
    if count == 0:
        return 0
    if replace:
        for j in range(out.shape[0]):
            mark = _uniform(mix(state + uint64(j))) * total
            at = np.searchsorted(clock[:count], mark, side="right")
            out[j] = allowed[min(at, count - 1)]
        return out.shape[0]
    most = min(count, out.shape[0])
    limit = _smallest(clock[:count], most)
    drawn = 0
    for j in range(count):
        if clock[j] <= limit and drawn < most:
            out[drawn] = allowed[j]
            drawn += 1
    return drawn


@njit
def _smallest(values, n):  # type: ignore[no-untyped-def]
    """Return the n-th smallest of at least n values.

    Keeps the n smallest so far: numba compiles numpy's partition, or slices that are set, slowly.
    """
    kept = values[:n].copy()
    worst = np.argmax(kept)
    for j in range(n, values.shape[0]):
        if values[j] < kept[worst]:
            kept[worst] = values[j]
            worst = np.argmax(kept)
    return kept[worst]


@njit(**COMPILE)
def draw_rows(lists, bias, fanout, replace, key, keep):  # type: ignore[no-untyped-def]
    """Sample `RowLists` with a `DrawBias`; arguments and results as in `sample_rows`.

    Entries are drawn one after the other, and drawn again if not allowed: without replacement
    weighted entries come in proportion to the remaining weights. So a row costs as much as its
    sample; a complete list is read only if few of its entries are left. A row without weights and
    bans has the same sample as in `sample_rows`.
    """
    start, degree, src, row_keys = lists
    whole_start, whole_degree, weight, alias, banned_indptr, banned = bias
    n = start.shape[0]
    weighted, none = weight.shape[0] > 0, uint64(0)
    packed = weighted and fanout >= 0
    room = np.int64(0)
    for i in range(n):
        room += degree[i] if fanout < 0 or (degree[i] < fanout and not replace) else fanout
    out = np.empty(room, np.int64)
    places = np.empty(room if keep else 0, np.int64)
    out_indptr = np.zeros(n + 1, np.int64)
    at = np.int64(0)
    for i in range(-_AHEAD, n + _AHEAD):
        ahead = i + _AHEAD
        if ahead < n and degree[ahead] > fanout:
            state = mix(uint64(key) ^ mix(uint64(row_keys[ahead])))
            if weighted:
                for j in range(fanout):
                    own = below(mix(state + uint64(j)), whole_degree[ahead])
                    prefetch(alias, whole_start[ahead] + own)
            elif banned_indptr[ahead] < banned_indptr[ahead + 1]:
                for j in range(fanout):
                    prefetch(src, start[ahead] + below(mix(state + uint64(j)), degree[ahead]))
        if 0 <= i < n:
            low, high, end = banned_indptr[i], banned_indptr[i + 1], start[i] + degree[i]
            state = mix(uint64(key) ^ mix(uint64(row_keys[i])))
            mask = position_bits(src, whole_degree[i]) if packed else none
            if degree[i] == 0:
                pass
            elif fanout < 0 or (degree[i] <= fanout and not replace):
                for j in range(start[i], end):
                    if weighted and not weight[j] > 0:
                        continue
                    if low == high or not _has(banned[low:high], src[j]):
                        out[at] = j
                        at += 1
            elif not weighted and low == high:
                _draw_alike(out, at, fanout, start[i], degree[i], replace, state)
                at += fanout
            else:
                tries = np.int64(_TRIES * fanout)
                if weighted:
                    tries = min(tries * (whole_degree[i] // degree[i]), np.int64(_MOST * fanout))
                taken = turn = np.int64(0)
                seen = none  # one bit for 1/64 of the places
                while taken < fanout and turn < tries:
                    random = mix(state + uint64(turn))
                    turn += 1
                    if weighted:
                        own = below(random, whole_degree[i])
                        entry = alias[whole_start[i] + own]
                        chance = entry >> uint64(32)
                        other = np.int64(chance & mask if mask else entry & uint64(_HALF))
                        keeps = random & uint64(_HALF) | mask < chance
                        pick = whole_start[i] + (own if keeps else other)
                        if not start[i] <= pick < end:
                            continue
                    else:
                        pick = start[i] + below(random, degree[i])
                    bit, again = uint64(1) << (uint64(pick) & uint64(63)), np.int64(0)
                    if seen & bit and not replace:
                        for j in range(at, at + taken):
                            again |= np.int64(out[j] == pick)
                    if again or (low < high and _has(banned[low:high], src[pick])):
                        continue
                    out[at + taken] = pick
                    seen |= bit
                    taken += 1
                if taken < fanout:
                    rest = out[at + taken : at + fanout]
                    picks = out[at : at if replace else at + taken]
                    taken += _fill(
                        rest, start[i], degree[i], src, weight, replace,
                        state + uint64(turn), banned[low:high], picks,
                    )  # fmt: skip
                at += taken
            out_indptr[i + 1] = at
            for j in range(out_indptr[i], at):
                if mask:
                    prefetch(alias, out[j])
                else:
                    prefetch(src, out[j])
        if i >= _AHEAD:
            first, last = out_indptr[i - _AHEAD], out_indptr[i - _AHEAD + 1]
            held = packed and position_bits(src, whole_degree[i - _AHEAD]) > 0
            _read(src, alias, held, out, places, first, last, keep)
    return out_indptr, out[:at].copy(), places[:at].copy()
