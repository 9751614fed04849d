"""The gradient of a step is that of the mean over its seeds, however ranks share them.

In float64, so that a seed more or less, a weight or a factor cannot hide in rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raygnn.config.execution import PRECISIONS, Precision
from raygnn.config.schema import Config, TrainConfig
from raygnn.sampling.batch import Share
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.loader import BatchMaker
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.losses import class_entropy
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job
from raygnn.worker.planes import open_plane
from raygnn.worker.planes.plane import Plane
from tests.support.graphs import ensure_collection
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, goals_of, train_on_ranks
from tests.worker.test_edge_tasks import LINKS, config_of
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import make as graph_job

Deal = tuple[int, int, int, int]  # global batch, batches that accumulate, seed, epoch
Gradient = dict[str, Tensor]

_rng = np.random.default_rng(0)
DEALS: list[Deal] = [
    (1, 1, 0, 0),  # all ranks but one have nothing but padding
    (1, 3, 0, 0),
    (10**6, 1, 0, 0),  # the whole epoch is one batch
    *(
        tuple(map(int, (_rng.integers(2, 14), _rng.integers(1, 4), _rng.integers(9), epoch)))
        for epoch in range(4)
    ),
]


class _Step(nn.Module):
    """A training step as what DDP wraps, as in Lightning's strategy."""

    def __init__(self, task: TaskModule):
        super().__init__()
        self.task = task

    def forward(self, batch: Share) -> Tensor:
        return self.task.training_step(batch, 0)


def _open(exchange: Exchange, job: Job) -> tuple[Plane, TaskModule]:
    """Open a plane and a task that compute in float64, losses included, in a separate process."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    PRECISIONS["fp32"] = Precision("float64", "32-true")
    plane = open_plane(job, Ranks.join(job.config, exchange.world, torch.device("cpu")))
    return plane, plane.task()


def _windows(plane: Plane, task: TaskModule, deal: Deal) -> Iterator[list[Share]]:
    """Return the batches of an epoch's first and last optimizer steps; the last may be short."""
    batch, accumulate, seed, epoch = deal
    maker: Any = plane.batches(task)
    one = maker.seeds if isinstance(maker, BatchMaker) else maker
    size = min(batch, one.plan.num_seeds)
    one = replace(one, plan=replace(one.plan, global_batch=size, seed=seed, accumulate=accumulate))
    maker = replace(maker, seeds=one) if isinstance(maker, BatchMaker) else one
    for first in dict.fromkeys((0, maker.plan.steps_per_epoch - 1)):
        yield [maker(epoch, step) for step in maker.plan.window(first)]


def _of(task: TaskModule) -> Gradient:
    found = {n: p.grad.clone() for n, p in task.model.named_parameters() if p.grad is not None}
    task.zero_grad()
    return found


def expected(exchange: Exchange, job: Job) -> list[Gradient]:
    """Compute gradients of the plain mean over each step's seeds, in one process."""
    plane, task = _open(exchange, job)
    gradients = []
    for deal in DEALS:
        for window in _windows(plane, task, deal):
            torch.cat([task.losses(batch) for batch in window]).mean().backward()
            gradients.append(_of(task))
    return gradients


def reduced(exchange: Exchange, job: Job) -> list[Gradient]:
    """Compute gradients of a rank's loss after DDP's reduction, scaled as by Lightning."""
    plane, task = _open(exchange, job)
    step: nn.Module = _Step(task)
    if exchange.world.size > 1:
        step = DistributedDataParallel(step)
    gradients = []
    for deal in DEALS:
        accumulate = deal[1]
        task.config = job.config.train.model_copy(update={"accumulate": accumulate})
        for window in _windows(plane, task, deal):
            for batch in window:
                last = batch is window[-1] or exchange.world.size == 1
                with contextlib.nullcontext() if last else step.no_sync():
                    (step(batch) / accumulate).backward()
            gradients.append(_of(task))
    return gradients


