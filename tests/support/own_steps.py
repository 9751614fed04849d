"""Callbacks and tasks as users write them, or with a fault."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import raygnn
from raygnn.models.heads import LinkScores


class Count(pl.Callback):
    """Counts its batches across restarts, and writes each rank's count to a file.

    Args:
        place: directory of the files.
    """

    def __init__(self, place: str):
        self.place, self.batches, self.loss = place, 0, torch.zeros(())

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *batch: Any
    ) -> None:
        self.batches += 1
        self.loss = self.loss + outputs["loss"]

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        said = {"batches": self.batches, "loss": float(self.loss)}
        Path(self.place, f"rank-{trainer.global_rank}").write_text(json.dumps(said))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.loss = state["batches"], state["loss"]


class Bound(pl.Callback):
    """Bounds the weights on all ranks alike, and adds to the loss."""

    def __init__(self, bound: float = 0.2):
        self.bound = bound

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        loss.mul_(1.5)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *batch: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-self.bound, self.bound)


class Unlike(pl.Callback):
    """Changes the third batch on rank 1 only.

    Args:
        how: what: "gradient", "weight", "loss", "stop", "mode", "count", "limit", "batches", an
            exception's name, or on all ranks "noise", whose numbers differ.
    """

    def __init__(self, how: str):
        self.how, self.batches = how, 0

    def _is_due(self, how: str) -> bool:
        odd = dist.get_rank() == 1 or how == "noise"
        return self.how == how and odd and self.batches == 2

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        if self._is_due("loss"):
            loss.mul_(2)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if self._is_due("gradient"):
            next(module.parameters()).grad.mul_(1.001)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *batch: Any) -> None:
        weight = next(module.parameters()).detach()
        for kind in (StopIteration, KeyboardInterrupt, SystemExit):
            if self._is_due(kind.__name__):
                raise kind("enough") from OSError("of the user's")
        if self._is_due("stop"):
            trainer.should_stop = True
        if self._is_due("mode"):
            module.eval()
        if self._is_due("count"):
            trainer.fit_loop.epoch_loop.batch_progress.current.ready += 1
        if self._is_due("limit"):
            trainer.fit_loop.max_epochs += 1
        if self._is_due("batches"):
            trainer.fit_loop.max_batches += 1
        if self._is_due("weight"):
            weight.view(-1)[0] += 1e-6
        if self._is_due("noise"):
            weight += torch.randn_like(weight) * 1e-4
        self.batches += 1


class Unkept(pl.Callback):
    """Has state that no checkpoint accepts."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x")}


class SaveAll(pl.callbacks.ModelCheckpoint):
    """Lightning's own, which raygnn stands in for."""


class Plain(raygnn.Task):
    """A task with the training step of the built-in kind."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.outputs(batch).float()
        return self.mean(F.cross_entropy(out, batch.y, reduction="none"), batch)


class Denoising(raygnn.Task):
    """A task that also reconstructs the input from the outputs, through a layer of its own.

    Args:
        weight: of that.
    """

    def __init__(self, *given: Any, weight: float = 0.5):
        super().__init__(*given)
        self.weight, self.back = weight, nn.Linear(self.out_features, 16)

    def training_step(self, batch: Any) -> Tensor:
        out = self.outputs(batch)
        x = batch.x["_N"][: len(out)].float()
        apart = F.mse_loss(self.back(out).float(), x, reduction="none").mean(1)
        losses = F.cross_entropy(out.float(), batch.y, reduction="none")
        return self.mean(losses + self.weight * apart, batch)


class Ranking(raygnn.Task):
    """A link-prediction task with a pairwise logistic loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.outputs(batch)
        assert isinstance(scores, LinkScores)
        apart = [F.softplus(s - scores.there.unsqueeze(1)) for s in scores.absent]
        return self.mean(sum((a * c).mean(1) for a, c in zip(apart, scores.counts)), batch)


