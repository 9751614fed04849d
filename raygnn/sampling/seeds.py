"""Seeds of a batch: nodes or edges, of one task or of several.

Seeds are numbered the same on every rank, whichever rank computes them. An edge is identified by
its position in the in-edge lists of its type, all parts one after the other. Edges as
seeds are in the order of the user's graph, whatever the partition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

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
from raygnn.sampling.plan import MultitaskPlan, SeedPlan, rank_share
from raygnn.sampling.sampler import Banned

JOINED = "\0joined"  # array of edges: features side by side
LISTED = "\0listed"  # array of edges: number of the list of negatives

_EMPTY = torch.empty(0)


@dataclass(frozen=True)
class BatchStart:
    """Seeds of one batch and the nodes its blocks start from.

    Attributes:
        nodes: node type → distinct ids, the last block's destinations.
        fields: fields of a `Batch` or a `Part` about its seeds.
        banned: edges that no hop may sample.
        etype: of the seeds, if these are edges of one type.
        times: node type → int64; a node sees only edges before its time, and nodes are distinct as
            pairs with times. None = no temporal sampling.
    """

    nodes: Mapping[str, np.ndarray]
    fields: Mapping[str, Any]
    banned: Banned | None = None
    etype: EdgeType | None = None
    times: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class SeedSlice:
    """Seeds of a rank in one step.

    Attributes:
        chosen: numbers of all ranks' seeds, int64 ``[≤ global batch]``.
        mine: positions of this rank's seeds in ``chosen``, int64 ``[B]``.
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


def _kept(ids: Ids) -> np.ndarray:
    """Return ids in CPU memory, in their dtype: every rank stores the ids of all ranks."""
    return ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids


@dataclass(eq=False)
class NodeSeeds:
    """Nodes of one type, in the order of their original ids.

    Attributes:
        nodes: int64 ``[n]``, reshuffled global ids, on any device.
        targets: ``[n, …]``; integers of any dtype, which batches have as int64.
        times: int64 ``[n]``, see `BatchStart`.
        repeated: a node may be several seeds, of one time or of several.
    """

    ntype: str
    nodes: Ids
    targets: Tensor
    times: Ids | None = None
    repeated: bool = False

    def __post_init__(self) -> None:
        self.num = len(self.nodes)
        self.nodes = _kept(self.nodes)
        self.times = None if self.times is None else _kept(self.times)

    def ids(self, index: Ids) -> np.ndarray:
        """Return the ids of the seeds that a `SeedPlan` numbers ``index``."""
        return as_ids(self.nodes[as_ids(index)])

    def start(self, piece: SeedSlice) -> BatchStart:
        """Return the start of a rank's batch."""
        y = self.targets[torch.from_numpy(piece.index)]
        y = y if y.is_floating_point() else y.long()
        ids, fields = self.ids(piece.index), {"y": y}
        times: Any = None if self.times is None else self.times[piece.index]
        if self.repeated:
            ids, until, local = distinct(ids, times)
            times, fields["nodes"] = times if times is None else until, torch.from_numpy(local)
        return BatchStart(
            {self.ntype: ids}, fields, times=None if times is None else {self.ntype: times}
        )


def owned_nodes(shard: Shard, ntype: str, split: str, targets: Tensor) -> np.ndarray:
    """Return the positions, among this rank's nodes, of those in a split that have a target.

    Args:
        split: "train", "val" or "test"; a mask that the partition lacks selects nothing.
        targets: classes ``[owned]``, below 0 where unknown; numbers ``[owned, …]``, NaN where
            unknown; or labels ``[owned, K]`` from `as_labels`, at least one of which is known.

    Returns:
        int64 ``[n]``.
    """
    mask = shard.node_data[ntype].get(f"{split}_mask")
    if mask is None:
        return np.empty(0, np.int64)
    chosen: np.ndarray = torch.nonzero(mask.bool() & known(targets)).flatten().numpy()
    return chosen


def known(targets: Tensor) -> Tensor:
    """Return which targets are known, bool ``[n]``: see `owned_nodes`."""
    if not targets.is_floating_point():
        return (targets >= 0).flatten(1).any(1) if targets.dim() > 1 else targets >= 0
    return ~targets.flatten(1).isnan().any(1) if targets.dim() > 1 else ~targets.isnan()


