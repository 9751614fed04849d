"""The section ``model.embedding``: rows that are learned for nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from raygnn.config.section import Section
from raygnn.config.types import Count, Text, to_tuple


class EmbeddingConfig(Section):
    """A row of numbers for each node, which training learns."""

    dim: Count = Field(description="Width of a learned row.")
    ntypes: Annotated[tuple[Text, ...], BeforeValidator(to_tuple), Field(min_length=1)] | None = (
        Field(
            None,
            description="Node types that have learned rows, joined to their features if they have "
            "some; null = those without features.",
        )
    )
    optimizer: Literal["adam", "adagrad"] = Field(
        "adam",
        description="How rows are updated, only where a batch reads them: as torch's SparseAdam, "
        "or its Adagrad with sparse gradients.",
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Learning rate of the rows, which follows train.schedule; null = train.lr.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled decay, as AdamW's: a step first multiplies the rows that its batch "
        "reads, and no others, by 1 - lr × weight_decay.",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of the numbers of learned rows dropped in training."
    )
    init: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Rows begin uniform between -init and init; null = sqrt(3 / dim), with which "
        "their mean square length is 1.",
    )

    @property
    def bound(self) -> float:
        """What the numbers lie within at first."""
        return (3 / self.dim) ** 0.5 if self.init is None else self.init

    def covers(self, ntype: str, has_inputs: bool) -> bool:
        """Whether a node type has learned rows.

        Args:
            has_inputs: whether it has features or categories that the model reads.
        """
        return not has_inputs if self.ntypes is None else ntype in self.ntypes
