"""Where the records of a training go besides the run directory."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from raygnn.config.section import Section
from raygnn.config.types import JsonValues, to_tuple

LoggerName: TypeAlias = Literal["tensorboard", "csv", "mlflow", "wandb"]


class LoggingConfig(Section):
    """Where the records of a training go besides the run directory."""

    loggers: Annotated[tuple[LoggerName, ...], BeforeValidator(to_tuple)] = Field(
        ("tensorboard", "csv"),
        description="Loggers that get every record: tensorboard and csv write to `loggers/` in the "
        "run directory; mlflow and wandb need their package, and have a process each. None that "
        "fails or hangs stops a training.",
    )
    mlflow: JsonValues = Field(
        {},
        description="Arguments of Lightning's MLFlowLogger, such as `tracking_uri` and "
        "`experiment_name`. Secrets belong into the environment of the command "
        "(MLFLOW_TRACKING_TOKEN), not here.",
    )
    wandb: JsonValues = Field(
        {},
        description="Arguments of Lightning's WandbLogger, such as `project`, `entity` and "
        "`offline`. Secrets belong into the environment of the command (WANDB_API_KEY), not here.",
    )
    prometheus: bool = Field(
        True,
        description="Give Ray's metrics what a dashboard shows, `ray_raygnn_*` in Prometheus: "
        "docs/watching.md says where Ray has them.",
    )
