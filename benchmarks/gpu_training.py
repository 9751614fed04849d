"""Trainings through the worker's own code on one GPU, for `gpu.py`: ranks in processes of their
own, over gloo, without Ray; on a CPU the GPU's kernels run by Triton's interpreter."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.resume import find_start
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.make import find_partition
from raygnn.graph.sources import load_graph
from raygnn.runs.display import NullDisplay
from raygnn.runs.run import Run
from raygnn.runs.run_directory import RunDir
from raygnn.sampling.exchange import World
from raygnn.sampling.loader import SideStream
from raygnn.worker.job import Job
from raygnn.worker.planes import device_path
from raygnn.worker.rank import Rank
from raygnn.worker.rank_setup import Runtime

CORA = Path(os.environ.get("RAYGNN_DATA", "build/parcel")) / "cora.dgl"
PLANTED: dict[str, Any] = {"format": "planted", "val": 0.1}
GRAPHS: dict[str, dict[str, Any]] = {
    "planted": {**PLANTED, "nodes": 2708, "degree": 4, "classes": 7, "features": 100, "train": 0.3},
    "typed": {
        **PLANTED,
        "nodes": 4000,
        "degree": 6,
        "classes": 7,
        "features": 32,
        "train": 0.3,
        "typed": True,
    },
}
if CORA.exists():
    GRAPHS["cora"] = {"format": "dgl", "path": str(CORA), "normalize": "row"}
STEPS = 8
_LONGEST = 120  # seconds of one training on a GPU
_ORDER = "does not have a deterministic implementation"


class _Environment(LightningEnvironment):
    creates_processes_externally = True  # type: ignore[assignment]

    def __init__(self, rank: int, size: int):
        super().__init__()
        self._rank, self._size = rank, size

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size


def config_of(
    storage: Path, name: str, graph: str, workers: int, steps: int, **more: Any
) -> Config:
    sections: dict[str, Any] = {
        "name": name,
        "storage": str(storage),
        "graph": GRAPHS[graph],
        "partition": {"method": "random"},
        "model": {"kind": "sage", "hidden": 32, "layers": 2, "dropout": 0.0},
        "sampling": {"fanout": [5, 5], "batch_size": 64},
        "staging": {"path": str(storage / "stage")},
        "train": {"epochs": 4, "max_steps": steps, "log_every": 1},
        "cluster": {"workers": workers},
        "logging": {"loggers": []},
    }
    for section, values in more.items():
        merged = isinstance(values, dict)
        sections[section] = {**sections.get(section, {}), **values} if merged else values
    return load_config(sections)


def _rank(rank: int, job: Job, size: int, device: torch.device, store: str, how: str) -> None:
    """``how``: "exact" has torch's deterministic algorithms on; "steps" leaves evaluation out."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(how == "exact", warn_only=True)
    if how == "steps":
        Rank._evaluate = lambda *_: {}  # type: ignore[method-assign]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_sync_debug_mode("warn")
    else:  # the same code, by the interpreter
        device_path._free = lambda device: 1 << 40
        Rank._side = lambda self: SideStream(device, torch.cpu)  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    strategy = type("Strategy", (DDPStrategy,), {"root_device": device})
    environment = _Environment(rank, size)
    runtime = Runtime(World(rank, size), device, strategy, environment, nullcontext)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = Rank(job, runtime).run()
    said = (w for w in caught if "synchroniz" in str(w.message))
    waits = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in said)
    unordered = {str(w.message).split()[0] for w in caught if _ORDER in str(w.message)}
    if rank == 0:
        torch.save(
            {**result, "waits": dict(waits.most_common(30)), "unordered": sorted(unordered)},
            Path(store).with_name("result"),
        )
    dist.destroy_process_group()


def _spawn(given: tuple[Any, ...], workers: int, seconds: float) -> None:
    """Ranks, in processes that do not outlive this call, whatever ends it."""
    context = mp.spawn(_rank, given, nprocs=workers, join=False)
    end = time.monotonic() + seconds
    try:
        while not context.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise TimeoutError(f"a training was not through after {seconds} s")
    finally:
        for process in context.processes:
            process.kill()


