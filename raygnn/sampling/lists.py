"""Lists of ids, one for each of some nodes, and how they go from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raygnn.sampling import kernels
from raygnn.sampling.exchange import Exchange


@dataclass(frozen=True)
class Lists:
    """A list of ids for each of B nodes.

    Attributes:
        indptr: int64 ``[B+1]``.
        ids: int64 ``[indptr[-1]]``.
    """

    indptr: np.ndarray
    ids: np.ndarray

    @staticmethod
    def empty(num: int) -> Lists:
        """``num`` lists with nothing in them."""
        return Lists(np.zeros(num + 1, np.int64), np.empty(0, np.int64))

    @staticmethod
    def of_one(ids: np.ndarray) -> Lists:
        """A list of one id for each."""
        return Lists(np.arange(len(ids) + 1), ids)

    def take(self, order: np.ndarray) -> Lists:
        """The lists numbered ``order``, one after the other."""
        return Lists(*kernels.take_lists(self.indptr, self.ids, order))


@dataclass(frozen=True)
class Parcel:
    """Lists grouped by the rank that they go to, or come from.

    Attributes:
        cuts: int64 ``[W+1]``; rank r's are the lists ``cuts[r] … cuts[r+1]-1``.
    """

    lists: Lists
    cuts: np.ndarray


def swap(exchange: Exchange, parcels: Sequence[Parcel], wire: np.dtype) -> list[Parcel]:
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
        found.append(Parcel(Lists(indptr, ids), cuts))
    return found
