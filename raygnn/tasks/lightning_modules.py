"""Lightning modules of single tasks and of multi-task learning: one rank's share of a step."""

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
from raygnn.models.heads import LinkScores
from raygnn.sampling.batch import Batch, Part, Share
from raygnn.tasks.clock import StepClock
from raygnn.tasks.embeddings import Embeddings
from raygnn.tasks.losses import ClassLoss
from raygnn.tasks.optimizer import Construct, make_optimizer, plain, with_schedules
from raygnn.util.hashing import derive_key

# exceptions that Lightning would treat as the end of the data, Ctrl-C or the end of the process
EXITS = (StopIteration, KeyboardInterrupt, SystemExit)

_PENDING = 1024  # unread losses


def exit_error(error: BaseException, where: str = "the model") -> TrainingError:
    """Return an ordinary error for one of `EXITS` that the user's code raised."""
    remedy = "raise another error; to end training early, set trainer.should_stop on every rank"
    return TrainingError(f"{error_text(error)} was raised in {where}", remedy=remedy)


def _step(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a ``training_step``: convert `EXITS` to errors, and keep the loss for the guard."""

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
    """Training step of a rank. Derive from it for a ``training_step`` of your own
    (``task.kind: package.module:Class``), which returns `mean` of a loss for each seed::

        class Smoothed(raygnn.Task):
            def training_step(self, batch, batch_idx):
                out = self.outputs(batch).float()                           # [B, out_features]
                losses = cross_entropy(out, batch.y, reduction="none", label_smoothing=0.1)
                return self.mean(losses, batch)

    A batch is this rank's share of a step, with B seeds (see `raygnn.sampling.batch.Share`):

    - ``y``: their targets: classes int64 ``[B]``, labels ``[B, K]`` (-1: unknown), or numbers
      float32 ``[B]`` or ``[B, K]``.
    - ``weight``: float32 ``[B]``, 1, or 0 for padding, which `mean` ignores.
    - ``seeds``: int64 ``[B]``, ids of nodes, edges or graphs; ``epoch``, ``step``.
    - nodes and edges as seeds: ``x``, node type → features of the input nodes ``[S, F]`` in the
      compute dtype; ``blocks``, from the input nodes to the seeds; edges: ``pairs`` int64
      ``[2, B]``: `raygnn.sampling.batch.Batch`.
    - graphs as seeds: ``x``, node type → features of all nodes ``[N, F]``; ``edges``, edge type →
      sources and destinations int64 ``[E]``: `raygnn.sampling.batch.GraphBatch`.

    Evaluation and prediction use ``self.model``, as for ``task.like``. Modules that a constructor
    adds are trained with it and saved in checkpoints. It is called as ``Class(*given,
    **task.args)``; pass ``given`` to this class. Overridden Lightning hooks must call those of this
    class.

    The loss of a rank is scaled so that the average of gradients over ranks, as data-parallel
    training computes it, is the gradient of the mean over the real seeds of all ranks and of all
    accumulated batches.

    Args:
        model: see `outputs`.
        loss: of each seed, from float32 outputs and targets; for links see `losses_of`.
        config: the ``train`` section.
        world: number of ranks.
        planned: number of ranks that the global batch is designed for, which scales the learning
            rate.
        out_features: of the model: number of classes, or of numbers in a target.

    Attributes:
        window: losses since the last log line, on this rank.
        clock: time of training steps by part.
        total_steps: optimizer steps of the run, for schedules.
        construct: builds the optimizer from its class, the parameters and the other arguments.
        embeddings: node embeddings, if there are any.
        returned: result of the last ``training_step``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "training_step" in vars(cls):
            cls.training_step = _step(cls.training_step)  # type: ignore[method-assign]

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        config: TrainConfig,
        world: int,
        out_features: int,
        planned: float,
    ):
        super().__init__()
        self.out_features = out_features
        self.model, self.loss = model, loss
        self.config, self.world, self.planned = config, world, planned
        self.window, self.clock = LossWindow(), StepClock()
        self.total_steps = 1
        self._is_mean = False  # whether the step under way has called `mean`
        self.construct: Construct = plain
        self.embeddings: Embeddings | None = None
        self.returned: Tensor | None = None

    def outputs(self, batch: Any) -> Any:
        """Return the model's outputs for a batch's seeds, ``[B, out_features]`` in the compute
        dtype; for links `raygnn.models.heads.LinkScores`."""
        if isinstance(batch, Batch) and batch.pairs is None and not batch.parts:
            given = batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
            out = self.model(*given)
            if batch.nodes is None:
                return out
            # adds gradients in a fixed order
            return nn.functional.embedding(batch.nodes, out if out.dim() > 1 else out[:, None])
        return self.model(batch)

    def checked(self, batch: Share) -> Tensor:
        """Return `outputs` after `shaped`."""
        return self.shaped(self.outputs(batch), len(batch.weight))

    def shaped(self, out: Any, num_seeds: int) -> Tensor:
        """Check the shape of outputs of a user's module; ``[B]`` becomes ``[B, 1]``. Raises
        TrainingError if the shape is wrong and might broadcast silently."""
        wanted = (num_seeds, self.out_features)
        if isinstance(out, Tensor) and out.shape == wanted[:1] and self.out_features == 1:
            out = out.unsqueeze(1)
        if not isinstance(out, Tensor) or out.shape != wanted:
            found = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            what = f"the model returned {found}, expected {list(wanted)}: a row for each seed"
            remedy = "return [B, out_features] from forward, as the class was constructed with"
            raise TrainingError(what, where="model.kind", remedy=remedy)
        return out

    def losses(self, batch: Any) -> Tensor:
        """Return the loss of each seed by ``task.kind`` or ``task.like``, float32 ``[B]``."""
        return self.losses_of(self.outputs(batch), batch)

    def losses_of(self, out: Any, part: Share | Part) -> Tensor:
        """Return the loss of each seed from the model's outputs for a batch or a task's part."""
        if not isinstance(out, LinkScores):
            return self.loss(self.shaped(out, len(part.weight)).float(), part.y)
        absent = [scores.float() for scores in out.absent]
        log_q = getattr(part, "log_q", None)
        more = [list(log_q.values())] if log_q else []
        return self.loss(out.there.float(), absent, out.counts, *more)

    def mean(self, losses: Tensor, batch: Share) -> Tensor:
        """Return this rank's part of the mean of ``losses``, float32 ``[B]``, over the real seeds
        of all ranks, scaled for the average of gradients, and record it for ``train/loss``. Raises
        TrainingError if they have another shape."""
        if losses.shape != batch.weight.shape:
            what = f"training_step passed losses {list(losses.shape)} to self.mean, expected "
            what += f"{list(batch.weight.shape)}: one for each seed"
            remedy = 'leave the mean to raygnn.Task.mean (torch\'s losses: reduction="none")'
            raise TrainingError(what, where="task.kind", remedy=remedy)
        total = (losses * batch.weight).sum()
        self.window.add({"": (total.detach(), batch.total)}, batch)
        return self._scaled(total / batch.window)

    def _scaled(self, share: Tensor) -> Tensor:
        """Scale a share of the loss for Lightning's and DDP's divisions."""
        self._is_mean = True
        # Lightning divides by `accumulate`, even if an epoch's last window has fewer batches
        return share * (self.world * self.config.accumulate)

    @property
    def class_losses(self) -> dict[str, ClassLoss]:
        """Task name ("" for a single task) → its loss, if that has class weights."""
        loss = self.loss
        return {"": loss} if isinstance(loss, ClassLoss) and loss.weights else {}

    @property
    def class_weights(self) -> dict[str, list[float]]:
        """Task name → class weights."""
        return {name: list(loss.weights or ()) for name, loss in self.class_losses.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["class_weights"] = self.class_weights

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("class_weights", {})  # missing if a class overrides the saving hook
        for name, loss in self.class_losses.items():
            loss.weights = tuple(saved.get(name, loss.weights))

    def on_train_start(self) -> None:
        if self.embeddings is not None:
            self.embeddings.begin(self.device)

    def on_train_batch_start(self, batch: Share, batch_idx: int) -> None:
        # dropout is a function of (seed, epoch, step, rank), so no state must be saved
        key = derive_key(self.config.seed, batch.epoch, batch.step, self.global_rank)
        # `torch.manual_seed` records a stack trace for each missing kind of device
        torch.default_generator.manual_seed(key >> 1)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(key >> 1)  # a model may use several GPUs
        for name, seconds in batch.seconds.items():
            self.clock.spend(name, seconds)
        self._is_mean = False
        self.clock.lap("rest")

    @_step
    def training_step(self, batch: Share, batch_idx: int) -> Tensor:
        return self.mean(self.losses(batch), batch)

    def on_before_backward(self, loss: Tensor) -> None:
        if not self._is_mean:
            what = f"{type(self).__name__}.training_step did not call self.mean, so its loss would "
            what += "depend on the number of workers"
            remedy = "return self.mean(losses, batch), with a loss for each seed"
            raise TrainingError(what, where="task.kind", remedy=remedy)

    def configure_optimizers(self) -> Any:
        # Lightning refuses to clip gradients that a fused optimizer might have to unscale first
        plugin = self.trainer.precision_plugin
        hook = type(self).configure_gradient_clipping
        clips = self.config.clip or hook is not TaskModule.configure_gradient_clipping
        mixed = isinstance(plugin, MixedPrecision) and bool(clips or plugin.scaler)
        named = {name.removeprefix("model."): p for name, p in self.named_parameters()}
        optimizer = make_optimizer(named, self.config, self.planned, not mixed, self.construct)
        return with_schedules(optimizer, self.config, self.planned, self.total_steps)

    def transfer_batch_to_device(
        self, batch: Share, device: torch.device, dataloader_idx: int
    ) -> Share:
        self.clock.lap("wait")
        moved = batch.to(device)
        self.clock.lap("transfer")
        if isinstance(moved, Batch) and moved.awaited is not None:
            moved = moved.received()
            self.clock.lap("communicate")
        if isinstance(moved, Batch) and self.embeddings is not None:
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
        """Clip gradients and update node embeddings, which are clipped together with parameters.
        Lightning calls this hook last before each optimizer step, even without clipping."""
        if gradient_clip_val is None:
            gradient_clip_val = self.trainer.gradient_clip_val
        if self.embeddings is None:
            if gradient_clip_val:
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        rate = float(optimizer.param_groups[0]["lr"])
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else float(scaler.get_scale())
        self.embeddings.update(self.parameters(), gradient_clip_val, rate, scale)


class LossWindow:
    """Steps since the last log line, on one rank. Losses stay on their device until they are
    requested, since reading them waits for a GPU. ``weights``: of the tasks' losses in multi-task
    learning."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {"": 1.0}
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.seeds = 0  # real seeds over all ranks
        self._losses = dict.fromkeys(self._weights, 0.0)
        self._pending: list[tuple[str, Tensor, int]] = []

    def add(self, sums: Mapping[str, tuple[Tensor, int]], batch: Share) -> None:
        """Add a step; ``sums``: task name ("" for a single task) → this rank's sum of losses and
        all ranks' number of seeds."""
        self.steps += 1
        self.seeds += batch.total
        self._pending += ((name, own, max(1, total)) for name, (own, total) in sums.items())
        if len(self._pending) > _PENDING:
            self._read()

    @property
    def loss(self) -> float:
        """Rank's share of the mean losses, summed over the steps."""
        self._read()
        return sum(weight * self._losses[name] for name, weight in self._weights.items())

    @property
    def parts(self) -> dict[str, float]:
        """The same for each of several tasks."""
        self._read()
        return {name: loss for name, loss in self._losses.items() if name}

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        values = torch.stack([own for _, own, _ in pending]).tolist() if pending else []
        for (name, _, total), value in zip(pending, values):
            self._losses[name] += value / total


class MultitaskTask(TaskModule):
    """Multi-task learning: the weighted sum of the tasks' losses, each a mean over its seeds.

    Args:
        model: a `MultitaskModel`.
        tasks: task name → module; only its `losses_of` is used.
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
        super().__init__(model, None, config, world, 0, planned)
        self.weights = dict(weights)
        self.window = LossWindow(weights)
        self._tasks = dict(tasks)  # in a dictionary, so that torch does not register submodules

    def of(self, name: str) -> TaskModule:
        """Return one of the tasks with its current model."""
        model: Any = self.model
        return compat.with_model(self._tasks[name], model.of(name))

    @property
    def class_losses(self) -> dict[str, ClassLoss]:
        losses = {name: task.class_losses for name, task in self._tasks.items()}
        return {name: loss[""] for name, loss in losses.items() if loss}

    @_step
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.outputs(batch)  # task name → outputs
        sums, shares = {}, []
        for name, task in self._tasks.items():
            part = batch.parts[name]
            own = (task.losses_of(found[name], part) * part.weight).sum()
            sums[name] = own.detach(), part.total
            shares.append(own * (self.weights[name] / part.window))
        self.window.add(sums, batch)
        return self._scaled(torch.stack(shares).sum())
