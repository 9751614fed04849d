"""Rows of nodes where a GPU reads them: in its own memory, or page-locked in the host's with those
that batches ask for most often in the GPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raygnn.sampling.device import device_kernels
from raygnn.sampling.exchange import Exchange, Ids, as_ids
from raygnn.sampling.features import FeatureStore, Rows

_AT_ONCE = 1 << 20  # rows that are copied in one go


def put(pieces: Sequence[np.ndarray | Tensor], device: torch.device, pinned: bool) -> Tensor:
    """Rows, one piece after the other, where ``device`` reads them: in its own memory, or
    page-locked in the host's."""
    first, locked = _as_tensor(pieces[0][:0]), pinned and device.type == "cuda"
    out = torch.empty(
        (sum(map(len, pieces)), *first.shape[1:]),
        dtype=first.dtype,
        device=torch.device("cpu") if locked else device,
        pin_memory=locked,
    )
    at = 0
    for piece in pieces:
        for low in range(0, len(piece), _AT_ONCE):
            part = _as_tensor(piece[low : low + _AT_ONCE])
            out[at : at + len(part)].copy_(part)
            at += len(part)
    return out


def _as_tensor(rows: np.ndarray | Tensor) -> Tensor:
    """A copy of what is only to be read: torch would warn that it might write there."""
    read_only = isinstance(rows, np.ndarray) and not rows.flags.writeable
    return torch.as_tensor(np.array(rows) if read_only else rows)


@dataclass(frozen=True)
class Column:
    """One array of a node type.

    Attributes:
        table: ``[N, …]``, by id.
        near: the rows of it that lie in the GPU's memory, where the table does not; None = none.
    """

    table: Tensor
    near: Tensor | None


class DeviceFeatures:
    """The rows of a `FeatureStore` that has all of them, for batches that are made on a GPU.

    Args:
        store: whose rows are copied; with nothing to fetch from other hosts.
        device: the GPU; a CPU where Triton's interpreter runs.
        near: None = all rows lie in the GPU's memory; else node type → distinct int64 ids of those
            that do, and all lie page-locked in the host's.

    Attributes:
        bounds, exchange, remote, hits: see `FeatureStore`.
    """

    def __init__(
        self,
        store: FeatureStore,
        device: torch.device,
        near: Mapping[str, Ids] | None = None,
    ):
        assert store.whole
        self.bounds: Mapping[str, np.ndarray] = store.bounds
        self.exchange: Exchange = store.exchange
        self.remote = self.hits = 0
        self._device = device
        self._columns: dict[str, dict[str, Column]] = {}
        self._slots: dict[str, Tensor] = {}
        for ntype in store.ntypes:
            chosen = None if near is None else as_ids(near.get(ntype, np.empty(0)))
            if chosen is not None:
                slots = np.full(int(store.bounds[ntype][-1]), -1, np.int32)
                slots[chosen] = np.arange(len(chosen))
                self._slots[ntype] = put([slots], device, False)
            self._columns[ntype] = {
                name: self._placed(put(pieces, device, near is not None), chosen)
                for name, pieces in store.in_order(ntype)
            }

    def _placed(self, table: Tensor, chosen: np.ndarray | None) -> Column:
        if chosen is None or not len(chosen):
            return Column(table, None)
        return Column(table, table[torch.from_numpy(chosen)].to(self._device))

    def gather(self, ids: Mapping[str, Ids]) -> Rows:
        """See `FeatureStore.gather`; the rows lie on the GPU, and the host waits for nothing."""
        rows: Rows = {}
        for ntype, columns in self._columns.items():
            index = torch.as_tensor(ids[ntype]).to(self._device, non_blocking=True)
            rows[ntype] = {n: self._read(ntype, c, index) for n, c in columns.items()}
        return rows

    def _read(self, ntype: str, column: Column, index: Tensor) -> Tensor:
        if ntype not in self._slots:
            return column.table.index_select(0, index)
        slots = None if column.near is None else self._slots[ntype]
        return device_kernels.gather(column.table, index, column.table.dtype, column.near, slots)
