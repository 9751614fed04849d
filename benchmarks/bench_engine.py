"""The engine against what its users would take instead, in turn, on one machine.

Two virtual hosts (network namespaces with their own /dev/shm), one worker on each, one thread
each: raygnn's engine with either topology and precision, and DistDGL with one server and one
trainer per host. Beside them DGL's own single-process DataLoader, with as many threads as the
two workers have together. GraphSAGE, 2 layers, hidden 256, fanout [15, 10] from the seeds
outward, 1,000 seeds per worker, on a generated graph like ogbn-products (half of it: 1.2 million
nodes, 60 million directed edges, 100 features, 47 classes, 8 % of the nodes to train on). The
cache of other hosts' rows is `auto`, which here holds all of them, and again a tenth, and none.

    python benchmarks/bench_engine.py [--scale small|full] [--rounds 3] [--only NAME,… …]

Beside these, of the same graph with data on its edges: GraphSAGE and GATv2 with and without eight
features of edges, and what draws cost where edges have weights, bans or times (names ``weighted``,
``banned``, ``temporal``, ``latest``: one process, sampling alone).

The dense limit is the rate of steps that consist of their matrix products alone, with the same
operands and threads.

Exit code 1 if a figure that was promised is missed (at full scale).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from engine_draws import DRAWS, measure, with_edge_data  # noqa: E402
from engine_draws import report as report_draws  # noqa: E402
from machine import load, setting, table  # noqa: E402
from peers.dgl_loader import run_dgl_loader  # noqa: E402
from peers.distdgl import run_distdgl  # noqa: E402

from raygnn.config.load import load_config  # noqa: E402
from raygnn.driver.launch import ALLOCATOR  # noqa: E402
from tests.support.graphs import ensure_partition  # noqa: E402
from tests.support.hosts import Host, hosts, missing  # noqa: E402

WORK = CHECKOUT / "build" / "bench"
ENGINE = CHECKOUT / "benchmarks" / "engine_rank.py"
PORT = 29400
_DEADLINE = 900  # seconds for one measurement

GRAPHS = {"full": 1_200_000, "small": 75_000}
STEPS = {"full": 60, "small": 15}
WARMUP = {"full": 10, "small": 3}


@dataclass(frozen=True)
class Figures:
    """One measurement; milliseconds are a step's, on one worker, and may overlap."""

    seeds_per_second: float
    ms: dict[str, float]
    detail: dict[str, Any]


def job(scale: str, **changes: Any) -> dict[str, Any]:
    """The benchmark's configuration."""
    values: dict[str, Any] = {
        "name": "bench",
        "storage": str(WORK),
        "graph": {"format": "planted", "nodes": GRAPHS[scale], "degree": 50},
        "partition": {"parts": 2},
        "model": {"kind": "sage", "hidden": 256, "layers": 2, "dropout": 0.0},
        "sampling": {"fanout": [15, 10], "batch_size": 1000},
        "staging": {"path": str(WORK / "stage")},
        "train": {"lr": 0.003},
    }
    for section, keys in changes.items():
        merged = isinstance(keys, dict) and section in values
        values[section] = {**values[section], **keys} if merged else keys
    return values


def run_engine(
    config: dict[str, Any],
    partition: Path,
    group: list[Host],
    *,
    replicated: bool,
    steps: int,
    warmup: int,
    threads: int = 1,
    evaluations: int = 0,
) -> list[dict[str, Any]]:
    """Run one rank on each host; returns what each printed.

    Args:
        evaluations: of the validation nodes, after the steps.

    Raises:
        RuntimeError: a rank failed or did not end in time, with the end of what it said.
    """
    with tempfile.TemporaryDirectory(dir=WORK) as directory, ExitStack() as stack:
        settings = {
            "config": config,
            "partition": str(partition),
            "world": len(group),
            "master": f"{group[0].address}:{PORT}",
            "replicated": replicated,
            "steps": steps,
            "warmup": warmup,
            "threads": threads,
            "evaluations": evaluations,
        }
        file = Path(directory) / "settings.json"
        file.write_text(json.dumps(settings))
        outputs, processes = [], []
        for rank, host in enumerate(group):
            output = stack.enter_context(open(Path(directory) / f"rank{rank}", "w+b"))
            env = {
                **os.environ,
                **ALLOCATOR,
                "OMP_NUM_THREADS": str(threads),
                "GLOO_SOCKET_IFNAME": host.interface,
                "NUMBA_CACHE_DIR": str(WORK / "numba"),
            }
            process = host.popen(
                [sys.executable, str(ENGINE), str(file), str(rank)],
                env=env,
                cwd=CHECKOUT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.kill)
            outputs.append(output)
            processes.append(process)
        _await(processes)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
        if any(process.poll() != 0 for process in processes):
            raise RuntimeError("\n".join(text[-3000:] for text in texts))
        return [json.loads(text.strip().splitlines()[-1]) for text in texts]


def _await(processes: list[Any]) -> None:
    """Wait for all to end, or for one to fail."""
    deadline = time.monotonic() + _DEADLINE
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        if time.monotonic() > deadline:
            return
        time.sleep(0.2)


