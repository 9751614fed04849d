"""Tasks on edges."""

from __future__ import annotations

from torch import Tensor

from raygnn.sampling.batch import Batch
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
        there, absent, counts = self.model(batch)
        loss: LinkLoss = self.loss
        return loss(there.float(), [scores.float() for scores in absent], counts)
