"""A step and a callback of your own: agreement of two forward passes, and bounded weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

import raygnn


class Agreeing(raygnn.Task):
    """Cross entropy of two passes with other dropout, and how far they are apart (Liang et al.
    2021, "R-Drop: regularized dropout for neural networks").

    Args:
        weight: of the latter; from ``task.args`` in the configuration.
    """

    def __init__(self, *given: Any, weight: float = 1.0):
        super().__init__(*given)
        self.weight = weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean of the seeds' losses, over the seeds of all workers."""
        one, other = (self.outputs(batch).float().log_softmax(1) for _ in range(2))
        apart = F.kl_div(one, other, log_target=True, reduction="none").sum(1)
        apart = apart + F.kl_div(other, one, log_target=True, reduction="none").sum(1)
        losses = F.nll_loss(one, batch.y, reduction="none")
        losses = losses + F.nll_loss(other, batch.y, reduction="none")
        return self.mean(losses / 2 + self.weight * apart / 4, batch)


class MaxNorm(pl.Callback):
    """Limit the norm of each row of all matrices (Srivastava et al. 2014, "Dropout", 5.1).

    Every worker changes equal weights equally, so they stay equal.

    Args:
        radius: largest norm; from ``train.callbacks`` in the configuration.
    """

    def __init__(self, radius: float = 3.0):
        self.radius = radius
        self.steps = 0  # in checkpoints, so that a resumed run continues to count

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.steps += 1
        for weight in module.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.renorm(2, 0, self.radius))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
