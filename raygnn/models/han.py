"""Attention on two levels: over the neighbours of each edge type, then over the edge types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from raygnn.models.linear import linear
from raygnn.models.typed import (
    Combined,
    ConvFactory,
    Degrees,
    Hidden,
    Layer,
    LayerSpec,
    key,
)
from raygnn.sampling.batch import Block, EdgeType


class SemanticAttention(nn.Module):
    """A softmax over P candidates of each node, by ``q · tanh(W z + b)``.

    Args:
        width: of ``z``.
        hidden: of what ``q`` is compared with.
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.project = nn.Linear(width, hidden)
        self.query = nn.Parameter(torch.empty(hidden))
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.normal_(self.query, std=hidden**-0.5)

    def forward(self, z: Tensor, there: Tensor) -> Tensor:
        """``z [N, P, F]``, ``there`` bool ``[N, P]``, one of each row at least → ``[N, F]``."""
        projected = linear(z.flatten(0, 1), self.project.weight, self.project.bias).tanh()
        score = (projected * self.query).sum(-1).view(there.shape).masked_fill(~there, -torch.inf)
        wide = score if score.dtype == torch.float64 else score.float()
        share = torch.softmax(wide, 1).to(z.dtype)
        return torch.einsum("np,npf->nf", share, z)


class HANLayer(Layer):
    """After HAN (Wang et al., "Heterogeneous graph attention network", WWW 2019).

    The node level is a GAT for each edge type, which is a metapath of length one: longer ones are
    edge types that whoever makes the graph adds. The semantic level weights the edge types, and
    a transform of the node itself where no edge type joins its type to itself. Edge types of
    which a node has no edges are left out for it.

    In the paper an edge type's weight is its mean over all nodes, and the same for all of them.
    Here each node has weights of its own: a mean over the nodes of a minibatch would depend on
    how they are drawn and divided between workers.

    Args:
        etypes, spec, self_types: see `Layer`.
        conv: makes the GAT of an edge type.
        attention: width of the semantic attention.
    """

    def __init__(
        self,
        etypes: Sequence[EdgeType],
        spec: LayerSpec,
        self_types: Sequence[str],
        *,
        conv: ConvFactory,
        attention: int,
    ):
        super().__init__(etypes, spec, self_types)
        self.convs = nn.ModuleDict({key(*e): conv(e, spec) for e in etypes})
        self.own = nn.ModuleDict(
            {key(t): nn.Linear(spec.in_features[t], self.width) for t in self_types}
        )
        # of a single candidate there is nothing to weight
        chosen = [t for t in self.outputs() if len(self.into(t)) + (t in self_types) > 1]
        self.semantic = nn.ModuleDict(
            {key(t): SemanticAttention(self.width, attention) for t in chosen}
        )

    def forward(
        self,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
    ) -> Hidden:
        h, h_dst = self.heads(block, h)
        out = {}
        for ntype in self.outputs():
            candidates, there = [], []
            for etype in self.into(ntype):
                adj = block.adj[etype]
                candidates.append(self.convs[key(*etype)](adj, h[etype[0]], h_dst[ntype]))
                there.append((adj.degree > 0) | (etype[0] == ntype))  # a loop is always there
            if ntype in self.self_types:
                own = cast("nn.Linear", self.own[key(ntype)])
                candidates.append(linear(h_dst[ntype], own.weight, own.bias))
                there.append(torch.ones_like(candidates[-1][:, 0], dtype=torch.bool))
            if len(candidates) == 1:
                (out[ntype],) = candidates
            else:
                z = torch.stack(candidates, 1)
                out[ntype] = self.semantic[key(ntype)](z, torch.stack(there, 1))
        return out
