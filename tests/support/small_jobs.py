"""Jobs on small graphs: on real ranks without Ray, which start at once, and on a real Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from raygnn.checkpoint import learned_rows, lifecycle
from raygnn.config.load import load_config
from raygnn.config.rules import fixed
from raygnn.config.schema import Config
from raygnn.driver import job_plan
from raygnn.driver.inputs import PartitionInput
from raygnn.driver.resume import find_start, initial_weights
from raygnn.graph.data import EdgeTarget
from raygnn.graph.partition.layout import read_meta
from raygnn.preflight.partition_facts import edge_target, partition_facts
from raygnn.runs import trust
from raygnn.runs.display import NullDisplay
from raygnn.runs.run import Run
from raygnn.runs.run_directory import RunDir, read_config
from raygnn.sampling.exchange import Exchange
from raygnn.storage.remote import AnyPath
from raygnn.worker.job import Job, TaskTarget
from raygnn.worker.rank import Rank
from raygnn.worker.rank_setup import Runtime
from tests.support.graphs import ensure_collection, ensure_partition
from tests.support.ranks import run_ranks

JobFactory = Callable[..., Config]

# Where forked ranks train: RAYGNN_TEST_DEVICE=cuda:0 where there is a GPU.
DEVICE = torch.device(os.environ.get("RAYGNN_TEST_DEVICE", "cpu"))


def job(storage: Path, **sections: Any) -> dict[str, Any]:
    """Return a small job on a planted graph; sections are merged into it."""
    base: dict[str, Any] = {
        "name": "test",
        "storage": str(storage),
        "graph": {
            "format": "planted",
            "nodes": 2000,
            "degree": 10,
            "classes": 4,
            "features": 16,
            "train": 0.2,
            "val": 0.1,
            "noise": 3.0,
        },
        "model": {"kind": "sage", "hidden": 16, "layers": 2, "dropout": 0.0},
        "sampling": {"fanout": [5, 5], "batch_size": 64},
        "staging": {"path": str(storage / "stage")},
        "train": {"epochs": 2, "lr": 0.01, "log_every": 1},
        # a machine that tests keep busy needs more than the default's 5 s
        "cluster": {"workers": 2, "num_cpus": 4, "probe_timeout": "1m"},
        "fault": {"max_failures": 0},
        "logging": {"loggers": []},
    }
    if ":" in sections.get("model", {}).get("kind", ""):  # a user's class receives only its args
        base["model"] = {"layers": 2}
    for section, values in sections.items():
        if isinstance(values, dict) and section in base:
            base[section] = {**base[section], **values}
        else:
            base[section] = values
    return base


def slow_but(fast: str | tuple[str, ...], every: Iterable[str]) -> list[Any]:
    """Mark all parameters of a test as slow, except for one or some."""
    fast = (fast,) if isinstance(fast, str) else fast
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in fast)) for each in every]


def about(config: Config, data: str = "d") -> dict[str, Any]:
    """Return a checkpoint's record of its run: two ranks with 64 seeds each."""
    return {
        "config": fixed(config.to_dict()),
        "data": data,
        "global_batch": 128,
        "batch_size": 64,
        "workers": 2,
    }


def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until a condition holds that another process or thread fulfils."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_step(metrics: Path, step: int, process: subprocess.Popen[Any]) -> None:
    """Wait until a command has written a step's record; it must not end before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} did not come")


@pytest.fixture
def make_job(tmp_path: Path) -> JobFactory:
    def make(**sections: Any) -> Config:
        return load_config(job(tmp_path, **sections))

    return make


class _OneRay:
    """A Ray that several tests share, stopped for tests that need none or their own."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        self._is_there = False

    def start(self) -> None:
        """Start one with four CPUs, more than the machine may have: ranks mostly wait."""
        from raygnn.driver.ray_cluster import RayCluster

        if not self._is_there:
            config = load_config(job(Path(), cluster={"num_cpus": 4}))
            self._running.enter_context(RayCluster(config)).wait()
            self._is_there = True

    def stop(self) -> None:
        self._running.close()
        self._is_there = False


@pytest.fixture(scope="session")
def one_ray() -> Iterator[_OneRay]:
    ray = _OneRay()
    yield ray
    ray.stop()


@pytest.fixture
def shared_ray(one_ray: _OneRay) -> None:
    """Connect this process to a Ray."""
    one_ray.start()


