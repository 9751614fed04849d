"""Tasks on whole graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from raygnn.sampling.batch import GraphBatch
from raygnn.sampling.exchange import Ids, as_ids
from raygnn.tasks.task import Task


class GraphTask(Task):
    """The seeds are graphs; ``model`` maps a `GraphBatch` to ``[B, out_features]``."""

    def outputs(self, batch: GraphBatch) -> Tensor:
        out: Tensor = self.model(batch)
        return out


@torch.no_grad()
def graph_outputs(
    task: GraphTask,
    join: Callable[[np.ndarray], GraphBatch],
    numbers: Ids,
    batch_size: int,
    device: torch.device,
    run: Callable[[GraphBatch], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs for whole graphs, in evaluation mode. Not collective.

    Args:
        join: numbers of graphs → a batch of them, of padding where there are none; it may leave
            some out.
        numbers: int64 ``[n]``, on any device.
        run: the task's model, or a part of it: a batch → ``[B, out_features]``.

    Returns:
        numbers int64 ``[m]``, outputs float32 ``[m, out_features]`` and targets ``[m, …]``, all on
        the CPU; m ≤ n.
    """
    numbers = as_ids(numbers)
    training = task.training
    task.eval()
    there, outputs, targets = [], [], []
    try:
        for start in range(0, max(1, len(numbers)), batch_size):
            batch = join(numbers[start : start + batch_size])
            real = batch.weight > 0
            there.append(batch.seeds[real])
            outputs.append(run(batch.to(device)).float().cpu()[real])
            targets.append(batch.y[real])
    finally:
        task.train(training)
    return torch.cat(there), torch.cat(outputs), torch.cat(targets)
