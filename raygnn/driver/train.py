"""The sequence: config → graph → partition → preflight → launch → report.

The command line, the Python API and job scripts all come through here; only it knows the order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn import __version__
from raygnn.checkpoint import store
from raygnn.checkpoint.mirror import Mirror
from raygnn.config.graph import PlantedGraph
from raygnn.config.load import Source, as_config, load_config
from raygnn.config.schema import Config
from raygnn.driver import record_forwarding
from raygnn.driver.final_advice import advice_for
from raygnn.driver.inputs import read_input, table, to_look_at
from raygnn.driver.launch import Launch
from raygnn.driver.loggers.process import Loggers, check_packages
from raygnn.driver.plan import Nodes, Plan, count_workers, make, make_plan
from raygnn.driver.plan_display import display_of, header, show_finding, show_nodes, show_report
from raygnn.driver.ray.connection import RayCluster
from raygnn.driver.resume import check_mirror, check_steps, find_start, only_fetched, resume_mode
from raygnn.driver.watch import Watching, watch
from raygnn.errors import ConfigError, InputError, Interrupted, TrainingError
from raygnn.preflight import report as preflight_report
from raygnn.preflight.findings import Finding, by_severity
from raygnn.preflight.probe import Probes, Question, probe_local
from raygnn.preflight.report import Report, refuse
from raygnn.runs.diagnose import diagnose
from raygnn.runs.display import Display
from raygnn.runs.interrupts import taken
from raygnn.runs.metrics_files import MetricsTail
from raygnn.runs.output import OutputLost
from raygnn.runs.run import Run
from raygnn.runs.run_directory import PREFLIGHT, RunDir, is_run
from raygnn.worker import failures
from raygnn.worker.job import Job, clean_up, clear

if TYPE_CHECKING:
    from raygnn.preflight.partition_facts import Stored

MOST_PROFILED = 1000  # steps
_COLUMNS = ("operator", "calls", "self ms", "total ms")
_NO_CAUSES = ("none", "running", "interrupted", "command_gone", "unknown")  # of `diagnose`


def train(
    config: Source,
    *,
    overwrite: bool = False,
    resume: bool = False,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
    profile: int = 0,
) -> Run:
    """Run a job to its end and return its run directory, opened.

    Blocks. Partitions the graph if that has not been done, checks that the job can run, starts
    a local Ray or connects to one, trains on every worker, and tests the selected weights.

    Args:
        config: or what `raygnn.load_config` makes one of.
        overwrite: replace an earlier run of this name.
        resume: go on with the earlier run of this name, from its newest checkpoint.
        verbose: show Ray's and Lightning's output, too.
        display: show progress on standard output.
        started: when the command began, seconds since the epoch; records count from it.
        profile: steps to record with torch's profiler on every rank, early in the run.

    Raises:
        InputError: bad input, or a name that is taken. Nothing was started or written.
        PreflightError: the job cannot run here. Nothing was started.
        TrainingError: training failed; ``rank`` and ``trace`` say where.
        Interrupted: Ctrl-C.
    """
    if type(profile) is not int or not 0 <= profile <= MOST_PROFILED:
        raise InputError(f"profile {profile!r}", remedy=f"a whole number to {MOST_PROFILED}")
    config, started = as_config(config), time.time() if started is None else started
    show = display_of(display, verbose)
    check_packages(config)
    with (
        RunDir.create(
            config.storage,
            config.name,
            mode=resume_mode(config) if resume else "overwrite" if overwrite else "new",
        ) as run,
        only_fetched(run),
        record_forwarding.reported(run, show),
        Loggers(config, run.path, show.note) as loggers,
        RayCluster(config, verbose=verbose) as cluster,
        loggers.ending(),
        interruptible(run),
    ):
        workers = count_workers(config, cluster)
        with _looking(config, show) if resume else nullcontext():
            start = find_start(config, run, workers, resume=resume)
        plan = plan_job(config, workers, cluster, show, start.global_batch)
        check_steps(config, plan, run, start)
        if not resume:
            check_mirror(config, run, overwrite=overwrite)
        begin(config, plan, run, cluster, show)
        record_forwarding.record_notes(run, show)
        for note in (*run.notes(), *start.notes(workers, config.sampling.batch_size)):
            show.note(note)
        watching = partial(watch, loggers=loggers)
        try:
            result = fit(config, plan, run, cluster, show, started, watching, profile=profile)
        except Interrupted:
            raise
        except Exception as error:
            run.check()
            _note_failure(run, error)
            raise
        finally:
            clean_up(run, local=cluster.local)
        if "seconds" in result:  # else it made no step
            result["seconds"]["total"] = time.time() - started
            result["advice"] = advice_for(config, run, result)
        versions = {"raygnn": __version__, **plan.report.nodes[0].versions}
        topology = plan.topology(config)
        run.update_summary(**result, status="done", topology=topology, versions=versions)
    if operators := run.summary.get("operators"):
        rows = [list(operator.values()) for operator in operators["top"]]
        show.table(f"operators of rank 0, {operators['steps']} steps", list(_COLUMNS), rows)
    show.closing(run.summary, run.path)
    return Run(run.path)


def partition(config: Source, *, verbose: bool = False, display: bool = True) -> Stored:
    """Partition the graph, or store the graphs, unless that has been done, and show the outcome.

    With ``partition.parts: auto`` there is a part for each worker that fits.

    Raises:
        InputError: bad input; nothing was written.
    """
    config, show = as_config(config), display_of(display, verbose)
    with RayCluster(config, verbose=verbose) as cluster:
        meta = read_input(config, count_workers(config, cluster), show).made(show).meta
    if meta is None:
        raise ConfigError(
            "a dataset of your own is not stored: every rank opens it",
            where="graph.dataset",
            remedy="start with raygnn train",
        )
    rows = table(meta)
    kind = "collection" if config.task.of_graphs else "partition"
    show.table(f"{kind} {meta.directory}", list(rows[0]), [list(row.values()) for row in rows])
    return meta


def check(config: Source, *, verbose: bool = False, display: bool = True) -> Report:
    """Validate the input and whether the job can run here; nothing is written or started.

    A graph that has not been partitioned is read and judged as it is.

    Returns:
        The report; `verdict(report.findings, config)` raises for what it refuses.

    Raises:
        InputError: bad input.
        PreflightError: no connection to the cluster.
    """
    config, show = as_config(config), display_of(display, verbose)
    check_packages(config)
    with RayCluster(config, verbose=verbose) as cluster, Nodes(config, cluster) as nodes:
        workers = count_workers(config, cluster)
        with to_look_at(read_input(config, workers, show)) as given:
            batch = config.sampling.batch_size * workers
            report = make_plan(config, nodes, workers, given, batch, show).report
    if is_run(config.run_dir):
        taken = Finding(
            "name_free",
            "warn",
            f"the name {config.name!r} is taken by an earlier run",
            "choose another name, or pass --overwrite or --resume to raygnn train",
        )
        report = replace(report, findings=by_severity([*report.findings, taken]))
    show_report(show, report)
    return report


def inspect(
    address: str | None = None,
    overrides: Sequence[str] = (),
    *,
    verbose: bool = False,
    display: bool = True,
) -> Report:
    """Look at the nodes of a cluster, whatever job may run on them; nothing is written.

    Args:
        address: of the head node; None = as ``cluster.address: auto`` finds it.
        overrides: such as ``cluster.probe_timeout=20``.

    Raises:
        ConfigError: an override is wrong.
        PreflightError: no connection to the cluster.
    """
    show = display_of(display, verbose)
    config = load_config(
        {
            "name": "cluster",
            "graph": {"format": "planted", "nodes": 1000},
            "model": {"kind": "gcn"},
            "cluster": {"address": address or "auto"},
        },
        overrides,
    )
    with RayCluster(config, verbose=verbose) as cluster:
        question = Question(storage=None, token=None, cache=None)
        if cluster.local:
            found = probe_local(config, question=question)
        else:
            cluster.wait()
            with Probes() as probes:
                found = probes.ask(question, config.cluster.probe_timeout.seconds)
    report = preflight_report.inspect(config, found)
    show_report(show, report)
    return report


def _looking(config: Config, show: Display) -> AbstractContextManager[Any]:
    """A stage for what may take long: a mirror that does not answer."""
    mirror = Mirror.of(config)
    return nullcontext() if mirror is None else show.stage(f"checkpoints in {mirror}")


def plan_job(
    config: Config,
    workers: int,
    cluster: RayCluster,
    show: Display,
    global_batch: int,
    place: Path | None = None,
    purpose: str | None = None,
) -> Plan:
    """What will run and where, asked of the input and of every node.

    Args:
        place: the run directory, if it is not the one that the name says.
        purpose: what is done, if not training.

    Raises:
        InputError: bad input.
        PreflightError: the job cannot run here.
    """
    place = place or config.run_dir
    show.header(header(config, workers, cluster, global_batch, place, purpose))
    if isinstance(config.graph, PlantedGraph):
        cluster.start()  # a generated graph can not turn out to be bad
    with Nodes(config, cluster) as nodes:
        given = read_input(config, workers, show)
        if not cluster.local or config.task.of_graphs:
            given = make(config, nodes, given, show)  # so that every node can be asked about it
        plan = make_plan(config, nodes, workers, given, global_batch, show)
    refuse(plan.report.findings, config)
    return plan


def begin(config: Config, plan: Plan, run: RunDir, cluster: RayCluster, show: Display) -> None:
    """The run directory is this command's from here on; what preflight found is in it."""
    run.begin(config.recorded())
    run.write(PREFLIGHT, plan.report.to_dict())
    if not cluster.local:
        show_nodes(show, plan.report)
    for finding in plan.report.findings:
        show_finding(show, finding)


