"""Models as users of PyG write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import (
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    HGTConv,
    Linear,
    SAGEConv,
    global_add_pool,
    to_hetero,
)
from torch_geometric.utils import scatter

from tests.support.own_models import DglSage


class Sage(nn.Module):
    """Two layers on one graph."""

    def __init__(self, in_channels: int, out_channels: int, hidden: int = 16):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(in_channels, hidden), SAGEConv(hidden, out_channels)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second = self.convs
        return second(first(x, edge_index).relu(), edge_index)


class Gcn(Sage):
    """Two layers that divide by the degrees of both ends."""

    def __init__(self, in_channels: int, out_channels: int, hidden: int = 16):
        super().__init__(in_channels, out_channels)
        sizes = (in_channels, hidden), (hidden, out_channels)
        self.convs = nn.ModuleList(GCNConv(*size) for size in sizes)


class LayeredSage(Sage):
    """The same model for PyG's ``NeighborSampler``."""

    def forward(self, x: Tensor, adjs: Any) -> Tensor:  # type: ignore[override]
        for number, (conv, (edge_index, _, size)) in enumerate(zip(self.convs, adjs)):
            x = conv((x, x[: size[1]]), edge_index)
            x = x if number else x.relu()
        return x


class Attention(nn.Module):
    """Two layers of GATv2, which read features of edges if there are some."""

    def __init__(self, in_channels: int, out_channels: int, edges: int | None = None):
        super().__init__()
        self.first = GATv2Conv(in_channels, 8, heads=2, edge_dim=edges)
        self.second = GATv2Conv(16, out_channels, heads=1, edge_dim=edges)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = self.first(x, edge_index, edge_attr).relu()
        return self.second(x, edge_index, edge_attr)


class Hgt(nn.Module):
    """The model of PyG's example for DBLP: lazy transforms of the inputs, then HGT."""

    def __init__(self, out_channels: int, metadata: Any, target: str, hidden: int = 16):
        super().__init__()
        self.target = target
        self.inputs = nn.ModuleDict({t: Linear(-1, hidden) for t in metadata[0]})
        self.convs = nn.ModuleList(HGTConv(hidden, hidden, metadata, 2) for _ in range(2))
        self.out = Linear(hidden, out_channels)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict = {t: self.inputs[t](x).relu() for t, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return self.out(x_dict[self.target])


class Untyped(nn.Module):
    """The model of PyG's documentation that `Hetero` converts to a model for several types."""

    def __init__(self, hidden: int, out_channels: int):
        super().__init__()
        self.first = SAGEConv((-1, -1), hidden)
        self.second = SAGEConv((-1, -1), out_channels)

    def forward(self, x, edge_index):  # type: ignore  # torch.fx may fail on annotations as text
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Hetero(nn.Module):
    """A lazy model that ``to_hetero`` has made."""

    def __init__(self, out_channels: int, metadata: Any, hidden: int = 16):
        super().__init__()
        self.net = to_hetero(Untyped(hidden, out_channels), metadata, aggr="sum")

    def forward(self, x: Any, edge_index: Any) -> dict[str, Tensor]:
        return self.net(x, edge_index)


class LayeredHetero(nn.Module):
    """A layer for each edge type, with the features of its edges."""

    def __init__(self, in_features: dict[str, int], out_features: int, etypes: list[list[str]]):
        super().__init__()
        self.etypes = [tuple(etype) for etype in etypes]
        self.convs = nn.ModuleList(
            GATv2Conv((in_features[s], in_features[t]), out_features, add_self_loops=False)
            for s, _, t in self.etypes
        )

    def forward(self, x: Any, layers: Any) -> dict[str, Tensor]:
        ((edge_index, edge_attr, size),) = layers
        assert edge_attr is None
        out: dict[str, Tensor] = {}
        for conv, etype in zip(self.convs, self.etypes):
            source, _, target = etype
            ends = x[source], x[target][: size[etype][1]]
            out[target] = out.get(target, 0) + conv(ends, edge_index[etype])
        return out


class OneHgt(nn.Module):
    """A single layer of PyG's HGT."""

    def __init__(self, in_channels: dict[str, int], out_channels: int, metadata: Any, heads: int):
        super().__init__()
        self.conv = HGTConv(in_channels, out_channels, metadata, heads)

    def forward(self, x: Any, edge_index: Any) -> dict[str, Tensor]:
        return self.conv(x, edge_index)


class Amounts(nn.Module):
    """A linear layer on the mean features of a node's in-edges."""

    def __init__(self, in_channels: Any, out_channels: int):
        super().__init__()
        self.linear = nn.Linear(3, out_channels)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any) -> dict[str, Tensor]:
        ((etype, (_, dst)),) = edge_index.items()
        means = scatter(edge_attr[etype], dst, dim_size=len(x["one"]), reduce="mean")
        return {"one": self.linear(means)}


class Gin(nn.Module):
    """A GIN for graph-level tasks without edge features."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = GINConv(nn.Sequential(nn.Linear(in_channels, 16), nn.ReLU()))
        self.out = nn.Linear(16, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        return self.out(global_add_pool(self.conv(x, edge_index), batch, batch_size))


class Gine(nn.Module):
    """A GINE for graph-level tasks with edge features."""

    def __init__(self, in_channels: int, out_channels: int, edges: int, hidden: int = 16):
        super().__init__()
        network = nn.Sequential(nn.Linear(in_channels, hidden), nn.ReLU())
        self.conv = GINEConv(network, edge_dim=edges)
        self.out = nn.Linear(hidden, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        return self.out(global_add_pool(self.conv(x, edge_index, edge_attr), batch))


class OddRank:
    """Mixin that makes a model differ on rank 1.

    Args:
        how: ``noise`` moves its weights in the third step; ``branch`` leaves a layer out there;
            ``frozen`` freezes a weight.
    """

    def __init__(self, *sizes: Any, how: str, **options: Any):
        super().__init__(*sizes, **options)
        self.how, self.calls = how, 0
        odd = dist.get_rank() == 1
        self.extra = nn.Parameter(torch.zeros(1), requires_grad=not (odd and how == "frozen"))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.calls += self.training  # type: ignore[has-type]
        odd = dist.get_rank() == 1 and self.training and self.calls == 3
        if odd and self.how == "noise":
            with torch.no_grad():
                next(self.parameters()).add_(1e-4)  # type: ignore[attr-defined]
        out = super().forward(*inputs, **named)  # type: ignore[misc]
        return out if odd and self.how == "branch" else out + self.extra


class OddHgt(OddRank, Hgt):
    """`Hgt` that differs on rank 1."""

    def __init__(self, out_channels: int, metadata: Any, target: str, how: str):
        super().__init__(out_channels, metadata, target, how=how)


class OddAttention(OddRank, Attention):
    """`Attention` that differs on rank 1."""

    def __init__(self, in_channels: int, out_channels: int, how: str):
        super().__init__(in_channels, out_channels, how=how)


class OddDgl(OddRank, DglSage):
    """`DglSage` that differs on rank 1."""

    def __init__(self, in_features: int, out_features: int, how: str):
        super().__init__(in_features, out_features, how=how)
