"""A stack of typed layers: what the built-in families share.

Each layer runs one convolution per edge type and adds up what arrives at a node type. A
homogeneous graph has one edge type and goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.models.dropout import Dropout
from raygnn.models.head import with_head
from raygnn.models.layers import Combine, LinearConv
from raygnn.models.linear import linear
from raygnn.sampling.batch import Block, EdgeType

Degrees = Mapping[EdgeType, Tensor]
Combined = Mapping[EdgeType, Tensor]
Categories = Mapping[str, Mapping[str, Tensor]]
Hidden = dict[str, Tensor]


@dataclass(frozen=True)
class Schema:
    """What a network needs to know about the data.

    Attributes:
        in_features: node type → width of its input features; 0 where it has none.
        etypes: all edge types of the graph.
        target: the node type whose outputs are wanted.
        out_features: their width (number of classes).
        categories: node type → name → number of categories and width of their embedding.
    """

    in_features: dict[str, int]
    etypes: Sequence[EdgeType]
    target: str
    out_features: int
    categories: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, int]:
        """Node type → width of what goes into the first layer."""
        extra = {t: sum(w for _, w in named.values()) for t, named in self.categories.items()}
        ntypes = [*self.in_features, *(t for t in extra if t not in self.in_features)]
        return {t: self.in_features.get(t, 0) + extra.get(t, 0) for t in ntypes}


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
        self.convs = nn.ModuleDict({_key(*e): conv(e, spec) for e in etypes})
        self.own = nn.ModuleDict(
            {_key(t): nn.Linear(spec.in_features[t], width, bias=False) for t in self_types}
        )
        self.self_types = list(self_types)
        joined = {e[2] for e in etypes if isinstance(self.convs[_key(*e)], LinearConv)}
        self.bias = nn.ParameterDict(
            {_key(t): nn.Parameter(torch.zeros(width)) for t in sorted(joined | set(self_types))}
        )

    def forward(
        self,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
    ) -> Hidden:
        # What weights are applied to is joined, so that one matrix product and no sum of its
        # results makes a node type's output.
        rows: dict[str, list[Tensor]] = {t: [] for t in self.outputs()}
        weights: dict[str, list[Tensor]] = {t: [] for t in rows}
        messages: dict[str, list[Tensor]] = {t: [] for t in rows}
        h, h_dst = dict(h), {}
        for ntype in rows:
            if ntype in h:
                h[ntype], h_dst[ntype] = with_head(h[ntype], block.num_dst[ntype])
        for ntype in self.self_types:
            rows[ntype].append(h_dst[ntype])
            weights[ntype].append(cast("nn.Linear", self.own[_key(ntype)]).weight)
        for etype in self.etypes:
            source, _, target = etype
            conv, adj, degrees = self.convs[_key(*etype)], block.adj[etype], degree.get(etype)
            if combined:
                done = combined[etype]
            elif isinstance(conv, LinearConv) and not conv.weight_first(adj, h[source]):
                done = conv.combine(adj, h[source], degrees)
            else:
                messages[target].append(conv(adj, h[source], h_dst[target], degrees))
                continue
            assert isinstance(conv, LinearConv)
            rows[target].append(conv.finish(done, adj, h_dst[target], degrees))
            weights[target].append(conv.weight)
        return {t: self._sum(t, rows[t], weights[t], messages[t]) for t in rows}

    def _sum(
        self, ntype: str, rows: list[Tensor], weights: list[Tensor], messages: list[Tensor]
    ) -> Tensor:
        bias = self.bias.get(_key(ntype), None)
        if rows:
            out = linear(_join(rows), _join(weights), bias)
        else:
            out, messages = messages[0], messages[1:]
            if bias is not None:
                out = out + bias.to(out.dtype)
        for message in messages:
            out = out + message
        return out

    def outputs(self) -> list[str]:
        """The node types that come out of this layer."""
        return sorted({e[2] for e in self.etypes} | set(self.self_types))

    def inputs(self) -> list[str]:
        """The node types that go into it."""
        return sorted({e[0] for e in self.etypes} | set(self.outputs()))


class Network(nn.Module):
    """Dropout → typed layer → (residual, normalisation, activation) for each layer.

    Categories are embedded and joined to the other features before the first layer.

    Args:
        layers: see `stack`.
        schema: of the data.
        dropout: of every layer's input but the first's.
        input_dropout: of the first layer's input.
        activation: of hidden layers.
        norm: one ModuleDict (by node type) per hidden layer; empty for none.
        residual: add a hidden layer's input to its output where the widths allow it.
        needs_degree: whether `forward` must be given the degrees of the whole graph.
        combine: how all convolutions of the first layer combine sources; None for those that
            need the sources themselves.
    """

    def __init__(
        self,
        layers: Sequence[TypedLayer],
        *,
        schema: Schema,
        dropout: float,
        input_dropout: float,
        activation: Callable[[Tensor], Tensor],
        norm: str,
        residual: bool,
        needs_degree: bool,
        combine: Combine | None,
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            nn.ModuleDict({_key(t): _norm(norm, layer.width) for t in layer.outputs()})
            for layer in layers[:-1]
        )
        # a table that the first layer does not read would get no gradient
        read = layers[0].inputs()
        self._categories = {t: named for t, named in schema.categories.items() if t in read}
        self.embeddings = nn.ModuleDict(
            {
                _key(t, name): nn.Embedding(count, width)
                for t, named in self._categories.items()
                for name, (count, width) in named.items()
            }
        )
        self.target = schema.target
        self.dropout = Dropout(dropout)
        self.input_dropout = Dropout(input_dropout)
        self.activation = activation
        self.residual = residual
        self.needs_degree = needs_degree
        self._combine = combine

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def computes(self, number: int) -> list[str]:
        """The node types that a layer computes, in a fixed order."""
        outputs: list[str] = cast("TypedLayer", self.layers[number]).outputs()
        return outputs

    @property
    def first_combine(self) -> Combine | None:
        """How the first layer's sources may be combined before `forward`; None: not at all.

        "mean", "sum" or "max" of the features of each destination's sampled sources, or "gcn",
        their sum weighted as `raygnn.models.layers.GCNConv` says, for every edge type alike.
        """
        if self._categories or (self.training and self.input_dropout.p):
            return None
        return self._combine

    def inputs(self, x: Hidden, categories: Categories | None = None) -> Hidden:
        """The first layer's input: features and embedded categories side by side.

        Args:
            x: node type → ``[S, F]``; no entry for a type that has categories alone.
            categories: node type → name → int64 ``[S]``, from 0.

        Returns:
            node type → ``[S, F + widths of the embeddings]``.
        """
        h = dict(x)
        for ntype, named in self._categories.items():
            assert categories is not None
            numbers = categories[ntype]
            parts = [h[ntype]] if ntype in h else []
            parts += [self.embeddings[_key(ntype, name)](numbers[name]) for name in named]
            h[ntype] = _join(parts)
        return h

    def layer(
        self,
        number: int,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
    ) -> Hidden:
        """One layer, whole: for training and for layer-wise inference alike.

        Args:
            h: node type → ``[S, F]``; for the first layer from `inputs`.
            degree: edge type → ``[≥ S]``.
            combined: see `forward`; only for the first layer.

        Returns:
            node type → ``[D, F_out]``.
        """
        dropout = self.dropout if number else self.input_dropout
        h = {t: dropout(v) for t, v in h.items()}
        out: Hidden = self.layers[number](block, h, degree, combined)
        if number == len(self.layers) - 1:
            return {self.target: out[self.target]}
        for ntype, v in out.items():
            if self.residual and ntype in h and h[ntype].shape[1] == v.shape[1]:
                v = v + h[ntype][: len(v)]
            norm = cast("nn.ModuleDict", self.norms[number])[_key(ntype)]
            out[ntype] = self.activation(norm(v))
        return out

    def forward(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Tensor:
        """Outputs of the seeds, ``[B, out_features]``.

        Args:
            blocks: from the input nodes to the seeds.
            x: node type → features of the input nodes ``[S, F]``.
            degree: edge type → in-degrees in the whole graph of the input nodes of its
                destination type ``[S]``, if the network needs them.
            combined: edge type → the first block's sources combined as `first_combine` says,
                ``[D, F]``. Then ``x`` and ``degree`` need only have the first block's
                destinations, and its ``src`` is not looked at. None or empty: from ``x``.
            categories: node type → name → int64 ``[S]``.
        """
        h = self.inputs(x, categories)
        for number, block in enumerate(blocks):
            h = self.layer(number, block, h, degree, None if number else combined)
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
    self_types = {t for t in schema.widths if own or t not in with_loop}
    # the node types that each layer has to compute, from the last layer back
    wanted = [{schema.target}]
    for _ in range(num_layers - 1):
        wanted.insert(0, wanted[0] | {e[0] for e in schema.etypes if e[2] in wanted[0]})
    widths = schema.widths
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
    """In place: nothing before it needs its own output for the backward pass."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": partial(F.relu, inplace=True),
        "elu": partial(F.elu, inplace=True),
    }
    return functions[name]


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(width)
    if kind == "batch":
        return _BatchNorm(width)
    return nn.Identity()


class _BatchNorm(nn.BatchNorm1d):
    """Takes a single row, too, which a short batch may leave to a rank: by running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return super().forward(x)


def _join(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _key(*names: str) -> str:
    """Of a module: without dots, and never a name that ModuleDict has itself ("items", …)."""
    return ":".join(("", *names)).replace(".", "·")
