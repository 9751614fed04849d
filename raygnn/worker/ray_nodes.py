"""The nodes of a running Ray: which are there, what is free on them, which ranks went with one.

Ray counts a node as alive until it has missed its health checks for about half a minute. Whoever
decides before that has to ask the node itself.
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

_REACH = 2.0  # seconds for a node to take a connection
_ANSWER = 30.0  # seconds for a function that is run on nodes
_AT_ONCE = 64  # nodes that are asked at once


@dataclass(frozen=True)
class Lost:
    """A rank whose node is gone.

    Attributes:
        why: what is to be seen of the node from here.
    """

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} was lost with its node {self.host}: {self.why}"


def room(needs: Mapping[str, float], running: Sequence[Worker] = ()) -> int:
    """Return how many workers fit on the nodes that accept a connection, beside other jobs.

    Args:
        needs: resource → amount for one worker.
        running: workers that will give up theirs.
    """
    going = compat.draining_nodes()  # where Ray starts nothing any more
    alive = [node for node in living() if node["NodeID"] not in going]
    free, held = compat.free_resources(), Counter(worker.node for worker in running)
    fits = {}
    for node in alive:
        name = node["NodeID"]
        # a node that has just come is not in all of Ray's tables yet
        there = free.get(name, node["Resources"])
        counts = [(there.get(key, 0.0) + held[name] * n) // n for key, n in needs.items()]
        if (fit := int(min(counts))) > 0:
            fits[name] = fit
    there = _answering(node for node in alive if node["NodeID"] in fits)
    return sum(fit for name, fit in fits.items() if name in there)


def on_each(nodes: Iterable[str], act: Callable[..., object], *args: Any) -> None:
    """Run a function on nodes, as Ray numbers them; what does not answer in time is left."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with suppress(Exception):  # a node, or all of Ray, is gone
        task = ray.remote(num_cpus=0, max_retries=0)(act)
        strategies = (NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes)
        sent = [task.options(scheduling_strategy=strategy).remote(*args) for strategy in strategies]
        for reply in ray.wait(sent, num_returns=len(sent), timeout=_ANSWER)[1]:
            ray.cancel(reply)


def lost(workers: Sequence[Worker]) -> list[Lost]:
    """The ranks whose nodes are gone, of those that were started last."""
    alive = {node["NodeID"]: node for node in living()}
    used = {worker.node for worker in workers} & alive.keys()
    answering = _answering(alive[node] for node in used)
    return [
        Lost(
            rank,
            worker.host,
            "it takes no connection" if worker.node in alive else "Ray counts it as dead",
        )
        for rank, worker in enumerate(workers)
        if worker.node not in answering
    ]


def living() -> list[dict[str, Any]]:
    """Those that Ray counts as alive, as it lists them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _answering(nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    """The ids of those whose raylet takes a connection."""
    asked = list(nodes)
    if not asked:
        return set()
    with ThreadPoolExecutor(min(len(asked), _AT_ONCE)) as pool:
        answers = pool.map(_answers, asked)
        return {node["NodeID"] for node, yes in zip(asked, answers) if yes}


def _answers(node: Mapping[str, Any]) -> bool:
    return takes_connection(node["NodeManagerAddress"], node["NodeManagerPort"])


def takes_connection(host: str, port: int) -> bool:
    """Whether something listens there, and the host answers."""
    try:
        with socket.create_connection((host, port), timeout=_REACH):
            return True
    except OSError:
        return False
