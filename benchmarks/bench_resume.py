"""The first step after a resume at step 1,000,000, against step 0, and against skipping batches.

A planted graph, GraphSAGE, one worker without Ray. The epoch is virtual: 1.1 million batches of
1,000 seeds, numbered in the plan as if there were so many, each standing for one of the graph's.
A start is timed from a new loader, through the restoring of its state, to the end of its first
optimizer step; step 0 and step 1,000,000 take turns. The contrast is what Lightning does with a
loader that has no state: it fetches batches and drops them until the step is reached. That is
timed over some batches, with the same sampler and with DGL's DataLoader, and scaled up, since
the whole way takes hours.

    python benchmarks/bench_resume.py [--rounds 15] [--skip 200]

Exit code 1 if the start at step 1,000,000 takes more than 1.1 times that at step 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from machine import load, setting, table  # noqa: E402

from raygnn.config.load import load_config  # noqa: E402
from raygnn.graph.dgl import dgl  # noqa: E402
from raygnn.sampling.exchange import World  # noqa: E402
from raygnn.sampling.loader import BatchLoader, BatchMaker  # noqa: E402
from raygnn.sampling.plan import SeedPlan  # noqa: E402
from raygnn.sampling.seeds import TaskSeeds  # noqa: E402
from raygnn.tasks.lightning_modules import TaskModule  # noqa: E402
from raygnn.worker.comm.process_groups import Ranks  # noqa: E402
from raygnn.worker.job import Job, TaskTarget  # noqa: E402
from raygnn.worker.planes.node_plane import NodePlane  # noqa: E402
from tests.support.graphs import ensure_partition  # noqa: E402

LIMIT = 1.1
FAR = 1_000_000
BATCH = 1_000
FANOUT = [15, 10]


@dataclass(frozen=True)
class VirtualPlan(SeedPlan):
    """More seeds than there are: each number stands for one of the real ones."""

    real: int = 1

    def batch(self, epoch: int, step: int) -> np.ndarray:
        return np.unique(super().batch(epoch, step) % self.real)  # no seed twice in a batch


def prepare(directory: Path) -> tuple[BatchMaker, TaskModule, Any]:
    """The batches of the virtual epoch, the model, and the graph as DGL has it."""
    config = load_config(
        {
            "name": "resume",
            "storage": str(directory),
            "graph": {
                **{"format": "planted", "nodes": 100_000, "degree": 20, "features": 64},
                **{"classes": 10, "train": 0.5},
            },
            "partition": {"method": "random", "parts": 1},
            "model": {"kind": "sage", "hidden": 64, "layers": 2, "dropout": 0.0},
            "sampling": {"fanout": FANOUT, "batch_size": BATCH, "prefetch": 1},
            "staging": {"path": str(directory / "stage")},
        }
    )
    meta = ensure_partition(config, 1)
    job = Job(
        config=config,
        partition=meta.directory,
        run_dir=directory,
        goals={"": TaskTarget(meta.ntypes[0])},
        replicated=True,
        started=time.time(),
        global_batch=BATCH,
    )
    plane = NodePlane.open(job, Ranks.join(config, World(0, 1), torch.device("cpu")))
    task = plane.task()
    maker = plane.batches(task)
    assert isinstance(maker.seeds, TaskSeeds)
    plan = VirtualPlan(1100 * FAR, BATCH, real=maker.seeds.seeds.num)
    assert plan.steps_per_epoch > FAR
    graph = dgl().rand_graph(100_000, 2_000_000)
    graph.ndata["feat"] = torch.randn(100_000, 64)
    return replace(maker, seeds=replace(maker.seeds, plan=plan)), task, graph


def start(maker: BatchMaker, task: TaskModule, step: int) -> float:
    """Seconds from a new loader to the end of its first step."""
    saved = BatchLoader(maker, prefetch=1, limit=maker.plan.steps_per_epoch).state_dict()
    optimizer = torch.optim.Adam(task.parameters())
    begin = time.perf_counter()
    loader = BatchLoader(maker, prefetch=1, limit=maker.plan.steps_per_epoch)
    loader.load_state_dict({**saved, "step": step})
    batch = next(iter(loader))
    assert (batch.epoch, batch.step) == (0, step)
    task.training_step(batch, step).backward()
    optimizer.step()
    seconds = time.perf_counter() - begin
    loader.close()
    return seconds


def skip_ours(maker: BatchMaker, batches: int) -> float:
    """Seconds a batch, without the first ones."""
    loader = iter(BatchLoader(maker, prefetch=1, limit=maker.plan.steps_per_epoch))
    for _ in range(5):
        next(loader)
    begin = time.perf_counter()
    for _ in range(batches):
        next(loader)
    return (time.perf_counter() - begin) / batches


def skip_dgl(graph: Any, batches: int) -> float:
    """The same with DGL's loader."""
    sampler = dgl().dataloading.NeighborSampler(
        list(reversed(FANOUT)), prefetch_node_feats=["feat"]
    )
    loader = dgl().dataloading.DataLoader(
        graph, torch.arange(graph.num_nodes()), sampler, batch_size=BATCH, shuffle=True
    )
    fetched, begin = -5, 0.0
    while True:
        for _ in loader:
            if fetched == 0:
                begin = time.perf_counter()
            if fetched == batches:
                return (time.perf_counter() - begin) / batches
            fetched += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip", type=int, default=200, help="batches that are skipped")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = load()
    with tempfile.TemporaryDirectory() as directory:
        maker, task, graph = prepare(Path(directory))
        for step in (0, FAR):
            start(maker, task, step)  # compiles, warms up
        times: dict[int, list[float]] = {0: [], FAR: []}
        for _ in range(options.rounds):
            for step, found in times.items():
                found.append(start(maker, task, step))
        near, far = (statistics.median(found) for found in times.values())
        ours, dgls = skip_ours(maker, options.skip), skip_dgl(graph, options.skip)
    print(f"{setting()}; {before} before")
    print(f"- starts: median of {options.rounds}; skipping: {options.skip:,} batches\n")
    rows = [["step 0", f"{near * 1e3:.1f} ms", "1"]]
    rows.append([f"step {FAR:,}", f"{far * 1e3:.1f} ms", f"{far / near:.2f}"])
    for name, each in (("skipping our batches", ours), ("skipping DGL's batches", dgls)):
        total = each * FAR
        rows.append(
            [f"{name} ({each * 1e3:.1f} ms each)", f"{total / 3600:.1f} h", f"{total / near:,.0f}"]
        )
    print(table(["first step of a start at", "takes", "× step 0"], rows))
    return int(far > LIMIT * near)


if __name__ == "__main__":
    sys.exit(main())
