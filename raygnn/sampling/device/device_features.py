"""Node rows for a GPU: in its own memory, or page-locked in the host's memory with the most
frequently read ones in the GPU's."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import TrainingError
from raygnn.sampling.batch import AwaitedRows
from raygnn.sampling.device import device_kernels
from raygnn.sampling.exchange import Exchange, Ids, as_ids
from raygnn.sampling.features import FeatureRows, FeatureStore

log = logging.getLogger("raygnn")

_AT_ONCE = 1 << 20  # rows copied at a time


def put(rows: np.ndarray | Tensor, device: torch.device, pinned: bool) -> Tensor:
    """Copy rows ``[N, …]`` to the memory of ``device``, or to page-locked memory of the host."""
    locked = pinned and device.type == "cuda"
    out = torch.empty(
        rows.shape,
        dtype=_as_tensor(rows[:0]).dtype,
        device=torch.device("cpu") if locked else device,
        pin_memory=locked,
    )
    for low in range(0, len(rows), _AT_ONCE):
        out[low : low + _AT_ONCE].copy_(_as_tensor(rows[low : low + _AT_ONCE]))
    return out


def _as_tensor(rows: np.ndarray | Tensor) -> Tensor:
    """Convert to a tensor; read-only arrays are copied, since torch warns about them."""
    read_only = isinstance(rows, np.ndarray) and not rows.flags.writeable
    return torch.as_tensor(np.array(rows) if read_only else rows)


def runtime(device: torch.device) -> Any:
    """Return torch's module of CUDA's runtime; None without a GPU."""
    return torch.cuda.cudart() if device.type == "cuda" else None


def lock_pages(tensors: Sequence[Tensor], owner: object, cudart: Any) -> str | None:
    """Page-lock tensors' memory in place, for this process, for the lifetime of ``owner``.

    Args:
        cudart: see `runtime`.

    Returns:
        None, or the reason why nothing was locked.
    """
    locked: list[Tensor] = []
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        status = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(status):
            _unlock(locked, cudart)
            return f"CUDA says {cudart.cudaGetErrorString(status)}"
        locked.append(tensor)
    weakref.finalize(owner, _unlock, locked, cudart)  # keeps the memory alive until then
    return None


def _unlock(tensors: Sequence[Tensor], cudart: Any) -> None:
    for tensor in tensors:
        cudart.cudaHostUnregister(tensor.data_ptr())


@dataclass(frozen=True)
class DeviceColumn:
    """One array of a node type.

    Attributes:
        table: ``[S, …]``, by slot.
        near: rows copied to the GPU's memory, if the table is not there; None = none.
    """

    table: Tensor
    near: Tensor | None


class DeviceFeatures:
    """The rows of a `FeatureStore` on this host, for batches that are built on a GPU.

    Slots are numbered as in the store. If all ranks are on this host, the GPU computes slots and
    the host waits for nothing. Otherwise the CPU computes them, to find the rows that other hosts
    must send; `begin` requests these over the store's exchange, and `finish` receives them.

    Args:
        store: whose rows are read.
        device: the GPU; a CPU with Triton's interpreter.
        near: None = all rows in the GPU's memory; else node type → distinct int64 ids, of rows on
            this host, to copy there, with all rows page-locked in the host's memory.
        over: moves rows between ranks; required if other hosts have some.
        copies: the host has memory for a page-locked copy of each rank's rows, in case its shared
            rows cannot be locked in place.

    Attributes:
        bounds, exchange, remote, hits: see `FeatureStore`.

    Raises:
        TrainingError: pages cannot be locked, and there is no memory for copies.
    """

    def __init__(
        self,
        store: FeatureStore,
        device: torch.device,
        near: Mapping[str, Ids] | None = None,
        over: Exchange | None = None,
        copies: bool = True,
    ):
        assert store.whole or over is not None
        self.bounds: Mapping[str, np.ndarray] = store.bounds
        self.exchange: Exchange = store.exchange
        self._store = store
        self._over = over
        self._device = device
        self._columns: dict[str, dict[str, DeviceColumn]] = {}
        # node type → index in `DeviceColumn.near` of each slot's row
        self._near: dict[str, Tensor] = {}
        self._shifts: dict[str, tuple[Tensor, Tensor]] = {}
        chosen = {t: as_ids((near or {}).get(t, np.empty(0))) for t in store.ntypes}
        slots, _, _ = store.locate(chosen)
        tables = {t: store.here(t) for t in store.ntypes}
        everything = [rows for columns in tables.values() for rows in columns.values()]
        in_place = near is not None and self._locked(everything, copies)
        for ntype, columns in tables.items():
            self._columns[ntype] = {
                name: self._placed(
                    rows if in_place else put(rows, device, near is not None), slots[ntype], near
                )
                for name, rows in columns.items()
            }
            bounds, shifts = store.bounds[ntype][1:-1], store.shifts(ntype)
            self._shifts[ntype] = put(bounds, device, False), put(shifts, device, False)
            if near is not None and columns:
                places = np.full(max(1, store.permanent(ntype)), -1, np.int32)
                places[slots[ntype].numpy()] = np.arange(len(chosen[ntype]))
                self._near[ntype] = put(places, device, False)

    def _locked(self, tables: Sequence[Tensor], copies: bool) -> bool:
        """Page-lock the store's tables in place, in memory shared by the host's ranks; return False
        if copies are needed."""
        cudart = runtime(self._device)
        failure = None if cudart is None else lock_pages(tables, self, cudart)
        if failure is None:
            return True
        with contextlib.suppress(RuntimeError):  # the next launch reports that error once more
            torch.zeros(1, device=self._device)
        if not copies:
            raise TrainingError(
                f"feature rows cannot be page-locked in place ({failure}), and the host has no "
                "memory for a copy for each worker"
            )
        log.warning("each worker page-locks a copy of the feature rows; in place, %s", failure)
        return False

    def _placed(self, table: Tensor, slots: Tensor, chosen: object) -> DeviceColumn:
        if chosen is None or not len(slots):
            return DeviceColumn(table, None)
        near = torch.empty((len(slots), *table.shape[1:]), dtype=table.dtype, device=self._device)
        for low in range(0, len(slots), _AT_ONCE):
            near[low : low + _AT_ONCE].copy_(table[slots[low : low + _AT_ONCE]])
        return DeviceColumn(table, near)

    @property
    def remote(self) -> int:
        return self._store.remote

    @property
    def hits(self) -> int:
        return self._store.hits

    def gather(self, ids: Mapping[str, Ids]) -> FeatureRows:
        """See `FeatureStore.gather`; the rows are on the GPU."""
        rows, awaited = self.begin(ids)
        return rows if awaited is None else self.finish(awaited)

    def begin(self, ids: Mapping[str, Ids]) -> tuple[FeatureRows, AwaitedRows | None]:
        """Gather the rows for ``ids`` on this host, and request the others; None = none awaited.
        Collective over the store's exchange."""
        if self._store.whole:
            return {t: self._read(t, self._owned_slots(t, ids[t])) for t in self._columns}, None
        slots, missing, counts = self._store.locate({t: as_ids(nodes) for t, nodes in ids.items()})
        asked, given = self._store.request(missing, counts)
        rows: FeatureRows = {t: {} for t in self._columns}
        places, order = {}, {}
        for ntype, index in slots.items():
            permanent = self._store.permanent(ntype)
            places[ntype] = (index >= permanent).nonzero().flatten()
            order[ntype] = index[places[ntype]] - permanent
            # the kernel skips slots below 0; in the GPU's memory any row is read as fast
            hole = -1 if ntype in self._near else 0
            here = index.index_fill(0, places[ntype], hole)
            rows[ntype] = self._read(ntype, here.to(self._device, non_blocking=True))
        return rows, AwaitedRows(rows, places, order, given, receive=counts, send=asked)

    def finish(self, awaited: AwaitedRows) -> FeatureRows:
        """Return all rows after receiving other hosts' rows. Collective over ``over``."""
        assert self._over is not None
        numbers, answers, rooms = [], [], []
        for number, (ntype, slots) in enumerate(awaited.given.items()):
            total = int(awaited.receive[:, number].sum())
            for rows in self._read(ntype, slots.to(self._device)).values():
                numbers.append(number)
                answers.append(rows)
                rooms.append(rows.new_empty((total, *rows.shape[1:])))
        send, receive = awaited.send[:, numbers], awaited.receive[:, numbers]
        came = iter(self._over.columns(answers, send, receive, rooms))
        for ntype in awaited.given:
            places, order = (one[ntype].to(self._device) for one in (awaited.places, awaited.order))
            for rows in awaited.rows[ntype].values():
                rows.index_copy_(0, places, next(came).index_select(0, order))
        return awaited.rows

    def _owned_slots(self, ntype: str, ids: Ids) -> Tensor:
        index = torch.as_tensor(ids).to(self._device, non_blocking=True)
        ends, shifts = self._shifts[ntype]
        return index + shifts[torch.bucketize(index, ends, right=True)]

    def _read(self, ntype: str, slots: Tensor) -> dict[str, Tensor]:
        read = {}
        for name, column in self._columns[ntype].items():
            if ntype in self._near:
                places = None if column.near is None else self._near[ntype]
                given = column.table.dtype, column.near, places
                read[name] = device_kernels.gather(column.table, slots, *given)
            else:
                read[name] = column.table.index_select(0, slots)
        return read
