"""What a check may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from raygnn.config.schema import Config
from raygnn.graph.partition.edge_target import EdgeTarget
from raygnn.preflight.edges import edge_target
from raygnn.preflight.facts import Column, DryRun, NodeFacts, PartitionFacts, Resources
from raygnn.preflight.findings import Finding
from raygnn.preflight.network import Link
from raygnn.preflight.partition import task_ntype


@dataclass(frozen=True)
class Job:
    """Everything a check may look at.

    Attributes:
        nodes: those that answered; ``silent`` are the others.
        workers: how many will run at first.
        links: between nodes, as measured.
        ntype: the node type to predict for; None where the partition has none such.
        edges: what edges to predict for, or what is wrong with them and what to do about it;
            None where the task is not of edges. Of several tasks `by_task` has both.
        dry_run: of the model; None where there was none.
    """

    config: Config
    partition: PartitionFacts
    resources: Resources
    nodes: tuple[NodeFacts, ...]
    silent: tuple[NodeFacts, ...]
    workers: int
    ntype: str | None
    links: tuple[Link, ...] = ()
    edges: EdgeTarget | tuple[str, str] | None = None
    dry_run: DryRun | None = None

    @cached_property
    def by_task(self) -> dict[str, Job]:
        """Name of each task → the same for that one alone; "" where there is but one."""
        if self.config.tasks is None:
            return {"": self}
        facts = self.partition
        found = {}
        for name, config in self.config.by_task.items():
            ntype, edges = task_ntype(config, facts.columns), None
            if config.task.of_edges:
                edges = edge_target(config, facts.edges, facts.reverses)
            partition = replace(facts, splits=facts.by_type.get(ntype or "", {}))
            found[name] = replace(
                self, config=config, partition=partition, ntype=ntype, edges=edges
            )
        return found

    @cached_property
    def holding(self) -> tuple[NodeFacts, ...]:
        """The nodes on which there is room for a worker; all, if there is room on none."""
        cluster = self.config.cluster
        room = {
            node.node
            for node in self.resources.nodes
            if node.workers(cluster.cpus_per_worker, cluster.gpus_per_worker)
        }
        return tuple(node for node in self.nodes if node.node in room) or self.nodes

    @property
    def fewest(self) -> int:
        """With how many workers the job may go on, when others are lost."""
        limits = self.config.cluster.limits
        return min(limits[0], self.workers) if limits else self.workers

    @property
    def most(self) -> int:
        """How many workers a batch, and the partition, are made for."""
        limits = self.config.cluster.limits
        return max(limits[1], self.workers) if limits else self.workers

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        """The arrays of the node type to predict for."""
        return dict(self.partition.columns.get(self.ntype, {})) if self.ntype else {}


Check: TypeAlias = Callable[[Job], Iterator[Finding]]
