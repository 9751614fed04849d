"""What a job costs, from a graph's statistics: memory per node, bytes and milliseconds per step.

Pure arithmetic on the expected numbers of `cost_reach`. `docs/scaling.md` says in words what is
counted and how far off it was; `bench_scaling.py` puts it beside measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from cost_reach import WIDTH, Graph, Hop, Job, Reach, reach

_HEADER = 128  # bytes of a .npy file before its first element
_BUCKET = 25 << 20  # bytes of gradients that are reduced together
_TO_GPU = 12e9  # bytes a second from pinned memory
_LAUNCH = 2.0  # ms of a step on a GPU that are not arithmetic
_USABLE = 0.9  # of a node's memory; the rest is the system's
_SCORES = 16  # bytes for each node of the graph, while a worker chooses what to cache


@dataclass(frozen=True)
class UnitCosts:
    """What a machine takes for one unit of each kind of work, on one core.

    Attributes:
        sample_ns: per drawn edge; number_ns: per drawn edge whose source is numbered, too.
        route_ns: per id that is sorted by owner, sent in a list and put back in order.
        locate_ns: per id that is looked up and not owned; gather_ns: per byte of rows read at
            random.
        gflops: of forward and backward; half: how many times as fast they are in bf16.
        collective_ms: of one all-to-all of nothing between two; peer_ms: for each further rank.
        sent_ns: per byte sent and received: packed, and copied by the system.
        batch_ms, step_ms: of making a batch and of a step of the model, however small.
        base_gb: private memory of a worker before it has any data.
    """

    sample_ns: float
    number_ns: float
    route_ns: float
    locate_ns: float
    gather_ns: float
    gflops: float
    half: float
    collective_ms: float
    peer_ms: float
    sent_ns: float
    batch_ms: float
    step_ms: float
    base_gb: float


@dataclass(frozen=True)
class Cluster:
    """Machines alike.

    Attributes:
        workers: per node, with ``cores`` each: one for the data plane, the others for the model;
            with one core the two take turns.
        gbit, latency_us: of a node's link, which its workers share; None = all on one machine.
        gpu_gflops: of each worker's GPU, if it has one; gpu_half: times that in bf16.
    """

    nodes: int
    workers: int
    cores: int
    memory_gb: float
    costs: UnitCosts
    gbit: float | None = None
    latency_us: float = 0.0
    gpu_gflops: float | None = None
    gpu_half: float = 1.0

    @property
    def world(self) -> int:
        return self.nodes * self.workers


@dataclass(frozen=True)
class Sent:
    """Bytes that one worker sends to others in a step; as many reach it."""

    features: float
    ids: float
    sampling: float
    counts: float
    gradients: float

    @property
    def data(self) -> float:
        """Of the data plane: all but the gradients."""
        return self.features + self.ids + self.sampling + self.counts


@dataclass(frozen=True)
class Step:
    """Milliseconds of one worker's step, by what they are spent on.

    Attributes:
        sample, features: the data plane's own work; exchange: sending and receiving, on a core.
        compute: forward, backward, optimizer; reduce: of gradients, on a core.
        wire, wire_reduce: bytes and latency on the link, of the data and of the gradients.
        overlap: whether batches are made while the model works.
    """

    sample: float
    features: float
    exchange: float
    compute: float
    reduce: float
    wire: float
    wire_reduce: float
    overlap: bool

    @property
    def data(self) -> float:
        return self.sample + self.features + self.exchange + self.wire

    @property
    def model(self) -> float:
        return self.compute + self.reduce + self.wire_reduce

    @property
    def total(self) -> float:
        if self.overlap:
            return max(self.data, self.model, self.wire + self.wire_reduce)
        return self.data + self.model

    @property
    def cpu(self) -> float:
        return self.sample + self.features + self.exchange + self.compute + self.reduce

    @property
    def bottleneck(self) -> str:
        """The largest single part of what decides the step."""
        parts = {
            "sampling": self.sample,
            "features": self.features,
            "exchange": self.exchange,
            "network": self.wire,
        }
        if not self.overlap or self.model >= self.data:
            model = {"model": self.compute, "gradients": self.reduce + self.wire_reduce}
            parts = model if self.overlap else parts | model
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Memory:
    """Bytes on one node.

    Attributes:
        topology, features, arrays: of the node, mapped by all its workers. Owned feature rows are
            counted here also where each worker copies its own ("resident").
        private: of one worker, without resident rows; resident: those.
        start: of one worker, for a while, as it chooses its cache.
    """

    topology: float
    features: float
    arrays: float
    private: float
    resident: float
    start: float
    workers: int

    @property
    def total(self) -> float:
        return self.topology + self.features + self.arrays + self.workers * self.private

    @property
    def peak(self) -> float:
        """With all workers choosing at once, before batches are made."""
        return self.total + self.workers * self.start


@dataclass(frozen=True)
class Prediction:
    reach: Reach
    sent: Sent
    step: Step
    memory: Memory
    fits: bool
    seeds_per_second: float
    epoch_seconds: float


def predict(graph: Graph, job: Job, cluster: Cluster) -> Prediction:
    """All of it for one job on one cluster."""
    touched = reach(graph, job, cluster.world)
    sent = sent_bytes(graph, job, cluster.world, touched)
    step = step_time(graph, job, cluster, touched, sent)
    memory = node_memory(graph, job, cluster, touched)
    steps = math.ceil(graph.training / (job.batch * cluster.world))
    return Prediction(
        reach=touched,
        sent=sent,
        step=step,
        memory=memory,
        fits=memory.peak <= _USABLE * cluster.memory_gb * 1e9,
        seeds_per_second=1e3 * job.batch * cluster.world / step.total,
        epoch_seconds=steps * step.total / 1e3,
    )


def missing(touched: Reach) -> dict[str, float]:
    """Rows fetched in a step, by node type."""
    return {t: rows - touched.hits[t] for t, rows in touched.remote.items()}


def sent_bytes(graph: Graph, job: Job, world: int, touched: Reach) -> Sent:
    """What `Exchange` counts, and the gradients of a ring all-reduce."""
    if world == 1:
        return Sent(0, 0, 0, 0, 0)
    rows = missing(touched)
    types, relations, peers = len(graph.types), len(graph.relations), world - 1
    wire = 4 if max(kind.nodes for kind in graph.types.values()) < 2**31 else 8
    sampling, counts = 0.0, 8.0 * types * peers
    for hop in () if job.replicated else touched.hops:
        # asked: a length and an id for each node; answered: a length for each list, and ids
        sampling += wire * (2 * hop.remote_nodes + hop.remote_lists + hop.remote_draws)
        counts += 8 * 2 * (types + relations) * peers
    return Sent(
        features=sum(n * job.row_bytes(graph.types[t].features) for t, n in rows.items()),
        ids=8 * sum(rows.values()),
        sampling=sampling,
        counts=counts,
        gradients=2 * peers / world * parameters(graph, job) * WIDTH[job.precision],
    )


def step_time(graph: Graph, job: Job, cluster: Cluster, touched: Reach, sent: Sent) -> Step:
    """Work × unit costs; see `Step`."""
    costs, world = cluster.costs, cluster.world
    draws = sum(hop.draws for hop in touched.hops)
    last = touched.hops[-1]
    numbered = draws - last.draws if job.combined else draws
    sample = draws * costs.sample_ns + numbered * costs.number_ns
    if world > 1 and not job.replicated:
        sample += (draws + sum(hop.lists + hop.nodes for hop in touched.hops)) * costs.route_ns
    rows = missing(touched)
    width = _mean_row(graph, job, touched)
    if job.combined:  # the first layer adds up rows as they are found
        gathered = last.draws + last.nodes
        foreign = abroad(graph, world, last) + last.remote_nodes
    else:
        gathered, foreign = sum(touched.inputs.values()), sum(touched.remote.values())
    served = sum(rows.values())
    features = foreign * costs.locate_ns + (gathered + served) * width * costs.gather_ns
    if not job.combined:
        features += gathered * width * WIDTH[job.precision] * costs.gather_ns  # to numbers
    reductions = math.ceil(parameters(graph, job) * WIDTH[job.precision] / _BUCKET)
    collectives = 3 + (0 if job.replicated else 4 * len(touched.hops))
    one = costs.collective_ms + costs.peer_ms * (world - 2) if world > 1 else 0.0
    away = (world - cluster.workers) / (world - 1) if world > 1 else 0.0  # of all other ranks
    link = 0.0 if cluster.gbit is None else 8e-6 / cluster.gbit * cluster.workers * away
    latency = cluster.latency_us / 1e3 if cluster.nodes > 1 else 0.0
    return Step(
        sample=sample / 1e6 + costs.batch_ms,
        features=features / 1e6,
        exchange=sent.data * costs.sent_ns / 1e6 + collectives * one,
        compute=_compute(graph, job, cluster, touched),
        reduce=sent.gradients * costs.sent_ns / 1e6 + reductions * one,
        wire=sent.data * link + collectives * latency,
        # a ring's bytes leave a node once, whatever the number of its workers
        wire_reduce=sent.gradients * link / cluster.workers
        + reductions * 2 * (world - 1) * latency,
        overlap=job.prefetch > 0 and (cluster.cores > 1 or cluster.gpu_gflops is not None),
    )


def abroad(graph: Graph, world: int, hop: Hop) -> float:
    """Drawn edges that lead to another worker's node."""
    if world == 1:
        return 0.0
    back = graph.cut / (world - 1)
    return graph.cut * (hop.draws - hop.remote_draws) + (1 - back) * hop.remote_draws


