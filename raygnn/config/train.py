"""The section ``train``: the optimisation, and how its learning rate changes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raygnn.config.section import Section
from raygnn.config.types import Bounds, Count, Fraction, Share, Stretch


class ScheduleConfig(Section):
    """How the learning rate changes, step by step.

    ``schedule: cosine`` is short for ``schedule: {kind: cosine}``.
    """

    kind: Literal["constant", "cosine", "step", "plateau", "one_cycle", "cyclic"] = Field(
        "constant",
        description="cosine: down to the floor at the end of the run; step: times gamma after "
        "every so many steps; plateau: times factor when the validation metric stands still; "
        "one_cycle: up and down once; cyclic: up and down again and again. `schedule: cosine` is "
        "short for `schedule: {kind: cosine}`.",
    )
    warmup: Stretch | None = Field(
        None,
        description="Steps, or share of the run, in which the rate grows linearly from near 0, or, "
        "with lr_scaling, from that of one worker; null = none. For one_cycle the share in which "
        "it goes up, null = 0.3.",
    )
    every: Stretch | None = Field(
        None,
        description="Steps, or share of the run, between two drops (step; null = 0.3), or from the "
        "lowest rate to the highest (cyclic; null = 0.1).",
    )
    gamma: Share | None = Field(
        None,
        description="Factor of a drop (step; null = 0.1), or of the height of a cycle in each step "
        "(cyclic with mode exp_range; null = 0.9999).",
    )
    factor: Share = Field(0.1, description="Factor of a drop (plateau).")
    patience: Annotated[int, Field(ge=0)] = Field(
        10, description="Evaluations without improvement that are let pass before a drop (plateau)."
    )
    threshold: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="An improvement is by more than this much, in the metric's unit (plateau).",
    )
    floor: Fraction | None = Field(
        None,
        description="Lowest rate, as a share of the highest (cosine, plateau, cyclic); null = 0, "
        "or 0.1 (cyclic).",
    )
    mode: Literal["triangular", "triangular2", "exp_range"] = Field(
        "triangular",
        description="Cycles are alike, or each half as high as the one before, or lower by gamma "
        "in each step (cyclic).",
    )
    momentum: Bounds | None = Field(
        None,
        description="[low, high] between which momentum (sgd) or the first beta (adam, adamw) goes "
        "down while the rate goes up, and back (one_cycle, cyclic); null = it stays.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class TrainConfig(Section):
    """The optimisation."""

    epochs: Count = Field(20, description="Passes over the training nodes.")
    max_steps: Count | None = Field(None, description="Stop after this many steps; null = never.")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="Optimiser.")
    lr: float = Field(0.003, gt=0, description="Learning rate; with a schedule, its highest.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="How the learning rate grows with the number of workers that a batch is made "
        "for: sampling.batch_size goes into it so often.",
    )
    schedule: ScheduleConfig = Field(
        ScheduleConfig(),
        description="How the learning rate changes, step by step.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum (sgd).")
    accumulate: Count = Field(1, description="Batches whose gradients are summed into one step.")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest norm of the gradient; null = no limit."
    )
    ema: Share | None = Field(
        None,
        description="Decay, in each step, of a moving average of the weights, which is evaluated, "
        "selected and tested in place of them; null = none.",
    )
    log_every: Count = Field(10, description="Steps between lines of metrics.jsonl.")
    eval_every: Count = Field(1, description="Epochs between evaluations.")
    patience: Count | None = Field(
        None, description="Stop after this many epochs without improvement; null = never."
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="What patience takes for an improvement is by more than this much, in the "
        "metric's unit.",
    )
    select: Literal["best", "last"] = Field(
        "best", description="Which weights are tested: the best on validation, or the last."
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of weights, batches and sampling.")
