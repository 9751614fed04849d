"""Normalisation and activation by their names in the config."""

from __future__ import annotations

from collections.abc import Callable
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


class _BatchNorm(nn.BatchNorm1d):
    """Takes a single row or none, too, which an odd batch may leave: by running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) <= 1:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return super().forward(x)