def _mean_row(graph: Graph, job: Job, touched: Reach) -> float:
    total = sum(touched.inputs.values())
    rows = (n * job.row_bytes(graph.types[t].features) for t, n in touched.inputs.items())
    return sum(rows) / total


def flops(graph: Graph, job: Job, touched: Reach) -> float:
    """Of matrix products, forward and backward; the first layer's input needs no gradient."""
    total = 0.0
    for number, (a, b) in enumerate(layers(graph, job)):
        hop = touched.hops[-1 - number]
        total += 2 * a * b * (hop.nodes + hop.lists) * (3 if number else 2)
    return total


def messages(graph: Graph, job: Job, touched: Reach) -> float:
    """Bytes that go along edges inside the model, forward and (twice as many) backward, and those
    that the optimizer reads and writes."""
    total = 0.0
    for number, (a, _) in enumerate(layers(graph, job)):
        if number or not job.combined:
            draws = touched.hops[-1 - number].draws
            total += draws * a * WIDTH[job.precision] * (3 if number else 1)
    return total + 7 * WIDTH[job.precision] * parameters(graph, job)


def _compute(graph: Graph, job: Job, cluster: Cluster, touched: Reach) -> float:
    costs, half = cluster.costs, job.precision != "fp32"
    work = flops(graph, job, touched)
    if cluster.gpu_gflops is not None:
        rate = cluster.gpu_gflops * (cluster.gpu_half if half else 1)
        kinds = 2 if job.combined else 1  # rows of the nodes and what they add up to
        rows = touched.hops[-1].nodes if job.combined else sum(touched.inputs.values())
        moved = kinds * rows * layers(graph, job)[0][0] * WIDTH[job.precision]
        return work / rate / 1e6 + moved / _TO_GPU * 1e3 + _LAUNCH
    rate = costs.gflops * (costs.half if half else 1)
    alone = work / rate / 1e6 + messages(graph, job, touched) * costs.gather_ns / 1e6
    return alone / max(cluster.cores - 1, 1) + costs.step_ms


