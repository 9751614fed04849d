"""Preflight: runs the checks, and reports their findings with a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from raygnn.config.comm_plan import CommPlan, make_comm_plan
from raygnn.config.execution import JOB_CHECKS, NODE_CHECKS
from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.errors import PreflightError
from raygnn.preflight import cluster_checks, data_checks, job_checks
from raygnn.preflight.connections import Link
from raygnn.preflight.facts import NodeFacts, PartitionFacts, Resources
from raygnn.preflight.findings import Check, Finding, JobFacts, counted, run_checks
from raygnn.preflight.job_checks import REMEDIES, memory_plan
from raygnn.preflight.probe import Survey
from raygnn.util.files import plain

_FUNCTIONS = {**vars(cluster_checks), **vars(job_checks), **vars(data_checks)}
CHECKS: tuple[Check, ...] = tuple(_FUNCTIONS[name] for name in (*NODE_CHECKS, *JOB_CHECKS))


def described() -> dict[str, str]:
    """Return the name of each check → what it checks, one sentence."""
    first = {check.__name__: (check.__doc__ or "").split("\n\n")[0] for check in CHECKS}
    return {name: " ".join(sentence.split()) for name, sentence in first.items()}


@dataclass(frozen=True)
class Report:
    """Outcome of a preflight."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *("node", "address", "python", "torch", "dgl", "ray", "processor", "CPUs", "GPUs"),
        *("memory", "disk"),
    )
    COMPARED: ClassVar[range] = range(2, 9)  # python … GPUs

    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    links: tuple[Link, ...]
    comm: CommPlan  # communication plan of the ranks
    seconds: float  # duration of the checks, without the probes of the nodes
    of_job: bool = True  # False without a job; ``comm`` then has no meaning
    memory: Mapping[str, float] = field(default_factory=dict)  # see `memory_plan`

    @property
    def ok(self) -> bool:
        """True if the job may start."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """``ready`` or ``refused``, with the number of findings of each severity."""
        listed = counted(self.findings)
        return ("ready" if self.ok else "refused") + (f": {listed}" if listed else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``preflight.json``."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "findings": [plain(asdict(finding)) for finding in self.findings],
            "nodes": [plain(asdict(node)) for node in self.nodes],
            "table": [dict(zip(self.COLUMNS, row)) for row in self.rows()],
            "links": [asdict(link) for link in self.links],
            "communication": self.comm.to_dict() if self.of_job else None,
            "memory": [
                {"use": use, "bytes": round(count), "remedy": REMEDIES[use]}
                for use, count in self.memory.items()
                if count
            ],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row per node, for `COLUMNS`. Memory and disk are free space; unknown values are
        empty."""
        return [_row(node) for node in self.nodes]


def refuse(findings: Sequence[Finding], config: Config) -> None:
    """Raise PreflightError with every error among the findings and its remedy, if there is one."""
    errors = [finding for finding in findings if finding.severity == "error"]
    where = str(config.file) if config.file else None
    if len(errors) == 1:
        what = f"{errors[0]} [{errors[0].check}]"
        raise PreflightError(what, where=where, remedy=errors[0].remedy or None)
    if errors:
        lines = [f"the job cannot run, for {len(errors)} reasons"]
        for item in errors:
            lines.append(f"  {item} [{item.check}]" + f"\n    → {item.remedy}" * bool(item.remedy))
        raise PreflightError("\n".join(lines), where=where)


