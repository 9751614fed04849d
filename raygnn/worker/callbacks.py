"""Callbacks around the steps: evaluation, averaging of weights, and the user's own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from raygnn.config.schema import TrainConfig
from raygnn.config.task import LOWER_IS_BETTER
from raygnn.models.user import construct, load_class
from raygnn.sampling.loader import BatchLoader
from raygnn.tasks.lightning_modules import EXITS, TaskModule, exit_error
from raygnn.worker.records import Records

# attributes of `Evaluation` that checkpoints hold
_STATE = ["epoch", "best", "best_epoch", "best_weights", "best_metrics"]
_STATE += ["mark", "mark_epoch", "newest"]


class Evaluation(pl.Callback):
    """Exact validation every ``eval_every`` epochs; keeps the best weights, and stops early.

    All ranks see the same metrics, and so agree on early stopping and the learning rate.

    Args:
        evaluate: split → metrics; collective.
        config: ``eval_every``; ``patience``: epochs without an improvement by more than
            ``min_delta`` before training stops.
        metric: the highest value is the best, or the lowest (`LOWER_IS_BETTER`).
        averaging: its weights are evaluated and kept instead of the trained ones.
    """

    def __init__(
        self,
        evaluate: Callable[[str], dict[str, float]],
        records: Records,
        loader: BatchLoader,
        config: TrainConfig,
        *,
        metric: str,
        averaging: Averaging | None,
    ):
        self._evaluate = evaluate
        self._records = records
        self._loader = loader
        self._config = config
        self._metric = metric
        self._averaging = averaging
        self.epoch = -1  # last epoch whose end was handled
        self.best: float | None = None
        self.best_epoch = -1
        self.best_weights: dict[str, Tensor] = {}
        self.best_metrics: dict[str, float] = {}  # of the best epoch's evaluation
        self.newest: dict[str, float] = {}  # metrics of the last evaluation
        self.mark: float | None = None  # score that the next improvement is measured from
        self.mark_epoch = -1

    def on_train_start(self, trainer: pl.Trainer, module: TaskModule) -> None:
        # a checkpoint on an epoch's last batch was written before that epoch's evaluation
        done = self._loader.epochs_done
        if done - 1 > self.epoch:
            self._end_of(done - 1, trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: TaskModule) -> None:
        self._end_of(trainer.current_epoch, trainer, module)

    def finish(self, trainer: pl.Trainer, module: TaskModule) -> None:
        """Evaluate after the last step, if a run that was resumed from there has not done it."""
        if self._loader.epoch > self.epoch:
            self._end_of(self._loader.epoch, trainer, module)

    def _end_of(self, epoch: int, trainer: pl.Trainer, module: TaskModule) -> None:
        self.epoch, config = epoch, self._config
        last = epoch + 1 == config.epochs or trainer.global_step == config.max_steps
        if (epoch + 1) % config.eval_every and not last:
            return
        with self._records.pause("evaluate"):
            self._validate(epoch, trainer, module)

    def _validate(self, epoch: int, trainer: pl.Trainer, module: TaskModule) -> None:
        config = self._config
        with self._averaging.applied(module) if self._averaging else nullcontext():
            values = self._evaluate("val")
            score = values[self._metric]
            if self._metric.rpartition("/")[2] in LOWER_IS_BETTER:
                score = -score
            if not math.isnan(score) and (self.best is None or not score <= self.best):
                self.best, self.best_epoch = score, epoch
                self.best_metrics = {f"val/{name}": value for name, value in values.items()}
                state = module.state_dict()
                self.best_weights = {n: v.detach().cpu().clone() for n, v in state.items()}
                if module.embeddings is not None:
                    module.embeddings.keep()
        if self.mark is None or score > self.mark + config.min_delta or math.isnan(self.mark):
            self.mark, self.mark_epoch = score, epoch
        elif config.patience is not None and epoch - self.mark_epoch >= config.patience:
            trainer.should_stop = True
        for schedule in trainer.lr_scheduler_configs:
            if isinstance(schedule.scheduler, ReduceLROnPlateau):
                schedule.scheduler.step(score)
        self.newest = {f"val/{name}": value for name, value in values.items()}
        self._records.write(trainer.global_step, epoch, self.newest)

    def restore_best(self, module: TaskModule) -> None:
        """Load the best weights, if an evaluation has kept any."""
        if self.best_weights:
            module.load_state_dict(self.best_weights)
            if module.embeddings is not None:
                module.embeddings.restore()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])


class Averaging(pl.Callback):
    """Exponential moving average of the weights.

    ``average = decay · average + (1 - decay) · weights`` after each optimizer step, from the
    weights after the first one (Polyak & Juditsky 1992, with a memory of ``1 / (1 - decay)``
    steps; as `torch.optim.swa_utils.AveragedModel` does it).

    Averages of bf16 weights are fp32, since bf16 would lose small changes. Floating-point buffers
    (running statistics) are averaged like weights, other ones are copied. Each rank keeps its own
    average. If buffers of a user's module differ between ranks, checkpoints hold rank 0's, and
    evaluation shares them.

    Its place is before the callbacks that evaluate and save.
    """

    def __init__(self, decay: float):
        self._update = get_ema_multi_avg_fn(decay)
        self._step = -1
        self.average: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        values = _values(module)  # on their device, unlike a checkpoint's
        self.average = {n: a.to(values[n].device) for n, a in self.average.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:  # batches accumulate
            return
        self._step = trainer.global_step
        values = _values(module)
        if not self.average:
            self.average = {name: _wide(value).clone() for name, value in values.items()}
            return
        moving = [name for name, value in values.items() if value.is_floating_point()]
        self._update([self.average[n] for n in moving], [_wide(values[n]) for n in moving], 0)
        for name in values.keys() - set(moving):
            self.average[name].copy_(values[name])

    @contextmanager
    def applied(self, module: pl.LightningModule) -> Iterator[None]:
        """Let the module have the averages in the block."""
        values = _values(module)
        kept = {name: value.clone() for name, value in values.items()}
        self.put(module)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in values.items():
                    value.copy_(kept[name])

    @torch.no_grad()
    def put(self, module: pl.LightningModule) -> None:
        """Copy the averages to the module, if there was a step."""
        if not self.average:
            return
        for name, value in _values(module).items():
            value.copy_(self.average[name])

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = dict(state["average"])


def _values(module: nn.Module) -> dict[str, Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in named}


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def user_hooks(config: TrainConfig) -> list[pl.Callback]:
    """Construct the user's callbacks. Raises ConfigError if one cannot be imported or constructed,
    or is not a callback."""
    made = []
    for spec, args in config.callbacks.items():
        cls = load_class(spec, pl.Callback, "lightning.pytorch.Callback", "train.callbacks")
        hook = construct(cls, "train.callbacks", "its arguments", **args)
        for name in filter(re.compile("on_|setup|teardown").match, dir(pl.Callback)):
            setattr(hook, name, _reporting(getattr(hook, name), f"train.callbacks ({spec})"))
        made.append(hook)
    return made


def _reporting(hook: Callable[..., Any], where: str) -> Callable[..., Any]:

    @wraps(hook)
    def reporting(*args: Any, **options: Any) -> Any:
        try:
            return hook(*args, **options)
        except EXITS as error:
            raise exit_error(error, where) from error

    return reporting
