"""Edges as seeds: a batch is some edges of one type, and the neighbourhoods of their ends.

An edge is known by its position: all parts' in-edge lists of its type, one after the other. Their
order as seeds is that of the user's graph, whatever the partition.
"""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.shard import NUMBER, SPLIT, Shard
from raygnn.sampling import kernels
from raygnn.sampling.convert import Ids, as_ids
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.negatives import ENDS, Negatives
from raygnn.sampling.sampler import Banned
from raygnn.sampling.seeds import Start, Turn


class Edges:
    """The edges of one type into the nodes of each rank, for whoever asks. Collective to make.

    Args:
        shard: one that holds the in-edges of the owned nodes, all of them.

    Attributes:
        src, dst: ends of the own edges, global ids, int64 ``[own]``.
        first: position of the first of them.
        bounds: int64 ``[W+1]``, the positions that each rank owns.
    """

    def __init__(self, shard: Shard, exchange: Exchange, etype: EdgeType):
        self.etype = etype
        self.exchange = exchange
        rows, ntype = shard.topology[etype], etype[2]
        low = shard.first(ntype) - rows.first
        indptr = rows.indptr[low : low + shard.owned(ntype) + 1]
        span = slice(int(indptr[0]), int(indptr[-1]))
        self.src = rows.src[span].astype(np.int64)
        self.dst = np.repeat(np.arange(len(indptr) - 1) + shard.first(ntype), np.diff(indptr))
        self.first = shard.edge_first(etype) + span.start
        stops = exchange.gather_rows(torch.tensor([shard.edge_first(etype) + span.stop])).numpy()
        self.bounds = np.concatenate([[0], stops])
        self._data = {name: array[span] for name, array in rows.data.items()}

    def over(self, exchange: Exchange) -> Edges:
        """The same, asked for by other collectives."""
        other = copy.copy(self)
        other.exchange = exchange
        return other

    @property
    def num(self) -> int:
        """Edges of all ranks."""
        return int(self.bounds[-1])

    def column(self, name: str) -> np.ndarray:
        """An array of the own edges, ``[own, …]``."""
        return self._data[name]

    def __contains__(self, name: str) -> bool:
        """Whether there is such an array."""
        return name in self._data

    def chosen(self, split: int) -> np.ndarray:
        """Which of the own edges are in a split (see `raygnn.graph.edge_target`), int64 ``[n]``."""
        return np.flatnonzero(self._data[SPLIT] == split)

    def rows(self, positions: Ids, names: list[str]) -> tuple[np.ndarray, list[Tensor]]:
        """What the owners know of some edges. Collective.

        Returns:
            Sources and destinations int64 ``[2, n]``, and the named arrays' rows.
        """
        exchange, size = self.exchange, self.exchange.world.size
        positions = as_ids(positions)
        owner = np.searchsorted(self.bounds, positions, side="right") - 1
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=size).reshape(size, 1)
        ends = np.concatenate([[0], np.cumsum(send)])
        asked = exchange.counts(send)
        by_owner = torch.from_numpy(positions[order])
        pieces = [[by_owner[ends[r] : ends[r + 1]]] for r in range(size)]
        wanted = torch.cat([piece for (piece,) in exchange.pieces(pieces, asked)]).numpy()
        at = wanted - self.first
        here = [self.src[at], self.dst[at], *(self._data[name][at] for name in names)]
        stops = np.concatenate([[0], np.cumsum(asked)])
        answer = [
            [torch.from_numpy(column[stops[r] : stops[r + 1]]) for column in here]
            for r in range(size)
        ]
        came = exchange.pieces(answer, np.repeat(send, len(here), axis=1))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        columns = [torch.cat([row[c] for row in came])[back] for c in range(len(here))]
        return torch.stack(columns[:2]).numpy(), columns[2:]


