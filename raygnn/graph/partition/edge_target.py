"""Which edges are predicted, and how they are split; light, so that the driver can decide it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from raygnn.graph.data import EdgeType

TRAIN, VAL, TEST, NONE = 0, 1, 2, -1  # in the order of `raygnn.graph.data.SPLITS`


@dataclass(frozen=True)
class EdgeSplit:
    """How the edges of one type are split.

    Attributes:
        etype: whose edges are predicted.
        reverse: the type whose edges are hidden, too, where they join the two nodes of a hidden
            edge the other way round; None = none.
        shares: of the edges for validation and for test; None = by the edges' masks.
        seed: of the shares.
    """

    etype: EdgeType
    reverse: EdgeType | None = None
    shares: tuple[float, float] | None = None
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class EdgeTarget:
    """What a task on edges predicts for.

    Attributes:
        relation: the edge array that holds each edge's relation; None = they have none.
    """

    split: EdgeSplit
    relation: str | None = None

    @property
    def etype(self) -> EdgeType:
        return self.split.etype
