"""Evaluation of edges at their times, each from all that was before it.

The ends of an edge are encoded at its time, so edges share no rows and run in minibatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.config.schema import Config
from raygnn.config.task import LinkPrediction
from raygnn.models.heads import EdgeModel
from raygnn.sampling.batch import Part
from raygnn.sampling.negatives import ListedNegatives, Negatives
from raygnn.sampling.seeds import EdgeSeeds, OwnedEdges, SeedSlice
from raygnn.tasks.inference import Inference
from raygnn.tasks.losses import Loss
from raygnn.tasks.metrics import measure
from raygnn.tasks.ranking import ranked_among_drawn
from raygnn.worker.planes.plane import Kept


@dataclass(frozen=True)
class TimedEdges:
    """Runs a model over owned edges. Collective.

    Attributes:
        edges: this rank's edges of the type.
        seeds: positions of edges, and sampled or listed negatives → `EdgeSeeds`.
        positive: see `measure`.
    """

    config: Config
    edges: OwnedEdges
    inference: Inference
    device: torch.device
    seeds: Callable[..., EdgeSeeds]
    positive: int | None = None

    def outputs(self, model: EdgeModel, own: np.ndarray) -> Tensor:
        """Return float32 ``[n, out_features]``, on the CPU."""
        links = self.config.task.of_links
        chunks = [out[0].unsqueeze(1) if links else out for out in self._decoded(model, own)]
        return torch.cat(chunks)

    def metrics(
        self,
        model: EdgeModel,
        own: np.ndarray,
        given: Tensor | Negatives | ListedNegatives | None,
        loss: Loss,
        keep: Kept | None = None,
    ) -> dict[str, float]:
        """Return the metrics; ``given`` are the edges' labels, or for links the sampled or listed
        ranking candidates."""
        task, control = self.config.task, self.edges.exchange
        if not isinstance(task, LinkPrediction):
            assert isinstance(given, Tensor)
            outputs = self.outputs(model, own)
            return measure(outputs, given, task, loss, control, self.positive, keep)
        draws = (None, given) if isinstance(given, ListedNegatives) else (given,)
        there, absent, counts = zip(*self._decoded(model, own, *draws))
        both = [[torch.cat(some) for some in zip(*pieces)] for pieces in (absent, counts)]
        return ranked_among_drawn(torch.cat(there), both[0], both[1], control)

    def _decoded(self, model: EdgeModel, own: np.ndarray, *draws: Any) -> Iterator[Any]:
        edges = self.edges
        exact = type(model)(model.encoder, copy.deepcopy(model.decoder).float().eval(), edges.etype)
        size = self.config.sampling.eval_batch_size or 1024
        any_edge = np.minimum(edges.first, edges.bounds[-1:] - 1)  # for a rank that has none left
        for number in range(-(-edges.exchange.max(len(own)) // size)):
            some = own[number * size : (number + 1) * size] + edges.first
            asked = some if len(some) else any_edge
            index = np.arange(len(asked))
            start = self.seeds(asked, *draws).start(SeedSlice(index, index, 0, 0))
            assert start.times is not None
            rows = self.inference.encode(model.encoder, start.nodes, start.times)
            weight, fields = torch.ones(len(asked)), dict(start.fields)
            if fields["pair_features"] is not None:
                fields["pair_features"] = fields["pair_features"].float()
            part = Part(seeds=weight, weight=weight, total=0, window=0, **fields)
            with torch.no_grad():
                yield _first(exact.decode(rows, part.to(self.device)), len(some))


def _first(out: Any, count: int) -> Any:
    if isinstance(out, Tensor):
        return out[:count].cpu()
    return tuple(_first(some, count) for some in out)
