"""Convolutions of one edge type in one layer. Shapes as in `models.kernels.message_passing`.

GCN, GraphSAGE and GIN are *linear*: the sources are aggregated per destination, then `finish`
computes the rows that the layer's weight matrix is applied to. The first step has no parameters, so
it can be done while a batch is built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.kernels.message_passing import NATIVE, Kernels, Reduce
from raygnn.models.linear import Dropout, join, linear
from raygnn.models.norm import activation, norm, normalise
from raygnn.sampling.batch import Adjacency

# how a linear convolution aggregates features; "gcn": see `GCNConv`
CombineKind = Literal["sum", "mean", "max", "gcn"]

# cost of adding one number of a source row, in multiplications of a matrix product (one thread,
# fp32: 0.3 ns and 0.02 ns)
_GATHER_COST = 16


def with_self_loops(adj: Adjacency, ops: Kernels = NATIVE) -> Adjacency:
    """Append a self loop to the list of each destination.

    A block's destinations are the first of its sources, so destination d is source d. A loop's
    features are the mean over the destination's edges, as PyG's ``fill_value="mean"``.
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
        reduce: aggregation of sources.
    """

    kernels: Kernels = NATIVE

    def __init__(self, in_features: int, out_features: int, *, reduce: Reduce):
        super().__init__()
        self.reduce = reduce
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    @abstractmethod
    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        """Aggregate ``h_src [S, F]``, with ``degree [≥ S]``, to ``[D, F]``; zero without edges."""

    @abstractmethod
    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        """Return the input of ``weight``, ``[D, F]``.

        Args:
            combined: ``[D, F]``, from `combine`.
            adj: its ``src`` is not read.
            degree: ``[≥ D]``.
        """

    def weight_first(self, adj: Adjacency, h_src: Tensor) -> bool:
        """Return True if applying ``weight`` to all sources before aggregation is cheaper."""
        out, width = len(self.weight), h_src.shape[1]
        if not self.kernels.knows_sizes:  # sizes are unknown during an export
            return False
        more = (len(h_src) - adj.num_dst) * out * width
        return self.reduce != "max" and more < _GATHER_COST * len(adj.src) * (width - out)

    def transform(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None = None
    ) -> Tensor:
        """Return the output ``[D, F_out]`` from aggregated rows."""
        return linear(self.finish(combined, adj, h_dst, degree), self.weight)

    def _scaled_up(self, rows: Tensor, adj: Adjacency, degree: Tensor | None) -> Tensor:
        """Return sums over sampled neighbours ``[D, F]`` times full / sampled degree, so that their
        expectation is the sum over all neighbours that may be sampled; others as they are."""
        if self.reduce != "sum" or degree is None:
            return rows
        scale = full_degree(adj, degree, rows) / adj.degree.clamp(min=1)
        return rows * scale.to(rows.dtype).unsqueeze(1)

    def forward(
        self, adj: Adjacency, h_src: Tensor, h_dst: Tensor, degree: Tensor | None = None
    ) -> Tensor:
        """Map ``h_src [S, F]`` and ``h_dst [D, F_dst]`` to ``[D, F_out]``; ``degree [≥ S]``: of
        the destination type's nodes in the complete graph."""
        if not self.weight_first(adj, h_src):
            return self.transform(self.combine(adj, h_src, degree), adj, h_dst, degree)
        return self.of_projected(adj, self.project(h_src), degree)

    def projects(self) -> bool:
        """Return True if `project` followed by `of_projected` equals `forward`."""
        return self.reduce != "max"

    def project(self, h_src: Tensor) -> Tensor:
        """Apply ``weight`` to rows of sources: ``[S, F_out]``."""
        return linear(h_src, self.weight)

    def of_projected(self, adj: Adjacency, z: Tensor, degree: Tensor | None = None) -> Tensor:
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

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        weight = None
        if self.same_type:
            assert degree is not None
            norm = (wide(degree[: h_src.shape[0]], h_src) + 1).rsqrt()
            weight = norm.index_select(0, adj.src)
        return self.kernels.aggregate(adj, h_src, "sum", weight)

    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
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
    separately, so `combine` omits that of edges.

    Args:
        edges: width of edge features.
    """

    def __init__(self, in_features: int, out_features: int, *, edges: int = 0, reduce: Reduce):
        super().__init__(in_features + edges, out_features, reduce=reduce)
        self.edges = edges
        nn.init.xavier_uniform_(self.weight, gain=nn.init.calculate_gain("relu"))

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        return self.kernels.aggregate(adj, h_src, self.reduce)

    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
        rows = join([combined, self._edges(adj, combined)]) if self.edges else combined
        return self._scaled_up(rows, adj, degree)

    def _edges(self, adj: Adjacency, like: Tensor) -> Tensor:
        """Aggregate edge features: ``[D, edges]`` in the dtype of ``like``."""
        assert adj.rows is not None
        rows = self.kernels.combine_edges(adj, adj.rows, self.reduce)
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
        gain = nn.init.calculate_gain("relu")
        self.src = nn.Linear(in_src, heads * out_features, bias=dynamic)
        nn.init.xavier_normal_(self.src.weight, gain=gain)
        # GAT shares one transform between both ends if they have one type
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
        ops = self.kernels
        if self.same_type:
            adj = with_self_loops(adj, ops)
        if self.dst is None:
            right = left[: h_dst.shape[0]]
        else:
            right = linear(h_dst, self.dst.weight, self.dst.bias).view(-1, self.heads, self.width)
        if self.attn_dst is None:
            joint = ops.from_sources(adj, left) + ops.from_destinations(adj, right)
            if self.edge is not None:
                joint = joint.add_(self._transformed(adj))  # in place, since memory dominates
            score = (F.leaky_relu(joint, 0.2) * self.attn_src).sum(-1)
        else:
            own, other = (right * self.attn_dst).sum(-1), (left * self.attn_src).sum(-1)
            raw = ops.from_sources(adj, other) + ops.from_destinations(adj, own)
            if self.attn_edge is not None:
                assert adj.rows is not None
                raw = raw + adj.rows @ torch.einsum("hoi,ho->ih", self._by_head, self.attn_edge)
            score = F.leaky_relu(raw, 0.2)
        share = self.attn_dropout(ops.edge_softmax(adj, score))
        out = ops.attend(adj, left, share)
        if self.attn_edge is not None:
            out = out + self._messages(adj, share, ops).to(out.dtype)
        rows = out.mean(1) if self.mean_heads else out.flatten(1)
        return rows if self.bias is None else rows + self.bias

    @property
    def _by_head(self) -> Tensor:
        assert self.edge is not None
        return self.edge.weight.view(self.heads, self.width, -1)

    def _transformed(self, adj: Adjacency) -> Tensor:
        assert self.edge is not None
        assert adj.rows is not None
        return linear(adj.rows, self.edge.weight).view(-1, self.heads, self.width)

    def _messages(self, adj: Adjacency, share: Tensor, ops: Kernels) -> Tensor:
        """Sum transformed edge features weighted by ``share``, ``[D, H, F]``. Narrow features are
        transformed after the sum, since tensors with a row per edge cost most."""
        assert adj.rows is not None
        after = adj.rows.shape[1] < self.width
        rows = adj.rows.unsqueeze(1) if after else self._transformed(adj)
        messages = ops.combine_edges(adj, (rows * share.unsqueeze(2)).flatten(1))
        summed = messages.view(-1, self.heads, rows.shape[2])
        return torch.einsum("dhi,hoi->dho", summed, self._by_head) if after else summed


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

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        ops = self.kernels
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
    """GIN's MLP after its first linear layer: ``[N, F_in]`` → ``[N, F_out]``.

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
