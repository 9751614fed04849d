"""What may change in a job between its first start and a resume, and what must not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.config.schema import Config

# How long, where, how watched and how fast: no step is another one for it. All else decides which
# batches there are, what is made of them, or what a checkpoint's tensors mean. Whether the data
# are the same, their digest says, wherever they lie and however many parts they have.
_MAY_CHANGE = (
    "name",
    "storage",
    "graph.path",
    "partition",
    "model.kernels",
    "sampling.batch_size",  # only with the number of workers: the global batch stays
    "sampling.topology",
    "sampling.cache",
    "sampling.cache_policy",
    "sampling.prefetch",
    "sampling.eval_batch_size",
    "staging",
    "train.epochs",
    "train.max_steps",
    "train.log_every",
    "train.eval_every",
    "train.patience",
    "train.select",
    "guard",
    "comm",
    "cluster",
    "fault",
)


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that must not change, dotted, with their values as JSON types.

    Args:
        config: a whole one, such as `Config.to_dict` gives.
    """
    return {key: value for key, value in _leaves(config) if not _may_change(key)}


def changes(before: Mapping[str, Any], now: Config) -> list[str]:
    """The keys that changed and must not, each with both values, in the order of the config.

    Args:
        before: the config that the run began with. Keys that it lacks, since it is of an older
            version, are passed over.
    """
    old, new = fixed(before), fixed(now.to_dict())
    return [
        f"{key} was {_show(old[key])} and is {_show(value)}"
        for key, value in new.items()
        if key in old and old[key] != value
    ]


def identity(config: Config) -> str:
    """Stands for all that must not change but the graph, for which its data stand: SHA-256."""
    keys = {k: v for k, v in fixed(config.to_dict()).items() if not k.startswith("graph")}
    text = json.dumps(keys, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in _MAY_CHANGE)


def _leaves(value: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{head}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{key}.")
        else:
            yield key, inner


def _show(value: Any) -> str:
    return json.dumps(value)
