"""Attention layers on typed graphs: HAN over neighbours, then edge types; HGT over both at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.linear import transform
from raygnn.models.message_passing import NATIVE, Kernels, edge_rows, widened
from raygnn.models.typed_layers import ConvFactory, Hidden, Layer, key, linears
from raygnn.sampling.batch import Adjacency, Block, EdgeType


class SemanticAttention(nn.Module):
    """Softmax over P candidates of each node, by ``q · tanh(W z + b)``. ``width``: of ``z``;
    ``hidden``: width of ``q``."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.project = nn.Linear(width, hidden)
        self.query = nn.Parameter(torch.empty(hidden))
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.normal_(self.query, std=hidden**-0.5)

    def forward(self, z: Tensor, there: Tensor) -> Tensor:
        """Weight ``z [N, P, F]`` → ``[N, F]``; ``there``: bool ``[N, P]``, True in every row."""
        projected = transform(self.project, z.flatten(0, 1)).tanh()
        score = (projected * self.query).sum(-1).view(there.shape).masked_fill(~there, -torch.inf)
        share = torch.softmax(widened(score), 1).to(z.dtype)
        return torch.einsum("np,npf->nf", share, z)


class HANLayer(Layer):
    """After HAN (Wang et al., "Heterogeneous graph attention network", WWW 2019).

    The node level is a GAT for each edge type, a metapath of length one; add longer metapaths to
    the graph as edge types. The semantic level weights the edge types and, if no edge type joins a
    node type to itself, a transform of the node itself. Edge types without edges into a node are
    ignored for it.

    In the paper an edge type's weight is its mean over all nodes. Here each node has its own
    weights: a mean over a minibatch would depend on sampling and on the number of workers.

    Args:
        given: arguments of `Layer`.
        conv: builds the GAT of an edge type.
        attention: width of the semantic attention.
    """

    def __init__(self, *given: Any, conv: ConvFactory, attention: int):
        super().__init__(*given)
        spec = self.spec
        self.convs = nn.ModuleDict({key(*e): conv(e, spec) for e in self.etypes})
        own = {key(t): spec.in_features[t] for t in self.self_types}
        self.own = linears(own, self.width, bias=True)
        # a single candidate needs no weights
        chosen = [t for t in self.outputs() if len(self.into(t)) + (t in self.self_types) > 1]
        self.semantic = nn.ModuleDict(
            {key(t): SemanticAttention(self.width, attention) for t in chosen}
        )

    def biases(self) -> list[str]:
        """See `Layer`. A weighted candidate's bias adds different rows to different nodes."""
        found = []
        for ntype in self.outputs():
            names = [f"convs.{key(*etype)}.bias" for etype in self.into(ntype)]
            names += [f"own.{key(ntype)}.bias"] if ntype in self.self_types else []
            found += names if len(names) == 1 else []
        return found

    def forward(self, block: Block, h: Hidden, *_: object) -> Hidden:
        h, h_dst = self.heads(block, h)
        out = {}
        for ntype in self.outputs():
            candidates, there = [], []
            for etype in self.into(ntype):
                adj = block.adj[etype]
                candidates.append(self.convs[key(*etype)](adj, h[etype[0]], h_dst[ntype]))
                there.append((adj.degree > 0) | (etype[0] == ntype))  # a loop is always there
            if ntype in self.self_types:
                candidates.append(transform(self.own[key(ntype)], h_dst[ntype]))
                there.append(torch.ones_like(candidates[-1][:, 0], dtype=torch.bool))
            if len(candidates) == 1:
                (out[ntype],) = candidates
            else:
                z = torch.stack(candidates, 1)
                out[ntype] = self.semantic[key(ntype)](z, torch.stack(there, 1))
        return out


