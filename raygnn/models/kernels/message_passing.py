"""Message passing operations of layers, and the choice of their implementation.

Edges of a block are grouped by destination, so that a sum over neighbours is one
``embedding_bag`` of the source rows: no messages are materialised. The backward pass does the same
with edges grouped by source (``embedding_bag``'s own on a CPU adds edge after edge, at several
times the cost). Shape suffixes: S source nodes, D destination nodes, E edges, H heads, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raygnn.compat import weight_gradient_of_bags
from raygnn.errors import CapabilityError, ConfigError
from raygnn.models.kernels import compiled
from raygnn.sampling.batch import Adjacency, dgl, has_cuda

Choice = Literal["auto", "torch", "dgl", "scatter"]
Reduce = Literal["sum", "mean", "max"]


class Kernels(ABC):
    """Implementation of the operations; all are equal but for rounding."""

    @abstractmethod
    def aggregate(
        self, adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None
    ) -> Tensor:
        """Aggregate the source rows of each destination.

        Args:
            x: ``[S, F]``.
            reduce: 0 for a destination without edges.
            weight: ``[E]``, multiplies each source row ("sum" only).

        Returns:
            ``[D, F]`` in ``x``'s dtype.
        """

    def combine_edges(self, adj: Adjacency, rows: Tensor, reduce: Reduce = "sum") -> Tensor:
        """Aggregate the rows of edges, ``[E, F]`` → ``[D, F]``; otherwise as `aggregate`.

        With torch's ``embedding_bag`` in every implementation: on one thread four times as fast as
        ``index_add`` and seven times as ``segment_reduce`` (fp32, ten edges each, F = 64).
        """
        out: Tensor
        if reduce == "max":
            edges = torch.arange(rows.shape[0], device=rows.device)
            out = NATIVE.aggregate(Adjacency(adj.indptr, edges), rows, "max")
        else:
            out = _CombineEdges.apply(rows, adj, reduce)
        return out

    def from_sources(self, adj: Adjacency, x: Tensor) -> Tensor:
        """Return the source's row of each edge, ``[S, …]`` → ``[E, …]``."""
        return x.index_select(0, adj.src)

    def from_destinations(self, adj: Adjacency, x: Tensor) -> Tensor:
        """Return the destination's row of each edge, ``[D, …]`` → ``[E, …]``."""
        return x.index_select(0, adj.dst)

    def edge_softmax(self, adj: Adjacency, score: Tensor, num_src: int) -> Tensor:
        """Apply softmax to ``score`` ``[E, H]`` over the in-edges of each destination."""
        wide = score if score.dtype == torch.float64 else score.float()
        dst = adj.dst
        index = dst.unsqueeze(1).expand_as(wide)
        top = wide.new_full((adj.num_dst, wide.shape[1]), -torch.inf)
        top = top.scatter_reduce(0, index, wide.detach(), "amax")
        exp = (wide - top.index_select(0, dst)).exp()
        total = exp.new_zeros(top.shape).index_add(0, dst, exp)
        return (exp / total.index_select(0, dst)).to(score.dtype)

    @abstractmethod
    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        """Sum source rows ``[S, H, F]`` weighted by ``[E, H]``: ``[D, H, F]`` in ``x``'s dtype."""


def select(choice: Choice, x: Tensor, reduce: Reduce = "sum") -> Kernels:
    """Return the kernels for ``x``.

    "auto" is the faster one on one thread, forward and backward pass together, on blocks from a
    sampler (each used once, so that DGL builds its formats anew). In torch sums and means take 0.5
    to 0.9 of DGL's time, weighted sums and attention 0.03 to 0.55, maxima 1.8 to 2.5. On a GPU,
    where the two were not compared, it is torch.

    Args:
        choice: the config's ``model.kernels``, or "scatter" for exported programs.
        reduce: "max" if maxima will be computed.

    Raises:
        ConfigError: "dgl" for a device or dtype without DGL kernels.
    """
    if choice == "scatter":
        return SCATTER
    reason = None
    if choice == "dgl" or (choice == "auto" and reduce == "max" and x.device.type == "cpu"):
        reason = _why_no_dgl(x.device.type, x.dtype)
        if reason is None:
            return DGL
    if choice == "dgl":
        raise ConfigError(
            f"DGL's kernels cannot run here: {reason}",
            where="model.kernels",
            remedy="use auto or torch",
        )
    return NATIVE