class NoMean(raygnn.Task):
    """Returns a loss to Lightning without `Task.mean`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.outputs(batch), batch.y)


class MeanTwice(raygnn.Task):
    """Passes a mean to `Task.mean`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean(F.cross_entropy(self.outputs(batch), batch.y), batch)


class StopsIteration(raygnn.Task):
    """Raises an exception that Lightning would treat as the end of the data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise StopIteration


class AsksTrainer(Plain):
    """Reads the trainer, which only a real step has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("epochs", float(self.trainer.max_epochs))
        return super().training_step(batch, batch_idx)


class Steps(Plain):
    """Clamps the weights after the optimizer's step."""

    def optimizer_step(self, *given: Any, **options: Any) -> None:
        super().optimizer_step(*given, **options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)


STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Diverge(pl.Callback):
    """Makes all weights NaN at the end of an epoch.

    Args:
        epoch: the epoch.
    """

    def __init__(self, epoch: int):
        self.epoch = epoch

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.is_last_batch:
            for parameter in module.parameters():
                parameter.detach().fill_(torch.nan)


class Witness(pl.Callback):
    """Writes what each hook of a step observed, including the trainer's loops.

    Args:
        place: directory of the files.
        skip: in which of the first epoch's batches the epoch ends, before the step.
    """

    def __init__(self, place: str, skip: int | None = None):
        self.place, self.skip, self.met = place, skip, list[Any]()
        for name in STEP_HOOKS:
            setattr(self, name, partial(self.meet, name))

    def meet(self, name: str, trainer: pl.Trainer, module: Any, *given: Any) -> None:
        shown = [value for value in given if isinstance(value, int)]
        shown += [float(value) for value in given if isinstance(value, Tensor)]
        shown += [float(value["loss"]) for value in given if isinstance(value, dict)]
        shown += [
            type(value).__name__ for value in given if isinstance(value, torch.optim.Optimizer)
        ]
        gradients = [p.grad is not None for p in module.parameters()]
        counts = trainer.fit_loop.state_dict()
        hook = module._current_fx_name
        self.met.append([name, hook, trainer.global_step, shown, gradients, counts])
        if name == "on_train_batch_end":
            module.log("loss", given[0]["loss"], batch_size=1, on_step=True, on_epoch=True)
            self.met.append([float(trainer.optimizers[0].param_groups[0]["lr"])])

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.met.append(["on_train_epoch_end", trainer.current_epoch, logged])

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        Path(self.place, f"rank-{trainer.global_rank}").write_text(json.dumps(self.met))


class Clips(Plain):
    """Decides about gradient clipping itself."""

    def configure_gradient_clipping(self, optimizer: Any, **named: Any) -> None:
        assert set(named) == {"gradient_clip_val", "gradient_clip_algorithm"}
        if self.config.clip:
            super().configure_gradient_clipping(optimizer)  # as configured
        else:
            self.clip_gradients(optimizer, 0.1, "norm")
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        assert norm <= 0.1001
        self.log("norm", norm, batch_size=1)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"], batch_size=1)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class _NoGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


class StepsWithout(Plain):
    """Has an optimizer that calls its closure with gradients disabled."""

    def configure_optimizers(self) -> Any:
        return _NoGradients(self.parameters(), lr=0.1)


class Hooked(Plain):
    """Overrides hooks of a step, and checks which of them `LightningModule.log` would name."""

    def __init__(self, *given: Any, skip: int | None = None):
        super().__init__(*given)
        self.skip, self.met = skip, list[Any]()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.met.append("before transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.met.append("after transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == self.skip and batch.epoch == 0 else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss.detach(), batch_size=1)
        self.met.append(["step", self._current_fx_name, batch_idx, float(loss)])
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.met.append(["zero", self._current_fx_name])

    def on_train_end(self) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, Witness):
                callback.met += self.met


class Away(pl.Callback):
    """Removes a file when training ends, as if storage were unavailable.

    Args:
        file: which one.
    """

    def __init__(self, file: str):
        self.file = Path(file)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if module.global_rank == 0:
            self.file.rename(self.file.with_suffix(".away"))
