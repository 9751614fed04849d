"""Message passing in plain torch, on any device and dtype that torch has.

Edges of a block are grouped by destination, so that a sum over neighbours is one
``embedding_bag`` straight from the source rows: no messages are materialised. Backward it is the
same over the edges grouped by source (``embedding_bag``'s own backward on a CPU adds one edge
after the other, at several times the cost). Shape suffixes: S source nodes, D destination nodes,
E edges, H heads, F features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raygnn.models.kernels import passes
from raygnn.models.kernels.api import Reduce
from raygnn.sampling.batch import Adjacency


def aggregate(adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.aggregate`."""
    if reduce == "max":
        if not adj.src.numel():  # embedding_bag refuses an empty table
            return x.new_zeros((adj.num_dst, x.shape[1])) + 0 * x.sum()
        return F.embedding_bag(adj.src, x, adj.indptr[:-1], mode="max")
    if weight is not None:
        weight = weight.to(x.dtype)
    out: Tensor = _Combine.apply(x, weight, adj, reduce)
    return out


def edge_softmax(adj: Adjacency, score: Tensor, num_src: int) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.edge_softmax`."""
    wide = score if score.dtype == torch.float64 else score.float()
    dst = adj.dst
    index = dst.unsqueeze(1).expand_as(wide)
    top = wide.new_full((adj.num_dst, wide.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, index, wide.detach(), "amax")
    exp = (wide - top.index_select(0, dst)).exp()
    total = exp.new_zeros(top.shape).index_add(0, dst, exp)
    return (exp / total.index_select(0, dst)).to(score.dtype)


def attend(adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.attend`."""
    out: Tensor = _Attend.apply(x, weight.to(x.dtype), adj)
    return out


class _Combine(torch.autograd.Function):
    """``x [S, F]``, ``weight [E]`` or None → each destination's sum or mean, ``[D, F]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, adj: Adjacency, reduce: Reduce
    ) -> Tensor:
        ctx.adj, ctx.num_src, ctx.reduce = adj, len(x), reduce
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _bags(adj.src, x, adj.indptr[:-1], weight, reduce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        adj = ctx.adj
        if ctx.reduce == "mean":
            grad = grad / adj.degree.clamp(min=1).unsqueeze(1).to(grad.dtype)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            start, dst, edge = by_source(adj, ctx.num_src)
            weights = None if weight is None else weight.index_select(0, edge)
            grad_x = _bags(dst, grad.contiguous(), start[:-1], weights)
        if ctx.needs_input_grad[1]:
            grad_weight = _dots(grad, adj.dst, x, adj.src, adj.indptr[:-1])
        return grad_x, grad_weight, None, None


class _Attend(torch.autograd.Function):
    """``x [S, H, F]``, ``weight [E, H]`` → ``[D, H, F]``: a bag per destination and head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, adj: Adjacency) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.adj = adj
        return _head_bags(adj.indptr, adj.dst, adj.src, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        adj = ctx.adj
        heads = weight.shape[1]
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            start, dst, edge = by_source(adj, len(x))
            src = torch.repeat_interleave(start[1:] - start[:-1])
            grad_x = _head_bags(start, src, dst, grad, weight.index_select(0, edge))
        if ctx.needs_input_grad[1]:
            head = torch.arange(heads, device=x.device)
            rows = (adj.dst.unsqueeze(1) * heads + head).flatten()
            others = (adj.src.unsqueeze(1) * heads + head).flatten()
            one_each = torch.arange(len(rows), device=x.device)
            dots = _dots(grad.flatten(0, 1), rows, x.flatten(0, 1), others, one_each)
            grad_weight = dots.view(weight.shape)
        return grad_x, grad_weight, None


def _bags(
    index: Tensor, rows: Tensor, start: Tensor, weight: Tensor | None, reduce: Reduce = "sum"
) -> Tensor:
    """Sum or mean of ``weight · rows[index]`` over each bag, ``[bags, F]``."""
    if not index.numel():  # embedding_bag refuses an empty table
        return rows.new_zeros((len(start), rows.shape[1]))
    return F.embedding_bag(index, rows, start, mode=reduce, per_sample_weights=weight)


def _head_bags(start: Tensor, node: Tensor, index: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Per node and head, the sum of ``weight [E, H] · rows[index]`` ``[·, H, F]``: ``[N, H, F]``.

    Edge lists, one after the other, become H lists for each node: one bag for each. Three times
    as fast as building ``[E, H, F]`` messages and adding them up.

    Args:
        start: ``[N+1]``, where each node's edges begin.
        node: ``[E]``, each edge's node, ascending.
    """
    heads = weight.shape[1]
    head = torch.arange(heads, device=rows.device)
    first, size = start[:-1], start[1:] - start[:-1]
    # edge e of node n goes to  start[n]·H + h·size[n] + (e - start[n])
    at = (first * (heads - 1)).index_select(0, node) + torch.arange(len(node), device=rows.device)
    slot = (at.unsqueeze(1) + size.index_select(0, node).unsqueeze(1) * head).flatten()
    flat = torch.empty_like(slot).scatter_(0, slot, (index.unsqueeze(1) * heads + head).flatten())
    weights = weight.new_empty(len(slot)).scatter_(0, slot, weight.flatten())
    bags = (first.unsqueeze(1) * heads + head * size.unsqueeze(1)).flatten()
    out = _bags(flat, rows.reshape(-1, rows.shape[2]), bags, weights)
    return out.view(-1, heads, rows.shape[2])


def _dots(left: Tensor, row: Tensor, right: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """``left[row] · right[index]`` for each edge, ``[E]``, without building either."""
    if not index.numel():
        return left.new_zeros(0)
    kernel = torch.ops.aten._embedding_bag_per_sample_weights_backward
    dots: Tensor = kernel(left, right, index, start, row, 0)
    return dots


def by_source(adj: Adjacency, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same edges grouped by source: ``(start [S+1], dst [E], position in adj [E])``."""
    if adj.src.device.type != "cpu":
        return _sorted_by_source(adj, num_src)
    # a quarter to a half of the cost of torch's sort
    found = passes.by_source(adj.indptr.numpy(), adj.src.numpy(), num_src)
    start, dst, edge = (torch.from_numpy(array) for array in found)
    return start, dst, edge


def _sorted_by_source(adj: Adjacency, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    edge = torch.argsort(adj.src, stable=True)
    count = torch.bincount(adj.src, minlength=num_src)
    return F.pad(count.cumsum(0), (1, 0)), adj.dst.index_select(0, edge), edge
