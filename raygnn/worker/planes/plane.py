"""Data plane of a rank: the model, batches and outputs of a task on nodes, edges or graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from raygnn.config.schema import Config
from raygnn.config.task import ClassTask
from raygnn.graph.dgl import dgl
from raygnn.models.user import construct, load_class
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.loader import Maker
from raygnn.sampling.plan import SeedPlan
from raygnn.tasks.calibration import Evaluated
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.losses import Loss, balance, make_loss
from raygnn.tasks.metrics import measure
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Request, Sizes
from raygnn.worker.planes.prediction_rows import Embedded, Predictions
from raygnn.worker.planes.vocabulary import positive_class, positive_word

T = TypeVar("T")


Kept: TypeAlias = dict[str, Evaluated]  # by task; "" = the only one


@dataclass
class Plane:
    """Data plane of a rank. All methods are collective but `traffic` and `identity`."""

    job: Job
    ranks: Ranks

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def control(self) -> Exchange:
        return self.ranks.control

    def task(self) -> TaskModule:
        """Return the model, in the precision's dtype, with its loss; equal on all ranks."""
        raise NotImplementedError

    @property
    def out_features(self) -> int:
        """Width of the model's outputs: number of classes, or width of a regression target."""
        raise NotImplementedError

    def batches(self, task: TaskModule) -> Maker:
        """Return the builder of training batches."""
        raise NotImplementedError

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        """Return the exact metrics of a split; ``keep`` gets this rank's outputs."""
        raise NotImplementedError

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        """Yield predictions for this rank's part of the requested nodes, edges or graphs, in chunks
        with ascending ids. The iterator must be exhausted."""
        raise NotImplementedError

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield embeddings of nodes or graphs, as `predict` does. Raises InputError if the model
        has none, or none of this node type."""
        raise NotImplementedError

    @cached_property
    def positive(self) -> int | None:
        """Number of the class ``task.positive``; None if it is not set."""
        classifies = self.config.task.classifies
        return positive_class(self.job, self.out_features) if classifies else None

    def positives(self) -> dict[str, str]:
        """Return name of each task, "" of the only one → the class of its one-class metrics."""
        if not self.config.task.classifies:
            return {}
        _ = self.positive  # cached, since evaluations must not read the partition
        word = positive_word(self.job, self.out_features)
        return {} if word is None else {"": word}

    def measured(
        self, outputs: Tensor, targets: Tensor, loss: Loss, keep: Kept | None
    ) -> dict[str, float]:
        """Return the metrics of this rank's outputs: see `measure`."""
        task = self.config.task
        return measure(outputs, targets, task, loss, self.control, self.positive, keep)

    def warnings(self) -> list[str]:
        """Return warnings for the user about usable but suspicious data."""
        return []

    def count(self, split: str) -> int:
        """Return the number of seeds in a split, over all ranks."""
        raise NotImplementedError

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model that were counted in the data."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """Identity of the data, wherever they are stored and however they are partitioned."""
        raise NotImplementedError

    @property
    def traffic(self) -> tuple[int, int]:
        """Number of other hosts' feature rows in this rank's batches, and the cached ones among
        them."""
        return 0, 0


def category_sizes(
    inputs: Mapping[T, Any], widths: Mapping[str, int], count: Callable[[T, str], int]
) -> dict[T, dict[str, tuple[int, int]]]:
    """Return node or edge type → array of categories → their number and the width of their
    embeddings. ``count``: type and array → number of categories."""
    return {
        kind: {name: (count(kind, name), widths[name]) for name in chosen.categories}
        for kind, chosen in inputs.items()
        if chosen.categories
    }


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
    """Return the loss of the task, with its class weights; a request has the training's weights.
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
