"""Losses of single seeds: float32 outputs and targets → ``[B]``."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from raygnn.config.task import EdgeRegression, GraphRegression, NodeRegression, TaskConfig

Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: TaskConfig) -> Loss:
    """The loss of a task: cross entropy for classes, else of numbers what ``task.loss`` says."""
    if isinstance(config, (NodeRegression, EdgeRegression, GraphRegression)):
        return absolute if config.loss == "l1" else squared
    return cross_entropy


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """``outputs [B, C]``, classes ``y``, whole numbers of any dtype ``[B]`` or ``[B, 1]``."""
    return F.cross_entropy(outputs, y.long().flatten(), reduction="none")


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """``outputs [B, K]``, numbers ``y [B]`` or ``[B, K]``; the mean over K."""
    return F.mse_loss(outputs, y.float().view_as(outputs), reduction="none").mean(1)


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    """As `squared`, of the absolute difference."""
    return F.l1_loss(outputs, y.float().view_as(outputs), reduction="none").mean(1)