class HGTLayer(Layer):
    """Heterogeneous graph transformer (Hu et al., WWW 2020).

    Keys and values are linear transforms of the source per node type, then per edge type in each
    head; queries are linear transforms of the destination. One softmax goes over a destination's
    edges of all types. The result passes the destination type's output transform and is mixed with
    the node itself by a learned share, as in DGL's HGTConv; the node itself is transformed if its
    width differs.

    Linear transforms of edge features, one per edge type, are added to keys and values, as in PyG's
    TransformerConv(edge_dim=…) (after Shi et al., "Masked label prediction", IJCAI 2021).

    Omitted are the paper's relative temporal encoding, and its activation between attention and
    output transform.

    Args:
        given: arguments of `Layer`.
        hidden: width of the attention over all heads, in every layer.
        heads: H, divides ``hidden``.
    """

    kernels: Kernels = NATIVE

    def __init__(self, *given: Any, hidden: int, heads: int):
        super().__init__(*given)
        etypes, spec = self.etypes, self.spec
        self.num_heads, self.head_width = heads, hidden // heads
        widths = spec.in_features
        sources = {key(t): widths[t] for t in sorted({e[0] for e in etypes})}
        targets = {key(t): widths[t] for t in sorted({e[2] for e in etypes})}
        self.keys, self.values = _xavier(sources, hidden), _xavier(sources, hidden)
        self.queries = _xavier(targets, hidden)
        self.out = _xavier(dict.fromkeys(targets, hidden), self.width)
        own = [t for t in self.outputs() if widths[t] != self.width or key(t) not in targets]
        self.own = linears({key(t): widths[t] for t in own}, self.width)
        self.skip = nn.ParameterDict({t: nn.Parameter(torch.ones(())) for t in targets})
        self.attention, self.message = nn.ParameterDict(), nn.ParameterDict()
        self.priority = nn.ParameterDict()
        for etype in etypes:
            for table in (self.attention, self.message):
                bound = math.sqrt(3 / self.head_width)
                square = torch.empty(heads, self.head_width, self.head_width)
                table[key(*etype)] = nn.Parameter(square.uniform_(-bound, bound))
            self.priority[key(*etype)] = nn.Parameter(torch.ones(heads))
        self.edge = linears({key(*e): w for e in etypes if (w := spec.edges.get(e))}, hidden)

    def biases(self) -> list[str]:
        """See `Layer`. Attention weights add up to 1, so a bias of values adds the same row to all
        nodes whose edges have one type, except nodes without edges, which have no values."""
        found = [f"out.{key(ntype)}.bias" for ntype in self.outputs() if self.into(ntype)]
        for source in sorted({e[0] for e in self.etypes}):
            etypes = [e for e in self.etypes if e[0] == source]
            if all(self.into(e[2]) == [e] for e in etypes):
                found.append(f"values.{key(source)}.bias")
        return found

    def forward(self, block: Block, h: Hidden, *_: object) -> Hidden:
        h, h_dst = self.heads(block, h)
        keys = {t: self._split(self.keys, t, h[t]) for t in {e[0] for e in self.etypes}}
        values = {t: self._split(self.values, t, h[t]) for t in keys}
        out = {}
        for ntype in self.outputs():
            own, name = h_dst[ntype], key(ntype)
            out[ntype] = own = transform(self.own[name], own) if name in self.own else own
            if etypes := self.into(ntype):
                query = self._split(self.queries, ntype, h_dst[ntype])
                attended = self._attend(block, etypes, keys, values, query)
                made = transform(self.out[name], attended.flatten(1))
                share = torch.sigmoid(self.skip[name])
                out[ntype] = made * share + own * (1 - share)
        return out

    def _split(self, modules: nn.ModuleDict, ntype: str, h: Tensor) -> Tensor:
        return transform(modules[key(ntype)], h).view(-1, self.num_heads, self.head_width)

    def _attend(
        self, block: Block, etypes: Sequence[EdgeType], keys: Hidden, values: Hidden, query: Tensor
    ) -> Tensor:
        """Attend from destinations ``query [D, H, d]`` to all their sources."""
        scores, messages, additions = [], [], []
        ops = self.kernels
        for etype in etypes:
            adj, name = block.adj[etype], key(*etype)
            turned = torch.einsum("nhi,hio->nho", keys[etype[0]], self.attention[name])
            scale = self.priority[name] / math.sqrt(self.head_width)
            compared = ops.from_sources(adj, turned)
            if name in self.edge:
                additions.append(transform(self.edge[name], edge_rows(adj)).view(compared.shape))
                compared = compared + additions[-1]
            elif self.edge:
                additions.append(torch.zeros_like(compared))
            products = compared * ops.from_destinations(adj, query)
            scores.append(products.sum(-1) * scale)
            messages.append(torch.einsum("nhi,hio->nho", values[etype[0]], self.message[name]))
        joined, order = _joined([block.adj[e] for e in etypes], [m.shape[0] for m in messages])
        score, message = torch.cat(scores).index_select(0, order), torch.cat(messages)
        share = ops.edge_softmax(joined, score)
        out = ops.attend(joined, message, share)
        if additions:
            added = torch.cat(additions).index_select(0, order) * share.unsqueeze(2)
            out = out + ops.combine_edges(joined, added.flatten(1)).view(out.shape)
        return out


def _joined(adjacencies: Sequence[Adjacency], sizes: Sequence[int]) -> tuple[Adjacency, Tensor]:
    """Merge edges of several types; their sources are concatenated.

    Args:
        sizes: number of sources of each type.

    Returns:
        ``(all edges, by destination; index [E] of each in the types' concatenated edges)``.
    """
    dst = torch.cat([adj.dst for adj in adjacencies])
    order = torch.argsort(dst, stable=True)
    first = accumulate(sizes, initial=0)
    src = torch.cat([adj.src + start for adj, start in zip(adjacencies, first)])
    degree = torch.stack([adj.degree for adj in adjacencies]).sum(0)
    joined = Adjacency(F.pad(degree.cumsum(0), (1, 0)), src.index_select(0, order))
    return joined.knowing(dst.index_select(0, order)), order


def _xavier(widths: dict[str, int], out_features: int) -> nn.ModuleDict:
    modules = linears(widths, out_features, bias=True)
    for name, parameter in modules.named_parameters():
        (nn.init.zeros_ if name.endswith("bias") else nn.init.xavier_uniform_)(parameter)
    return modules
