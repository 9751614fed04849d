"""Several tasks on one graph: the section ``tasks``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from raygnn.config.model import DecoderKind
from raygnn.config.task import TaskConfig
from raygnn.config.types import TaskName


class OneOfTasks(TaskConfig):
    """One task of several: what ``task`` has, and what it is beside the others."""

    weight: float = Field(
        1.0, gt=0, le=10**6, description="What its loss counts for in the sum of all."
    )
    batch_factor: float = Field(
        1.0,
        gt=0,
        le=10**6,
        description="Its seeds of a step, as a multiple of `sampling.batch_size`.",
    )
    decoder: DecoderKind | None = Field(
        None, description="Of edges: how their ends are compared; null = `model.decoder`."
    )


Tasks: TypeAlias = Annotated[dict[TaskName, OneOfTasks], Field(min_length=1, max_length=64)]
