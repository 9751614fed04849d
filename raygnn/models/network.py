"""Networks of typed layers: what the built-in families share, and the model without layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raygnn.config.model import FamilyConfig
from raygnn.models.convolutions import CombineKind
from raygnn.models.linear import Dropout, join
from raygnn.models.norm import Cancelled, activation, drop_biases, norm, normalise, repeated
from raygnn.models.typed_layers import Combined, Degrees, Family, Hidden, Layer, key, stack
from raygnn.sampling.batch import Block, EdgeType

Categories = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Typed:
    """What a network needs to know about the data, whatever its outputs are.

    Attributes:
        in_features: node type → width of its input features; 0 where it has none.
        etypes: all edge types.
        out_features: width of an output (number of classes, or of targets).
        categories: node type → name → number of categories and width of their embedding.
        relations: edge type → how many relations its edges have, of the types whose blocks say
            which (`Adjacency.relation`); of a whole graph an edge's relation is its type.
        buckets: node type and name of the categories whose number 0 is for unknown words.
        edge_features: edge type → width of its edges' features (`Adjacency.rows`); types without
            any are left out.
        edge_categories: edge type → name → number of categories and width of their embedding.
        edge_times: edge type → width of the encoding of how long ago its edges were, of the types
            whose blocks say so (`Adjacency.elapsed`).
    """

    in_features: dict[str, int]
    etypes: Sequence[EdgeType]
    out_features: int
    categories: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    relations: dict[EdgeType, int] = field(default_factory=dict)
    buckets: tuple[tuple[str, str], ...] = ()
    edge_features: dict[EdgeType, int] = field(default_factory=dict)
    edge_categories: dict[EdgeType, dict[str, tuple[int, int]]] = field(default_factory=dict)
    edge_times: dict[EdgeType, int] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, int]:
        """Node type → width of what goes into the first layer."""
        return _with_embeddings(self.in_features, self.categories)

    @property
    def edge_widths(self) -> dict[EdgeType, int]:
        """Edge type → width of what each layer reads of its edges; types without are left out."""
        widths = _with_embeddings(self.edge_features, self.edge_categories)
        return {
            e: widths.get(e, 0) + self.edge_times.get(e, 0) for e in {**widths, **self.edge_times}
        }


_Kind = TypeVar("_Kind")


def _with_embeddings(
    widths: Mapping[_Kind, int], categories: Mapping[_Kind, Mapping[str, tuple[int, int]]]
) -> dict[_Kind, int]:
    total = dict(widths)
    for kind, named in categories.items():
        total[kind] = total.get(kind, 0) + sum(width for _, width in named.values())
    return total


@dataclass(frozen=True)
class Schema(Typed):
    """The data of a task whose seeds are nodes.

    Attributes:
        target: the node type whose outputs are wanted.
        others: more node types whose outputs are wanted, as wide.
        edge_shapes: edge type → name → shape of a row, of the arrays that `Adjacency.rows` has side
            by side; for a user's own module.
    """

    target: str = field(kw_only=True)
    others: tuple[str, ...] = ()
    edge_shapes: dict[EdgeType, dict[str, tuple[int, ...]]] = field(default_factory=dict)


class Stack(nn.Module):
    """Dropout → typed layer → (residual, normalisation, activation) for each layer.

    Categories are embedded and joined to the other features before the first layer, those of edges
    for every layer. Dropout is ``model.input_dropout`` before the first layer and
    ``model.dropout`` before the others, of nodes alone.

    Args:
        layers: see `stack`.
        hidden: how many of them, from the first, are hidden layers: what comes after the typed
            layer is theirs alone.
    """

    def __init__(
        self,
        config: FamilyConfig,
        family: Family,
        schema: Typed,
        layers: Sequence[Layer],
        hidden: int,
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            nn.ModuleDict({key(t): norm(config.norm, layer.width) for t in layer.outputs()})
            for layer in layers[:hidden]
        )
        if config.norm == "batch":
            found = [(n, layer.biases()) for n, layer in enumerate(layers[:hidden])]
            drop_biases(
                self,
                [
                    Cancelled(
                        f"layers.{n}.{bias}",
                        f"norms.{n}.{key(t)}.running_mean",
                        share and f"layers.{n}.{share}",
                    )
                    for n, biases in found
                    for t, bias, share in biases
                ],
            )
        # a table that the first layer does not read would get no gradient
        read = layers[0].inputs()
        self._categories = {t: named for t, named in schema.categories.items() if t in read}
        self.embeddings = nn.ModuleDict(
            {
                key(t, name): nn.Embedding(count, width)
                for t, named in self._categories.items()
                for name, (count, width) in named.items()
            }
        )
        for ntype, name in schema.buckets:
            if ntype in self._categories:  # it says nothing until it is trained
                nn.init.zeros_(cast("nn.Embedding", self.embeddings[key(ntype, name)]).weight[0])
        into = {etype for layer in layers for etype in layer.etypes}
        self._edge_categories = {e: n for e, n in schema.edge_categories.items() if e in into}
        self.edge_embeddings = nn.ModuleDict(
            {
                key(*etype, name): nn.Embedding(count, width)
                for etype, named in self._edge_categories.items()
                for name, (count, width) in named.items()
            }
        )
        self._edge_times = {e: width for e, width in schema.edge_times.items() if e in into}
        widths = set(self._edge_times.values())
        self.clock = TimeEncoding(max(widths)) if widths else None
        self.dropout = Dropout(config.dropout)
        self.input_dropout = Dropout(config.first_dropout)
        kind = config.activation or family.activation
        self.activation = activation(kind)
        self.residual = config.residual
        # layers that do so themselves, where nothing comes between
        direct = kind == "relu" and config.norm == "none" and not config.residual
        self._activated = [direct and layer.takes_relu() for layer in layers[:hidden]]
        self.recompute = config.recompute

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def first_width(self) -> int:
        """Of a row that the first layer computes."""
        return cast("Layer", self.layers[0]).width

    def computes(self, number: int) -> list[str]:
        """The node types that a layer computes, in a fixed order."""
        outputs: list[str] = cast("Layer", self.layers[number]).outputs()
        return outputs

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
            parts += [self.embeddings[key(ntype, name)](numbers[name]) for name in named]
            h[ntype] = join(parts)
        return h

    def layer(
        self,
        number: int,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        projected: Combined | None = None,
    ) -> Hidden:
        """One layer, whole: for training and for layer-wise inference alike.

        With ``model.recompute`` only its input is kept for the backward pass (Chen et al.,
        "Training deep nets with sublinear memory cost", 2016).

        Args:
            h: node type → ``[S, F]``; for the first layer from `inputs`.
            degree: edge type → ``[≥ S]``.
            combined: see `Network.forward`; only for the first layer.
            projected: see `TypedLayer.forward`; only where the layer `narrows`, without gradients.

        Returns:
            node type → ``[D, F_out]``.
        """
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return self._layer(number, block, h, degree, combined, projected)

        names = list(h)

        def run(*values: Tensor) -> Hidden:
            return self._layer(number, block, dict(zip(names, values)), degree, combined)

        done: Hidden = checkpoint(
            run, *h.values(), use_reentrant=False, context_fn=lambda: (nullcontext(), repeated())
        )
        return done

    def _layer(
        self,
        number: int,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None,
        projected: Combined | None = None,
    ) -> Hidden:
        dropout = self.dropout if number else self.input_dropout
        h = {t: dropout(v) for t, v in h.items()}
        layer = cast("Layer", self.layers[number])
        named = {"projected": projected} if projected else {}  # others than `TypedLayer` have none
        out: Hidden = layer(self._embedded(layer, block), h, degree, combined, **named)
        if number == len(self.norms) or self._activated[number]:
            return out
        for ntype, v in out.items():
            if self.residual and ntype in h and h[ntype].shape[1] == v.shape[1]:
                v = v + h[ntype][: v.shape[0]]
            module = cast("nn.ModuleDict", self.norms[number])[key(ntype)]
            out[ntype] = self.activation(normalise(module, v, block.counted.get(ntype)))
        return out

    def _embedded(self, layer: Layer, block: Block) -> Block:
        """The block with what is embedded of its edges behind their other features."""
        if not (self._edge_categories or self.clock):
            return block
        adj = dict(block.adj)
        for etype in layer.etypes:
            given = adj[etype]
            parts = [] if given.rows is None else [given.rows]
            parts += [
                self.edge_embeddings[key(*etype, name)](given.categories[name])
                for name in self._edge_categories.get(etype, {})
            ]
            if etype in self._edge_times:
                assert self.clock is not None
                assert given.elapsed is not None
                parts.append(self.clock(given.elapsed))
            if parts:
                adj[etype] = given.with_rows(join(parts))
        return replace(block, adj=adj)


class TimeEncoding(nn.Module):
    """``cos(w · log(1 + t) + b)`` of lengths of time t, with learned w and b.

    That of Xu et al., "Inductive representation learning on temporal graphs" (ICLR 2020), of the
    logarithm: in other units it is shifted in phase alone, and w that are learned stay of their
    magnitude, where steps of 0.001 would put a period of a month among those of minutes.

    Args:
        width: of the encoding. The periods begin at factors of e^(π / 2) to e^(32 π) of t.
    """

    def __init__(self, width: int):
        super().__init__()
        self.rate = nn.Parameter(2.0 ** torch.linspace(2, -4, width))
        self.phase = nn.Parameter(torch.zeros(width))

    def forward(self, elapsed: Tensor) -> Tensor:
        """int64 ``[E]``, at least 0 → ``[E, width]`` in the parameters' dtype."""
        length = elapsed.float().log1p().unsqueeze(1)
        angle = length * self.rate.float() + self.phase.float()
        return angle.cos().to(self.rate.dtype)


