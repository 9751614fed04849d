"""What a batch starts from: seeds, nodes or edges, of one task or of several.

Seeds are numbered the same on every rank, whichever rank computes them. An edge is known by its
position: all parts' in-edge lists of its type, one after the other. The order of edges as seeds is
that of the user's graph, whatever the partition.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import NUMBER, SPLIT, Shard
from raygnn.sampling import kernels
from raygnn.sampling.batch import Part
from raygnn.sampling.exchange import Exchange, Ids, World, as_ids
from raygnn.sampling.negatives import ENDS, Negatives
from raygnn.sampling.plan import MultitaskPlan, SeedPlan, Steps, rank_share
from raygnn.sampling.sampler import Banned


@dataclass(frozen=True)
class Start:
    """Where the blocks of one batch start.

    Attributes:
        nodes: node type → distinct ids, the last block's destinations.
        y: targets of the seeds.
        pairs, relation, instead: as `Batch` has them.
        banned: edges that no hop may draw.
        etype: of the seeds, where these are edges.
    """

    nodes: Mapping[str, np.ndarray]
    y: Tensor
    pairs: Tensor | None = None
    banned: Banned | None = None
    relation: Tensor | None = None
    instead: Mapping[str, Tensor] = field(default_factory=dict)
    etype: EdgeType | None = None


@dataclass(frozen=True)
class SeedSlice:
    """Which seeds a rank has in one step.

    Attributes:
        chosen: numbers of all ranks' seeds, int64 ``[≤ global batch]``.
        mine: which of them are this rank's, int64 ``[B]``.
        epoch, step: of the run.
    """

    chosen: np.ndarray
    mine: np.ndarray
    epoch: int
    step: int

    @property
    def index(self) -> np.ndarray:
        """Numbers of this rank's seeds."""
        return self.chosen[self.mine]


class Seeds(Protocol):
    """Numbered seeds; the numbers are what a `SeedPlan` deals in."""

    num: int

    def ids(self, index: np.ndarray) -> np.ndarray:
        """What the seeds numbered ``index`` are called: contiguous per rank that owns them."""
        ...

    def start(self, turn: SeedSlice) -> Start:
        """Where a rank's batch starts. Collective."""
        ...


class NodeSeeds:
    """Nodes of one type, in the order of their original ids.

    Args:
        ids: int64 ``[n]``, reshuffled global ids, on any device.
        targets: ``[n, …]``.
    """

    def __init__(self, ntype: str, ids: Ids, targets: Tensor):
        self.ntype = ntype
        self.targets = targets
        self.num = len(ids)
        self._ids = as_ids(ids)

    def ids(self, index: Ids) -> np.ndarray:
        return self._ids[as_ids(index)]

    def start(self, turn: SeedSlice) -> Start:
        index = turn.index
        return Start({self.ntype: self._ids[index]}, self.targets[torch.from_numpy(index)])


def owned_nodes(shard: Shard, ntype: str, split: str, targets: Tensor) -> np.ndarray:
    """Positions, among this rank's own nodes, of those in a split that have a target.

    Args:
        split: "train", "val" or "test"; a mask that the partition lacks selects nothing.
        targets: ``[owned]`` classes, below 0 where unknown, or numbers ``[owned, …]``, NaN where
            unknown.

    Returns:
        int64 ``[n]``.
    """
    mask = shard.node_data[ntype].get(f"{split}_mask")
    if mask is None:
        return np.empty(0, np.int64)
    chosen: np.ndarray = torch.nonzero(mask.bool() & known(targets)).flatten().numpy()
    return chosen


def known(targets: Tensor) -> Tensor:
    """Which of some classes or numbers are known, bool ``[n]``: see `owned_nodes`."""
    if not targets.is_floating_point():
        return targets >= 0
    return ~targets.flatten(1).isnan().any(1) if targets.dim() > 1 else ~targets.isnan()


def gather_seeds(shard: Shard, exchange: Exchange, ntype: str, targets: Tensor) -> NodeSeeds:
    """The training nodes of all ranks. Collective.

    Sixteen bytes and a target for each on every rank, so that any rank can compute any seed.
    """
    owned = owned_nodes(shard, ntype, "train", targets)
    ids = torch.from_numpy(owned + shard.first(ntype))
    original = torch.from_numpy(shard.original[ntype][owned].astype(np.int64))
    keys, ids, values = (
        exchange.gather_rows(rows) for rows in (original, ids, targets[torch.from_numpy(owned)])
    )
    order = torch.argsort(keys)
    return NodeSeeds(ntype, ids[order].numpy(), values[order])


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
        """Which of this part's edges are in a split, int64 ``[n]``."""
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

    def start(self, turn: SeedSlice) -> Start:
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


@dataclass(frozen=True)
class AssignedSeeds:
    """A rank's seeds in a step.

    Attributes:
        nodes, banned: see `Start`.
        fields: what a `Batch` has of its seeds.
    """

    nodes: Mapping[str, np.ndarray]
    banned: Banned | None
    fields: Mapping[str, Any]


class SeedAssigner(Protocol):
    """What deals seeds: `TaskSeeds` or `MultitaskSeeds`."""

    @property
    def plan(self) -> Steps: ...

    def __call__(self, epoch: int, step: int) -> AssignedSeeds:
        """Collective."""
        ...

    def accumulating(self, batches: int) -> SeedAssigner:
        """The same, of whose batches so many make an optimizer step together."""
        ...