def as_labels(values: Tensor, where: str) -> Tensor:
    """Convert stored labels to 0, 1, or -1 where unknown, int64 of the same shape.

    Raises:
        DataError: a label is not 0, 1, -1 or NaN.
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
    """Gather the training nodes of all ranks. Collective.

    Every rank stores an id and a target for each, so that any rank can compute any seed: six bytes
    if there are fewer than 2³¹ nodes and 2¹⁵ classes, and four times as many while they are sorted;
    eight more with times.

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
    """Edges of one type; each rank owns those into its nodes. The constructor is collective.

    Args:
        shard: holds all in-edges of the owned nodes.

    Attributes:
        src, dst: ends of the owned edges, global ids, int64 ``[own]``.
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
        """Return a copy that communicates over ``exchange``."""
        other = copy.copy(self)
        other.exchange = exchange
        return other

    def listing(self, rows: np.ndarray) -> OwnedEdges:
        """Return a copy with an array `LISTED`."""
        other = copy.copy(self)
        other._data = {**self._data, LISTED: rows}
        return other

    def column(self, name: str) -> Any:
        """Return an array of the owned edges, ``[own, …]``; `JOINED` as a tensor."""
        return self._data[name]

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def chosen(self, split: int) -> np.ndarray:
        """Return which of the owned edges are in a split, int64 ``[n]``."""
        return np.flatnonzero(self._data[SPLIT] == split)

    def rows(self, positions: Ids, names: list[str]) -> tuple[np.ndarray, list[Tensor]]:
        """Fetch sources and destinations of edges, int64 ``[2, n]``, and the rows of named arrays
        from the edges' owners. Collective."""
        arrays = [self.src, self.dst, *(self._data[name] for name in names)]
        columns = ask_owners(
            positions,
            self.bounds,
            self.exchange,
            lambda own: [torch.as_tensor(array[own - self.first]) for array in arrays],
        )
        return torch.stack(columns[:2]).numpy(), columns[2:]


@dataclass(eq=False, kw_only=True)
class EdgeSeeds:
    """Edges of one type as seeds.

    Attributes:
        edges: their ends and arrays.
        positions: ``[n]``, the edges to train on, the same on every rank.
        exclude: edges that a batch may not sample, so that it does not see its targets: None,
            "self" (the seeds of all ranks) or "reverse" (also the same pairs reversed). They are
            excluded by their ends, so that parallel edges do not leak them.
        reverse: edge type of the reverses; None = the seeds' own, or none if that joins nodes of
            two types.
        target, relation: names of the arrays of targets and of relations.
        negatives: samples nodes that replace ends.
        listed: replaces ends by listed nodes, for edges with an array `LISTED`.
        time: name of the array of times: an edge's ends see only what was before it, and each edge
            has negatives of its own, at its time.
        history: sources, targets, relations and times of edges → features of their pairs.
    """

    edges: OwnedEdges = field(kw_only=False)
    positions: Ids = field(kw_only=False)
    exclude: Literal["self", "reverse"] | None = None
    reverse: EdgeType | None = None
    target: str | None = None
    relation: str | None = None
    negatives: Negatives | None = None
    listed: ListedNegatives | None = None
    time: str | None = None
    history: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        self.num = len(self.positions)
        self.positions = _kept(self.positions)
        self.etype = source, _, target = self.edges.etype
        self.reverse = self.reverse or (self.etype if source == target else None)

    def ids(self, index: Ids) -> np.ndarray:
        """Return the positions of the seeds that a `SeedPlan` numbers ``index``; each rank owns
        contiguous ones."""
        return as_ids(self.positions[as_ids(index)])

    def start(self, piece: SeedSlice) -> BatchStart:
        """Return the start of a rank's batch. Collective."""
        negatives = self.negatives
        # of all ranks, so that a batch does not depend on their number
        everyone = self.exclude is not None or (negatives is not None and negatives.in_batch)
        positions = self.ids(piece.chosen if everyone else piece.index)
        joined = JOINED if JOINED in self.edges else None
        read = [self.target, self.relation, joined, self.time, self.time and NUMBER]
        read += [None if self.listed is None else LISTED]
        names = [name for name in read if name is not None]
        ends, columns = self.edges.rows(positions, names)
        drawn: dict[str, np.ndarray] = {}
        if negatives is not None and self.time is None:
            drawn = negatives.draw(piece.epoch, piece.step, dict(zip(ENDS, ends)))
        banned = self._banned(*ends)
        if everyone:
            ends = ends[:, piece.mine]
            columns = [column[torch.from_numpy(piece.mine)] for column in columns]
        data = dict(zip(names, columns))
        when = None if self.time is None else data[self.time].long().numpy()
        if negatives is not None and when is not None:
            drawn = negatives.draw_each(piece.epoch, piece.step, data[NUMBER].numpy())
        if self.listed is not None:
            listed = self.listed.nodes(data[LISTED].numpy(), ends)
            drawn |= {f"{end}_neg": given for end, given in listed.items()}
        nodes, times, pairs, instead = _nodes(self.etype, ends, drawn, when)
        features, others = data.get(JOINED), dict[str, Tensor]()
        if self.history is not None and when is not None:
            kind = np.zeros_like(when) if self.relation is None else data[self.relation].numpy()
            features = self.history(*ends, kind, when)
            for key, given in drawn.items():
                both = dict(zip(ENDS, ends[:, :, None])) | {key.removesuffix("_neg"): given}
                others[key] = self.history(*both.values(), kind[:, None], when[:, None])
        fields = {
            "y": torch.ones(len(piece.mine)) if self.target is None else data[self.target],
            "pairs": torch.from_numpy(pairs),
            "relation": None if self.relation is None else data[self.relation].long(),
            "pair_features": features,
            "instead": {end: torch.from_numpy(local) for end, local in instead.items()},
            "instead_features": others,
        }
        if negatives is not None and when is None:
            kinds = None if self.relation is None else data[self.relation].long().numpy()
            fields |= negatives.facts(drawn, ends, kinds)
        return BatchStart(nodes, fields, banned, self.etype, times)

    def _banned(self, src: np.ndarray, dst: np.ndarray) -> Banned | None:
        if self.exclude is None:
            return None
        if self.exclude == "self" or self.reverse is None:
            return Banned({self.etype: (src, dst)})
        if self.reverse != self.etype:
            return Banned({self.etype: (src, dst), self.reverse: (dst, src)})
        return Banned({self.etype: (np.concatenate([src, dst]), np.concatenate([dst, src]))})


