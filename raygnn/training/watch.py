"""Showing a job under way, from the records that its ranks leave in the run directory."""

from __future__ import annotations

import time
from typing import Any

from raygnn.config.schema import Config
from raygnn.preflight.findings import some
from raygnn.runs.display import Display
from raygnn.runs.files import read_json
from raygnn.runs.metrics import MetricsTail
from raygnn.runs.store import RunDir
from raygnn.training import checkpoint, faults
from raygnn.training.job import LENGTH, NEWS, ranks
from raygnn.training.launch import Launch
from raygnn.training.plan import Plan
from raygnn.training.startup import Startup

_POLL = 0.2  # seconds between looks at the records


def watch(
    config: Config, plan: Plan, run: RunDir, show: Display, launch: Launch, tail: MetricsTail
) -> int:
    """Make the partition if there is none, then show the records; returns the parts.

    Raises:
        TrainingError: the workers do not start.
    """
    parts = plan.input.made(show).parts
    with show.stage("Ray and workers"):
        records = _first_records(tail, launch, launch.startup(show))
    train = config.train
    steps = plan.steps_per_epoch(config) or read_json(run.path / LENGTH).get("steps_per_epoch", 1)
    told, starts, news = 0.0, max(1, launch.starts), _News(run)
    with show.progress(train.epochs, steps, max_steps=train.max_steps) as progress:
        while True:
            running = launch.running()
            for record in records:
                progress.update(record)
            if not running:
                break
            told = _tell_failures(show, run, told)
            for what in news.poll():
                show.note(what)
            if launch.starts > starts:
                starts = launch.starts
                _tell_start(show, run, starts, config)
            time.sleep(_POLL)
            records = tail.poll()
    return parts


class _News:
    """What the policy of scaling leaves word of, from now on."""

    def __init__(self, run: RunDir):
        self._file = run.path / NEWS
        self._seen = len(self._lines())

    def poll(self) -> list[str]:
        lines = self._lines()
        new, self._seen = lines[self._seen :], len(lines)
        return new

    def _lines(self) -> list[str]:
        try:
            return self._file.read_text(errors="replace").splitlines()
        except OSError:
            return []


def _tell_failures(show: Display, run: RunDir, since: float) -> float:
    """Say what a rank died of while it happens; returns the time up to which that is told."""
    news = [f for f in faults.recorded(run.path) if f.time > since and not f.is_consequence]
    if not news:
        return since
    show.note(f"rank {news[0].rank} failed: {news[0].what}")
    return max(failure.time for failure in news)


def _tell_start(show: Display, run: RunDir, number: int, config: Config) -> None:
    if any(failure.final for failure in faults.recorded(run.path)):
        return  # its ranks will see that, and go
    newest = checkpoint.newest(run.checkpoints) or "the beginning"
    told = f"start {number} of at most {config.fault.max_failures + 1}"
    if config.cluster.elastic:  # more workers are a start, but no failure
        told = f"start {number}, with {some(ranks(run.path) or 0, 'worker')}"
    show.note(f"{told}, from {newest} if that is whole")


def _first_records(tail: MetricsTail, launch: Launch, startup: Startup) -> list[dict[str, Any]]:
    """Wait until training writes its first records, or ends without."""
    while launch.running():
        if records := tail.poll():
            return records
        startup.look()
        time.sleep(_POLL)
    return tail.poll()
