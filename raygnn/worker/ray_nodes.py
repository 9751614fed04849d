"""Nodes of a running Ray: the living ones, their free resources, and the ranks lost with a node.

Ray counts a node as alive until it has missed its health checks for about half a minute. Until then
only a failed connection shows that the node is gone.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raygnn import compat
from raygnn.worker.control import Worker

_REACH = 2.0  # seconds for a node to accept a connection
_ANSWER = 30.0  # seconds for a function that is run on nodes
_AT_ONCE = 64  # nodes to which connections are opened at once


@dataclass(frozen=True)
class Lost:
    """Rank whose node is gone; ``why``: the evidence."""

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} was lost with its node {self.host}: {self.why}"


def room(needs: Mapping[str, float], running: Sequence[Worker] = ()) -> int:
    """Return how many workers fit on the nodes that accept a connection, beside other jobs.
    ``needs``: resource → amount for one worker; ``running``: workers that will free theirs."""
    draining = compat.draining_nodes()  # on which Ray starts no more workers
    alive = [node for node in living() if node["NodeID"] not in draining]
    free, held = compat.free_resources(), Counter(worker.node for worker in running)
    fits = {}
    for node in alive:
        name = node["NodeID"]
        # a node that has just joined is not in all of Ray's tables yet
        available = free.get(name, node["Resources"])
        counts = [(available.get(key, 0.0) + held[name] * n) // n for key, n in needs.items()]
        if (fit := int(min(counts))) > 0:
            fits[name] = fit
    answering = _answering(node for node in alive if node["NodeID"] in fits)
    return sum(fits[name] for name in answering)


def start_on(node: str, act: Callable[..., object], *args: Any) -> Any:
    """Start a function as a Ray task on a node, by Ray's id; returns the reference to its result.
    Raises an error of Ray if no task can be started."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return ray.remote(**options)(act).remote(*args)


def on_each(nodes: Iterable[str], act: Callable[..., object], *args: Any) -> None:
    """Run a function on nodes, by Ray's ids; ignore those that do not answer in time."""
    import ray

    with suppress(Exception):  # a node, or all of Ray, is gone
        sent = [start_on(node, act, *args) for node in nodes]
        for reply in ray.wait(sent, num_returns=len(sent), timeout=_ANSWER)[1]:
            ray.cancel(reply)


def lost(workers: Sequence[Worker]) -> list[Lost]:
    """Return the ranks of the newest start whose nodes are gone."""
    alive = {node["NodeID"]: node for node in living()}
    used = {worker.node for worker in workers} & alive.keys()
    answering = _answering(alive[node] for node in used)
    return [
        Lost(
            rank,
            worker.host,
            "it accepts no connection" if worker.node in alive else "Ray counts it as dead",
        )
        for rank, worker in enumerate(workers)
        if worker.node not in answering
    ]


def living() -> list[dict[str, Any]]:
    """Return the nodes that Ray counts as alive, as it lists them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _answering(nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    polled = list(nodes)
    hosts = [node["NodeManagerAddress"] for node in polled]
    ports = [node["NodeManagerPort"] for node in polled]
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # which starts no more threads than it needs
        answers = pool.map(takes_connection, hosts, ports)
        return {node["NodeID"] for node, yes in zip(polled, answers) if yes}


def takes_connection(host: str, port: int) -> bool:
    """Return whether a process at this address accepts a connection."""
    try:
        with socket.create_connection((host, port), timeout=_REACH):
            return True
    except OSError:
        return False
