"""Collectives of the data plane: tensors, lists of ids and rows from rank to rank, by all-to-all.

They run on a group of their own, gloo's as a rule, so that they never meet the gradient reductions;
every rank issues the same ones in the same order. With one rank nothing is sent. Tensors may lie on
any device: each goes to the one that the group's backend needs by one explicit transfer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raygnn.errors import TrainingError, error_text
from raygnn.sampling import kernels

Ids: TypeAlias = np.ndarray | Tensor


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


def as_ids(ids: Ids) -> np.ndarray:
    """Ids as look-ups take them, int64 ``[n]`` in the memory of the CPU.

    A tensor may lie on any device: it comes by one explicit transfer. Without it a look-up by ids
    on a GPU would fail, or be a copy that nobody sees.
    """
    if isinstance(ids, Tensor):
        ids = ids.detach().to("cpu").numpy()
    return np.ascontiguousarray(ids, np.int64)


class FailureBroadcast:
    """One flag for all ranks.

    Args:
        store: a key-value store that all ranks share; None with one rank.
    """

    def __init__(self, world: World, store: dist.Store | None):
        self._world = world
        self._store = store

    def ring(self, error: BaseException) -> None:
        """Say that this rank's batches have come to an end, and why. The first rank is kept."""
        if self._store is None:
            return
        self._store.compare_set("cause", "", f"{self._world.rank}\n{error_text(error)}")

    def check(self) -> None:
        """Raise if another rank has rung.

        Raises:
            TrainingError: naming that rank and the cause.
        """
        if self._store is None or not self._store.check(["cause"]):
            return
        rank, _, cause = self._store.get("cause").decode().partition("\n")
        if int(rank) != self._world.rank:
            raise TrainingError(
                f"rank {rank} could not prepare its batch: {cause}",
                where=f"rank {rank}",
                remedy="see that rank's log for the traceback",
                rank=int(rank),
            )


@dataclass(frozen=True)
class Ragged:
    """A list of ids for each of B nodes.

    Attributes:
        indptr: int64 ``[B+1]``.
        ids: int64 ``[indptr[-1]]``.
    """

    indptr: np.ndarray
    ids: np.ndarray

    @staticmethod
    def empty(num: int) -> Ragged:
        """``num`` lists with nothing in them."""
        return Ragged(np.zeros(num + 1, np.int64), np.empty(0, np.int64))

    @staticmethod
    def of_one(ids: np.ndarray) -> Ragged:
        """A list of one id for each."""
        return Ragged(np.arange(len(ids) + 1), ids)

    def take(self, order: np.ndarray) -> Ragged:
        """The lists numbered ``order``, one after the other."""
        return Ragged(*kernels.take_lists(self.indptr, self.ids, order))


@dataclass(frozen=True)
class RaggedByRank:
    """Ragged grouped by the rank that they go to, or come from.

    Attributes:
        cuts: int64 ``[W+1]``; rank r's are the lists ``cuts[r] … cuts[r+1]-1``.
    """

    lists: Ragged
    cuts: np.ndarray


def exchange_ragged(
    exchange: Exchange, parcels: Sequence[RaggedByRank], wire: np.dtype
) -> list[RaggedByRank]:
    """Send every rank its lists and return those that came. Two all-to-alls.

    Args:
        parcels: the same number of them on every rank.
        wire: dtype of the ids on their way.
    """
    size = exchange.world.size
    num = len(parcels)
    send: list[list[torch.Tensor]] = [[] for _ in range(size)]
    counts = np.empty((size, 2 * num), np.int64)
    for i, parcel in enumerate(parcels):
        indptr, cuts = parcel.lists.indptr, parcel.cuts
        sizes = np.diff(indptr).astype(wire)
        ids = parcel.lists.ids.astype(wire, copy=False)
        for r in range(size):
            send[r].append(torch.from_numpy(sizes[cuts[r] : cuts[r + 1]]))
            send[r].append(torch.from_numpy(ids[indptr[cuts[r]] : indptr[cuts[r + 1]]]))
        counts[:, 2 * i] = np.diff(cuts)
        counts[:, 2 * i + 1] = np.diff(indptr[cuts])
    received = exchange.counts(counts)
    came = exchange.pieces(send, received)
    found = []
    for i in range(num):
        sizes, ids = (
            torch.cat([row[2 * i + which] for row in came]).numpy().astype(np.int64, copy=False)
            for which in range(2)
        )
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        cuts = np.concatenate([[0], np.cumsum(received[:, 2 * i])])
        found.append(RaggedByRank(Ragged(indptr, ids), cuts))
    return found


