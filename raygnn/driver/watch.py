"""Monitoring of a running job: progress for the user, records for loggers, health of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

_POLL = 0.2  # seconds between polls of the records
_STORAGE_POLL = 5.0  # seconds between checks of the storage
_WRITTEN = 4096  # bytes that a check writes
_SAVE_POLL = 1.0  # seconds between checks for a user's request


class Watch:
    """Monitor of any running job; call `poll` often."""

    def __init__(self, job: Session, launch: Launch):
        self._launch = launch
        heartbeat = job.config.fault.heartbeat.seconds
        self._heartbeat = Heartbeat(job.run.path, heartbeat, job.show, launch)
        self._startup = Startup(job.config, job.workers, launch.cluster, job.show)
        self._notices = [MetricsTail(job.run.path / LOGS / n) for n in (EVENTS, SCALING, LOGGERS)]
        self._show = job.show

    def start_up(self, detail: Callable[[str], object], arrived: Callable[[], bool]) -> None:
        """Wait until ``arrived`` returns True, or the job ends. ``detail``: called with what Ray or
        the ranks do. Raises TrainingError if the workers do not start."""
        while self._launch.running() and not arrived():
            self._startup.poll()
            if text := startup_progress(self._launch.snapshot) or self._startup.detail:
                detail(text)
            self.poll()
            interrupts.sleep(_POLL)

    def poll(self) -> None:
        """Check the heartbeats, and show events of the ranks and of Ray Train's controller."""
        self._heartbeat.poll()
        self.show_notices()

    def show_notices(self) -> None:
        for notice in (notice for tail in self._notices for notice in tail.poll()):
            self._show.note(str(notice.get("text")))


def watch_training(
    job: Session,
    launch: Launch,
    loggers: Loggers,
    tail: MetricsTail,
    on_records: Callable[[Sequence[Record]], object],
) -> None:
    """Show the records of a training until it ends, and pass them on. Raises TrainingError if the
    workers do not start, or the run directory is gone."""
    config, run, show = job.config, job.run, job.show
    watch, records = Watch(job, launch), list[Record]()

    def arrived() -> bool:
        records.extend(tail.poll())
        return bool(records)

    with show.stage("Ray and workers") as detail:
        watch.start_up(detail, arrived)
    launch.began = bool(records)
    train = config.train
    steps = job.plan.steps_per_epoch(config) or launch.snapshot.steps_per_epoch or 1
    total = train.epochs * steps
    with suppress(TrainingError):  # for other commands that show this run
        total_steps = min(total, train.max_steps or total)
        run.update_summary(total_steps=total_steps, metric=config.metric)
    failures = FailureNotices(show, run, config, starts=max(1, launch.snapshot.starts))
    storage = _Storage(run, show, config.fault.storage_timeout.seconds)
    preemption = Preemption(launch.cluster, show, launch)
    saves = SaveFile(run, launch)
    with show.progress(train.epochs, steps, max_steps=train.max_steps) as progress:
        while True:
            running = launch.running()
            records += tail.poll()  # including the last ones, written before it ended
            for record in records:
                progress.update(record)
            loggers.forward(records)
            on_records(records)
            saves.poll()
            if not running:
                break
            watch.poll()
            failures.poll(launch.snapshot)
            storage.poll()
            preemption.poll()
            interrupts.sleep(_POLL)
            records.clear()
    watch.show_notices()
    run.check()


class SaveFile:
    """Requests a checkpoint when a user creates the file ``.save`` in the run directory, and
    removes the file once the checkpoint is written or has failed."""

    def __init__(self, run: RunDir, launch: Launch):
        self._file = run.path / SAVE
        self._launch = launch
        self._request: str | None = None
        self._next = 0.0

    def poll(self) -> None:
        if self._request is not None:
            if self._request in self._launch.snapshot.answers:
                self._launch.control.withdraw_save(self._request)
                self._request = None
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAVE_POLL
            with suppress(OSError):
                if self._file.exists() and self._launch.running():
                    self._request = self._launch.control.ask_save()


class _Storage:
    """Reports that the storage cannot be written, and checks that the run directory is still ours.
    ``patience``: seconds for which it may be gone, as when a mount is renewed."""

    def __init__(self, run: RunDir, show: Display, patience: float):
        self._run = run
        self._file = run.path / ".room"
        self._show = show
        self._patience = patience
        self._last_seen = time.monotonic()
        self._next = 0.0
        self._told = False

    def poll(self) -> None:
        """Check now, if it is time. Raises TrainingError if the run directory was replaced, or
        removed and not put back."""
        lost, now = self._run.lost, time.monotonic()
        if lost is None:
            self._last_seen = now
        elif lost == "replaced" or now - self._last_seen >= self._patience:
            self._run.check()
        if now < self._next:
            return
        self._next = time.monotonic() + _STORAGE_POLL
        try:
            self._file.write_bytes(bytes(_WRITTEN))
            self._file.unlink()
        except OSError as error:
            if not self._told:
                meanwhile = "training continues, records wait, and checkpoints are skipped"
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
