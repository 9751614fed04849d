"""What `cost.py` predicts beside what is counted: 1, 2 and 4 virtual hosts with one worker each.

Rows, bytes and memory, which hold whatever else the machine is doing.

    python benchmarks/bench_scaling.py [--scale full|small] [--partition DIR]
    python benchmarks/bench_scaling.py --growth 2 4 8 16

The second one shows how bytes, collectives and memory of a rank grow with the number of ranks, one
on each host, with parts by streaming.
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
from cost import (
    Graph,
    Job,
    node_memory,
    reach,
    sent_bytes,
    staged_topology,
    statistics,
)
from machine import load, setting, table

from raygnn.config.load import load_config
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import load_shard
from tests.support.graphs import ensure_partition
from tests.support.hosts import Host, hosts, missing

# of the small graph's 4,800 training nodes 4 workers take an even part in each step
JOBS = {
    name: Job(batch=batch, fanouts=(15, 10), hidden=256, classes=47)
    for name, batch in (("full", 1000), ("small", 600))
}
STEPS = {"full": 40, "small": 20}
WARMUP = 4
CACHES = {  # beside none, on 2 hosts
    "full": [0.05, 0.1, 0.25],
    "small": [0.1],
}


@dataclass(frozen=True)
class Row:
    """One figure: predicted and measured."""

    figure: str
    where: str
    predicted: float
    measured: float
    unit: str

    def cells(self) -> list[str]:
        shown = [f"{value:,.{_digits(value)}f}" for value in (self.predicted, self.measured)]
        error = f"{100 * (self.predicted / self.measured - 1):+.1f} %" if self.measured else "–"
        return [f"{self.figure}, {self.unit}", self.where, *shown, error]


def _digits(value: float) -> int:
    return 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2


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


def _structure(meta: PartitionMeta, rank: int, world: int, replicated: bool) -> int:
    stage = Stage(WORK / "stage")
    shard = load_shard(meta, rank, world, replicated=replicated, stage=stage)
    return sum(rows.nbytes for rows in shard.topology.values())


def compare(bench: Bench, graphs: dict[int, Graph]) -> list[Row]:
    """Run, predict and pair."""
    rows: list[Row] = []

    def add(where: str, job: Job, world: int) -> None:
        """Rows, bytes and memory of a job."""
        graph, ranks = graphs[world], bench.run(job, world)
        touched = reach(graph, job, world)
        memory = node_memory(graph, job, world, 1, touched)
        data, _ = sent_bytes(graph, job, world, touched)
        private = (memory.private + memory.features) / 1e9  # each worker keeps its own rows
        rows.append(Row("private memory", where, private, mean(ranks, "memory", "private"), "GB"))
        if world > 1:
            pairs = [
                ("remote rows", touched.remote, "remote_rows", 1.0, "rows"),
                ("in the cache", touched.hits, "cache_hits", 1.0, "rows"),
                ("data sent", data / 1e6, "sent_bytes", 1e6, "MB"),
            ]
            for figure, value, key, scale, unit in pairs:
                rows.append(Row(figure, where, value, mean(ranks, key) / scale, unit))

    base = replace(JOBS[bench.scale], prefetch=0)
    for cache in (0.0, *CACHES[bench.scale]):
        add(f"2 hosts, cache {cache:.0%}", replace(base, cache=cache), 2)
    add("2 hosts, partitioned", replace(base, replicated=False), 2)
    if bench.scale == "full":
        add("4 hosts, replicated", base, 4)
        add("4 hosts, partitioned", replace(base, replicated=False), 4)
    add("1 host", base, 1)
    small = replace(base, fanouts=(10, 5), batch=base.batch // 2, hidden=128)
    add("1 host, fanout 10, 5, half the batch, hidden 128", small, 1)
    add("1 host, fanout 15, 10, 5", replace(base, fanouts=(15, 10, 5)), 1)
    add("1 host, bf16", replace(base, precision="bf16"), 1)
    for world in (2, 4) if bench.scale == "full" else (2,):
        step = STEPS[bench.scale]
        few, many = (bench.run(base, world, steps=n) for n in (step, 3 * step))
        slope = (mean(many, "link_bytes") - mean(few, "link_bytes")) / (2 * step)
        sent = sum(sent_bytes(graphs[world], base, world, reach(graphs[world], base, world)))
        rows.append(Row("all bytes on the link", f"{world} hosts", sent / 1e6, slope / 1e6, "MB"))
    for world in (2, 4):
        meta = read_meta(bench.partitions[world])
        for replicated in (True, False):
            kept = [_structure(meta, rank, world, replicated) for rank in range(world)]
            where = f"{world} hosts, {'replicated' if replicated else 'partitioned'}"
            predicted = staged_topology(graphs[world], 1.0 if replicated else 1 / world)
            measured = float(np.mean(kept)) / 1e6
            rows.append(Row("structure on a node", where, predicted / 1e6, measured, "MB"))
    return rows


def growth(bench: Bench, graphs: dict[int, Graph]) -> list[list[str]]:
    """One row for each number of ranks and topology: figures of a rank and step."""
    lines = []
    for world, graph in graphs.items():
        for replicated in (True, False):
            job = replace(JOBS[bench.scale], prefetch=0, replicated=replicated)
            touched = reach(graph, job, world)
            data, gradients = sent_bytes(graph, job, world, touched)
            memory = node_memory(graph, job, world, 1, touched)
            ranks = bench.run(job, world, steps=10)
            rounds = mean(ranks, "collectives", "all_to_all_single")
            lines.append(
                [
                    f"{world}, {'replicated' if replicated else 'partitioned'}",
                    f"{100 * graph.cut:.1f} %",
                    f"{data / 1e6:.2f}",
                    f"{mean(ranks, 'sent_bytes') / 1e6:.2f}",
                    f"{max(rank['sent_bytes'] for rank in ranks) / 1e6:.2f}",
                    f"{gradients / 1e6:.2f}",
                    f"{rounds:.1f} + {mean(ranks, 'collectives', 'all_reduce'):.1f}",
                    f"{rounds * (world - 1):.0f}",
                    f"{(memory.private + memory.features) / 1e9:.2f}",
                    f"{mean(ranks, 'memory', 'private'):.2f}",
                ]
            )
    return lines


GROWTH = [
    "ranks, topology",
    "cut",
    "data sent, MB, predicted",
    "counted",
    "most of a rank",
    "gradients, MB",
    "all-to-all + all-reduce",
    "messages",
    "private memory, GB, predicted",
    "measured",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=STEPS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--partition", type=Path, help="one of the graph in 2 parts that is there")
    parser.add_argument("--growth", type=int, nargs="+", metavar="RANKS", help="only this")
    given = parser.parse_args()
    if reason := missing():
        print(f"not run: {reason}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    partitions = {2: given.partition} if given.partition else {}
    for parts in given.growth or {1, 2, 4} - set(partitions):
        method = "stream" if given.growth else "metis"
        config = engine_job(given.scale, partition={"parts": parts, "method": method})
        partitions[parts] = ensure_partition(load_config(config), parts).directory
    graphs = {world: statistics(path) for world, path in partitions.items()}
    bench = Bench(given.scale, partitions)
    if given.growth:
        print("\n" + table(GROWTH, growth(bench, graphs)))
        return 0
    print("Cut: " + ", ".join(f"{p} parts {100 * g.cut:.1f} %" for p, g in sorted(graphs.items())))
    rows = compare(bench, graphs)
    header = ["", "where", "predicted", "measured", "error"]
    print("\n" + table(header, [row.cells() for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
