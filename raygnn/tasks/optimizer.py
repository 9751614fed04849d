"""The optimizer that the section ``train`` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from raygnn.config.schema import TrainConfig

Construct = Callable[[type[torch.optim.Optimizer], Any, dict[str, Any]], torch.optim.Optimizer]


def plain(
    kind: type[torch.optim.Optimizer], parameters: Any, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of its class, with all of its state."""
    return kind(parameters, **options)


def rate_scale(config: TrainConfig, planned: float) -> float:
    """What ``train.lr`` is multiplied by (``train.lr_scaling``).

    Linear as Goyal et al., "Accurate, large minibatch SGD" (2017), or by the square root, which
    keeps the variance of a step (Krizhevsky, "One weird trick", 2014).

    Args:
        planned: number of ranks that the global batch is made for.
    """
    return {"none": 1.0, "linear": planned, "sqrt": planned**0.5}[config.lr_scaling]


def make_optimizer(
    parameters: Sequence[nn.Parameter],
    config: TrainConfig,
    planned: float,
    may_fuse: bool,
    construct: Construct = plain,
) -> torch.optim.Optimizer:
    """The optimizer of some parameters.

    Args:
        planned: see `rate_scale`.
        may_fuse: whether adam and adamw may be one kernel, where torch's default on a CPU is ten
            for each parameter.
        construct: from the class, the parameters and the other arguments.
    """
    kwargs: dict[str, Any] = {
        "lr": config.lr * rate_scale(config, planned),
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "sgd":
        return construct(torch.optim.SGD, parameters, {**kwargs, "momentum": config.momentum})
    if may_fuse and all(p.is_floating_point() for p in parameters):
        kwargs["fused"] = True
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return construct(kinds[config.optimizer], parameters, kwargs)
