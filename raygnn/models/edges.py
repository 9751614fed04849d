"""Models whose seeds are edges: a network for the nodes at their ends, and a decoder."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from raygnn.errors import TrainingError
from raygnn.models.decoders import Decoder
from raygnn.models.typed import Hidden
from raygnn.sampling.batch import Batch, EdgeType

_ENDS = ("source", "target")


class Encoder(Protocol):
    """What gives each node a row: `raygnn.models.network.Network`, or a user's own module."""

    def represent(self, *args: object) -> Hidden:
        """node type → outputs of the last block's destinations ``[D, …]``; see
        `raygnn.models.network.Network.forward` for the arguments."""
        ...


class EdgeModel(nn.Module):
    """Outputs for edges of one type.

    Args:
        encoder: an `Encoder`.
    """

    def __init__(self, encoder: nn.Module, decoder: Decoder, etype: EdgeType):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.etype = etype

    def ends(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows of all nodes of the last block's destinations that are of the source's type, and
        of the target's, which ``pairs`` and ``instead`` number."""
        encoder = cast("Encoder", self.encoder)
        h = encoder.represent(batch.blocks, batch.x, batch.degree, batch.combined, batch.categories)
        blocks = batch.blocks
        for ntype in {self.etype[0], self.etype[2]}:
            seeds = blocks[-1].num_dst[ntype] if blocks else len(batch.x[ntype])
            wanted = (seeds, self.decoder.width)
            if ntype not in h or h[ntype].shape != wanted:
                found = list(h[ntype].shape) if ntype in h else "nothing"
                raise TrainingError(
                    f"the model gave {found} for nodes of type {ntype!r}, expected {list(wanted)}",
                    where="model.kind",
                    remedy="return a row for each of the last block's destinations, of the width "
                    "that the class was constructed for",
                )
        return h[self.etype[0]], h[self.etype[2]]

    def forward(self, batch: Batch) -> Any:
        """``[B, out_features]``."""
        assert batch.pairs is not None
        source, target = self.ends(batch)
        out: Tensor = self.decoder(
            source.index_select(0, batch.pairs[0]),
            target.index_select(0, batch.pairs[1]),
            batch.relation,
        )
        return out


class LinkModel(EdgeModel):
    """Scores of edges and, with other nodes in place of their ends, of edges that are not there."""

    def forward(self, batch: Batch) -> Any:
        """``(there, absent, counts)``: scores of the edges ``[B]``; for each end that is replaced
        scores ``[B, K]``, and which of them count, bool ``[B, K]``: not those of a node that the
        edge ends at anyway."""
        pairs = batch.pairs
        assert pairs is not None
        rows = dict(zip(_ENDS, self.ends(batch)))
        own = dict(zip(_ENDS, pairs))
        ends = {end: rows[end].index_select(0, at) for end, at in own.items()}
        there = self.decoder(ends["source"], ends["target"], batch.relation).flatten()
        absent, counts = [], []
        for end, nodes in batch.instead.items():
            kept = ends["target" if end == "source" else "source"]
            candidates = rows[end].index_select(0, nodes)
            absent.append(self.decoder.against(kept, candidates, batch.relation, end))
            counts.append(nodes.unsqueeze(0) != own[end].unsqueeze(1))
        return there, absent, counts
