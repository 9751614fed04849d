"""Which settings a sweep tries, one key after the other, and which of them it chooses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raygnn.config.rules import contradictions
from raygnn.config.schema import Config

Settings = Mapping[str, Any]  # dotted key → value, besides what the configuration says

_CLEARLY = 1.02  # times as fast: what is less is noise, and the simpler settings stay
_ROUNDS = 2  # in which the settings that count are measured against each other at the end

BUCKETS = (1, 5, 25, 125)  # MB
COMPRESSIONS = ("bf16", "fp16", "powersgd")

# What one of these changes is more than the order of a sum.
NUMERICS = ("comm.compression", "train.accumulate")


def apply(config: Config, settings: Settings) -> Config:
    """The configuration with these settings; not checked."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


@dataclass(frozen=True)
class Axis:
    """One key and the values to try, besides the one it has."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """Settings, and how fast they were.

    Attributes:
        rate: seeds a second.
        facts: of the measurement, for people: seconds of the parts, bytes.
    """

    settings: Settings
    rate: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What the sweep found.

    Attributes:
        trials: all of them, in order.
        exact: the fastest settings that do not change results.
        fastest: the fastest of all.
        base_rate, exact_rate, fastest_rate: measured in turns at the end.
    """

    trials: tuple[Trial, ...]
    exact: Settings
    fastest: Settings
    base_rate: float
    exact_rate: float
    fastest_rate: float


def axes(config: Config, workers: int) -> list[Axis]:
    """What can be tried for this job, those that leave results alone first."""
    sampling, train, comm = config.sampling, config.train, config.comm
    found = [Axis("sampling.prefetch", _other(sampling.prefetch, (0, 2, 4)))]
    if workers == 1:
        return found
    if not config.task.of_graphs:
        found.append(Axis("sampling.cache", _other(sampling.cache, (0.0, 0.1, 0.5))))
    buckets = Axis("comm.bucket_cap_mb", _other(comm.bucket_cap_mb, BUCKETS))
    narrow = config.precision == "bf16"
    compressions = ("powersgd",) if narrow else COMPRESSIONS
    found += [
        buckets,
        Axis("comm.compression", _other(comm.compression, compressions)),
        buckets,  # what is best may be another one for half the bytes
        Axis("train.accumulate", tuple(train.accumulate * factor for factor in (2, 4))),
    ]
    return found


def search(config: Config, axes: list[Axis], measure: Callable[[Settings], Trial]) -> Outcome:
    """Try one axis after the other, each from the best settings so far.

    Args:
        config: what the settings change; contradictions are not tried.
        measure: settings → how fast they are; the same on all ranks.
    """
    trials: list[Trial] = []

    def take(settings: Settings) -> Trial:
        trials.append(measure(settings))
        return trials[-1]

    best = exact = take({})
    for axis in axes:
        start = best
        for value in axis.values:
            settings = {**start.settings, axis.key: value}
            known = any(trial.settings == settings for trial in trials)
            if known or contradictions(apply(config, settings)):
                continue
            trial = take(settings)
            if trial.rate > best.rate * _CLEARLY:
                best = trial
        if axis.key not in NUMERICS and is_exact(best.settings):
            exact = best
    rates = _finals([{}, exact.settings, best.settings], take)
    return Outcome(tuple(trials), exact.settings, best.settings, *rates)


def is_exact(settings: Settings) -> bool:
    """Whether results stay as they are, but for the order of sums."""
    return not set(settings) & set(NUMERICS)


def _finals(settings: list[Settings], take: Callable[[Settings], Trial]) -> Iterator[float]:
    """Their rates, measured in turns, so that whatever drifts hits all of them."""
    distinct: list[Settings] = []
    for one in settings:
        if one not in distinct:
            distinct.append(one)
    rates: list[list[float]] = [[] for _ in distinct]
    for _ in range(_ROUNDS):
        for one, found in zip(distinct, rates):
            found.append(take(one).rate)
    for one in settings:
        values = rates[distinct.index(one)]
        yield sum(values) / len(values)


def _other(value: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for each in values if each != value)
