"""Ray Train backend that applies the communication plan before the process group exists.

The training function runs after the group was created, which is too late for communication
variables; a backend's ``on_start`` runs before, on every start and restart. Afterwards each worker
compares the result with the plan.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig

from raygnn import compat
from raygnn.config.comm_plan import CommPlan
from raygnn.config.places import HIDDEN, is_secret
from raygnn.errors import TrainingError
from raygnn.preflight import machine
from raygnn.worker.control import ControlHandle, Worker

_GOODBYE = 5  # seconds for ranks to leave their process groups


@dataclass(kw_only=True)
class CommBackendConfig(TorchConfig):
    """TorchConfig that applies a plan.

    Attributes:
        plan: overrides Ray's own choices.
        logs: directory of ``comm-rank-<r>.jsonl``, with a line of each rank's variables per start.
        control: records each start, and the nodes of its ranks.
    """

    plan: CommPlan
    logs: Path
    control: ControlHandle

    @property
    def backend_cls(self) -> type[Any]:
        return _CommBackend


class _CommBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group, backend_config: CommBackendConfig) -> None:  # type: ignore[no-untyped-def]
        plan, logs, control = backend_config.plan, backend_config.logs, backend_config.control
        worker_group.execute(_apply, plan)
        super().on_start(worker_group, backend_config)
        started = worker_group.execute(_describe)
        logs.mkdir(parents=True, exist_ok=True)  # on the driver's node
        for record in started:
            with open(logs / f"comm-rank-{record['rank']}.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
        worker_group.execute(_verify, plan)
        ranked = sorted(started, key=lambda record: record["rank"])
        control.begin([Worker(record["host"], record["node"]) for record in ranked])

    def on_shutdown(self, worker_group, backend_config: CommBackendConfig) -> None:  # type: ignore[no-untyped-def]
        # default: half a minute for ranks that may be gone, and are killed next
        os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", str(_GOODBYE))
        super().on_shutdown(worker_group, backend_config)


def _apply(plan: CommPlan) -> None:
    """Set this rank's variables, which are computed if its node joined after the plan was made."""
    context = ray.get_runtime_context()
    variables = plan.nodes.get(context.get_node_id()) or plan.nodes.get("")
    if variables is None:
        network = machine.network(ray.util.get_node_ip_address())
        variables = plan.variables(network, machine.environment())
    _given.clear()
    _given.update({variable.name: variable.value for variable in variables})
    os.environ.update(_given)
    dist.set_debug_level_from_env()  # torch read it when it was imported
    compat.listen_on_own_address()


_given: dict[str, str] = {}  # in a worker: variables that _apply has set


def _in_force() -> dict[str, Any]:
    """Return the current values of the variables that were set, and the backend."""
    return {**{name: os.environ.get(name) for name in _given}, "backend": dist.get_backend()}


def _describe() -> dict[str, Any]:
    given = {name: _shown(name, value) for name, value in _in_force().items()}
    return {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "time": time.time(),
        "host": socket.gethostname(),
        "node": ray.get_runtime_context().get_node_id(),
        "given": given,
    }


def _verify(plan: CommPlan) -> None:
    """Compare the process group and its variables with the plan."""
    found, rank = _in_force(), dist.get_rank()
    for name, wanted in {**_given, "backend": plan.backend}.items():
        if found[name] != wanted:
            raise TrainingError(
                f"{name} is {_shown(name, found[name])!r} after the process group was created, "
                f"instead of {_shown(name, wanted)!r}",
                where=f"rank {rank} on {socket.gethostname()}",
                remedy="find what sets it in that node's start-up or in the model's module",
                rank=rank,
            )


def _shown(name: str, value: Any) -> Any:
    return HIDDEN if is_secret(name, str(value)) else value
