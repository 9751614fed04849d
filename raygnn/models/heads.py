"""Models of tasks on edges, and of several tasks: an encoder of nodes, and a head for each task."""

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
from raygnn.sampling.batch import Batch, EdgeType, Part

_ENDS = ("source", "target")


def rows_of(encoder: Encoder, batch: Batch, ntypes: set[str], width: int) -> Hidden:
    """An encoder's rows of all nodes of the last block's destinations.

    Raises:
        TrainingError: there are none of one of ``ntypes``, or they are of another shape.
    """
    given = batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
    h = encoder.represent(*given)
    for ntype in ntypes:
        seeds = batch.blocks[-1].num_dst[ntype] if batch.blocks else len(batch.x[ntype])
        if ntype not in h or h[ntype].shape != (seeds, width):
            found = list(h[ntype].shape) if ntype in h else "nothing"
            raise TrainingError(
                f"the model gave {found} for nodes of type {ntype!r}, expected {[seeds, width]}",
                where="model.kind",
                remedy="return a row for each of the last block's destinations, of the width "
                "that the class was constructed for",
            )
    return h


class EdgeModel(nn.Module):
    """Outputs for edges of one type."""

    def __init__(self, encoder: Encoder, decoder: Decoder, etype: EdgeType):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.etype = etype

    def forward(self, batch: Batch) -> Any:
        """See `decode`."""
        ntypes = {self.etype[0], self.etype[2]}
        return self.decode(rows_of(self.encoder, batch, ntypes, self.decoder.width), batch)

    def decode(self, rows: Hidden, part: Batch | Part) -> Any:
        """``[B, out_features]``.

        Args:
            rows: node type → what the encoder says of the nodes that ``pairs`` and ``instead``
                number.
        """
        assert part.pairs is not None
        out: Tensor = self.decoder(
            F.embedding(part.pairs[0], rows[self.etype[0]]),  # its gradients come in one order
            F.embedding(part.pairs[1], rows[self.etype[2]]),
            part.relation,
            part.pair_features,
        )
        return out


class LinkScores(NamedTuple):
    """Scores of edges ``[B]``; for each end that is replaced, those with K other nodes in its place
    ``[B, K]``, and which of these count, bool ``[B, K]``: not a node that the edge ends at
    anyway."""

    there: Tensor
    absent: list[Tensor]
    counts: list[Tensor]


class LinkModel(EdgeModel):
    """Scores of edges and, with other nodes in place of their ends, of edges that are not there."""

    def decode(self, rows: Hidden, part: Batch | Part) -> LinkScores:
        """``instead`` are the same K nodes for all edges, or ``[B, K]``; those of lists come after
        those that are drawn."""
        pairs = part.pairs
        assert pairs is not None
        by_end = dict(zip(_ENDS, (rows[self.etype[0]], rows[self.etype[2]])))
        own = dict(zip(_ENDS, pairs))
        ends = {end: F.embedding(at, by_end[end]) for end, at in own.items()}
        there = self.decoder(ends["source"], ends["target"], part.relation).flatten()
        absent, counts = [], []
        for end in _ENDS:
            kept = ends["target" if end == "source" else "source"]
            scores, counted = [], []
            for nodes in (part.instead.get(end), part.instead.get(f"{end}_neg")):
                if nodes is None:
                    continue
                candidates = F.embedding(nodes.flatten(), by_end[end])
                if nodes.dim() > 1:
                    scores.append(self._each(kept, candidates, part.relation, end))
                else:
                    scores.append(self.decoder.against(kept, candidates, part.relation, end))
                counted.append(nodes != own[end].unsqueeze(1))
            if scores:
                absent.append(scores[0] if len(scores) == 1 else torch.cat(scores, dim=1))
                counts.append(counted[0] if len(scores) == 1 else torch.cat(counted, dim=1))
        return LinkScores(there, absent, counts)

    def _each(self, kept: Tensor, others: Tensor, relation: Tensor | None, end: str) -> Tensor:
        """Scores ``[B, K]`` of edges whose other end is ``kept`` ``[B, D]``, with K of ``others``
        ``[B · K, D]`` for each."""
        times = others.shape[0] // max(1, kept.shape[0])
        repeated = kept.repeat_interleave(times, 0)
        kinds = None if relation is None else relation.repeat_interleave(times, 0)
        ends = (others, repeated) if end == "source" else (repeated, others)
        return self.decoder(*ends, kinds).view(kept.shape[0], times)


class NodeHead(nn.Module):
    """What a task on nodes makes of their rows: ReLU, dropout, a linear layer.

    Args:
        width: of a row.
    """

    def __init__(self, ntype: str, width: int, out_features: int, dropout: float):
        super().__init__()
        self.ntype = ntype
        self.width = width
        self.dropout = Dropout(dropout)
        self.linear = nn.Linear(width, out_features)

    def forward(self, rows: Tensor) -> Tensor:
        """``[B, width]`` → ``[B, out_features]``."""
        out: Tensor = self.linear(self.dropout(F.relu(rows)))
        return out


class NodeModel(nn.Module):
    """Outputs for nodes of one type, from an encoder that gives rows of more than them."""

    def __init__(self, encoder: Encoder, head: NodeHead):
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, *inputs: Any) -> Tensor:
        """Outputs of the seeds, ``[B, out_features]``, from the arguments of
        `Encoder.represent`."""
        out: Tensor = self.head(self.encoder.represent(*inputs)[self.head.ntype])
        return out

    def decode(self, rows: Hidden, part: Part) -> Tensor:
        """``[B, out_features]`` of a part's seeds."""
        assert part.nodes is not None
        out: Tensor = self.head(rows[self.head.ntype].index_select(0, part.nodes))
        return out


class EdgeHead(nn.Module):
    """What a task on edges makes of the rows of their ends.

    Args:
        links: whether edges are told from those that are not there.
    """

    def __init__(self, etype: EdgeType, decoder: Decoder, *, links: bool):
        super().__init__()
        self.etype = etype
        self.decoder = decoder
        self.links = links


Head = NodeHead | EdgeHead


class MultitaskModel(nn.Module):
    """One encoder and a head for each task.

    Args:
        encoder: its rows of each node type are as wide as the heads expect.
        heads: by the names of the tasks.
    """

    def __init__(self, encoder: Encoder, heads: Mapping[str, Head]):
        super().__init__()
        self.encoder = encoder
        self.names = list(heads)
        self.heads = nn.ModuleDict({key(name): head for name, head in heads.items()})

    def of(self, name: str) -> NodeModel | EdgeModel:
        """The model of one task, of the same modules as this one."""
        head = self.heads[key(name)]
        if isinstance(head, NodeHead):
            return NodeModel(self.encoder, head)
        assert isinstance(head, EdgeHead)
        kind = LinkModel if head.links else EdgeModel
        return kind(self.encoder, head.decoder, head.etype)

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Name of each task → what its model gives for its part of the batch."""
        ntypes, widths = set[str](), set[int]()
        for head in self.heads.values():
            if isinstance(head, NodeHead):
                ntypes.add(head.ntype)
                widths.add(head.width)
            else:
                assert isinstance(head, EdgeHead)
                ntypes |= {head.etype[0], head.etype[2]}
                widths.add(head.decoder.width)
        (width,) = widths
        rows = rows_of(self.encoder, batch, ntypes, width)
        return {name: self.of(name).decode(rows, batch.parts[name]) for name in self.names}
