"""Session: one job from its configuration to its result, for `train`, `tune` and `predict`.

with Session(config, run, show, started) as session:
    session.make_plan(global_batch)   # inputs, plan, preflight
    session.begin()                   # write the run directory
    result = session.launch(watch)    # start Ray and the ranks, return rank 0's result
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from raygnn.config.graph import PlantedGraph
from raygnn.config.schema import Config
from raygnn.driver.inputs import Input, PartitionInput, read_input
from raygnn.driver.job_plan import (
    ClusterNodes,
    Plan,
    count_workers,
    header,
    make,
    make_plan,
    show_nodes,
)
from raygnn.driver.launch import Launch
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import InputError, Interrupted, TrainingError
from raygnn.preflight.report import refuse
from raygnn.runs import interrupts, trust
from raygnn.runs.diagnose.judge import diagnose
from raygnn.runs.display import Display
from raygnn.runs.output import OutputLost
from raygnn.runs.run_directory import PARTITION, PREFLIGHT, SAVE, RunDir, read_config
from raygnn.worker import failures
from raygnn.worker.job import ROWS, Job

_NO_CAUSES = ("none", "running", "interrupted", "command_gone", "unknown")  # of `diagnose`


class Session:
    """Job in its run directory, on its Ray; a context manager that leaves nothing running.

    Args:
        started: when the command began, seconds since the epoch.
        interrupted: returns the message and remedy after Ctrl-C.
        purpose: shown in the header in place of the training.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        show: Display,
        started: float,
        *,
        interrupted: Callable[[RunDir], tuple[str, str | None]],
        verbose: bool = False,
        purpose: str | None = None,
    ):
        self.config = config
        self.run = run
        self.show = show
        self.cluster = RayCluster(config, verbose=verbose, notify=show.note)
        self.workers = 0  # number of ranks
        self._recorded = config.recorded()
        self._early: PartitionInput | None = None
        self.plan: Plan  # set by `make_plan`
        self._started = started
        self._interrupted = interrupted
        self._purpose = purpose

    def __enter__(self) -> Session:
        try:
            counted = count_workers(self.config, self.cluster, self.show)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self.config, self.workers, self._early = counted
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        run, stopped = self.run, isinstance(error, (KeyboardInterrupt, OutputLost))
        try:
            if run.begun and run.lost is None:
                shutil.rmtree(run.path / ".ray", ignore_errors=True)  # Ray Train's bookkeeping
            if run.begun and stopped:
                run.update_summary(status="interrupted")
        finally:
            self.cluster.close()
        if isinstance(error, KeyboardInterrupt):
            what, remedy = self._interrupted(run)
            raise Interrupted(what, remedy=remedy) from None

    def make_plan(self, global_batch: int, place: str | None = None) -> None:
        """Plan the job and run its preflight; only a missing partition or collection is written.
        ``place``: shown location of the results, None = the run directory. Raises InputError for
        bad input, PreflightError if the job cannot run here."""
        config, show, cluster = self.config, self.show, self.cluster
        place = place or self.run.shown
        show.header(header(config, self.workers, cluster, global_batch, place, self._purpose))
        if isinstance(config.graph, PlantedGraph):
            cluster.start()  # a generated graph is always valid
        with ClusterNodes(config, cluster, show) as nodes:
            given = read_input(config, self.workers, show, cluster, early=self._early)
            if not cluster.local or config.task.of_graphs:
                given = make(config, nodes, given, show)  # before every node checks for it
            self.plan = make_plan(config, nodes, given, global_batch, show)
        refuse(self.plan.report.findings, config)

    def begin(self) -> None:
        """Begin the run directory, and write the preflight's report into it."""
        self.run.begin(self._recorded)
        if self._purpose is None:  # a prediction must not make another user's run trusted
            trust.record(read_config(self.run.path))
        self.run.write(PREFLIGHT, self.plan.report.to_dict())
        if not self.cluster.local:
            show_nodes(self.show, self.plan.report)
        for finding in self.plan.report.findings:
            self.show.note(finding.text)

    def launch(self, watch: Callable[[Session, Launch], None], **job: Any) -> dict[str, Any]:
        """Run the ranks; a missing partition is built while Ray starts. ``watch`` shows progress
        until the job ends. Returns rank 0's result, and ``parts``. Raises TrainingError with the
        first cause, which is in the summary, too."""
        try:
            return self._launch(watch, job)
        except Exception as error:
            if not isinstance(error, OutputLost):
                self.run.check()
                self._note_failure(error)
            raise

    def _launch(
        self, watch: Callable[[Session, Launch], None], options: dict[str, Any]
    ) -> dict[str, Any]:
        run, plan = self.run, self.plan
        failures.clear(run.path)
        (run.path / SAVE).unlink(missing_ok=True)  # of an earlier command
        job = Job(
            config=self.config,
            partition=plan.input.place,
            run_dir=run.path,
            goals=plan.goals,
            replicated=plan.replicated,
            started=self._started,
            global_batch=plan.global_batch,
            lists=plan.lists,
            token=run.token,
            **options,
        )
        launch = Launch(job, self.workers, plan.report.comm, self.cluster)
        try:
            try:
                made = plan.input.made(self.show)
                self._note_parts(made)
                with interrupts.held():
                    watch(self, launch)
            except BaseException as error:
                self._stop(launch, error, save=job.trains)
                raise
            result = launch.result()
            (run.path / SAVE).unlink(missing_ok=True)
            return {**result, "parts": made.parts}
        finally:
            with suppress(TrainingError):
                run.update_summary(starts=launch.snapshot.starts)

    def _stop(self, launch: Launch, error: BaseException, *, save: bool) -> None:
        """Stop the ranks. ``save``: write a last checkpoint if an interrupt ends the training."""
        try:
            if save and isinstance(error, (KeyboardInterrupt, OutputLost)) and launch.trains:
                with suppress(OutputLost), interrupts.taken():
                    self.show.note("interrupted: saving a checkpoint")
                with interrupts.taken():
                    launch.save()
        finally:
            launch.stop()

    def _note_parts(self, made: Input) -> None:
        """Record the sizes of the parts for the report, unless another tool wrote the partition."""
        if isinstance(made, PartitionInput) and made.meta and made.meta.manifest is not None:
            parts = [part.row for part in made.meta.manifest.parts]
            place, store = str(made.place), self.config.store
            if store is not None and not isinstance(made.place, Path):
                place = (store / "partitions" / made.place.name).shared
            with suppress(TrainingError):
                self.run.write(PARTITION, {"directory": place, "parts": parts})

    def _note_failure(self, error: Exception) -> None:
        """Record the failure; replace what ranks inferred by the cause that their files show."""
        with suppress(TrainingError):  # a full disk must not become another error
            self.run.update_summary(status="failed", error=str(error))
        if not isinstance(error, TrainingError):
            return
        if self._purpose is None or error.exit_code != InputError.exit_code:
            error.run = self.run.shown  # `raygnn diagnose` reports more
        if error.direct:
            return
        with suppress(Exception):  # a failure here must not hide the error
            cause = diagnose(self.run.path).cause
            if cause.confidence != "low" and cause.kind not in _NO_CAUSES:
                error.what, error.where, error.remedy = cause.what, cause.where, cause.remedy
                error.rank, error.trace = cause.rank, None
                self.run.update_summary(error=str(error))