def job_of(config: Config, replicated: bool = True) -> Job:
    place = config.partition.path
    if config.task.of_graphs:
        place = ensure_collection(config).directory
    return Job(config, place, config.run_dir, goals_of(config, place), replicated, 0.0, 8)


def nodes(tmp_path: Path) -> Config:
    task = {"kind": "node_regression", "ntype": "thing", "target": "price"}
    return config_of(tmp_path, "nodes", parts=3, task=task, **MODEL)


def edges(tmp_path: Path) -> Config:
    task = {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"}
    return config_of(tmp_path, "edges", parts=3, task=task, **MODEL)


def links(tmp_path: Path) -> Config:
    task = {**LINKS, "negatives": {"number": 20}, "loss": "bce"}
    return config_of(tmp_path, "links", parts=3, task=task, **MODEL)


def graphs(tmp_path: Path) -> Config:
    return graph_job(tmp_path, graph=dataset(num=40))


GRAPHS = pytest.param(graphs, marks=pytest.mark.dgl)
MODEL: dict[str, Any] = {"model": {"hidden": 8}, "sampling": {"fanout": [4, 3]}}


@pytest.mark.long
@pytest.mark.parametrize("make", [nodes, edges, links, GRAPHS])
def test_any_ranks_have_the_gradient_of_the_mean_over_all_seeds(make: Any, tmp_path: Path) -> None:
    """Partitions are of unequal size or empty, and shares do not divide evenly."""
    config = make(tmp_path)
    (wanted,) = run_ranks(1, expected, job_of(config), fresh=True)
    assert len(wanted) > len(DEALS)
    for workers in (1, 3, 4) if make is nodes else (3,):
        for replicated in (True, False) if workers == 3 and make is not graphs else (True,):
            for gradients in run_ranks(workers, reduced, job_of(config, replicated), fresh=True):
                assert len(gradients) == len(wanted)
                for own, right in zip(gradients, wanted):
                    assert own.keys() == right.keys()
                    for name, values in right.items():
                        assert values.dtype == torch.float64
                        assert torch.allclose(own[name], values, rtol=0, atol=1e-10), name


@pytest.mark.long
@pytest.mark.parametrize("comm", [{}, {"overlap": False}])
def test_a_run_on_any_ranks_makes_the_same_steps_of_sgd(
    comm: dict[str, Any], make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD, unlike Adam, shows the scale of a gradient; each way of reducing is tested in a complete
    run."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setitem(PRECISIONS, "fp32", Precision("float64", "32-true"))
    weights = []
    for workers, batch in ((1, 126), (3, 42)):
        config = make_job(
            name=f"{workers}",
            sampling={"batch_size": batch},
            train={"optimizer": "sgd", "lr": 0.3, "accumulate": 3, "epochs": 1},
            cluster={"workers": workers},
            comm=comm,
        )
        run = train_on_ranks(config)
        assert run.summary["steps"] == 2  # 400 seeds: 378 and 22
        weights.append(torch.load(run.path / "checkpoints" / "selected.pt", weights_only=True))
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            assert torch.allclose(tensor, other[name], rtol=0, atol=1e-10), name


def test_dropout_is_a_function_of_seed_epoch_step_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be saved: a resumed run drops what it would have dropped."""

    def drawn(seed: int, epoch: int, step: int, rank: int) -> tuple[float, ...]:
        monkeypatch.setattr(TaskModule, "global_rank", rank)
        task = TaskModule(nn.Identity(), class_entropy, TrainConfig(seed=seed), 4, 3, 4.0)
        batch: Any = SimpleNamespace(epoch=epoch, step=step, seconds={}, window=1, total=1)
        task.on_train_batch_start(batch, 0)
        return tuple(torch.rand(3).tolist())

    keys = [(0, 1, 2, 3), (5, 1, 2, 3), (0, 5, 2, 3), (0, 1, 5, 3), (0, 1, 2, 0), (0, 2, 1, 3)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(*keys[0]) == drawn(*keys[0])
