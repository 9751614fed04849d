"""Message passing by DGL's kernels, where DGL can run on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from raygnn.models.kernels.api import Reduce
from raygnn.sampling.batch import Adjacency, dgl


def aggregate(adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.aggregate`."""
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


def edge_softmax(adj: Adjacency, score: Tensor, num_src: int) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.edge_softmax`."""
    wide = score if score.dtype == torch.float64 else score.float()
    soft: Tensor = dgl().ops.edge_softmax(adj.to_dgl(num_src), wide)
    return soft.to(score.dtype)


def attend(adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.attend`."""
    graph = adj.to_dgl(len(x))
    out: Tensor = dgl().ops.u_mul_e_sum(graph, x, weight.to(x.dtype).unsqueeze(2))
    return out
