"""Tasks on edges."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from raygnn.sampling.batch import Batch, Part
from raygnn.tasks.link_losses import LinkLoss
from raygnn.tasks.task import Task


class EdgeTask(Task):
    """The seeds are edges; ``model``, an `EdgeModel`, maps a batch to ``[B, out_features]``."""

    def outputs(self, batch: Batch) -> Tensor:
        out: Tensor = self.model(batch)
        return out


class LinkTask(EdgeTask):
    """Edges are told from those that are not there, by a `LinkModel` and a `LinkLoss`."""

    def losses(self, batch: Batch) -> Tensor:
        """See `Task`."""
        return self._losses(*self.model(batch))

    def losses_of(self, out: Any, part: Part) -> Tensor:
        """See `Task`."""
        return self._losses(*out)

    def _losses(self, there: Tensor, absent: list[Tensor], counts: list[Tensor]) -> Tensor:
        loss: LinkLoss = self.loss
        return loss(there.float(), [scores.float() for scores in absent], counts)
