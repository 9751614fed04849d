"""Handing on what a run records and what is told of it: loggers, Prometheus, the file of events."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from raygnn.config.schema import Config
from raygnn.driver.launch import Launch
from raygnn.driver.loggers.process import Loggers
from raygnn.driver.prometheus import Prometheus
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import Record
from raygnn.runs.report.page import write_report
from raygnn.runs.run_directory import LOGS, TOLD, Events, RunDir

_APART = 2.0  # seconds between looks at the ranks for Prometheus, which asks less often


def record_notes(run: RunDir, show: Display) -> None:
    """Keep what is told from now on, for the run's report; commands that go on with it add more."""
    told = Events(run.path / LOGS / TOLD)
    told.tell(f"a command of process {os.getpid()} on {socket.gethostname()} began")
    show.on_note = told.tell


@contextmanager
def reported(run: RunDir, show: Display) -> Iterator[None]:
    """Whatever becomes of what is inside, leave a report, if a run began."""
    try:
        yield
    finally:
        show.on_note = None
        if run.begun and run.lost is None:
            with suppress(Exception):  # it can be written again, and must hide nothing
                write_report(run.path)


class Followers:
    """All that follow a run besides the display."""

    def __init__(self, config: Config, run: RunDir, launch: Launch, loggers: Loggers):
        self._launch = launch
        self._looked = -math.inf
        self._loggers = loggers
        loggers.load()
        self._prometheus = Prometheus(run, config.name) if config.logging.prometheus else None

    def take(self, records: Iterable[Record]) -> None:
        """New records of ``metrics.jsonl``."""
        for record in records:
            self._loggers.start(int(record["step"]))
            if self._prometheus is not None:
                self._prometheus.take(record)

    def look(self) -> None:
        """From time to time."""
        self._loggers.look()
        now = time.monotonic()
        if self._prometheus is not None and now - self._looked >= _APART:
            self._looked = now
            self._prometheus.look(self._launch.starts)
