"""A model of your own, built from dgl.nn: GraphSAGE that classifies by the outputs of all layers.

Jumping knowledge (Xu et al. 2018, "Representation learning on graphs with jumping knowledge
networks"): the last layer sees the outputs of all layers side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import Tensor, nn


class JumpingSage(nn.Module):
    """One SAGEConv per layer, and a linear layer over all their outputs.

    Args:
        in_features, out_features: widths of the input and of the output (number of classes);
            raygnn reads both off the data.
        hidden, layers, dropout: from ``model.args`` in the configuration.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: int = 64,
        layers: int = 2,
        dropout: float = 0.3,
    ):
        super().__init__()
        widths = [in_features] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(SAGEConv(width, hidden, "mean") for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden * layers, out_features)

    def forward(self, blocks: list, x: Tensor) -> Tensor:
        """Class scores of the seeds.

        Args:
            blocks: DGL blocks, one per layer, from the input nodes to the seeds. The
                destinations of a block are the first of its sources.
            x: features of the input nodes, ``[S, in_features]``.

        Returns:
            ``[B, out_features]``, a row per seed.
        """
        seeds = blocks[-1].num_dst_nodes()
        h, outputs = x, []
        for layer, block in zip(self.layers, blocks):
            h = F.relu(layer(block, self.dropout(h)))
            outputs.append(h[:seeds])
        return self.output(torch.cat(outputs, dim=1))
