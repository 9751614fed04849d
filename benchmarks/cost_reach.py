"""How many nodes, edges and remote rows a batch touches, from a graph's statistics.

Pure arithmetic: nothing is read or run. `docs/scaling.md` derives the formulas.

A node is in a batch if one of the edges that leave it is drawn. Seen from one worker there are two
regions, its own nodes and all others, and two kinds of edges, near and far, by the region of the
destination that draws them. A region's nodes are grouped into classes alike in degree and in how
many of their edges are near, so that the chance to be in a batch is one number for each class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

OWN, REMOTE = 0, 1
WIDTH = {"fp32": 4, "bf16": 2, "int8": 2}  # bytes of a number that is computed with
_STORED = {"fp32": 4, "bf16": 2, "int8": 1}  # of a feature as it is kept and sent
_NEAR_CLASSES = 400  # expected near edges beyond which their number counts as certain


@dataclass(frozen=True)
class Degrees:
    """How a node type's edges are spread over its nodes.

    Attributes:
        share: of the nodes, in each class; sums to 1.
        weight: degree in each class, relative to the mean.
    """

    share: tuple[float, ...] = (1.0,)
    weight: tuple[float, ...] = (1.0,)

    @staticmethod
    def of(degrees: Array, bins: int = 80) -> Degrees:
        """From every node's degree ``[N]``: exact for small ones, geometric bins above."""
        edges = np.unique(np.geomspace(1, max(int(degrees.max()), 1) + 1, bins).astype(np.int64))
        where = np.searchsorted(edges, degrees, side="right")
        count = np.bincount(where, minlength=len(edges) + 1)
        total = np.bincount(where, weights=degrees, minlength=len(edges) + 1)
        kept = count > 0
        weight = total[kept] / count[kept] / max(degrees.mean(), 1e-300)
        return Degrees(tuple(count[kept] / len(degrees)), tuple(weight))

    @staticmethod
    def power_law(power: float, mean: float, largest: float, bins: int = 80) -> Degrees:
        """From a density ``d ** -power`` up to ``largest``, whose lower end gives the mean."""
        low, high = 1e-3, largest
        for _ in range(100):  # the mean grows with the lower end
            middle = math.sqrt(low * high)
            low, high = (middle, high) if _mean(power, middle, largest) < mean else (low, middle)
        edges = np.geomspace(low, largest, bins + 1)
        below = _integral(power, edges)
        moment = _integral(power - 1, edges)
        share, total = np.diff(below), np.diff(moment)
        return Degrees(
            tuple(share / share.sum()), tuple(total / share / (total.sum() / share.sum()))
        )


def _integral(power: float, at: Array | float) -> Any:
    return np.log(at) if power == 1 else np.power(at, 1 - power) / (1 - power)


def _mean(power: float, low: float, high: float) -> float:
    mass = _integral(power, high) - _integral(power, low)
    return float((_integral(power - 1, high) - _integral(power - 1, low)) / mass)


@dataclass(frozen=True)
class NodeType:
    """Attributes: nodes; features, of each; degrees, of in- and out-edges alike; other_bytes, of
    the arrays that each node has besides (labels, masks)."""

    nodes: int
    features: int
    degrees: Degrees = field(default_factory=Degrees)
    other_bytes: int = 0


@dataclass(frozen=True)
class Relation:
    """One edge type. A worker samples the in-edges of ``target``."""

    source: str
    target: str
    edges: int


@dataclass(frozen=True)
class Graph:
    """A graph's statistics.

    Attributes:
        seeds: the node type that is classified; training: how many of them are trained on.
        cut: share of the edges that join two workers' parts, for the number of workers at hand.
        symmetric: each edge is there in the other direction too, in the same relation where both
            ends are of one type, else in a relation of its own.
    """

    types: Mapping[str, NodeType]
    relations: tuple[Relation, ...]
    seeds: str
    training: int
    cut: float
    symmetric: bool = True


@dataclass(frozen=True)
class Job:
    """Attributes: batch, per worker; fanouts, from the seeds outward, -1 = all; cache, share of
    the remote rows of each type; policy, "vip" or "degree"; precision, "fp32", "bf16", or "int8":
    features of one byte with a scale, and the rest as in bf16."""

    batch: int
    fanouts: tuple[int, ...]
    hidden: int
    classes: int
    cache: float = 0.1
    policy: str = "vip"
    replicated: bool = True
    precision: str = "fp32"
    prefetch: int = 2

    @property
    def combined(self) -> bool:
        """Whether the first layer adds up features straight from the table."""
        return self.precision != "int8"

    def row_bytes(self, features: int) -> int:
        scale = WIDTH["int8"] if self.precision == "int8" else 0
        return features * _STORED[self.precision] + scale


