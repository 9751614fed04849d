"""What may change in a job between its first start and a resume, and what must not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.config.schema import Config

# How long, where, how watched, how fast, and what to do about what goes wrong. All else decides
# which batches there are, what is made of them, or what a checkpoint's tensors mean. Whether the
# data are the same, their digest says, wherever they lie and however many parts they have.
_MAY_CHANGE = (
    "name",
    "storage",
    "graph.path",
    "graph.vocabulary",
    "partition",
    "model.kernels",
    "model.recompute",
    "sampling.batch_size",  # only with the number of workers: the global batch stays
    "sampling.topology",
    "sampling.cache",
    "sampling.cache_policy",
    "sampling.prefetch",
    "sampling.pin_memory",
    "sampling.eval_batch_size",
    "staging",
    "train.epochs",
    "train.max_steps",
    "train.log_every",
    "train.eval_every",
    "train.patience",
    "train.min_delta",
    "train.select",
    "guard",
    "comm",
    "cluster",
    "fault",
    "logging",
)

_WHOLE = ("graph.args", "model.args", "model.categories")  # the user's own keys are in them


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that must not change, dotted, with their values as JSON types.

    Args:
        config: a whole one, such as `Config.to_dict` gives.
    """
    found = {key: value for key, value in _leaves(config) if not _may_change(key)}
    # which there are, and in which order: the first one selects the best weights
    tasks = config.get("tasks")
    return {**found, "tasks": None if tasks is None else list(tasks)}


def changes(before: Mapping[str, Any], now: Config) -> list[str]:
    """The keys that changed and must not, each with both values, in the order of the config.

    Args:
        before: `fixed` of the config that the run began with. Keys that it lacks, since it is of
            an older version, are passed over.
    """
    after = fixed(now.to_dict())
    return [
        *(
            f"{key} was {json.dumps(before[key])} and is {json.dumps(value)}"
            for key, value in after.items()
            if key in before and before[key] != value
        ),
        *(f"{key} was null and is not" for key in _filled(before, after)),
        *(f"{key} is null and was not" for key in _filled(after, before)),
    ]


def _filled(empty: Mapping[str, Any], full: Mapping[str, Any]) -> list[str]:
    """Sections that are null in one, and have keys in the other; but ``graph``, which a partition
    that is there can do without: whether the data are the same, their digest says; and ``tasks``,
    whose names are compared."""
    apart = "graph", "tasks"
    return [
        key
        for key, value in empty.items()
        if value is None and key not in apart and any(other.startswith(f"{key}.") for other in full)
    ]


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in _MAY_CHANGE)


def _leaves(value: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{head}{name}"
        if isinstance(inner, Mapping) and key not in _WHOLE:
            yield from _leaves(inner, f"{key}.")
        else:
            yield key, inner
