"""Sequence of a search: config → settings → partition → trials on Ray Tune → best run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raygnn.config.load import ConfigSource, as_config, load_config
from raygnn.config.schema import Config
from raygnn.driver.job_plan import display_of
from raygnn.driver.loggers import FinalStatus, backend_of, check_packages
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.session import Session
from raygnn.errors import ConfigError, TrainingError
from raygnn.preflight.probe import probe_resources
from raygnn.runs import interrupts
from raygnn.runs.display import Display
from raygnn.runs.run_directory import TRIALS, Mode, RunDir
from raygnn.search.record import SearchRecord, SearchResult
from raygnn.search.search_page import PAGE
from raygnn.search.space import metric_of, sample, search_of, speed_search

if TYPE_CHECKING:
    from raygnn.search.tune_thread import TuneThread

_POLL = 0.1  # seconds
_CONTINUE = "continue it with --resume"


def tune(
    config: ConfigSource,
    *,
    objective: Literal["speed"] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> SearchResult:
    """Search the values of ``config.search.space`` for the best validation metric, on Ray Tune.

    Blocks. Each trial is a run in ``<storage>/<name>/trials``; all share one partition. A trial
    that fails does not end the others.

    Args:
        objective: ``speed`` = search ``<name>-speed`` for the fastest values of keys that do not
            change results, instead of the section ``search``.
        overwrite: replace an earlier search or run of this name, with its trials.
        resume: resume the earlier search of this name; completed trials are kept.
        config, verbose, display, started: see `raygnn.train`.

    Raises:
        InputError: bad input, or the name is used. Nothing was started or written.
        PreflightError: a trial cannot run here. Nothing was started.
        TrainingError: every trial failed.
        Interrupted: Ctrl-C.
    """
    started = time.time() if started is None else started
    config = as_config(config)
    if objective is not None:
        config = speed_search(config)
    show = display_of(display, verbose)
    check_packages(config)
    if config.store is not None:
        what = "a search is stored in a directory that every node sees, not in an object store"
        remedy = "set storage to a directory"
        raise ConfigError(what, where=config.where("storage"), remedy=remedy)
    metric, settings = metric_of(config), sample(config)
    mode: Mode = "resume" if resume else "overwrite" if overwrite else "new"
    with (
        RunDir(config.local_storage, config.name, mode=mode, notify=show.note) as run,
        Session(config, run, show, started, interrupted=_interrupted, verbose=verbose) as session,
    ):
        path = run.path
        record = SearchRecord.open(path, config, metric, settings, resume=resume)
        session.make_plan(session.workers * config.sampling.batch_size)
        session.begin()
        record.write()
        try:
            _search(session, record, metric)
        except Exception as error:
            with suppress(TrainingError):
                run.update_summary(status="failed", error=str(error))
            raise
        best = record.best
        assert best is not None
        run.update_summary(status="done", metrics={metric[0]: best["value"]}, best=best["id"])
    result = SearchResult(path)
    result.show(show)
    show.note(f"the best trial, {best['id']}: {path / TRIALS / best['id']}; all: {path / PAGE}")
    return result


def _interrupted(run: RunDir) -> tuple[str, str | None]:
    if not run.begun:
        return "interrupted; nothing was written", None
    return "interrupted; completed trials are kept", _CONTINUE


def _search(session: Session, record: SearchRecord, metric: tuple[str, str]) -> None:
    """Run the trials. Raises TrainingError if Ray dies or no trial is completed."""
    config, run, show, cluster = session.config, session.run, session.show, session.cluster
    place = session.plan.input.made(show).place
    assert place is None or isinstance(place, Path)
    (run.path / TRIALS).mkdir(exist_ok=True)
    cluster.wait()
    concurrent = _concurrent(config, session.workers, cluster)
    search = search_of(config)
    show.note(
        f"search: {search.count} trials, {concurrent} at a time, algorithm {search.algorithm}, "
        f"scheduler {search.scheduler}, metric {metric[0]} ({metric[1]})"
    )
    from raygnn.search.tune_thread import TuneThread  # imports Ray Tune, which takes seconds

    with nested(config, run.path) as logged:
        fit = TuneThread(record, logged, place, metric, concurrent)
        cluster.host(fit)
        try:
            with interrupts.held():
                while fit.is_alive():
                    if (death := cluster.death()) is not None:
                        raise TrainingError(death, remedy=_CONTINUE)
                    _show_notes(fit, show)
                    interrupts.sleep(_POLL)
        except BaseException:
            fit.stop()
            raise
        finally:
            _show_notes(fit, show)
    if fit.error is not None:
        raise TrainingError(f"Ray Tune failed: {fit.error}") from fit.error
    if record.best is None:
        SearchResult(run.path).show(show)
        remedy = f"see the trials' errors above, then {_CONTINUE}"
        raise TrainingError("no trial was completed", where=str(run.path / TRIALS), remedy=remedy)


@contextmanager
def nested(config: Config, path: Path) -> Iterator[Config]:
    """Yield the configuration of trials that MLflow shows as nested runs of the search in directory
    ``path``, and W&B as a group. If MLflow does not answer, they have no parent."""
    given = config.to_dict()
    loggers, parent = given["logging"]["loggers"], None
    if "wandb" in loggers:
        loggers["wandb"] = {"group": config.name, **loggers["wandb"]}
    status: FinalStatus = "failed"
    try:
        if "mlflow" in loggers:
            parent = backend_of("mlflow", path)
            with suppress(Exception):
                parent.open(0)
                own = loggers["mlflow"].get("tags", {})
                tags = {"mlflow.parentRunId": parent.logger.run_id, **own}
                loggers["mlflow"] = {**loggers["mlflow"], "tags": tags}
        yield load_config(given)
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if parent is not None:
            with suppress(Exception):
                parent.close(status)


def _concurrent(config: Config, workers: int, cluster: RayCluster) -> int:
    """Return the number of trials at the same time, at most as many as the cluster can hold."""
    needs, search = config.cluster, search_of(config)
    resources = probe_resources(config, cluster.local)
    fit = max(1, resources.workers(needs.cpus_per_worker, needs.gpus_per_worker) // workers)
    return min(fit, search.count, fit if search.concurrent == "auto" else search.concurrent)


def _show_notes(fit: TuneThread, show: Display) -> None:
    while not fit.lines.empty():
        show.note(fit.lines.get())
