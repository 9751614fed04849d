"""The sequence: config → graph → partition → preflight → launch → report.

The command line, the Python API and job scripts all come through here; nothing else knows the
order of things.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raygnn import __version__
from raygnn.config.schema import Config
from raygnn.errors import Interrupted, RaygnnError
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.partition import partition_facts, task_ntype
from raygnn.preflight.probe import probe_cluster, probe_local, probe_resources
from raygnn.preflight.report import Report, preflight, resolve_workers, verdict
from raygnn.runs.display import Display, NullDisplay
from raygnn.runs.metrics import MetricsTail
from raygnn.runs.run import Run
from raygnn.runs.store import RunDir
from raygnn.training.cluster import RayCluster

if TYPE_CHECKING:
    from raygnn.graph.layout import PartitionMeta

_POLL = 0.2  # seconds between looks at the records
# share of a node's free memory that the whole structure may take, over all workers on it
_REPLICATED_SHARE = 0.25


def train(
    config: Config,
    *,
    overwrite: bool = False,
    resume: bool = False,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> Run:
    """Run a job to its end and return its run directory, opened.

    Blocks. Partitions the graph if that has not been done, checks that the job can run, starts
    a local Ray or connects to one, trains on every worker, and tests the selected weights.

    Args:
        overwrite: replace an earlier run of this name.
        resume: go on with the earlier run of this name, from its newest checkpoint.
        verbose: show Ray's and Lightning's output, too.
        display: show progress on standard output.
        started: when the command began, seconds since the epoch; records count from it.

    Raises:
        InputError: bad input, or a name that is taken. Nothing was started or written.
        PreflightError: the job cannot run here. Nothing was started.
        TrainingError: training failed; ``rank`` and ``trace`` say where.
        Interrupted: Ctrl-C.
    """
    started = time.time() if started is None else started
    show = Display(verbose=verbose) if display else NullDisplay()
    mode = "resume" if resume else "overwrite" if overwrite else "new"
    with (
        RunDir.create(config.storage, config.name, mode=mode) as run,  # type: ignore[arg-type]
        RayCluster(config, verbose=verbose) as cluster,
        _interruptible(run),
    ):
        plan = _prepare(config, cluster, show)
        verdict(plan.report.findings, config)
        run.begin(config.to_dict())
        run.write_preflight(plan.report.to_dict())
        _show_findings(show, plan.report)
        try:
            result = _fit(config, plan, run, cluster, show, started)
        except RaygnnError as error:
            run.update_summary(status="failed", error=str(error))
            raise
        summary = {
            **result,
            "status": "done",
            "workers": plan.workers,
            "parts": plan.meta.num_parts,
            "topology": "replicated" if plan.replicated else "partitioned",
            "versions": {"raygnn": __version__, **plan.report.nodes[0].versions},
        }
        summary["seconds"]["total"] = time.time() - started
        run.update_summary(**summary)
    show.closing(run.summary, run.path)
    return Run(run.path)


def partition(config: Config, *, verbose: bool = False, display: bool = True) -> PartitionMeta:
    """Partition the graph, unless that has been done, and show the parts.

    With ``partition.parts: auto`` there is a part for each worker that fits.

    Raises:
        InputError: bad input; nothing was written.
    """
    show = Display(verbose=verbose) if display else NullDisplay()
    with RayCluster(config, verbose=verbose) as cluster:
        meta = _partition(config, _workers(config, cluster), show)
    from raygnn.graph.manifest import table

    rows = table(meta)
    columns = list(rows[0])
    show.table(f"partition {meta.directory}", columns, [list(row.values()) for row in rows])
    return meta


def check(config: Config, *, verbose: bool = False, display: bool = True) -> Report:
    """Validate the input and whether the job can run here; nothing is written or started.

    A graph that has not been partitioned is read and judged as it is.

    Raises:
        InputError: bad input.
        PreflightError: the job cannot run here.
    """
    show = Display(verbose=verbose) if display else NullDisplay()
    from raygnn.graph.partition import find_partition
    from raygnn.graph.sources import load_graph
    from raygnn.preflight.partition import graph_facts

    with RayCluster(config, verbose=verbose) as cluster:
        meta = find_partition(config, _workers(config, cluster))
        if meta is None:
            assert config.graph is not None  # the config says so
            with show.stage("reading the graph"):
                facts = graph_facts(config, load_graph(config.graph))
        else:
            facts = partition_facts(config, meta)
        report = _preflight(config, facts, meta, cluster)
    show.table("nodes", Report.COLUMNS, report.rows())
    _show_findings(show, report)
    verdict(report.findings, config)
    return report


@dataclass(frozen=True)
class _Plan:
    """What was decided before anything starts."""

    meta: PartitionMeta
    report: Report
    ntype: str | None
    workers: int
    replicated: bool
    training_nodes: int


def _prepare(config: Config, cluster: RayCluster, show: Display) -> _Plan:
    """Partition and preflight; a local Ray is started meanwhile, once the input is known good."""
    workers = _workers(config, cluster)
    show.header(_header(config, workers, cluster))
    meta = _partition(config, workers, show, when_valid=lambda: cluster.start(workers))
    facts = partition_facts(config, meta)
    report = _preflight(config, facts, meta, cluster)
    return _Plan(
        meta=meta,
        report=report,
        ntype=task_ntype(config, facts.columns),
        workers=workers,
        replicated=_replicated(config, meta, report, workers),
        training_nodes=facts.splits.get("train", 0),
    )


def _header(config: Config, workers: int, cluster: RayCluster) -> dict[str, str]:
    graph = config.graph
    source = "an existing partition" if graph is None else graph.format
    if graph is not None and (path := getattr(graph, "path", None)):
        source += f" {path}"
    where = "a local Ray" if cluster.local else f"Ray at {config.cluster.address}"
    fanout = ", ".join("all" if f < 0 else str(f) for f in config.sampling.fanout)
    return {
        "run": f"{config.name} → {config.run_dir}",
        "graph": f"{source}, {config.partition.method} partition",
        "model": f"{config.model.kind}, {config.model.layers} layers × {config.model.hidden}, "
        f"fanout {fanout}, {config.precision}",
        "training": f"{config.train.epochs} epochs, batch {config.sampling.batch_size} × {workers} "
        f"workers, {config.train.optimizer}, lr {config.train.lr:g}",
        "on": where,
    }


def _workers(config: Config, cluster: RayCluster) -> int:
    """How many workers there will be; asks a running cluster when that decides."""
    asked = config.cluster.workers
    if asked != "auto":
        return int(asked)
    if not cluster.local:
        cluster.wait()
    return resolve_workers(config, probe_resources(config, cluster.local))


def _partition(
    config: Config,
    workers: int,
    show: Display,
    when_valid: Callable[[], None] = lambda: None,
) -> PartitionMeta:
    from raygnn.graph.partition import ensure_partition

    parts = workers if config.partition.parts == "auto" else config.partition.parts
    with show.stage("partition") as detail:

        def at(stage: str) -> None:
            detail(stage)
            if stage != "load":
                when_valid()

        meta = ensure_partition(config, parts, at)
    when_valid()
    return meta


def _preflight(
    config: Config, facts: PartitionFacts, meta: PartitionMeta | None, cluster: RayCluster
) -> Report:
    if cluster.local:
        nodes, resources = probe_local(config, meta)
    else:
        cluster.wait()
        nodes, resources = probe_cluster(config, meta)
    return preflight(config, facts, nodes, resources)


def _replicated(config: Config, meta: PartitionMeta, report: Report, workers: int) -> bool:
    if config.sampling.topology != "auto":
        return config.sampling.topology == "replicated"
    from raygnn.graph.shard import structure_bytes

    free = [node.memory_available for node in report.nodes if node.memory_available is not None]
    on_a_node = -(-workers // max(1, len(report.nodes)))
    return not free or structure_bytes(meta) * on_a_node <= _REPLICATED_SHARE * min(free)


def _show_findings(show: Display, report: Report) -> None:
    for finding in report.findings:
        if finding.severity != "error":
            show.note(f"{finding.severity}: {finding}")


def _fit(
    config: Config,
    plan: _Plan,
    run: RunDir,
    cluster: RayCluster,
    show: Display,
    started: float,
) -> dict[str, Any]:
    tail = MetricsTail(run.metrics_file)
    tail.poll()  # an earlier start's records are not news
    with show.stage("Ray and workers") as detail:
        detail("starting Ray")
        cluster.wait()
        from raygnn.training import faults
        from raygnn.training.launch import Launch
        from raygnn.training.worker import Job

        assert plan.ntype is not None  # preflight has seen to it
        faults.clear(run.path)
        job = Job(
            config=config,
            partition=plan.meta.directory,
            run_dir=run.path,
            ntype=plan.ntype,
            replicated=plan.replicated,
            started=started,
        )
        launch = Launch(job, plan.workers, local=cluster.local)
        detail("starting workers")
        first = _first_records(tail, launch.running)
    steps = -(-plan.training_nodes // (config.sampling.batch_size * plan.workers))
    steps = -(-steps // config.train.accumulate)
    with show.progress(config.train.epochs, steps, max_steps=config.train.max_steps) as progress:
        records = first
        while True:
            running = launch.running()
            for record in records:
                progress.update(record)
            if not running:
                break
            time.sleep(_POLL)
            records = tail.poll()
    shutil.rmtree(run.path / ".ray", ignore_errors=True)
    return launch.result()


def _first_records(tail: MetricsTail, running: Callable[[], bool]) -> list[dict[str, Any]]:
    """Wait until training writes its first records, or ends without."""
    while running():
        if records := tail.poll():
            return records
        time.sleep(_POLL)
    return tail.poll()


@contextmanager
def _interruptible(run: RunDir) -> Iterator[None]:
    """Turn Ctrl-C into our error, and note it in the run, if one began."""
    try:
        yield
    except KeyboardInterrupt:
        what = "interrupted before training began; nothing was written"
        if run.begun:
            run.update_summary(status="interrupted")
            what = f"interrupted; {run.path} holds what was done so far"
        raise Interrupted(what, remedy="go on with --resume, or start over with --overwrite") from None
