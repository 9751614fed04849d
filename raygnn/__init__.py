"""Train graph neural networks on partitioned DGL graphs over a Ray cluster.

Importing this loads neither torch nor dgl nor ray: each name below is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raygnn.config.load import load_config as load_config
    from raygnn.config.schema import Config as Config
    from raygnn.driver.train import check as check
    from raygnn.driver.train import partition as partition
    from raygnn.driver.train import train as train
    from raygnn.errors import CapabilityError as CapabilityError
    from raygnn.errors import ConfigError as ConfigError
    from raygnn.errors import DataError as DataError
    from raygnn.errors import InputError as InputError
    from raygnn.errors import Interrupted as Interrupted
    from raygnn.errors import PreflightError as PreflightError
    from raygnn.errors import RaygnnError as RaygnnError
    from raygnn.errors import TrainingError as TrainingError
    from raygnn.jobs.local_job import launch as launch
    from raygnn.jobs.submit import submit as submit
    from raygnn.prediction.driver_side import embed as embed
    from raygnn.prediction.driver_side import evaluate as evaluate
    from raygnn.prediction.driver_side import predict as predict
    from raygnn.prediction.driver_side import recommend as recommend
    from raygnn.prediction.export import export as export
    from raygnn.runs.diagnose.judge import diagnose as diagnose
    from raygnn.runs.run import open_run as open_run
    from raygnn.search.run_search import tune as tune
    from raygnn.serving.commands import explain as explain
    from raygnn.serving.commands import serve as serve
    from raygnn.tasks.lightning_modules import TaskModule

    Task = TaskModule

_MODULES = {
    "raygnn.config.load": ("load_config",),
    "raygnn.config.schema": ("Config",),
    "raygnn.errors": (
        *("CapabilityError", "ConfigError", "DataError", "InputError", "Interrupted"),
        *("PreflightError", "RaygnnError", "TrainingError"),
    ),
    "raygnn.jobs.local_job": ("launch",),
    "raygnn.jobs.submit": ("submit",),
    "raygnn.runs.diagnose.judge": ("diagnose",),
    "raygnn.runs.run": ("open_run",),
    "raygnn.driver.train": ("check", "partition", "train"),
    "raygnn.prediction.driver_side": ("embed", "evaluate", "predict", "recommend"),
    "raygnn.prediction.export": ("export",),
    "raygnn.tasks.lightning_modules": ("Task",),
    "raygnn.search.run_search": ("tune",),
    "raygnn.serving.commands": ("explain", "serve"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), "TaskModule" if name == "Task" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
