"""How much memory, and how many bytes in a step, a job takes on N nodes: from statistics alone.

    python benchmarks/cost.py PARTITION --nodes 2 8
    python benchmarks/cost.py --graph NODES EDGES FEATURES TRAINING --cut 0.2 --nodes 8

Of graphs with one node type, whose edges go both ways. Seen from one worker there are two regions,
its own nodes and all others; of a node's edges those are near that lead to the own ones. A region's
nodes are grouped into classes alike in degree and near edges, so that the chance to be in a batch
is one number for each. `docs/scaling.md` derives the formulas and says how far off they were.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from machine import table

Array = np.ndarray[Any, np.dtype[Any]]

WIDTH = {"fp32": 4, "bf16": 2}  # bytes of a number
_NEAR_CLASSES = 400  # expected near edges beyond which their number counts as certain
_WORKER = 0.44e9  # bytes of a worker's interpreter and libraries, as measured
_ARRAYS = 4 + 8 + 3  # bytes of a node's id, label and masks


@dataclass(frozen=True)
class Degrees:
    """How the edges are spread over the nodes.

    Attributes:
        share, weight: of the nodes in each class; their degree, relative to the mean.
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
            edges = np.array([middle, largest])
            mass, moment = np.diff(_integral(power, edges)), np.diff(_integral(power - 1, edges))
            low, high = (middle, high) if moment / mass < mean else (low, middle)
        edges = np.geomspace(low, largest, bins + 1)
        share, total = np.diff(_integral(power, edges)), np.diff(_integral(power - 1, edges))
        return Degrees(
            tuple(share / share.sum()), tuple(total / share / (total.sum() / share.sum()))
        )


def _integral(power: float, at: Array) -> Array:
    return np.log(at) if power == 1 else np.power(at, 1 - power) / (1 - power)


@dataclass(frozen=True)
class Graph:
    """A graph's statistics.

    Attributes:
        features: of each node; training: how many nodes are trained on.
        cut: share of the edges that join two workers' parts, for the number of workers at hand.
    """

    nodes: int
    edges: int
    features: int
    training: int
    cut: float
    degrees: Degrees = Degrees()


@dataclass(frozen=True)
class Job:
    """A GraphSAGE. Attributes: batch, seeds of a worker; fanouts, from the seeds outward, -1 = all;
    cache, share of the remote rows; policy, "vip" or "degree"; precision, "fp32" or "bf16"."""

    batch: int
    fanouts: tuple[int, ...]
    hidden: int
    classes: int
    cache: float = 0.1
    policy: str = "vip"
    replicated: bool = True
    precision: str = "fp32"
    prefetch: int = 2


@dataclass(frozen=True)
class Hop:
    """Expected numbers of one hop of one worker: distinct nodes that draw, and edges drawn; of
    both those of nodes that others own."""

    nodes: float
    remote_nodes: float
    draws: float
    remote_draws: float


@dataclass(frozen=True)
class Reach:
    """What a batch of one worker touches, in the mean.

    Attributes:
        hops: from the seeds outward.
        inputs: distinct nodes, the last hop's sources included.
        remote: those of them that others own; hits: that the cache has.
        cached: rows that the cache holds.
    """

    hops: tuple[Hop, ...]
    inputs: float
    remote: float
    hits: float
    cached: float


@dataclass
class _Cohort:
    """Nodes of one region that came into the batch together: the chance of each class's to be
    among them, and how many in-neighbours each knows in the batch: who drew it, whom it drew."""

    chance: Array
    known: Array | float


@dataclass
class _Region:
    """Nodes as one worker sees them, in classes: its own, or all others."""

    nodes: float
    share: Array
    degree: Array
    near: Array
    cohorts: list[_Cohort] = field(default_factory=list)

    @property
    def chance(self) -> Array:
        """To be in the batch."""
        return sum((cohort.chance for cohort in self.cohorts), np.zeros(len(self.share)))

    @property
    def expected(self) -> float:
        return float(self.nodes * (self.share * self.chance).sum())

    def draw(self, fanout: int) -> tuple[float, float]:
        """Edges drawn, and how many of them do not lead to where the batch already is."""
        taken = self.degree if fanout < 0 else np.minimum(self.degree, fanout)
        drawn = fresh = 0.0
        for cohort in self.cohorts:
            nodes = self.nodes * self.share * cohort.chance
            new = taken * np.clip(1 - cohort.known / np.maximum(self.degree, 1e-12), 0, 1)
            cohort.known = cohort.known + new
            drawn += float((nodes * taken).sum())
            fresh += float((nodes * new).sum())
        return drawn, fresh


