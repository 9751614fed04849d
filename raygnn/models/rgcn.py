"""R-GCN: a weight matrix for each relation, composed of few. Shape suffixes as in `sampling.batch`.

R relations of an edge type, B bases or blocks, P pairs of a destination and a relation among the
edges.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.linear import affine, join, linear
from raygnn.models.message_passing import NATIVE, Kernels, edge_rows
from raygnn.models.typed_layers import Hidden, Layer, key, linears, weight_of
from raygnn.sampling.batch import Adjacency, Block, EdgeType

Regularizer = Literal["basis", "block", "none"]
MeanOver = Literal["relation", "all"]


class RGCNLayer(Layer):
    """R-GCN (Schlichtkrull et al., "Modeling relational data with graph convolutional networks",
    ESWC 2018)::

        out(v) = W_0 h(v) + b + sum over relations r, edges u → v of r, of  W_r h(u) / c(v, r)

    A relation is an edge type, or a number that edges of one type have. ``c(v, r)`` is the number
    of edges of r into v in the block, whether all or sampled ones.

    With "basis" ``W_r`` is a sum of B matrices, weighted by r's coefficients; relations with
    sources of equal width share the matrices. Sources are aggregated once for each of the B, so
    the cost does not grow with R. With "block" ``W_r`` has B blocks on its diagonal (the last is
    smaller if B does not divide the width), with "none" it is a separate matrix; then sources are
    averaged for each of the P pairs, which are multiplied relation by relation.

    Edge features are appended to ``h(u)``.

    Args:
        given: arguments of `Layer`.
        bases: B, limited by the number of relations.
        mean_over: "relation" as above; "all": ``c`` counts v's edges of all relations of an edge
            type, as in the paper for link prediction.
    """

    kernels: Kernels = NATIVE

    def __init__(self, *given: Any, regularizer: Regularizer, bases: int, mean_over: MeanOver):
        super().__init__(*given)
        etypes, spec = self.etypes, self.spec
        self.mean_over = mean_over
        self.relations = {e: spec.relations.get(e, 1) for e in etypes}
        self.sources = {e: spec.in_features[e[0]] + spec.edges.get(e, 0) for e in etypes}
        self.edges = {e for e in etypes if spec.edges.get(e)}
        self.bases, self.coefficients = nn.ParameterDict(), nn.ParameterDict()
        self.blocks = nn.ParameterDict()
        if regularizer == "basis":
            for width in sorted(set(self.sources.values())):
                num = sum(self.relations[e] for e in etypes if self.sources[e] == width)
                self.bases[str(width)] = _matrices(min(bases, num), width, self.width)
        for etype in etypes:
            width, num = self.sources[etype], self.relations[etype]
            if regularizer == "basis":
                coefficients = torch.empty(num, len(self.bases[str(width)]))
                nn.init.xavier_uniform_(coefficients, gain=nn.init.calculate_gain("relu"))
                self.coefficients[key(*etype)] = nn.Parameter(coefficients)
            else:
                blocks = min(bases, width, self.width) if regularizer == "block" else 1
                shape = -(-width // blocks), -(-self.width // blocks)
                matrices = _matrices(num * blocks, *shape).detach()
                self.blocks[key(*etype)] = nn.Parameter(matrices.view(num, blocks, *shape))
        self.own = linears({key(t): spec.in_features[t] for t in self.self_types}, self.width)
        self.bias = nn.ParameterDict(
            {key(t): nn.Parameter(torch.zeros(self.width)) for t in self.outputs()}
        )

    def biases(self) -> list[str]:
        return [f"bias.{key(t)}" for t in self.outputs()]

    def forward(self, block: Block, h: Hidden, *_: object) -> Hidden:
        h, h_dst = self.heads(block, h)
        out = {}
        for ntype in self.outputs():
            rows, weights, messages = [h_dst[ntype]], [weight_of(self.own, ntype)], []
            for etype in self.into(ntype):
                adj, sources = block.adj[etype], h[etype[0]]
                if self.blocks:
                    messages.append(self._blocks(etype, adj, sources))
                else:
                    rows.append(self._combined(etype, adj, sources))
                    weights.append(self._weight(etype))
            out[ntype] = affine(rows, weights, self.bias.get(key(ntype), None))
            for message in messages:
                out[ntype] = out[ntype] + message
        return out

    def _combined(self, etype: EdgeType, adj: Adjacency, h: Tensor) -> Tensor:
        """Return the input of `_weight`: ``[D, F]`` for one relation, ``[D, B·F]`` for several."""
        if self.relations[etype] == 1:
            return self._aggregate(etype, adj, h, "mean")
        relation, coefficients = cast("Tensor", adj.relation), self.coefficients[key(*etype)]
        share = self._share(adj, relation).unsqueeze(1)
        weight = F.embedding(relation, coefficients) * share.to(coefficients.dtype)
        return join(
            [self._aggregate(etype, adj, h, "sum", w.contiguous()) for w in weight.unbind(1)]
        )

    def _aggregate(
        self,
        etype: EdgeType,
        adj: Adjacency,
        h: Tensor,
        reduce: Literal["sum", "mean"],
        weight: Tensor | None = None,
    ) -> Tensor:
        """Aggregate the sources' rows with the edges' appended: ``[D, F]``."""
        ops = self.kernels
        combined = ops.aggregate(adj, h, reduce, weight)
        if etype not in self.edges:
            return combined
        rows = edge_rows(adj)
        rows = rows if weight is None else rows * weight.to(rows.dtype).unsqueeze(1)
        return join([combined, ops.combine_edges(adj, rows, reduce).to(combined.dtype)])

    def _weight(self, etype: EdgeType) -> Tensor:
        """Return weights ``[F_out, F]`` of one relation, ``[F_out, B·F]`` of several."""
        bases = self.bases[str(self.sources[etype])]
        if self.relations[etype] > 1:
            return bases.flatten(0, 1).T
        return torch.einsum("b,bio->oi", self.coefficients[key(*etype)][0], bases)

    def _share(self, adj: Adjacency, relation: Tensor) -> Tensor:
        """Return ``1 / c`` of each edge, ``[E]``."""
        if self.mean_over == "all":
            return adj.degree.reciprocal().index_select(0, adj.dst)
        number = relation * adj.num_dst + adj.dst
        ordered = number.sort().values  # unlike unique, without waiting for a GPU
        first = torch.searchsorted(ordered, number)
        return (torch.searchsorted(ordered, number, right=True) - first).reciprocal()

    def _blocks(self, etype: EdgeType, adj: Adjacency, h: Tensor) -> Tensor:
        """Return the sum of the messages, ``[D, F_out]``."""
        blocks, ops = self.blocks[key(*etype)], self.kernels
        if self.relations[etype] == 1:
            return _times(self._aggregate(etype, adj, h, "mean"), blocks[0], self.width)
        nodes, relation = adj.num_dst, cast("Tensor", adj.relation)
        number = relation * nodes + adj.dst
        if not ops.knows_sizes:  # a row for each possible pair
            rows = h.index_select(0, adj.src)
            if etype in self.edges:
                rows = join([rows, edge_rows(adj)])
            rows = rows * self._share(adj, relation).to(rows.dtype).unsqueeze(1)
            num, of, width, _ = blocks.shape
            table = rows.new_zeros(num * nodes, rows.shape[1]).index_add(0, number, rows)
            table = F.pad(table, (0, of * width - rows.shape[1])).view(num, nodes, of, width)
            return torch.einsum("rnbi,rbio->nbo", table, blocks).flatten(1).narrow(1, 0, self.width)
        # pairs, relation by relation
        pairs, pair, count = torch.unique(number, return_inverse=True, return_counts=True)
        by_pair = torch.argsort(pair, stable=True)
        into_pairs = Adjacency(
            F.pad(count.cumsum(0), (1, 0)),
            adj.src[by_pair],
            rows=None if adj.rows is None else adj.rows.index_select(0, by_pair),
        )
        reduce: Literal["mean", "sum"] = "mean" if self.mean_over == "relation" else "sum"
        rows = self._aggregate(etype, into_pairs, h, reduce)
        counts = torch.bincount(pairs // nodes, minlength=len(blocks)).tolist()
        parts = [
            _times(some, matrix, self.width)
            for some, matrix in zip(rows.split(counts), blocks.unbind(0), strict=True)
            if len(some)
        ]
        if not parts:  # unused parameters would get no gradient
            return rows.new_zeros(nodes, self.width) + 0 * blocks.sum()
        node = pairs % nodes
        order = torch.argsort(node, stable=True)
        indptr = F.pad(torch.bincount(node, minlength=nodes).cumsum(0), (1, 0))
        messages = torch.cat(parts)
        out = ops.aggregate(Adjacency(indptr, order), messages, "sum")
        if self.mean_over == "all":
            out = out / adj.degree.clamp(min=1).unsqueeze(1).to(out.dtype)
        return out


def _times(rows: Tensor, blocks: Tensor, columns: int) -> Tensor:
    """Multiply ``rows [N, F]``, padded to B·f columns, by a matrix with ``blocks [B, f, g]`` on its
    diagonal; returns the first columns."""
    num, width, _ = blocks.shape
    rows = F.pad(rows, (0, num * width - rows.shape[1]))
    if num == 1:
        return linear(rows, blocks[0].T)
    out = torch.einsum("nbi,bio->nbo", rows.view(-1, num, width), blocks)
    return out.flatten(1).narrow(1, 0, columns)


def _matrices(num: int, rows: int, columns: int) -> nn.Parameter:
    values = torch.empty(num, rows, columns)
    for matrix in values:
        nn.init.xavier_uniform_(matrix, gain=nn.init.calculate_gain("relu"))
    return nn.Parameter(values)
