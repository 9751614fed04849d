"""Losses and metrics as users write them, or with a fault."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def plain(outputs: Tensor, y: Tensor) -> Tensor:
    """The usual loss of each kind of targets."""
    if y.is_floating_point():
        return F.mse_loss(outputs, y, reduction="none").mean(1)
    if y.dim() == 1:
        return F.cross_entropy(outputs, y, reduction="none")
    losses = F.binary_cross_entropy_with_logits(outputs, y.float().clamp(min=0), reduction="none")
    return losses.masked_fill(y < 0, 0).mean(1)


def profit(outputs: Tensor, y: Tensor) -> float:
    """Accuracy, or minus the mean absolute error."""
    if y.is_floating_point():
        return -float((outputs - y).abs().mean())
    return float((outputs.argmax(1) == y).double().mean())


def mean(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y)


def detached(outputs: Tensor, y: Tensor) -> Tensor:
    return plain(outputs.detach(), y)


def raising(outputs: Tensor, y: Tensor) -> Tensor:
    raise ArithmeticError("no loss today")


def words(outputs: Tensor, y: Tensor) -> Any:
    return "good"


def of_every_class(outputs: Tensor, y: Tensor) -> float:
    """Reject targets that lack a class, or a label's 0 or 1, as scikit-learn's areas under curves
    do."""
    if y.dim() == 1:
        assert set(y.tolist()) == set(range(outputs.shape[1]))
    else:
        assert all({0, 1} <= set(column.tolist()) for column in y.T)
    return 0.0


def _odd(outputs: Tensor) -> bool:
    return outputs.requires_grad and dist.get_rank() == 1


def none_on_one(outputs: Tensor, y: Tensor) -> Any:
    return None if _odd(outputs) else plain(outputs, y)


def scalar_on_one(outputs: Tensor, y: Tensor) -> Tensor:
    return plain(outputs, y).mean() if _odd(outputs) else plain(outputs, y)


def infinite_on_one(outputs: Tensor, y: Tensor) -> Tensor:
    return plain(outputs, y) / 0 if _odd(outputs) else plain(outputs, y)


def constant_on_one(outputs: Tensor, y: Tensor) -> Tensor:
    return plain(outputs.detach() if _odd(outputs) else outputs, y)


def mae(outputs: Tensor, y: Tensor) -> float:
    return 0.0


def loss(outputs: Tensor, y: Tensor) -> float:
    return 0.0


def logarithmic(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute a squared error in log space, which requires positive targets."""
    return ((outputs - y.log()) ** 2).mean(1)
