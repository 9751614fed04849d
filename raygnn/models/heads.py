"""Models of tasks on edges and of multi-task learning: an encoder of nodes and a head per task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.errors import TrainingError
from raygnn.models.decoders import Decoder
from raygnn.models.linear import Dropout
from raygnn.models.network import Encoder
from raygnn.models.typed_layers import Hidden, key
from raygnn.sampling.batch import Batch, EdgeType

_ENDS = ("source", "target")


def rows_of(encoder: Encoder, batch: Batch, ntypes: set[str], width: int) -> Hidden:
    """Return an encoder's rows of the last block's destinations. Raises TrainingError if the rows
    of one of ``ntypes`` are missing or have another shape."""
    given = batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
    h = encoder.represent(*given)
    for ntype in ntypes:
        seeds = batch.blocks[-1].num_dst[ntype] if batch.blocks else len(batch.x[ntype])
        if ntype not in h or h[ntype].shape != (seeds, width):
            found = list(h[ntype].shape) if ntype in h else "nothing"
            what = f"the model returned {found} for nodes of type {ntype!r}, expected "
            remedy = "return a row for each of the last block's destinations, of the width that "
            remedy += "the class was constructed with"
            raise TrainingError(f"{what}{[seeds, width]}", where="model.kind", remedy=remedy)
    return h


class EdgeModel(nn.Module):
    """Outputs for edges of one type."""

    def __init__(self, encoder: Encoder, decoder: Decoder, etype: EdgeType):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.etype = etype
        # data-parallel training and optimizers need a parameter even if only embedding tables are
        # trained; its gradient is 0
        self.idle = None if list(self.parameters()) else nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Any:
        ntypes = {self.etype[0], self.etype[2]}
        return self.decode(rows_of(self.encoder, batch, ntypes, self.decoder.width), batch)

    def decode(self, rows: Hidden, part: Any) -> Any:
        """Return outputs of edges, ``[B, out_features]``. ``rows``: node type → encoder rows of the
        nodes that ``pairs`` and ``instead`` number; ``part``: a `Batch` or `Part`."""
        return self.decoder(
            F.embedding(part.pairs[0], rows[self.etype[0]]),  # adds gradients in a fixed order
            F.embedding(part.pairs[1], rows[self.etype[2]]),
            part.relation,
            part.pair_features,
        )


class LinkScores(NamedTuple):
    """Scores of edges ``[B]``; for each replaced end, scores of K negatives ``[B, K]``, and which
    of these count, bool ``[B, K]``: not those equal to the edge's own end, nor `Batch.known`."""

    there: Tensor
    absent: list[Tensor]
    counts: list[Tensor]


class LinkModel(EdgeModel):
    """Scores edges, and negatives with other nodes in place of their ends."""

    def decode(self, rows: Hidden, part: Any) -> LinkScores:
        """Return scores; ``instead`` are the same K nodes for all edges, or ``[B, K]``. Listed
        negatives follow sampled ones."""
        by_end = dict(zip(_ENDS, (rows[self.etype[0]], rows[self.etype[2]])))
        own = dict(zip(_ENDS, part.pairs))
        ends = {end: F.embedding(at, by_end[end]) for end, at in own.items()}
        features = () if part.pair_features is None else (part.pair_features,)
        there = self.decoder.scores(*ends.values(), part.relation, *features)
        if self.idle is not None:
            there = there + 0 * self.idle.to(there.dtype)
        absent, counts = [], []
        for end, other_end in zip(_ENDS, _ENDS[::-1]):
            scores, counted = [], []
            for name in (n for n in (end, f"{end}_neg") if n in part.instead):
                nodes, read = part.instead[name], part.instead_features.get(name)
                given = ends[other_end], F.embedding(nodes.flatten(), by_end[end])
                scores.append(
                    self._each(*given, part.relation, end, read)
                    if nodes.dim() > 1
                    else self.decoder.against(*given, part.relation, end)
                )
                other = nodes != own[end].unsqueeze(1)
                counted.append(other & ~part.known[name] if name in part.known else other)
            if scores:
                absent.append(scores[0] if len(scores) == 1 else torch.cat(scores, dim=1))
                counts.append(counted[0] if len(scores) == 1 else torch.cat(counted, dim=1))
        return LinkScores(there, absent, counts)

    def _each(
        self, kept: Tensor, others: Tensor, relation: Tensor | None, end: str, read: Tensor | None
    ) -> Tensor:
        """Return scores ``[B, K]`` of ``kept`` ``[B, D]`` with K each of ``others``
        ``[B · K, D]``; ``read``: features of these edges, ``[B, K, F]``."""
        times = others.shape[0] // max(1, kept.shape[0])
        repeated = kept.repeat_interleave(times, 0)
        kinds = None if relation is None else relation.repeat_interleave(times, 0)
        ends = (others, repeated) if end == "source" else (repeated, others)
        features = () if read is None else (read.flatten(0, 1),)
        return self.decoder.scores(*ends, kinds, *features).view(kept.shape[0], times)


class NodeHead(nn.Module):
    """Head of a task on nodes: ReLU, dropout, a linear layer. ``width``: of a row."""

    def __init__(self, ntype: str, width: int, out_features: int, dropout: float):
        super().__init__()
        self.ntype, self.ntypes = ntype, {ntype}
        self.width = width
        self.dropout = Dropout(dropout)
        self.linear = nn.Linear(width, out_features)

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``[B, width]`` to ``[B, out_features]``."""
        return self.linear(self.dropout(F.relu(rows)))


class NodeModel(nn.Module):
    """Outputs for nodes of one type, from an encoder of several node types."""

    def __init__(self, encoder: Encoder, head: NodeHead):
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, *inputs: Any) -> Tensor:
        """Return outputs of the seeds, ``[B, out_features]``; arguments of `Encoder.represent`."""
        return self.head(self.encoder.represent(*inputs)[self.head.ntype])

    def decode(self, rows: Hidden, part: Any) -> Tensor:
        """Return outputs of a `Part`'s seeds, ``[B, out_features]``."""
        return self.head(rows[self.head.ntype].index_select(0, part.nodes))


class EdgeHead(nn.Module):
    """Head of a task on edges. ``links``: link prediction."""

    def __init__(self, etype: EdgeType, decoder: Decoder, *, links: bool):
        super().__init__()
        self.etype, self.ntypes = etype, {etype[0], etype[2]}
        self.decoder, self.width = decoder, decoder.width
        self.links = links


Head = NodeHead | EdgeHead


class MultitaskModel(nn.Module):
    """One encoder and a head for each task. ``encoder``: its rows have the width that the heads
    expect; ``heads``: task name → head."""

    def __init__(self, encoder: Encoder, heads: Mapping[str, Head]):
        super().__init__()
        self.encoder = encoder
        self.names = list(heads)
        self.heads = nn.ModuleDict({key(name): head for name, head in heads.items()})

    def of(self, name: str) -> NodeModel | EdgeModel:
        """Return the model of one task, which shares this one's modules."""
        head: Any = self.heads[key(name)]
        if isinstance(head, NodeHead):
            return NodeModel(self.encoder, head)
        kind = LinkModel if head.links else EdgeModel
        return kind(self.encoder, head.decoder, head.etype)

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Return task name → output of its model for its part of the batch."""
        heads: list[Any] = list(self.heads.values())
        ntypes = set[str]().union(*(head.ntypes for head in heads))
        rows = rows_of(self.encoder, batch, ntypes, heads[0].width)
        return {name: self.of(name).decode(rows, batch.parts[name]) for name in self.names}
