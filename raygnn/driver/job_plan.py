"""Plan of a job, made before anything starts: partition, nodes, workers, topology."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from raygnn.config.model import NO_LAYERS
from raygnn.config.schema import Config
from raygnn.driver import dry_run
from raygnn.driver.inputs import Input, PartitionInput, patient, read_early, with_rows
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.startup import RoomRequest
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.partition_facts import Stored, edges_of, task_ntype
from raygnn.preflight.probe import Probes, Survey, probe_local, probe_resources
from raygnn.preflight.report import Report, display_blocks, preflight, refuse, resolve_workers
from raygnn.runs.display import Display, NullDisplay
from raygnn.runs.trust import check_classes
from raygnn.worker.job import TaskTarget

# with `cluster.workers: auto`, graphs with fewer nodes than this get one worker
_FEW_NODES = 50_000
# share of a node's free memory that the whole structure may take; its workers map one copy
_REPLICATED_SHARE = 0.25


@dataclass(frozen=True)
class Plan:
    input: Input
    report: Report
    # task name → prediction target, "" for a single task; empty if the report says why
    goals: Mapping[str, TaskTarget]
    replicated: bool  # True if every rank holds the complete graph structure
    training_seeds: int | None  # number of them; None if only the ranks will know
    global_batch: int  # seeds per batch, over all ranks
    lists: Mapping[str, Any]  # negatives listed in files, see `Job`

    def steps_per_epoch(self, config: Config) -> int | None:
        """Return the number of optimizer steps; None if only the ranks will know."""
        if self.training_seeds is None:
            return None
        batches = -(-self.training_seeds // self.global_batch)
        return -(-batches // config.train.accumulate)


@patient
def count_workers(
    config: Config, cluster: RayCluster, show: Display
) -> tuple[Config, int, PartitionInput | None]:
    """Count a job's workers; with ``cluster.workers: auto``, by the cluster's resources and the
    number of nodes in the graph.

    Returns the configuration, with ``cluster.workers`` 1 in place of ``auto`` if the graph has few
    nodes; the maximum number of workers, for which the batch and the partition are built; and the
    graph, if it was read. Raises InputError and PreflightError as `read_early`, and PreflightError
    without a connection to the cluster.
    """
    check_classes(config)
    if config.cluster.limits is not None:
        return config, config.cluster.limits[1], None
    if not cluster.local:
        cluster.wait()
    workers = resolve_workers(config, probe_resources(config, cluster.local))
    early = read_early(config, workers, show) if workers > 1 else None
    if early is None or sum(early.nodes.values()) >= _FEW_NODES:
        return config, workers, early
    return config.with_workers(1), 1, early


class ClusterNodes(ExitStack):
    """Nodes that a job may use; a context manager. ``show``: display of a job that is to start: the
    first survey waits for nodes and reserves resources on them (``cluster.wait``); None = survey
    the available nodes."""

    def __init__(self, config: Config, cluster: RayCluster, show: Display | None = None):
        super().__init__()
        self._config = config
        self._cluster = cluster
        self._probes: Probes | None = None
        self._room: RoomRequest | None = None
        if show is not None and not cluster.local and config.cluster.wait_seconds:
            self._room = RoomRequest(config, cluster, show)

    def survey(self, meta: Stored | None) -> Survey:
        """Return the nodes' resources and what they see of the partition with this manifest. Raises
        InputError if the driver cannot write to the storage, and PreflightError without a
        connection to the cluster, or if it has no resources within ``cluster.wait``."""
        if self._cluster.local:
            return probe_local(self._config, meta)
        config, room = self._config, self._room
        if self._probes is None:
            self._cluster.wait()
            self._probes = self.enter_context(Probes())
            if room is not None:
                self.callback(room.give_back)
        if room is not None:
            room.wait()
        survey = self._probes.about(config, meta)
        resources, cluster = survey.resources, config.cluster
        if room is None:
            resources = replace(resources, growing=cluster.wait_seconds)
        else:  # the reserved resources are free for this job
            cpus = resources.free_cpus + room.workers * cluster.cpus_per_worker
            gpus = resources.free_gpus + room.workers * cluster.gpus_per_worker
            resources = replace(resources, free_cpus=cpus, free_gpus=gpus)
        return replace(survey, resources=resources)

    def give_back(self) -> None:
        """Release the reserved resources."""
        if self._room is not None:
            self._room.give_back()


def make(config: Config, nodes: ClusterNodes, given: Input, show: Display) -> Input:
    """Build the partition or collection if it is missing and preflight finds no error. Raises
    InputError for bad input, and PreflightError if the job cannot run here; then nothing is
    built."""
    if given.meta is None:
        given.check(config)
        facts = given.facts(config)
        dry_run.check_weights(config, given, goals_of(config, facts))
        refuse(preflight(config, facts, nodes.survey(None)).findings, config)
        nodes.give_back()  # for other jobs, since building may take hours
    return given.made(show)


@patient
def make_plan(
    config: Config, nodes: ClusterNodes, given: Input, global_batch: int, show: Display
) -> Plan:
    """Survey the nodes and run all checks; their findings are in the plan's report. Raises
    ConfigError if a relation to be sampled is not in the graph, or the model's class cannot be
    imported, and PreflightError without a connection to the cluster."""
    given.check(config)
    facts = given.facts(config)
    goals = goals_of(config, facts)
    dry_run.check_weights(config, given, goals)
    lists = {
        name: found
        for name, goal in goals.items()
        if (goal.edges or goal.ntype) and (found := given.lists(config.of(name), name, goal.edges))
    }
    facts = with_rows(facts, lists)
    request = dry_run.request_of(config, given, facts, goals, lists)
    # the trial runs while the nodes are surveyed
    with nullcontext(lambda: None) if request is None else dry_run.started(request) as outcome:
        survey = nodes.survey(given.meta)
        with nullcontext() if request is None else show.stage("trial of the model"):
            trial = outcome()
        report = preflight(config, facts, survey, trial)
    return Plan(
        input=given,
        report=report,
        goals=goals,
        replicated=_replicated(config, given.structure_bytes, report),
        training_seeds=None if config.tasks else facts.splits.get("train"),
        global_batch=global_batch,
        lists=lists,
    )


def goals_of(config: Config, facts: PartitionFacts) -> dict[str, TaskTarget]:
    """Return the prediction target of each task, by task name."""
    goals = {}
    for name, one in config.by_task.items():
        edges = edges_of(one, facts)
        ntype = task_ntype(one, facts.columns)
        goals[name] = TaskTarget(ntype, None if isinstance(edges, tuple) else edges)
    return goals


def _replicated(config: Config, size: int, report: Report) -> bool:
    if config.sampling.topology != "auto":
        return config.sampling.topology == "replicated"
    free = [node.memory_available for node in report.nodes if node.memory_available is not None]
    return not free or size <= _REPLICATED_SHARE * min(free)


# ── what is shown of it ──────────────────────────────────────────────────────────────────────


def display_of(display: bool, verbose: bool) -> Display:
    return Display(verbose=verbose) if display else NullDisplay()


def header(
    config: Config,
    workers: int,
    cluster: RayCluster,
    global_batch: int,
    place: str,
    purpose: str | None = None,
) -> dict[str, str]:
    """Return the rows of a job's header; ``purpose`` replaces training, e.g. "prediction"."""
    graph = config.graph
    name = getattr(graph, "dataset", getattr(graph, "path", ""))
    if graph is None:
        source = f"the partition in {config.partition.path}"
    elif config.task.of_graphs:
        source = f"many graphs, {name}"
    else:
        source = f"{graph.format} {name}".strip() + f", {config.partition.used_method} partition"
    span = f"{workers} worker{'s' * (workers != 1)}"
    if config.cluster.elastic and config.cluster.limits:
        span = "{} to {} workers".format(*config.cluster.limits)
    model = config.model.kind
    if model == NO_LAYERS:
        model = "no layers"
    elif ":" not in model:
        model += f", {config.model.depth} layers × {config.model.hidden}"
    if not config.task.of_graphs and config.model.depth:
        model += ", fanout " + ", ".join(map(_fanout, config.sampling.fanout))
    train, done = config.train, {"prediction": f"{purpose}, on {span}"}
    if purpose is None:
        epochs = f"{train.epochs} epoch{'s' * (train.epochs != 1)}"
        text = f"{epochs}, batch {global_batch} on {span}, {train.optimizer}"
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


def stored_table(meta: Stored) -> list[dict[str, object]]:
    """Return a table of the partition or collection; see `raygnn.graph.partition.read.table`."""
    from raygnn.graph.collection import CollectionMeta
    from raygnn.graph.partition.read import table

    if isinstance(meta, CollectionMeta):
        size = {"graphs": meta.num_graphs, "nodes": meta.num_nodes, "edges": meta.num_edges}
        return [{**size, "bytes": meta.bytes, "seconds": meta.seconds}]
    return [dict(row) for row in table(meta)]


def show_report(show: Display, report: Report) -> None:
    show_nodes(show, report)
    for finding in report.findings:
        show.note(finding.text)
    show.note(report.verdict)


def show_nodes(show: Display, report: Report) -> None:
    for block in display_blocks(report):
        show.note(block) if isinstance(block, str) else show.table(*block)
