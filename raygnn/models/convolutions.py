"""The convolutions: one edge type of one layer each. Shapes as in `models.kernels.message_passing`.

GCN, GraphSAGE and GIN are *linear*: first the sources are combined per destination, then `finish`
makes of that the rows which the layer's weight matrix is applied to. The first step does without
parameters, so it can be done elsewhere, while a batch is made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.kernels.message_passing import NATIVE, Choice, Kernels, Reduce, select
from raygnn.models.linear import Dropout, join, linear
from raygnn.models.norm import activation, norm, normalise
from raygnn.sampling.batch import Adjacency

# how a linear convolution combines raw features: "gcn" see `GCNConv`
CombineKind = Literal["sum", "mean", "max", "gcn"]

# adding up one number of a source row costs as much as so many multiplications of a product
# (one thread, fp32: 0.3 ns and 0.02 ns)
_GATHER_COST = 16


def with_self_loops(adj: Adjacency, ops: Kernels = NATIVE) -> Adjacency:
    """``adj`` with one more edge per destination, from itself, at the end of its list.

    A block's destinations are the first of its sources, so node d's own number is d. A loop's
    features are the mean of those of the destination's edges, as PyG's ``fill_value="mean"``.
    """
    device = adj.src.device
    num_dst = adj.num_dst
    own = torch.arange(num_dst, device=device)
    indptr = adj.indptr + torch.arange(num_dst + 1, device=device)
    # before the edges of destination d there are d loops
    place = torch.cat([torch.arange(adj.src.shape[0], device=device) + adj.dst, indptr[1:] - 1])
    src, dst = (
        torch.empty_like(place).scatter_(0, place, torch.cat([ends, own]))
        for ends in (adj.src, adj.dst)
    )
    rows = adj.rows
    if rows is not None:
        both = torch.cat([rows, ops.combine_edges(adj, rows, "mean")])
        rows = torch.empty_like(both).index_copy(0, place, both)
    return Adjacency(indptr, src, None, rows).knowing(dst)


class LinearConv(nn.Module, ABC):
    """A convolution ``finish(combine(h_src)) @ weight.T``.

    Args:
        reduce: how sources are combined.
        kernels: the config's ``model.kernels``.
    """

    def __init__(self, in_features: int, out_features: int, *, reduce: Reduce, kernels: Choice):
        super().__init__()
        self.reduce = reduce
        self.kernels: Choice = kernels
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    @abstractmethod
    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        """``h_src [S, F]``, ``degree [≥ S]`` → ``[D, F]``; zero without edges."""

    @abstractmethod
    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        """What ``weight`` is applied to, ``[D, F]``.

        Args:
            combined: ``[D, F]``, from `combine`.
            adj: its ``src`` is not looked at.
            degree: ``[≥ D]``.
        """

    def weight_first(self, adj: Adjacency, h_src: Tensor) -> bool:
        """Whether it is cheaper to apply ``weight`` to all sources, before they are combined."""
        out, width = len(self.weight), h_src.shape[1]
        if self.kernels == "scatter":  # sizes are not known yet
            return False
        more = (len(h_src) - adj.num_dst) * out * width
        return self.reduce != "max" and more < _GATHER_COST * len(adj.src) * (width - out)

    def transform(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None = None
    ) -> Tensor:
        """The layer's output ``[D, F_out]`` from combined rows."""
        return linear(self.finish(combined, adj, h_dst, degree), self.weight)

    def _scaled_up(self, rows: Tensor, adj: Adjacency, degree: Tensor | None) -> Tensor:
        """Return sums over sampled neighbours ``[D, F]`` times full / sampled degree, so that their
        expectation is the sum over all neighbours; others as they are."""
        if self.reduce != "sum" or degree is None:
            return rows
        scale = _wide(degree[: adj.num_dst], rows) / adj.degree.clamp(min=1)
        return rows * scale.to(rows.dtype).unsqueeze(1)

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Tensor | None = None
    ) -> Tensor:
        """``h_src [S, F]``, ``h_dst [D, F_dst]``, ``degree [≥ S]`` → ``[D, F_out]``.

        ``degree`` is that of the destination type's nodes in the whole graph.
        """
        if not self.weight_first(adj, h_src):
            return self.transform(self.combine(adj, h_src, degree), adj, h_dst, degree)
        return self.of_projected(adj, self.project(h_src), degree)

    def projects(self) -> bool:
        """Whether `project` and `of_projected` make what `forward` does."""
        return self.reduce != "max"

    def project(self, h_src: Tensor) -> Tensor:
        """Rows of sources with ``weight`` applied, ``[S, F_out]``."""
        return linear(h_src, self.weight)

    def of_projected(self, adj: Adjacency, z: Tensor, degree: Tensor | None = None) -> Tensor:
        """`forward` from the projected rows of the sources."""
        return self.finish(self.combine(adj, z, degree), adj, z[: adj.num_dst], degree)


