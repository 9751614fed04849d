"""Normalisation and activation by their names in the config."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """In place: nothing before it needs its own output for the backward pass."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": partial(F.relu, inplace=True),
        "elu": partial(F.elu, inplace=True),
    }
    return functions[name]


def norm(kind: str, width: int) -> nn.Module:
    """The config's ``model.norm`` of rows ``[N, width]``; "none" leaves them as they are."""
    if kind == "layer":
        return nn.LayerNorm(width)
    if kind == "batch":
        return _BatchNorm(width)
    return nn.Identity()


@contextmanager
def repeated() -> Iterator[None]:
    """What runs here ran before, on the same rows: running statistics have had them."""
    before, _repeats.now = _repeats.now, True
    try:
        yield
    finally:
        _repeats.now = before


class _Repeats(threading.local):  # a backward pass may run in a thread of torch's own
    now = False


_repeats = _Repeats()


class _BatchNorm(nn.BatchNorm1d):
    """Takes a single row or none, too, which an odd batch may leave: by running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) <= 1:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if self.training and _repeats.now:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, var = self.running_mean.clone(), self.running_var.clone()
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)
