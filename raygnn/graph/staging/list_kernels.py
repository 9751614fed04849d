"""Compiled passes over in-edge lists (numba, GIL released, compiled once and cached)."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

_ONES = 0xFFFFFFFF  # 32 bits


@njit(**_COMPILE)
def alias_tables(indptr, weight):  # type: ignore[no-untyped-def]
    """Build alias tables, to sample entries of lists in proportion to their weights in constant
    time (Walker, 1977; built as in Vose, "A linear algorithm for generating random numbers with a
    given distribution", 1991).

    Args:
        indptr: ``[R+1]``; weight: ``[E]``, at least 0.

    Returns:
        uint64 ``[E]``: upper 32 bits: probability, of 2³², to keep the entry itself; lower 32
        bits: position in its list of the alternative.
    """
    out = np.empty(weight.shape[0], np.uint64)
    longest = np.int64(0)
    for i in range(indptr.shape[0] - 1):
        longest = max(longest, np.int64(indptr[i + 1] - indptr[i]))
    share, stack = np.empty(longest, np.float64), np.empty(longest, np.int64)
    for i in range(indptr.shape[0] - 1):
        start, degree = indptr[i], indptr[i + 1] - indptr[i]
        total = 0.0
        for j in range(degree):
            total += weight[start + j]
        if not total > 0:  # a position beyond the list, which is never sampled
            out[start : start + degree] = uint64(_ONES)
            continue
        # the stack holds entries with too little below small, those with too much from large on
        small, large = 0, degree
        for j in range(degree):
            share[j] = weight[start + j] / total * degree
            if share[j] < 1.0:
                stack[small] = j
                small += 1
            else:
                large -= 1
                stack[large] = j
        while small > 0 and large < degree:
            small -= 1
            less, more = stack[small], stack[large]
            bits = min(uint64(share[less] * 2.0**32), uint64(_ONES))
            out[start + less] = (bits << uint64(32)) | uint64(more)
            share[more] -= 1.0 - share[less]
            if share[more] < 1.0:
                large += 1
                stack[small] = more
                small += 1
        for j in range(small):  # left over by rounding
            out[start + stack[j]] = (uint64(_ONES) << uint64(32)) | uint64(stack[j])
        for j in range(large, degree):
            out[start + stack[j]] = (uint64(_ONES) << uint64(32)) | uint64(stack[j])
    return out
