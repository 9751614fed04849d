"""Collectives of the data plane: rows of tensors from rank to rank, by all-to-all.

They run on a gloo group of their own, on CPU tensors, so that they never meet the gradient
reductions; every rank issues the same ones in the same order. With one rank nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Where this rank stands; pure arithmetic."""

    rank: int
    size: int


class Exchange:
    """All-to-all of rows over one process group.

    Args:
        world: rank and size.
        group: a gloo process group, or None when there is one rank.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None = None):
        assert world.size == 1 or group is not None
        self.world = world
        self.group = group
        self.sent_bytes = 0

    def counts(self, send: list[int]) -> list[int]:
        """Tell every rank how many rows it will get; returns how many come from each."""
        if self.world.size == 1:
            return list(send)
        out = torch.empty(self.world.size, dtype=torch.int64)
        dist.all_to_all_single(out, torch.tensor(send, dtype=torch.int64), group=self.group)
        return [int(n) for n in out.tolist()]

    def rows(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send ``values`` (rows grouped by destination rank) and return the rows received.

        Args:
            values: ``[sum(send), …]``, any dtype; travels as bytes, so every dtype is exact.
            send: rows for each rank.
            receive: rows from each rank, as ``counts`` returned them.

        Returns:
            ``[sum(receive), …]``, grouped by source rank.
        """
        if self.world.size == 1:
            return values
        tail = values.shape[1:]
        out = torch.empty((sum(receive), *tail), dtype=values.dtype)
        width = values.element_size() * int(np.prod(tail, dtype=np.int64))
        self.sent_bytes += width * (len(values) - send[self.world.rank])
        dist.all_to_all_single(
            _bytes(out, width), _bytes(values, width), receive, send, group=self.group
        )
        return out

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def max(self, value: int) -> int:
        """The largest ``value`` of any rank."""
        if self.world.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def gather_rows(self, values: Tensor) -> Tensor:
        """All ranks' rows, rank after rank, on every rank. ``values``: ``[n_r, …]``."""
        size = self.world.size
        received = self.counts([len(values)] * size)
        copies = values.repeat(size, *([1] * (values.dim() - 1))) if size > 1 else values
        return self.rows(copies, [len(values)] * size, received)


def _bytes(tensor: Tensor, width: int) -> Tensor:
    if not tensor.numel():  # whose strides a view may refuse
        return torch.empty((len(tensor), width), dtype=torch.uint8)
    return tensor.contiguous().view(torch.uint8).view(len(tensor), width)