class EdgeSeeds:
    """Edges of one type as seeds.

    Args:
        positions: int64 ``[n]``, the edges to train on, on every rank alike; None = all.
        exclude: which edges a batch may not sample, so that it does not see what it is to
            predict: None, "self" (the seeds of all ranks) or "reverse" (and the same pairs the
            other way round). They are left out by their ends, so parallel edges do not give them
            away.
        reverse: the edge type that holds the reverses; None = the seeds' own, or none if that
            joins nodes of two types.
        target, relation: the arrays that hold what is to be predicted, and each edge's relation.
        negatives: draws nodes that take the place of ends.
    """

    def __init__(
        self,
        edges: Edges,
        positions: Ids | None = None,
        *,
        exclude: Literal["self", "reverse"] | None = None,
        reverse: EdgeType | None = None,
        target: str | None = None,
        relation: str | None = None,
        negatives: Negatives | None = None,
    ):
        self.etype = edges.etype
        self.num = edges.num if positions is None else len(positions)
        self._edges = edges
        self._positions = None if positions is None else as_ids(positions)
        self._exclude = exclude
        source, _, other = edges.etype
        self._reverse = reverse or (edges.etype if source == other else None)
        self._target = target
        self._relation = relation
        self._negatives = negatives

    def ids(self, index: Ids) -> np.ndarray:
        found = as_ids(index)
        return found if self._positions is None else self._positions[found]

    def start(self, turn: Turn) -> Start:
        negatives = self._negatives
        # of all ranks, so that a batch sees the same however many there are
        everyone = self._exclude is not None or (negatives is not None and negatives.in_batch)
        positions = self.ids(turn.chosen if everyone else turn.index)
        names = [name for name in (self._target, self._relation) if name is not None]
        ends, columns = self._edges.rows(positions, names)
        drawn: dict[str, np.ndarray] = {}
        if negatives is not None:
            drawn = negatives.draw(turn.epoch, turn.step, dict(zip(ENDS, ends)))
        banned = self._banned(*ends)
        if everyone:
            ends = ends[:, turn.mine]
            columns = [column[torch.from_numpy(turn.mine)] for column in columns]
        named = dict(zip(names, columns))
        nodes, pairs, instead = _nodes(self.etype, ends, drawn)
        return Start(
            nodes,
            torch.ones(len(turn.mine)) if self._target is None else named[self._target],
            pairs=torch.from_numpy(pairs),
            banned=banned,
            relation=None if self._relation is None else named[self._relation].long(),
            instead={end: torch.from_numpy(local) for end, local in instead.items()},
            etype=self.etype,
        )

    def _banned(self, src: np.ndarray, dst: np.ndarray) -> Banned | None:
        if self._exclude is None:
            return None
        if self._exclude == "self" or self._reverse is None:
            return Banned({self.etype: (src, dst)})
        if self._reverse != self.etype:
            return Banned({self.etype: (src, dst), self._reverse: (dst, src)})
        return Banned({self.etype: (np.concatenate([src, dst]), np.concatenate([dst, src]))})


def in_order(edges: Edges, own: np.ndarray) -> np.ndarray:
    """Positions of edges of all ranks, in the order of the user's graph: the same on every rank,
    and the same edges in the same order whatever the partition. Collective.

    Args:
        own: int64 ``[n]``, which of the own edges.
    """
    keys = edges.exchange.gather_rows(
        torch.from_numpy(np.ascontiguousarray(edges.column(NUMBER)[own]))
    )
    positions = edges.exchange.gather_rows(torch.from_numpy(own + edges.first))
    found: np.ndarray = positions[torch.argsort(keys)].numpy()
    return found


def _nodes(
    etype: EdgeType, ends: np.ndarray, drawn: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """The nodes of a batch, each once by type, with ``pairs`` and ``instead`` as `Batch` has
    them."""
    nobody = np.empty(0, np.int64)
    columns = {end: np.concatenate([ids, drawn.get(end, nobody)]) for end, ids in zip(ENDS, ends)}
    source, target = columns.values()
    if etype[0] == etype[2]:
        nodes, both = kernels.relabel(nobody, np.concatenate([source, target]))
        found, local = {etype[0]: nodes}, [both[: len(source)], both[len(source) :]]
    else:
        (first, one), (second, other) = (kernels.relabel(nobody, c) for c in (source, target))
        found, local = {etype[0]: first, etype[2]: second}, [one, other]
    num = ends.shape[1]
    instead: dict[str, np.ndarray] = {
        end: each[num:] for end, each in zip(ENDS, local) if end in drawn
    }
    return found, np.stack([each[:num] for each in local]), instead
