"""Graph isomorphism network (Xu, Hu, Leskovec & Jegelka, "How powerful are graph neural networks?",
ICLR 2019).

A layer is ``MLP((1 + eps) · h(v) + sum of h(u) over the edges u → v)``, its MLP of two linear
layers. On a typed graph the MLP reads such a sum per edge type, side by side: its first linear
layer is then one weight matrix per edge type, as the convolutions of the other families, and what
follows is one per node type. ``(1 + eps) · h(v)`` is part of the sums over edge types that join a
node type to itself; a node type without any has it as a sum of its own, by a weight matrix alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from raygnn.models.kernels import Choice, select
from raygnn.models.layers import LinearConv
from raygnn.models.linear import linear
from raygnn.models.norm import activation, norm, normalise
from raygnn.sampling.batch import Adjacency


class GINConv(LinearConv):
    """The sum over one edge type, and the part of the MLP's first linear layer that reads it.

    ``eps`` is learnt, from 0.
    """

    def __init__(self, in_features: int, out_features: int, *, same_type: bool, kernels: Choice):
        super().__init__(in_features, out_features, reduce="sum", kernels=kernels)
        self.eps = nn.Parameter(torch.zeros(1)) if same_type else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # torch.nn.Linear's

    def combine(self, adj: Adjacency, h_src: Tensor, degree: Tensor | None) -> Tensor:
        return select(self.kernels, h_src).aggregate(adj, h_src, "sum")

    def finish(
        self, combined: Tensor, adj: Adjacency, h_dst: Tensor, degree: Tensor | None
    ) -> Tensor:
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
