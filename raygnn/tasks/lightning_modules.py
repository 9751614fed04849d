"""One rank's share of a step as a Lightning module: what all tasks share, and several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from raygnn import compat
from raygnn.config.schema import TrainConfig
from raygnn.errors import TrainingError, error_text
from raygnn.models.heads import LinkScores, MultitaskModel
from raygnn.models.norm import fold_checkpoint
from raygnn.sampling.batch import Batch, Part, Share
from raygnn.tasks.clock import StepClock
from raygnn.tasks.embeddings import Embeddings
from raygnn.tasks.losses import ClassLoss
from raygnn.tasks.optimizer import Construct, make_optimizer, plain, with_schedules
from raygnn.util.hashing import derive_key

# what Lightning would take for the end of the data, for Ctrl-C, or for the end of the process
EXITS = (StopIteration, KeyboardInterrupt, SystemExit)

_PENDING = 1024  # losses that may wait to be read


def exit_error(error: BaseException) -> RuntimeError:
    """What stands for one of `EXITS` that a model raised: an error as any other."""
    return RuntimeError(f"{error_text(error)} was raised in the model")


def _step(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A ``training_step`` whose `EXITS` are errors, and whose value the guard finds again."""

    @wraps(step)
    def training_step(self: Any, *batch: Any) -> Tensor:
        try:
            loss = step(self, *batch)
        except EXITS as error:
            raise exit_error(error) from error
        self.returned = loss.detach() if isinstance(loss, Tensor) else None
        return loss

    return training_step


