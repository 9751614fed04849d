"""Nodes that are about to go: their notice is answered with a checkpoint at once.

Ray learns of it from its autoscaler, from a cloud's notice that an operator passes on, or from
``ray drain-node``; Ray Train starts anew when the time is up, from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from raygnn.checkpoint.save_requests import Request
from raygnn.driver.ray.connection import RayCluster
from raygnn.runs.display import Display
from raygnn.worker import ray_nodes
from raygnn.worker.job import last_start, ranks

_EVERY = 2.0  # seconds between looks
_BEFORE = 15.0  # seconds before its end that a node's ranks are asked for another checkpoint


class Preemption:
    """Asks the ranks for a checkpoint when a node that runs some is to go, and again right before
    it goes.

    Args:
        run_dir: of the run.
        cluster: whose nodes; those of a Ray of our own are not preempted.
    """

    def __init__(self, run_dir: Path, cluster: RayCluster, show: Display):
        self._run_dir = run_dir
        self._cluster = cluster
        self._show = show
        self._next = 0.0
        self._asked: set[tuple[str, bool]] = set()

    def look(self) -> None:
        """To be called often while ranks train."""
        if self._cluster.local or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        if not self._cluster.answers():
            return
        with contextlib.suppress(Exception):  # Ray's own trouble is not ours to tell
            going = ray_nodes.draining()
            self._asked = {(node, soon) for node, soon in self._asked if node in going}
            if going:
                self._ask(going, _by_node(self._run_dir))

    def _ask(self, going: Mapping[str, float | None], by_node: Mapping[str, list[int]]) -> None:
        for node in going.keys() & by_node.keys():
            left = going[node]
            soon = left is not None and left <= _BEFORE
            if (node, soon) in self._asked:
                continue
            Request(self._run_dir)
            first = (node, not soon) not in self._asked
            self._asked.add((node, soon))
            if first:
                when = f"in {left:.0f} s" if left is not None else "soon"
                who = ", ".join(map(str, by_node[node]))
                self._show.note(f"the node of rank {who} is to go {when}: saving a checkpoint")


def _by_node(run_dir: Path) -> dict[str, list[int]]:
    """Node id → the ranks that it ran in their last start."""
    found: dict[str, list[int]] = {}
    for rank in range(ranks(run_dir) or 0):
        node = (last_start(run_dir / "logs", rank) or {}).get("node")
        if node is not None:
            found.setdefault(str(node), []).append(rank)
    return found
