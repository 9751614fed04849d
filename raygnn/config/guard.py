"""What ranks compare, and what happens to odd batches: the section ``guard``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from raygnn.config.section import Section
from raygnn.config.types import LARGEST, Count


class GuardConfig(Section):
    """That all ranks do the same: what they compare, and what happens to odd batches.

    ``guard: deep`` is short for ``guard: {mode: deep}``.
    """

    mode: Literal["on", "deep", "off"] = Field(
        "on",
        description="on: ranks compare what they are about to do (parameters, their types, the "
        "batch's arrays, options); deep: each collective, too, before it runs (slow); off: not.",
    )
    every: Count = Field(
        100,
        description="Steps between comparisons; the first step of every start is compared, too.",
    )
    nan_steps: int = Field(
        10,
        ge=0,
        le=LARGEST,
        description="Steps in a row whose gradient is not finite that all ranks leave out "
        "together; one more fails the run.",
    )
    on_bad_sample: Literal["raise", "skip"] = Field(
        "raise",
        description="What happens when a graph of your own dataset cannot be had: the run fails, "
        "or all ranks go on without it.",
    )
    bad_samples: Count = Field(
        100, description="How many samples are left out, over a whole run, before it fails."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_mode(cls, value: Any) -> Any:
        if isinstance(value, (str, bool)):
            value = {"mode": value}
        if isinstance(value, dict) and isinstance(value.get("mode"), bool):
            # what YAML 1.1 makes of on and off, where another reader than ours was used
            value = {**value, "mode": "on" if value["mode"] else "off"}
        return value
