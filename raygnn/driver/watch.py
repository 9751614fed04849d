"""Showing a job under way, from the records that its ranks leave in the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raygnn.checkpoint import store
from raygnn.config.schema import Config
from raygnn.driver.heartbeat import Heartbeat
from raygnn.driver.inputs import Input
from raygnn.driver.launch import Launch
from raygnn.driver.loggers.process import Loggers
from raygnn.driver.plan import Plan
from raygnn.driver.ray.preemption import Preemption
from raygnn.driver.record_forwarding import Followers
from raygnn.driver.startup_progress import Coming
from raygnn.driver.worker_startup import Startup
from raygnn.errors import TrainingError
from raygnn.preflight.findings import some
from raygnn.runs.diagnose.causes import FROZEN
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import MetricsTail
from raygnn.runs.run_directory import EVENTS, LOGGERS, PARTITION, SCALING, RunDir
from raygnn.util.files import read_json
from raygnn.worker import failures
from raygnn.worker.job import LENGTH, ranks

# shows a job until it is over; returns the parts
Watching = Callable[[Config, Plan, RunDir, Display, Launch, MetricsTail], int]

_POLL = 0.2  # seconds between looks at the records
_APART = 5.0  # seconds between looks at the storage
_LITTLE = 4096  # bytes


def watch(
    config: Config,
    plan: Plan,
    run: RunDir,
    show: Display,
    launch: Launch,
    tail: MetricsTail,
    loggers: Loggers,
) -> int:
    """Make the partition if there is none, then show the records; returns the parts.

    Raises:
        TrainingError: the workers do not start, or the run directory is gone.
    """
    made = plan.input.made(show)
    _note_parts(run, made)
    heartbeat = Heartbeat(run.path, config.fault.heartbeat.seconds, show, launch)
    news = News(run, show)
    followers = Followers(config, run, launch, loggers)
    with show.stage("Ray and workers") as detail:
        startup = launch.startup(show)
        coming = Coming(run.path, launch.started, detail, lambda: startup.detail)
        records = _first_records(tail, launch, startup, heartbeat, news, coming)
    train = config.train
    steps = plan.steps_per_epoch(config) or read_json(run.path / LENGTH).get("steps_per_epoch", 1)
    total = train.epochs * steps
    with suppress(TrainingError):  # for who looks at the run meanwhile
        total_steps = min(total, train.max_steps or total)
        run.update_summary(total_steps=total_steps, metric=config.metric)
    told, starts = 0.0, max(1, launch.starts)
    storage = _Storage(run, show, config.fault.storage_timeout.seconds)
    preemption = Preemption(run.path, launch.cluster, show)
    with show.progress(train.epochs, steps, max_steps=train.max_steps) as progress:
        while True:
            running = launch.running()
            records += tail.poll()  # also the last ones, written before it ended
            for record in records:
                progress.update(record)
            followers.take(records)
            followers.look()
            if not running:
                break
            heartbeat.look()
            told = _tell_failures(show, run, told)
            news.look()
            storage.look()
            preemption.look()
            if launch.starts > starts:
                starts = launch.starts
                _tell_start(show, run, starts, config)
            time.sleep(_POLL)
            records = []
    news.look()
    run.check()
    return made.parts


def _note_parts(run: RunDir, given: Input) -> None:
    """Leave for the report how the partition divides the graph; what others wrote is not read for
    that."""
    manifest = getattr(given.meta, "manifest", None)
    if isinstance(manifest, dict):
        with suppress(TrainingError):
            run.write(PARTITION, {"directory": str(given.place), "parts": manifest["parts"]})


class News:
    """Shows the events that ranks and Ray Train's controller leave word of."""

    def __init__(self, run: RunDir, show: Display):
        self._tails = [MetricsTail(run.path / "logs" / name) for name in (EVENTS, SCALING, LOGGERS)]
        self._show = show

    def look(self) -> None:
        for event in (event for tail in self._tails for event in tail.poll()):
            self._show.note(str(event.get("text")))


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


def _tell_failures(show: Display, run: RunDir, since: float) -> float:
    """Say what a rank died of while it happens; returns the time up to which that is told."""
    news = [f for f in failures.recorded(run.path) if f.time > since and not f.is_consequence]
    news = [f for f in news if f.kind != FROZEN]  # which was told when it was found
    if not news:
        return since
    show.note(f"rank {news[0].rank} failed: {news[0].what}")
    return max(failure.time for failure in news)


def _tell_start(show: Display, run: RunDir, number: int, config: Config) -> None:
    if any(failure.final for failure in failures.recorded(run.path)):
        return  # its ranks will see that, and go
    newest = store.newest(run.checkpoints) or "the beginning"
    told = f"start {number} of at most {config.fault.max_failures + 1}"
    if config.cluster.elastic:  # more workers are a start, but no failure
        told = f"start {number}, with {some(ranks(run.path) or 0, 'worker')}"
    show.note(f"{told}, from {newest} if that is whole")


def _first_records(
    tail: MetricsTail,
    launch: Launch,
    startup: Startup,
    heartbeat: Heartbeat,
    news: News,
    coming: Coming,
) -> list[dict[str, Any]]:
    """Wait until training writes its first records, or ends without."""
    while launch.running():
        if records := tail.poll():
            return records
        startup.look()
        coming.look()
        heartbeat.look()
        news.look()
        time.sleep(_POLL)
    return tail.poll()
