"""Models whose seeds are edges: a network for the nodes at their ends, and a decoder."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from raygnn.errors import TrainingError
from raygnn.models.decoders import Decoder
from raygnn.models.typed import Hidden
from raygnn.sampling.batch import Batch, EdgeType, Part

_ENDS = ("source", "target")


class Encoder(Protocol):
    """What gives each node a row: `raygnn.models.network.Network`, or a user's own module."""

    def represent(self, *args: object) -> Hidden:
        """node type → outputs of the last block's destinations ``[D, …]``; see
        `raygnn.models.network.Network.forward` for the arguments."""
        ...


def rows_of(encoder: nn.Module, batch: Batch, ntypes: set[str], width: int) -> Hidden:
    """An encoder's rows of all nodes of the last block's destinations.

    Raises:
        TrainingError: there are none of one of ``ntypes``, or they are of another shape.
    """
    given = batch.blocks, batch.x, batch.degree, batch.combined, batch.categories
    h = cast("Encoder", encoder).represent(*given)
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
    """Outputs for edges of one type.

    Args:
        encoder: an `Encoder`.
    """

    def __init__(self, encoder: nn.Module, decoder: Decoder, etype: EdgeType):
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
            rows[self.etype[0]].index_select(0, part.pairs[0]),
            rows[self.etype[2]].index_select(0, part.pairs[1]),
            part.relation,
        )
        return out


class LinkModel(EdgeModel):
    """Scores of edges and, with other nodes in place of their ends, of edges that are not there."""

    def decode(self, rows: Hidden, part: Batch | Part) -> Any:
        """``(there, absent, counts)``: scores of the edges ``[B]``; for each end that is replaced
        scores ``[B, K]``, and which of them count, bool ``[B, K]``: not those of a node that the
        edge ends at anyway."""
        pairs = part.pairs
        assert pairs is not None
        by_end = dict(zip(_ENDS, (rows[self.etype[0]], rows[self.etype[2]])))
        own = dict(zip(_ENDS, pairs))
        ends = {end: by_end[end].index_select(0, at) for end, at in own.items()}
        there = self.decoder(ends["source"], ends["target"], part.relation).flatten()
        absent, counts = [], []
        for end, nodes in part.instead.items():
            kept = ends["target" if end == "source" else "source"]
            candidates = by_end[end].index_select(0, nodes)
            absent.append(self.decoder.against(kept, candidates, part.relation, end))
            counts.append(nodes.unsqueeze(0) != own[end].unsqueeze(1))
        return there, absent, counts