class TaskModule(pl.LightningModule):
    """What a rank does with a batch; to be derived from for a ``training_step`` of your own
    (``task.kind: package.module:Class``), which returns `mean` of a loss for each seed::

        class Smoothed(raygnn.Task):
            def training_step(self, batch, batch_idx):
                out = self.outputs(batch).float()                           # [B, out_features]
                losses = cross_entropy(out, batch.y, reduction="none", label_smoothing=0.1)
                return self.mean(losses, batch)

    A batch is this rank's share of a step, with B seeds (see `raygnn.sampling.batch.Share`):

    - ``y``: their targets: classes int64 ``[B]``, labels ``[B, K]`` (-1: not known), or numbers
      float32 ``[B]`` or ``[B, K]``.
    - ``weight``: float32 ``[B]``, 1, or 0 for seeds that only fill the batch up, which `mean`
      leaves out.
    - ``seeds``: int64 ``[B]``, which nodes, edges or graphs they are; ``epoch``, ``step``.
    - nodes and edges as seeds: ``x``, node type → features of the input nodes ``[S, F]`` in the
      compute dtype; ``blocks``, from the input nodes to the seeds; edges: ``pairs`` int64
      ``[2, B]``: `raygnn.sampling.batch.Batch`.
    - graphs as seeds: ``x``, node type → features of all nodes ``[N, F]``; ``edges``, edge type →
      sources and destinations int64 ``[E]``: `raygnn.sampling.batch.GraphBatch`.

    Evaluation and prediction ask ``self.model``, as for ``task.like``. Modules that a constructor
    adds are trained with it, and are in checkpoints. It is called as ``Class(*given,
    **task.args)``; ``given`` is for this class. Hooks of Lightning's that are overridden call those
    of this class.

    The loss of a rank is scaled so that the average of the gradients over ranks, which is what
    data-parallel training computes, is the gradient of the mean over the real seeds of all
    ranks and of all batches that are accumulated.

    Args:
        model: see `outputs`.
        loss: of each seed, from float32 outputs and targets; of links see `losses_of`.
        config: the ``train`` section.
        world: number of ranks.
        planned: number of ranks that the global batch is made for, whatever there are now: what
            the learning rate grows with.
        out_features: of the model: classes, or numbers that a target has.

    Attributes:
        window: what happened since the last log line, on this rank.
        clock: where its time goes.
        total_steps: optimizer steps of the whole run, for what changes with them.
        construct: makes the optimizer from its class, the parameters and the other arguments.
        embeddings: the learned rows of nodes, if there are some.
        returned: what the last ``training_step`` gave.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "training_step" in vars(cls):
            cls.training_step = _step(cls.training_step)  # type: ignore[method-assign]

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
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
        self.window = LossWindow()
        self.clock = StepClock()
        self.total_steps = 1
        self._planned = self._real = 0
        self._is_mean = False  # whether the step under way has called `mean`
        self.construct: Construct = plain
        self.embeddings: Embeddings | None = None
        self.returned: Tensor | None = None

    def outputs(self, batch: Any) -> Any:
        """The model's outputs for a batch's seeds, ``[B, out_features]`` in the compute dtype; of
        links `raygnn.models.heads.LinkScores`."""
        if isinstance(batch, Batch) and batch.pairs is None and not batch.parts:
            given = batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
            return self.model(*given)
        return self.model(batch)

    def checked(self, batch: Share) -> Tensor:
        """`outputs`, as `shaped` has them."""
        return self.shaped(self.outputs(batch), len(batch.weight))

    def shaped(self, out: Any, num_seeds: int) -> Tensor:
        """Outputs as a user's own module may give them: ``[B]`` is taken for ``[B, 1]``.

        Raises:
            TrainingError: they are of another shape, which might broadcast to something.
        """
        wanted = (num_seeds, self.out_features)
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

    def losses(self, batch: Any) -> Tensor:
        """The loss of each seed as ``task.kind`` or ``task.like`` says, float32 ``[B]``."""
        return self.losses_of(self.outputs(batch), batch)

    def losses_of(self, out: Any, part: Share | Part) -> Tensor:
        """The same from what the model gave for a batch, or for one of several tasks."""
        found: Tensor
        if isinstance(out, LinkScores):
            absent = [scores.float() for scores in out.absent]
            found = self.loss(out.there.float(), absent, out.counts)
        else:
            found = self.loss(self.shaped(out, len(part.weight)).float(), part.y)
        return found

    def mean(self, losses: Tensor, batch: Share) -> Tensor:
        """This rank's part of the mean over the real seeds of all ranks, scaled for the average of
        gradients; ``train/loss`` is made of it.

        Args:
            losses: of each seed, float32 ``[B]``.

        Raises:
            TrainingError: they are of another shape.
        """
        if losses.shape != batch.weight.shape:
            raise TrainingError(
                f"training_step gave losses {list(losses.shape)}, expected "
                f"{list(batch.weight.shape)}: one for each seed",
                where="task.kind",
                remedy='leave the mean to raygnn.Task.mean (torch\'s losses: reduction="none")',
            )
        total = (losses * batch.weight).sum()
        self.window.add({"": (total.detach(), batch.total)}, batch)
        return self._scaled(total / batch.window)

    def _scaled(self, share: Tensor) -> Tensor:
        """A share of the loss, as Lightning and DDP want it."""
        self._is_mean = True
        # Lightning divides by `accumulate`, also where an epoch's last window has fewer batches
        return share * (self.world * self.config.accumulate)

    @property
    def class_losses(self) -> dict[str, ClassLoss]:
        """Name of each task, "" of the only one → its loss, where that has weights of classes."""
        loss = self.loss
        return {"": loss} if isinstance(loss, ClassLoss) and loss.weights else {}

    @property
    def class_weights(self) -> dict[str, list[float]]:
        """The same, of the weights alone."""
        return {name: list(loss.weights or ()) for name, loss in self.class_losses.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["class_weights"] = self.class_weights

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("class_weights", {})  # not by a class that does without this
        for name, loss in self.class_losses.items():
            loss.weights = tuple(saved.get(name, loss.weights))
        fold_checkpoint(self, checkpoint["state_dict"], checkpoint.get("optimizer_states", []))

    def on_train_start(self) -> None:
        if self.embeddings is not None:
            self.embeddings.begin()

    def on_train_batch_start(self, batch: Share, batch_idx: int) -> None:
        # dropout, too, is a function of (seed, epoch, step, rank): nothing to save or restore
        key = derive_key(self.config.seed, batch.epoch, batch.step, self.global_rank)
        # `torch.manual_seed` takes a stack for each kind of device that is not there
        torch.default_generator.manual_seed(key >> 1)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(key >> 1)  # a model may be on several
        for name, seconds in batch.seconds.items():
            self.clock.spend(name, seconds)
        self._planned, self._real = batch.window, self._real + batch.total
        self._is_mean = False
        self.clock.lap("rest")

    @_step
    def training_step(self, batch: Share, batch_idx: int) -> Tensor:
        return self.mean(self.losses(batch), batch)

    def on_before_backward(self, loss: Tensor) -> None:
        if not self._is_mean:
            raise TrainingError(
                f"{type(self).__name__}.training_step did not call self.mean, so its loss would "
                "depend on the number of workers",
                where="task.kind",
                remedy="return self.mean(losses, batch), with a loss for each seed",
            )

    def window_scale(self) -> float:
        """What makes the accumulated gradient the mean over the seeds that were real.

        1 unless samples were left out, infinite if all were; the same on all ranks. Starts the
        next window.
        """
        planned, real = self._planned, self._real
        self._real = 0
        return planned / real if real else float("inf")

    def configure_optimizers(self) -> Any:
        # Lightning refuses to clip what a fused optimizer might have to unscale first
        plugin = self.trainer.precision_plugin
        hook = type(self).configure_gradient_clipping
        clips = self.config.clip or hook is not TaskModule.configure_gradient_clipping
        mixed = isinstance(plugin, MixedPrecision) and bool(clips or plugin.scaler)
        optimizer = make_optimizer(
            list(self.parameters()), self.config, self.planned, not mixed, self.construct
        )
        return with_schedules(optimizer, self.config, self.planned, self.total_steps)

    @property
    def _scale(self) -> float | None:
        """What a gradient scaler multiplies the loss by; None where there is none."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return None if scaler is None else float(scaler.get_scale())

    def transfer_batch_to_device(
        self, batch: Share, device: torch.device, dataloader_idx: int
    ) -> Share:
        self.clock.lap("wait")
        moved = batch.to(device)
        self.clock.lap("transfer")
        if isinstance(moved, Batch) and moved.awaited is not None:
            moved = moved.received()
            self.clock.lap("communicate")
        if self.embeddings is not None:
            assert isinstance(moved, Batch)
            moved = self.embeddings.join(moved, device)
            self.clock.lap("communicate")
        return moved

    def on_after_backward(self) -> None:
        if self.embeddings is not None:
            self.embeddings.send_back(self.parameters())
            self.clock.lap("communicate")

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """The last that happens before the optimizer's step, whether anything is to be clipped or
        not: learned rows are moved here, and clipped together with the parameters. None =
        ``train.clip``, as Lightning has it."""
        if gradient_clip_val is None:
            gradient_clip_val = self.trainer.gradient_clip_val
        if self.embeddings is None:
            if gradient_clip_val:
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        rate = float(optimizer.param_groups[0]["lr"])
        self.embeddings.update(self.parameters(), gradient_clip_val, rate, self._scale)


