"""Collectives of the data plane: pieces of tensors from rank to rank, by all-to-all.

They run on a group of their own, gloo's as a rule, so that they never meet the gradient reductions;
every rank issues the same ones in the same order. With one rank nothing is sent. Tensors may lie on
any device: each goes to the one that the group's backend needs by one explicit transfer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
        group: a process group, or None when there is one rank.

    Attributes:
        device: where the backend needs tensors, and where what arrives lies: the memory of the CPU
            for gloo, this rank's GPU for NCCL.
        sent_bytes, messages: what this rank sent to others so far, and in how many collectives.
        seconds: that these took.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None = None):
        assert world.size == 1 or group is not None
        self.world = world
        self.group = group
        self.device = _device_of(group)
        self.sent_bytes = 0
        self.messages = 0
        self.seconds = 0.0

    def __deepcopy__(self, memo: object) -> Exchange:
        """The same: a copy of a module that has one exchanges over the same group."""
        return self

    def counts(self, send: np.ndarray) -> np.ndarray:
        """Tell every rank how much it will get.

        Args:
            send: int64 ``[W, K]``: K numbers for each rank.

        Returns:
            int64 ``[W, K]``: those that each rank sent here.
        """
        if self.world.size == 1:
            return send
        values = torch.from_numpy(np.ascontiguousarray(send)).to(self.device)
        out = torch.empty_like(values)
        self._all_to_all(out, values, None, None)
        return out.to("cpu").numpy()

    def pieces(self, send: Sequence[Sequence[Tensor]], receive: np.ndarray) -> list[list[Tensor]]:
        """One all-to-all of K tensors for each rank, whatever their dtypes: as bytes, so exact.

        Args:
            send: ``[W][K]`` tensors; the k-th has the same dtype and row shape for every rank,
                and on every rank.
            receive: ``[W, K]`` rows that come from each.

        Returns:
            ``[W][K]`` tensors, from each rank, views of one buffer.
        """
        if self.world.size == 1:
            return [[tensor.to(self.device) for tensor in send[0]]]
        widths = [_row_bytes(tensor) for tensor in send[0]]
        sizes = [[len(t) * w for t, w in zip(row, widths)] for row in send]
        packed = torch.cat([as_bytes(tensor) for row in send for tensor in row]).to(self.device)
        arriving = [[int(n) * w for n, w in zip(row, widths)] for row in receive]
        out = torch.empty(sum(map(sum, arriving)), dtype=torch.uint8, device=self.device)
        self._all_to_all(out, packed, list(map(sum, arriving)), list(map(sum, sizes)))
        found: list[list[Tensor]] = []
        at = 0
        for row in arriving:
            found.append([])
            for like, size in zip(send[0], row):
                found[-1].append(_from_bytes(out[at : at + size], like))
                at += size
        return found

    def rows(
        self, values: Tensor, send: Sequence[int], receive: Sequence[int], out: Tensor
    ) -> Tensor:
        """Send ``values`` (rows grouped by destination rank) into every rank's ``out``.

        Args:
            values: ``[sum(send), …]``, any dtype.
            send: rows for each rank.
            receive: rows from each rank.
            out: ``[sum(receive), …]`` contiguous, filled with what arrives, by source rank.
        """
        if self.world.size == 1:
            return out.copy_(values)
        width = _row_bytes(values)
        there = out.device == self.device
        came = out if there else torch.empty_like(out, device=self.device)
        self._all_to_all(
            as_bytes(came),
            as_bytes(values.to(self.device)),
            [int(n) * width for n in receive],
            [int(n) * width for n in send],
        )
        return out if there else out.copy_(came)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world.size > 1:
            begin = time.perf_counter()
            moved = values.to(self.device)
            dist.all_reduce(moved, group=self.group)
            self.seconds += time.perf_counter() - begin
            if moved is not values:
                values.copy_(moved)
        return values

    def max(self, value: int) -> int:
        """The largest ``value`` of any rank."""
        if self.world.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def gather(self, values: Tensor) -> Tensor | None:
        """``[W, …]`` on rank 0: the tensor of each rank, alike in shape; None elsewhere."""
        values = values.to(self.device)
        if self.world.size == 1:
            return values.unsqueeze(0)
        first = self.world.rank == 0
        rows = values.new_empty((self.world.size, *values.shape)) if first else None
        pieces = list(rows.unbind()) if rows is not None else None
        dist.gather(values.contiguous(), pieces, group=self.group, group_dst=0)
        return rows

    def gather_rows(self, values: Tensor) -> Tensor:
        """All ranks' rows, rank after rank, on every rank. ``values``: ``[n_r, …]``."""
        size = self.world.size
        received = self.counts(np.full((size, 1), len(values)))
        pieces = self.pieces([[values]] * size, received)
        return torch.cat([piece for (piece,) in pieces])

    def _all_to_all(
        self, out: Tensor, values: Tensor, receive: list[int] | None, send: list[int] | None
    ) -> None:
        own = values.nbytes // self.world.size if send is None else send[self.world.rank]
        self.sent_bytes += values.nbytes - own
        self.messages += 1
        begin = time.perf_counter()
        dist.all_to_all_single(out, values, receive, send, group=self.group)
        self.seconds += time.perf_counter() - begin


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements' bytes, uint8 ``[n]``; a view where the tensor is contiguous."""
    if not tensor.numel():  # whose strides a view may refuse
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * int(np.prod(tensor.shape[1:], dtype=np.int64))


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    tail = like.shape[1:]
    if not data.numel():
        return torch.empty((0, *tail), dtype=like.dtype, device=data.device)
    if data.storage_offset() % like.element_size():
        data = data.clone()  # torch reads aligned elements only
    return data.view(like.dtype).view(-1, *tail)
