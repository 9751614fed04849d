"""What a command shows of a job before it runs: what will run where, and what preflight found."""

from __future__ import annotations

from pathlib import Path

from raygnn.config.graph import ManyGraphs
from raygnn.config.model import NO_LAYERS
from raygnn.config.schema import Config
from raygnn.driver.ray.connection import RayCluster
from raygnn.preflight.findings import Finding
from raygnn.preflight.report import Report, display_blocks
from raygnn.runs.display import Display, NullDisplay


def display_of(display: bool, verbose: bool) -> Display:
    return Display(verbose=verbose) if display else NullDisplay()


def header(
    config: Config,
    workers: int,
    cluster: RayCluster,
    global_batch: int,
    place: Path,
    purpose: str | None = None,
) -> dict[str, str]:
    """What will run and where, as rows; ``purpose`` says what is done, if not training."""
    graph = config.graph
    source = f"the partition in {config.partition.path}"
    if isinstance(graph, ManyGraphs):
        source = f"many graphs, {graph.dataset or graph.path}"
    elif graph is not None:
        source = f"{graph.format} {getattr(graph, 'path', '')}".strip()
        source += f", {config.partition.method} partition"
    span = str(workers)
    if config.cluster.elastic and config.cluster.limits:
        span = "{} to {}".format(*config.cluster.limits)
    span += " worker" if span == "1" else " workers"
    model = config.model.kind
    if model == NO_LAYERS:
        model = "no layers"
    elif ":" not in model:
        model += f", {config.model.depth} layers × {config.model.hidden}"
    if not config.task.of_graphs and config.model.depth:
        model += ", fanout " + ", ".join(map(_fanout, config.sampling.fanout))
    train, done = config.train, {"prediction": f"{purpose}, on {span}"}
    if purpose is None:
        text = f"{train.epochs} epochs, batch {global_batch} on {span}, {train.optimizer}"
        done = {"training": f"{text}, lr {train.lr:g}"}
    return {
        "run": f"{config.name} → {place}",
        "graph": source,
        "model": f"{model}, {config.precision}",
        **done,
        "on": "a local Ray" if cluster.local else f"the Ray at {cluster.address}",
    }


def _fanout(hop: int | dict[str, int]) -> str:
    if isinstance(hop, dict):
        return " + ".join(f"{name} {_fanout(number)}" for name, number in hop.items())
    return "all" if hop < 0 else str(hop)


def show_report(show: Display, report: Report) -> None:
    show_nodes(show, report)
    for finding in report.findings:
        show_finding(show, finding)
    show.note(report.verdict)


def show_nodes(show: Display, report: Report) -> None:
    for block in display_blocks(report, show.console.width):
        show.note(block) if isinstance(block, str) else show.table(*block)


def show_finding(show: Display, finding: Finding) -> None:
    show.note(finding.text)
