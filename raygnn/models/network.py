"""Networks of typed layers with outputs of nodes or graphs, and the model without layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raygnn.config.model import FamilyConfig
from raygnn.models.convolutions import CombineKind
from raygnn.models.linear import Dropout, join
from raygnn.models.message_passing import NATIVE, Kernels, Reduce, widened
from raygnn.models.norm import activation, drop_biases, norm, normalise, repeated
from raygnn.models.typed_layers import (
    Combined,
    Degrees,
    Family,
    Hidden,
    Layer,
    LayerSpec,
    key,
    weight_of,
)
from raygnn.sampling.batch import Adjacency, Block, EdgeType, GraphBatch

Categories = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Typed:
    """Schema of a network's data.

    Attributes:
        in_features: node type → width of its input features; 0 if it has none.
        etypes: all edge types.
        out_features: width of an output (number of classes, or of targets).
        categories: node type → name → number of categories and width of their embedding; 0
            categories are the time since an array's times (``model.ages``).
        relations: edge type → number of relations of its edges, for types with
            `Adjacency.relation`; in graph-level tasks the relation is the edge type.
        buckets: node type and name of the categories in which 0 stands for unknown categories.
        edge_features: edge type → width of edge features (`Adjacency.rows`), if it has any.
        edge_categories: edge type → name → number of categories and width of their embedding.
        edge_times: edge type → width of the time encoding, for types with `Adjacency.elapsed`.
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
        """Node type → width of features and embedded categories side by side."""
        return {t: n + _width(self.categories.get(t, {})) for t, n in self.in_features.items()}

    @property
    def edge_widths(self) -> dict[EdgeType, int]:
        """Edge type → width of the edge inputs of each layer."""
        given = self.edge_features, self.edge_times
        return {
            e: sum(w.get(e, 0) for w in given) + _width(self.edge_categories.get(e, {}))
            for e in self.etypes
        }


def _width(named: Mapping[str, tuple[int, int]]) -> int:
    return sum(width for _, width in named.values())


@dataclass(frozen=True)
class Schema(Typed):
    """Schema of a task whose seeds are nodes.

    Attributes:
        target: node type of the outputs.
        others: further node types with outputs, of the same width.
        edge_shapes: edge type → name → row shape of each array in `Adjacency.rows`; for a user's
            module.
    """

    target: str = field(kw_only=True)
    others: tuple[str, ...] = ()
    edge_shapes: dict[EdgeType, dict[str, tuple[int, ...]]] = field(default_factory=dict)


class GraphSchema(Typed):
    """Schema of a graph-level task."""