class Encoder(nn.Module, ABC):
    """A model that gives each node a row: the outputs of its target type for a task on nodes, and
    those of several types for a decoder or heads."""

    target: str

    @abstractmethod
    def represent(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Hidden:
        """node type → outputs of the last block's destinations, ``[D, …]``.

        Args:
            blocks: from the input nodes to the seeds.
            x: node type → features of the input nodes ``[S, F]``.
            degree: edge type → in-degrees in the whole graph of the input nodes of its
                destination type ``[S]``, if the network needs them.
            combined: edge type → the first block's sources combined as `Network.first_combine`
                says, ``[D, F]``. Then ``x`` and ``degree`` need only have the first block's
                destinations, and its ``src`` is not looked at. None or empty: from ``x``.
            categories: node type → name → int64 ``[S]``.
        """

    def forward(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Tensor:
        """Outputs of the seeds, ``[B, out_features]``, from the arguments of `represent`."""
        return self.represent(blocks, x, degree, combined, categories)[self.target]


class Network(Stack, Encoder):
    """For tasks whose seeds are nodes, on blocks around them."""

    def __init__(self, config: FamilyConfig, family: Family, schema: Schema):
        wanted = _needed(schema, config.layers)
        widths, out = schema.widths, schema.out_features
        more = schema.relations, schema.edge_widths
        layers = stack(family, schema.etypes, widths, wanted, config.hidden, out, *more)
        super().__init__(config, family, schema, layers, config.layers - 1)
        self.schema = schema
        self.target = schema.target
        self._combine = family.combine

    @property
    def first_combine(self) -> CombineKind | None:
        """How the first layer's sources may be combined before `forward`; None: not at all.

        "mean", "sum" or "max" of the features of each destination's sampled sources, or "gcn",
        their sum weighted as `raygnn.models.convolutions.GCNConv` says, for every edge type alike.
        """
        if self._categories or (self.training and self.input_dropout.p):
            return None
        return self._combine

    def represent(
        self,
        blocks: Sequence[Block],
        x: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Hidden:
        h = self.inputs(x, categories)
        for number, block in enumerate(blocks):
            h = self.layer(number, block, h, degree, None if number else combined)
        return h


def _needed(schema: Schema, num_layers: int) -> list[set[str]]:
    """The node types that each layer has to compute: what the target depends on, no more.

    A parameter that no output uses would get no gradient, which data-parallel training takes for
    a fault.
    """
    wanted = [{schema.target, *schema.others}]
    for _ in range(num_layers - 1):
        wanted.insert(0, wanted[0] | {e[0] for e in schema.etypes if e[2] in wanted[0]})
    return wanted


class Direct(Encoder):
    """No message passing, ``model.kind: none``: what the nodes' features and learned rows say of
    them, and a linear layer on it.

    Args:
        head: whether there is the linear layer, which `forward` needs.
    """

    def __init__(self, schema: Schema, *, head: bool = True):
        super().__init__()
        self.schema = schema
        self.target = schema.target
        if head:
            self.out = nn.Linear(schema.widths[schema.target], schema.out_features)

    def forward(self, *inputs: Any) -> Tensor:
        out: Tensor = self.out(super().forward(*inputs))
        return out

    def represent(self, blocks: Sequence[Block], x: Hidden, *_: object) -> Hidden:
        """``x`` as it is."""
        assert not blocks
        return x
