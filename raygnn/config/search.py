"""Section ``search``: the hyperparameter search of ``raygnn tune``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from raygnn.config.problems import Problem, show
from raygnn.config.values import AutoCount, Count, Section, Text, or_say, to_tuple
from raygnn.config.yaml_text import KeyPath

_FIXED = ("name", "storage", "graph", "partition", "staging", "cluster", "logging", "search")
_TRIALS = 20
_MOST = 10_000  # trials

Numbers: TypeAlias = Annotated[
    tuple[float, float], BeforeValidator(to_tuple), or_say("two numbers, [LOW, HIGH]")
]
WholeNumbers: TypeAlias = Annotated[
    tuple[int, int], BeforeValidator(to_tuple), or_say("two whole numbers, [LOW, HIGH]")
]


class SearchValues(Section):
    """Values of one key, by exactly one of: choice, uniform, loguniform, randint."""

    choice: Annotated[tuple[Any, ...], BeforeValidator(to_tuple)] | None = None
    """List of values."""
    uniform: Numbers | None = None
    """Range of a number, [LOW, HIGH]."""
    loguniform: Numbers | None = None
    """Range of a positive number, uniform in its logarithm."""
    randint: WholeNumbers | None = None
    """Range of a whole number, [LOW, HIGH]; HIGH is excluded, as in Ray Tune."""

    @property
    def kind(self) -> tuple[str, tuple[Any, ...]]:
        """Name of the key that is set, and its value."""
        names = type(self).model_fields
        return next((name, value) for name in names if (value := getattr(self, name)) is not None)

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values to check: all choices, or both ends."""
        kind, value = self.kind
        return (value[0], value[1] - 1) if kind == "randint" else value

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"expected one of {', '.join(type(self).model_fields)}, got {len(given)}"
            yield Problem(at, what, "write {choice: [VALUE, …]}, or {uniform: [LOW, HIGH]}")
            return
        kind, value = self.kind
        here = (*at, kind)
        if kind != "choice" and value[0] > value[1]:
            yield Problem(here, f"{show(value)} is an empty range", "write the lower number first")
        elif kind == "loguniform" and value[0] <= 0:
            what = f"the logarithm of {value[0]:g} does not exist"
            yield Problem(here, what, "begin above 0, or use uniform")
        elif len(set(map(show, self.extremes))) < 2:
            what = f"{show(value)} has fewer than two values"
            yield Problem(here, what, "give two values or more, or set the key itself")


class SearchConfig(Section):
    """Hyperparameter search (`raygnn tune`): trials with sampled values of some keys."""

    space: dict[Text, SearchValues] = Field(
        min_length=1,
        description="Key such as `train.lr` → its values, `{choice: [64, 128]}`, `{uniform: "
        "[0, 0.6]}`, `{loguniform: [1.0e-4, 0.1]}` or `{randint: [1, 5]}`. Keys of the sections "
        f"{', '.join(_FIXED[2:-1])} are equal in all trials.",
    )
    metric: Text | None = None
    """Metric to optimise, such as `val/loss` or `seeds_per_second`; null = the task's metric on the
    validation split."""
    trials: Count | None = Field(
        None, description=f"Number of trials; null = {_TRIALS}, or all of a grid."
    )
    algorithm: Literal["random", "grid", "optuna"] = "random"
    """random = sampled with train.seed; grid = all combinations of choices; optuna = suggested by
    Optuna's TPE from the trials so far, from train.seed (`pip install raygnn[optuna]`)."""
    scheduler: Literal["none", "asha", "median"] = "asha"
    """Early stopping of trials, by epochs: asha = the worse trials at each rung (successive
    halving), median = trials below the median of the other trials, none."""
    concurrent: AutoCount = "auto"
    """Number of concurrent trials; auto = as many as fit in the cluster."""

    @property
    def count(self) -> int:
        """Number of trials."""
        if self.algorithm == "grid":
            return math.prod(len(values.extremes) for values in self.space.values())
        return self.trials or _TRIALS

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations of the choices."""
        for values in product(*(values.kind[1] for values in self.space.values())):
            yield dict(zip(self.space, values, strict=True))

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        sound = True
        for key, values in self.space.items():
            here = (*at, "space", key)
            if key.partition(".")[0] in _FIXED:
                what = f"{key} cannot differ between trials"
                yield Problem(here, what, "remove it from the space")
            sound &= not any(values.problems(here))
            if sound and self.algorithm == "grid" and values.choice is None:
                what = f"algorithm grid needs a choice for {key}, not {values.kind[0]}"
                yield Problem(here, what, "list its values, or set search.algorithm to random")
        if self.algorithm == "grid":
            yield from self.unused(at, "trials", why="a grid has a trial for each combination")
        if sound and self.count > _MOST:
            what = f"{self.count:,} trials, more than {_MOST:,}"
            yield Problem(at, what, "search fewer values")
