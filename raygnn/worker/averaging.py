"""A moving average of the weights (``train.ema``), which is evaluated in place of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from raygnn.config.schema import TrainConfig


class Averaging(pl.Callback):
    """``average = decay · average + (1 - decay) · weights`` after each optimizer step, from the
    weights after the first one (Polyak & Juditsky 1992, with a memory of ``1 / (1 - decay)``
    steps; as `torch.optim.swa_utils.AveragedModel` does it).

    In fp32 also of weights in bf16, in which a small change to an average would be lost. Floating
    buffers (running statistics) are averaged like weights, others are copied. Each rank keeps
    its own; of buffers that differ from rank to rank, as a user's own module may have them, that
    of rank 0 is the one in checkpoints, and whoever evaluates shares it.

    To be given to the trainer before the callbacks that evaluate and save.
    """

    def __init__(self, decay: float):
        self._update = get_ema_multi_avg_fn(decay)
        self._step = -1
        self.average: dict[str, Tensor] = {}

    @classmethod
    def of(cls, config: TrainConfig) -> Averaging | None:
        """What the config asks for."""
        return None if config.ema is None else cls(config.ema)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        values = _values(module)  # on their device, where a checkpoint's are not
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
        """The module has the average's values here."""
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
        """Give the module the average's values, if there was a step."""
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
    """fp32 at least."""
    half = value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value
