"""What it costs to draw a minibatch's neighbours where edges have weights, bans or times, beside
the plain draw; one process, one thread, in turn. Part of ``bench_engine.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import table

from raygnn.config.schema import Config
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.make import Missing
from raygnn.graph.sources import load_graph
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import EdgeReads, load_shard
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import Banned, NeighborSampler, Timing

DRAWS = ("weighted", "banned", "temporal", "latest")
WANTED = 1.5  # times the plain draw, at most
SEEDS, BATCHES = 1000, 20


def with_edge_data(config: Config, place: Path, parts: int) -> PartitionMeta:
    """The graph with ``weight``, ``time`` and ``eight`` features of edges, in so many parts."""
    if place.exists():
        return read_meta(place)
    assert config.graph is not None
    data, rng = load_graph(config.graph), np.random.default_rng(0)
    edges = data.edges[DEFAULT_ETYPE]
    edges.data["weight"] = rng.exponential(size=edges.num).astype(np.float32)
    edges.data["time"] = rng.integers(0, 10**6, edges.num)
    edges.data["eight"] = rng.normal(size=(edges.num, 8)).astype(np.float16)
    return make_partition(Missing(place, parts, "random", "0" * 64, {}, place), data)


def measure(meta: PartitionMeta, config: Config, rounds: int) -> dict[str, list[float]]:
    """Name of each draw → milliseconds for a batch, a number of each round."""
    alone, stage = Exchange(World(0, 1)), Stage.from_config(config.staging)
    whole: dict[str, Any] = {"replicated": True, "stage": stage}
    plain = load_shard(meta, 0, 1, **whole)
    weighted = load_shard(meta, 0, 1, reads=EdgeReads(weight="weight"), **whole)
    timed = load_shard(meta, 0, 1, reads=EdgeReads(time="time"), **whole)
    fanouts = resolve_fanouts(config.sampling.fanout, plain.etypes)
    rng = np.random.default_rng(1)
    seeds = [
        rng.choice(plain.num_nodes(DEFAULT_NTYPE), SEEDS, replace=False) for _ in range(BATCHES)
    ]
    bans = [_some_edges(plain, ids) for ids in seeds]
    times = [rng.integers(0, 10**6, SEEDS) for _ in seeds]

    def draws(shard: Any, more: Callable[[int], dict[str, Any]], **how: Any) -> float:
        sampler = NeighborSampler(shard, alone, **how)
        start = time.perf_counter()
        for number, ids in enumerate(seeds):
            sampler.sample({DEFAULT_NTYPE: ids}, fanouts, epoch=0, step=number, **more(number))
        return 1e3 * (time.perf_counter() - start) / BATCHES

    def at(number: int) -> dict[str, Any]:
        return {"times": {DEFAULT_NTYPE: times[number]}}

    runs: dict[str, Callable[[], float]] = {
        "plain": lambda: draws(plain, lambda _: {}),
        "weighted": lambda: draws(weighted, lambda _: {}, weighted=True),
        "banned": lambda: draws(plain, lambda number: {"banned": bans[number]}),
        "temporal": lambda: draws(timed, at, timing=Timing()),
        "latest": lambda: draws(timed, at, timing=Timing(latest=True)),
    }
    for run in runs.values():
        run()  # compiles, and brings files into memory
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return found


def _some_edges(shard: Any, nodes: np.ndarray) -> Banned:
    """One edge into each node, and the other way round, as where edges are predicted."""
    rows = shard.topology[DEFAULT_ETYPE]
    first = rows.indptr[nodes]
    nodes, first = nodes[rows.indptr[nodes + 1] > first], first[rows.indptr[nodes + 1] > first]
    src = rows.src[first].astype(np.int64)
    return Banned({DEFAULT_ETYPE: (np.concatenate([src, nodes]), np.concatenate([nodes, src]))})


def report(found: dict[str, list[float]]) -> int:
    """Print the medians and what they are of the plain draw; how many are more than promised."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [
        [name, f"{value:.2f}", f"{value / medians['plain']:.2f}", "" if name == "plain" else "1.5"]
        for name, value in medians.items()
    ]
    print("\n" + table(["draw", "ms a batch", "of plain", "wanted, at most"], rows))
    return sum(value > WANTED * medians["plain"] for value in medians.values())