def reach(graph: Graph, job: Job, world: int) -> Reach:
    """Expected frontiers, remote rows and cache hits of one worker of ``world``."""
    own, remote = _regions(graph, world)
    spill = foreign_seeds(job.batch, world)
    for region, seeds in ((own, job.batch - spill), (remote, spill)):
        chance = min(1.0, seeds / region.nodes) if region.nodes else 0.0
        region.cohorts.append(_Cohort(chance * np.ones(len(region.share)), 0.0))
    hops = tuple(_hop(graph, own, remote, fanout) for fanout in job.fanouts)
    hits, cached = _cache(remote, job)
    return Reach(hops, own.expected + remote.expected, remote.expected, hits, cached)


def foreign_seeds(batch: int, world: int) -> float:
    """Seeds of a batch that another rank owns: the global batch, drawn at random, is cut into equal
    pieces, each cut off its place by a random walk's √(batch·world·x(1-x)), in half the cases."""
    return min(0.313 * math.sqrt(world * batch), batch * (1 - 1 / world)) if world > 1 else 0.0


def _regions(graph: Graph, world: int) -> tuple[_Region, _Region]:
    share = np.asarray(graph.degrees.share)
    degree = np.asarray(graph.degrees.weight) * graph.edges / max(graph.nodes, 1)
    cut = graph.cut if world > 1 else 0.0
    own = _Region(graph.nodes / world, share, degree, degree * (1 - cut))
    cross = cut / max(world - 1, 1)
    pieces = [_spread(s, d, cross) for s, d in zip(share, degree)]
    share, degree, near = (np.concatenate(column) for column in zip(*pieces))
    return own, _Region(graph.nodes - own.nodes, share, degree, near)


def _spread(share: float, degree: float, cross: float) -> tuple[Array, Array, Array]:
    """Classes by near edges, of which each edge is one with chance ``cross`` (binomial)."""
    mean, trials = degree * cross, round(degree)
    if trials < 1 or mean > _NEAR_CLASSES or not 0 < cross < 1:
        return np.array([share]), np.array([degree]), np.array([mean])
    most = min(trials, int(mean + 8 * math.sqrt(mean) + 8))
    numbers = np.arange(most + 1)
    ratio = (trials - numbers[:-1]) / (numbers[:-1] + 1) * cross / (1 - cross)
    chance = np.exp(trials * math.log1p(-cross) + np.cumsum(np.log([1.0, *ratio])))
    return share * chance / chance.sum(), degree * np.ones(most + 1), numbers.astype(float)


def _hop(graph: Graph, own: _Region, remote: _Region, fanout: int) -> Hop:
    """Draw once: sources come in by what their out-edges add to their chances."""
    nodes, remote_nodes = own.expected + remote.expected, remote.expected
    mean = graph.edges / max(graph.nodes, 1)
    draws, missed = [], []  # missed: log of the chance of an edge into a region not to be drawn
    for region in (own, remote):
        drawn, fresh = region.draw(fanout)
        draws.append(drawn)
        share = min(fresh / (mean * region.nodes), 1 - 1e-9) if fresh else 0.0
        missed.append(math.log1p(-share))
    for region in (own, remote):
        far = np.maximum(region.degree - region.near, 0)
        chance = (1 - region.chance) * -np.expm1(region.near * missed[0] + far * missed[1])
        region.cohorts.append(_Cohort(chance, 1.0))
    return Hop(nodes, remote_nodes, sum(draws), draws[1])


def _cache(remote: _Region, job: Job) -> tuple[float, float]:
    """Expected hits per batch, and rows held: those with the highest scores."""
    # an own part's edges alone say how often remote nodes are drawn from here, but not by others
    score = remote.chance if job.policy == "vip" and job.replicated else remote.near
    order = np.argsort(-score, kind="stable")
    order = order[score[order] > 0]
    share = remote.share[order]
    taken = np.clip(job.cache - (np.cumsum(share) - share), 0, share)
    hits = remote.nodes * (taken * remote.chance[order]).sum()
    return float(hits), float(remote.nodes * taken.sum())