@dataclass(frozen=True)
class TaskSeeds:
    """Of one task."""

    plan: SeedPlan
    seeds: Seeds
    world: World

    def accumulating(self, batches: int) -> TaskSeeds:
        """See `SeedAssigner`."""
        return replace(self, plan=replace(self.plan, accumulate=batches))

    def __call__(self, epoch: int, step: int) -> AssignedSeeds:
        chosen = self.plan.batch(epoch, step)
        start, fields = self.start(chosen, epoch, step)
        fields |= {"window": self.plan.seeds_in_window(step)}
        return AssignedSeeds(start.nodes, start.banned, fields)

    def start(self, chosen: np.ndarray, epoch: int, step: int) -> tuple[Start, dict[str, Any]]:
        """Where this rank starts, and what a `Batch` or a `Part` has of its seeds, but ``window``.

        Args:
            chosen: numbers of all ranks' seeds.
            epoch, step: of the run.
        """
        mine = rank_share(self.seeds.ids(chosen), self.world.rank, self.world.size)
        weight = torch.ones(max(1, len(mine)))
        if not len(mine):  # a short last batch: keep the step, without influence
            mine, weight = np.zeros(1, np.int64), torch.zeros(1)
        turn = SeedSlice(chosen, mine, epoch, step)
        start = self.seeds.start(turn)
        return start, {
            "seeds": torch.from_numpy(self.seeds.ids(turn.index)),
            "y": start.y,
            "weight": weight,
            "total": len(chosen),
            "pairs": start.pairs,
            "relation": start.relation,
            "instead": dict(start.instead),
        }


@dataclass(frozen=True)
class MultitaskSeeds:
    """Of several tasks: their seeds share one neighbourhood, in which nothing is drawn that one of
    them is to predict.

    Attributes:
        plan: of all; tasks: of each, by name.
    """

    plan: MultitaskPlan
    tasks: Mapping[str, TaskSeeds]
    _empty: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def accumulating(self, batches: int) -> MultitaskSeeds:
        """See `SeedAssigner`."""
        return replace(self, plan=replace(self.plan, accumulate=batches))

    def __call__(self, epoch: int, step: int) -> AssignedSeeds:
        starts, fields = {}, {}
        for name, deal in self.tasks.items():
            chosen = deal.plan.batch(*self.plan.position(name, epoch, step))
            starts[name], fields[name] = deal.start(chosen, epoch, step)
            fields[name]["window"] = self.plan.seeds_in_window(name, epoch, step)
        nodes, numbers = _together({name: start.nodes for name, start in starts.items()})
        parts = {}
        for name, start in starts.items():
            parts[name] = Part(**fields[name] | _renumbered(start, numbers[name]))
        return AssignedSeeds(
            nodes,
            _all_banned(start.banned for start in starts.values()),
            {
                **dict.fromkeys(("seeds", "y", "weight"), self._empty),
                "total": sum(part.total for part in parts.values()),
                "window": sum(part.window for part in parts.values()),
                "parts": parts,
            },
        )


def _together(
    starts: Mapping[str, Mapping[str, np.ndarray]],
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """The nodes of all tasks, each once by type, and what number each task's have in them."""
    nodes: dict[str, np.ndarray] = {}
    numbers: dict[str, dict[str, np.ndarray]] = {name: {} for name in starts}
    for ntype in dict.fromkeys(ntype for start in starts.values() for ntype in start):
        pieces = {name: start[ntype] for name, start in starts.items() if ntype in start}
        found = kernels.relabel(np.empty(0, np.int64), np.concatenate(list(pieces.values())))
        nodes[ntype], local = found
        stops = np.cumsum([len(piece) for piece in pieces.values()])
        for name, piece in zip(pieces, np.split(local, stops[:-1])):
            numbers[name][ntype] = piece
    return nodes, numbers


def _renumbered(start: Start, numbers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """``nodes``, ``pairs`` and ``instead`` of a `Part`.

    Args:
        numbers: node type → where the nodes of ``start`` are among those of all tasks.
    """
    found = {ntype: torch.from_numpy(local) for ntype, local in numbers.items()}
    if start.pairs is None:
        (nodes,) = found.values()
        return {"nodes": nodes}
    assert start.etype is not None
    ntypes = dict(zip(ENDS, (start.etype[0], start.etype[2])))
    pairs = [found[t][rows] for t, rows in zip(ntypes.values(), start.pairs)]
    instead = {end: found[ntypes[end]][rows] for end, rows in start.instead.items()}  # type: ignore[index]
    return {"pairs": torch.stack(pairs), "instead": instead}


def _all_banned(each: Iterator[Banned | None]) -> Banned | None:
    pairs: dict[EdgeType, list[tuple[np.ndarray, np.ndarray]]] = {}
    for banned in each:
        for etype, ends in (banned.pairs if banned else {}).items():
            pairs.setdefault(etype, []).append(ends)
    if not pairs:
        return None
    return Banned(
        {e: tuple(np.concatenate(ends) for ends in zip(*found)) for e, found in pairs.items()}  # type: ignore[misc]
    )
