"""Collectives of the data plane: all-to-all of tensors, lists of ids and rows.

They run on a separate process group, usually gloo, so that they never interleave with gradient
reductions (except for rows that GPUs await: `raygnn.sampling.batch.Batch.received`). Every rank
issues the same ones in the same order; with one rank nothing is sent. Tensors may be on any device:
one explicit transfer moves each to the device of the group's backend.

Rows for several ranks are ordered by rank: first those for rank 0, then those for rank 1, ….
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raygnn.errors import TrainingError, error_text
from raygnn.sampling import kernels

Ids: TypeAlias = np.ndarray | Tensor


@dataclass(frozen=True)
class World:
    """Rank and world size."""

    rank: int
    size: int


class Exchange:
    """Collectives over one process group.

    Args:
        world: rank and size.
        group: a process group, or None when there is one rank.

    Attributes:
        device: device of the backend's tensors and of results: CPU for gloo, this rank's GPU for
            NCCL.
        sent_bytes, messages: bytes that this rank sent to other ranks, and number of collectives.
        seconds: duration of these.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None = None):
        assert world.size == 1 or group is not None
        self.world = world
        self.group = group
        self.device = torch.device("cpu")
        if group is not None and dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.sent_bytes = 0
        self.messages = 0
        self.seconds = 0.0

    def __deepcopy__(self, memo: object) -> Exchange:
        """Return itself, so that a copied module communicates over the same group."""
        return self

    def counts(self, send: np.ndarray) -> np.ndarray:
        """Exchange K numbers with each rank: int64 ``[W, K]`` to ranks → ``[W, K]`` from ranks."""
        if self.world.size == 1:
            return send
        values = torch.from_numpy(np.ascontiguousarray(send)).to(self.device)
        out = torch.empty_like(values)
        self._all_to_all(out, values, None, None)
        return out.to("cpu").numpy()

    def columns(
        self,
        columns: Sequence[Tensor],
        send: np.ndarray,
        receive: np.ndarray,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Exchange K tensors of any dtypes in one all-to-all, as bytes and so exactly.

        Args:
            columns: K tensors, rows by destination rank; the k-th has the same dtype and row shape
                on every rank.
            send, receive: int64 ``[W, K]``, rows to and from each rank.
            out: contiguous tensors to receive into, all on one device; None = new ones.

        Returns:
            K tensors, rows by source rank.
        """
        if self.world.size == 1:
            if out is not None:
                return [room.copy_(column) for room, column in zip(out, columns)]
            return [column.to(self.device) for column in columns]
        rooms = out if out is not None and out[0].device == self.device else None
        widths = np.array([row_bytes(column) for column in columns])
        arriving, single = receive * widths, len(columns) == 1
        if single:  # is not packed
            shape, dtype = (int(receive.sum()), *columns[0].shape[1:]), columns[0].dtype
            came = list(rooms or [torch.empty(shape, dtype=dtype, device=self.device)])
            packed, buffer = _as_bytes(columns[0]), _as_bytes(came[0])
        else:
            split = [column.split(rows) for column, rows in zip(columns, send.T.tolist())]
            packed = torch.cat([_as_bytes(piece) for row in zip(*split) for piece in row])
            buffer = torch.empty(int(arriving.sum()), dtype=torch.uint8, device=self.device)
        self._all_to_all(
            buffer,
            packed.to(self.device),
            arriving.sum(1).tolist(),
            (send * widths).sum(1).tolist(),
        )
        if not single:
            pieces = buffer.split(arriving.ravel().tolist())
            parts = [
                [_from_bytes(piece, column) for piece in pieces[k :: len(columns)]]
                for k, column in enumerate(columns)
            ]
            outs: Sequence[Tensor | None] = rooms or [None] * len(columns)
            came = [torch.cat(each, out=room) for each, room in zip(parts, outs)]
        if out is None or rooms is not None:
            return came
        return [room.copy_(rows) for room, rows in zip(out, came)]

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all ranks, in place."""
        if self.world.size > 1:
            begin = time.perf_counter()
            moved = values.to(self.device)
            dist.all_reduce(moved, group=self.group)
            self.seconds += time.perf_counter() - begin
            if moved is not values:
                values.copy_(moved)
        return values

    def begin_sum(self, values: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Start a `sum` without waiting: the result is valid once the work is done (None = now).
        Other collectives may be issued in between."""
        if self.world.size == 1:
            return values, None
        moved = values.to(self.device)
        return moved, dist.all_reduce(moved, group=self.group, async_op=True)

    def max(self, value: int) -> int:
        """Return the largest ``value`` of any rank."""
        if self.world.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def gather_rows(self, values: Tensor) -> Tensor:
        """Gather the rows ``[n_r, …]`` of all ranks, rank after rank, on every rank."""
        return torch.cat(self._gather_pieces(values))

    def gather_json(self, value: Any) -> list[Any]:
        """Gather each rank's ``value``, serialised as JSON, on every rank."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(piece.cpu().numpy().tobytes()) for piece in self._gather_pieces(text)]

    def _gather_pieces(self, values: Tensor) -> tuple[Tensor, ...]:
        size = self.world.size
        send = np.full((size, 1), len(values))
        receive = self.counts(send)
        (rows,) = self.columns([torch.cat([values] * size)], send, receive)
        return rows.split(receive[:, 0].tolist())

    def _all_to_all(
        self, out: Tensor, values: Tensor, receive: list[int] | None, send: list[int] | None
    ) -> None:
        own = values.nbytes // self.world.size if send is None else send[self.world.rank]
        self.sent_bytes += values.nbytes - own
        self.messages += 1
        begin = time.perf_counter()
        dist.all_to_all_single(out, values, receive, send, group=self.group)
        self.seconds += time.perf_counter() - begin


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements' bytes, uint8 ``[n]``; a view of a contiguous tensor."""
    if not tensor.numel():  # its strides may not permit a view
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.contiguous().view(-1).view(torch.uint8)


def row_bytes(tensor: Tensor) -> int:
    """Return the bytes of one row of an array ``[N, …]``."""
    return tensor.element_size() * int(np.prod(tensor.shape[1:], dtype=np.int64))


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    tail = like.shape[1:]
    if not data.numel():
        return torch.empty((0, *tail), dtype=like.dtype, device=data.device)
    if data.storage_offset() % like.element_size():
        data = data.clone()  # torch reads aligned elements only
    return data.view(like.dtype).view(-1, *tail)


def as_ids(ids: Ids) -> np.ndarray:
    """Return ids as int64 ``[n]`` in CPU memory, by one explicit transfer from any device."""
    if isinstance(ids, Tensor):
        ids = ids.detach().to("cpu").numpy()
    return np.ascontiguousarray(ids, np.int64)


def owners(ids: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the ranks that own ``ids``: rank r owns ``bounds[r] … bounds[r+1]-1``."""
    return np.searchsorted(bounds, ids, side="right") - 1


def group_by_owner(ids: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a stable order of ``ids`` by owner, and each rank's count, int64 ``[W]``."""
    owner = owners(ids, bounds)
    return np.argsort(owner, kind="stable"), np.bincount(owner, minlength=len(bounds) - 1)


def name_to_owners(
    ids: Mapping[str, np.ndarray], bounds: Mapping[str, np.ndarray], exchange: Exchange
) -> dict[str, np.ndarray]:
    """Report to the owners of nodes which of them are needed. Collective.

    Args:
        ids: node type → int64 ``[n]``, any global ids; the same types in one order on all ranks.

    Returns:
        node type → int64 ``[m]``, the nodes of this rank that each rank named, by rank.
    """
    named = {t: np.unique(nodes) for t, nodes in ids.items()}  # sorted, and so grouped by owner
    cuts = [np.diff(np.searchsorted(nodes, bounds[t])) for t, nodes in named.items()]
    send = np.stack(cuts, axis=1)
    columns = [torch.from_numpy(nodes) for nodes in named.values()]
    return dict(zip(ids, map(as_ids, exchange.columns(columns, send, exchange.counts(send)))))


def ask_owners(
    ids: Ids,
    bounds: np.ndarray,
    exchange: Exchange,
    answer: Callable[[np.ndarray], Sequence[Tensor]],
) -> list[Tensor]:
    """Fetch rows of nodes or edges from the ranks that own them. Collective.

    Args:
        ids: int64 ``[n]``, global, on any device.
        bounds: int64 ``[W+1]``, see `owners`.
        answer: ids that this rank owns → their rows, K tensors ``[m, …]`` on the CPU; for ids with
            repetitions these must be writable.

    Returns:
        K tensors ``[n, …]``, in the order of ``ids``.
    """
    named, rank = as_ids(ids), exchange.world.rank
    order, counts = group_by_owner(named, bounds)
    start, stop = offsets(counts)[rank : rank + 2]
    near, far = order[start:stop], np.delete(order, slice(start, stop))
    counts[rank] = 0
    send = counts[:, None]
    asked = exchange.counts(send)
    (wanted,) = exchange.columns([torch.from_numpy(named[far])], send, asked)
    given = answer(as_ids(wanted))
    back = np.repeat(asked, len(given), axis=1), np.repeat(send, len(given), axis=1)
    others = exchange.columns(given, *back)
    if not len(near):
        own = [column.new_empty((len(named), *column.shape[1:])) for column in others]
    elif not len(far):
        return list(answer(named))
    else:  # a placeholder row for each remote one, so that local rows are moved only once
        filled = named.copy()
        filled[far] = named[near[0]]
        own = list(answer(filled))
    for rows, came in zip(own, others):
        rows[torch.from_numpy(far)] = came.to(rows.device)
    return own


def inverse(order: np.ndarray) -> np.ndarray:
    """Return the inverse permutation."""
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return back


def offsets(counts: np.ndarray) -> np.ndarray:
    """Return the start of each run of rows and the end of the last one, int64 ``[n+1]``."""
    return np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True)
class FailureBroadcast:
    """Reports a failure in batch preparation to the other ranks.

    These wait in a collective that will never complete. So a failure is written to the process
    group's key-value store, which ranks waiting for a batch poll.

    Attributes:
        store: a key-value store that all ranks share; None with one rank.
    """

    world: World
    store: dist.Store | None

    def announce(self, error: BaseException) -> None:
        """Report why this rank's batches have ended. The first report is kept."""
        if self.store is not None:
            self.store.compare_set("cause", "", f"{self.world.rank}\n{error_text(error)}")

    def check(self) -> None:
        """Raise if another rank has announced a failure.

        Raises:
            TrainingError: naming that rank and the cause.
        """
        if self.store is None or not self.store.check(["cause"]):
            return
        rank, _, cause = self.store.get("cause").decode().partition("\n")
        if int(rank) != self.world.rank:
            what, where = f"rank {rank} could not prepare its batch: {cause}", f"rank {rank}"
            remedy = "see that rank's log for the traceback"
            raise TrainingError(what, where=where, remedy=remedy, rank=int(rank))


@dataclass(frozen=True)
class Ragged:
    """Lists of ids, one for each of B nodes.

    Attributes:
        indptr: int64 ``[B+1]``.
        ids: int64 ``[indptr[-1]]``.
    """

    indptr: np.ndarray
    ids: np.ndarray

    @staticmethod
    def empty(num: int) -> Ragged:
        """Return ``num`` empty lists."""
        return Ragged(np.zeros(num + 1, np.int64), np.empty(0, np.int64))

    @staticmethod
    def of_one(ids: np.ndarray) -> Ragged:
        """Return a list of one id each."""
        return Ragged(np.arange(len(ids) + 1), ids)

    def take(self, order: np.ndarray) -> Ragged:
        """Return the lists numbered ``order``."""
        return Ragged(*kernels.take_lists(self.indptr, self.ids, order))


@dataclass(frozen=True)
class RaggedByRank:
    """Lists grouped by destination or source rank.

    Attributes:
        cuts: int64 ``[W+1]``; rank r's are the lists ``cuts[r] … cuts[r+1]-1``.
    """

    lists: Ragged
    cuts: np.ndarray


def exchange_ragged(
    exchange: Exchange, batches: Sequence[RaggedByRank], wire: np.dtype
) -> list[RaggedByRank]:
    """Send every rank its lists and return those received. Two all-to-alls.

    Args:
        batches: the same number on every rank.
        wire: dtype of the transmitted ids.
    """
    columns, counts = [], []
    for batch in batches:
        indptr, cuts = batch.lists.indptr, batch.cuts
        columns.append(torch.from_numpy(np.diff(indptr).astype(wire)))
        columns.append(torch.from_numpy(batch.lists.ids.astype(wire, copy=False)))
        counts += [np.diff(cuts), np.diff(indptr[cuts])]
    send = np.stack(counts, axis=1)
    receive = exchange.counts(send)
    came = [
        column.cpu().numpy().astype(np.int64, copy=False)
        for column in exchange.columns(columns, send, receive)
    ]
    return [
        RaggedByRank(Ragged(offsets(sizes), ids), offsets(rows))
        for sizes, ids, rows in zip(came[::2], came[1::2], receive.T[::2])
    ]


@dataclass(frozen=True)
class RowRoutes:
    """Routes of a batch's rows: which rank owns each, and which rows other ranks request here.

    Computed once, when the batch is built, so that moving rows takes one all-to-all each way. R
    rows are received, G rows are sent; transmitted rows are ordered by rank, then by node type,
    then as they were named.

    Attributes:
        num: node type → number of rows received.
        order: int64 ``[R]``: index, among the named nodes of all types, of each received row.
        receive, send: rows from and to each rank, int64 ``[W, 1]``.
        given: node type → int64 ``[G_t]``, requested rows, relative to this rank's first; places:
            the position of each among the rows sent.
    """

    num: dict[str, int]
    order: Tensor
    receive: np.ndarray
    send: np.ndarray
    given: dict[str, Tensor]
    places: dict[str, Tensor]

    def to(self, device: torch.device) -> RowRoutes:
        """Return the routes with tensors on ``device``."""
        given, places = ({t: x.to(device) for t, x in d.items()} for d in (self.given, self.places))
        return replace(self, order=self.order.to(device), given=given, places=places)


def route_rows(
    ids: Mapping[str, Ids], bounds: Mapping[str, np.ndarray], exchange: Exchange
) -> RowRoutes:
    """Request rows from their owners. Collective.

    Args:
        ids: node type → int64 ``[n]``, global ids, on any device.
        bounds: node type → int64 ``[W+1]``, see `raygnn.graph.staging.shard.Shard`.
    """
    size, rank = exchange.world.size, exchange.world.rank
    nodes = {t: as_ids(rows) for t, rows in ids.items()}
    owner = {t: owners(rows, bounds[t]) for t, rows in nodes.items()}
    counts = np.stack([np.bincount(o, minlength=size) for o in owner.values()], axis=1)
    columns = [
        torch.from_numpy(rows[np.argsort(owner[t], kind="stable")]) for t, rows in nodes.items()
    ]
    asked = exchange.counts(counts)
    came = dict(zip(nodes, exchange.columns(columns, counts, asked)))
    kinds = np.repeat(np.tile(np.arange(len(nodes)), size), asked.ravel())
    order = np.argsort(np.concatenate(list(owner.values())), kind="stable")
    return RowRoutes(
        num={t: len(rows) for t, rows in nodes.items()},
        order=torch.from_numpy(order),
        receive=counts.sum(1, keepdims=True),
        send=asked.sum(1, keepdims=True),
        given={t: rows - int(bounds[t][rank]) for t, rows in came.items()},
        places={t: torch.from_numpy(np.flatnonzero(kinds == i)) for i, t in enumerate(nodes)},
    )


def count_nodes_once(
    ids: Mapping[str, Ids],
    hops: Mapping[str, Sequence[int]],
    bounds: Mapping[str, np.ndarray],
    exchange: Exchange,
) -> dict[str, Tensor]:
    """Mark the nodes of a batch that this rank counts, so that exactly one rank counts each node:
    the lowest of those that reach it in the fewest hops. Collective.

    The choice holds for every hop: a rank that reaches a node in the fewest hops has it in all
    further ones.

    Args:
        ids: node type → int64 ``[n]``, distinct global ids in the order in which hops reached them.
        hops: node type → number of nodes reached up to each hop, the last being n.
        bounds: see `route_rows`.

    Returns:
        node type → bool ``[n]``.
    """
    columns, counts, orders = [], [], {}
    for ntype, given in ids.items():
        nodes, reached = as_ids(given), np.diff([0, *hops[ntype]])
        depth = np.repeat(np.arange(len(reached), dtype=np.int8), reached)
        orders[ntype], count = group_by_owner(nodes, bounds[ntype])
        columns += [torch.from_numpy(column[orders[ntype]]) for column in (nodes, depth)]
        counts.append(count)
    send = np.stack(counts, axis=1)
    asked = exchange.counts(send)
    came = exchange.columns(columns, np.repeat(send, 2, axis=1), np.repeat(asked, 2, axis=1))
    answers = []
    for nodes, depth in zip(*[iter(column.numpy() for column in came)] * 2):
        order = np.lexsort((depth, nodes))  # stable, and rows came by rank
        ordered = nodes[order]
        first = np.zeros(len(nodes), bool)
        first[order] = np.r_[True, ordered[1:] != ordered[:-1]][: len(nodes)]
        answers.append(torch.from_numpy(first))
    by_owner = exchange.columns(answers, asked, send)
    return {t: rows[torch.from_numpy(inverse(orders[t]))] for t, rows in zip(ids, by_owner)}