def beyond_host(touched: Reach, world: int, workers: int) -> Reach:
    """What a batch touches of other nodes, where rows of ``workers`` ranks on its own are read, and
    one cache serves them all: as well as it would serve one of them, if they want the same rows."""
    away = (world - workers) / max(world - 1, 1)
    rows = {name: away * getattr(touched, name) for name in ("remote", "hits", "cached")}
    return replace(touched, **rows)


def sent_bytes(graph: Graph, job: Job, world: int, touched: Reach) -> tuple[float, float]:
    """Bytes that one worker sends in a step, as many reach it: what `Exchange` counts, and the
    gradients of a ring all-reduce."""
    if world == 1:
        return 0.0, 0.0
    rows, peers = touched.remote - touched.hits, world - 1
    wire = 4 if graph.nodes < 2**31 else 8
    data = rows * (graph.features * WIDTH[job.precision] + 8) + 8 * peers
    for hop in () if job.replicated else touched.hops:
        # asked: a length and an id for each node; answered: a length for each list, and ids
        data += wire * (3 * hop.remote_nodes + hop.remote_draws) + 8 * 2 * 2 * peers
    return data, 2 * peers / world * parameters(graph, job) * WIDTH[job.precision]


@dataclass(frozen=True)
class Memory:
    """Bytes on one node.

    Attributes:
        topology, features, arrays: of the node, in memory once for all its workers; features with
            the cache and what finds its rows.
        private: of one worker.
        peak: of the node, with all workers choosing their caches at once.
    """

    topology: float
    features: float
    arrays: float
    private: float
    peak: float


def node_memory(graph: Graph, job: Job, nodes: int, workers: int, touched: Reach) -> Memory:
    """What each of ``nodes`` maps, and what each of its ``workers`` keeps for itself."""
    width = WIDTH[job.precision]
    row, last = graph.features * width, touched.hops[-1]
    batch = last.nodes * row * (job.prefetch + 3)  # a ring of buffers
    batch += last.nodes * row * (job.prefetch + 1)  # what neighbours' rows add up to
    batch += (touched.remote - touched.hits) * row * 2.25
    batch += 48 * (last.draws + last.nodes)  # ids, slots and tables of a look-up
    batch += 3 * last.nodes * job.hidden * width  # activations and their gradients
    cached = touched.cached * (row + 16 * 3)  # and a hash table
    model = parameters(graph, job) * width * 5
    private = _WORKER + batch + model + 6 * graph.training
    choosing = 0.0
    if job.cache and nodes * workers > 1:  # scores of all nodes, of the rows held, of a block
        held = 1 if job.replicated else 1 / (nodes * workers)
        choosing = 4 * (graph.nodes * (1 + held) + min(graph.nodes, 1 << 26))
    topology = staged_topology(graph, 1.0 if job.replicated else 1 / nodes)
    features, arrays = graph.nodes * row / nodes + cached, graph.nodes * _ARRAYS / nodes
    peak = topology + features + arrays + workers * (private + choosing)
    return Memory(topology, features, arrays, private, peak)


def staged_topology(graph: Graph, share: float = 1.0) -> int:
    """Bytes of staged in-edge lists; exact for ``share`` 1, the whole of the graph.

    4 bytes an edge (8 from 2³¹ nodes on), 8 a row, 4 a row for its key.
    """
    width = 4 if graph.nodes < 2**31 else 8
    rows = graph.nodes * share
    return round(width * graph.edges * share + 8 * (rows + 1) + 4 * rows)


def parameters(graph: Graph, job: Job) -> int:
    """Weights of a GraphSAGE: two matrices and a bias in each layer."""
    widths = [graph.features, *[job.hidden] * (len(job.fanouts) - 1), job.classes]
    return sum(2 * a * b + b for a, b in pairwise(widths))


