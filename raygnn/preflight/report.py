"""Preflight as a whole: facts in, a report and a verdict out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.errors import PreflightError
from raygnn.preflight.checks import CHECKS, CLUSTER_CHECKS, check
from raygnn.preflight.comm_plan import CommPlan, make_comm_plan
from raygnn.preflight.edges import edge_target
from raygnn.preflight.facts import DryRun, NodeFacts, PartitionFacts, Resources
from raygnn.preflight.findings import Finding, counted
from raygnn.preflight.job import Check, Job
from raygnn.preflight.memory_plan import REMEDIES, memory_plan
from raygnn.preflight.network import Link
from raygnn.preflight.partition import task_ntype
from raygnn.preflight.probe import Survey


@dataclass(frozen=True)
class Report:
    """The outcome of a preflight.

    Attributes:
        comm: how the ranks will communicate.
        seconds: how long the checks took, without looking at the nodes.
        of_job: whether it is about a job; else about the nodes alone, where ``comm`` is made up.
        memory: see `raygnn.preflight.memory_plan.memory_plan`.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *("node", "address", "python", "torch", "dgl", "ray", "processor", "CPUs", "GPUs"),
        *("memory", "disk", "link to the next"),
    )
    COMPARED: ClassVar[range] = range(2, 9)  # python … GPUs

    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    links: tuple[Link, ...]
    comm: CommPlan
    seconds: float
    of_job: bool = True
    memory: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the job may start."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One line: ``ready`` or ``refused``, and how many findings there are of each kind."""
        listed = counted(self.findings)
        return ("ready" if self.ok else "refused") + (f": {listed}" if listed else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, what ``preflight.json`` holds."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "findings": [
                {**asdict(finding), "nodes": list(finding.nodes)} for finding in self.findings
            ],
            "nodes": [_plain(asdict(node)) for node in self.nodes],
            "links": [asdict(link) for link in self.links],
            "communication": self.comm.to_dict() if self.of_job else None,
            "memory": [
                {"use": use, "bytes": round(count), "remedy": REMEDIES[use]}
                for use, count in self.memory.items()
                if count
            ],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A row per node, under :attr:`COLUMNS`, what differs from most of the nodes after a "≠".

        Memory and disk are what is free of them; the link is the one to the next node around a
        ring, over one TCP connection. What is not known, or not looked at, is empty.
        """
        links = {link.source: link for link in self.links}
        rows = [_row(node, links.get(node.node)) for node in self.nodes]
        answered = [row for node, row in zip(self.nodes, rows) if not node.problem]
        usual = [Counter(column).most_common(1)[0][0] for column in zip(*answered)]
        return [
            row
            if node.problem
            else tuple(
                f"≠ {cell}" if i in self.COMPARED and cell != usual[i] else cell
                for i, cell in enumerate(row)
            )
            for node, row in zip(self.nodes, rows)
        ]


def verdict(findings: Sequence[Finding], config: Config) -> None:
    """Refuse the job if a finding says so.

    Raises:
        PreflightError: with every error in it, each with its remedy.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    where = str(config.file) if config.file else None
    if len(errors) == 1:
        what = f"{errors[0]} [{errors[0].check}]"
        raise PreflightError(what, where=where, remedy=errors[0].remedy or None)
    if errors:
        lines = [f"{len(errors)} things stop this job"]
        for item in errors:
            lines.append(f"  {item} [{item.check}]" + f"\n    → {item.remedy}" * bool(item.remedy))
        raise PreflightError("\n".join(lines), where=where)


def preflight(
    config: Config, facts: PartitionFacts, found: Survey, dry_run: DryRun | None = None
) -> Report:
    """Judge whether the job can run. Nothing is raised for what is found: see :func:`verdict`.

    Args:
        facts: what :mod:`raygnn.preflight.partition` read off the partition, or off the graph
            before there is one.
        found: by :mod:`raygnn.preflight.probe`.
        dry_run: of a model of the user's own, if there was one.
    """
    return _report(config, facts, found, CHECKS, dry_run)


def inspect(config: Config, found: Survey) -> Report:
    """Judge the nodes alone, whatever job may run on them; of ``config`` only ``cluster`` and
    ``comm`` matter."""
    nothing = PartitionFacts("", 0, 0, {}, None, {}, {}, {})
    return replace(_report(config, nothing, found, CLUSTER_CHECKS), of_job=False)


def _report(
    config: Config,
    facts: PartitionFacts,
    found: Survey,
    checks: tuple[Check, ...],
    dry_run: DryRun | None = None,
) -> Report:
    start = time.monotonic()
    job = Job(
        config=config,
        partition=facts,
        resources=found.resources,
        nodes=tuple(node for node in found.nodes if node.problem is None),
        silent=tuple(node for node in found.nodes if node.problem is not None),
        workers=resolve_workers(config, found.resources),
        ntype=None if config.tasks else task_ntype(config, facts.columns),
        edges=edge_target(config, facts.edges, facts.reverses) if config.task.of_edges else None,
        links=found.links,
        dry_run=dry_run,
    )
    findings, comm = check(job, checks), make_comm_plan(config, job.holding)
    memory = memory_plan(job, job.workers) if job.holding else {}
    seconds = time.monotonic() - start
    return Report(findings, found.nodes, found.links, comm, seconds, memory=memory)


def resolve_workers(config: Config, resources: Resources) -> int:
    """How many workers there will be at first: as many as fit, within ``cluster.workers``."""
    cluster = config.cluster
    fewest, most = cluster.limits or (1, None)
    if fewest == most:
        return fewest
    fit = max(fewest, resources.workers(cluster.cpus_per_worker, cluster.gpus_per_worker))
    return fit if most is None else min(fit, most)


def _row(node: NodeFacts, link: Link | None) -> tuple[str, ...]:
    if node.problem:
        return (node.node, node.problem, *[""] * (len(Report.COLUMNS) - 2))
    versions = [node.versions.get(name) or "missing" for name in ("torch", "dgl", "ray")]
    models = Counter(gpu.model for gpu in node.gpus)
    return (
        node.node,
        node.network.address or "",
        node.python,
        *versions,
        _short(node.cpu or ""),
        str(node.cpus),
        ", ".join(f"{count} × {model}" for model, count in models.items()) or "0",
        size(node.memory_available),
        size(node.disk_free),
        _link(link),
    )


def _link(link: Link | None) -> str:
    if link is None:
        return ""
    if link.mbits is None or link.latency_ms is None:
        return "none"
    rate = f"{link.mbits / 1000:.1f} Gbit/s" if link.mbits >= 1000 else f"{link.mbits:.0f} Mbit/s"
    return f"{rate}, {link.latency_ms:.2g} ms"


def _short(cpu: str) -> str:
    """A processor's model without its marks: ``Intel Xeon 8481C 2.70GHz``."""
    for word in ("(R)", "(TM)", " CPU", " Processor", " @"):
        cpu = cpu.replace(word, "")
    return " ".join(cpu.split())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