@pytest.fixture(scope="module")
def no_ray(one_ray: _OneRay) -> None:
    """Disconnect this process from any Ray of earlier tests."""
    one_ray.stop()


class _Environment(LightningEnvironment):
    """Ranks as they are, whatever the machine's variables say."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        self._rank, self._size = rank, size

    creates_processes_externally = True  # type: ignore[assignment]

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size


class _Strategy(DDPStrategy):
    root_device = DEVICE  # type: ignore[assignment]


def runtime(exchange: Exchange) -> Runtime:
    """Return the runtime of a forked rank, as Ray Train would set it."""
    world = exchange.world
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    return Runtime(
        world=world,
        device=DEVICE,
        strategy=_Strategy,
        environment=_Environment(world.rank, world.size),
        send_files=lambda: None,
    )


def losses(run: Run) -> np.ndarray:
    """Return the training loss of each record."""
    return run.metrics["train/loss"].dropna().to_numpy()


def selected(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights that a run has selected."""
    weights: dict[str, torch.Tensor] = torch.load(run.path / "checkpoints" / "selected.pt")
    return weights


def _train(exchange: Exchange, job: Job) -> dict[str, Any]:
    lifecycle._APART = learned_rows._APART = 0.005  # the files of these jobs are small
    return Rank(job, runtime(exchange)).run()


def _data(config: Config, workers: int) -> AnyPath:
    """Return the location of the data."""
    if config.task.of_graphs:
        return ensure_collection(config).directory
    return ensure_partition(config, workers).directory


def edges_of(config: Config, place: AnyPath | None) -> EdgeTarget | None:
    """Return the edges that a task predicts, resolved as by the driver."""
    if not config.task.of_edges:
        return None
    assert place is not None
    facts = partition_facts(config, read_meta(place))
    target = edge_target(config, facts.edges, facts.reverses)
    assert isinstance(target, EdgeTarget), target
    return target


def goals_of(config: Config, place: AnyPath | None) -> dict[str, TaskTarget]:
    """Return the target of each task, resolved as by the driver."""
    if config.task.of_graphs:
        return {"": TaskTarget()}
    assert place is not None
    return job_plan.goals_of(config, partition_facts(config, read_meta(place)))


def lists_of(config: Config, place: AnyPath | None) -> dict[str, Any]:
    """Return the negatives and training tables that files list, as the driver reads them."""
    if place is None or config.task.of_graphs:
        return {}
    given, found = PartitionInput(read_meta(place), None), {}
    for name, one in config.by_task.items():
        if lists := given.lists(one, name, edges_of(one, place)):
            found[name] = lists
    return found


def job_of(config: Config, **more: Any) -> Job:
    """Build the job that the driver would pass to the ranks, and its directories."""
    workers = config.cluster.workers
    assert isinstance(workers, int)
    place = _data(config, workers)
    for name in ("logs", "checkpoints"):
        (config.run_dir / name).mkdir(parents=True, exist_ok=True)
    batch = config.sampling.batch_size * workers
    made = Job(config, place, config.run_dir, goals_of(config, place), True, 0.0, batch)
    return replace(made, **{"lists": lists_of(config, place), **more})


def train_on_ranks(config: Config, *, replicated: bool = True, resume: bool = False) -> Run:
    """Train as `raygnn.train` does, with forked ranks in place of Ray's workers."""
    workers = config.cluster.workers
    assert isinstance(workers, int)
    place = _data(config, workers)
    with RunDir(config.storage, config.name, mode="resume" if resume else "new") as run:
        start = find_start(config, run, workers, NullDisplay(), resume=resume)
        run.begin(config.to_dict())
        trust.record(read_config(run.path))
        job = Job(
            config,
            place,
            run.path,
            goals_of(config, place),
            replicated,
            time.time(),
            start.global_batch,
            lists=lists_of(config, place),
            initial=initial_weights(config, start),
        )
        result, *others = run_ranks(workers, _train, job)
        for other in others:
            np.testing.assert_equal(other["metrics"], result["metrics"])  # also where they are NaN
        run.update_summary(status="done", **result)
    return Run(run.path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of a job of one epoch."""
    storage = tmp_path_factory.mktemp("trained")
    return train_on_ranks(load_config(job(storage, train={"epochs": 1})))