def fit(
    config: Config,
    plan: Plan,
    run: RunDir,
    cluster: RayCluster,
    show: Display,
    started: float,
    watching: Watching,
    **extra: Any,
) -> dict[str, Any]:
    """Train, showing the records as they come; a missing partition is made while Ray starts.

    Args:
        watching: shows what happens until it is over.
        extra: of the `Job`.

    Returns:
        What rank 0 left, and the parts.
    """
    tail = MetricsTail(run.metrics_file)
    tail.skip()  # an earlier start's records are not news
    failures.clear(run.path)
    clear(run.path)
    job = Job(
        config=config,
        partition=plan.input.place,
        run_dir=run.path,
        **_goals(config, plan),
        replicated=plan.replicated,
        started=started,
        global_batch=plan.global_batch,
        token=run.token,
        **extra,
    )
    launch = Launch(job, plan.workers, plan.report.comm, cluster)
    try:
        try:
            parts = watching(config, plan, run, show, launch, tail)
        except BaseException as error:
            try:
                if job.trains and isinstance(error, (KeyboardInterrupt, OutputLost)):
                    _save(launch, show)
            finally:
                launch.stop(ask=run.lost is None)
            raise
        return {**launch.result(), "parts": parts}
    finally:
        with suppress(TrainingError):
            run.update_summary(starts=launch.starts)