Seeds: TypeAlias = NodeSeeds | EdgeSeeds


def in_order(edges: OwnedEdges, own: np.ndarray) -> np.ndarray:
    """Return the positions of all ranks' edges ``own``, in the order of the user's graph: the same
    on every rank and for any partition. Collective.

    Four bytes per edge on every rank if the type has fewer than 2³¹ edges, and five times as many
    while they are sorted.

    Args:
        own: int64 ``[n]``, indices of owned edges.
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
    etype: EdgeType, ends: np.ndarray, drawn: dict[str, np.ndarray], when: np.ndarray | None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None, np.ndarray, dict[str, np.ndarray]]:
    """Return ``nodes`` and ``times`` of a `BatchStart`, and ``pairs`` and ``instead`` of a `Batch`.

    Args:
        when: times of the edges, int64 ``[n]``; then ``drawn`` has ``[n, K]`` for each end.
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
    """Return each node once, or once for each of its times, in order of first appearance.

    Returns:
        Nodes and their times, if given, int64 ``[M]`` each, and the index in these of each of
        ``ids``.
    """
    if times is None:
        nodes, local = kernels.relabel(ids[:0], ids)
        return nodes, nodes[:0], local
    values, place = np.unique(times, return_inverse=True)
    size = int(ids.max(initial=0)) + 1
    pairs, local = kernels.relabel(ids[:0], place * size + ids)
    return pairs % size, values[pairs // size], local


@dataclass(frozen=True)
class TaskSeeds:
    """Assigns the seeds of each step to ranks."""

    plan: SeedPlan
    seeds: Seeds
    world: World

    def __call__(self, epoch: int, step: int) -> BatchStart:
        """Return this rank's seeds of a step. Collective."""
        return self.start(epoch, step, self.plan.seeds_in_window(step))

    def start(
        self, epoch: int, step: int, window: int, of: tuple[int, int] | None = None
    ) -> BatchStart:
        """Return this rank's seeds of a step.

        Args:
            epoch, step: of the run.
            window: see `Share`.
            of: epoch and step of the plan; default: ``(epoch, step)``.
        """
        chosen = self.plan.batch(*(of or (epoch, step)))
        mine = rank_share(self.seeds.ids(chosen), self.world.rank, self.world.size)
        weight = torch.ones(max(1, len(mine)))
        if not len(mine):  # a short last batch: this rank takes part in the step without influence
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
class MultitaskSeeds:
    """`TaskSeeds` of several tasks, which share one neighbourhood without the targets of any.

    Attributes:
        plan: of all tasks; tasks: of each, by name.
    """

    plan: MultitaskPlan
    tasks: Mapping[str, TaskSeeds]

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
            **dict.fromkeys(("seeds", "y", "weight"), _EMPTY),
            "total": sum(part.total for part in parts.values()),
            "window": sum(part.window for part in parts.values()),
            "parts": parts,
        }
        banned = _all_banned(start.banned for start in starts.values())
        return BatchStart(nodes, fields, banned, times=times)


SeedAssigner: TypeAlias = TaskSeeds | MultitaskSeeds


def _together(
    starts: Mapping[str, BatchStart],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None, dict[str, dict[str, np.ndarray]]]:
    """Merge the nodes of all tasks, each once by type (and time); return these, their times and the
    index in these of each task's nodes."""
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
    """Build a task's part of a batch.

    Args:
        numbers: node type → index of the nodes of ``start`` among the nodes of all tasks.
    """
    places = {ntype: torch.from_numpy(local) for ntype, local in numbers.items()}
    fields = dict(start.fields)
    if start.etype is None:
        (nodes,) = places.values()
        fields["nodes"] = nodes[fields["nodes"]] if "nodes" in fields else nodes
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
