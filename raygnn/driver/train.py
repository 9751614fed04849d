"""Sequence of a job: config → graph → partition → preflight → launch → report.

Used by the command line, the Python API and job scripts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raygnn import __version__
from raygnn.config.load import ConfigSource, as_config, load_config
from raygnn.config.schema import Config
from raygnn.driver.inputs import PartitionInput, packed, read_input
from raygnn.driver.job_plan import (
    ClusterNodes,
    count_workers,
    display_of,
    make_plan,
    show_report,
    stored_table,
)
from raygnn.driver.loggers import Loggers, check_packages
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.resume import find_start, finished, initial_weights, on_interrupt
from raygnn.driver.session import Session
from raygnn.driver.watch import watch_training
from raygnn.errors import InputError
from raygnn.graph.sources.library_graphs import with_graph
from raygnn.preflight.findings import Finding, by_severity
from raygnn.preflight.partition_facts import Stored
from raygnn.preflight.probe import Probes, Question, probe_local
from raygnn.preflight.report import Report, preflight
from raygnn.runs.metrics_files import MetricsTail, Record
from raygnn.runs.run import Run, open_run
from raygnn.runs.run_directory import METRICS, RunDir, is_kept, is_run
from raygnn.runs.run_page import reported

_UNREAD = (
    "the graph is partitioned out of core and was not read: its content, its size in memory and on "
    "disk, and a model of your own are checked once raygnn train or raygnn partition has built the "
    "partition"
)


def train(
    config: ConfigSource,
    *,
    graph: Any = None,
    overwrite: bool = False,
    resume: bool = False,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
    on_records: Callable[[Sequence[Record]], object] = lambda records: None,
) -> Run:
    """Run a job to its end and return its run directory, opened.

    Blocks. Partitions the graph if that has not been done, checks that the job can run, starts
    a local Ray or connects to one, trains on every worker, and tests the selected weights.

    Args:
        config: a config, or anything that `raygnn.load_config` accepts.
        graph: a ``dgl.DGLGraph``, or a ``Data`` or ``HeteroData`` of PyG, to train on instead of
            the graph of ``config``; written once to a file in ``<storage>/graphs``.
        overwrite: replace an earlier run of this name.
        resume: resume the earlier run of this name from its newest checkpoint.
        verbose: show Ray's and Lightning's output, too.
        display: show progress on standard output.
        started: when the command began, seconds since the epoch; records count from it.
        on_records: called several times a second with the new records of ``metrics.jsonl``, if
            any; KeyboardInterrupt from it stops the training as Ctrl-C does.

    Raises:
        InputError: bad input, or the name is used. Nothing was started or written.
        PreflightError: the job cannot run here. Nothing was started.
        TrainingError: training failed; see ``rank`` and ``trace``.
        Interrupted: Ctrl-C.
    """
    started = time.time() if started is None else started
    config = with_graph(config, graph)
    show = display_of(display, verbose)
    check_packages(config)
    with (
        RunDir(
            config.local_storage,
            config.name,
            mode="resume" if resume else "overwrite" if overwrite else "new",
            store=config.store,
            patience=config.fault.storage_timeout.seconds,
            notify=show.note,
        ) as run,
        reported(run, show) as record_notes,
        Loggers(config, run.path, show.note) as loggers,
        Session(config, run, show, started, interrupted=on_interrupt, verbose=verbose) as session,
    ):
        workers = session.workers
        start = find_start(config, run, workers, show, resume=resume)
        initial = initial_weights(config, start)
        if not (done := finished(config, run, start)):
            session.make_plan(start.global_batch)
            done = finished(config, run, start, session.plan)
        if done:
            show.note(done)
            return _opened(run)
        session.begin()
        record_notes()
        for note in (*run.notes(), *start.notes(workers, config.sampling.batch_size)):
            show.note(note)
        records = MetricsTail(run.path / METRICS)
        records.skip()  # the records of earlier commands
        watch = partial(watch_training, loggers=loggers, tail=records, on_records=on_records)
        result = session.launch(watch, initial=initial)
        result["global_batch"] = start.global_batch
        if "seconds" in result:  # else it made no step
            result["seconds"]["total"] = time.time() - started
        versions = {"raygnn": __version__, **session.plan.report.nodes[0].versions}
        topology = "replicated" if session.plan.replicated else "partitioned"
        result |= {"topology": None if config.task.of_graphs else topology, "versions": versions}
        wait = config.fault.storage_timeout.seconds
        summary = run.update_summary(wait, **result, status="done")
    show.closing(summary, run.shown)
    return _opened(run)


def train_seeds(
    config: Config, seeds: Sequence[int], *, resume: bool = False, **options: Any
) -> list[Run]:
    """Train once for each seed, one after the other, as ``NAME-seed-N``; see `train`. ``resume``:
    resume or keep the runs that exist already, and start the others."""
    changes = [{"name": f"{config.name}-seed-{seed}", "train.seed": seed} for seed in seeds]
    configs = [load_config(config.to_dict(), change) for change in changes]
    return [train(one, resume=resume and _is_there(one), **options) for one in configs]


def _is_there(config: Config) -> bool:
    return is_run(config.run_dir) if config.store is None else is_kept(config.store, config.name)


def _opened(run: RunDir) -> Run:
    """Open the run: locally, as long as files of it could not be uploaded."""
    return Run(run.path) if run.uri is None or is_run(run.path) else open_run(run.uri.text)


def partition(
    config: ConfigSource, *, graph: Any = None, verbose: bool = False, display: bool = True
) -> Stored:
    """Build the partition or collection unless it exists, and show its sizes.

    With ``partition.parts: auto`` there is a part for each worker that fits. ``graph``: see
    `raygnn.train`.

    Raises:
        InputError: bad input; nothing was written.
    """
    config, show = with_graph(config, graph), display_of(display, verbose)
    with RayCluster(config, verbose=verbose) as cluster:
        sized, workers, early = count_workers(config, cluster, show)
        given = read_input(sized, workers, show, cluster, early=early)
        meta = given.made(show).meta
    assert meta is not None
    rows = stored_table(meta)
    seconds = [row.pop("seconds") for row in rows][-1]
    kind = "collection" if config.task.of_graphs else "partition"
    columns = [name.replace("_", " ") for name in rows[0]]
    show.table(f"{kind} {meta.directory}", columns, [list(row.values()) for row in rows])
    if given.meta is not None and not (isinstance(given, PartitionInput) and given.just_made):
        built = "" if seconds is None else f"; it was built in {seconds:.1f} s"
        show.note(f"the {kind} exists already{built}")
    return meta


def check(
    config: ConfigSource, *, graph: Any = None, verbose: bool = False, display: bool = True
) -> Report:
    """Validate the input, and check that the job can run here; no training starts.

    An unpartitioned graph is read and checked, unless it is to be partitioned out of core.
    ``graph``: see `raygnn.train`.

    Returns:
        The report; `verdict(report.findings, config)` raises on errors.

    Raises:
        InputError: bad input.
        PreflightError: no connection to the cluster.
    """
    if graph is not None:
        with TemporaryDirectory(prefix="raygnn-") as directory:
            config = with_graph(config, graph, Path(directory))
            try:
                return check(config, verbose=verbose, display=display)
            except InputError as error:  # it names a temporary file
                error.where = re.sub(rf"{directory}/[^:]*", "graph=", error.where or "graph=")
                raise
    config, show = as_config(config), display_of(display, verbose)
    check_packages(config)
    initial_weights(config)
    with RayCluster(config, verbose=verbose) as cluster, ClusterNodes(config, cluster) as nodes:
        config, workers, early = count_workers(config, cluster, show)
        found = read_input(config, workers, show, cluster, early=early, only_check=True)
        with packed(found) as given:
            batch = config.sampling.batch_size * workers
            if isinstance(given, PartitionInput) and given.unread:
                show.note(_UNREAD)
                report = preflight(config, None, nodes.survey(None))
            else:
                report = make_plan(config, nodes, given, batch, show).report
    if _is_there(config):
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
    """Survey the nodes of a cluster; nothing is written.

    Args:
        address: of the head node; None = as with ``cluster.address: auto``.
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
    report = preflight(config, None, found, of_job=False)
    show_report(show, report)
    return report
