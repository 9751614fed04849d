"""Watching a job: its progress for the user, its records for loggers, its ranks' health."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from raygnn.driver.health import FailureNotices, Heartbeat, Preemption
from raygnn.driver.launch import Launch
from raygnn.driver.loggers import Loggers
from raygnn.driver.session import Session
from raygnn.driver.startup import Startup, startup_progress
from raygnn.errors import TrainingError
from raygnn.runs import interrupts
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import MetricsTail, Record
from raygnn.runs.run_directory import EVENTS, LOGGERS, LOGS, SAVE, SCALING, RunDir
from raygnn.worker.control import SaveRequest

_POLL = 0.2  # seconds between looks at the records
_APART = 5.0  # seconds between looks at the storage
_LITTLE = 4096  # bytes
_SAVES = 1.0  # seconds between looks for requests of others


class Watch:
    """What is looked at for any job while it runs; `look` is to be called often."""

    def __init__(self, job: Session, launch: Launch):
        self._launch = launch
        heartbeat = job.config.fault.heartbeat.seconds
        self._heartbeat = Heartbeat(job.run.path, heartbeat, job.show, launch)
        self._startup = Startup(job.config, job.plan.workers, launch.cluster, job.show)
        self._notices = [MetricsTail(job.run.path / LOGS / n) for n in (EVENTS, SCALING, LOGGERS)]
        self._show = job.show

    def start_up(self, detail: Callable[[str], object], arrived: Callable[[], bool]) -> None:
        """Wait until what is waited for has arrived, or the job has ended without.

        Args:
            detail: takes what Ray, or the ranks, do meanwhile.

        Raises:
            TrainingError: the workers do not start.
        """
        while self._launch.running() and not arrived():
            self._startup.look()
            if text := startup_progress(self._launch.snapshot) or self._startup.detail:
                detail(text)
            self.look()
            interrupts.sleep(_POLL)

    def first_records(self, tail: MetricsTail) -> list[Record]:
        """Show, as a stage, how Ray and the workers start up, until there are records."""
        records: list[Record] = []

        def arrived() -> bool:
            records.extend(tail.poll())
            return bool(records)

        with self._show.stage("Ray and workers") as detail:
            self.start_up(detail, arrived)
        return records

    def look(self) -> None:
        """See to frozen ranks, and show what ranks and Ray Train's controller leave word of."""
        self._heartbeat.look()
        self.show_notices()

    def show_notices(self) -> None:
        for notice in (notice for tail in self._notices for notice in tail.poll()):
            self._show.note(str(notice.get("text")))


def watch_training(job: Session, launch: Launch, loggers: Loggers, tail: MetricsTail) -> None:
    """Show the records of a training until it is over.

    Args:
        tail: reads those that are new.

    Raises:
        TrainingError: the workers do not start, or the run directory is gone.
    """
    config, run, show = job.config, job.run, job.show
    watch = Watch(job, launch)
    records = watch.first_records(tail)
    launch.began = bool(records)
    train = config.train
    steps = job.plan.steps_per_epoch(config) or launch.snapshot.steps_per_epoch or 1
    total = train.epochs * steps
    with suppress(TrainingError):  # for who looks at the run meanwhile
        total_steps = min(total, train.max_steps or total)
        run.update_summary(total_steps=total_steps, metric=config.metric)
    failures = FailureNotices(show, run, config, starts=max(1, launch.starts))
    storage = _Storage(run, show, config.fault.storage_timeout.seconds)
    preemption = Preemption(launch.cluster, show, launch)
    saves = SaveFile(run, launch)
    with show.progress(train.epochs, steps, max_steps=train.max_steps) as progress:
        while True:
            running = launch.running()
            records += tail.poll()  # also the last ones, written before it ended
            for record in records:
                progress.update(record)
            loggers.forward(records, launch.starts)
            saves.look()
            if not running:
                break
            watch.look()
            failures.look(launch.snapshot)
            storage.look()
            preemption.look()
            interrupts.sleep(_POLL)
            records.clear()
    watch.show_notices()
    run.check()


class SaveFile:
    """Whoever makes the file ``.save`` in the run directory gets a checkpoint; the file goes when
    that is written, or cannot be."""

    def __init__(self, run: RunDir, launch: Launch):
        self._file = run.path / SAVE
        self._launch = launch
        self._request: SaveRequest | None = None
        self._next = 0.0

    def look(self) -> None:
        if self._request is not None:
            if self._request.answer(self._launch.snapshot) is not None:
                self._request.withdraw()
                self._request = None
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAVES
            with suppress(OSError):
                if self._file.exists() and self._launch.running():
                    self._request = self._launch.ask_save()


class _Storage:
    """Says that nothing can be written, which ranks can write nowhere, and sees that the run
    directory is still the run's.

    Args:
        patience: seconds for which it may be gone, as where a mount is made anew.
    """

    def __init__(self, run: RunDir, show: Display, patience: float):
        self._run = run
        self._file = run.path / ".room"
        self._show = show
        self._patience = patience
        self._last_seen = time.monotonic()
        self._next = 0.0
        self._told = False

    def look(self) -> None:
        """To be called often.

        Raises:
            TrainingError: the run directory was replaced, or removed and not put back.
        """
        lost, now = self._run.lost, time.monotonic()
        if lost is None:
            self._last_seen = now
        elif lost == "replaced" or now - self._last_seen >= self._patience:
            self._run.check()
        if now < self._next:
            return
        self._next = time.monotonic() + _APART
        try:
            self._file.write_bytes(bytes(_LITTLE))
            self._file.unlink()
        except OSError as error:
            if not self._told:
                meanwhile = "training goes on, records wait, and checkpoints are left out"
                if lost is not None:
                    meanwhile = f"unless it is back in {self._patience:g} s, the run ends"
                self._show.note(
                    f"{self._file.parent} cannot be written ({error.strerror}): {meanwhile}"
                )
            self._told = True
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            return
        if self._told:
            self._show.note(f"{self._file.parent} can be written again")
        self._told = False
