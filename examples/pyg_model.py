"""A model of your own, built from torch_geometric.nn: GATv2 of Brody, Alon & Yahav 2022, "How
attentive are graph attention networks?"
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv


class Gatv2(nn.Module):
    """Two layers of attention, as for PyG's NeighborLoader.

    Args:
        in_channels, out_channels: widths of the input and of the output (number of classes);
            raygnn reads both off the data and gives them by these names.
        hidden, heads, dropout: from ``model.args`` in the configuration.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden: int = 16,
        heads: int = 4,
        dropout: float = 0.3,
    ):
        super().__init__()
        self.first = GATv2Conv(in_channels, hidden, heads=heads)
        self.second = GATv2Conv(hidden * heads, out_channels, heads=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Class scores of all nodes of the sampled graph; the seeds are its first.

        Args:
            x: features ``[S, in_channels]``; edge_index: sources and destinations ``[2, E]``.

        Returns:
            ``[S, out_channels]``, a row for each node.
        """
        h = F.elu(self.first(self.dropout(x), edge_index))
        return self.second(self.dropout(h), edge_index)