@dataclass(frozen=True)
class Hop:
    """Expected numbers of one hop of one worker.

    Attributes:
        nodes: distinct nodes that draw; remote_nodes: those of them that others own.
        lists: those nodes, each counted once for every relation that ends in its type;
            remote_lists: of remote nodes.
        draws: edges drawn; remote_draws: by remote nodes.
    """

    nodes: float
    remote_nodes: float
    lists: float
    remote_lists: float
    draws: float
    remote_draws: float


@dataclass
class _Cohort:
    """Nodes of one region that came into the batch together.

    Attributes:
        chance: of each class's nodes to be among them.
        known: relation → in-neighbours of each that are in the batch on its account: the one that
            drew it, and those that it drew.
    """

    chance: Array
    known: dict[Relation, Array]


@dataclass
class _Region:
    """Nodes of one type as one worker sees them, in classes."""

    nodes: float
    share: Array
    weight: Array
    near: Array
    far: Array
    cohorts: list[_Cohort] = field(default_factory=list)

    @property
    def chance(self) -> Array:
        """To be in the batch."""
        return sum((cohort.chance for cohort in self.cohorts), np.zeros(len(self.share)))

    @property
    def expected(self) -> float:
        return float(self.nodes * (self.share * self.chance).sum())

    def add(self, chance: Array | float, known: dict[Relation, Array]) -> None:
        self.cohorts.append(_Cohort(chance * np.ones(len(self.share)), known))

    def draw(self, relation: Relation, degree: Array, fanout: int) -> tuple[float, float]:
        """Edges drawn, and how many of them do not lead to where the batch already is."""
        taken = degree if fanout < 0 else np.minimum(degree, fanout)
        drawn = fresh = 0.0
        for cohort in self.cohorts:
            each = self.nodes * self.share * cohort.chance
            known = cohort.known.get(relation, np.zeros(len(degree)))
            new = taken * np.clip(1 - known / np.maximum(degree, 1e-12), 0, 1)
            cohort.known[relation] = known + new
            drawn += float((each * taken).sum())
            fresh += float((each * new).sum())
        return drawn, fresh


@dataclass(frozen=True)
class Reach:
    """What a batch of one worker touches, in the mean.

    Attributes:
        hops: from the seeds outward.
        inputs: node type → distinct nodes, the last hop's sources included.
        remote: node type → those of them that others own; hits: that the cache has.
        remote_total: node type → remote nodes there are; cached: how many the cache holds.
    """

    hops: tuple[Hop, ...]
    inputs: dict[str, float]
    remote: dict[str, float]
    hits: dict[str, float]
    remote_total: dict[str, float]
    cached: dict[str, float]


def reach(graph: Graph, job: Job, world: int) -> Reach:
    """Expected frontiers, remote rows and cache hits of one worker of ``world``."""
    regions = {t: _regions(graph, t, world) for t in graph.types}
    own, remote = regions[graph.seeds]
    spill = foreign_seeds(job.batch, world)
    own.add(min(1.0, (job.batch - spill) / own.nodes), {})
    remote.add(min(1.0, spill / remote.nodes) if remote.nodes else 0.0, {})
    hops = [_hop(graph, regions, fanout) for fanout in job.fanouts]
    away = {t: pair[REMOTE] for t, pair in regions.items()}
    kept = {t: _cache(region, job) for t, region in away.items()}
    return Reach(
        hops=tuple(hops),
        inputs={t: sum(region.expected for region in pair) for t, pair in regions.items()},
        remote={t: region.expected for t, region in away.items()},
        hits={t: hits for t, (hits, _) in kept.items()},
        remote_total={t: region.nodes for t, region in away.items()},
        cached={t: rows for t, (_, rows) in kept.items()},
    )


def foreign_seeds(batch: int, world: int) -> float:
    """Seeds of a batch that another rank owns. The global batch is drawn at random and cut into
    equal pieces, so that each cut lies off its place by a random walk's √(batch·world·x(1-x)):
    averaged over x, and with half of the cuts off in the direction that matters."""
    return min(0.313 * math.sqrt(world * batch), batch * (1 - 1 / world)) if world > 1 else 0.0


