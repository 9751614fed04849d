"""Networks for graph-level tasks: layers, and a readout from nodes to graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.model import FamilyConfig
from raygnn.models.kernels.message_passing import NATIVE, Kernels, Reduce, widened
from raygnn.models.linear import join
from raygnn.models.network import Categories, Stack, Typed, first_widths
from raygnn.models.typed_layers import Family, Hidden, stack
from raygnn.sampling.batch import Adjacency, Block, GraphBatch


def members(sizes: Tensor, num: int) -> Adjacency:
    """Build edges from each node to its graph.

    Args:
        sizes: number of nodes of each graph, int64 ``[B]``; nodes are ordered by graph.
        num: their sum.
    """
    return Adjacency(F.pad(sizes.cumsum(0), (1, 0)), torch.arange(num, device=sizes.device))


def pool(graphs: Adjacency, h: Tensor, reduce: Reduce, kernels: Kernels = NATIVE) -> Tensor:
    """Pool the nodes of each graph by sum, mean or maximum: ``[N, F]`` → ``[B, F]``.

    fp16 and bf16 are summed and returned in fp32. A graph without nodes gives 0.

    Args:
        graphs: from `members`.
    """
    return kernels.aggregate(graphs, widened(h), reduce)


class GraphSchema(Typed):
    """Schema of a graph-level task."""


class GraphNetwork(Stack):
    """Layers on complete graphs, then a readout of the input and of every layer.

    A graph's output is the sum of linear transforms of the pooled nodes of each layer and node
    type, as in GIN (Xu et al., ICLR 2019; "jumping knowledge", Xu et al., ICML 2018): one linear
    layer of all of them side by side, after ``model.dropout``. Every batch uses all parameters,
    even one without nodes or edges.
    """

    kernels: Kernels = NATIVE

    def __init__(self, config: FamilyConfig, family: Family, schema: GraphSchema):
        widths, num = first_widths(config, schema), config.layers
        every = [set(widths)] * num
        edges = schema.edge_widths
        layers = stack(family, schema.etypes, widths, every, config.hidden, edges=edges)
        super().__init__(config, family, schema, layers, num)
        self.schema = schema
        self.pooling = config.readout or ("sum" if config.kind == "gin" else "mean")
        # node types that are pooled, the input first, in a fixed order
        self._pooled = [sorted(widths), *(self.computes(number) for number in range(num))]
        wide = sum(widths.values()) + config.hidden * sum(map(len, self._pooled[1:]))
        self.readout = nn.Linear(wide, schema.out_features)

    def forward(self, batch: GraphBatch) -> Tensor:
        """Return outputs of the graphs, ``[B, out_features]``."""
        rows = self.represent(batch)
        # a sum over a graph's nodes may exceed the range of fp16
        with torch.autocast(rows.device.type, enabled=False):
            return self.readout(self.dropout(rows).to(self.readout.weight.dtype))

    def represent(self, batch: GraphBatch) -> Tensor:
        """Return the pooled nodes of each layer and node type side by side, ``[B, …]``."""
        block = batch.block
        graphs = {t: members(sizes, block.num_src[t]) for t, sizes in batch.sizes.items()}
        return self.pooled(block, batch.x, batch.categories, graphs)

    def pooled(
        self,
        block: Block,
        x: Hidden,
        categories: Categories | None,
        graphs: Mapping[str, Adjacency],
    ) -> Tensor:
        """See `represent`.

        Args:
            block: all graphs, as `GraphBatch.block`.
            graphs: node type → from `members`.
        """
        # all neighbours are included, so the block's degrees are the graphs'
        degree = {etype: adj.degree for etype, adj in block.adj.items()}
        h = self.inputs(x, categories)
        rows = self._pool(0, graphs, h)
        for number in range(self.num_layers):
            h = self.layer(number, block, h, degree)
            rows += self._pool(number + 1, graphs, h)
        return join(rows)

    def _pool(self, number: int, graphs: Mapping[str, Adjacency], h: Hidden) -> list[Tensor]:
        return [pool(graphs[t], h[t], self.pooling, self.kernels) for t in self._pooled[number]]