@contextmanager
def session_beside(
    config: Config, show: Display, started: float, *, verbose: bool, purpose: str
) -> Iterator[Session]:
    """Begin a session for predictions in ``<storage>/.predicting/<name>``, without touching the run
    of that name. Nothing is uploaded to an object store. The directory is removed afterwards,
    unless the ranks failed. Raises InputError if it is a link, and as `raygnn.train` does."""
    beside = config.local_storage / ".predicting"  # no run can have this name
    if beside.is_symlink():  # it may lead to other runs, which would be removed
        raise InputError("this is a symbolic link", where=str(beside), remedy="remove it")
    with (
        RunDir(beside, config.name, mode="overwrite") as run,
        _cleared(run),
        Session(
            config,
            run,
            show,
            started,
            interrupted=lambda run: ("interrupted; nothing was written", None),
            verbose=verbose,
            purpose=purpose,
        ) as session,
    ):
        shown = None if config.store is None else (config.store / config.name).shared
        session.make_plan(session.workers * config.sampling.batch_size, shown)
        session.begin()
        yield session


@contextmanager
def _cleared(run: RunDir) -> Iterator[None]:
    """Remove temporary files afterwards, and the run directory unless the training failed."""
    keep = False
    try:
        yield
    except TrainingError as error:
        keep = error.exit_code != InputError.exit_code
        raise
    finally:
        if run.begun and run.lost is None:
            shutil.rmtree(run.path / ROWS if keep else run.path, ignore_errors=True)
            with suppress(OSError):  # other runs' directories may be there
                run.path.parent.rmdir()
