"""Tasks on edges."""

from __future__ import annotations

from torch import Tensor

from raygnn.models.edges import EdgeModel
from raygnn.sampling.batch import Batch
from raygnn.tasks.link_losses import LinkLoss
from raygnn.tasks.task import Task


class EdgeTask(Task):
    """The seeds are edges; ``model``, an `EdgeModel`, maps a batch to ``[B, out_features]``."""

    def outputs(self, batch: Batch) -> Tensor:
        out: Tensor = self.model(batch)
        return out


class LinkTask(EdgeTask):
    """Edges are told from those that are not there; ``loss`` is a `LinkLoss`."""

    def losses(self, batch: Batch) -> Tensor:
        """See `Task`. A node that an edge ends at anyway does not count against it."""
        model, pairs = self.model, batch.pairs
        assert isinstance(model, EdgeModel)
        assert pairs is not None
        rows = dict(zip(("source", "target"), model.ends(batch)))
        own = dict(zip(rows, pairs))
        ends = {end: rows[end].index_select(0, at) for end, at in own.items()}
        there = model.decoder(ends["source"], ends["target"], batch.relation)
        absent, counts = [], []
        for end, nodes in batch.instead.items():
            kept = ends["target" if end == "source" else "source"]
            candidates = rows[end].index_select(0, nodes)
            absent.append(model.decoder.against(kept, candidates, batch.relation, end).float())
            counts.append(nodes.unsqueeze(0) != own[end].unsqueeze(1))
        loss: LinkLoss = self.loss
        return loss(there.float().flatten(), absent, counts)
