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

from raygnn.errors import DataError
from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import FEATURES, NUMBER, SPLIT, Shard
from raygnn.sampling import kernels
from raygnn.sampling.batch import Part
from raygnn.sampling.exchange import Exchange, Ids, World, as_ids, ask_owners
from raygnn.sampling.negatives import ENDS, ListedNegatives, Negatives
from raygnn.sampling.plan import MultitaskPlan, SeedPlan, Steps, rank_share
from raygnn.sampling.sampler import Banned

if TYPE_CHECKING:
    from typing_extensions import Self


JOINED = "\0joined"  # the features of edges side by side, among their arrays
LISTED = "\0listed"  # likewise, which list of negatives each has


@dataclass(frozen=True)
class BatchStart:
    """Where the blocks of one batch start.

    Attributes:
        nodes: node type → distinct ids, the last block's destinations.
        fields: what a `Batch` or a `Part` has of its seeds.
        banned: edges that no hop may draw.
        etype: of the seeds, where these are edges of one type.
        times: node type → int64, before which all must be that a node sees; then nodes are distinct
            as pairs with them. None: they see all.
    """

    nodes: Mapping[str, np.ndarray]
    fields: Mapping[str, Any]
    banned: Banned | None = None
    etype: EdgeType | None = None
    times: Mapping[str, np.ndarray] | None = None


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


def _kept(ids: Ids) -> np.ndarray:
    """In CPU memory, of the type they come in: every rank has those of all ranks."""
    return ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids


class NodeSeeds:
    """Nodes of one type, in the order of their original ids.

    Args:
        ids: int64 ``[n]``, reshuffled global ids, on any device.
        targets: ``[n, …]``; whole numbers may be of any type, and come out as int64.
        times: int64 ``[n]``, see `BatchStart`.
    """

    def __init__(self, ntype: str, ids: Ids, targets: Tensor, times: Ids | None = None):
        self.ntype = ntype
        self.targets = targets
        self._times = None if times is None else _kept(times)
        self.num = len(ids)
        self._ids = _kept(ids)

    def ids(self, index: Ids) -> np.ndarray:
        return as_ids(self._ids[as_ids(index)])

    def start(self, piece: SeedSlice) -> BatchStart:
        y = self.targets[torch.from_numpy(piece.index)]
        y = y if y.is_floating_point() else y.long()
        times = None if self._times is None else {self.ntype: self._times[piece.index]}
        return BatchStart({self.ntype: self.ids(piece.index)}, {"y": y}, times=times)


