"""Findings, and the checks that yield them from a job's facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, TypeAlias, get_args

from raygnn.config.schema import Config
from raygnn.graph.data import EdgeTarget
from raygnn.preflight.facts import ArrayType, NodeFacts, PartitionFacts, Resources
from raygnn.preflight.links import Link
from raygnn.preflight.partition_facts import goal_of, known_splits

Severity = Literal["error", "warn", "info"]


@dataclass(frozen=True)
class Finding:
    """Finding that refuses the job (``error``), warns (``warn``) or informs (``info``)."""

    check: str  # name of the check
    severity: Severity
    what: str  # one sentence, with the values in it
    remedy: str = ""  # one sentence, what to do
    nodes: tuple[str, ...] = ()  # the nodes concerned; empty if it is about the job as a whole

    def __str__(self) -> str:
        named = (rf"(\b(on|from|to)|,) {re.escape(node)}(?![\w.-])" for node in self.nodes)
        if all(re.search(pattern, self.what) for pattern in named):
            return self.what  # it names them already, if there are any
        return f"{self.what} (on {', '.join(self.nodes)})"

    @property
    def text(self) -> str:
        """Severity, check, sentence and remedy, for people."""
        remedy = f"\n  → {self.remedy}" if self.remedy else ""
        return f"{self.severity} [{self.check}]: {self}{remedy}"


def _finding(severity: Severity, what: str, remedy: str = "", nodes: Iterable[str] = ()) -> Finding:
    return Finding("", severity, what, remedy, tuple(nodes))


error, warn, info = (partial(_finding, severity) for severity in get_args(Severity))


@dataclass(frozen=True)
class JobFacts:
    config: Config
    partition: PartitionFacts
    resources: Resources
    nodes: tuple[NodeFacts, ...]  # nodes that answered; ``silent`` are those that did not
    silent: tuple[NodeFacts, ...]
    workers: int  # number of workers at the start
    ntype: str | None  # node type of the targets; None if there is no such type
    links: tuple[Link, ...] = ()  # measured links between nodes
    # edges of the targets, or problem and remedy; None if the task is not on edges. With multi-task
    # learning, `by_task` has both
    edges: EdgeTarget | tuple[str, str] | None = None
    dry_run: Finding | None = None  # finding of the model's dry run, if any

    @cached_property
    def by_task(self) -> dict[str, JobFacts]:
        """Name of each task → facts of the job for that task alone; "" for a single task."""
        if self.config.tasks is None:
            return {"": self}
        facts, jobs = self.partition, {}
        for name, config in self.config.by_task.items():
            ntype, edges = goal_of(config, facts)
            partition = replace(
                facts, splits=known_splits(config, facts.by_type.get(ntype or "", {}))
            )
            jobs[name] = replace(self, config=config, partition=partition, ntype=ntype, edges=edges)
        return jobs

    @cached_property
    def holding(self) -> tuple[NodeFacts, ...]:
        """Nodes with capacity for a worker; all nodes, if none has."""
        cluster = self.config.cluster
        room = {
            node.node
            for node in self.resources.nodes
            if node.workers(cluster.cpus_per_worker, cluster.gpus_per_worker)
        }
        return tuple(node for node in self.nodes if node.node in room) or self.nodes

    @property
    def fewest(self) -> int:
        """Fewest workers with which the job may continue."""
        limits = self.config.cluster.limits
        return min(limits[0], self.workers) if limits else self.workers

    @property
    def most(self) -> int:
        """Most workers; batches and the partition are planned for this number."""
        limits = self.config.cluster.limits
        return max(limits[1], self.workers) if limits else self.workers

    @property
    def columns(self) -> dict[str, tuple[ArrayType, ...]]:
        """Arrays of the target node type."""
        return dict(self.partition.columns.get(self.ntype, {})) if self.ntype else {}


Check: TypeAlias = Callable[[JobFacts], Iterator[Finding]]


def run_checks(job: JobFacts, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Return all findings, errors first; errors that ``cluster.allow`` names become notes."""
    allowed = job.config.cluster.allow
    findings = []
    for check in checks:
        for finding in check(job):
            if check.__name__ in allowed and finding.severity == "error":
                finding = info(f"{finding.what} (allowed)", "", finding.nodes)
            findings.append(replace(finding, check=check.__name__))
    return by_severity(findings)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings: errors, warnings, notes."""
    order = {"error": 0, "warn": 1, "info": 2}
    return tuple(sorted(findings, key=lambda finding: order[finding.severity]))


def some(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def counted(findings: Sequence[Finding]) -> str:
    """Count findings by severity: ``1 error, 2 warnings``; empty for none."""
    counts = Counter[str](finding.severity for finding in findings)
    nouns = {"error": "error", "warn": "warning", "info": "note"}
    return ", ".join(some(counts[s], noun) for s, noun in nouns.items() if counts[s])
