"""Several tasks on one graph, trained together."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raygnn.config.schema import TrainConfig
from raygnn.errors import TrainingError
from raygnn.models.several import Several
from raygnn.sampling.batch import Batch, Share
from raygnn.tasks.task import Task


class SeveralTask(Task):
    """The loss is the weighted sum of the tasks' losses, each the mean over the seeds of its own.

    Args:
        model: a `Several`.
        tasks: by name; of each only what it makes of outputs is used.
        weights: of their losses.
        config, world, planned: see `Task`.
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Mapping[str, Task],
        weights: Mapping[str, float],
        config: TrainConfig,
        world: int,
        planned: float,
    ):
        super().__init__(model, self._no_loss, config, world, 0, planned)
        self.weights = dict(weights)
        self._tasks = dict(tasks)  # in a dictionary, so that torch does not take them for parts

    def of(self, name: str) -> Task:
        """One of the tasks, with the model as it is now."""
        assert isinstance(self.model, Several)
        task = copy.copy(self._tasks[name])
        task._modules = {**task._modules, "model": self.model.of(name)}  # a copy shares them
        return task

    def outputs(self, batch: Batch) -> Any:
        """Name of each task → what its model gives."""
        return self.model(batch)

    def _total(self, batch: Share) -> Tensor:
        assert isinstance(batch, Batch)
        found = self.outputs(batch)
        sums, shares = [], []
        for name, task in self._tasks.items():
            part = batch.parts[name]
            own = (task.losses_of(found[name], part) * part.weight).sum()
            sums.append(own.detach())
            shares.append(own * (self.weights[name] / part.window))
        means = torch.stack(sums).tolist()  # at once: a GPU is waited for
        totals = [max(1, batch.parts[name].total) for name in self._tasks]
        noted = {n: mean / total for n, mean, total in zip(self._tasks, means, totals)}
        self.window.add(sum(self.weights[name] * loss for name, loss in noted.items()), batch)
        for name, loss in noted.items():
            self.window.parts[name] = self.window.parts.get(name, 0.0) + loss
        return torch.stack(shares).sum()

    @staticmethod
    def _no_loss(*_: object) -> Tensor:
        raise TrainingError("several tasks have no loss of their own")
