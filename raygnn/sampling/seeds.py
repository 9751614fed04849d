"""What a batch starts from: seeds, nodes or edges, of one task or of several.

Seeds are numbered the same on every rank, whichever rank computes them. An edge is known by its
position: all parts' in-edge lists of its type, one after the other. The order of edges as seeds is
that of the user's graph, whatever the partition.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import NUMBER, SPLIT, Shard
from raygnn.sampling import kernels
from raygnn.sampling.batch import Part
from raygnn.sampling.exchange import Exchange, Ids, World, as_ids, group_by_owner, inverse
from raygnn.sampling.negatives import ENDS, Negatives
from raygnn.sampling.plan import MultitaskPlan, SeedPlan, Steps, rank_share
from raygnn.sampling.sampler import Banned

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class BatchStart:
    """Where the blocks of one batch start.

    Attributes:
        nodes: node type → distinct ids, the last block's destinations.
        fields: what a `Batch` or a `Part` has of its seeds.
        banned: edges that no hop may draw.
        etype: of the seeds, where these are edges of one type.
    """

    nodes: Mapping[str, np.ndarray]
    fields: Mapping[str, Any]
    banned: Banned | None = None
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
    """Numbered seeds; the numbers are those of a `SeedPlan`."""

    num: int

    def ids(self, index: np.ndarray) -> np.ndarray:
        """What the seeds numbered ``index`` are called: contiguous per rank that owns them."""
        ...

    def start(self, piece: SeedSlice) -> BatchStart:
        """Where a rank's batch starts, with ``y``, and ``pairs``, ``relation`` and ``instead`` of
        edges. Collective."""
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

    def start(self, piece: SeedSlice) -> BatchStart:
        y = self.targets[torch.from_numpy(piece.index)]
        return BatchStart({self.ntype: self._ids[piece.index]}, {"y": y})


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
        positions = as_ids(positions)
        order, counts = group_by_owner(positions, self.bounds)
        send = counts[:, None]
        asked = self.exchange.counts(send)
        given = [torch.from_numpy(positions[order])]
        (wanted,) = self.exchange.columns(given, send, asked)
        at = wanted.numpy() - self.first
        arrays = [self.src, self.dst, *(self._data[name] for name in names)]
        came = self.exchange.columns(
            [torch.from_numpy(array[at]) for array in arrays],
            np.repeat(asked, len(arrays), axis=1),
            np.repeat(send, len(arrays), axis=1),
        )
        back = inverse(order)
        columns = [column[back] for column in came]
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
        numbers = as_ids(index)
        return numbers if self._positions is None else self._positions[numbers]

    def start(self, piece: SeedSlice) -> BatchStart:
        negatives = self._negatives
        # of all ranks, so that a batch sees the same however many there are
        everyone = self._exclude is not None or (negatives is not None and negatives.in_batch)
        positions = self.ids(piece.chosen if everyone else piece.index)
        names = [name for name in (self._target, self._relation) if name is not None]
        ends, columns = self._edges.rows(positions, names)
        drawn: dict[str, np.ndarray] = {}
        if negatives is not None:
            drawn = negatives.draw(piece.epoch, piece.step, dict(zip(ENDS, ends)))
        banned = self._banned(*ends)
        if everyone:
            ends = ends[:, piece.mine]
            columns = [column[torch.from_numpy(piece.mine)] for column in columns]
        named = dict(zip(names, columns))
        nodes, pairs, instead = _nodes(self.etype, ends, drawn)
        fields = {
            "y": torch.ones(len(piece.mine)) if self._target is None else named[self._target],
            "pairs": torch.from_numpy(pairs),
            "relation": None if self._relation is None else named[self._relation].long(),
            "instead": {end: torch.from_numpy(local) for end, local in instead.items()},
        }
        return BatchStart(nodes, fields, banned, self.etype)

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
    ordered: np.ndarray = positions[torch.argsort(keys)].numpy()
    return ordered


def _nodes(
    etype: EdgeType, ends: np.ndarray, drawn: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """The nodes of a batch, each once by type, with ``pairs`` and ``instead`` as `Batch` has
    them."""
    nobody = np.empty(0, np.int64)
    columns = {end: np.concatenate([ids, drawn.get(end, nobody)]) for end, ids in zip(ENDS, ends)}
    source, target = columns.values()
    if etype[0] == etype[2]:
        ids, both = kernels.relabel(nobody, np.concatenate([source, target]))
        nodes, local = {etype[0]: ids}, [both[: len(source)], both[len(source) :]]
    else:
        (first, one), (second, other) = (kernels.relabel(nobody, c) for c in (source, target))
        nodes, local = {etype[0]: first, etype[2]: second}, [one, other]
    num = ends.shape[1]
    instead: dict[str, np.ndarray] = {
        end: numbers[num:] for end, numbers in zip(ENDS, local) if end in drawn
    }
    return nodes, np.stack([numbers[:num] for numbers in local]), instead


@dataclass(frozen=True)
class SeedAssigner:
    """Which seeds a rank has in a step, and where its blocks start: of one task or of several."""

    plan: Steps

    def accumulating(self, batches: int) -> Self:
        """The same, of whose batches so many make an optimizer step together."""
        plan = replace(self.plan, accumulate=batches)  # type: ignore[type-var]
        return replace(self, plan=plan)

    def __call__(self, epoch: int, step: int) -> BatchStart:
        """Collective."""
        raise NotImplementedError


@dataclass(frozen=True)
class TaskSeeds(SeedAssigner):
    """Of one task."""

    plan: SeedPlan
    seeds: Seeds
    world: World

    def __call__(self, epoch: int, step: int) -> BatchStart:
        return self.start(epoch, step, self.plan.seeds_in_window(step))

    def start(
        self, epoch: int, step: int, window: int, of: tuple[int, int] | None = None
    ) -> BatchStart:
        """Where this rank starts.

        Args:
            epoch, step: of the run.
            window: see `Share`.
            of: epoch and step of the plan, where these are not those of the run.
        """
        chosen = self.plan.batch(*(of or (epoch, step)))
        mine = rank_share(self.seeds.ids(chosen), self.world.rank, self.world.size)
        weight = torch.ones(max(1, len(mine)))
        if not len(mine):  # a short last batch: keep the step, without influence
            mine, weight = np.zeros(1, np.int64), torch.zeros(1)
        piece = SeedSlice(chosen, mine, epoch, step)
        start = self.seeds.start(piece)
        fields = {
            "seeds": torch.from_numpy(self.seeds.ids(piece.index)),
            "weight": weight,
            "total": len(chosen),
            "window": window,
        }
        return replace(start, fields={**start.fields, **fields})


@dataclass(frozen=True)
class MultitaskSeeds(SeedAssigner):
    """Of several tasks: their seeds share one neighbourhood, in which nothing is drawn that one of
    them is to predict.

    Attributes:
        plan: of all; tasks: of each, by name.
    """

    plan: MultitaskPlan
    tasks: Mapping[str, TaskSeeds]
    _empty: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def __call__(self, epoch: int, step: int) -> BatchStart:
        starts = {
            name: task.start(
                epoch,
                step,
                self.plan.seeds_in_window(name, epoch, step),
                self.plan.position(name, epoch, step),
            )
            for name, task in self.tasks.items()
        }
        nodes, numbers = _together({name: start.nodes for name, start in starts.items()})
        parts = {name: _part(start, numbers[name]) for name, start in starts.items()}
        fields = {
            **dict.fromkeys(("seeds", "y", "weight"), self._empty),
            "total": sum(part.total for part in parts.values()),
            "window": sum(part.window for part in parts.values()),
            "parts": parts,
        }
        return BatchStart(nodes, fields, _all_banned(start.banned for start in starts.values()))


def _together(
    starts: Mapping[str, Mapping[str, np.ndarray]],
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """The nodes of all tasks, each once by type, and what number each task's have in them."""
    nodes: dict[str, np.ndarray] = {}
    numbers: dict[str, dict[str, np.ndarray]] = {name: {} for name in starts}
    for ntype in dict.fromkeys(ntype for start in starts.values() for ntype in start):
        pieces = {name: start[ntype] for name, start in starts.items() if ntype in start}
        ids = np.concatenate(list(pieces.values()))
        nodes[ntype], local = kernels.relabel(ids[:0], ids)
        stops = np.cumsum([len(piece) for piece in pieces.values()])
        for name, piece in zip(pieces, np.split(local, stops[:-1])):
            numbers[name][ntype] = piece
    return nodes, numbers


def _part(start: BatchStart, numbers: Mapping[str, np.ndarray]) -> Part:
    """A task's part of a batch.

    Args:
        numbers: node type → where the nodes of ``start`` are among those of all tasks.
    """
    places = {ntype: torch.from_numpy(local) for ntype, local in numbers.items()}
    fields = dict(start.fields)
    if start.etype is None:
        (fields["nodes"],) = places.values()
        return Part(**fields)
    ends = dict(zip(ENDS, (places[start.etype[0]], places[start.etype[2]])))
    pairs = zip(ends.values(), fields["pairs"])
    fields["pairs"] = torch.stack([end[rows] for end, rows in pairs])
    fields["instead"] = {end: ends[end][rows] for end, rows in fields["instead"].items()}
    return Part(**fields)


def _all_banned(each: Iterator[Banned | None]) -> Banned | None:
    pairs: dict[EdgeType, list[tuple[np.ndarray, np.ndarray]]] = {}
    for banned in each:
        for etype, ends in (banned.pairs if banned else {}).items():
            pairs.setdefault(etype, []).append(ends)
    if not pairs:
        return None
    return Banned(
        {e: tuple(np.concatenate(ends) for ends in zip(*both)) for e, both in pairs.items()}  # type: ignore[misc]
    )
