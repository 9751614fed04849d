"""A rank's data plane: what a task needs of the data, be its seeds nodes, edges or graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from raygnn.config.schema import Config
from raygnn.config.task import ClassTask
from raygnn.graph.dgl import dgl
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import Shard, load_shard
from raygnn.models.user import construct, load_class
from raygnn.sampling.loader import Maker
from raygnn.sampling.plan import SeedPlan
from raygnn.tasks.calibration import Evaluated
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.losses import Loss, balance, make_loss
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Request, Sizes
from raygnn.worker.planes.prediction_rows import Embedded, Predictions


def map_shard(job: Job, ranks: Ranks, **options: Any) -> Shard:
    """Map this rank's part of the partition; the options are those of `load_shard`."""
    meta, world = job.meta, ranks.world
    stage = Stage.from_config(job.config.staging)
    return job.read(lambda: load_shard(meta, world.rank, world.size, stage=stage, **options))


@dataclass(frozen=True)
class Traffic:
    """Feature rows of a rank's batches. ``rows``: number of feature rows of other hosts; ``hits``:
    how many of them were cached."""

    rows: int = 0
    hits: int = 0


Kept: TypeAlias = dict[str, Evaluated]  # by task; "" = the only one


class Plane(Protocol):
    """Data plane of a rank. All methods are collective but `traffic` and `identity`."""

    def task(self) -> TaskModule:
        """Return the model, in the precision's dtype, with its loss; equal on all ranks."""
        ...

    def batches(self, task: TaskModule) -> Maker:
        """Return the builder of training batches."""
        ...

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        """Return the exact metrics of a split; ``keep`` gets this rank's outputs."""
        ...

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        """Yield predictions for this rank's part of the requested nodes, edges or graphs, in chunks
        with ascending ids. The iterator must be exhausted."""
        ...

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield embeddings of nodes or graphs, as `predict` does. Raises InputError if the model
        has none, or not of this node type."""
        ...

    def positives(self) -> dict[str, str]:
        """Return name of each task, "" of the only one → the class of its one-class metrics."""
        ...

    def warnings(self) -> list[str]:
        """Return warnings for the user about usable but suspicious data."""
        ...

    def count(self, split: str) -> int:
        """Return the number of seeds in a split, over all ranks."""
        ...

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model that were counted in the data."""
        ...

    @property
    def identity(self) -> str:
        """Identity of the data, wherever they are stored and however they are partitioned."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank since `batches`."""
        ...


def build(config: Config, make: Callable[[], nn.Module]) -> nn.Module:
    """Build a model that is equal on all ranks, in the precision's dtype."""
    if config.model.takes_dgl:
        dgl()  # so that "import dgl" works in the user's module
    torch.manual_seed(config.train.seed)
    return make().to(config.arithmetic.dtype)


def make_task(job: Job, ranks: Ranks, model: nn.Module, loss: Any, out_features: int) -> TaskModule:
    """Return the built-in or the user's task with a model, in the precision's dtype. Raises
    ConfigError if the user's cannot be imported or constructed."""
    config, spec = job.config, job.config.task.own_class
    given = model, loss, config.train, ranks.world.size, out_features, job.planned
    if spec is None:
        return TaskModule(*given)
    cls: type[TaskModule] = load_class(spec, TaskModule, "raygnn.Task", "task.kind")
    torch.manual_seed(config.train.seed)
    task = construct(cls, "task.args", "*given, **task.args", *given, **config.task.args)
    return task.to(config.arithmetic.dtype)


def loss_of(job: Job, ranks: Ranks, labels: Callable[[], Tensor], num: int) -> Loss:
    """Return the loss of the task, with its class weights: for a request, those of the training.
    Collective. ``labels``, ``num``: see `balance`."""
    task, weights = job.config.task, None
    if job.request is not None:
        weights = (job.request.weights.class_weights or {}).get(job.task)
    elif isinstance(task, ClassTask) and task.class_weights is not None:
        weights = balance(task, labels(), num, ranks.control)
    return make_loss(task, weights)


def seed_plan(job: Job, num_seeds: int) -> SeedPlan:
    """Return the order of the training seeds."""
    config = job.config
    return SeedPlan(
        num_seeds=num_seeds,
        global_batch=job.global_batch,
        seed=config.train.seed,
        accumulate=config.train.accumulate,
    )
