"""Convolutions of one edge type in one layer. Shapes as in `models.message_passing`.

GCN, GraphSAGE and GIN are *linear*: the sources are aggregated per destination, then `finish`
computes the rows that the layer's weight matrix is applied to. The first step has no parameters, so
it can be done while a batch is built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.linear import Dropout, join, linear, transform
from raygnn.models.message_passing import NATIVE, Kernels, Reduce, edge_rows
from raygnn.models.norm import norm, normalise
from raygnn.sampling.batch import Adjacency

# how a linear convolution aggregates features; "gcn": see `GCNConv`
CombineKind = Literal["sum", "mean", "max", "gcn"]

# in-degrees of the destination type's nodes in the complete graph, ``[≥ S]``; None if not needed
Degree: TypeAlias = Tensor | None

# cost of adding one number of a source row, in multiplications of a matrix product (one thread,
# fp32: 0.3 ns and 0.02 ns)
_GATHER_COST = 16


def with_self_loops(adj: Adjacency, ops: Kernels = NATIVE) -> Adjacency:
    """Append a self loop to the list of each destination.

    A block's destinations are the first of its sources, so destination d is source d. A loop's
    features are the mean over the destination's edges, as PyG's ``fill_value="mean"``.
    """
    num_dst, device = adj.num_dst, adj.src.device
    own = torch.arange(num_dst + 1, device=device)
    indptr = adj.indptr + own
    # before the edges of destination d there are d loops
    place = torch.cat([torch.arange(adj.src.shape[0], device=device) + adj.dst, indptr[1:] - 1])
    src, dst = (
        torch.empty_like(place).scatter_(0, place, torch.cat([ends, own[:num_dst]]))
        for ends in (adj.src, adj.dst)
    )
    rows = adj.rows
    if rows is not None:
        both = torch.cat([rows, ops.combine_edges(adj, rows, "mean")])
        rows = torch.empty_like(both).index_copy(0, place, both)
    return Adjacency(indptr, src, None, rows).knowing(dst)


class LinearConv(nn.Module, ABC):
    """A convolution ``finish(combine(h_src)) @ weight.T``. ``reduce``: aggregation of sources."""

    kernels: Kernels = NATIVE

    def __init__(self, in_features: int, out_features: int, *, reduce: Reduce):
        super().__init__()
        self.reduce = reduce
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Degree) -> Tensor:
        """Aggregate ``h_src [S, F]``, with ``degree [≥ S]``, to ``[D, F]``; zero without edges."""
        return self.kernels.aggregate(adj, h_src, self.reduce)

    @abstractmethod
    def finish(self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Degree) -> Tensor:
        """Return the input of ``weight``, ``[D, F]``.

        Args:
            combined: ``[D, F]``, from `combine`.
            adj: its ``src`` is not read.
            degree: ``[≥ D]``.
        """

    def weight_first(self, adj: Adjacency, h_src: Tensor) -> bool:
        """Return True if applying ``weight`` to all sources before aggregation is cheaper."""
        if not (self.projects() and self.kernels.knows_sizes):
            return False
        out, width = len(self.weight), h_src.shape[1]
        more = (len(h_src) - adj.num_dst) * out * width
        return more < _GATHER_COST * len(adj.src) * (width - out)

    def _scaled_up(self, rows: Tensor, adj: Adjacency, degree: Degree) -> Tensor:
        """Return sums over sampled neighbours ``[D, F]`` times full / sampled degree, so that their
        expectation is the sum over all neighbours that may be sampled; other aggregates unchanged.
        """
        if self.reduce != "sum" or degree is None:
            return rows
        scale = full_degree(adj, degree, rows) / adj.degree.clamp(min=1)
        return rows * scale.to(rows.dtype).unsqueeze(1)

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Degree = None
    ) -> Tensor:
        """Map ``h_src [S, F]`` and ``h_dst [D, F_dst]`` to ``[D, F_out]``; see `Degree`."""
        if self.weight_first(adj, h_src):
            return self.of_projected(adj, self.project(h_src), degree)
        combined = self.combine(adj, h_src, degree)
        return linear(self.finish(combined, adj, h_dst, degree), self.weight)

    def projects(self) -> bool:
        """Return True if `project` followed by `of_projected` equals `forward`."""
        return self.reduce != "max"

    def project(self, h_src: Tensor) -> Tensor:
        """Apply ``weight`` to rows of sources: ``[S, F_out]``."""
        return linear(h_src, self.weight)

    def of_projected(self, adj: Adjacency, z: Tensor, degree: Degree = None) -> Tensor:
        """Return the result of `forward` from projected rows of the sources."""
        return self.finish(self.combine(adj, z, degree), adj, z[: adj.num_dst], degree)


class GCNConv(LinearConv):
    """Graph convolution (Kipf & Welling, ICLR 2017) on a block; the layer has the bias.

    Edges are weighted by the degrees of the *complete* graph, ``1 / sqrt((d_u + 1)(d_v + 1))`` with
    self loops counted, and a sampled neighbourhood is scaled up to its full size, so that the
    expectation over samples is the full-graph layer. Between different node types the weight is
    ``1 / d_v``. `combine` computes the part that depends on the source::

        combined(v) = sum over sampled edges u → v of  weight(u) · h(u)
        weight(u)   = 1 / sqrt(d_u + 1) with one node type at both ends, else 1

    where ``d_u`` is the number of in-edges of u of this edge type in the complete graph.
    """

    def __init__(self, in_features: int, out_features: int, *, same_type: bool):
        super().__init__(in_features, out_features, reduce="sum")
        self.same_type = same_type
        nn.init.xavier_uniform_(self.weight)

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Degree) -> Tensor:
        if not self.same_type:
            return super().combine(adj, h_src, degree)
        assert degree is not None
        norm = (wide(degree[: h_src.shape[0]], h_src) + 1).rsqrt()
        return self.kernels.aggregate(adj, h_src, "sum", norm.index_select(0, adj.src))

    def finish(self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Degree) -> Tensor:
        assert degree is not None
        full = full_degree(adj, degree, combined)
        scale = full / adj.degree.clamp(min=1)
        if not self.same_type:
            return combined * (scale / full.clamp(min=1)).to(combined.dtype).unsqueeze(1)
        norm = (full + 1).rsqrt()
        rows = combined * (scale * norm).to(combined.dtype).unsqueeze(1)
        return rows.addcmul_(h_dst, norm.square().to(h_dst.dtype).unsqueeze(1))


class SAGEConv(LinearConv):
    """Neighbour part of GraphSAGE (Hamilton, Ying & Leskovec, NeurIPS 2017).

    The layer has the transform of the node itself, which edge types share. With edge features a
    message is the neighbour's row and the edge's, side by side. Both parts are aggregated
    separately, so `combine` omits the edges' part.

    Args:
        edges: width of edge features.
    """

    def __init__(self, in_features: int, out_features: int, *, edges: int = 0, reduce: Reduce):
        super().__init__(in_features + edges, out_features, reduce=reduce)
        self.edges = edges
        nn.init.xavier_uniform_(self.weight, gain=nn.init.calculate_gain("relu"))

    def finish(self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Degree) -> Tensor:
        rows = join([combined, self._edges(adj, combined)]) if self.edges else combined
        return self._scaled_up(rows, adj, degree)

    def _edges(self, adj: Adjacency, like: Tensor) -> Tensor:
        """Aggregate edge features: ``[D, edges]`` in the dtype of ``like``."""
        return self.kernels.combine_edges(adj, edge_rows(adj), self.reduce).to(like.dtype)

    def project(self, h_src: Tensor) -> Tensor:
        return linear(h_src, self.weight[:, : self.weight.shape[1] - self.edges])

    def of_projected(self, adj: Adjacency, z: Tensor, degree: Degree = None) -> Tensor:
        messages = self.combine(adj, z, degree)
        if self.edges:
            messages = messages + linear(self._edges(adj, z), self.weight[:, -self.edges :])
        return self._scaled_up(messages, adj, degree)


class GATConv(nn.Module):
    """Graph attention: GAT (Veličković et al., ICLR 2018) or GATv2 (Brody et al., ICLR 2022).

    Args:
        out_features: per head.
        heads: their outputs are concatenated, or averaged with ``mean_heads``.
        dynamic: GATv2's order of operations.
        same_type: source and destination type are equal; then a node attends to itself as well.
        edges: width of edge features. GAT reads them in attention and messages, as DGL's
            EdgeGATConv; GATv2 in attention only, as PyG's GATv2Conv(edge_dim=…).
    """

    kernels: Kernels = NATIVE

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
        edges: int = 0,
    ):
        super().__init__()
        self.heads, self.width = heads, out_features
        self.mean_heads, self.dynamic, self.same_type = mean_heads, dynamic, same_type
        wide = heads * out_features
        self.src = _linear(in_src, wide, bias=dynamic)
        # GAT shares one transform between both ends if they have one type
        self.dst = _linear(in_dst, wide, bias=dynamic) if dynamic or not same_type else None
        self.attn_src = _xavier(torch.empty(heads, out_features))
        self.attn_dst = None if dynamic else _xavier(torch.empty(heads, out_features))
        self.edge: Any = _linear(edges, wide, bias=False) if edges else None
        without = dynamic or not edges
        self.attn_edge = None if without else _xavier(torch.empty(heads, out_features))
        self.attn_dropout = Dropout(attn_dropout)
        self.bias = nn.Parameter(torch.zeros(out_features if mean_heads else wide))

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Degree = None
    ) -> Tensor:
        """``h_src [S, F_src]``, ``h_dst [D, F_dst]`` → ``[D, heads·F]``, or ``[D, F]``."""
        left, ops = self._split(self.src, h_src), self.kernels
        if self.same_type:
            adj = with_self_loops(adj, ops)
        right = left[: h_dst.shape[0]] if self.dst is None else self._split(self.dst, h_dst)
        if self.attn_dst is None:
            joint = ops.from_sources(adj, left) + ops.from_destinations(adj, right)
            if self.edge is not None:  # in place, since memory dominates
                joint = joint.add_(self._split(self.edge, edge_rows(adj)))
            score = (F.leaky_relu(joint, 0.2) * self.attn_src).sum(-1)
        else:
            own, other = (right * self.attn_dst).sum(-1), (left * self.attn_src).sum(-1)
            raw = ops.from_sources(adj, other) + ops.from_destinations(adj, own)
            if self.attn_edge is not None:
                weight = torch.einsum("hoi,ho->ih", self._by_head, self.attn_edge)
                raw = raw + edge_rows(adj) @ weight
            score = F.leaky_relu(raw, 0.2)
        share = self.attn_dropout(ops.edge_softmax(adj, score))
        out = ops.attend(adj, left, share)
        if self.attn_edge is not None:
            out = out + self._messages(adj, share).to(out.dtype)
        rows = out.mean(1) if self.mean_heads else out.flatten(1)
        return rows if self.bias is None else rows + self.bias

    def _split(self, module: nn.Linear, rows: Tensor) -> Tensor:
        """Transform rows, ``[N, H, F]``."""
        return transform(module, rows).view(-1, self.heads, self.width)

    @property
    def _by_head(self) -> Tensor:
        return self.edge.weight.view(self.heads, self.width, -1)

    def _messages(self, adj: Adjacency, share: Tensor) -> Tensor:
        """Sum transformed edge features weighted by ``share``, ``[D, H, F]``. Narrow features are
        transformed after the sum, since tensors with a row per edge cost most."""
        rows = edge_rows(adj)
        after = rows.shape[1] < self.width
        rows = rows.unsqueeze(1) if after else self._split(self.edge, rows)
        messages = self.kernels.combine_edges(adj, (rows * share.unsqueeze(2)).flatten(1))
        summed = messages.view(-1, self.heads, rows.shape[2])
        return torch.einsum("dhi,hoi->dho", summed, self._by_head) if after else summed


def _linear(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    module = nn.Linear(in_features, out_features, bias=bias)
    _xavier(module.weight)
    return module


def _xavier(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_normal_(weight, gain=nn.init.calculate_gain("relu")))


def wide(degree: Tensor, like: Tensor) -> Tensor:
    """Convert degrees to the dtype of ``like``, but fp32 at least."""
    return degree.double() if like.dtype == torch.float64 else degree.float()


def full_degree(adj: Adjacency, degree: Tensor, like: Tensor) -> Tensor:
    """Return the number of edges of each destination that the batch may sample.

    The batch's own edges do not count: their ends alone would have a higher number than can be
    sampled, which would mark them as ends of edges.
    """
    full = degree[: adj.num_dst]
    return wide(full if adj.excluded is None else full - adj.excluded, like)


class GINConv(LinearConv):
    """Sum over one edge type, and the part of the MLP's first linear layer that reads it.

    A layer of GIN (Xu, Hu, Leskovec & Jegelka, "How powerful are graph neural networks?", ICLR
    2019) is ``MLP((1 + eps) · h(v) + sum of h(u) over the edges u → v)`` with two linear layers. On
    a typed graph the MLP reads one such sum per edge type, side by side: its first linear layer has
    one weight matrix per edge type, and the rest exists once per node type. ``(1 + eps) · h(v)`` is
    part of the sums over edge types from a node type to itself; other node types have a weight
    matrix for ``h(v)`` instead. ``eps`` is learned, from 0.

    With edge features this is GINE (Hu et al., "Strategies for pre-training graph neural networks",
    ICLR 2020), as PyG's GINEConv: the sum is of ``ReLU(h(u) + W e(u, v) + b)``.

    Args:
        edges: width of edge features.
    """

    def __init__(self, in_features: int, out_features: int, *, same_type: bool, edges: int = 0):
        super().__init__(in_features, out_features, reduce="sum")
        self.edge = nn.Linear(edges, in_features) if edges else None
        self.eps = nn.Parameter(torch.zeros(1)) if same_type else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # torch.nn.Linear's

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Degree) -> Tensor:
        if self.edge is None:
            return super().combine(adj, h_src, degree)
        ops, edge = self.kernels, transform(self.edge, edge_rows(adj))
        messages = ops.from_sources(adj, h_src).add_(edge)  # in place, as in `GATConv`
        return ops.combine_edges(adj, F.relu(messages, inplace=True))

    def projects(self) -> bool:
        return self.edge is None

    def finish(self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Degree) -> Tensor:
        combined = self._scaled_up(combined, adj, degree)
        if self.eps is None:
            return combined
        return torch.addcmul(combined, h_dst, (1 + self.eps).to(h_dst.dtype))


class Rest(nn.Module):
    """GIN's MLP after its first linear layer: ``[N, F_in]`` → ``[N, F_out]``. ``kind``: the
    config's ``model.norm``, between the first linear layer and the ReLU."""

    def __init__(self, in_features: int, kind: str, out_features: int):
        super().__init__()
        self.norm = norm(kind, in_features)
        self.second = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor, counted: Tensor | None) -> Tensor:
        """``counted``: see `raygnn.models.norm.BatchNorm.forward`."""
        normed = normalise(self.norm, x, counted)
        return transform(self.second, F.relu(normed, inplace=True))
