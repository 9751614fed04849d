"""What a model says of edges, each from all that was before it.

The ends of an edge are seen at its time, so edges share no rows, and go by minibatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.config.schema import Config
from raygnn.config.task import LinkPrediction, NegativesConfig
from raygnn.models.heads import EdgeModel
from raygnn.sampling.batch import Part
from raygnn.sampling.negatives import Negatives
from raygnn.sampling.seeds import Edges, EdgeSeeds, SeedSlice
from raygnn.tasks.inference import Inference
from raygnn.tasks.metrics import measure
from raygnn.tasks.ranking import ranked_among_drawn
from raygnn.util.hashing import derive_key

_PURPOSE = 0x6576616C  # keeps the nodes that edges are ranked among apart from those of training


@dataclass(frozen=True)
class TimedEdges:
    """Runs a model over own edges. Collective.

    Attributes:
        edges: all of the type.
        seeds: positions of edges, and what draws nodes in place of their ends → where batches of
            them start.
        negatives: of a kind, with a seed, so many nodes for each edge → what draws them.
    """

    config: Config
    edges: Edges
    inference: Inference
    device: torch.device
    seeds: Callable[[np.ndarray, Negatives | None], EdgeSeeds]
    negatives: Callable[[NegativesConfig, int, int], Negatives]

    def outputs(self, model: EdgeModel, own: np.ndarray) -> Tensor:
        """Float32 ``[n, out_features]``, on the CPU."""
        links = self.config.task.of_links
        chunks = [out[0].unsqueeze(1) if links else out for out in self._decoded(model, own)]
        return torch.cat(chunks)

    def metrics(self, model: EdgeModel, own: np.ndarray, labels: Tensor | None) -> dict[str, float]:
        """Links are ranked among nodes that are drawn for each; ``labels``: of all others."""
        task, control = self.config.task, self.edges.exchange
        if not isinstance(task, LinkPrediction):
            assert labels is not None
            return measure(self.outputs(model, own), labels, task, control)
        there, absent, counts = zip(*self._decoded(model, own, self._candidates))
        both = [[torch.cat(some) for some in zip(*pieces)] for pieces in (absent, counts)]
        return ranked_among_drawn(torch.cat(there), both[0], both[1], control)

    @cached_property
    def _candidates(self) -> Negatives:
        """What draws the nodes that links are ranked among, the same in each evaluation."""
        task = self.config.task
        assert isinstance(task, LinkPrediction)
        kind = NegativesConfig(kind="uniform", ends=task.negatives.ends)
        seed = derive_key(self.config.train.seed, _PURPOSE)
        return self.negatives(kind, seed, task.ranking.candidates or 1)

    def _decoded(
        self, model: EdgeModel, own: np.ndarray, negatives: Negatives | None = None
    ) -> Iterator[Any]:
        """What `EdgeModel.decode` gives, some edges at a time."""
        edges = self.edges
        exact = type(model)(model.encoder, copy.deepcopy(model.decoder).float().eval(), edges.etype)
        size = self.config.sampling.eval_batch_size or 1024
        any_edge = np.minimum(edges.first, edges.bounds[-1:] - 1)  # for a rank that has none left
        for number in range(-(-edges.exchange.max(len(own)) // size)):
            some = own[number * size : (number + 1) * size] + edges.first
            asked = some if len(some) else any_edge
            index = np.arange(len(asked))
            start = self.seeds(asked, negatives).start(SeedSlice(index, index, 0, 0))
            assert start.times is not None
            rows = self.inference.encode(model.encoder, start.nodes, start.times)
            weight, fields = torch.ones(len(asked)), dict(start.fields)
            if fields["pair_features"] is not None:
                fields["pair_features"] = fields["pair_features"].float()
            part = Part(seeds=weight, weight=weight, total=0, window=0, **fields)
            with torch.no_grad():
                yield _first(exact.decode(rows, part.to(self.device)), len(some))


def _first(out: Any, count: int) -> Any:
    """The first rows of outputs, on the CPU; of those of links of all that they consist of."""
    if isinstance(out, Tensor):
        return out[:count].cpu()
    return tuple(_first(some, count) for some in out)
