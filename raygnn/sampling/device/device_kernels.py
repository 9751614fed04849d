"""Triton kernels of sampling on a GPU, with the same integer results as the CPU's.

See `raygnn.sampling.drawing.sample_rows` and `raygnn.sampling.kernels.relabel`. Inputs may be in
the GPU's memory or in page-locked memory of the host, which a GPU reads at the same addresses;
everything else is on the GPU. The host never waits. With ``TRITON_INTERPRET=1``, set before Triton
is first imported, the same code runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raygnn.config.execution import MOST_DRAWN
from raygnn.util import hashing

_GOLDEN = tl.constexpr(hashing.GOLDEN)
_FIRST = tl.constexpr(hashing.FIRST)
_SECOND = tl.constexpr(hashing.SECOND)
_TILE = 1024  # elements per program


@triton.jit
def _mix(value):  # type: ignore[no-untyped-def]
    """`raygnn.util.hashing.mix`, of uint64 numbers."""
    value = value + _GOLDEN
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)


@triton.jit
def _below(random, bound):  # type: ignore[no-untyped-def]
    """`raygnn.sampling.kernels.below`, as int64."""
    return (((random >> 32) * bound.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit(do_not_specialize=["count"])
def _spans(  # type: ignore[no-untyped-def]
    indptr,
    rows,
    start,
    take,
    count,
    FANOUT: tl.constexpr,
    REPLACE: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + at, mask=at < count, other=-1)
    held = row >= 0
    first = tl.load(indptr + row, mask=held, other=0)
    degree = tl.load(indptr + row + 1, mask=held, other=0) - first
    taken = degree
    if FANOUT >= 0:
        taken = tl.minimum(degree, FANOUT)
        if REPLACE:
            taken = tl.where(degree > 0, FANOUT, 0).to(tl.int64)
    tl.store(start + at, first, mask=at < count)
    tl.store(take + at, taken, mask=at < count)


@triton.jit(do_not_specialize=["count", "key"])
def _draw(  # type: ignore[no-untyped-def]
    indptr,
    src,
    keys,
    rows,
    out_indptr,
    out,
    count,
    key,
    FANOUT: tl.constexpr,
    REPLACE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sample rows: each tile row is a row of the graph, each lane one of its sampled entries."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + at, mask=at < count, other=-1)
    held = row >= 0
    start = tl.load(indptr + row, mask=held, other=0)
    degree = tl.load(indptr + row + 1, mask=held, other=0) - start
    own = tl.load(keys + row, mask=held, other=0).to(tl.int64).to(tl.uint64)
    state = _mix(key.to(tl.int64).to(tl.uint64) ^ _mix(own))
    lane = tl.arange(0, LANES)[None, :]
    if REPLACE:
        picks = _below(_mix(state[:, None] + lane.to(tl.uint64)), degree[:, None])
        taken = degree[:, None] > 0
    else:
        whole = (degree <= FANOUT)[:, None]
        picks = tl.where(whole, lane, -1).to(tl.int64)
        for j in range(FANOUT):  # Floyd's method, as `raygnn.sampling.drawing.floyd`
            last = degree - FANOUT + j
            pick = _below(_mix(state + j), last + 1)
            seen = tl.max((picks == pick[:, None]).to(tl.int32), axis=1) > 0
            pick = tl.where(seen, last, pick)
            picks = tl.where((lane == j) & (degree > FANOUT)[:, None], pick[:, None], picks)
        taken = lane < degree[:, None]
    taken = taken & (lane < FANOUT)
    drawn = tl.load(src + start[:, None] + picks, mask=taken, other=0).to(tl.int64)
    first = tl.load(out_indptr + at, mask=at < count, other=0)
    tl.store(out + first[:, None] + lane, drawn, mask=taken)


@triton.jit(do_not_specialize=["count"])
def _gather(  # type: ignore[no-untyped-def]
    table,
    near,
    slots,
    index,
    out,
    count,
    WIDTH: tl.constexpr,
    SOME_NEAR: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(index + at, mask=at < count, other=-1)
    lane = (tl.program_id(1) * LANES + tl.arange(0, LANES))[None, :]
    inside = (row >= 0)[:, None] & (lane < WIDTH)
    if SOME_NEAR:
        slot = tl.load(slots + row, mask=row >= 0, other=0).to(tl.int64)
        is_near = (slot >= 0)[:, None]
        close = tl.load(near + slot[:, None] * WIDTH + lane, mask=inside & is_near, other=0)
        away = tl.load(
            table + row[:, None] * WIDTH + lane, mask=inside & (slot < 0)[:, None], other=0
        )
        values = tl.where(is_near, close, away)
    else:
        values = tl.load(table + row[:, None] * WIDTH + lane, mask=inside, other=0)
    tl.store(out + at[:, None] * WIDTH + lane, values.to(out.dtype.element_ty), mask=inside)


def spans(indptr: Tensor, rows: Tensor, fanout: int, replace: bool) -> tuple[Tensor, Tensor]:
    """Return the starts of the lists of ``rows`` (int64 ``[B]``, negative = without edges), int64
    ``[B]``, and the offsets of their samples, ``[B+1]``."""
    start, out_indptr = torch.empty_like(rows), rows.new_zeros(len(rows) + 1)
    if count := len(rows):
        take = torch.empty_like(rows)
        _spans[(triton.cdiv(count, _TILE),)](
            indptr, rows, start, take, count, FANOUT=fanout, REPLACE=replace, TILE=_TILE
        )
        torch.cumsum(take, 0, out=out_indptr[1:])
    return start, out_indptr


def draw_rows(
    indptr: Tensor,
    src: Tensor,
    keys: Tensor,
    rows: Tensor,
    out_indptr: Tensor,
    fanout: int,
    replace: bool,
    key: int,
) -> Tensor:
    """Sample rows: see `raygnn.sampling.drawing.sample_rows`.

    Args:
        indptr: int64 ``[R+1]``; src: int32 or int64 ``[E]``; keys: int32 or int64 ``[R]``.
        rows: int64 ``[B]``; out_indptr: of `spans`.
        fanout: from 0 to `MOST_DRAWN`.
        key: 64 bits.

    Returns:
        int64 ``[B · fanout]``: source ids, row after row, padded with -1, since only the GPU knows
        their number.
    """
    assert 0 <= fanout <= MOST_DRAWN
    count = len(rows)
    out = rows.new_full((count * fanout,), -1)
    if len(out):
        lanes = triton.next_power_of_2(fanout)
        tile = max(1, _TILE // lanes)
        _draw[(triton.cdiv(count, tile),)](
            indptr,
            src,
            keys,
            rows,
            out_indptr,
            out,
            count,
            key - (1 << 64) if key >> 63 else key,  # always compiled for int64
            FANOUT=fanout,
            REPLACE=replace,
            ROWS=tile,
            LANES=lanes,
        )
    return out


def all_of(src: Tensor, start: Tensor, out_indptr: Tensor, total: int) -> Tensor:
    """Return the complete lists of rows: int64 ``[total]``; ``start`` and ``out_indptr`` of `spans`
    with a fanout of all."""
    shift = start - out_indptr[:-1]
    places = torch.arange(total, device=start.device)
    row = torch.repeat_interleave(out_indptr.diff(), output_size=total)
    return gather(src, places + shift[row], torch.int64)


def gather(
    table: Tensor,
    index: Tensor,
    dtype: torch.dtype,
    near: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Return ``table[index]`` in another dtype.

    Args:
        table: ``[N, …]``, contiguous.
        index: int64 ``[n]``; rows with an index below 0 are undefined.
        near: copies of rows of the table in faster memory.
        slots: integers ``[N]``, index in ``near`` of each row; below 0 = no copy.
    """
    out = torch.empty((len(index), *table.shape[1:]), dtype=dtype, device=index.device)
    if out.numel():
        width = out[0].numel()
        lanes = min(triton.next_power_of_2(width), _TILE // 4)
        rows = _TILE // lanes
        _gather[(triton.cdiv(len(index), rows), triton.cdiv(width, lanes))](
            table,
            table if near is None else near,
            index if slots is None else slots,
            index,
            out,
            len(index),
            WIDTH=width,
            SOME_NEAR=near is not None,
            ROWS=rows,
            LANES=lanes,
        )
    return out


def relabel(known: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number ``ids`` compactly, after ``known``: see `raygnn.sampling.kernels.relabel`.

    By a stable sort, after which the first of equal ids is where it appears first.

    Args:
        known: int64 ``[K]``, distinct; ids: int64 ``[M]``, -1 = none.

    Returns:
        ``(nodes [K+M+1], local [M], count)``: only the first ``count`` of ``nodes`` are valid;
        ``local`` is undefined where there is no id.
    """
    joined = torch.cat([known, ids])
    size = len(joined)
    ordered, place = joined.sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    group = begins.cumsum(0) - 1  # cummax would run on a single block of GPU threads
    first = joined.new_empty(size + 1).scatter_(0, torch.where(begins, group, size), place)
    new = torch.empty_like(begins).scatter_(0, place, begins & (ordered >= 0))
    number = new.cumsum(0) - 1
    local = torch.empty_like(joined).scatter_(0, place, number[first[group]])
    nodes = joined.new_empty(size + 1).scatter_(0, torch.where(new, number, size), joined)
    return nodes, local[len(known) :], new.sum()
