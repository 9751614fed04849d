"""Node classification as a Lightning module."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.schema import TrainConfig
from raygnn.sampling.batch import Batch
from raygnn.sampling.keys import derive_key


class NodeClassification(pl.LightningModule):
    """Cross entropy over the seeds of the global batch.

    The loss of a rank is scaled so that the average of the gradients over ranks, which is what
    data-parallel training computes, is the gradient of the mean over the real seeds of all
    ranks and of all batches that are accumulated, however they are spread.

    Args:
        model: maps ``(blocks, x, degree)`` to logits ``[B, C]``.
        config: the ``train`` section.
        world: number of ranks.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, world: int):
        super().__init__()
        self.model = model
        self.config = config
        self.world = world
        # what happened since the last log line, on this rank
        self.window = Window()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # dropout, too, is a function of (seed, epoch, step, rank): nothing to save or restore
        key = derive_key(self.config.seed, batch.epoch, batch.step, self.global_rank)
        torch.manual_seed(key >> 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(
            batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
        ).float()
        losses = F.cross_entropy(logits, batch.y, reduction="none") * batch.weight
        total = losses.sum()
        self.window.add(float(total.detach()) / batch.total, batch)
        # Lightning divides by `accumulate`, also where an epoch's last window has fewer batches
        return total * (self.world * self.config.accumulate / batch.window)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        config = self.config
        scale = {"none": 1.0, "linear": float(self.world), "sqrt": self.world**0.5}
        kwargs: dict[str, Any] = {
            "lr": config.lr * scale[config.lr_scaling],
            "weight_decay": config.weight_decay,
        }
        if config.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), momentum=config.momentum, **kwargs)
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        return kinds[config.optimizer](self.parameters(), **kwargs)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return batch.to(device)


class Window:
    """Sums over the steps since the last log line, on one rank."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.seeds = 0  # real seeds over all ranks
        self.loss = 0.0  # this rank's share of the mean losses
        self.seconds: dict[str, float] = {}

    def add(self, loss: float, batch: Batch) -> None:
        self.steps += 1
        self.seeds += batch.total
        self.loss += loss
        for name, value in batch.seconds.items():
            self.spend(name, value)

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
