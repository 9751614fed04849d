"""Loggers: TensorBoard, MLflow and W&B, each fed from ``metrics.jsonl`` by a driver thread.

That file is the queue: records wait there without taking memory, and are retried after a failure.
No logger can fail or block a run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from raygnn.config.places import without_users
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, Interrupted
from raygnn.runs.interrupts import taken
from raygnn.runs.metrics_files import MetricsTail, Record
from raygnn.runs.output import LOGGER_THREAD, OutputLost
from raygnn.runs.run import Run
from raygnn.runs.run_directory import LOGGERS, LOGS, METRICS, Events
from raygnn.util.files import read_json, write_atomic

FinalStatus = Literal["done", "failed", "interrupted"]

DIRECTORY = "loggers"
_PACKAGES = ("mlflow", "wandb")  # optional dependencies, by the names of their loggers
_EXPERIMENT = "raygnn"
# keep these libraries from printing into the display, and from capturing its output
_QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

_LAST = 30.0  # seconds for the last records
_QUICK = 2.0  # seconds of waiting for them before a note
_POLL = 0.5  # seconds between polls of the records
_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds until the next attempt after a failure
_SILENT = 60.0  # seconds in one call before a note
_SHOWN = 300  # characters of an error


def check_packages(config: Config) -> None:
    """Raise ConfigError for a logger whose package is not installed."""
    for name in config.logging.loggers:
        if name in _PACKAGES and importlib.util.find_spec(name) is None:
            message = f"the logger {name} needs a package that is not installed here"
            remedy = f"install it with `pip install {name}`, or leave {name} out"
            raise ConfigError(message, where=config.where("logging.loggers"), remedy=remedy)


class Loggers:
    """Loggers of a run; a context manager that waits up to half a minute for the last records.
    ``path``: the run's; ``notify``: called with notes for the user."""

    def __init__(self, config: Config, path: Path, notify: Callable[[str], object] = print):
        self._names = config.logging.loggers
        self._path = path
        self._notify = notify
        self._events = Events(path / LOGS / LOGGERS)  # of the threads, which cannot show
        self._threads: list[LoggerThread] = []

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until all records are logged, for a limited time; Ctrl-C ends only the wait."""
        stopped = isinstance(error, (KeyboardInterrupt, Interrupted, OutputLost))
        for thread in self._threads:
            thread.finish("done" if error is None else "interrupted" if stopped else "failed")
        with taken():
            self._wait(_QUICK)
            if late := [thread.logger for thread in self._threads if thread.is_alive()]:
                self._notify(
                    f"waiting up to {_LAST:.0f} s for {' and '.join(late)} to receive the last "
                    f"records; Ctrl-C ends only the wait: {self._path / METRICS} has all of them, "
                    "and the run is unaffected"
                )
                self._wait(_LAST - _QUICK)
        if missing := [thread.logger for thread in self._threads if not thread.done]:
            self._notify(f"{' and '.join(missing)} did not receive all records; {METRICS} has them")
        self._events.close()

    def start(self, step: int) -> None:
        """Start the threads, once. ``step``: step of this command's first record."""
        for name in () if self._threads else self._names:
            if name in _PACKAGES:
                os.environ.update({**_QUIET, **os.environ})
            backend = backend_of(name, self._path)
            self._threads.append(LoggerThread(backend, self._path, self._events.notify, step))
            self._threads[-1].start()

    def forward(self, records: Sequence[Record]) -> None:
        """Forward new records of ``metrics.jsonl``, and report loggers that hang."""
        for record in records:
            self.start(int(record["step"]))
        for thread in self._threads:
            thread.poll()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class LoggerThread(threading.Thread):
    """Passes a run's records to a logger in order; a daemon, since the logger may hang.

    Args:
        run: run directory.
        notify: called with notes for the user.
        step: step of this command's first record.
    """

    def __init__(self, backend: Backend, run: Path, notify: Callable[[str], None], step: int):
        super().__init__(name=LOGGER_THREAD + backend.name, daemon=True)
        self.logger = backend.name
        self.done = False  # True if the logger received all records and is closed
        self._backend = backend
        self._notify = notify
        self._tail = MetricsTail(run / METRICS)
        self._last, self._values = -1, set[frozenset[str]]()  # names of the last step's values
        self._step = step
        self._first: int | None = None
        self._waiting: deque[Record] = deque()
        self._reopen = self._unflushed = False
        self._failing = self._silent = False
        self._status: FinalStatus | None = None
        self._ended = threading.Event()
        self._since: float | None = None  # when the present call began

    def finish(self, status: FinalStatus) -> None:
        """Log the remaining records, and end."""
        self._status = status
        self._ended.set()

    def poll(self) -> None:
        """Report a logger that has been in one call for too long."""
        since = self._since
        if since is not None and time.monotonic() - since > _SILENT and not self._silent:
            self._silent = True
            self._notify(f"{self.logger} has not answered for {_SILENT:.0f} s; training continues")

    def run(self) -> None:
        pause = _PAUSE
        while True:
            last = self._ended.is_set()
            worked = self._try(last)
            if last:
                self.done = worked
                return
            self._ended.wait(_POLL if worked else pause)
            pause = _PAUSE if worked else min(2 * pause, _LONGEST_PAUSE)

    def _try(self, last: bool) -> bool:
        self._since = time.monotonic()
        try:
            self._log()
            if last:
                self._backend.close(self._status)
        except Exception as error:
            if not self._failing:
                reason = " ".join(without_users(f"{type(error).__name__}: {error}").split())
                self._notify(
                    f"{self.logger} receives no records: {reason[:_SHOWN]}; training continues"
                )
            self._failing = True
            self._reopen |= not self._backend.remote  # a file may have half a record
            return False
        finally:
            self._since = None
        if self._failing or self._silent:
            self._notify(f"{self.logger} receives records again")
        self._failing = self._silent = False
        return True

    def _log(self) -> None:
        backend = self._backend
        while self._waiting or self._read():
            if self._reopen:
                self._reopen = False
                backend.close()
            if backend.logger is None:
                backend.open(int(self._waiting[0]["step"]))
            self._unflushed = True
            backend.log(self._waiting[0])
            self._waiting.popleft()
        if self._unflushed:
            backend.flush()
        self._unflushed = False

    def _read(self) -> bool:
        if self._first is None:
            self._first = -1 if self._backend.fresh else self._step
        while records := self._tail.poll():
            records = [record for record in records if isinstance(record.get("step"), int)]
            if back := [record["step"] for record in records if self._comes_again(record)]:
                self._first = min(self._first, *back)
                self._reopen = True
            self._waiting.extend(record for record in records if record["step"] >= self._first)
            if self._waiting:
                return True
        return False

    def _comes_again(self, record: Record) -> bool:
        """Return True if the run resumed from an earlier step with this record."""
        step, values = record["step"], frozenset(record)
        again = step < self._last or (step == self._last and values in self._values)
        self._values = {values} if step != self._last else self._values | {values}
        self._last = step
        return again


