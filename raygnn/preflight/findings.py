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
from raygnn.preflight.connections import Link
from raygnn.preflight.facts import ArrayType, NodeFacts, PartitionFacts, Resources
from raygnn.preflight.partition_facts import edges_of, known_splits, task_ntype

Severity = Literal["error", "warn", "info"]


@dataclass(frozen=True)
class Finding:
    """Finding that refuses the job (``error``), warns (``warn``) or informs (``info``)."""

    check: str  # name of the check
    severity: Severity
    what: str  # one sentence, with the values in it
    remedy: str = ""  # one sentence, what to do
    nodes: tuple[str, ...] = ()  # affected nodes; empty if it is about the job as a whole

    def __str__(self) -> str:
        """Sentence, with the nodes unless it already names all of them."""
        named = (rf"(\b(on|from|to)|,) {re.escape(node)}(?![\w.-])" for node in self.nodes)
        if all(re.search(pattern, self.what) for pattern in named):
            return self.what
        return f"{self.what} (on {', '.join(self.nodes)})"

    @property
    def text(self) -> str:
        """Severity, check, sentence and remedy, as shown to users."""
        remedy = f"\n  → {self.remedy}" if self.remedy else ""
        return f"{self.severity} [{self.check}]: {self}{remedy}"


def _finding(severity: Severity, what: str, remedy: str = "", nodes: Iterable[str] = ()) -> Finding:
    return Finding("", severity, what, remedy, tuple(nodes))


error, warn, info = (partial(_finding, severity) for severity in get_args(Severity))


@dataclass(frozen=True)
class JobFacts:
    """Facts that the checks read."""

    config: Config
    partition: PartitionFacts
    resources: Resources
    nodes: tuple[NodeFacts, ...]  # nodes that answered
    silent: tuple[NodeFacts, ...]  # nodes that did not
    workers: int  # number of workers at the start
    links: tuple[Link, ...] = ()  # tested links between nodes
    dry_run: Finding | None = None  # finding of the model's dry run, if any

    @cached_property
    def by_task(self) -> dict[str, JobFacts]:
        """Name of each task → facts of the job for that task alone; "" for a single task."""
        if self.config.tasks is None:
            return {"": self}
        facts, jobs = self.partition, {}
        for name, config in self.config.by_task.items():
            partition = replace(facts, splits=known_splits(config, facts.columns, facts.by_type))
            jobs[name] = replace(self, config=config, partition=partition)
        return jobs

    @cached_property
    def ntype(self) -> str | None:
        """Target node type of a single task; None if there is none."""
        return task_ntype(self.config, self.partition.columns)

    @cached_property
    def edges(self) -> EdgeTarget | tuple[str, str] | None:
        """Target edges of a single task, or problem and remedy; None if it is not on edges."""
        return edges_of(self.config, self.partition)

    @cached_property
    def holding(self) -> tuple[NodeFacts, ...]:
        """Nodes with capacity for a worker; all nodes if none has."""
        cluster = self.config.cluster
        cpus, gpus = cluster.cpus_per_worker, cluster.gpus_per_worker
        fit = {node.node for node in self.resources.nodes if node.workers(cpus, gpus)}
        return tuple(node for node in self.nodes if node.node in fit) or self.nodes

    @property
    def fewest(self) -> int:
        """Smallest number of workers with which the job may continue."""
        limits = self.config.cluster.limits
        return min(limits[0], self.workers) if limits else self.workers

    @property
    def most(self) -> int:
        """Largest number of workers, for which batches and the partition are planned."""
        limits = self.config.cluster.limits
        return max(limits[1], self.workers) if limits else self.workers

    @property
    def columns(self) -> dict[str, tuple[ArrayType, ...]]:
        """Arrays of the target node type."""
        return dict(self.partition.columns.get(self.ntype, {})) if self.ntype else {}


Check: TypeAlias = Callable[[JobFacts], Iterator[Finding]]


def run_checks(job: JobFacts, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Return all findings, errors first. Errors of checks in ``cluster.allow`` become notes."""
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
    return tuple(sorted(findings, key=lambda finding: get_args(Severity).index(finding.severity)))


def some(number: int, noun: str) -> str:
    """Return a number and its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def counted(findings: Sequence[Finding]) -> str:
    """Count findings by severity: ``1 error, 2 warnings``; empty for none."""
    counts = Counter(finding.severity for finding in findings)
    nouns = zip(get_args(Severity), ("error", "warning", "note"))
    return ", ".join(some(counts[s], noun) for s, noun in nouns if counts[s])
