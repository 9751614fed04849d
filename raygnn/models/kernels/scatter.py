"""Message passing edge by edge, by gathering and scattering alone.

For `torch.export`: no sizes are looked at, and all operations are torch's own. Messages are
materialised, which costs memory. Shape suffixes as in `native`.
"""

from __future__ import annotations

from torch import Tensor

from raygnn.models.kernels.api import Reduce
from raygnn.models.kernels.native import edge_softmax
from raygnn.sampling.batch import Adjacency

__all__ = ["aggregate", "attend", "edge_softmax"]


def aggregate(adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.aggregate`."""
    messages = x.index_select(0, adj.src)
    if weight is not None:
        messages = messages * weight.to(x.dtype).unsqueeze(1)
    out = x.new_zeros(adj.num_dst, x.shape[1])
    if reduce == "max":
        index = adj.dst.unsqueeze(1).expand_as(messages)
        return out.scatter_reduce(0, index, messages, "amax", include_self=False)
    out = out.index_add(0, adj.dst, messages)
    if reduce == "mean":
        out = out / adj.degree.clamp(min=1).unsqueeze(1).to(out.dtype)
    return out


def attend(adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
    """See `raygnn.models.kernels.api.Kernels.attend`."""
    messages = x.index_select(0, adj.src) * weight.to(x.dtype).unsqueeze(2)
    out = x.new_zeros(adj.num_dst, *x.shape[1:])
    return out.index_add(0, adj.dst, messages)