@dataclass(frozen=True)
class RowRoutes:
    """The ways of the rows of one batch. R rows come here, G rows of this rank go out.

    On the wire rows lie by rank, then by node type, then in the order in which they were named.

    Attributes:
        num: node type → how many of its rows come.
        order: int64 ``[R]``: which of the named nodes, all types one after the other, comes at
            each place of the wire.
        receive, send: rows from each rank and to each, ``[W]``.
        given: node type → int64 ``[G_t]``, the rows that are asked for, counted from this rank's
            first; places: where each goes on the wire.
    """

    num: dict[str, int]
    order: Tensor
    receive: list[int]
    send: list[int]
    given: dict[str, Tensor]
    places: dict[str, Tensor]


def route_rows(
    ids: Mapping[str, Ids], bounds: Mapping[str, np.ndarray], exchange: Exchange
) -> RowRoutes:
    """Tell the owners which rows are wanted. Collective.

    Args:
        ids: node type → int64 ``[n]``, global ids, on any device.
        bounds: node type → int64 ``[W+1]``, see `raygnn.graph.staging.shard.Shard`.
    """
    size, rank = exchange.world.size, exchange.world.rank
    found = {t: as_ids(each) for t, each in ids.items()}
    owner = {t: np.searchsorted(bounds[t], each, side="right") - 1 for t, each in found.items()}
    counts = np.stack([np.bincount(o, minlength=size) for o in owner.values()], axis=1)
    wanted: list[Sequence[Tensor]] = [[] for _ in range(size)]
    for t, each in found.items():
        by_owner = each[np.argsort(owner[t], kind="stable")]
        pieces = torch.from_numpy(by_owner).split(np.bincount(owner[t], minlength=size).tolist())
        wanted = [[*row, piece] for row, piece in zip(wanted, pieces)]
    asked = exchange.counts(counts)
    came = exchange.pieces(wanted, asked)
    kinds = np.repeat(np.tile(np.arange(len(found)), size), asked.ravel())
    order = np.argsort(np.concatenate(list(owner.values())), kind="stable")
    return RowRoutes(
        num={t: len(each) for t, each in found.items()},
        order=torch.from_numpy(order),
        receive=counts.sum(1).tolist(),
        send=asked.sum(1).tolist(),
        given={
            t: torch.cat([row[i] for row in came]) - int(bounds[t][rank])
            for i, t in enumerate(found)
        },
        places={t: torch.from_numpy(np.flatnonzero(kinds == i)) for i, t in enumerate(found)},
    )


def count_nodes_once(
    ids: Mapping[str, Ids],
    hops: Mapping[str, Sequence[int]],
    bounds: Mapping[str, np.ndarray],
    exchange: Exchange,
) -> dict[str, Tensor]:
    """Which of a batch's nodes this rank counts, so that each node of all ranks' batches is counted
    by one of them: the lowest of the ranks that reach it in the fewest hops. Collective.

    The choice holds for every hop: a rank that reaches a node in the fewest hops has it in all
    further ones.

    Args:
        ids: node type → int64 ``[n]``, distinct global ids in the order in which hops reached them.
        hops: node type → how many of them are reached by each hop or before, the last being n.
        bounds: see `route_rows`.

    Returns:
        node type → bool ``[n]``.
    """
    size = exchange.world.size
    orders, counts = {}, np.zeros((size, len(ids)), np.int64)
    wanted: list[list[Tensor]] = [[] for _ in range(size)]
    for number, (ntype, given) in enumerate(ids.items()):
        nodes, reached = as_ids(given), np.diff([0, *hops[ntype]])
        depth = np.repeat(np.arange(len(reached), dtype=np.int8), reached)
        owner = np.searchsorted(bounds[ntype], nodes, side="right") - 1
        order = orders[ntype] = np.argsort(owner, kind="stable")
        counts[:, number] = np.bincount(owner, minlength=size)
        for column in (nodes, depth):
            pieces = torch.from_numpy(column[order]).split(counts[:, number].tolist())
            wanted = [[*row, piece] for row, piece in zip(wanted, pieces)]
    asked = exchange.counts(counts)
    came = exchange.pieces(wanted, np.repeat(asked, 2, axis=1))
    answers: list[list[Tensor]] = [[] for _ in range(size)]
    for number in range(len(ids)):
        nodes, depth = (torch.cat([row[2 * number + c] for row in came]).numpy() for c in (0, 1))
        order = np.lexsort((depth, nodes))  # stable, and rows came by rank
        ordered = nodes[order]
        first = np.zeros(len(nodes), bool)
        first[order] = np.r_[True, ordered[1:] != ordered[:-1]][: len(nodes)]
        pieces = torch.from_numpy(first).split(asked[:, number].tolist())
        answers = [[*row, piece] for row, piece in zip(answers, pieces)]
    counted = {}
    for ntype, rows in zip(ids, zip(*exchange.pieces(answers, counts))):
        by_owner = torch.cat(rows)
        counted[ntype] = torch.empty_like(by_owner)
        counted[ntype][torch.from_numpy(orders[ntype])] = by_owner
    return counted
