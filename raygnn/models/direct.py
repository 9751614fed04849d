"""No message passing: ``model.kind: none``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from raygnn.models.network import Categories, Schema
from raygnn.models.typed import Combined, Degrees, Hidden
from raygnn.sampling.batch import Block


class Direct(nn.Module):
    """A linear layer on what the seeds' features and learned rows say of them."""

    def __init__(self, schema: Schema):
        super().__init__()
        self.target = schema.target
        self.out = nn.Linear(schema.widths[schema.target], schema.out_features)

    def forward(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Tensor:
        """Outputs of the seeds, ``[B, out_features]``; see `raygnn.models.network.Network`."""
        assert not blocks
        out: Tensor = self.out(x[self.target])
        return out