def train(
    config: Config, device: torch.device, how: str = "", *, resume: bool = False
) -> dict[str, Any]:
    """The result of rank 0, the losses of all steps and the weights; ``how``: see `_rank`."""
    workers = config.cluster.workers
    assert isinstance(workers, int)
    meta = find_partition(config, workers)
    if not isinstance(meta, PartitionMeta):
        meta = make_partition(meta, load_graph(meta.graph, needs_masks=True, trains=True))
    ntype = "item" if "item" in meta.ntypes else meta.ntypes[0]
    begin, mode = time.perf_counter(), "resume" if resume else "new"
    with (
        RunDir.create(config.storage, config.name, mode=mode) as run,
        tempfile.TemporaryDirectory() as directory,
    ):
        start = find_start(config, run, workers, NullDisplay(), resume=resume)
        run.begin(config.to_dict())
        job = Job(config, meta.directory, run.path, ntype, True, time.time(), start.global_batch)
        given = replace(job), workers, device, f"{directory}/store", how
        _spawn(given, workers, _LONGEST if device.type == "cuda" else 10 * _LONGEST)
        result = torch.load(f"{directory}/result", weights_only=False)
    losses = Run(run.path).metrics["train/loss"].dropna().tolist()
    weights = torch.load(run.path / "checkpoints" / "selected.pt")
    seconds = time.perf_counter() - begin
    return {"result": result, "losses": losses, "weights": weights, "seconds": seconds}


def trainings(device: torch.device, seconds: float) -> dict[str, Any]:
    """Losses beside the CPU's, where the host waits for the GPU, and whether a resume is exact; in
    place of a GPU, where this is to show that it runs, of the typed graph alone. What would begin
    after ``seconds`` is left out, and what fails does not keep the rest from being tried."""
    cases = [(graph, workers) for graph in GRAPHS for workers in (1, 2)]
    cases = cases if device.type == "cuda" else [("typed", 1)]
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            f"{graph}-{workers}": partial(_beside_cpu, Path(directory), graph, workers, device)
            for graph, workers in cases
        }
        parts["resume"] = partial(_resumed, Path(directory), *cases[0], device)
        for name, make in parts.items():
            if time.perf_counter() - begin > seconds:
                found[name] = {"left_out": True}
                continue
            try:
                found[name] = make()
            except Exception as error:
                traceback.print_exc()
                found[name] = {"error": repr(error)}
    return found


def _beside_cpu(directory: Path, graph: str, workers: int, device: torch.device) -> dict[str, Any]:
    name, cpu = f"{graph}-{workers}", {"sampling": {"sample_on": "cpu", "features_on": "cpu"}}
    plain, other = (
        train(config_of(directory, f"{name}-{way}", graph, workers, STEPS, **more), at)
        for way, more, at in (("cpu", cpu, torch.device("cpu")), ("gpu", {}, device))
    )
    gaps = [abs(a - b) for a, b in zip(plain["losses"], other["losses"], strict=True)]
    return {
        "losses": other["losses"],
        "largest_gap_from_cpu": max(gaps),
        "waits": other["result"]["waits"],
        "seconds": other["seconds"],
    }


def _resumed(directory: Path, graph: str, workers: int, device: torch.device) -> dict[str, Any]:
    whole = train(config_of(directory, "whole", graph, workers, STEPS), device, "exact")
    half = config_of(directory, "resumed", graph, workers, STEPS // 2)
    train(half, device, "exact")
    longer = config_of(directory, "resumed", graph, workers, STEPS)
    rest = train(longer, device, "exact", resume=True)
    pairs = [(whole["weights"][n], rest["weights"][n]) for n in whole["weights"]]
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    return {
        "exact": all(torch.equal(a, b) for a, b in tensors),
        "largest_gap": max(float((a.double() - b.double()).abs().max()) for a, b in tensors),
        "losses": rest["losses"] == whole["losses"],
        "unordered": whole["result"]["unordered"],
    }


def large(
    device: torch.device, nodes: int, steps: int, hidden: int, fanout: tuple[int, ...], batch: int
) -> dict[str, Any]:
    """Speed of the worker's own code on the planted graph, one rank, partitioned before; without
    evaluation. ``seconds``: of all, and of the parts of its steps."""
    GRAPHS["large"] = {"format": "planted", "val": 0.0, "nodes": nodes}
    with tempfile.TemporaryDirectory() as directory:
        config = config_of(
            Path(directory),
            "large",
            "large",
            1,
            steps,
            model={"hidden": hidden},
            sampling={"fanout": list(fanout), "batch_size": batch},
            train={"log_every": max(1, steps // 2), "epochs": 1000},
        )
        found = train(config, device, "steps")
    result = found["result"]
    return {
        "seeds_per_second": result["seeds_per_second"],
        "seconds": {"all": found["seconds"], **result["seconds"]},
        "waits": result["waits"],
    }
