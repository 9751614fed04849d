"""Message passing in plain torch, on any device and dtype that torch has.

Edges of a block are grouped by destination, so that a sum over neighbours is one
``embedding_bag`` straight from the source rows: no messages are materialised. Shape suffixes: S
source nodes, D destination nodes, E edges, H heads, F features.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.sampling.batch import Adjacency

Reduce = Literal["sum", "mean", "max"]


def aggregate(adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None) -> Tensor:
    """Combine the source rows of each destination.

    Args:
        x: ``[S, F]``.
        reduce: "sum", "mean" or "max"; a destination without edges gives 0.
        weight: ``[E]``, multiplies each source row ("sum" only).

    Returns:
        ``[D, F]`` in ``x``'s dtype.
    """
    if not adj.src.numel():  # embedding_bag refuses an empty table
        return x.new_zeros((len(adj.degree), x.shape[1])) + 0 * x.sum()
    weight = None if weight is None else weight.to(x.dtype)
    return F.embedding_bag(adj.src, x, adj.indptr[:-1], mode=reduce, per_sample_weights=weight)


def edge_softmax(adj: Adjacency, score: Tensor) -> Tensor:
    """Softmax of ``score`` ``[E, H]`` over the in-edges of each destination, in fp32 at least."""
    wide = score if score.dtype == torch.float64 else score.float()
    dst = adj.dst
    index = dst.unsqueeze(1).expand_as(wide)
    top = wide.new_full((len(adj.degree), wide.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, index, wide.detach(), "amax")
    exp = (wide - top[dst]).exp()
    total = exp.new_zeros(top.shape).index_add(0, dst, exp)
    return (exp / total[dst]).to(score.dtype)


def attend(adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
    """Sum of source rows weighted per edge and head.

    Args:
        x: ``[S, H, F]``.
        weight: ``[E, H]``.

    Returns:
        ``[D, H, F]``.
    """
    heads, width = weight.shape[1], x.shape[2]
    if not adj.src.numel():
        return x.new_zeros((len(adj.degree), heads, width)) + 0 * x.sum()
    # One bag per (destination, head): the edges of a destination, once for each head. Three times
    # as fast as building [E, H, F] messages and adding them up.
    start, dst = adj.indptr[:-1], adj.dst
    head = torch.arange(heads, device=x.device)
    rank_in_list = torch.arange(len(dst), device=x.device) - start[dst]
    slot = (start * heads)[dst] + rank_in_list
    slot = (slot.unsqueeze(1) + head * adj.degree[dst].unsqueeze(1)).flatten()
    index = adj.src.new_empty(len(slot))
    index[slot] = (adj.src.unsqueeze(1) * heads + head).flatten()
    bags = (start.unsqueeze(1) * heads + head * adj.degree.unsqueeze(1)).flatten()
    weights = weight.to(x.dtype).new_empty(len(slot)).scatter(0, slot, weight.to(x.dtype).flatten())
    rows = x.reshape(-1, width)
    out = F.embedding_bag(index, rows, bags, mode="sum", per_sample_weights=weights)
    return out.view(-1, heads, width)


def with_self_loops(adj: Adjacency) -> Adjacency:
    """``adj`` with one more edge per destination, from itself, at the end of its list.

    A block's destinations are the first of its sources, so node d's own number is d.
    """
    device = adj.src.device
    num_dst = len(adj.degree)
    own = torch.arange(num_dst, device=device)
    indptr = adj.indptr + torch.arange(num_dst + 1, device=device)
    src = adj.src.new_empty(len(adj.src) + num_dst)
    src[indptr[1:] - 1] = own
    rest = torch.ones(len(src), dtype=torch.bool, device=device)
    rest[indptr[1:] - 1] = False
    src[rest] = adj.src
    return Adjacency(indptr, src)


class GCNConv(nn.Module):
    """Graph convolution (Kipf & Welling, ICLR 2017) on a block.

    Edges are weighted by the degrees of the *whole* graph, ``1 / sqrt(d_u d_v)`` with self loops
    counted, and a sampled neighbourhood is scaled up to its full size, so that the expectation
    over samples is the full-graph layer. Between different node types the weight is ``1 / d_v``.
    """

    def __init__(self, in_features: int, out_features: int, *, same_type: bool):
        super().__init__()
        self.same_type = same_type
        self.linear = nn.Linear(in_features, out_features, bias=False)
        nn.init.xavier_uniform_(self.linear.weight)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Tensor) -> Tensor:
        """``h_src [S, F_in]``, ``degree [≥ S]`` (of the destination type's nodes) → ``[D, F]``."""
        num_dst = len(adj.degree)
        full = degree[:num_dst].float()
        scale = (full / adj.degree.clamp(min=1))[adj.dst]
        h = self.linear(h_src)
        if not self.same_type:
            weight = scale / full.clamp(min=1)[adj.dst]
            return aggregate(adj, h, "sum", weight) + self.bias
        norm = (degree[: len(h_src)].float() + 1).rsqrt()
        weight = scale * norm[adj.src] * norm[adj.dst]
        own = h[:num_dst] * norm[:num_dst].square().unsqueeze(1).to(h.dtype)
        return aggregate(adj, h, "sum", weight) + own + self.bias


class SAGEConv(nn.Module):
    """The neighbour half of GraphSAGE (Hamilton, Ying & Leskovec, NeurIPS 2017).

    The transform of the node itself is shared between edge types and sits in the network.
    """

    def __init__(self, in_features: int, out_features: int, *, reduce: Reduce):
        super().__init__()
        self.reduce = reduce
        self.linear = nn.Linear(in_features, out_features, bias=False)
        nn.init.xavier_uniform_(self.linear.weight, gain=nn.init.calculate_gain("relu"))

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        """``h_src [S, F_in]`` → ``[D, F]``."""
        narrow = self.linear.out_features < self.linear.in_features and self.reduce != "max"
        if narrow:  # linear in h, so the cheaper order
            return aggregate(adj, self.linear(h_src), self.reduce)
        return self.linear(aggregate(adj, h_src, self.reduce))


class GATConv(nn.Module):
    """Graph attention: GAT (Veličković et al., ICLR 2018) or GATv2 (Brody et al., ICLR 2022).

    Args:
        out_features: per head.
        heads: their outputs are concatenated, or averaged when ``mean_heads``.
        dynamic: GATv2's order of operations.
        same_type: source and destination type are one; then a node attends to itself as well.
    """

    def __init__(
        self,
        in_src: int,
        in_dst: int,
        out_features: int,
        *,
        heads: int,
        mean_heads: bool,
        attn_dropout: float,
        dynamic: bool,
        same_type: bool,
    ):
        super().__init__()
        self.heads, self.width = heads, out_features
        self.mean_heads, self.dynamic, self.same_type = mean_heads, dynamic, same_type
        gain = nn.init.calculate_gain("relu")
        self.src = nn.Linear(in_src, heads * out_features, bias=dynamic)
        nn.init.xavier_normal_(self.src.weight, gain=gain)
        # GAT shares one transform between both ends where they are of one type
        self.dst = None
        if dynamic or not same_type:
            self.dst = nn.Linear(in_dst, heads * out_features, bias=dynamic)
            nn.init.xavier_normal_(self.dst.weight, gain=gain)
        self.attn_src = nn.Parameter(torch.empty(heads, out_features))
        nn.init.xavier_normal_(self.attn_src, gain=gain)
        self.attn_dst = None
        if not dynamic:
            self.attn_dst = nn.Parameter(torch.empty(heads, out_features))
            nn.init.xavier_normal_(self.attn_dst, gain=gain)
        self.attn_dropout = nn.Dropout(attn_dropout)
        self.bias = nn.Parameter(torch.zeros(out_features if mean_heads else heads * out_features))

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        """``h_src [S, F_src]``, ``h_dst [D, F_dst]`` → ``[D, heads·F]``, or ``[D, F]``."""
        if self.same_type:
            adj = with_self_loops(adj)
        left = self.src(h_src).view(-1, self.heads, self.width)
        if self.dst is None:
            right = left[: len(h_dst)]
        else:
            right = self.dst(h_dst).view(-1, self.heads, self.width)
        if self.attn_dst is None:
            joint = F.leaky_relu(left[adj.src] + right[adj.dst], 0.2)
            score = (joint * self.attn_src).sum(-1)
        else:
            own, other = (right * self.attn_dst).sum(-1), (left * self.attn_src).sum(-1)
            score = F.leaky_relu(other[adj.src] + own[adj.dst], 0.2)
        out = attend(adj, left, self.attn_dropout(edge_softmax(adj, score)))
        return (out.mean(1) if self.mean_heads else out.flatten(1)) + self.bias
