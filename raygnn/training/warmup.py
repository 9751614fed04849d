"""Processes of a local Ray that have imported what they will need, before they are needed.

Ray Train starts its processes one after the other, and each imports torch, Ray Train and, on the
ranks, Lightning: half a minute on two cores, most of it waiting. Tasks with the very environment
that Ray Train gives its actors leave idle processes behind, which Ray then takes for the actors.
Where a version of Ray does that differently, the processes are not used and nothing else changes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterable
from typing import Any

# Makes the ranks' environment differ from the controller's, so that each finds its own kind.
WORKER_ENV = {"RAYGNN_RANK": "1"}

_CONTROLLER = ("ray.train.torch", "ray.train.v2._internal.execution.controller")
_HELPER = ("ray.train.v2._internal.execution.checkpoint.sync_actor",)
_WORKER = ("raygnn.training.worker",)


def warm_up(workers: int) -> list[Any]:
    """Start to import in the background; returns what is under way. Ray is initialised."""
    if workers == 0:
        return []
    import ray

    env = {"env_vars": _propagated()}
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env=env)
    tasks = [task(_controller).remote(workers), task(_import).remote(_HELPER)]
    with contextlib.suppress(ImportError):
        # Ray Train waits for this actor before it starts anything else
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        get_or_create_autoscaling_coordinator()
    return tasks


def _propagated() -> dict[str, str]:
    """What Ray Train passes on from the driver to its actors."""
    try:
        from ray.train.v2._internal.constants import get_env_vars_to_propagate
    except ImportError:
        return {}
    name = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
    return {name: os.environ.get(name, "0"), **get_env_vars_to_propagate()}


def _controller(workers: int) -> None:
    """Import what the controller needs, after starting the ranks from here.

    Ray compares environments as text, and one that was inherited from a task is spelled another
    way than one that came from the driver: the controller starts the ranks, so this must, too.
    """
    import ray

    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": WORKER_ENV})(_import)
    ranks = [task.remote(_WORKER) for _ in range(workers)]
    _import(_CONTROLLER)
    ray.get(ranks)


def _import(modules: Iterable[str]) -> None:
    gc.disable()  # saves a fifth of the time: imports make no garbage
    try:
        for name in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        gc.enable()