def engine(scale: str, partition: Path, group: list[Host], **options: Any) -> Figures:
    replicated = options.pop("replicated", True)
    ranks = run_engine(
        job(scale, **options),
        partition,
        group,
        replicated=replicated,
        steps=STEPS[scale],
        warmup=WARMUP[scale],
    )
    ms = {name: statistics.mean(r["ms"][name] for r in ranks) for name in ranks[0]["ms"]}
    return Figures(ranks[0]["seeds_per_second"], ms, {"ranks": ranks})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=GRAPHS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--rounds", type=int, help="of each, in turn (3; small: 1)")
    parser.add_argument("--only", action="append", metavar="NAME,…", help="leave out the others")
    given = parser.parse_args()
    scale = given.scale
    rounds = given.rounds or (3 if scale == "full" else 1)
    if reason := missing():
        print(f"not run: {reason}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    config = load_config(job(scale))
    partition = ensure_partition(config, 2).directory
    only = [name for names in given.only or () for name in names.split(",")]
    missed = 0
    if not only or set(only) & set(DRAWS):
        whole = with_edge_data(config, WORK / f"edge-data-{scale}-1", 1)
        missed = report_draws(measure(whole, config, rounds))
        if only and set(only) <= set(DRAWS):
            return 1 if missed and scale == "full" else 0
    edge_data = with_edge_data(config, WORK / f"edge-data-{scale}-2", 2).directory
    attention = {"kind": "gatv2", "hidden": 64, "heads": 4}
    eight = {"edge_features": "eight"}

    half = {"precision": "bf16"}
    runs: dict[str, Callable[[list[Host]], Figures]] = {
        "DistDGL": lambda group: _peer(run_distdgl(partition, group, STEPS[scale])),
        "raygnn, replicated": lambda group: engine(scale, partition, group),
        "raygnn, partitioned": lambda g: engine(scale, partition, g, replicated=False),
        "raygnn, replicated, bf16": lambda g: engine(scale, partition, g, **half),
        "raygnn, replicated, a tenth cached": lambda g: engine(
            scale, partition, g, sampling={"cache": 0.1}
        ),
        "raygnn, replicated, nothing cached": lambda g: engine(
            scale, partition, g, sampling={"cache": 0}
        ),
        "raygnn, partitioned, nothing cached": lambda g: engine(
            scale, partition, g, replicated=False, sampling={"cache": 0}
        ),
        "DGL DataLoader, one process": lambda g: _peer(
            run_dgl_loader(partition, STEPS[scale], threads=2)
        ),
        "sage": lambda g: engine(scale, edge_data, g),
        "sage, edges": lambda g: engine(scale, edge_data, g, model=eight),
        "gatv2": lambda g: engine(scale, edge_data, g, model=attention),
        "gatv2, edges": lambda g: engine(scale, edge_data, g, model={**attention, **eight}),
    }
    if only:
        runs = {name: run for name, run in runs.items() if any(o in name for o in only)}
    found: dict[str, list[Figures]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            with hosts(2, share=[CHECKOUT]) as group:
                found[name].append(run(group))
            figures = found[name][-1]
            print(
                f"round {number + 1}: {name}: {figures.seeds_per_second:,.0f} seeds/s; {load()}",
                flush=True,
            )
    return 1 if report(scale, found) or (missed and scale == "full") else 0


def _peer(result: Any) -> Figures:
    return Figures(result.seeds_per_second, result.milliseconds, {})


WANTED = (
    ("raygnn, replicated", "DistDGL", 3.2),
    ("raygnn, partitioned", "DistDGL", 2.8),
    ("raygnn, replicated, bf16", "DistDGL", 5.0),
    ("raygnn, replicated, a tenth cached", "DistDGL", 1.0),
    ("raygnn, replicated, nothing cached", "DistDGL", 1.0),
    ("raygnn, partitioned, nothing cached", "DistDGL", 1.0),
    ("raygnn, replicated", "DGL DataLoader, one process", 3.0),
    ("sage, edges", "sage", 1 / 1.3),
    ("gatv2, edges", "gatv2", 1 / 1.3),
)


def report(scale: str, found: dict[str, list[Figures]]) -> int:
    """Print medians, splits and ratios; 1 if a ratio is missed."""
    medians = {
        name: statistics.median(f.seeds_per_second for f in runs) for name, runs in found.items()
    }
    parts = ["sample", "features", "compute", "wait"]
    rows = []
    for name, runs in found.items():
        split = [statistics.median(f.ms.get(part, 0.0) for f in runs) for part in parts]
        low, high = (f(r.seeds_per_second for r in runs) for f in (min, max))
        rows.append([name, f"{medians[name]:,.0f}", f"{low:,.0f}–{high:,.0f}"])
        rows[-1] += [f"{value:.1f}" for value in split]
        limits = [r["dense_ms"] / r["ms_per_step"] for f in runs for r in f.detail.get("ranks", ())]
        rows[-1].append(f"{statistics.median(limits):.0%}" if limits else "")
    header = ["", "seeds/s, all workers", "range", *(f"{part}, ms" for part in parts)]
    header.append("of the dense limit")
    print("\n" + table(header, rows))
    for name, runs in found.items():
        for rank in runs[-1].detail.get("ranks", [])[:1]:
            memory = rank["memory"]
            print(
                f"\n{name}: a step of one worker sends {rank['sent_bytes'] / 1e6:.2f} MB, needs "
                f"{rank['remote_rows']:,.0f} remote rows, {rank['cache_hits']:,.0f} of them "
                f"cached; {rank['cpu_ms_per_step']:.1f} ms of CPU; memory {memory['private']:.2f} "
                f"GB of its own, {memory['mapped']:.2f} GB mapped; ready in "
                f"{rank['ready_seconds']:.1f} s; loss {rank['loss']:.3f}"
            )
    missed = 0
    rows = []
    for name, peer, wanted in WANTED:
        if name in medians and peer in medians:
            ratio = medians[name] / medians[peer]
            rows.append([f"{name} / {peer}", f"{ratio:.2f}", f"{wanted:.3g}"])
            missed += ratio < wanted
    print("\n" + table(["seeds/s", "ratio", "wanted"], rows))
    return 1 if missed and scale == "full" else 0


if __name__ == "__main__":
    sys.exit(main())
