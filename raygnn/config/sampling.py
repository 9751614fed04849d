"""How minibatches are drawn: the section ``sampling``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raygnn.config.section import Section
from raygnn.config.types import AutoFlag, AutoFraction, Count, Fanouts, Text


class SamplingConfig(Section):
    """How minibatches are drawn."""

    fanout: Fanouts = Field(
        (10, 10),
        description="Neighbours per layer from the seeds outward; -1 = all. For a layer, also a "
        "number for each edge type (`{buys: 5, '*': 10}`, by relation or source:relation:target; "
        "`*` = all others).",
    )
    batch_size: Count = Field(
        512,
        description="Seeds per worker and step; a batch stays as large as the run began with, "
        "whatever number of workers it goes on with.",
    )
    eval_batch_size: Count | None = Field(
        None, description="Seeds per worker and step when your own class is evaluated; null = 1024."
    )
    replace: bool = Field(False, description="Draw neighbours with replacement.")
    edge_weight: Text | None = Field(
        None,
        description="Edge array that neighbours are drawn in proportion to; null = alike. Edge "
        "types without it draw alike.",
    )
    topology: Literal["auto", "replicated", "partitioned"] = Field(
        "auto",
        description="replicated: each node holds the whole structure; partitioned: its own parts "
        "only; auto: replicated where it fits.",
    )
    cache: AutoFraction = Field(
        "auto",
        description="Share of the remote feature rows that each worker keeps; auto = all that "
        "a sixteenth of its node's free memory holds for all workers there.",
    )
    cache_policy: Literal["vip", "degree"] = Field(
        "vip",
        description="Which rows are kept: vip = those most likely to be asked for, by the "
        "sampling itself; degree = those with most edges.",
    )
    prefetch: int = Field(2, ge=0, le=1024, description="Batches prepared ahead.")
    pin_memory: AutoFlag = Field(
        "auto",
        description="Put batches into memory that a GPU copies from while it computes; auto = "
        "with GPUs.",
    )