class Backend(ABC):
    """Logger that writes to files in ``loggers/<name>``, or to a server. Any method may raise any
    exception, and take any time.

    Args:
        directory: ``loggers/`` of the run.
        arguments: arguments from the configuration.
        config: configuration of the run, logged as hyperparameters.
    """

    name: ClassVar[str]
    remote: ClassVar[bool] = False  # writes to a server

    def __init__(self, directory: Path, arguments: Mapping[str, Any], config: Mapping[str, Any]):
        self.directory = directory
        self.place = directory / self.name
        self.arguments = dict(arguments)
        self.config = dict(config)
        self.logger: Any = None

    @property
    @abstractmethod
    def fresh(self) -> bool:
        """True if no command has logged anything of this run."""

    @abstractmethod
    def make(self, step: int) -> Any:
        """Build the logger; records from ``step`` on may replace logged ones."""

    @abstractmethod
    def log(self, record: Mapping[str, Any]) -> None: ...

    def describe(self) -> None:
        """Log the configuration."""
        write_atomic(self.place / "hparams.yaml", yaml.safe_dump(self.config, sort_keys=False))

    def flush(self) -> None:
        """Make logged records visible to other processes."""
        self.logger.flush()

    def end(self, logger: Any, status: FinalStatus | None) -> None:
        """Close the logger; without a status it will be built again."""
        logger.close()

    def open(self, step: int) -> None:
        """Build the logger, and log the configuration if the run is new to it."""
        fresh = self.fresh
        self.logger = self.make(step)
        if fresh:
            self.describe()

    def close(self, status: FinalStatus | None = None) -> None:
        """Close the logger if it is open; without a status it will be opened again."""
        logger, self.logger = self.logger, None
        if logger is not None:
            self.end(logger, status)