class GCNConv(LinearConv):
    """Graph convolution (Kipf & Welling, ICLR 2017) on a block; the bias sits in the layer.

    Edges are weighted by the degrees of the *whole* graph, ``1 / sqrt((d_u + 1)(d_v + 1))`` with
    self loops counted, and a sampled neighbourhood is scaled up to its full size, so that the
    expectation over samples is the full-graph layer. Between different node types the weight is
    ``1 / d_v``. The part that depends on the source is all of `combine`::

        combined(v) = sum over sampled edges u → v of  weight(u) · h(u)
        weight(u)   = 1 / sqrt(d_u + 1) with one node type at both ends, else 1

    where ``d_u`` is the number of in-edges of u of this edge type in the whole graph.
    """

    def __init__(self, in_features: int, out_features: int, *, same_type: bool, kernels: Choice):
        super().__init__(in_features, out_features, reduce="sum", kernels=kernels)
        self.same_type = same_type
        nn.init.xavier_uniform_(self.weight)

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        weight = None
        if self.same_type:
            assert degree is not None
            norm = (_wide(degree[: h_src.shape[0]], h_src) + 1).rsqrt()
            weight = norm.index_select(0, adj.src)
        return select(self.kernels, h_src).aggregate(adj, h_src, "sum", weight)

    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        assert degree is not None
        full = _wide(degree[: adj.num_dst], combined)
        scale = full / adj.degree.clamp(min=1)
        if not self.same_type:
            return combined * (scale / full.clamp(min=1)).to(combined.dtype).unsqueeze(1)
        norm = (full + 1).rsqrt()
        rows = combined * (scale * norm).to(combined.dtype).unsqueeze(1)
        return rows.addcmul_(h_dst, norm.square().to(h_dst.dtype).unsqueeze(1))


class SAGEConv(LinearConv):
    """The neighbour half of GraphSAGE (Hamilton, Ying & Leskovec, NeurIPS 2017).

    The transform of the node itself is shared between edge types and sits in the layer. Where
    edges have features a message is the neighbour's row and the edge's, side by side. What is
    combined of them is that of the two halves, so `combine` does without the edges' half.

    Args:
        edges: width of the edges' features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        edges: int = 0,
        reduce: Reduce,
        kernels: Choice,
    ):
        super().__init__(in_features + edges, out_features, reduce=reduce, kernels=kernels)
        self.edges = edges
        nn.init.xavier_uniform_(self.weight, gain=nn.init.calculate_gain("relu"))

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        return select(self.kernels, h_src, self.reduce).aggregate(adj, h_src, self.reduce)

    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        rows = join([combined, self._edges(adj, combined)]) if self.edges else combined
        return self._scaled_up(rows, adj, degree)

    def _edges(self, adj: Adjacency, like: Tensor) -> Tensor:
        """The edges' features, combined: ``[D, edges]`` in the dtype of ``like``."""
        assert adj.rows is not None
        rows = select(self.kernels, adj.rows).combine_edges(adj, adj.rows, self.reduce)
        return rows.to(like.dtype)

    def project(self, h_src: Tensor) -> Tensor:
        return linear(h_src, self.weight[:, : self.weight.shape[1] - self.edges])

    def of_projected(self, adj: Adjacency, z: Tensor, degree: Tensor | None = None) -> Tensor:
        messages = self.combine(adj, z, degree)
        if self.edges:
            messages = messages + linear(self._edges(adj, z), self.weight[:, -self.edges :])
        return self._scaled_up(messages, adj, degree)