def node_memory(graph: Graph, job: Job, cluster: Cluster, touched: Reach) -> Memory:
    """What a node maps and its workers keep for themselves."""
    world, share = cluster.world, 1 / cluster.nodes
    rows = {t: job.row_bytes(kind.features) for t, kind in graph.types.items()}
    owned = sum(kind.nodes * rows[t] for t, kind in graph.types.items()) / world
    nodes = sum(kind.nodes for kind in graph.types.values())
    cached = sum(touched.cached[t] * (rows[t] + 16 * 3) for t in graph.types)  # and a hash table
    last = touched.hops[-1]
    width = max(rows.values())
    fetched = sum(n * rows[t] for t, n in missing(touched).items())
    kept = last.nodes if job.combined else sum(touched.inputs.values())
    first = layers(graph, job)[0][0]
    batch = kept * width * (job.prefetch + 3) + fetched * 2.25  # a ring of buffers
    if job.combined:
        batch += last.nodes * first * WIDTH[job.precision] * (job.prefetch + 1)
    batch += 48 * (last.draws + last.nodes)  # ids, slots and tables of a look-up
    batch += 3 * last.nodes * job.hidden * WIDTH[job.precision]  # activations and their gradients
    model = parameters(graph, job) * WIDTH[job.precision] * 5
    free = cluster.memory_gb * 1e9
    fast = 4 * owned * min(world, cluster.workers * cluster.cores) <= free
    base = cluster.costs.base_gb * 1e9
    return Memory(
        topology=staged_topology(graph, 1.0 if job.replicated else share),
        features=owned * cluster.workers,
        arrays=sum(k.nodes * (4 + k.other_bytes) for k in graph.types.values()) * share,
        private=base + cached + batch + model + 24 * graph.training,
        resident=owned if fast else 0.0,
        start=_SCORES * nodes if job.cache and world > 1 else 0.0,
        workers=cluster.workers,
    )


def staged_topology(graph: Graph, share: float = 1.0) -> int:
    """Bytes of staged in-edge lists; exact for ``share`` 1, the whole of the graph.

    4 bytes an edge (8 from 2³¹ source nodes on), 8 a row of each relation, 4 a row for its key.
    """
    size = 0.0
    for relation in graph.relations:
        width = 4 if graph.types[relation.source].nodes < 2**31 else 8
        size += width * relation.edges * share + _HEADER
        size += 8 * (graph.types[relation.target].nodes * share + 1) + _HEADER
    for ntype in {relation.target for relation in graph.relations}:
        size += 4 * graph.types[ntype].nodes * share + _HEADER
    return round(size)


def layers(graph: Graph, job: Job) -> list[tuple[int, int]]:
    """Input and output width of each layer, with the features of the widest node type."""
    first = max(kind.features for kind in graph.types.values())
    widths = [first, *[job.hidden] * (len(job.fanouts) - 1), job.classes]
    return list(pairwise(widths))


def parameters(graph: Graph, job: Job) -> int:
    """Weights of a GraphSAGE: a matrix for each relation, one and a bias for each target type."""
    targets = len({relation.target for relation in graph.relations})
    matrices = len(graph.relations) + targets
    return sum(a * b * matrices + b * targets for a, b in layers(graph, job))
