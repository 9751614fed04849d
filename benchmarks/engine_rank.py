"""One rank of the engine alone: batches, model, gradients; no Ray, no Lightning, no metrics.

Started by the benchmarks, one process per rank, with a JSON file of settings; prints one JSON
line. What it runs is what a job runs: the same data plane, model and loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from raygnn.config.load import load_config
from raygnn.graph.partition.layout import read_meta
from raygnn.preflight.partition_facts import edges_of, partition_facts, task_ntype
from raygnn.sampling.exchange import World
from raygnn.sampling.loader import Prefetcher
from raygnn.tasks.optimizer import make_optimizer
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, TaskTarget
from raygnn.worker.planes import open_plane
from raygnn.worker.planes.plane import Plane

TIMEOUT = timedelta(minutes=5)


def run(settings: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train ``warmup + steps`` steps; figures are of the last ``steps``."""
    config = load_config(settings["config"])
    size, steps, warmup = settings["world"], settings["steps"], settings["warmup"]
    torch.set_num_threads(settings["threads"])
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{settings['master']}",
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
    world = World(rank, size)
    partition = Path(settings["partition"])
    facts = partition_facts(config, read_meta(partition))
    edges: Any = edges_of(config, facts)
    job = Job(
        config=config,
        partition=partition,
        run_dir=partition,
        goals={"": TaskTarget(task_ntype(config, facts.columns), edges)},
        replicated=settings["replicated"],
        started=time.time(),
        global_batch=config.sampling.batch_size * size,
    )
    begin = time.perf_counter()
    ranks = Ranks.join(config, world, torch.device("cpu"))
    data = ranks.data
    plane = open_plane(job, ranks)
    module = plane.task()
    batches: Any = plane.batches(module)
    if size > 1:
        module.model = DistributedDataParallel(module.model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(dict(module.named_parameters()), config.train, module.planned, True)
    ready = time.perf_counter() - begin

    per_epoch = batches.plan.steps_per_epoch
    total = {"sample": 0.0, "features": 0.0, "compute": 0.0, "wait": 0.0}
    seeds, sent, losses = 0, 0, []
    rounds: dict[str, float] = {}
    remote = hits = 0
    mark = start = cpu = 0.0
    collectives = _counted("all_to_all_single", "all_reduce")
    prefetch = config.sampling.prefetch
    # as many are begun after the last step that counts as were ready before the first
    numbers = range(warmup + steps + prefetch + 1)
    made = Prefetcher(
        lambda n: batches(*divmod(n, per_epoch)), numbers, prefetch, waited=lambda: data.seconds
    )
    for batch in made:
        number = batch.epoch * per_epoch + batch.step
        if number == warmup + steps:
            break
        if number == warmup:
            sent, remote, hits = data.sent_bytes, batches.store.remote, batches.store.hits
            rounds = dict(collectives)
            if size > 1:
                dist.barrier()
            mark = start = time.perf_counter()
            cpu = time.process_time()
        got = time.perf_counter()
        optimizer.zero_grad()
        loss = module.training_step(batch, number)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        now = time.perf_counter()
        if number >= warmup:
            seeds += batch.total
            total["wait"] += got - mark
            total["compute"] += now - got
            for name, value in batch.seconds.items():  # the exchange is that of features, mostly
                total["features" if name == "exchange" else name] += value
        mark = now
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    rounds = {name: (collectives[name] - before) / steps for name, before in rounds.items()}
    dense = dense_limit(lambda: module.training_step(batch, number).backward(), size)
    module.model = getattr(module.model, "module", module.model)
    result = {
        "epoch_seconds": per_epoch * seconds / steps,
        "evaluations": [_evaluate(plane, module) for _ in range(settings.get("evaluations", 0))],
        "seeds_per_second": seeds / seconds,
        "ms": {name: 1e3 * value / steps for name, value in total.items()},
        "ms_per_step": 1e3 * seconds / steps,
        "cpu_ms_per_step": 1e3 * cpu / steps,
        "dense_ms": dense,
        "steps": steps,
        "ready_seconds": ready,
        # this rank's, a step
        "sent_bytes": (data.sent_bytes - sent) / steps,
        "remote_rows": (batches.store.remote - remote) / steps,
        "cache_hits": (batches.store.hits - hits) / steps,
        "collectives": rounds,
        "row_bytes": {t: batches.store.row_bytes(t) for t in batches.store.ntypes},
        "loss": losses[-1],
        "memory": memory(),
    }
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


class Products(TorchDispatchMode):
    """Keeps the operands of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[torch.Tensor, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.operands.append(args[-2:])
        return func(*args, **kwargs or {})


def dense_limit(step: Callable[[], object], size: int, repeats: int = 20) -> float:
    """Return the milliseconds that a step's matrix products take alone, on all ranks at once."""
    with Products() as products:
        step()
    if size > 1:
        dist.barrier()
    begin = time.perf_counter()
    with torch.no_grad():
        for _ in range(repeats):
            for one, other in products.operands:
                torch.mm(one, other)
    return 1e3 * (time.perf_counter() - begin) / repeats


def _counted(*names: str) -> dict[str, float]:
    """Count the calls of functions of torch.distributed from now on, by name; DDP's own exchange of
    gradients is none of them."""
    counts = dict.fromkeys(names, 0.0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return call

    for name in names:
        setattr(dist, name, counting(name, getattr(dist, name)))
    return counts


def _evaluate(plane: Plane, module: Any) -> dict[str, float]:
    """The metrics of the validation nodes, and the seconds that all ranks took."""
    if plane.ranks.world.size > 1:
        dist.barrier()
    begin = time.perf_counter()
    metrics = plane.evaluate(module, "val")
    return {**metrics, "seconds": time.perf_counter() - begin}


def memory() -> dict[str, float]:
    """GB of this process: ``private`` is its own (written or anonymous), ``mapped`` is pages of
    files that it has only read, which its neighbours share; ``proportional`` is its part of all
    that it has in memory, ``shared`` what of that is memory that ranks share."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        found[name.rstrip(":")] = int(value)
    anonymous = max(found["Anonymous"], found["Private_Dirty"])
    return {
        "private": anonymous / 1e6,
        "mapped": (found["Rss"] - anonymous) / 1e6,
        "proportional": found["Pss"] / 1e6,
        "shared": found["Pss_Shmem"] / 1e6,
    }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    result = run(settings, int(sys.argv[2]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # whatever threads are left have nothing more to do


if __name__ == "__main__":
    main()
