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
from raygnn.sampling.batch import Share
from raygnn.sampling.loader import Maker
from raygnn.sampling.plan import SeedPlan
from raygnn.tasks.calibration import Evaluated
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.losses import Loss, balance, make_loss
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Request, Sizes
from raygnn.worker.planes.prediction_rows import Embedded, Predictions


def map_shard(job: Job, ranks: Ranks, **options: Any) -> Shard:
    """This rank's share of the partition; the options are those of `load_shard`."""
    meta, world = job.meta, ranks.world
    stage = Stage.from_config(job.config.staging)
    return job.read(lambda: load_shard(meta, world.rank, world.size, stage=stage, **options))


@dataclass(frozen=True)
class Traffic:
    """What came to one rank for its batches, and what did not.

    Attributes:
        rows: of features, of other hosts; hits: how many of them the cache had.
        skipped: samples left out, over all ranks.
    """

    rows: int = 0
    hits: int = 0
    skipped: int = 0


Kept: TypeAlias = dict[str, Evaluated]  # by task; "" = the only one


class Plane(Protocol):
    """What one rank trains on. Everything is collective but `traffic` and `identity`."""

    def task(self) -> TaskModule:
        """The model, in the precision's dtype, and its loss; the same on all ranks."""
        ...

    def batches(self, task: TaskModule) -> Maker[Share]:
        """What makes the training batches."""
        ...

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        """The metrics of a split, exact over all ranks; ``keep`` takes this rank's outputs."""
        ...

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        """This rank's share of the nodes, edges or graphs that are asked for, in chunks that
        ascend by id. It has to be exhausted."""
        ...

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """As `predict`, what the model makes of nodes or graphs before its last step.

        Raises:
            InputError: the model has no such rows, or not for this node type.
        """
        ...

    def positives(self) -> dict[str, str]:
        """Task, "" of one alone → the class that its metrics of one class are of."""
        ...

    def warnings(self) -> list[str]:
        """Texts for the user about data that can be trained on, but hardly as meant."""
        ...

    def count(self, split: str) -> int:
        """Seeds of all ranks in a split."""
        ...

    @property
    def sizes(self) -> Sizes:
        """What of the data was counted for the model."""
        ...

    @property
    def identity(self) -> str:
        """What stands for the data, wherever they lie and however they are divided."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Since `batches`, on this rank."""
        ...


def build(config: Config, make: Callable[[], nn.Module]) -> nn.Module:
    """A model that is the same on all ranks, in the precision's dtype."""
    if config.model.takes_dgl:
        dgl()  # so that "import dgl" in the user's module finds one that works
    torch.manual_seed(config.train.seed)
    return make().to(config.arithmetic.dtype)


def make_task(job: Job, ranks: Ranks, model: nn.Module, loss: Any, out_features: int) -> TaskModule:
    """The task with a model, in the precision's dtype: the built-in one, or the user's own.

    Raises:
        ConfigError: that cannot be imported or constructed.
    """
    config, spec = job.config, job.config.task.own_class
    given = model, loss, config.train, ranks.world.size, out_features, job.planned
    if spec is None:
        return TaskModule(*given)
    cls: type[TaskModule] = load_class(spec, TaskModule, "raygnn.Task", "task.kind")
    torch.manual_seed(config.train.seed)
    task = construct(cls, "task.args", "*given, **task.args", *given, **config.task.args)
    return task.to(config.arithmetic.dtype)


def loss_of(job: Job, ranks: Ranks, labels: Callable[[], Tensor], num: int) -> Loss:
    """The loss of the task, with weights of its classes if it has some: those of the training
    where that is over. Collective.

    Args:
        labels, num: see `balance`.
    """
    task, weights = job.config.task, None
    if job.request is not None:
        weights = (job.request.weights.class_weights or {}).get(job.task)
    elif isinstance(task, ClassTask) and task.class_weights is not None:
        weights = balance(task, labels(), num, ranks.control)
    return make_loss(task, weights)


def seed_plan(job: Job, num_seeds: int) -> SeedPlan:
    """Which of the training seeds come when."""
    config = job.config
    return SeedPlan(
        num_seeds=num_seeds,
        global_batch=job.global_batch,
        seed=config.train.seed,
        accumulate=config.train.accumulate,
    )
