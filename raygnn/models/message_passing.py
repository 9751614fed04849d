"""Message passing operations of layers.

Edges of a block are grouped by destination, so that a sum over neighbours is one
``embedding_bag`` of the source rows: no messages are materialised. The backward pass does the same
with edges grouped by source (``embedding_bag``'s own on a CPU adds edge after edge, at several
times the cost). Shape suffixes: S source nodes, D destination nodes, E edges, H heads, F features.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raygnn.compat import weight_gradient_of_bags
from raygnn.models import compiled
from raygnn.sampling.batch import Adjacency

Reduce = Literal["sum", "mean", "max"]


def widened(x: Tensor) -> Tensor:
    """Convert low-precision rows to float32."""
    return x if x.dtype == torch.float64 else x.float()


def edge_rows(adj: Adjacency) -> Tensor:
    """Return the edge features ``[E, F]``, which blocks have if a layer is built with any."""
    assert adj.rows is not None
    return adj.rows


class Kernels:
    """The operations by gather and scatter, for `torch.export`, without reading sizes. Messages are
    materialised, which costs memory.

    Attributes:
        knows_sizes: sizes are numbers, and may be read.
    """

    knows_sizes = False

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
        messages = x.index_select(0, adj.src)
        if weight is not None:
            messages = messages * weight.to(x.dtype).unsqueeze(1)
        return self.combine_edges(adj, messages, reduce)

    def combine_edges(self, adj: Adjacency, rows: Tensor, reduce: Reduce = "sum") -> Tensor:
        """Aggregate the rows of edges, ``[E, F]`` → ``[D, F]``; otherwise as `aggregate`."""
        from torch_geometric.utils import scatter  # type: ignore[import-untyped]

        return scatter(rows, adj.dst, 0, adj.num_dst, reduce)

    def from_sources(self, adj: Adjacency, x: Tensor) -> Tensor:
        """Return the source's row of each edge, ``[S, …]`` → ``[E, …]``."""
        return x.index_select(0, adj.src)

    def from_destinations(self, adj: Adjacency, x: Tensor) -> Tensor:
        """Return the destination's row of each edge, ``[D, …]`` → ``[E, …]``."""
        return x.index_select(0, adj.dst)

    def edge_softmax(self, adj: Adjacency, score: Tensor) -> Tensor:
        """Apply softmax to ``score`` ``[E, H]`` over the in-edges of each destination."""
        from torch_geometric.utils import softmax  # takes a second to import

        return softmax(widened(score), adj.dst, num_nodes=adj.num_dst).to(score.dtype)

    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        """Sum source rows ``[S, H, F]`` weighted by ``[E, H]``: ``[D, H, F]`` in ``x``'s dtype."""
        messages = x.index_select(0, adj.src) * weight.to(x.dtype).unsqueeze(2)
        return self.combine_edges(adj, messages.flatten(1)).view(-1, *x.shape[1:])


class _Native(Kernels):
    """Operations without messages, on any device and dtype; equal except for rounding."""

    knows_sizes = True

    def aggregate(
        self, adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None
    ) -> Tensor:
        if reduce == "max":
            if not adj.src.numel():  # embedding_bag refuses an empty table
                return x.new_zeros((adj.num_dst, x.shape[1])) + 0 * x.sum()
            # numpy has no bf16, and CUDA no gradient of bf16 maxima
            wide = widened(x)
            if x.device.type == "cpu":
                return _Largest.apply(wide, adj).to(x.dtype)
            return F.embedding_bag(adj.src, wide, adj.indptr[:-1], mode="max").to(x.dtype)
        if weight is not None:
            weight = weight.to(x.dtype)
        return _CombineSources.apply(x, weight, adj, reduce)

    def combine_edges(self, adj: Adjacency, rows: Tensor, reduce: Reduce = "sum") -> Tensor:
        # on one thread bags are four times as fast as index_add and seven times as segment_reduce
        # (fp32, ten edges each, F = 64)
        if reduce == "max":
            edges = torch.arange(rows.shape[0], device=rows.device)
            return self.aggregate(Adjacency(adj.indptr, edges), rows, "max")
        return _CombineEdges.apply(rows, adj, reduce)

    def from_sources(self, adj: Adjacency, x: Tensor) -> Tensor:
        return _FromNodes.apply(x, adj, True)

    def from_destinations(self, adj: Adjacency, x: Tensor) -> Tensor:
        return _FromNodes.apply(x, adj, False)

    def edge_softmax(self, adj: Adjacency, score: Tensor) -> Tensor:
        return _EdgeSoftmax.apply(widened(score), adj).to(score.dtype)

    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        return _Attend.apply(x, weight.to(x.dtype), adj)


