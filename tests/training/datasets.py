"""Datasets as users write them: odd graphs, odd dtypes, and graphs that cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class RandomGraphs:
    """Random graphs whose class follows from their features; two classes.

    Args:
        num: how many.
        dtypes: of the features, in turn.
        largest: nodes of the largest graph; sizes go from 0 up to it.
        edges: mean number of in-edges of a node; 0 for none at all.
        bad: numbers of graphs that raise.
        seed: of everything.
    """

    num_classes = 2

    def __init__(
        self,
        num: int = 24,
        dtypes: Sequence[str] = ("fp32",),
        largest: int = 6,
        edges: float = 2.0,
        bad: Sequence[int] = (),
        seed: int = 0,
    ):
        self.num, self.dtypes, self.largest = num, list(dtypes), largest
        self.edges, self.bad, self.seed = edges, set(bad), seed

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        import dgl

        if number in self.bad:
            raise OSError(f"graph file {number} is unreadable")
        draw = torch.Generator().manual_seed(self.seed * 10_007 + number)
        nodes = int(torch.randint(0, self.largest + 1, (), generator=draw))
        edges = int(nodes * self.edges)
        graph = dgl.graph(
            (self._ends(nodes, edges, draw), self._ends(nodes, edges, draw)), num_nodes=nodes
        )
        label = number % 2
        feat = torch.randn(nodes, 4, generator=draw) + label
        # what every dtype can hold, so that the stored values do not depend on it
        feat = feat.mul(8).round().div(8).clamp(-8, 8)
        graph.ndata["feat"] = feat.to(DTYPES[self.dtypes[number % len(self.dtypes)]])
        return graph, label

    @staticmethod
    def _ends(nodes: int, edges: int, draw: torch.Generator) -> Tensor:
        return torch.randint(0, max(1, nodes), (edges,), generator=draw)


class HalfConverted(RandomGraphs):
    """Converted to bf16 when it is loaded, on the path that most graphs take, as in dmlc/dgl#7851.

    A graph without edges, number 3, leaves the loader earlier and stays as it was.
    """

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, label = super().__getitem__(number)
        if number == 3:
            import dgl

            graph = dgl.graph(([], []), num_nodes=2)
            graph.ndata["feat"] = torch.ones(2, 4)
            return graph, label
        graph.ndata["feat"] = graph.ndata["feat"].to(torch.bfloat16)
        return graph, label
