"""How each logger is made, goes on after a resume, and ends."""

from __future__ import annotations

import csv
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import yaml

from raygnn.runs.run import Run
from raygnn.util.files import read_json, write_atomic

DIRECTORY = "loggers"
Status = Literal["done", "failed", "interrupted"]

# distribution and module, of those that are not there with raygnn
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb"}

_EXPERIMENT = "raygnn"


class Kind(ABC):
    """A logger; every method may raise anything, and take any time.

    Args:
        directory: ``loggers/`` of the run.
        arguments: the user's.
        config: of the run, for what a logger calls hyperparameters.
    """

    name: ClassVar[str]
    whole: ClassVar[bool] = False  # written anew from all records when a run goes on
    remote: ClassVar[bool] = False  # in a process of its own

    def __init__(self, directory: Path, arguments: Mapping[str, Any], config: Mapping[str, Any]):
        self.directory = directory
        self.arguments = dict(arguments)
        self.config = dict(config)
        self.logger: Any = None

    @property
    @abstractmethod
    def fresh(self) -> bool:
        """Whether nothing of this run has been logged by any command."""

    @abstractmethod
    def make(self, step: int) -> Any:
        """What takes records.

        Args:
            step: records from this step on may come again, and replace those that were logged.
        """

    @abstractmethod
    def describe(self) -> None:
        """Log the configuration."""

    @abstractmethod
    def log(self, record: Mapping[str, Any]) -> None:
        """Log a record."""

    @abstractmethod
    def flush(self) -> None:
        """Let others see what was logged."""

    @abstractmethod
    def end(self, logger: Any, status: Status | None) -> None:
        """End what `make` made; without a status it is to be made again."""

    def open(self, step: int) -> None:
        """Make the logger, and tell it of the configuration if the run is new to it."""
        fresh = self.fresh
        self.logger = self.make(step)
        if fresh:
            self.describe()

    def close(self, status: Status | None = None) -> None:
        """End it, if it is open; without a status it is to be opened again."""
        logger, self.logger = self.logger, None
        if logger is not None:
            self.end(logger, status)


class File(Kind):
    """One that writes files: in ``loggers/<name>``."""

    @property
    def place(self) -> Path:
        return self.directory / self.name

    def describe(self) -> None:
        write_atomic(self.place / "hparams.yaml", yaml.safe_dump(self.config, sort_keys=False))

    def flush(self) -> None:
        self.logger.flush()

    def end(self, logger: Any, status: Status | None) -> None:
        logger.close()


class TensorBoard(File):
    """Files of events; of a step that comes again the later values are shown."""

    name = "tensorboard"

    @property
    def fresh(self) -> bool:
        return not any(self.place.glob("events.*"))

    def make(self, step: int) -> Any:
        # its SummaryWriter writes from a thread, which hides errors and may hold up the exit
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self.place.mkdir(parents=True, exist_ok=True)
        files = len(list(self.place.glob("events.*")))
        # files of the same second would be one, and the second of them the only one
        logger = EventsWriter(str(self.place / "events"), f".{files}")
        if files:
            logger.write_event(_event(step, session_log=SessionLog(status=SessionLog.START)))
        return logger

    def describe(self) -> None:
        from tensorboardX.summary import hparams

        super().describe()
        # without a value that belongs to them, hyperparameters are not shown
        for summary in hparams(dict(_flat(self.config)), {"epoch": 0.0}):
            self.logger.write_event(_event(None, summary=summary))

    def log(self, record: Mapping[str, Any]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in _numbers(record).items()]
        self.logger.write_event(_event(record["step"], summary=Summary(value=values)))


class Csv(File):
    """``metrics.csv``, which gets all records again when a run goes on."""

    name = "csv"
    whole = True

    @property
    def fresh(self) -> bool:
        return True

    @property
    def _file(self) -> Path:
        return self.place / "metrics.csv"

    def make(self, step: int) -> Any:
        self.place.mkdir(parents=True, exist_ok=True)
        self._columns: list[str] = []
        return self._begin([])

    def log(self, record: Mapping[str, Any]) -> None:
        values = {**_numbers(record), "step": record["step"]}
        if new := values.keys() - {*self._columns}:
            self._columns = sorted({*self._columns, *new})
            self.logger.close()
            with open(self._file, newline="") as file:
                rows = list(csv.DictReader(file))
            self.logger = self._begin(rows)
        csv.DictWriter(self.logger, self._columns).writerow(values)

    def _begin(self, rows: Sequence[Mapping[str, Any]]) -> IO[str]:
        """Put a file with these rows in its place, and leave it open for more."""
        draft = self._file.with_suffix(".draft")
        file = open(draft, "w", newline="")  # noqa: SIM115
        writer = csv.DictWriter(file, self._columns)
        if self._columns:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        draft.replace(self._file)
        return file


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}


def _event(step: int | None, **content: Any) -> Any:
    from tensorboardX.proto.event_pb2 import Event

    return Event(wall_time=time.time(), step=step, **content)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | float]]:
    """Keys joined by slashes → numbers, or text of what is none."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value if isinstance(value, (bool, int, float)) else str(value)


class Remote(Kind):
    """One of Lightning's that keeps runs elsewhere, under an id that is kept in
    ``loggers/<name>.json``."""

    remote = True

    def describe(self) -> None:
        self.logger.log_hyperparams(self.config)

    def log(self, record: Mapping[str, Any]) -> None:
        self.logger.log_metrics(_numbers(record), step=record["step"])

    def flush(self) -> None:
        self.logger.save()

    @property
    def known(self) -> str | None:
        """The id of this run there."""
        return read_json(self._file).get("id")

    @property
    def fresh(self) -> bool:
        return self.known is None

    def keep(self, identity: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file, json.dumps({"id": identity}) + "\n")

    @property
    def _file(self) -> Path:
        return self.directory / f"{self.name}.json"


class Mlflow(Remote):
    """A run in MLflow; of a step that comes again both values are kept there."""

    name = "mlflow"

    def make(self, step: int) -> Any:
        from lightning.pytorch.loggers import MLFlowLogger

        arguments = {"experiment_name": _EXPERIMENT, "run_name": self.config["name"]}
        logger = MLFlowLogger(
            **{**arguments, **self.arguments},
            save_dir=str(self.directory / self.name),
            run_id=self.known,
        )
        self.keep(logger.run_id)
        return logger

    def end(self, logger: Any, status: Status | None) -> None:
        # a run that is to go on, or that somebody may resume, is not failed
        ends = {"done": "success", "failed": "failed", "interrupted": "KILLED"}
        if status is not None:
            logger.finalize(ends[status])


class Wandb(Remote):
    """A run in Weights & Biases; of a step that comes again both values are kept there."""

    name = "wandb"

    def make(self, step: int) -> Any:
        from lightning.pytorch.loggers import WandbLogger

        identity = self.known or uuid.uuid4().hex[:12]
        arguments = {"project": _EXPERIMENT, "name": self.config["name"]}
        logger = WandbLogger(
            **{**arguments, **self.arguments},
            save_dir=str(self.directory),
            id=identity,
            resume="allow",
        )
        _ = logger.experiment  # which is when it is made
        self.keep(identity)
        return logger

    def end(self, logger: Any, status: Status | None) -> None:
        logger.experiment.finish(exit_code=0 if status == "done" else 1)


KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (TensorBoard, Csv, Mlflow, Wandb)}


def kind_of(name: str, run: Path) -> Kind:
    """A logger of a run, by the run's configuration."""
    config = Run(run).config
    return KINDS[name](run / DIRECTORY, config["logging"].get(name, {}), config)