NATIVE, SCATTER = _Native(), Kernels()


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
        (x, weight), adj = ctx.saved_tensors, ctx.adj
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


class _Largest(torch.autograd.Function):
    """``x [S, F]`` → each destination's largest numbers, ``[D, F]``; 0 without edges.

    On one thread in a third of the time of torch's ``embedding_bag`` and its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, adj: Adjacency) -> Tensor:
        rows = x.detach().numpy()
        out, ctx.source = compiled.largest(adj.indptr.numpy(), adj.src.numpy(), rows)
        ctx.num_src = len(x)
        return torch.from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_zeros(ctx.num_src, grad.shape[1])
        compiled.add_to_sources(grad.contiguous().numpy(), ctx.source, out.numpy())
        return out, None


class _CombineEdges(torch.autograd.Function):
    """``rows [E, F]`` → each destination's sum or mean, ``[D, F]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, adj: Adjacency, reduce: Reduce) -> Tensor:
        ctx.adj, ctx.reduce = adj, reduce
        return _per_destination(adj, rows, reduce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.reduce == "mean":
            grad = grad / ctx.adj.degree.clamp(min=1).unsqueeze(1).to(grad.dtype)
        return grad.index_select(0, ctx.adj.dst), None, None


class _FromNodes(torch.autograd.Function):
    """``x [S or D, …]`` → row of each edge's source or destination, ``[E, …]``. torch's own adds
    gradients in no fixed order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adj: Adjacency, sources: bool) -> Tensor:
        ctx.adj, ctx.num_src = adj, len(x) if sources else None
        return x.index_select(0, adj.src if sources else adj.dst)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows = grad.flatten(1)
        if ctx.num_src is None:
            out = _per_destination(ctx.adj, rows)
        else:
            start, _, edge = by_source(ctx.adj, ctx.num_src)
            out = _bags(edge, rows, start[:-1], None)
        return out.view(-1, *grad.shape[1:]), None, None


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
        (x, weight), adj = ctx.saved_tensors, ctx.adj
        heads, grad = weight.shape[1], grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            start, dst, edge = by_source(adj, len(x))
            src = torch.repeat_interleave(start[1:] - start[:-1], output_size=len(dst))
            grad_x = _head_bags(start, src, dst, grad, weight.index_select(0, edge))
        if ctx.needs_input_grad[1]:
            head = torch.arange(heads, device=x.device)
            rows, others = ((n.unsqueeze(1) * heads + head).flatten() for n in (adj.dst, adj.src))
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


def _per_destination(adj: Adjacency, rows: Tensor, reduce: Reduce = "sum") -> Tensor:
    """Return the sum or mean of ``rows [E, F]`` over each destination's edges, ``[D, F]``."""
    return _bags(torch.arange(len(rows), device=rows.device), rows, adj.indptr[:-1], None, reduce)


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
    return weight_gradient_of_bags(left, right, index, start, row)


def by_source(adj: Adjacency, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges grouped by source: ``(start [S+1], dst [E], position in adj [E])``; cached
    in ``adj``."""
    cached = adj.__dict__
    if "_by_source" not in cached:
        if adj.src.device.type == "cpu":  # a quarter to a half of the cost of torch's sort
            arrays = compiled.by_source(adj.indptr.numpy(), adj.src.numpy(), num_src)
            cached["_by_source"] = tuple(map(torch.from_numpy, arrays))
        else:
            cached["_by_source"] = _sorted_by_source(adj, num_src)
    return cached["_by_source"]


def _sorted_by_source(adj: Adjacency, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group by source on a GPU without waiting for it, as ``bincount`` does; int32 sorts faster."""
    src, edge = adj.src.int().sort(stable=True)
    start = torch.searchsorted(src, torch.arange(num_src + 1, device=src.device, dtype=src.dtype))
    return start, adj.dst.index_select(0, edge), edge