@cache
def _why_no_dgl(device: str, dtype: torch.dtype) -> str | None:
    """Return why DGL cannot compute on such tensors; None if it can."""
    if device not in ("cpu", "cuda"):
        return f"it does not support devices of type {device}"
    if device == "cpu" and dtype == torch.float16:
        return "it does not support float16 on a CPU"
    try:
        dgl()
        return "this is a CPU build of DGL" if device == "cuda" and not has_cuda() else None
    except CapabilityError as error:
        return error.what


class _Native(Kernels):
    """Plain torch, on any device and dtype."""

    def aggregate(
        self, adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None
    ) -> Tensor:
        if reduce == "max":
            if not adj.src.numel():  # embedding_bag refuses an empty table
                return x.new_zeros((adj.num_dst, x.shape[1])) + 0 * x.sum()
            # the gradient of a largest row has no kernel for bf16 on CUDA
            wide = x.float() if x.is_cuda and x.dtype == torch.bfloat16 else x
            return F.embedding_bag(adj.src, wide, adj.indptr[:-1], mode="max").to(x.dtype)
        if weight is not None:
            weight = weight.to(x.dtype)
        out: Tensor = _CombineSources.apply(x, weight, adj, reduce)
        return out

    def from_sources(self, adj: Adjacency, x: Tensor) -> Tensor:
        out: Tensor = _FromSources.apply(x, adj)
        return out

    def from_destinations(self, adj: Adjacency, x: Tensor) -> Tensor:
        out: Tensor = _FromDestinations.apply(x, adj)
        return out

    def edge_softmax(self, adj: Adjacency, score: Tensor, num_src: int) -> Tensor:
        wide = score if score.dtype == torch.float64 else score.float()
        out: Tensor = _EdgeSoftmax.apply(wide, adj)
        return out.to(score.dtype)

    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = _Attend.apply(x, weight.to(x.dtype), adj)
        return out


class _Dgl(Kernels):
    """DGL's kernels."""

    def aggregate(
        self, adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None
    ) -> Tensor:
        graph, ops = adj.to_dgl(len(x)), dgl().ops
        out: Tensor
        if weight is not None:
            out = ops.u_mul_e_sum(graph, x, weight.to(x.dtype).unsqueeze(1))
        elif reduce != "max":
            out = getattr(ops, f"copy_u_{reduce}")(graph, x)
        elif not adj.src.numel():  # DGL fails in the backward pass
            out = x.new_zeros((len(adj.degree), x.shape[1])) + 0 * x.sum()
        else:  # DGL gives -inf without edges
            out = ops.copy_u_max(graph, x).masked_fill(adj.degree.unsqueeze(1) == 0, 0)
        return out

    def edge_softmax(self, adj: Adjacency, score: Tensor, num_src: int) -> Tensor:
        wide = score if score.dtype == torch.float64 else score.float()
        soft: Tensor = dgl().ops.edge_softmax(adj.to_dgl(num_src), wide)
        return soft.to(score.dtype)

    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        graph = adj.to_dgl(len(x))
        out: Tensor = dgl().ops.u_mul_e_sum(graph, x, weight.to(x.dtype).unsqueeze(2))
        return out


class _Scatter(Kernels):
    """Gather and scatter operations for `torch.export`: torch's own and without reading sizes.

    Messages are materialised, which costs memory.
    """

    def aggregate(
        self, adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None
    ) -> Tensor:
        messages = x.index_select(0, adj.src)
        if weight is not None:
            messages = messages * weight.to(x.dtype).unsqueeze(1)
        return self.combine_edges(adj, messages, reduce)

    def combine_edges(self, adj: Adjacency, rows: Tensor, reduce: Reduce = "sum") -> Tensor:
        out = rows.new_zeros(adj.num_dst, rows.shape[1])
        if reduce == "max":
            index = adj.dst.unsqueeze(1).expand_as(rows)
            return out.scatter_reduce(0, index, rows, "amax", include_self=False)
        out = out.index_add(0, adj.dst, rows)
        if reduce == "mean":
            out = out / adj.degree.clamp(min=1).unsqueeze(1).to(out.dtype)
        return out

    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        messages = x.index_select(0, adj.src) * weight.to(x.dtype).unsqueeze(2)
        out = x.new_zeros(adj.num_dst, *x.shape[1:])
        return out.index_add(0, adj.dst, messages)


NATIVE, DGL, SCATTER = _Native(), _Dgl(), _Scatter()


class _CombineSources(torch.autograd.Function):
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