class GATConv(nn.Module):
    """Graph attention: GAT (Veličković et al., ICLR 2018) or GATv2 (Brody et al., ICLR 2022).

    Args:
        out_features: per head.
        heads: their outputs are concatenated, or averaged when ``mean_heads``.
        dynamic: GATv2's order of operations.
        same_type: source and destination type are one; then a node attends to itself as well.
        kernels: the config's ``model.kernels``.
        edges: width of the edges' features. GAT reads them in the attention and in the messages,
            as DGL's EdgeGATConv, GATv2 in the attention alone, as PyG's GATv2Conv(edge_dim=…).
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
        kernels: Choice,
        edges: int = 0,
    ):
        super().__init__()
        self.heads, self.width = heads, out_features
        self.mean_heads, self.dynamic, self.same_type = mean_heads, dynamic, same_type
        self.kernels: Choice = kernels
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
        self.edge = self.attn_edge = None
        if edges:
            self.edge = nn.Linear(edges, heads * out_features, bias=False)
            nn.init.xavier_normal_(self.edge.weight, gain=gain)
        if edges and not dynamic:
            self.attn_edge = nn.Parameter(torch.empty(heads, out_features))
            nn.init.xavier_normal_(self.attn_edge, gain=gain)
        self.attn_dropout = Dropout(attn_dropout)
        self.bias = nn.Parameter(torch.zeros(out_features if mean_heads else heads * out_features))

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Tensor | None = None
    ) -> Tensor:
        """``h_src [S, F_src]``, ``h_dst [D, F_dst]`` → ``[D, heads·F]``, or ``[D, F]``."""
        left = linear(h_src, self.src.weight, self.src.bias).view(-1, self.heads, self.width)
        ops = select(self.kernels, left)
        if self.same_type:
            adj = with_self_loops(adj, ops)
        if self.dst is None:
            right = left[: h_dst.shape[0]]
        else:
            right = linear(h_dst, self.dst.weight, self.dst.bias).view(-1, self.heads, self.width)
        if self.attn_dst is None:
            joint = ops.from_sources(adj, left) + ops.from_destinations(adj, right)
            if self.edge is not None:
                joint = joint.add_(self._transformed(adj))  # in place: memory is what costs
            score = (F.leaky_relu(joint, 0.2) * self.attn_src).sum(-1)
        else:
            own, other = (right * self.attn_dst).sum(-1), (left * self.attn_src).sum(-1)
            raw = ops.from_sources(adj, other) + ops.from_destinations(adj, own)
            if self.attn_edge is not None:
                assert adj.rows is not None
                raw = raw + adj.rows @ torch.einsum("hoi,ho->ih", self._by_head, self.attn_edge)
            score = F.leaky_relu(raw, 0.2)
        share = self.attn_dropout(ops.edge_softmax(adj, score, left.shape[0]))
        out = ops.attend(adj, left, share)
        if self.attn_edge is not None:
            out = out + self._messages(adj, share, ops).to(out.dtype)
        rows = out.mean(1) if self.mean_heads else out.flatten(1)
        return rows if self.bias is None else rows + self.bias

    @property
    def _by_head(self) -> Tensor:
        """What edges' features are transformed by, ``[H, F, F_edge]``."""
        assert self.edge is not None
        return self.edge.weight.view(self.heads, self.width, -1)

    def _transformed(self, adj: Adjacency) -> Tensor:
        """The edges' features, transformed: ``[E, H, F]``."""
        assert self.edge is not None
        assert adj.rows is not None
        return linear(adj.rows, self.edge.weight).view(-1, self.heads, self.width)

    def _messages(self, adj: Adjacency, share: Tensor, ops: Kernels) -> Tensor:
        """The sum of the edges' transformed features by their shares, ``[D, H, F]``: transformed
        after the sum where that is narrower, since what is laid out for each edge costs most."""
        assert adj.rows is not None
        after = adj.rows.shape[1] < self.width
        rows = adj.rows.unsqueeze(1) if after else self._transformed(adj)
        messages = ops.combine_edges(adj, (rows * share.unsqueeze(2)).flatten(1))
        summed = messages.view(-1, self.heads, rows.shape[2])
        return torch.einsum("dhi,hoi->dho", summed, self._by_head) if after else summed


