"""The sequence: config → graph → partition → preflight → launch → report.

The command line, the Python API and job scripts all come through here; nothing else knows the
order of things.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raygnn import __version__
from raygnn.config.graphs import PlantedGraph
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import InputError, Interrupted
from raygnn.preflight import report as preflight_report
from raygnn.preflight.findings import Finding, by_severity
from raygnn.preflight.node import Question
from raygnn.preflight.probe import probe_local, survey
from raygnn.preflight.report import Report, verdict
from raygnn.runs.display import Display, NullDisplay
from raygnn.runs.metrics import MetricsTail
from raygnn.runs.run import Run
from raygnn.runs.store import Mode, RunDir, is_run
from raygnn.training import checkpoint, faults
from raygnn.training.cluster import RayCluster
from raygnn.training.job import RESULT, STOP, Job
from raygnn.training.launch import Launch
from raygnn.training.plan import Plan, count_workers, make_plan, read_input

if TYPE_CHECKING:
    from raygnn.graph.layout import PartitionMeta

_POLL = 0.2  # seconds between looks at the records


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
    show = _display(display, verbose)
    mode: Mode = "resume" if resume else "overwrite" if overwrite else "new"
    with (
        RunDir.create(config.storage, config.name, mode=mode) as run,
        RayCluster(config, verbose=verbose) as cluster,
        _interruptible(run),
    ):
        workers = count_workers(config, cluster)
        show.header(_header(config, workers, cluster))
        if isinstance(config.graph, PlantedGraph):
            cluster.start()  # a generated graph can not turn out to be bad
        given = read_input(config, workers, show)
        if not cluster.local:
            given = given.made(show)  # so that every node can be asked whether it sees it
        plan = make_plan(config, cluster, workers, given)
        verdict(plan.report.findings, config)
        if resume:
            _check_resumable(config, plan, run)
        run.begin(config.to_dict())
        run.write_preflight(plan.report.to_dict())
        if not cluster.local:
            _show_nodes(show, plan.report)
        for finding in plan.report.findings:
            show.note(_told(finding))
        if resume:
            show.note(_continuation(run))
        try:
            result = _fit(config, plan, run, cluster, show, started)
        except Exception as error:
            run.update_summary(status="failed", error=str(error))
            raise
        finally:
            shutil.rmtree(run.path / ".ray", ignore_errors=True)
        result["seconds"]["total"] = time.time() - started
        run.update_summary(
            **result,
            status="done",
            workers=plan.workers,
            topology="replicated" if plan.replicated else "partitioned",
            versions={"raygnn": __version__, **plan.report.nodes[0].versions},
        )
    show.closing(run.summary, run.path)
    return Run(run.path)


def partition(config: Config, *, verbose: bool = False, display: bool = True) -> PartitionMeta:
    """Partition the graph, unless that has been done, and show the parts.

    With ``partition.parts: auto`` there is a part for each worker that fits.

    Raises:
        InputError: bad input; nothing was written.
    """
    show = _display(display, verbose)
    with RayCluster(config, verbose=verbose) as cluster:
        meta = read_input(config, count_workers(config, cluster), show).made(show).meta
    from raygnn.graph.manifest import table

    rows = table(meta)
    show.table(f"partition {meta.directory}", list(rows[0]), [list(row.values()) for row in rows])
    return meta


def check(config: Config, *, verbose: bool = False, display: bool = True) -> Report:
    """Validate the input and whether the job can run here; nothing is written or started.

    A graph that has not been partitioned is read and judged as it is.

    Returns:
        The report; `verdict(report.findings, config)` raises for what it refuses.

    Raises:
        InputError: bad input.
        PreflightError: no connection to the cluster.
    """
    show = _display(display, verbose)
    with RayCluster(config, verbose=verbose) as cluster:
        workers = count_workers(config, cluster)
        report = make_plan(config, cluster, workers, read_input(config, workers, show)).report
    if is_run(config.run_dir):
        taken = Finding(
            "name_free",
            "warn",
            f"the name {config.name!r} is taken by an earlier run",
            "choose another name, or pass --overwrite or --resume to raygnn train",
        )
        report = replace(report, findings=by_severity([*report.findings, taken]))
    _show_report(show, report)
    return report


def inspect(address: str | None = None, *, verbose: bool = False, display: bool = True) -> Report:
    """Look at the nodes of a cluster, whatever job may run on them; nothing is written.

    Args:
        address: of the head node; None = as ``cluster.address: auto`` finds it.

    Raises:
        PreflightError: no connection to the cluster.
    """
    show = _display(display, verbose)
    config = load_config(
        {
            "name": "cluster",
            "graph": {"format": "planted", "nodes": 1000},
            "model": {"kind": "gcn"},
            "cluster": {"address": address or "auto"},
        }
    )
    with RayCluster(config, verbose=verbose) as cluster:
        question = Question(storage=None, token=None, cache=None)
        if cluster.local:
            found = probe_local(config, question=question)
        else:
            cluster.wait()
            found = survey(question, config.cluster.probe_timeout.seconds)
    report = preflight_report.inspect(config, found)
    _show_report(show, report)
    return report


def _show_report(show: Display, report: Report) -> None:
    _show_nodes(show, report)
    for finding in report.findings:
        show.note(_told(finding))
    show.note(report.verdict)


def _show_nodes(show: Display, report: Report) -> None:
    show.table("nodes", Report.COLUMNS, report.rows())
    comm, names = report.comm, {node.id: node.node for node in report.nodes}
    columns = ("node", "variable", "value", "reason")
    show.table(f"communication: {comm.backend}, {comm.why}", columns, comm.rows(names))


def _told(finding: Finding) -> str:
    remedy = f"\n  → {finding.remedy}" if finding.remedy else ""
    return f"{finding.severity}: {finding}{remedy}"


def _display(display: bool, verbose: bool) -> Display:
    return Display(verbose=verbose) if display else NullDisplay()


def _header(config: Config, workers: int, cluster: RayCluster) -> dict[str, str]:
    graph = config.graph
    source = f"the partition in {config.partition.path}"
    if graph is not None:
        source = f"{graph.format} {getattr(graph, 'path', '')}".strip()
        source += f", {config.partition.method} partition"
    model = config.model.kind
    if ":" not in model:
        model += f", {config.model.layers} layers × {config.model.hidden}"
    fanout = ", ".join(map(_fanout, config.sampling.fanout))
    return {
        "run": f"{config.name} → {config.run_dir}",
        "graph": source,
        "model": f"{model}, fanout {fanout}, {config.precision}",
        "training": f"{config.train.epochs} epochs, batch {config.sampling.batch_size} × {workers} "
        f"workers, {config.train.optimizer}, lr {config.train.lr:g}",
        "on": "a local Ray" if cluster.local else f"the Ray at {cluster.address}",
    }


def _fanout(hop: int | dict[str, int]) -> str:
    if isinstance(hop, dict):
        return " + ".join(f"{name} {_fanout(number)}" for name, number in hop.items())
    return "all" if hop < 0 else str(hop)


def _check_resumable(config: Config, plan: Plan, run: RunDir) -> None:
    """Refuse to go on where there is nothing left to do.

    Raises:
        InputError: the run is done, or went further than the configuration now says.
    """
    state, steps = checkpoint.latest(run.checkpoints), config.train.epochs
    steps *= plan.steps_per_epoch(config)
    if config.train.max_steps is not None:
        steps = min(steps, config.train.max_steps)
    done = run.summary.get("steps", 0) if run.summary.get("status") == "done" else 0
    if done and done >= steps:
        raise InputError(
            f"this run is done: it made {done:,} steps, and train.epochs and train.max_steps ask "
            f"for {steps:,}",
            where=str(run.path),
            remedy="ask for more of them, or start over with --overwrite",
        )
    if state is not None and checkpoint.step_of(state) > steps:
        raise InputError(
            f"the newest checkpoint is of step {checkpoint.step_of(state):,}, and train.epochs and "
            f"train.max_steps ask for {steps:,}",
            where=str(state.parent),
            remedy="repeat the --set options of the first start, or start over with --overwrite",
        )


def _continuation(run: RunDir) -> str:
    state = checkpoint.latest(run.checkpoints)
    if state is None:
        return "resume: there is no checkpoint yet, so this starts from the beginning"
    return f"resume: from step {checkpoint.step_of(state):,} ({state.parent.name})"


def _fit(
    config: Config,
    plan: Plan,
    run: RunDir,
    cluster: RayCluster,
    show: Display,
    started: float,
) -> dict[str, Any]:
    """Train, showing the records as they come; a missing partition is made while Ray starts."""
    assert plan.ntype is not None  # preflight has seen to it
    tail = MetricsTail(run.metrics_file)
    tail.poll()  # an earlier start's records are not news
    faults.clear(run.path)
    for name in (RESULT, STOP):
        (run.path / name).unlink(missing_ok=True)
    job = Job(
        config=config,
        partition=plan.input.place,
        run_dir=run.path,
        ntype=plan.ntype,
        replicated=plan.replicated,
        started=started,
    )
    launch = Launch(job, plan.workers, plan.report.comm, cluster)
    try:
        parts = _watch(config, plan, run, show, launch, tail)
    except BaseException:
        if not cluster.ours:  # a Ray that goes on would go on training
            launch.stop()
        raise
    return {**launch.result(), "parts": parts}


def _watch(
    config: Config, plan: Plan, run: RunDir, show: Display, launch: Launch, tail: MetricsTail
) -> int:
    """Make the partition if there is none, then show the records; returns the parts."""
    parts = plan.input.made(show).meta.num_parts
    with show.stage("Ray and workers"):
        records = _first_records(tail, launch.running)
    train = config.train
    steps = plan.steps_per_epoch(config)
    told = 0.0
    with show.progress(train.epochs, steps, max_steps=train.max_steps) as progress:
        while True:
            running = launch.running()
            for record in records:
                progress.update(record)
            if not running:
                break
            told = _tell_failures(show, run, told)
            time.sleep(_POLL)
            records = tail.poll()
    return parts


def _tell_failures(show: Display, run: RunDir, since: float) -> float:
    """Say what a rank died of while it happens; returns the time up to which that is told."""
    news = [f for f in faults.recorded(run.path) if f.time > since and not f.is_consequence]
    if not news:
        return since
    show.note(f"rank {news[0].rank} failed: {news[0].what}")
    return max(failure.time for failure in news)


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
            state = checkpoint.latest(run.checkpoints)
            reached = f"step {checkpoint.step_of(state):,}" if state else "the start"
            what = f"interrupted; {run.path} can go on from {reached}"
        raise Interrupted(
            what, remedy="go on with --resume and the same --set, or start over with --overwrite"
        ) from None
