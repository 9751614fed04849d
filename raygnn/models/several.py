"""One network for several tasks: rows of nodes, and a head for each task on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.decoders import Decoder
from raygnn.models.dropout import Dropout
from raygnn.models.edges import EdgeModel, Encoder, LinkModel, rows_of
from raygnn.models.network import Categories
from raygnn.models.typed import Combined, Degrees, Hidden, key
from raygnn.sampling.batch import Batch, Block, EdgeType, Part


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
    """Outputs for nodes of one type, from an encoder that gives rows of more than them.

    Args:
        encoder: an `Encoder`.
    """

    def __init__(self, encoder: nn.Module, head: NodeHead):
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Tensor:
        """Outputs of the seeds, ``[B, out_features]``; see `raygnn.models.network.Network`."""
        given = blocks, x, degree, combined, categories
        rows = cast("Encoder", self.encoder).represent(*given)
        out: Tensor = self.head(rows[self.head.ntype])
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


class Several(nn.Module):
    """One encoder and a head for each task.

    Args:
        encoder: an `Encoder`, whose rows of each node type are as wide as the heads expect.
        heads: by the names of the tasks.
    """

    def __init__(self, encoder: nn.Module, heads: Mapping[str, Head]):
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
