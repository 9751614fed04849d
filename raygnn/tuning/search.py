"""Which settings a sweep tries, one key after the other, and which of them it chooses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raygnn.config.schema import Config

Settings = Mapping[str, Any]  # dotted key → value, besides what the configuration says

_CLEARLY = 1.02  # times as fast: what is less is noise, and the simpler settings stay
_ROUNDS = 2  # in which the settings that count are measured against each other at the end

BUCKETS = (1, 5, 25, 125)  # MB
COMPRESSIONS = ("none", "bf16", "fp16")

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
        trials: one for each of the settings, in order, with the mean of its measurements.
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


def axes(config: Config, workers: int, gradients: int, *, one_host: bool = False) -> list[Axis]:
    """What can be tried for this job, those that leave results alone first.

    Args:
        gradients: bytes of all of them; buckets that hold them all are all the same.
        one_host: whether all ranks are on one, where no rows are cached.
    """
    sampling, train, comm = config.sampling, config.train, config.comm
    found = [Axis("sampling.prefetch", _other(sampling.prefetch, (0, 2, 4)))]
    if workers == 1:
        return found
    if not config.task.of_graphs and not one_host:
        found.append(Axis("sampling.cache", _other(sampling.cache, (0.0, 0.1, 0.5))))
    known = {min(comm.bucket_cap_mb * 2**20, gradients)}
    sizes = []
    for size in BUCKETS:
        if (held := min(size * 2**20, gradients)) not in known:
            known.add(held)
            sizes.append(size)
    buckets = Axis("comm.bucket_cap_mb", tuple(sizes))
    found += [
        buckets,
        Axis("comm.compression", _other(comm.compression, COMPRESSIONS)),
        buckets,  # what is best may be another one for half the bytes
        Axis("train.accumulate", tuple(train.accumulate * factor for factor in (2, 4))),
    ]
    return found


def search(
    axes: list[Axis], measure: Callable[[Settings], Trial], is_possible: Callable[[Settings], bool]
) -> Outcome:
    """Try one axis after the other, each from the best settings so far.

    What seems clearly faster is measured once more, and so is what it would replace: on a busy
    machine a single measurement says little.

    Args:
        measure: settings → how fast they are; the same on all ranks.
        is_possible: whether settings contradict each other, or what is configured; likewise.
    """
    runs: list[list[Trial]] = []  # of one setting each

    def take(settings: Settings) -> list[Trial]:
        known = next((each for each in runs if each[0].settings == settings), None)
        if known is None:
            known = []
            runs.append(known)
        known.append(measure(settings))
        return known

    best = exact = take({})
    for axis in axes:
        start = best[0].settings
        for value in axis.values:
            settings = {**start, axis.key: value}
            tried = any(each[0].settings == settings for each in runs)
            if tried or not is_possible(settings):
                continue
            found = take(settings)
            if _is_faster(found, best):
                take(best[0].settings)
                take(settings)
                if _is_faster(found[-1:], best[-1:]) and _is_faster(found, best):
                    best = found
        if is_exact(best[0].settings):
            exact = best
    base = runs[0]
    if best is not base:
        finals = [each for each in runs if any(each is one for one in (base, exact, best))]
        for _ in range(_ROUNDS):
            for each in finals:
                take(each[0].settings)
        exact, best = (
            each if _is_faster(each[-_ROUNDS:], base[-_ROUNDS:]) else base for each in (exact, best)
        )
    base_rate, exact_rate, fastest_rate = (_rate(e[-_ROUNDS:]) for e in (base, exact, best))
    return Outcome(
        tuple(
            Trial(each[0].settings, _rate(each), _mean([t.facts for t in each])) for each in runs
        ),
        exact[0].settings,
        best[0].settings,
        base_rate,
        exact_rate,
        fastest_rate,
    )


def _mean(facts: list[Any]) -> Any:
    """The mean of numbers, and of those within."""
    if isinstance(facts[0], Mapping):
        return {name: _mean([each[name] for each in facts]) for name in facts[0]}
    return sum(facts) / len(facts)


def _is_faster(found: list[Trial], best: list[Trial]) -> bool:
    return _rate(found) > _rate(best) * _CLEARLY


def _rate(trials: list[Trial]) -> float:
    return sum(trial.rate for trial in trials) / len(trials)


def is_exact(settings: Settings) -> bool:
    """Whether results stay as they are, but for the order of sums."""
    return not set(settings) & set(NUMERICS)


def _other(value: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for each in values if each != value)