def preflight(
    config: Config,
    facts: PartitionFacts | None,
    survey: Survey,
    dry_run: Finding | None = None,
    *,
    of_job: bool = True,
) -> Report:
    """Check whether the job can run on the surveyed nodes; see `refuse` for errors.

    Args:
        facts: facts of the graph; None = check all that does not depend on it.
        dry_run: finding of the model's dry run.
        of_job: False = check only the nodes, without a job; of ``config``, only ``cluster`` and
            ``comm`` are read.
    """
    start = time.monotonic()
    job = JobFacts(
        config=config,
        partition=facts or PartitionFacts(),
        resources=survey.resources,
        nodes=tuple(node for node in survey.nodes if node.problem is None),
        silent=tuple(node for node in survey.nodes if node.problem is not None),
        workers=resolve_workers(config, survey.resources),
        links=survey.links,
        dry_run=dry_run,
    )
    checks = CHECKS if of_job else CHECKS[: len(NODE_CHECKS)]
    if facts is None:
        checks = tuple(check for check in checks if check.__module__ != data_checks.__name__)
    findings = run_checks(job, checks)
    comm = make_comm_plan(config, {n.id: (n.network, n.environment) for n in job.holding})
    memory = memory_plan(job) if job.holding and facts is not None else {}
    seconds = time.monotonic() - start
    return Report(findings, survey.nodes, survey.links, comm, seconds, of_job, memory)


def resolve_workers(config: Config, resources: Resources) -> int:
    """Return the number of workers at the start: as many as fit, within ``cluster.workers``."""
    cluster = config.cluster
    fewest, most = cluster.limits or (1, None)
    if fewest == most:
        return fewest
    fit = max(fewest, resources.workers(cluster.cpus_per_worker, cluster.gpus_per_worker))
    return fit if most is None else min(fit, most)


def _row(node: NodeFacts) -> tuple[str, ...]:
    if node.problem:
        return (node.node, node.problem, *[""] * (len(Report.COLUMNS) - 2))
    processor = node.cpu or ""
    for word in ("(R)", "(TM)", " CPU", " Processor", " @"):
        processor = processor.replace(word, "")
    models = Counter(gpu.model for gpu in node.gpus)
    return (
        node.node,
        node.network.address or "",
        node.python,
        *(node.versions.get(name) or "missing" for name in ("torch", "dgl", "ray")),
        " ".join(processor.split()),
        str(node.cpus),
        ", ".join(f"{count} × {model}" for model, count in models.items()) or "0",
        size(node.memory_available),
        size(node.disk_free),
    )


class DisplayTable(NamedTuple):
    """Table with a title, for `Display`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]


def display_blocks(report: Report) -> Iterator[DisplayTable | str]:
    """Yield the nodes and the communication variables as tables, after a line with the values that
    all nodes share."""
    if all(node.problem for node in report.nodes):
        return  # `nodes_answer` reports them
    yield from _nodes(report)
    if report.of_job:
        comm = report.comm
        title = f"communication: {comm.backend}, {comm.why}"
        rows = comm.rows({node.id: node.node for node in report.nodes})
        columns: tuple[str, ...] = ("node", "variable", "value", "reason")
        if all(row[0] == "all" for row in rows):
            columns, rows = columns[1:], [row[1:] for row in rows]
        yield DisplayTable(title, columns, rows) if rows else title


def _nodes(report: Report) -> Iterator[DisplayTable | str]:
    """Yield a line with the values that all nodes share, and a table of the other values; only a
    line for a single node."""
    rows, single = report.rows(), len(report.nodes) == 1
    answered = [row for node, row in zip(report.nodes, rows) if not node.problem]
    columns = range(1, len(Report.COLUMNS))
    shared = [
        i
        for i in columns
        if single or (i in Report.COMPARED and len({row[i] for row in answered}) == 1)
    ]
    if shared:
        cells = [f"{Report.COLUMNS[i]} {answered[0][i]}" for i in shared if answered[0][i]]
        name = f"node {rows[0][0]}" if single else f"all {len(answered)} nodes"
        yield f"{name}: {', '.join(cells)}"
    if single:
        return
    kept = [0, *(i for i in columns if i not in shared and any(row[i] for row in answered))]
    unknown = ("no answer", *[""] * len(kept))
    table = [
        (row[0], *unknown)[: len(kept)] if node.problem else tuple(row[i] for i in kept)
        for node, row in zip(report.nodes, rows)
    ]
    yield DisplayTable("nodes", [Report.COLUMNS[i] for i in kept], table)
