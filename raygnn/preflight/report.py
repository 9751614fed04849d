"""Preflight as a whole: facts in, a report and a verdict out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from raygnn.config.schema import Config
from raygnn.errors import PreflightError
from raygnn.preflight.checks import check
from raygnn.preflight.facts import NodeFacts, PartitionFacts, Resources
from raygnn.preflight.findings import Finding, size
from raygnn.preflight.job import Job
from raygnn.preflight.partition import task_ntype


@dataclass(frozen=True)
class Report:
    """The outcome of a preflight.

    Attributes:
        seconds: how long the checks took.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *("node", "python", "torch", "dgl", "ray", "CPUs", "GPUs", "memory", "disk"),
    )

    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the job may start."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, what ``preflight.json`` holds."""
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "findings": [
                {**asdict(finding), "nodes": list(finding.nodes)} for finding in self.findings
            ],
            "nodes": [
                {**asdict(node), "gpus": list(node.gpus), "versions": dict(node.versions)}
                for node in self.nodes
            ],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A row per node, under :attr:`COLUMNS`; memory and disk are what is free of them."""
        return [_row(node) for node in self.nodes]


def verdict(findings: Sequence[Finding], config: Config) -> None:
    """Refuse the job if a finding says so.

    Raises:
        PreflightError: with every error in it, each with its remedy.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    where = str(config.file) if config.file else None
    if len(errors) == 1:
        raise PreflightError(str(errors[0]), where=where, remedy=errors[0].remedy or None)
    if errors:
        lines = [f"{len(errors)} things stop this job"]
        lines += [f"  {item}" + (f"; {item.remedy}" if item.remedy else "") for item in errors]
        raise PreflightError("\n".join(lines), where=where)


def preflight(
    config: Config, facts: PartitionFacts, nodes: Sequence[NodeFacts], resources: Resources
) -> Report:
    """Judge whether the job can run. Nothing is raised for what is found: see :func:`verdict`.

    Args:
        facts: what :mod:`raygnn.preflight.partition` read off the partition, or off the graph
            before there is one.
        nodes, resources: what :mod:`raygnn.preflight.probe` found.
    """
    start = time.monotonic()
    job = Job(
        config=config,
        partition=facts,
        resources=resources,
        nodes=tuple(node for node in nodes if node.problem is None),
        silent=tuple(node for node in nodes if node.problem is not None),
        workers=resolve_workers(config, resources),
        ntype=task_ntype(config, facts.columns),
    )
    return Report(check(job), tuple(nodes), time.monotonic() - start)


def resolve_workers(config: Config, resources: Resources) -> int:
    """``cluster.workers`` as a number: ``auto`` is as many as fit, at least 1."""
    cluster = config.cluster
    if cluster.workers != "auto":
        return cluster.workers
    return max(1, resources.workers(cluster.cpus_per_worker, cluster.gpus_per_worker))


def _row(node: NodeFacts) -> tuple[str, ...]:
    if node.problem:
        return (node.node, node.problem, *[""] * (len(Report.COLUMNS) - 2))
    versions = [node.versions.get(name) or "missing" for name in ("torch", "dgl", "ray")]
    return (
        node.node,
        node.python,
        *versions,
        str(node.cpus),
        str(len(node.gpus)),
        size(node.memory_available),
        size(node.disk_free),
    )
