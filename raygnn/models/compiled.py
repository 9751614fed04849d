"""Compiled passes around products and sums (numba, without the GIL, compiled once and cached).

Each replaces several passes of torch over tensors larger than caches. bf16 numbers are read as
uint16 bits; torch would convert them to floats and round again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

_TOGETHER = 64  # rows that are summed in fp32; these sums are added in fp64


@njit(**_COMPILE)
def by_source(indptr, src, num_src):  # type: ignore[no-untyped-def]
    """Group a block's edges by source with a stable counting sort.

    Args:
        indptr: int64 ``[D+1]``; src: int64 ``[E]``, from 0 to ``num_src - 1``.

    Returns:
        ``(start [S+1], dst [E], edge [E])``, int64: start of each source's edges, their
        destinations, and their positions in ``src``.
    """
    start = np.zeros(num_src + 1, np.int64)
    for e in range(src.shape[0]):
        start[src[e] + 1] += 1
    for s in range(num_src):
        start[s + 1] += start[s]
    at = start.copy()
    dst, edge = np.empty(src.shape[0], np.int64), np.empty(src.shape[0], np.int64)
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            to = at[src[e]]
            dst[to], edge[to] = d, e
            at[src[e]] = to + 1
    return start, dst, edge


@njit(**_COMPILE)
def largest(indptr, src, rows):  # type: ignore[no-untyped-def]
    """Find the largest numbers among each destination's sources; the last of equal ones.

    Args:
        indptr: int64 ``[D+1]``; src: int64 ``[E]``; rows: floats ``[S, F]``.

    Returns:
        ``(numbers [D, F], their sources [D, F])``; 0 and -1 for a destination without edges.
    """
    shape = (indptr.shape[0] - 1, rows.shape[1])
    out, source = np.zeros(shape, rows.dtype), np.full(shape, -1, np.int64)
    for d in range(shape[0]):
        best, of = out[d], source[d]
        if indptr[d] < indptr[d + 1]:
            best[:] = -np.inf
        for e in range(indptr[d], indptr[d + 1]):
            row = rows[src[e]]
            for j in range(shape[1]):
                if not row[j] < best[j]:  # NaN stays NaN
                    best[j], of[j] = row[j], src[e]
    return out, source


@njit(**_COMPILE)
def add_to_sources(grad, source, out):  # type: ignore[no-untyped-def]
    """Add ``grad [D, F]`` to ``out [S, F]`` at the sources that `largest` found."""
    for d in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            if source[d, j] >= 0:
                out[source[d, j], j] += grad[d, j]


@njit(**_COMPILE)
def finish(rows, bias, relu):  # type: ignore[no-untyped-def]
    """Add ``bias`` to every row and optionally apply ReLU, in place. NaN stays NaN.

    Args:
        rows: float32 ``[n, F]``; bias: float32 ``[F]``.
    """
    least = np.float32(0) if relu else np.float32(-np.inf)
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(row.shape[0]):
            value = row[j] + bias[j]
            row[j] = least if value <= least else value


@njit(inline="always")
def _number(bits, shift):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(shift)).view(np.float32)


@njit(**_COMPILE)
def passed(grad, rows, out):  # type: ignore[no-untyped-def]
    """Compute the gradient of ReLU: 0 where ``rows``, its output, are 0, else ``grad``.

    Args:
        grad, rows, out: bits ``[n, F]`` of fp32 numbers (uint32) or bf16 numbers (uint16).

    Returns:
        The sum of ``out`` over its rows, float64 ``[F]``.
    """
    width, shift, nothing = rows.shape[1], 32 - 8 * rows.itemsize, rows.dtype.type(0)
    total, part = np.zeros(width, np.float64), np.empty(width, np.float32)
    for start in range(0, rows.shape[0], _TOGETHER):
        part[:] = np.float32(0)
        for i in range(start, min(start + _TOGETHER, rows.shape[0])):
            given, row, to = grad[i], rows[i], out[i]
            for j in range(width):
                to[j] = nothing if _number(row[j], shift) == np.float32(0) else given[j]
            for j in range(width):
                part[j] += _number(to[j], shift)
        for j in range(width):
            total[j] += part[j]
    return total


@njit(**_COMPILE)
def keep_best(scores, first, best, columns):  # type: ignore[no-untyped-def]
    """Put a block of scores into lists of the best; of equal scores the first stays ahead.

    Args:
        scores: float32 ``[Q, n]``; -inf is omitted, NaN counts as the highest.
        first: column of the block's first score.
        best: float32 ``[Q, K]``, descending, -inf where a list has no more; modified.
        columns: int64 ``[Q, K]``, their columns, -1 where it has no more; modified.
    """
    last = best.shape[1] - 1
    for q in range(scores.shape[0]):
        row, kept, of = scores[q], best[q], columns[q]
        for c in range(row.shape[0]):
            score = row[c]
            if score > kept[last] or score != score:
                p = last
                while p > 0 and (kept[p - 1] < score or score != score):
                    kept[p], of[p] = kept[p - 1], of[p - 1]
                    p -= 1
                kept[p], of[p] = score, first + c
