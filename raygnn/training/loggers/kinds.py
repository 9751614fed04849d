"""How each logger is made, goes on after a resume, and ends."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from raygnn.runs.files import read_json, write_atomic

Status = Literal["done", "failed", "interrupted"]

# distribution and module, of those that are not there with raygnn
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb"}

_EXPERIMENT = "raygnn"


class Kind(ABC):
    """One of Lightning's loggers; every method may raise anything, and take any time.

    Args:
        directory: ``loggers/`` of the run.
        arguments: the user's.
        config: of the run, for what the logger calls hyperparameters.
    """

    name: ClassVar[str]
    whole: ClassVar[bool] = False  # written anew from all records when a run goes on

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
    def make(self, step: int | None) -> Any:
        """Lightning's logger.

        Args:
            step: records from this step on come again, and replace those that were logged; None
                for a run that begins.
        """

    def open(self, step: int | None) -> None:
        """Make the logger, and tell it of the configuration if the run is new to it."""
        fresh = self.fresh
        self.logger = self.make(step)
        if fresh:
            self.describe()

    def describe(self) -> None:
        self.logger.log_hyperparams(self.config)

    def log(self, record: Mapping[str, Any]) -> None:
        values = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        self.logger.log_metrics(values, step=record["step"])

    def flush(self) -> None:
        self.logger.save()

    def close(self, status: Status | None = None) -> None:
        """End it; without a status it is to be opened again."""
        logger, self.logger = self.logger, None
        if logger is not None:
            self.end(logger, status)

    def end(self, logger: Any, status: Status | None) -> None:
        logger.finalize("success" if status == "done" else "failed")


class TensorBoard(Kind):
    """``loggers/tensorboard``; of a step that comes again the later values are shown."""

    name = "tensorboard"

    @property
    def fresh(self) -> bool:
        return not (self.directory / self.name).exists()

    def make(self, step: int | None) -> Any:
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(
            self.directory,
            name=self.name,
            version="",
            default_hp_metric=False,
            purge_step=None if self.fresh else step,
            # files of the same second would be one, and the second of them the only one
            filename_suffix=f".{len(list((self.directory / self.name).glob('events.*')))}",
        )

    def describe(self) -> None:
        # without a value that belongs to them, hyperparameters are not shown
        self.logger.log_hyperparams(self.config, {"epoch": 0.0})

    def flush(self) -> None:
        super().flush()
        self.logger.experiment.flush()


class Csv(Kind):
    """``loggers/csv/metrics.csv``. Lightning's logger begins its file anew, and gets all records
    again."""

    name = "csv"
    whole = True

    @property
    def fresh(self) -> bool:
        return True

    def make(self, step: int | None) -> Any:
        from lightning.pytorch.loggers import CSVLogger

        return CSVLogger(self.directory, name=self.name, version="", flush_logs_every_n_steps=2**62)


class Remote(Kind):
    """One that keeps runs elsewhere, under an id that is kept in ``loggers/<name>.json``."""

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

    def make(self, step: int | None) -> Any:
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

    def make(self, step: int | None) -> Any:
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
