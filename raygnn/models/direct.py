"""No message passing: ``model.kind: none``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from raygnn.models.network import Categories, Schema
from raygnn.models.typed import Combined, Degrees, Hidden
from raygnn.sampling.batch import Block


class Direct(nn.Module):
    """What the nodes' features and learned rows say of them, and a linear layer on it.

    Args:
        head: whether there is the linear layer, which `forward` needs.
    """

    def __init__(self, schema: Schema, *, head: bool = True):
        super().__init__()
        self.target = schema.target
        if head:
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
        out: Tensor = self.out(self.represent(blocks, x, degree)[self.target])
        return out

    def represent(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Hidden:
        """node type → what there is of the nodes, ``[B, F]``: ``x`` as it is."""
        assert not blocks
        return x