class _CombineEdges(torch.autograd.Function):
    """``rows [E, F]`` → each destination's sum or mean, ``[D, F]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, adj: Adjacency, reduce: Reduce) -> Tensor:
        ctx.adj, ctx.reduce = adj, reduce
        return _bags(
            torch.arange(len(rows), device=rows.device), rows, adj.indptr[:-1], None, reduce
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.reduce == "mean":
            grad = grad / ctx.adj.degree.clamp(min=1).unsqueeze(1).to(grad.dtype)
        return grad.index_select(0, ctx.adj.dst), None, None


class _FromSources(torch.autograd.Function):
    """``x [S, …]`` → ``[E, …]``. torch's own adds gradients in no fixed order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adj: Adjacency) -> Tensor:
        ctx.adj, ctx.num_src = adj, len(x)
        return x.index_select(0, adj.src)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start, _, edge = by_source(ctx.adj, ctx.num_src)
        return _bags(edge, grad.flatten(1), start[:-1], None).view(-1, *grad.shape[1:]), None


class _FromDestinations(torch.autograd.Function):
    """``x [D, …]`` → ``[E, …]``, likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adj: Adjacency) -> Tensor:
        ctx.adj = adj
        return x.index_select(0, adj.dst)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _per_destination(ctx.adj, grad.flatten(1)).view(-1, *grad.shape[1:]), None


class _EdgeSoftmax(torch.autograd.Function):
    """``score [E, H]`` → shares of each destination's edges, ``[E, H]``."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, adj: Adjacency) -> Tensor:
        index = adj.dst.unsqueeze(1).expand_as(score)
        top = score.new_full((adj.num_dst, score.shape[1]), -torch.inf)
        top = top.scatter_reduce(0, index, score, "amax")
        exp = (score - top.index_select(0, adj.dst)).exp_()
        share = exp.div_(_per_destination(adj, exp).index_select(0, adj.dst))
        ctx.adj = adj
        ctx.save_for_backward(share)
        return share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        weighted = grad * share
        total = _per_destination(ctx.adj, weighted).index_select(0, ctx.adj.dst)
        return weighted.addcmul_(share, total, value=-1), None


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
            src = torch.repeat_interleave(start[1:] - start[:-1], output_size=len(dst))
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
    """Return the sum or mean of ``weight · rows[index]`` over each bag, ``[bags, F]``."""
    if not index.numel():  # embedding_bag refuses an empty table
        return rows.new_zeros((len(start), rows.shape[1]))
    return F.embedding_bag(index, rows, start, mode=reduce, per_sample_weights=weight)


def _per_destination(adj: Adjacency, rows: Tensor) -> Tensor:
    """Sum ``rows [E, F]`` over each destination's edges, ``[D, F]``."""
    return _bags(torch.arange(len(rows), device=rows.device), rows, adj.indptr[:-1], None)


def _head_bags(start: Tensor, node: Tensor, index: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Sum ``weight [E, H] · rows[index]`` ``[·, H, F]`` per node and head: ``[N, H, F]``.

    Each node's edge list becomes H bags. Three times as fast as building ``[E, H, F]`` messages and
    summing them.

    Args:
        start: ``[N+1]``, start of each node's edges.
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
    """Return ``left[row] · right[index]`` of each edge, ``[E]``, without building either."""
    if not index.numel():
        return left.new_zeros(0)
    dots: Tensor = weight_gradient_of_bags(left, right, index, start, row)
    return dots


def by_source(adj: Adjacency, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges grouped by source: ``(start [S+1], dst [E], position in adj [E])``; cached
    in ``adj``."""
    found: tuple[Tensor, Tensor, Tensor] | None = adj.__dict__.get("_by_source")
    if found is None:
        if adj.src.device.type == "cpu":  # a quarter to a half of the cost of torch's sort
            arrays = compiled.by_source(adj.indptr.numpy(), adj.src.numpy(), num_src)
            start, dst, edge = map(torch.from_numpy, arrays)
            found = start, dst, edge
        else:
            found = _sorted_by_source(adj, num_src)
        adj.__dict__["_by_source"] = found
    return found


def _sorted_by_source(adj: Adjacency, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group by source on a GPU without waiting for it, as ``bincount`` does; int32 sorts faster."""
    src, edge = adj.src.int().sort(stable=True)
    start = torch.searchsorted(src, torch.arange(num_src + 1, device=src.device, dtype=src.dtype))
    return start, adj.dst.index_select(0, edge), edge