class Stack(nn.Module):
    """Dropout → typed layer → (residual, normalisation, activation) for each layer.

    Categories are embedded and joined to the other features before the first layer, categories of
    edges for every layer. With ``model.columns: learned`` an encoder follows. Dropout of nodes is
    ``model.input_dropout`` before the first layer and ``model.dropout`` before the others.

    Args:
        wanted: node types that each layer computes.
        out_features: width of the last layer's output, which is the network's own: no residual,
            normalisation and activation follow it. None: it is a hidden layer.
    """

    def __init__(
        self,
        config: FamilyConfig,
        family: Family,
        schema: Typed,
        wanted: Sequence[set[str]],
        out_features: int | None = None,
    ):
        super().__init__()
        layers = _layers(config, family, schema, wanted, out_features)
        hidden = layers if out_features is None else layers[:-1]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            nn.ModuleDict({key(t): norm(config.norm, layer.width) for t in layer.outputs()})
            for layer in hidden
        )
        if config.norm == "batch":
            drop_biases(
                self, (f"layers.{n}.{b}" for n, layer in enumerate(hidden) for b in layer.biases())
            )
        # an embedding table that the first layer does not read would get no gradient
        read = layers[0].inputs()
        self._categories = {t: named for t, named in schema.categories.items() if t in read}
        self.embeddings = _tables({(t,): named for t, named in self._categories.items()})
        for ntype, name in schema.buckets:
            if ntype in self._categories:  # without influence until it is trained
                nn.init.zeros_(weight_of(self.embeddings, ntype, name)[0])
        into = {etype for layer in layers for etype in layer.etypes}
        self._edge_categories = {e: n for e, n in schema.edge_categories.items() if e in into}
        self.edge_embeddings = _tables(self._edge_categories)
        times = {e: width for e, width in schema.edge_times.items() if e in into}
        self._timed = set(times)
        self.clock: Any = TimeEncoding(max(times.values())) if times else None
        self.encoders = nn.ModuleDict()
        if config.columns == "learned":
            wide = {t: width for t, width in schema.widths.items() if width and t in read}
            self.encoders.update({key(t): ColumnEncoder(n, config.hidden) for t, n in wide.items()})
        self.dropout = Dropout(config.dropout)
        self.input_dropout = Dropout(config.first_dropout)
        kind = config.activation or family.activation
        self.activation = activation(kind)
        self.residual = config.residual
        # layers that apply ReLU themselves, if nothing comes between
        direct = kind == "relu" and config.norm == "none" and not config.residual
        self._activated = [direct and layer.takes_relu() for layer in hidden]
        self.recompute = config.recompute

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def computes(self, number: int) -> list[str]:
        """Return the node types that a layer computes, in a fixed order."""
        return cast("Layer", self.layers[number]).outputs()

    def embedded_widths(self, ntype: str) -> dict[str, int]:
        """Return name → width of a node type's embedded categories, in the order of `embedded`."""
        return {name: width for name, (_, width) in self._categories.get(ntype, {}).items()}

    def embedded(self, x: Hidden, categories: Categories | None) -> Hidden:
        """Return features and embedded categories side by side.

        Args:
            x: node type → ``[S, F]``; no entry for a type with categories alone.
            categories: node type → name → int64 ``[S]``, from 0; None = ``x`` has them already.
        """
        if categories is None:
            return x
        h = dict(x)
        for ntype, named in self._categories.items():
            numbers, parts = categories[ntype], [h[ntype]] if ntype in h else []
            parts += [self.embeddings[key(ntype, name)](numbers[name]) for name in named]
            h[ntype] = join(parts)
        return h

    def inputs(self, x: Hidden, categories: Categories | None = None) -> Hidden:
        """Return the first layer's input: what `embedded` returns, encoded as ``[S, hidden]`` if
        there is an encoder."""
        h, encoders = self.embedded(x, categories), self.encoders
        return {t: encoders[key(t)](v) if key(t) in encoders else v for t, v in h.items()}

    def layer(
        self,
        number: int,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        projected: Combined | None = None,
    ) -> Hidden:
        """Apply one layer. With ``model.recompute`` only its input is stored for the backward pass
        (Chen et al., "Training deep nets with sublinear memory cost", 2016).

        Args:
            h: node type → ``[S, F]``; for the first layer from `inputs`.
            degree: edge type → ``[≥ S]``.
            combined: see `Encoder.represent`; only for the first layer.
            projected: see `TypedLayer.forward`; only if the layer `narrows`, without gradients.

        Returns:
            node type → ``[D, F_out]``.
        """
        given = number, block, h, degree, combined
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return self._layer(*given, projected)
        return checkpoint(
            self._layer, *given, use_reentrant=False, context_fn=lambda: (nullcontext(), repeated())
        )

    def _layer(self, number: int, block: Block, h: Hidden, *given: Any) -> Hidden:
        dropout = self.dropout if number else self.input_dropout
        h = {t: dropout(v) for t, v in h.items()}
        layer = cast("Layer", self.layers[number])
        out: Hidden = layer(self._embedded(layer, block), h, *given)
        if number == len(self.norms) or self._activated[number]:
            return out
        for ntype, v in out.items():
            if self.residual and ntype in h and h[ntype].shape[1] == v.shape[1]:
                v = v + h[ntype][: v.shape[0]]
            module = cast("nn.ModuleDict", self.norms[number])[key(ntype)]
            out[ntype] = self.activation(normalise(module, v, block.counted.get(ntype)))
        return out

    def _embedded(self, layer: Layer, block: Block) -> Block:
        """Return the block with embedded categories and times appended to its edge features."""
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
            if etype in self._timed:
                parts.append(self.clock(given.elapsed))
            if parts:
                adj[etype] = given.with_rows(join(parts))
        return replace(block, adj=adj)


def _tables(categories: Mapping[Any, Mapping[str, tuple[int, int]]]) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            key(*names, name): nn.Embedding(count, width) if count else TimeEncoding(width)
            for names, named in categories.items()
            for name, (count, width) in named.items()
        }
    )


class ColumnEncoder(nn.Module):
    """Encoder of a node type's columns: a linear layer, then a residual block.

    As the ResNet encoder of Robinson et al., "RelBench" (NeurIPS 2024), after Gorishniy et al.,
    "Revisiting deep learning models for tabular data" (NeurIPS 2021), with one block. A linear
    layer of features side by side is the sum of an embedding of each.
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.block = nn.Sequential(
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Encode ``[N, width]`` as ``[N, hidden]``."""
        h = self.first(x)
        return h + self.block(h)


class TimeEncoding(nn.Module):
    """Time encoding ``cos(w · log(1 + t) + b)`` of durations t, with learned w and b.

    As in Xu et al., "Inductive representation learning on temporal graphs" (ICLR 2020), but of the
    logarithm: other units only shift the phase, and a learned w keeps its magnitude, where a step
    of 0.001 would turn a period of a month into one of minutes.

    Args:
        width: of the encoding. Initial periods are factors of e^(π / 2) to e^(32 π) of t.
    """

    def __init__(self, width: int):
        super().__init__()
        self.rate = nn.Parameter(2.0 ** torch.linspace(2, -4, width))
        self.phase = nn.Parameter(torch.zeros(width))

    def forward(self, elapsed: Tensor) -> Tensor:
        """Encode int64 ``[E]``, at least 0, as ``[E, width]`` in the parameters' dtype."""
        length = elapsed.float().log1p().unsqueeze(1)
        angle = length * self.rate.float() + self.phase.float()
        return angle.cos().to(self.rate.dtype)


