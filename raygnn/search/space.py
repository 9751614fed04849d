"""Sampled settings of a search, and the configuration of each trial."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.load import load_config
from raygnn.config.problems import nearest, show
from raygnn.config.rules import leaves
from raygnn.config.schema import Config, metric_name
from raygnn.config.search import SearchConfig, SearchValues
from raygnn.config.task import LOWER_IS_BETTER
from raygnn.errors import ConfigError
from raygnn.runs.run import open_run

SPEED = "seeds_per_second"  # reported by every training, not by validation
_SPEED_STEPS, _SPEED_TRIALS = 200, 12
# keys that change the speed but not the batches
_SPEED_SPACE: dict[str, tuple[Any, ...]] = {
    "sampling.prefetch": (1, 2, 4, 8),
    "sampling.cache": (0.0, 0.25, "auto"),
    "sampling.topology": ("replicated", "partitioned"),
    "comm.overlap": (True, False),
    "comm.bucket_cap_mb": (1, 5, 25, 100),
}


def speed_search(config: Config) -> Config:
    """Return the search ``NAME-speed`` for the fastest values of keys that do not change results:
    short trials, one at a time, the first with the job's values. Keys that the job cannot use are
    skipped."""
    space = {}
    for key, values in _SPEED_SPACE.items():
        with suppress(ConfigError):
            for value in values:
                load_config(config.to_dict(), {key: value})
            space[key] = {"choice": values}
    section = {"space": space, "metric": SPEED, "trials": _SPEED_TRIALS}
    section |= {"scheduler": "none", "concurrent": 1}
    found = {**config.to_dict(), "name": f"{config.name}-speed", "search": section}
    return load_config(found, {"train.max_steps": config.train.max_steps or _SPEED_STEPS})


def sample(config: Config) -> list[dict[str, Any]]:
    """Return the settings of each trial, dotted key → value; equal for an equal ``train.seed``. For
    ``optuna`` return none, since it suggests them while trials run.

    Raises:
        ConfigError: a key or value of the space is not valid, settings contradict each other, or
            Optuna is not installed.
    """
    search = search_of(config)
    for key, values in search.space.items():
        for value in values.extremes:
            trial_config(config, {key: value})
    if search.algorithm == "grid":
        settings = list(search.grid())
    elif search.algorithm == "optuna":
        if importlib.util.find_spec("optuna") is None:
            what, remedy = "Optuna is not installed here", "run `pip install raygnn[optuna]`"
            raise ConfigError(what, where=config.where("search.algorithm"), remedy=remedy)
        settings = []
    else:
        generator = np.random.default_rng(config.train.seed)
        settings = [
            {key: _draw(values, generator) for key, values in search.space.items()}
            for _ in range(search.count)
        ]
        if search.metric == SPEED:  # the first trial is the baseline
            own = dict(leaves(config.to_dict()))
            settings[0] = {key: own[key] for key in search.space}
    for one in settings:
        trial_config(config, one)
    return settings


def search_of(config: Config) -> SearchConfig:
    """Return the section ``search``. Raises ConfigError if there is none."""
    if config.search is None:
        what = "the configuration has no section search, with the values to try"
        remedy = "add one, such as `search: {space: {train.lr: {loguniform: [1.0e-4, 0.1]}}}`"
        raise ConfigError(what, where=config.where("search"), remedy=remedy)
    return config.search


def _draw(values: SearchValues, generator: np.random.Generator) -> Any:
    kind, given = values.kind
    if kind == "choice":
        return given[generator.integers(len(given))]
    low, high = given
    if kind == "randint":
        return int(generator.integers(low, high))
    if kind == "uniform":
        return float(generator.uniform(low, high))
    drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
    return min(max(drawn, low), high)


def trial_config(
    config: Config,
    settings: Mapping[str, Any],
    run: tuple[Path, str] | None = None,
    partition: Path | None = None,
) -> Config:
    """Return the configuration of a trial, checked.

    Args:
        run: storage and name of the trial's run; None = the search's, to check the settings.
        partition: directory of the partition or collection that all trials share.

    Raises:
        ConfigError: a key or value is not valid.
    """
    overrides = {**settings, "search": None}
    if run is not None:
        overrides |= {"storage": str(run[0]), "name": run[1]}
        if config.train.init is not None:
            there = open_run(config.train.init.run, str(config.storage))
            overrides["train.init.run"] = there.shown
    if partition is not None:
        overrides["partition.path"] = str(partition)
    try:
        return load_config(config.to_dict(), overrides)
    except ConfigError as error:
        text = ", ".join(f"{key}={show(value)}" for key, value in settings.items())
        where = "search.space" + (f".{next(iter(settings))}" if len(settings) == 1 else "")
        what, where = f"{text}: {error.what}", config.where(where)
        raise ConfigError(what, where=where, remedy=error.remedy) from None


def metric_of(config: Config) -> tuple[str, str]:
    """Return the metric to optimise, as records name it, and ``max`` or ``min``. Raises ConfigError
    if no evaluation reports it."""
    known = [
        f"val/{metric_name(name, metric)}"
        for name, one in config.by_task.items()
        for metric in (one.task.chosen_metric, "loss")
    ]
    known.append(SPEED)
    metric = search_of(config).metric or known[0]
    if metric not in known:
        close, what = nearest(metric, known), f"{metric!r} is not reported"
        remedy = f"did you mean {close}?" if close else f"choose {' or '.join(known)}"
        raise ConfigError(what, where=config.where("search.metric"), remedy=remedy)
    return metric, "min" if metric.rpartition("/")[2] in LOWER_IS_BETTER else "max"