def _regions(graph: Graph, ntype: str, world: int) -> tuple[_Region, _Region]:
    kind = graph.types[ntype]
    mean = sum(r.edges for r in graph.relations if r.source == ntype) / max(kind.nodes, 1)
    share, weight = np.asarray(kind.degrees.share), np.asarray(kind.degrees.weight)
    degree = weight * mean
    cut = graph.cut if world > 1 else 0.0
    nodes = kind.nodes / world
    near = degree * (1 - cut)
    own = _Region(nodes, share, weight, near, degree - near)
    cross = cut / max(world - 1, 1)
    pieces = [_spread(s, d, w, cross) for s, d, w in zip(share, degree, weight)]
    share, near, degree, weight = (np.concatenate(column) for column in zip(*pieces))
    far = np.maximum(degree - near, 0)
    return own, _Region(kind.nodes - nodes, share, weight, near, far)


def _spread(share: float, degree: float, weight: float, cross: float) -> tuple[Array, ...]:
    """Classes by near edges, of which each edge is one with chance ``cross`` (binomial)."""
    mean, trials = degree * cross, round(degree)
    if trials < 1 or mean > _NEAR_CLASSES or not 0 < cross < 1:
        return tuple(np.array([value]) for value in (share, mean, degree, weight))
    most = min(trials, int(mean + 8 * math.sqrt(mean) + 8))
    numbers = np.arange(most + 1)
    ratio = (trials - numbers[:-1]) / (numbers[:-1] + 1) * cross / (1 - cross)
    chance = np.exp(trials * math.log1p(-cross) + np.cumsum(np.log([1.0, *ratio])))
    same = np.ones(most + 1)
    return share * chance / chance.sum(), numbers.astype(float), degree * same, weight * same


def _hop(graph: Graph, regions: dict[str, tuple[_Region, _Region]], fanout: int) -> Hop:
    """Draw once: sources come in by what their out-edges add to their chances."""
    nodes = [sum(pair[which].expected for pair in regions.values()) for which in (OWN, REMOTE)]
    lists, total = [0.0, 0.0], [0.0, 0.0]
    missed: dict[str, list[dict[Relation, Array]]] = {t: [{}, {}] for t in regions}
    for relation in graph.relations:
        mean = relation.edges / max(graph.types[relation.target].nodes, 1)
        drawn = []  # share of the edges into each region
        for which, region in enumerate(regions[relation.target]):
            draws, fresh = region.draw(relation, region.weight * mean, fanout)
            total[which] += draws
            lists[which] += region.expected
            drawn.append(min(fresh / (mean * region.nodes), 1 - 1e-9) if fresh else 0.0)
        out = sum(r.edges for r in graph.relations if r.source == relation.source)
        part = relation.edges / max(out, 1)  # of a source's edges
        for which, region in enumerate(regions[relation.source]):
            near, far = (math.log1p(-share) for share in drawn)
            missed[relation.source][which][relation] = -part * (
                region.near * near + region.far * far
            )
    for ntype, both in missed.items():
        for region, parts in zip(regions[ntype], both):
            rate = sum(parts.values(), np.zeros(len(region.share)))
            known = {}
            for relation, each in parts.items() if graph.symmetric else ():
                if back := _reverse(graph, relation):
                    known[back] = each / np.maximum(rate, 1e-300)
            region.add((1 - region.chance) * -np.expm1(-rate), known)
    return Hop(
        nodes=sum(nodes),
        remote_nodes=nodes[REMOTE],
        lists=sum(lists),
        remote_lists=lists[REMOTE],
        draws=sum(total),
        remote_draws=total[REMOTE],
    )


def _reverse(graph: Graph, relation: Relation) -> Relation | None:
    ends = relation.target, relation.source
    return next((r for r in graph.relations if (r.source, r.target) == ends), None)


def _cache(region: _Region, job: Job) -> tuple[float, float]:
    """Expected hits per batch, and rows held: those with the highest scores."""
    # an own part's edges alone say how often remote nodes are drawn from here, but not by others
    score = region.chance if job.policy == "vip" and job.replicated else region.near
    order = np.argsort(-score, kind="stable")
    order = order[score[order] > 0]
    share = region.share[order]
    before = np.cumsum(share) - share
    taken = np.clip(job.cache - before, 0, share)
    return (
        float(region.nodes * (taken * region.chance[order]).sum()),
        float(region.nodes * taken.sum()),
    )
