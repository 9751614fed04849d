"""The cost model beside measurements: 1, 2 and 4 virtual hosts with one worker each.

The unit costs come from one worker (and, of messages, from all-to-alls that send nothing else);
the rest is predicted from the planted graph's statistics and counted or timed in the engine.
Counts, bytes and memory hold whatever the machine is doing. Times are shown where each worker has
a core of its own; with 4 workers on fewer cores only the processor's time of each is.

    python benchmarks/bench_scaling.py [--scale full|small] [--partition DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import CHECKOUT, WORK, run_engine
from bench_engine import job as engine_job
from cost_model import Cluster, Prediction, UnitCosts, flops, messages, node_memory, predict
from cost_reach import Degrees, Graph, Job, NodeType, Reach, Relation, reach
from cost_units import TALK_BYTES, talk, time_locate, time_number, time_route
from machine import load, setting, table

from raygnn.config.load import load_config
from raygnn.graph.data import etype_str
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.make import ensure_partition
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import load_shard
from tests.hosts import Host, hosts, missing

# of the small graph's 4,800 training nodes 4 workers take an even part in each step
JOBS = {
    name: Job(batch=batch, fanouts=(15, 10), hidden=256, classes=47)
    for name, batch in (("full", 1000), ("small", 600))
}
STEPS = {"full": 40, "small": 20}
WARMUP = 4
CACHES = {  # beside none, on 2 hosts
    "full": [(c, p) for p in ("vip", "degree") for c in (0.05, 0.1, 0.25)],
    "small": [(0.1, "vip")],
}
SMALL = ("1 host, overlapped", "2 hosts, replicated", "2 hosts, partitioned")
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Row:
    """One figure: predicted and measured."""

    what: str
    where: str
    predicted: float
    measured: float
    unit: str

    def cells(self) -> list[str]:
        shown = [f"{value:,.{_digits(value)}f}" for value in (self.predicted, self.measured)]
        error = f"{100 * (self.predicted / self.measured - 1):+.1f} %" if self.measured else "–"
        return [f"{self.what}, {self.unit}", self.where, *shown, error]


def _digits(value: float) -> int:
    return 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2


def statistics(meta: PartitionMeta) -> Graph:
    """What the model is told of a homogeneous partition."""
    (ntype,), (etype,) = meta.ntypes, meta.etypes
    stage = Stage(WORK / "stage")
    rows = load_shard(meta, 0, 1, replicated=True, stage=stage).topology[etype]
    assert meta.manifest is not None
    parts = meta.manifest["parts"]
    edges = sum(part["edges"][etype_str(etype)] for part in parts)
    facts = meta.manifest["features"]
    return Graph(
        types={
            ntype: NodeType(
                nodes=rows.num,
                features=facts[f"{ntype}/feat"]["shape"][0],
                degrees=Degrees.of(np.diff(rows.indptr)),
                other_bytes=8 + 3,  # label, masks
            )
        },
        relations=(Relation(ntype, ntype, edges),),
        seeds=ntype,
        training=sum(part["splits"][ntype]["train"] for part in parts),
        cut=sum(part["cut"] for part in parts) / edges,
    )


@dataclass(frozen=True)
class Bench:
    """The engine, at one scale."""

    scale: str
    partitions: dict[int, Path]  # by number of parts

    def run(self, job: Job, world: int, *, steps: int | None = None) -> list[dict[str, Any]]:
        """What each rank says, with whatever is counted as of one step.

        Without prefetching the clock starts after the first of the steps has its batch, and so
        one batch too few is counted.
        """
        config = engine_job(
            self.scale,
            partition={"parts": world},
            model={"hidden": job.hidden, "layers": len(job.fanouts)},
            sampling={
                "fanout": list(job.fanouts),
                "batch_size": job.batch,
                "cache": job.cache,
                "cache_policy": job.policy,
                "prefetch": job.prefetch,
            },
            precision=job.precision,
        )
        steps = steps or STEPS[self.scale]
        with hosts(world, share=[CHECKOUT]) as group:
            ranks = run_engine(
                config,
                self.partitions[world],
                group,
                replicated=job.replicated,
                steps=steps,
                warmup=WARMUP,
            )
            for rank, host in zip(ranks, group):
                rank["link_bytes"] = link_bytes(host)
        if not job.prefetch:
            for rank in ranks:
                for name in ("sent_bytes", "remote_rows", "cache_hits"):
                    rank[name] *= steps / (steps - 1)
        print(f"  {job}, {world} workers; {load()}", file=sys.stderr, flush=True)
        return ranks


def mean(ranks: list[dict[str, Any]], *names: str) -> float:
    """Over the ranks, of one figure of each."""
    values = []
    for rank in ranks:
        for name in names:
            rank = rank[name]
        values.append(float(rank))  # type: ignore[arg-type]
    return float(np.mean(values))


def link_bytes(host: Host) -> int:
    """Sent through a host's interface since it came up."""
    for line in Path(f"/proc/{host.pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == host.interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"{host.name} has no {host.interface}")


def calibrate(bench: Bench, graph: Graph) -> UnitCosts:
    """Unit costs of one core of this machine, from batches of two sizes."""
    alone = replace(JOBS[bench.scale], cache=0.0, prefetch=0)
    sizes = (alone, replace(alone, batch=alone.batch // 4))
    runs = [min(_runs(bench, job), key=_step) for job in sizes]
    half = replace(alone, precision="bf16")
    half_run = min(_runs(bench, half), key=_step)
    touched = [reach(graph, job, 1) for job in sizes]
    (kind,) = graph.types.values()
    number = time_number(kind.nodes)
    draws = [sum(hop.draws for hop in each.hops) for each in touched]
    numbered = [all_ - each.hops[-1].draws for all_, each in zip(draws, touched)]
    times = [run["ms"]["sample"] - n * number / 1e6 for run, n in zip(runs, numbered)]
    sample, sample_rest = _line(draws, times)
    rows = [each.hops[-1].draws + each.hops[-1].nodes for each in touched]
    features, features_rest = _line(rows, [run["ms"]["features"] for run in runs])
    gather = features * 1e6 / alone.row_bytes(kind.features)

    def dense(run: dict[str, Any], job: Job, each: Reach) -> float:
        """Milliseconds of matrix products and of what does not grow."""
        return float(run["ms"]["compute"] - messages(graph, job, each) * gather / 1e6)

    work = [flops(graph, job, each) for job, each in zip(sizes, touched)]
    times = [dense(*each) for each in zip(runs, sizes, touched)]
    slope, step_ms = _line(work, times)
    none, none_cpu, some = talk(2)
    costs = UnitCosts(
        sample_ns=sample * 1e6,
        number_ns=number,
        route_ns=time_route(),
        locate_ns=time_locate(kind.nodes),
        gather_ns=gather,
        gflops=1 / slope / 1e6,
        half=slope * work[0] / max(dense(half_run, half, touched[0]) - step_ms, 1e-3),
        collective_ms=none,
        peer_ms=max(talk(4)[1] - none_cpu, 0.0) / 2,
        sent_ns=(some - none) * 1e6 / TALK_BYTES,
        batch_ms=sample_rest + features_rest,
        step_ms=step_ms,
        base_gb=0.0,
    )
    known = node_memory(graph, alone, cluster(1, costs), touched[0])
    base = runs[0]["memory"]["private"] - (known.private + known.resident) / 1e9
    return replace(costs, base_gb=base)


def _runs(bench: Bench, job: Job) -> list[dict[str, Any]]:
    return [bench.run(job, 1)[0] for _ in range(2 if bench.scale == "full" else 1)]


def _step(run: dict[str, Any]) -> float:
    return float(run["ms_per_step"])


def _line(work: list[float], times: list[float]) -> tuple[float, float]:
    """Time per unit, and what is left at no work: at least 0."""
    slope = (times[0] - times[1]) / (work[0] - work[1])
    rest = max(times[0] - slope * work[0], 0.0)
    return (times[0] - rest) / work[0], rest


def cluster(world: int, costs: UnitCosts) -> Cluster:
    """This machine's virtual hosts: the network is memory, and its cost a core's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Cluster(world, 1, 1 if world > 1 else CORES, memory, costs)


def _structure(meta: PartitionMeta, rank: int, world: int, replicated: bool) -> int:
    stage = Stage(WORK / "stage")
    shard = load_shard(meta, rank, world, replicated=replicated, stage=stage)
    return sum(rows.nbytes for rows in shard.topology.values())


def compare(bench: Bench, graphs: dict[int, Graph], costs: UnitCosts) -> list[Row]:
    """Run, predict and pair."""
    rows: list[Row] = []

    def both(job: Job, world: int) -> tuple[Prediction, list[dict[str, Any]]]:
        return predict(graphs[world], job, cluster(world, costs)), bench.run(job, world)

    def add(where: str, predicted: Prediction, ranks: list[dict[str, Any]]) -> None:
        name = next(iter(predicted.reach.remote))
        pairs = [
            ("remote rows", predicted.reach.remote[name], "remote_rows", 1.0, "rows"),
            ("found in the cache", predicted.reach.hits[name], "cache_hits", 1.0, "rows"),
            ("data sent", predicted.sent.data / 1e6, "sent_bytes", 1e6, "MB"),
        ]
        for what, value, key, scale, unit in pairs:
            rows.append(Row(what, where, value, mean(ranks, key) / scale, unit))

    base = JOBS[bench.scale]
    counted = replace(base, prefetch=0)
    for cache, policy in ((0.0, "vip"), *CACHES[bench.scale]):
        found = both(replace(counted, cache=cache, policy=policy), 2)
        add(f"2 hosts, cache {cache:.0%} {policy}", *found)
    for world in (2, 4):
        for replicated in (True, False):
            if (world, replicated) == (2, True):
                continue  # it is in the table above
            where = f"{world} hosts, {'replicated' if replicated else 'partitioned'}"
            add(where, *both(replace(counted, replicated=replicated), world))
    for world in (2, 4) if bench.scale == "full" else (2,):
        step = STEPS[bench.scale]
        few, many = (bench.run(counted, world, steps=n) for n in (step, 3 * step))
        slope = (mean(many, "link_bytes") - mean(few, "link_bytes")) / (2 * step)
        sent = predict(graphs[world], counted, cluster(world, costs)).sent
        total = (sent.data + sent.gradients) / 1e6
        rows.append(Row("all bytes on the link", f"{world} hosts", total, slope / 1e6, "MB"))

    for world in (2, 4):
        meta = read_meta(bench.partitions[world])
        for replicated in (True, False):
            kept = [_structure(meta, rank, world, replicated) for rank in range(world)]
            job = replace(base, replicated=replicated)
            memory = predict(graphs[world], job, cluster(world, costs)).memory
            where = f"{world} hosts, {'replicated' if replicated else 'partitioned'}"
            told, found = memory.topology / 1e6, float(np.mean(kept)) / 1e6
            rows.append(Row("structure on a node", where, told, found, "MB"))

    shapes = {
        "1 host, in turn": (counted, 1),
        "1 host, fanout 10, 5, half the batch, hidden 128": (
            replace(counted, fanouts=(10, 5), batch=base.batch // 2, hidden=128),
            1,
        ),
        "1 host, fanout 15, 10, 5": (replace(counted, fanouts=(15, 10, 5)), 1),
        "1 host, bf16": (replace(counted, precision="bf16"), 1),
        "1 host, overlapped": (base, 1),
        "2 hosts, replicated": (base, 2),
        "2 hosts, partitioned": (replace(base, replicated=False), 2),
        "4 hosts, replicated": (base, 4),
        "4 hosts, partitioned": (replace(base, replicated=False), 4),
    }
    if bench.scale == "small":
        shapes = {name: shapes[name] for name in shapes if name in SMALL}
    for where, (job, world) in shapes.items():
        predicted, ranks = both(job, world)
        if world <= CORES:
            alone = world == 1 and not job.prefetch  # else they are in each other's way
            for name in ("sample", "features", "compute") if alone else ():
                value = getattr(predicted.step, name)
                rows.append(Row(name, where, value, mean(ranks, "ms", name), "ms"))
            rows.append(Row("step", where, predicted.step.total, mean(ranks, "ms_per_step"), "ms"))
        cpu = mean(ranks, "cpu_ms_per_step")
        rows.append(Row("processor, a worker", where, predicted.step.cpu, cpu, "ms"))
        own = (predicted.memory.private + predicted.memory.resident) / 1e9
        rows.append(Row("private memory", where, own, mean(ranks, "memory", "private"), "GB"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=STEPS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--partition", type=Path, help="one of the graph in 2 parts that is there")
    given = parser.parse_args()
    if reason := missing():
        print(f"not run: {reason}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    partitions = {2: given.partition} if given.partition else {}
    for parts in {1, 2, 4} - set(partitions):
        config = engine_job(given.scale, partition={"parts": parts})
        partitions[parts] = ensure_partition(load_config(config), parts).directory
    graphs = {world: statistics(read_meta(path)) for world, path in partitions.items()}
    bench = Bench(given.scale, partitions)
    costs = calibrate(bench, graphs[1])
    print("\nUnit costs: " + ", ".join(f"{k} {v:.3g}" for k, v in vars(costs).items()))
    print("Cut: " + ", ".join(f"{p} parts {100 * g.cut:.1f} %" for p, g in sorted(graphs.items())))
    rows = compare(bench, graphs, costs)
    header = ["", "where", "predicted", "measured", "error"]
    print("\n" + table(header, [row.cells() for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