def _goals(config: Config, plan: Plan) -> dict[str, Any]:
    """What a `Job` says of what its tasks predict for."""
    goals = plan.goals.values()  # preflight has seen to them
    assert config.task.of_graphs or all(g.ntype is not None or g.edges for g in goals)
    if config.tasks is not None:
        return {"ntype": None, "goals": dict(plan.goals)}
    (goal,) = goals
    return {"ntype": goal.ntype, "edges": goal.edges}


def _save(launch: Launch, show: Display) -> None:
    """Have a last checkpoint written; a second Ctrl-C is the first one's, and goes no further."""
    if not launch.trains:
        return
    with suppress(OutputLost), taken():
        show.note("interrupted: saving a checkpoint")
    with taken():
        launch.save()


def _note_failure(run: RunDir, error: Exception) -> None:
    """Say so in the summary, which a full disk must not turn into another error."""
    with suppress(TrainingError):
        run.update_summary(status="failed", error=str(error))
    if isinstance(error, TrainingError):
        error.run = str(run.path)
        if not error.direct:
            _say_cause(run, error)


def _say_cause(run: RunDir, error: TrainingError) -> None:
    """Put what the ranks left together, where none of them could say what happened."""
    with suppress(Exception):  # whatever goes wrong here must not hide the error
        cause = diagnose(run.path).cause
        if cause.confidence == "low" or cause.kind in _NO_CAUSES:
            return
        error.what, error.where, error.remedy = cause.what, cause.where, cause.remedy
        error.rank, error.trace = cause.rank, None
        run.update_summary(error=str(error))


@contextmanager
def interruptible(run: RunDir) -> Iterator[None]:
    """Turn Ctrl-C into our error, and note it in the run, if one began."""
    try:
        yield
    except OutputLost:
        if run.begun:
            run.update_summary(status="interrupted")
        raise
    except KeyboardInterrupt:
        what = "interrupted before training began; nothing was written"
        if run.begun:
            run.update_summary(status="interrupted")
            newest = store.newest(run.checkpoints)
            reached = f"step {int(newest.removeprefix('step-')):,}" if newest else "the start"
            what = f"interrupted; {run.path} can go on from {reached}"
        raise Interrupted(
            what, remedy="go on with --resume and the same --set, or start over with --overwrite"
        ) from None