class Encoder(nn.Module, ABC):
    """A model that computes a row for each node: outputs of its target type, or rows of several
    types for a decoder or heads."""

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
        """Return node type → outputs of the last block's destinations, ``[D, …]``.

        Args:
            blocks: from the input nodes to the seeds.
            x: node type → features of the input nodes ``[S, F]``.
            degree: edge type → in-degrees in the complete graph of the input nodes of its
                destination type ``[S]``, if the network reads them.
            combined: edge type → the first block's sources, aggregated by `Network.first_combine`,
                ``[D, F]``. Then ``x`` and ``degree`` need only have the first block's
                destinations, and its ``src`` is not read. None or empty: aggregate ``x``.
            categories: node type → name → int64 ``[S]``.
        """

    def forward(self, *inputs: Any) -> Tensor:
        """Return outputs of the seeds, ``[B, out_features]``; arguments as in `represent`."""
        return self.represent(*inputs)[self.target]


class Network(Stack, Encoder):
    """Network on blocks around nodes."""

    def __init__(self, config: FamilyConfig, family: Family, schema: Schema):
        wanted = _needed(schema, config.layers)
        super().__init__(config, family, schema, wanted, schema.out_features)
        self.schema = schema
        self.target = schema.target
        self._combine = family.combine

    @property
    def first_combine(self) -> CombineKind | None:
        """Aggregation of every edge type's sampled sources that may precede `forward`; None if it
        may not. "gcn" is the weighted sum of `raygnn.models.convolutions.GCNConv`."""
        if self._categories or len(self.encoders) or (self.training and self.input_dropout.p):
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


def first_widths(config: FamilyConfig, schema: Typed) -> dict[str, int]:
    """Return node type → width of the first layer's input."""
    learned = config.columns == "learned"
    return {t: config.hidden if learned and n else n for t, n in schema.widths.items()}


def _layers(
    config: FamilyConfig,
    family: Family,
    schema: Typed,
    wanted: Sequence[set[str]],
    out_features: int | None,
) -> list[Layer]:
    widths, etypes = first_widths(config, schema), schema.etypes
    with_loop = {e[2] for e in etypes if e[0] == e[2]}
    self_types = {t for t in widths if family.own or t not in with_loop}
    layers: list[Layer] = []
    for number, targets in enumerate(wanted, 1):
        last = out_features if number == len(wanted) else None
        given = schema.relations, schema.edge_widths
        spec = LayerSpec(widths, last or config.hidden, last is not None, *given)
        into = [e for e in etypes if e[2] in targets]
        layers.append(family.layer(into, spec, sorted(self_types & targets)))
        widths = dict.fromkeys(layers[-1].outputs(), layers[-1].width)
    return layers


def _needed(schema: Schema, num_layers: int) -> list[set[str]]:
    """Return the node types that each layer must compute: those that the target depends on. A
    parameter that no output uses would get no gradient, which data-parallel training rejects."""
    wanted = [{schema.target, *schema.others}]
    for _ in range(num_layers - 1):
        wanted.insert(0, wanted[0] | {e[0] for e in schema.etypes if e[2] in wanted[0]})
    return wanted


class Direct(Encoder):
    """Model without message passing (``model.kind: none``): features and node embeddings, and a
    linear layer. ``head``: add the linear layer, which `forward` needs."""

    def __init__(self, schema: Schema, *, head: bool = True):
        super().__init__()
        self.schema = schema
        self.target = schema.target
        if head:
            self.out = nn.Linear(schema.widths[schema.target], schema.out_features)

    def forward(self, *inputs: Any) -> Tensor:
        return self.out(super().forward(*inputs))

    def represent(self, blocks: Sequence[Block], x: Hidden, *_: object) -> Hidden:
        """Return ``x``."""
        assert not blocks
        return x


def members(sizes: Tensor, num: int) -> Adjacency:
    """Build edges from each of ``num`` nodes, ordered by graph, to its graph; ``sizes``: number of
    nodes of each, int64 ``[B]``."""
    return Adjacency(F.pad(sizes.cumsum(0), (1, 0)), torch.arange(num, device=sizes.device))


def pool(graphs: Adjacency, h: Tensor, reduce: Reduce, kernels: Kernels = NATIVE) -> Tensor:
    """Pool the nodes of each graph, ``[N, F]`` → ``[B, F]``: 0 without nodes. fp16 and bf16 are
    summed and returned in fp32. ``graphs``: from `members`."""
    return kernels.aggregate(graphs, widened(h), reduce)


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
        super().__init__(config, family, schema, [set(widths)] * num)
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
        """See `represent`. ``block``: all graphs, as `GraphBatch.block`; ``graphs``: node type →
        from `members`."""
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
