"""From the nodes of each graph to one row."""

from __future__ import annotations

import torch
from torch import Tensor

from raygnn.models.kernels import Choice, Reduce, select
from raygnn.sampling.batch import Adjacency


def members(sizes: Tensor) -> Adjacency:
    """Which nodes belong to which graph: an edge from each to its graph.

    Args:
        sizes: nodes of each graph, int64 ``[B]``; the graphs' nodes lie one after the other.
    """
    indptr = sizes.new_zeros(len(sizes) + 1)
    torch.cumsum(sizes, 0, out=indptr[1:])
    return Adjacency(indptr, torch.arange(int(indptr[-1]), device=sizes.device))


def pool(graphs: Adjacency, h: Tensor, reduce: Reduce, kernels: Choice = "auto") -> Tensor:
    """Sum, mean or maximum over the nodes of each graph: ``[N, F]`` → ``[B, F]``.

    fp16 and bf16 are added up, and come out, in fp32. A graph without nodes gives 0.

    Args:
        graphs: from `members`.
    """
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return select(kernels, wide, reduce).aggregate(graphs, wide, reduce)