class LossWindow:
    """The steps since the last log line, on one rank. Their losses stay where they were computed
    until somebody asks for them: a GPU would have to be waited for.

    Args:
        weights: of the tasks' losses, where there are several.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {"": 1.0}
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.seeds = 0  # real seeds over all ranks
        self._losses = dict.fromkeys(self._weights, 0.0)
        self._pending: list[tuple[str, Tensor, int]] = []

    def add(self, sums: Mapping[str, tuple[Tensor, int]], batch: Share) -> None:
        """``sums``: task, "" the only one → this rank's sum of losses, and all ranks' seeds."""
        self.steps += 1
        self.seeds += batch.total
        self._pending += ((name, own, max(1, total)) for name, (own, total) in sums.items())
        if len(self._pending) > _PENDING:
            self._read()

    @property
    def loss(self) -> float:
        """This rank's share of the mean losses, added up over the steps."""
        self._read()
        return sum(weight * self._losses[name] for name, weight in self._weights.items())

    @property
    def parts(self) -> dict[str, float]:
        """The same of each of several tasks."""
        self._read()
        return {name: loss for name, loss in self._losses.items() if name}

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        values = torch.stack([own for _, own, _ in pending]).tolist() if pending else []
        for (name, _, total), value in zip(pending, values):
            self._losses[name] += value / total


class MultitaskTask(TaskModule):
    """The loss is the weighted sum of the tasks' losses, each the mean over the seeds of its own.

    Args:
        model: a `MultitaskModel`.
        tasks: by name; of each only what it makes of outputs is used.
        weights: of their losses.
        config, world, planned: see `TaskModule`.
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Mapping[str, TaskModule],
        weights: Mapping[str, float],
        config: TrainConfig,
        world: int,
        planned: float,
    ):
        super().__init__(model, self._no_loss, config, world, 0, planned)
        self.weights = dict(weights)
        self.window = LossWindow(weights)
        self._tasks = dict(tasks)  # in a dictionary, so that torch does not take them for parts

    def of(self, name: str) -> TaskModule:
        """One of the tasks, with the model as it is now."""
        assert isinstance(self.model, MultitaskModel)
        task: TaskModule = compat.with_model(self._tasks[name], self.model.of(name))
        return task

    @property
    def class_losses(self) -> dict[str, ClassLoss]:
        """See `TaskModule`."""
        losses = {name: task.class_losses for name, task in self._tasks.items()}
        return {name: loss[""] for name, loss in losses.items() if loss}

    @_step
    def training_step(self, batch: Share, batch_idx: int) -> Tensor:
        assert isinstance(batch, Batch)
        found = self.outputs(batch)  # name of each task → what its model gives
        sums, shares = {}, []
        for name, task in self._tasks.items():
            part = batch.parts[name]
            own = (task.losses_of(found[name], part) * part.weight).sum()
            sums[name] = own.detach(), part.total
            shares.append(own * (self.weights[name] / part.window))
        self.window.add(sums, batch)
        return self._scaled(torch.stack(shares).sum())

    @staticmethod
    def _no_loss(*_: object) -> Tensor:
        raise TrainingError("several tasks have no loss of their own")
