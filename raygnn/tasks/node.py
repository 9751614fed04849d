"""Tasks on nodes."""

from __future__ import annotations

from torch import Tensor

from raygnn.sampling.batch import Batch
from raygnn.tasks.task import Task


class NodeTask(Task):
    """The seeds are nodes; ``model`` maps ``(blocks, x, degree, …)`` to ``[B, out_features]``."""

    def outputs(self, batch: Batch) -> Tensor:
        out: Tensor = self.model(
            batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
        )
        return out
