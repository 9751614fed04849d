"""A stack of typed layers: what the built-in families share.

Each layer runs one convolution per edge type and adds up what arrives at a node type. A
homogeneous graph has one edge type and goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.sampling.batch import Block, EdgeType, etype_str

Degrees = Mapping[EdgeType, Tensor]
Hidden = dict[str, Tensor]


@dataclass(frozen=True)
class Schema:
    """What a network needs to know about the data.

    Attributes:
        in_features: node type → width of its input features.
        etypes: all edge types of the graph.
        target: the node type whose outputs are wanted.
        out_features: their width (number of classes).
    """

    in_features: dict[str, int]
    etypes: Sequence[EdgeType]
    target: str
    out_features: int


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its convolutions' widths and place in the stack."""

    in_features: dict[str, int]
    out_features: int
    last: bool


# etype, spec → the convolution of that edge type
ConvFactory = Callable[[EdgeType, LayerSpec], nn.Module]


class TypedLayer(nn.Module):
    """One convolution per edge type, summed per destination type, plus the node itself.

    Args:
        self_types: node types that get a linear transform of the node itself: all for families
            whose convolution leaves it out, else those without an edge type onto themselves.
    """

    def __init__(
        self,
        etypes: Sequence[EdgeType],
        spec: LayerSpec,
        conv: ConvFactory,
        self_types: Sequence[str],
        width: int,
    ):
        super().__init__()
        self.width = width
        self.etypes = list(etypes)
        self.convs = nn.ModuleDict({_key(e): conv(e, spec) for e in etypes})
        self.own = nn.ModuleDict({t: nn.Linear(spec.in_features[t], width) for t in self_types})

    def forward(self, block: Block, h: Hidden, degree: Degrees) -> Hidden:
        out: Hidden = {t: linear(h[t][: block.num_dst[t]]) for t, linear in self.own.items()}
        for etype in self.etypes:
            source, _, target = etype
            h_dst = h[target][: block.num_dst[target]]
            message = self.convs[_key(etype)](block.adj[etype], h[source], h_dst, degree.get(etype))
            out[target] = out[target] + message if target in out else message
        return out

    def outputs(self) -> list[str]:
        """The node types that come out of this layer."""
        return sorted({e[2] for e in self.etypes} | set(self.own))


class Network(nn.Module):
    """Dropout → typed layer → (residual, normalisation, activation) for each layer.

    Args:
        layers: see `stack`.
        target: the node type whose outputs are returned.
        dropout: of every layer's input.
        activation: of hidden layers.
        norm: one ModuleDict (by node type) per hidden layer; empty for none.
        residual: add a hidden layer's input to its output where the widths allow it.
        needs_degree: whether `forward` must be given the degrees of the whole graph.
    """

    def __init__(
        self,
        layers: Sequence[TypedLayer],
        *,
        target: str,
        dropout: float,
        activation: Callable[[Tensor], Tensor],
        norm: str,
        residual: bool,
        needs_degree: bool,
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            nn.ModuleDict({t: _norm(norm, layer.width) for t in layer.outputs()})
            for layer in layers[:-1]
        )
        self.target = target
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.residual = residual
        self.needs_degree = needs_degree

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def computes(self, number: int) -> list[str]:
        """The node types that a layer computes, in a fixed order."""
        outputs: list[str] = cast("TypedLayer", self.layers[number]).outputs()
        return outputs

    def layer(self, number: int, block: Block, h: Hidden, degree: Degrees) -> Hidden:
        """One layer, whole: for training and for layer-wise inference alike.

        Args:
            h: node type → ``[S, F]``.
            degree: edge type → ``[≥ S]``.

        Returns:
            node type → ``[D, F_out]``.
        """
        h = {t: self.dropout(v) for t, v in h.items()}
        out: Hidden = self.layers[number](block, h, degree)
        if number == len(self.layers) - 1:
            return {self.target: out[self.target]}
        for ntype, v in out.items():
            if self.residual and ntype in h and h[ntype].shape[1] == v.shape[1]:
                v = v + h[ntype][: len(v)]
            norm = cast("nn.ModuleDict", self.norms[number])[ntype]
            out[ntype] = self.activation(norm(v))
        return out

    def forward(self, blocks: Sequence[Block], x: Hidden, degree: Degrees) -> Tensor:
        """Outputs of the seeds, ``[B, out_features]``."""
        h = x
        for number, block in enumerate(blocks):
            h = self.layer(number, block, h, degree)
        return h[self.target]


def stack(
    schema: Schema,
    num_layers: int,
    hidden: int,
    conv: ConvFactory,
    *,
    own: bool,
) -> list[TypedLayer]:
    """Layers from the input widths to the output width.

    A layer has only what the target depends on: a parameter that no output uses would get no
    gradient, which data-parallel training takes for a fault.

    Args:
        own: the convolution leaves the node itself out.
    """
    with_loop = {e[2] for e in schema.etypes if e[0] == e[2]}
    self_types = {t for t in schema.in_features if own or t not in with_loop}
    # the node types that each layer has to compute, from the last layer back
    wanted = [{schema.target}]
    for _ in range(num_layers - 1):
        wanted.insert(0, wanted[0] | {e[0] for e in schema.etypes if e[2] in wanted[0]})
    widths = dict(schema.in_features)
    layers = []
    for number, targets in enumerate(wanted):
        last = number == num_layers - 1
        width = schema.out_features if last else hidden
        etypes = [e for e in schema.etypes if e[2] in targets]
        spec = LayerSpec(widths, width, last)
        layer = TypedLayer(etypes, spec, conv, sorted(self_types & targets), width)
        layers.append(layer)
        widths = dict.fromkeys(layer.outputs(), width)
    return layers


def activation(name: str) -> Callable[[Tensor], Tensor]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "elu": F.elu}
    return functions[name]


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(width)
    if kind == "batch":
        return nn.BatchNorm1d(width)
    return nn.Identity()


def _key(etype: EdgeType) -> str:
    # module names may not contain dots; types come from users' files
    return etype_str(etype).replace(".", "·")