class TensorBoard(Backend):
    """Event files; of a repeated step the later values are shown."""

    name = "tensorboard"

    @property
    def fresh(self) -> bool:
        return not any(self.place.glob("events.*"))

    def make(self, step: int) -> Any:
        # SummaryWriter writes from a thread, which hides errors and may block the exit
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self.place.mkdir(parents=True, exist_ok=True)
        files = len(list(self.place.glob("events.*")))
        # without a suffix, a file of the same second would be replaced
        logger = EventsWriter(str(self.place / "events"), f".{files}")
        if files:
            logger.write_event(_event(step, session_log=SessionLog(status=SessionLog.START)))
        return logger

    def log(self, record: Mapping[str, Any]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in _numbers(record).items()]
        self.logger.write_event(_event(record["step"], summary=Summary(value=values)))


class Remote(Backend):
    """Lightning logger of a remote run, whose id is stored in ``loggers/<name>.json``."""

    remote = True

    @property
    def run_id(self) -> str | None:
        return read_json(self.place.with_suffix(".json")).get("id")

    @property
    def fresh(self) -> bool:
        return self.run_id is None

    def open(self, step: int) -> None:
        from lightning.pytorch.utilities import rank_zero_only

        # Lightning's loggers log on rank 0 only, and a job manager may set another rank
        rank_zero_only.rank = 0
        super().open(step)

    def keep(self, run_id: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(self.place.with_suffix(".json"), json.dumps({"id": run_id}) + "\n")

    def describe(self) -> None:
        self.logger.log_hyperparams(self.config)

    def log(self, record: Mapping[str, Any]) -> None:
        self.logger.log_metrics(_numbers(record), step=record["step"])

    def flush(self) -> None:
        self.logger.save()


class Mlflow(Remote):
    """Run in MLflow, which keeps both values of a repeated step."""

    name = "mlflow"

    def make(self, step: int) -> Any:
        from lightning.pytorch.loggers import MLFlowLogger

        arguments = {"experiment_name": _EXPERIMENT, "run_name": self.config["name"]}
        logger = MLFlowLogger(
            **{**arguments, **self.arguments}, save_dir=str(self.place), run_id=self.run_id
        )
        self.keep(logger.run_id)
        return logger

    def end(self, logger: Any, status: FinalStatus | None) -> None:
        # an interrupted run may be resumed, so it has not failed
        ends = {"done": "success", "failed": "failed", "interrupted": "KILLED"}
        if status is not None:
            logger.finalize(ends[status])


class Wandb(Remote):
    """Run in Weights & Biases, which keeps both values of a repeated step."""

    name = "wandb"

    def make(self, step: int) -> Any:
        from lightning.pytorch.loggers import WandbLogger

        run_id = self.run_id or uuid.uuid4().hex[:12]
        arguments = {"project": _EXPERIMENT, "name": self.config["name"]}
        logger = WandbLogger(
            **{**arguments, **self.arguments},
            save_dir=str(self.directory),
            id=run_id,
            resume="allow",
        )
        _ = logger.experiment  # creates the run
        self.keep(run_id)
        return logger

    def end(self, logger: Any, status: FinalStatus | None) -> None:
        logger.experiment.finish(exit_code=0 if status == "done" else 1)


_BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (TensorBoard, Mlflow, Wandb)}


def backend_of(name: str, run: Path) -> Backend:
    config = Run(run).config
    return _BACKENDS[name](run / DIRECTORY, config["logging"]["loggers"][name], config)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}


def _event(step: int | None, **content: Any) -> Any:
    from tensorboardX.proto.event_pb2 import Event

    return Event(wall_time=time.time(), step=step, **content)