def owned_nodes(shard: Shard, ntype: str, split: str, targets: Tensor) -> np.ndarray:
    """Positions, among this rank's own nodes, of those in a split that have a target.

    Args:
        split: "train", "val" or "test"; a mask that the partition lacks selects nothing.
        targets: ``[owned]`` classes, below 0 where unknown, or numbers ``[owned, …]``, NaN where
            unknown, or labels ``[owned, K]`` from `as_labels`, of which one must be known.

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
        return (targets >= 0).flatten(1).any(1) if targets.dim() > 1 else targets >= 0
    return ~targets.flatten(1).isnan().any(1) if targets.dim() > 1 else ~targets.isnan()


def as_labels(values: Tensor, where: str) -> Tensor:
    """Labels as stored → 0, 1, or -1 where not known, int64 of the same shape.

    Raises:
        DataError: one is neither 0, 1, -1 nor NaN.
    """
    numbers = values.double().nan_to_num(-1.0, torch.inf, -torch.inf)
    bad = numbers[(numbers != 0) & (numbers.abs() != 1)]
    if len(bad):
        message = f"a label is {bad[0]:g}, expected 0, 1, or -1 or NaN where it is not known"
        raise DataError(message, where=where, remedy="correct it, or leave out task.labels")
    return numbers.long()


def gather_seeds(
    shard: Shard, exchange: Exchange, ntype: str, targets: Tensor, times: np.ndarray | None = None
) -> NodeSeeds:
    """The training nodes of all ranks. Collective.

    An id and a target for each on every rank, so that any rank can compute any seed: six bytes
    where there are fewer than 2³¹ nodes and 2¹⁵ classes, and four times as many while they are put
    in order; eight more with times.

    Args:
        times: int64 ``[owned]``, see `BatchStart`.
    """
    owned = owned_nodes(shard, ntype, "train", targets)
    narrow = np.int32 if shard.num_nodes(ntype) < 2**31 else np.int64
    values = targets[torch.from_numpy(owned)]
    if not values.is_floating_point():
        highest = exchange.max(int(values.max()) if len(values) else 0)
        values = values.to(torch.int16 if highest < 2**15 else torch.int64)
    columns = shard.original[ntype][owned], owned + shard.first(ntype)
    keys, ids = (exchange.gather_rows(torch.from_numpy(c.astype(narrow))) for c in columns)
    order = torch.argsort(keys)
    when = None
    if times is not None:
        when = exchange.gather_rows(torch.from_numpy(times[owned]))[order]
    return NodeSeeds(ntype, ids[order], exchange.gather_rows(values)[order], when)


class OwnedEdges:
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
        first, span = shard.first(etype[2]), slice(*shard.own_edges(etype))
        degree = shard.in_degree(etype).numpy()
        self.src = shard.own_sources(etype).astype(np.int64)
        self.dst = np.repeat(np.arange(len(degree)) + first, degree)
        self.first = shard.edge_first(etype) + span.start
        stops = exchange.gather_rows(torch.tensor([shard.edge_first(etype) + span.stop])).numpy()
        self.bounds = np.concatenate([[0], stops])
        rows = shard.topology[etype]
        self._data: dict[str, Any] = {name: array[span] for name, array in rows.data.items()}
        if FEATURES in rows.carried:
            self._data[JOINED] = rows.carried[FEATURES][span]

    def over(self, exchange: Exchange) -> OwnedEdges:
        """The same, asked for by other collectives."""
        other = copy.copy(self)
        other.exchange = exchange
        return other

    def listing(self, rows: np.ndarray) -> OwnedEdges:
        """The same, with an array `LISTED`."""
        other = copy.copy(self)
        other._data = {**self._data, LISTED: rows}
        return other

    def column(self, name: str) -> Any:
        """An array of the own edges, ``[own, …]``; `JOINED` as a tensor."""
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
        arrays = [self.src, self.dst, *(self._data[name] for name in names)]
        columns = ask_owners(
            positions,
            self.bounds,
            self.exchange,
            lambda own: [torch.as_tensor(array[own - self.first]) for array in arrays],
        )
        return torch.stack(columns[:2]).numpy(), columns[2:]


class EdgeSeeds:
    """Edges of one type as seeds.

    Args:
        positions: ``[n]``, the edges to train on, on every rank alike.
        exclude: which edges a batch may not sample, so that it does not see what it is to
            predict: None, "self" (the seeds of all ranks) or "reverse" (and the same pairs the
            other way round). They are left out by their ends, so parallel edges do not give them
            away.
        reverse: the edge type that holds the reverses; None = the seeds' own, or none if that
            joins nodes of two types.
        target, relation: the arrays that hold what is to be predicted, and each edge's relation.
        negatives: draws nodes that take the place of ends.
        listed: gives others, of edges with an array `LISTED`.
        time: the array that says when each edge is; its ends see what was before, and other nodes
            take their place at that time, some for each edge.
    """

    def __init__(
        self,
        edges: OwnedEdges,
        positions: Ids,
        *,
        exclude: Literal["self", "reverse"] | None = None,
        reverse: EdgeType | None = None,
        target: str | None = None,
        relation: str | None = None,
        negatives: Negatives | None = None,
        listed: ListedNegatives | None = None,
        time: str | None = None,
    ):
        self.etype = edges.etype
        self.num = len(positions)
        self._edges = edges
        self._positions = _kept(positions)
        self._exclude = exclude
        source, _, other = edges.etype
        self._reverse = reverse or (edges.etype if source == other else None)
        self._target = target
        self._relation = relation
        self._negatives = negatives
        self._listed = listed
        self._time = time

    def ids(self, index: Ids) -> np.ndarray:
        return as_ids(self._positions[as_ids(index)])

    def start(self, piece: SeedSlice) -> BatchStart:
        negatives = self._negatives
        # of all ranks, so that a batch sees the same however many there are
        everyone = self._exclude is not None or (negatives is not None and negatives.in_batch)
        positions = self.ids(piece.chosen if everyone else piece.index)
        joined = JOINED if JOINED in self._edges else None
        read = [self._target, self._relation, joined, self._time, self._time and NUMBER]
        read += [None if self._listed is None else LISTED]
        names = [name for name in read if name is not None]
        ends, columns = self._edges.rows(positions, names)
        drawn: dict[str, np.ndarray] = {}
        if negatives is not None and self._time is None:
            drawn = negatives.draw(piece.epoch, piece.step, dict(zip(ENDS, ends)))
        banned = self._banned(*ends)
        if everyone:
            ends = ends[:, piece.mine]
            columns = [column[torch.from_numpy(piece.mine)] for column in columns]
        data = dict(zip(names, columns))
        when = None if self._time is None else data[self._time].long().numpy()
        if negatives is not None and when is not None:
            drawn = negatives.draw_each(piece.epoch, piece.step, data[NUMBER].numpy())
        if self._listed is not None:
            listed = self._listed.nodes(data[LISTED].numpy(), ends)
            drawn |= {f"{end}_neg": given for end, given in listed.items()}
        nodes, times, pairs, instead = _nodes(self.etype, ends, drawn, when)
        fields = {
            "y": torch.ones(len(piece.mine)) if self._target is None else data[self._target],
            "pairs": torch.from_numpy(pairs),
            "relation": None if self._relation is None else data[self._relation].long(),
            "pair_features": data.get(JOINED),
            "instead": {end: torch.from_numpy(local) for end, local in instead.items()},
        }
        return BatchStart(nodes, fields, banned, self.etype, times)

    def _banned(self, src: np.ndarray, dst: np.ndarray) -> Banned | None:
        if self._exclude is None:
            return None
        if self._exclude == "self" or self._reverse is None:
            return Banned({self.etype: (src, dst)})
        if self._reverse != self.etype:
            return Banned({self.etype: (src, dst), self._reverse: (dst, src)})
        return Banned({self.etype: (np.concatenate([src, dst]), np.concatenate([dst, src]))})


def in_order(edges: OwnedEdges, own: np.ndarray) -> np.ndarray:
    """Positions of edges of all ranks, in the order of the user's graph: the same on every rank,
    and the same edges in the same order whatever the partition. Collective.

    Four bytes for each on every rank where the type has fewer than 2³¹ edges, and five times as
    many while they are put in order.

    Args:
        own: int64 ``[n]``, which of the own edges.
    """
    narrow = np.int32 if edges.bounds[-1] < 2**31 else np.int64
    keys = edges.exchange.gather_rows(
        torch.from_numpy(np.ascontiguousarray(edges.column(NUMBER)[own]))
    )
    places = (own + edges.first).astype(narrow)
    positions = edges.exchange.gather_rows(torch.from_numpy(places))
    ordered: np.ndarray = positions[torch.argsort(keys)].numpy()
    return ordered


def _nodes(
    etype: EdgeType,
    ends: np.ndarray,
    drawn: dict[str, np.ndarray],
    when: np.ndarray | None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None, np.ndarray, dict[str, np.ndarray]]:
    """The nodes of a batch, each once by type (and time), and their times, as `BatchStart` has
    them; ``pairs`` and ``instead`` as `Batch` has them.

    Args:
        when: of the edges, int64 ``[n]``; then what is drawn is ``[n, K]``.
    """
    nobody = np.empty(0, np.int64)
    ids: dict[str, list[np.ndarray]] = {}
    times: dict[str, list[np.ndarray]] = {}
    for ntype, end, column in zip((etype[0], etype[2]), ENDS, ends):
        ids.setdefault(ntype, []).append(column)
        if when is not None:
            times.setdefault(ntype, []).append(when)
        for key in (end, f"{end}_neg"):
            others = drawn.get(key, nobody)
            ids[ntype].append(others.ravel())
            if when is not None:
                times[ntype].append(np.repeat(when, others.shape[1] if key in drawn else 0))
    nodes, until, local = {}, {}, []
    for ntype, pieces in ids.items():
        given = np.concatenate(times[ntype]) if times else None
        nodes[ntype], until[ntype], numbers = distinct(np.concatenate(pieces), given)
        local += np.split(numbers, np.cumsum([len(piece) for piece in pieces])[:-1])
    instead: dict[str, np.ndarray] = {
        key: numbers.reshape(drawn[key].shape)
        for start, end in enumerate(ENDS)
        for key, numbers in zip((end, f"{end}_neg"), local[3 * start + 1 :])
        if key in drawn
    }
    return nodes, until if times else None, np.stack(local[::3]), instead


def distinct(
    ids: np.ndarray, times: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each node once, or once for each of its times, in order of first appearance.

    Returns:
        Nodes and, if any are given, their times, int64 ``[M]`` each, and the number among them of
        each of ``ids``.
    """
    if times is None:
        nodes, local = kernels.relabel(ids[:0], ids)
        return nodes, nodes[:0], local
    values, place = np.unique(times, return_inverse=True)
    size = int(ids.max(initial=0)) + 1
    pairs, local = kernels.relabel(ids[:0], place * size + ids)
    return pairs % size, values[pairs // size], local


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
        nodes, times, numbers = _together(starts)
        parts = {name: _part(start, numbers[name]) for name, start in starts.items()}
        fields = {
            **dict.fromkeys(("seeds", "y", "weight"), self._empty),
            "total": sum(part.total for part in parts.values()),
            "window": sum(part.window for part in parts.values()),
            "parts": parts,
        }
        banned = _all_banned(start.banned for start in starts.values())
        return BatchStart(nodes, fields, banned, times=times)


def _together(
    starts: Mapping[str, BatchStart],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None, dict[str, dict[str, np.ndarray]]]:
    """The nodes of all tasks, each once by type (and time), their times, and what number each
    task's have in them."""
    nodes, times = dict[str, np.ndarray](), dict[str, np.ndarray]()
    numbers: dict[str, dict[str, np.ndarray]] = {name: {} for name in starts}
    for ntype in dict.fromkeys(ntype for start in starts.values() for ntype in start.nodes):
        some = {name: start for name, start in starts.items() if ntype in start.nodes}
        ids = np.concatenate([start.nodes[ntype] for start in some.values()])
        when = [start.times[ntype] for start in some.values() if start.times is not None]
        nodes[ntype], until, local = distinct(ids, np.concatenate(when) if when else None)
        if when:
            times[ntype] = until
        stops = np.cumsum([len(start.nodes[ntype]) for start in some.values()])
        for name, piece in zip(some, np.split(local, stops[:-1])):
            numbers[name][ntype] = piece
    return nodes, times or None, numbers


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
    instead = fields["instead"].items()
    fields["instead"] = {key: ends[key.removesuffix("_neg")][rows] for key, rows in instead}
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