def statistics(directory: Path, features: str = "feat") -> Graph:
    """What the formulas need of a partition that raygnn wrote."""
    from raygnn.graph.data import etype_str
    from raygnn.graph.partition.layout import read_meta
    from raygnn.graph.staging.node_cache import Stage
    from raygnn.graph.staging.shard import load_shard

    meta = read_meta(directory)
    (ntype,), (etype,) = meta.ntypes, meta.etypes
    assert meta.manifest is not None
    with tempfile.TemporaryDirectory() as place:
        shard = load_shard(meta, 0, 1, replicated=True, stage=Stage(Path(place)))
        degrees = Degrees.of(np.diff(shard.topology[etype].indptr))
    parts = meta.manifest.parts
    edges = sum(part.edges[etype_str(etype)] for part in parts)
    return Graph(
        nodes=meta.num_nodes(ntype),
        edges=edges,
        features=meta.manifest.features[f"{ntype}/{features}"].shape[0],
        training=sum(part.splits[ntype]["train"] for part in parts),
        cut=sum(part.cut for part in parts) / edges,
        degrees=degrees,
    )


HEADER = ["nodes × workers, topology", "structure, GB", "features, GB", "a worker's own, GB"]
HEADER += ["a node at most, GB", "nodes in a batch", "remote", "cached", "data sent, MB"]
HEADER += ["gradients sent, MB"]


def figures(
    graph: Graph, job: Job, nodes: int, workers: int, links: Sequence[float] = ()
) -> list[str]:
    """A row under ``HEADER``; then the milliseconds that a node's bytes of a step take on links of
    so many Gbit/s."""
    touched = beyond_host(reach(graph, job, nodes * workers), nodes * workers, workers)
    data, gradients = sent_bytes(graph, job, nodes * workers, touched)
    memory = node_memory(graph, job, nodes, workers, touched)
    gigabytes = (memory.topology, memory.features, memory.private, memory.peak)
    return [
        f"{nodes} × {workers}, {'replicated' if job.replicated else 'partitioned'}",
        *(f"{count / 1e9:.2f}" for count in gigabytes),
        f"{touched.inputs:,.0f}",
        f"{touched.remote:,.0f}",
        f"{100 * touched.hits / touched.remote:.0f} %" if touched.remote else "–",
        f"{data / 1e6:.2f}",
        f"{gradients / 1e6:.2f}",
        *(f"{workers * (data + gradients) * 8 / rate / 1e6:.1f}" for rate in links),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("partition", type=Path, nargs="?", help="of one node and one edge type")
    names = ("NODES", "EDGES", "FEATURES", "TRAINING")
    parser.add_argument("--graph", type=int, nargs=4, metavar=names, help="edges of both ways")
    parser.add_argument("--power", type=float, default=2.2, help="of --graph's power law")
    parser.add_argument("--cut", type=float, help="share of edges between the workers' parts")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--workers", type=int, default=1, help="per node")
    parser.add_argument("--batch", type=int, default=1000, help="per worker")
    parser.add_argument("--fanout", type=int, nargs="+", default=[15, 10])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--classes", type=int, default=47)
    parser.add_argument("--cache", type=float, default=0.1, help="share of the remote rows")
    parser.add_argument("--precision", choices=WIDTH, default="fp32")
    parser.add_argument("--links", type=float, nargs="+", default=[], help="Gbit/s of a node")
    given = parser.parse_args()
    if (given.partition is None) == (given.graph is None):
        parser.error("give a partition, or --graph")
    if given.graph and given.cut is None:
        parser.error("--graph needs --cut")
    if given.graph:
        nodes, edges, *others = given.graph
        degrees = Degrees.power_law(given.power, edges / nodes, nodes / 2)
        graph = Graph(nodes, edges, *others, cut=0.0, degrees=degrees)
    else:
        graph = statistics(given.partition)
    graph = graph if given.cut is None else replace(graph, cut=given.cut)
    shape = (given.batch, tuple(given.fanout), given.hidden, given.classes, given.cache)
    jobs = [Job(*shape, replicated=r, precision=given.precision) for r in (True, False)]
    lines = [
        figures(graph, job, n, given.workers, given.links) for n in given.nodes for job in jobs
    ]
    print(table([*HEADER, *(f"at {rate:g} Gbit/s, ms" for rate in given.links)], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
