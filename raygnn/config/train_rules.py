"""What the keys of the section ``train`` must agree on."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.config.problems import Problem, show
from raygnn.config.schema import ScheduleConfig, TrainConfig

# Keys of a schedule that only some kinds read: a value other than the default would be ignored.
_ONLY_FOR = {
    "every": ("step", "cyclic"),
    "gamma": ("step", "cyclic"),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "threshold": ("plateau",),
    "floor": ("cosine", "plateau", "cyclic"),
    "mode": ("cyclic",),
    "momentum": ("one_cycle", "cyclic"),
}


def optimisation(train: TrainConfig) -> Iterator[Problem]:
    """Keys that the optimizer, the schedule or early stopping would not read."""
    if train.momentum and train.optimizer != "sgd":
        yield Problem(
            ("train", "momentum"),
            f"momentum {train.momentum:g} would be ignored: train.optimizer is {train.optimizer}",
            "remove train.momentum, or set train.optimizer to sgd",
        )
    if train.min_delta and train.patience is None:
        yield Problem(
            ("train", "min_delta"),
            f"min_delta {train.min_delta:g} would be ignored: train.patience is null",
            "remove train.min_delta, or set train.patience",
        )
    yield from _schedule(train)


def _schedule(train: TrainConfig) -> Iterator[Problem]:
    schedule = train.schedule
    for key, kinds in _ONLY_FOR.items():
        value, default = getattr(schedule, key), ScheduleConfig.model_fields[key].default
        if schedule.kind not in kinds and value != default:
            yield Problem(
                ("train", "schedule", key),
                f"{key} {show(value)} would be ignored: only {' and '.join(kinds)} read it, and "
                f"train.schedule.kind is {schedule.kind}",
                f"remove train.schedule.{key}, or choose another train.schedule.kind",
            )
    if schedule.kind == "cyclic" and schedule.gamma is not None and schedule.mode != "exp_range":
        yield Problem(
            ("train", "schedule", "gamma"),
            f"gamma {schedule.gamma:g} would be ignored: train.schedule.mode is {schedule.mode}",
            "remove train.schedule.gamma, or set train.schedule.mode to exp_range",
        )
    if schedule.momentum is not None and train.momentum:
        yield Problem(
            ("train", "momentum"),
            f"momentum {train.momentum:g} would be ignored: train.schedule.momentum is "
            f"{show(list(schedule.momentum))}",
            "keep one of the two",
        )
