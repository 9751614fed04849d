"""What is common to all tasks: one rank's share of a step as a Lightning module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from raygnn.config.schema import TrainConfig
from raygnn.errors import TrainingError
from raygnn.sampling.batch import Share
from raygnn.sampling.keys import derive_key
from raygnn.tasks.losses import Loss

MakeOptimizer = Callable[[type[torch.optim.Optimizer], Any, dict[str, Any]], torch.optim.Optimizer]


def _plain(
    kind: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]
) -> torch.optim.Optimizer:
    return kind(params, **options)


class Task(pl.LightningModule, ABC):
    """A loss that is the mean over the real seeds of the global batch, however they are spread.

    The loss of a rank is scaled so that the average of the gradients over ranks, which is what
    data-parallel training computes, is the gradient of the mean over the real seeds of all
    ranks and of all batches that are accumulated.

    Args:
        model: see `outputs`.
        loss: of each seed, from float32 outputs.
        config: the ``train`` section.
        world: number of ranks.
        planned: number of ranks that the global batch is made for, whatever there are now: what
            the learning rate grows with.
        out_features: of the model: classes, or numbers that a target has.

    Attributes:
        window: what happened since the last log line, on this rank.
        make_optimizer: from its class, the parameters and the other arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        config: TrainConfig,
        world: int,
        out_features: int,
        planned: float,
    ):
        super().__init__()
        self.out_features = out_features
        self.model = model
        self.loss = loss
        self.config = config
        self.world = world
        self.planned = planned
        self.window = Window()
        self._planned = self._real = 0
        self.make_optimizer: MakeOptimizer = _plain

    @abstractmethod
    def outputs(self, batch: Any) -> Tensor:
        """The model's outputs for a batch's seeds, ``[B, out_features]``."""

    def checked(self, batch: Share) -> Tensor:
        """`outputs`, as a user's own module may give them: ``[B]`` is taken for ``[B, 1]``.

        Raises:
            TrainingError: they are of another shape, which might broadcast to something.
        """
        try:
            out: Any = self.outputs(batch)
        except StopIteration as error:  # which Lightning would take for the end of the data
            raise RuntimeError(f"StopIteration in the model: {error}") from error
        wanted = (len(batch.weight), self.out_features)
        if isinstance(out, Tensor) and out.shape == wanted[:1] and self.out_features == 1:
            out = out.unsqueeze(1)
        if not isinstance(out, Tensor) or out.shape != wanted:
            found = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TrainingError(
                f"the model gave {found}, expected [{wanted[0]}, {wanted[1]}]: a row for each seed",
                where="model.kind",
                remedy="return [B, out_features] from forward, as the class was constructed for",
            )
        return out

    def on_train_batch_start(self, batch: Share, batch_idx: int) -> None:
        # dropout, too, is a function of (seed, epoch, step, rank): nothing to save or restore
        key = derive_key(self.config.seed, batch.epoch, batch.step, self.global_rank)
        torch.manual_seed(key >> 1)

    def training_step(self, batch: Share, batch_idx: int) -> Tensor:
        losses = self.loss(self.checked(batch).float(), batch.y)
        total = (losses * batch.weight).sum()
        self.window.add(float(total.detach()) / max(1, batch.total), batch)
        self._planned, self._real = batch.window, self._real + batch.total
        # Lightning divides by `accumulate`, also where an epoch's last window has fewer batches
        return total * (self.world * self.config.accumulate / batch.window)

    def window_scale(self) -> float:
        """What makes the accumulated gradient the mean over the seeds that were real.

        1 unless samples were left out, infinite if all were; the same on all ranks. Starts the
        next window.
        """
        planned, real = self._planned, self._real
        self._real = 0
        return planned / real if real else float("inf")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        config = self.config
        scale = {"none": 1.0, "linear": self.planned, "sqrt": self.planned**0.5}
        kwargs: dict[str, Any] = {
            "lr": config.lr * scale[config.lr_scaling],
            "weight_decay": config.weight_decay,
        }
        if config.optimizer == "sgd":
            kwargs["momentum"] = config.momentum
            return self.make_optimizer(torch.optim.SGD, self.parameters(), kwargs)
        # one kernel, where torch's default on a CPU is ten for each parameter; Lightning refuses to
        # clip what a fused optimizer might have to unscale first
        mixed = isinstance(self.trainer.precision_plugin, MixedPrecision)
        if not mixed and all(p.is_floating_point() for p in self.parameters()):
            kwargs["fused"] = True
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        return self.make_optimizer(kinds[config.optimizer], self.parameters(), kwargs)

    def transfer_batch_to_device(
        self, batch: Share, device: torch.device, dataloader_idx: int
    ) -> Share:
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

    def add(self, loss: float, batch: Share) -> None:
        self.steps += 1
        self.seeds += batch.total
        self.loss += loss
        for name, value in batch.seconds.items():
            self.spend(name, value)

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
