"""Where training is, for the black box: a callback, and a batch's description."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from raygnn.worker import blackbox

_DEEPEST = 6
_MOST = 64  # entries of a mapping or a sequence


class Phases(pl.Callback):
    """Notes the phases of each step: ``batch`` (waiting for it), ``forward``, ``backward``,
    ``optimizer``, ``between`` (callbacks: records, checkpoints, evaluation). To be the first of
    the callbacks, with `Waiting` as the last."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        blackbox.note("batch")

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        epoch = getattr(batch, "epoch", trainer.current_epoch)
        blackbox.note("forward", epoch=epoch, step=getattr(batch, "step", batch_idx))
        seen = weakref.ref(batch)  # the batch shall go when training is through with it
        blackbox.remember(lambda: describe(seen()))

    def on_before_backward(self, *_: Any) -> None:
        blackbox.note("backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        blackbox.note("optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        blackbox.note("between")

    def on_train_epoch_end(self, *_: Any) -> None:
        blackbox.note("between")


class Waiting(pl.Callback):
    """Notes, as the last of the callbacks, that they are through and the next batch is awaited."""

    def on_train_batch_end(self, *_: Any) -> None:
        blackbox.note("batch")


def describe(value: Any, depth: int = 0) -> Any:
    """Names, dtypes and shapes of what a batch holds, without its contents, as plain JSON types."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if depth < _DEEPEST:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            return {f.name: describe(getattr(value, f.name), depth + 1) for f in fields}
        if isinstance(value, Mapping):
            items = list(value.items())[:_MOST]
            return {str(key): describe(item, depth + 1) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [describe(item, depth + 1) for item in value[:_MOST]]
    return value if isinstance(value, (int, float, bool, type(None))) else type(value).__name__