def _wide(degree: Tensor, like: Tensor) -> Tensor:
    """Degrees as numbers to compute with: ``like``'s dtype, but fp32 at least."""
    return degree.to(torch.promote_types(like.dtype, torch.float32))


class GINConv(LinearConv):
    """The sum over one edge type, and the part of the MLP's first linear layer that reads it.

    A layer of GIN (Xu, Hu, Leskovec & Jegelka, "How powerful are graph neural networks?", ICLR
    2019) is ``MLP((1 + eps) · h(v) + sum of h(u) over the edges u → v)``, its MLP of two linear
    layers. On a typed graph the MLP reads such a sum per edge type, side by side: its first linear
    layer is then one weight matrix per edge type, as the convolutions of the other families, and
    what follows is one per node type. ``(1 + eps) · h(v)`` is part of the sums over edge types
    that join a node type to itself; a node type without any has it as a sum of its own, by a
    weight matrix alone. ``eps`` is learnt, from 0.

    Where edges have features this is GINE (Hu et al., "Strategies for pre-training graph neural
    networks", ICLR 2020), as PyG's GINEConv: the sum is of ``ReLU(h(u) + W e(u, v) + b)``.

    Args:
        edges: width of the edges' features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        same_type: bool,
        kernels: Choice,
        edges: int = 0,
    ):
        super().__init__(in_features, out_features, reduce="sum", kernels=kernels)
        self.edge = nn.Linear(edges, in_features) if edges else None
        self.eps = nn.Parameter(torch.zeros(1)) if same_type else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # torch.nn.Linear's

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        ops = select(self.kernels, h_src)
        if self.edge is None:
            return ops.aggregate(adj, h_src, "sum")
        assert adj.rows is not None
        edge = linear(adj.rows, self.edge.weight, self.edge.bias)
        messages = ops.from_sources(adj, h_src).add_(edge)  # as above
        return ops.combine_edges(adj, F.relu(messages, inplace=True))

    def weight_first(self, adj: Adjacency, h_src: Tensor) -> bool:
        return self.projects() and super().weight_first(adj, h_src)

    def projects(self) -> bool:
        return self.edge is None

    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        combined = self._scaled_up(combined, adj, degree)
        if self.eps is None:
            return combined
        return torch.addcmul(combined, h_dst, (1 + self.eps).to(h_dst.dtype))


class Rest(nn.Module):
    """What follows the MLP's first linear layer: ``[N, F_in]`` → ``[N, F_out]``.

    Args:
        kind: the config's ``model.norm``, between the first linear layer and the ReLU.
    """

    def __init__(self, in_features: int, out_features: int, kind: str):
        super().__init__()
        self.norm = norm(kind, in_features)
        self.activation = activation("relu")
        self.second = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor, counted: Tensor | None) -> Tensor:
        """``counted``: see `raygnn.models.norm.BatchNorm.forward`."""
        normed = normalise(self.norm, x, counted)
        return linear(self.activation(normed), self.second.weight, self.second.bias)
