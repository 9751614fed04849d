"""Optimizers (``train.optimizer``) and learning rate schedules (``train.schedule``).

All schedules but ``plateau`` are functions of the step number alone, so that a resumed run has the
rates of an uninterrupted run, and an extended run has the rates of the longer run from there on.
torch's schedulers of these kinds store the length, and some the last rate, in their state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau

from raygnn.config.schema import ScheduleConfig, TrainConfig

Construct = Callable[[type[torch.optim.Optimizer], Any, dict[str, Any]], torch.optim.Optimizer]


def plain(
    kind: type[torch.optim.Optimizer], parameters: Any, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Construct an optimizer with unsharded state."""
    return kind(parameters, **options)


def rate_scale(config: TrainConfig, planned: float) -> float:
    """Return the factor of ``train.lr`` (``train.lr_scaling``): ``planned``, the number of ranks
    that the global batch is designed for (Goyal et al., "Accurate, large minibatch SGD", 2017), or
    its square root, which keeps the variance of a step (Krizhevsky, "One weird trick", 2014)."""
    return {"none": 1.0, "linear": planned, "sqrt": planned**0.5}[config.lr_scaling]


def make_optimizer(
    named: Mapping[str, nn.Parameter],
    config: TrainConfig,
    planned: float,
    may_fuse: bool,
    construct: Construct = plain,
) -> torch.optim.Optimizer:
    """Build the optimizer of the parameters that get gradients.

    Args:
        named: name in the model → parameter. With ``train.init.lr_scale`` there is a group for each
            factor, first the group with the factor 1, which may be empty.
        planned: see `rate_scale`.
        may_fuse: allow fused adam and adamw, one kernel instead of ten per parameter on a CPU.
        construct: called with the class, the parameters and the other arguments.
    """
    rate = config.lr * rate_scale(config, planned)
    kwargs: dict[str, Any] = {"lr": rate, "weight_decay": config.weight_decay}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    parameters: Any = list(trained.values())
    may_fuse = may_fuse and all(p.is_floating_point() for p in parameters)
    if config.init is not None and config.init.lr_scale:
        groups: dict[float, list[nn.Parameter]] = {1.0: []}
        for name, parameter in trained.items():
            groups.setdefault(config.init.scale(name), []).append(parameter)
        parameters = [{"params": own, "lr": rate * by} for by, own in groups.items()]
    if config.optimizer == "sgd":
        kwargs["momentum"] = config.momentum
    elif may_fuse:
        kwargs["fused"] = True
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return construct(kinds[config.optimizer], parameters, kwargs)


Curve = Callable[[int], float]  # step → rate as a share of the highest

# one_cycle, as in Smith & Topin's code, torch and fastai: the first rate is a 25th of the highest,
# the last a 10,000th of the first
_FIRST, _LAST = 1 / 25, 1 / 25 / 1e4


class Schedule(LRScheduler):
    """Learning rate as a function of the step number: after ``warmup`` steps ``curve``; they start
    at the share ``start`` of its first rate."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, curve: Curve, *, warmup: int = 0, start: float = 1.0
    ):
        self._curve, self._warmup, self._start = curve, warmup, start
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        step = self.last_epoch  # torch's name for the number of steps
        share = self._curve(max(0, step - self._warmup))
        if step < self._warmup:
            share *= self._start + (1 - self._start) * step / self._warmup
        return [base * share for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.last_epoch,
            "step_count": self._step_count,
            "base": list(self.base_lrs),
            "start": self._start,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["step"], state_dict["step_count"]
        # the global batch may be designed for another number of workers now
        self.base_lrs, self._start = state_dict["base"], state_dict["start"]
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            group["lr"] = rate


def with_schedules(
    optimizer: torch.optim.Optimizer, config: TrainConfig, planned: float, total: int
) -> Any:
    """Return the value of `LightningModule.configure_optimizers`. Lightning steps a `Schedule`
    after each optimizer step; it only stores a `ReduceLROnPlateau`, which the evaluation steps with
    a score (higher is better) that is equal on all ranks.

    Args:
        planned: see `rate_scale`.
        total: optimizer steps of the run.
    """
    schedule = config.schedule
    floor, gamma = schedule.floor or 0.0, schedule.gamma or 0.1
    # one_cycle has its own warm-up
    warmup = 0 if schedule.kind == "one_cycle" else _steps(schedule.warmup, total)
    scale = rate_scale(config, planned)
    lowest = [group["lr"] * floor for group in optimizer.param_groups]
    # a scaled rate starts from one worker's rate (Goyal et al. 2017, section 2.2)
    start = 1 / (warmup + 1) if config.lr_scaling == "none" else min(1.0, 1 / scale)
    found: list[dict[str, Any]] = []
    if schedule.kind == "plateau":
        if warmup:  # LinearLR does not change the rate after its end
            ramp = LinearLR(optimizer, start_factor=start, total_iters=warmup)
            found.append({"scheduler": ramp, "interval": "step"})
        plateau = ReduceLROnPlateau(
            optimizer,
            mode="max",
            factor=gamma,
            patience=schedule.patience,
            threshold=config.min_delta,
            threshold_mode="abs",
            min_lr=lowest,
            eps=0.0,
        )
        # Lightning would step it after its own evaluation, which is never run
        found.append({"scheduler": plateau, "monitor": "none", "frequency": sys.maxsize})
    elif schedule.kind != "constant" or warmup:
        curve = _curve(schedule, total, max(1, total - warmup))
        own = Schedule(optimizer, curve, warmup=warmup, start=start)
        found.append({"scheduler": own, "interval": "step"})
    return ([optimizer], found) if found else optimizer


def _curve(schedule: ScheduleConfig, total: int, rest: int) -> Curve:
    if schedule.kind == "cosine":
        return lambda step: _between(schedule.floor or 0.0, _falling(step / rest))
    if schedule.kind == "step":
        every = _steps(schedule.every or 0.3, total)
        return lambda step: (schedule.gamma or 0.1) ** (step // every)
    if schedule.kind == "one_cycle":
        return one_cycle(_steps(0.3 if schedule.warmup is None else schedule.warmup, total), total)
    return lambda step: 1.0


def one_cycle(rise: int, total: int) -> Curve:
    """Return a curve that rises in ``rise`` of ``total`` steps and then falls, by half a cosine
    each (Smith & Topin, "Super-convergence", 2018)."""

    def curve(step: int) -> float:
        if step < rise - 1:
            return _between(_FIRST, 1 - _falling(step / (rise - 1)))
        return _between(_LAST, _falling((step - rise + 1) / max(1, total - rise)))

    return curve


def _falling(part: float) -> float:
    return (1 + math.cos(math.pi * min(1.0, part))) / 2


def _between(low: float, height: float) -> float:
    return low + (1 - low) * height


def _steps(given: int | float | None, total: int) -> int:
    if given is None:
        return 0
    return given if isinstance(given, int) else max(1, round(given * total))
