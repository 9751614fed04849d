"""Layers on a typed graph; a homogeneous graph has one edge type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raygnn import compat
from raygnn.models.convolutions import CombineKind, LinearConv, full_degree, wide
from raygnn.models.linear import affine
from raygnn.models.message_passing import NATIVE, Kernels
from raygnn.models.norm import BatchNorm, drop_biases
from raygnn.sampling.batch import Block, EdgeType

Degrees = Mapping[EdgeType, Tensor]
Combined = Mapping[EdgeType, Tensor]
Hidden = dict[str, Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """Widths of a layer and its position in the stack.

    Attributes:
        in_features: node type → width of the input.
        out_features: width of the output.
        last: its outputs are the network's own.
        relations: edge type → number of relations of its edges; missing types have one.
        edges: edge type → width of edge features (`Adjacency.rows`); missing types have none.
    """

    in_features: dict[str, int]
    out_features: int
    last: bool
    relations: Mapping[EdgeType, int] = field(default_factory=dict)
    edges: Mapping[EdgeType, int] = field(default_factory=dict)


class Layer(nn.Module, ABC):
    """One layer of all edge types.

    Args:
        etypes: the edge types into the node types that it computes.
        self_types: node types with a transform of the node itself: all for families whose
            convolution omits it, else those without an edge type onto themselves.

    Attributes:
        relu: apply ReLU to the output; set by `takes_relu`.
    """

    def __init__(self, etypes: Sequence[EdgeType], spec: LayerSpec, self_types: Sequence[str]):
        super().__init__()
        self.relu = False
        self.spec, self.width = spec, spec.out_features
        self.etypes, self.self_types = list(etypes), list(self_types)

    @abstractmethod
    def forward(
        self, block: Block, h: Hidden, degree: Degrees, combined: Combined | None = None
    ) -> Hidden:
        """Map node type → ``[S, F]`` to node type → ``[D, F_out]``: see `Stack.layer`."""

    def biases(self) -> list[str]:
        """Return the names of the parameters that add the same row to all output nodes of a
        type."""
        return []

    def narrows(self, width: int) -> bool:
        """Return True if the rows of `TypedLayer.project` are narrower than ``width``."""
        return False

    def takes_relu(self) -> bool:
        """Let the layer apply ReLU as part of a product; return False if it cannot."""
        return False

    def outputs(self) -> list[str]:
        """Return the node types of the layer's output."""
        return sorted({e[2] for e in self.etypes} | set(self.self_types))

    def inputs(self) -> list[str]:
        """Return the node types of the layer's input."""
        return sorted({e[0] for e in self.etypes} | set(self.outputs()))

    def into(self, ntype: str) -> list[EdgeType]:
        """Return the edge types that end at ``ntype``."""
        return [e for e in self.etypes if e[2] == ntype]

    def heads(self, block: Block, h: Hidden) -> tuple[Hidden, Hidden]:
        """Return ``h`` and, for the output node types, its rows of the destinations."""
        h, h_dst = dict(h), {}
        for ntype in self.outputs():
            if ntype in h:
                h[ntype], h_dst[ntype] = with_head(h[ntype], block.num_dst[ntype])
        return h, h_dst


# etype, spec → the convolution of that edge type
ConvFactory = Callable[[EdgeType, LayerSpec], nn.Module]


@dataclass(frozen=True)
class Family:
    """Properties of a built-in model family.

    Attributes:
        layer: builds a layer from the arguments of `Layer`.
        own: their convolutions omit the node itself.
        activation: default activation of hidden layers.
        combine: how all convolutions of the first layer aggregate sources; None for those that
            need the sources themselves.
    """

    layer: Callable[[Sequence[EdgeType], LayerSpec, Sequence[str]], Layer]
    own: bool
    activation: str
    combine: CombineKind | None = None


class TypedLayer(Layer):
    """One convolution per edge type, summed per destination type, plus the node itself.

    Args:
        given: arguments of `Layer`.
        conv: builds the convolutions.
        inner: width of the convolutions' sum; None: the layer's own.
        rest: maps ``out_features`` to a module applied to the sum and its `Block.counted`.
    """

    def __init__(
        self,
        *given: Any,
        conv: ConvFactory,
        inner: int | None = None,
        rest: Callable[[int], nn.Module] | None = None,
    ):
        super().__init__(*given)
        etypes, spec, inner = self.etypes, self.spec, inner or self.width
        self.convs = nn.ModuleDict({key(*e): conv(e, spec) for e in etypes})
        self.own = linears({key(t): spec.in_features[t] for t in self.self_types}, inner)
        joined = {e[2] for e in etypes if isinstance(self.convs[key(*e)], LinearConv)}
        self.bias = nn.ParameterDict(
            {
                key(t): nn.Parameter(torch.zeros(inner))
                for t in sorted(joined | set(self.self_types))
            }
        )
        self.rest = nn.ModuleDict({key(t): rest(self.width) for t in self.outputs() if rest})
        if any(isinstance(module, BatchNorm) for module in self.rest.modules()):
            drop_biases(self, self._of_sums())

    def _of_sums(self) -> list[str]:
        convs = [name for name, conv in self.convs.items() if hasattr(conv, "bias")]
        return [*(f"bias.{name}" for name in self.bias), *(f"convs.{name}.bias" for name in convs)]

    def biases(self) -> list[str]:
        return [f"rest.{name}.second.bias" for name in self.rest] or self._of_sums()

    def takes_relu(self) -> bool:
        self.relu = not self.rest
        return self.relu

    def narrows(self, width: int) -> bool:
        widths: dict[str, int] = {}
        for etype in self.etypes:
            conv = self.convs[key(*etype)]
            if not (isinstance(conv, LinearConv) and conv.projects()):
                return False
            widths[etype[0]] = widths.get(etype[0], 0) + len(conv.weight)
        return max(widths.values(), default=width) < width

    def project(self, ntype: str, rows: Tensor) -> dict[EdgeType, Tensor]:
        """Project rows ``[N, F]`` of ``ntype`` for each edge type from it, ``[N, F_out]`` each,
        from which `forward` computes the same output."""
        convs: dict[EdgeType, Any] = {e: self.convs[key(*e)] for e in self.etypes if e[0] == ntype}
        return {etype: conv.project(rows) for etype, conv in convs.items()}

    def forward(
        self,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        projected: Combined | None = None,
    ) -> Hidden:
        """See `Layer`.

        Args:
            projected: from `project`, of the block's sources; then ``h`` need only have the
                destinations.
        """
        # inputs of the weights are joined, so that one matrix product gives a node type's output
        rows: dict[str, list[Tensor]] = {t: [] for t in self.outputs()}
        weights: dict[str, list[Tensor]] = {t: [] for t in rows}
        messages: dict[str, list[Tensor]] = {t: [] for t in rows}
        h, h_dst = self.heads(block, h)
        for ntype in self.self_types:
            rows[ntype].append(h_dst[ntype])
            weights[ntype].append(weight_of(self.own, ntype))
        for etype in self.etypes:
            source, _, target = etype
            conv: Any = self.convs[key(*etype)]
            adj, degrees = block.adj[etype], degree.get(etype)
            if projected:
                messages[target].append(conv.of_projected(adj, projected[etype], degrees))
                continue
            if combined:
                done = combined[etype]
            elif isinstance(conv, LinearConv) and not conv.weight_first(adj, h[source]):
                done = conv.combine(adj, h[source], degrees)
            else:
                messages[target].append(conv(adj, h[source], h_dst[target], degrees))
                continue
            rows[target].append(conv.finish(done, adj, h_dst[target], degrees))
            weights[target].append(conv.weight)
        out = {t: self._sum(t, rows[t], weights[t], messages[t]) for t in rows}
        if not self.rest:
            return out
        return {t: self.rest[key(t)](v, block.counted.get(t)) for t, v in out.items()}

    def _sum(
        self, ntype: str, rows: list[Tensor], weights: list[Tensor], messages: list[Tensor]
    ) -> Tensor:
        bias = self.bias.get(key(ntype), None)
        if rows and not messages:
            return affine(rows, weights, bias, relu=self.relu)
        if rows:
            out = affine(rows, weights, bias)
        else:
            out, messages = messages[0], messages[1:]
            if bias is not None:
                out = out + bias.to(out.dtype)
        for message in messages:
            out = out + message
        return F.relu(out) if self.relu else out


class LightGCNLayer(Layer):
    """Layer of LightGCN (He et al., SIGIR 2020), which has no weights.

    All edge types are one graph: ``h'(v) = sum over edges u → v of h(u) / sqrt(d(u) d(v))``, where
    ``d`` counts a node's in-edges of all types in the *complete* graph. A sampled neighbourhood is
    scaled up to its full size, so that the expectation over samples is the full-graph layer.

    Rows between layers are ``h`` and the sum of the rows of all layers so far, side by side. The
    first layer's input is both; the last layer returns the mean over the input and all layers.

    Args:
        layers: of the network.
    """

    kernels: Kernels = NATIVE

    def __init__(self, *given: Any, layers: int):
        super().__init__(*given)
        self.dim, self.last, self.layers = self.spec.out_features, self.spec.last, layers
        self.width = self.dim if self.last else 2 * self.dim

    def narrows(self, width: int) -> bool:
        return self.dim < width

    def project(self, ntype: str, rows: Tensor) -> dict[EdgeType, Tensor]:
        """Return the part of rows ``[N, F]`` that `forward` reads of sources, for each edge type
        from ``ntype``."""
        return {e: rows[:, : self.dim].contiguous() for e in self.etypes if e[0] == ntype}

    def forward(
        self,
        block: Block,
        h: Hidden,
        degree: Degrees,
        combined: Combined | None = None,
        projected: Combined | None = None,
    ) -> Hidden:
        h, h_dst = self.heads(block, h)
        now = {} if projected else {t: self.project(t, rows) for t, rows in h.items()}
        messages: dict[str, list[Tensor]] = {t: [] for t in self.outputs()}
        counts: dict[str, list[Tensor]] = {t: [] for t in messages}
        for etype in self.etypes:
            source, _, target = etype
            adj, rows = block.adj[etype], (projected or now[source])[etype]
            norm = _rsqrt([wide(d, rows) for e, d in degree.items() if e[2] == source], rows)
            weight = None if norm is None else norm.index_select(0, adj.src)
            message = self.kernels.aggregate(adj, rows, "sum", weight)
            count = full_degree(adj, degree[etype], message)
            scale = count / adj.degree.clamp(min=1)
            messages[target].append(message * scale.to(message.dtype).unsqueeze(1))
            counts[target].append(count)
        out: Hidden = {}
        for ntype, rows in h_dst.items():
            summed = rows[:, -self.dim :]
            norm = _rsqrt(counts[ntype], rows)
            step = torch.zeros_like(summed)
            if norm is not None:
                step = torch.stack(messages[ntype]).sum(0) * norm.unsqueeze(1)
            summed = summed + step
            out[ntype] = (
                summed / (self.layers + 1) if self.last else torch.cat([step, summed], dim=1)
            )
        return out


def _rsqrt(degrees: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """Return 1 / sqrt of a node type's in-degrees, summed over edge types, where 0 counts as 1, in
    the dtype of ``like``; None without edge types."""
    if not degrees:
        return None
    return torch.stack(list(degrees)).sum(0).clamp(min=1).rsqrt().to(like.dtype)


def key(*names: str) -> str:
    """Return a module's key, without dots and unlike attributes of ModuleDict ("items", …)."""
    return ":".join(("", *names)).replace(".", "·")


def linears(widths: Mapping[str, int], out_features: int, *, bias: bool = False) -> nn.ModuleDict:
    """Build a linear layer for each key; ``widths``: key → width of its input."""
    return nn.ModuleDict({k: nn.Linear(n, out_features, bias=bias) for k, n in widths.items()})


def weight_of(modules: nn.ModuleDict, *names: str) -> Tensor:
    """Return the weight of one of `linears`."""
    module: Any = modules[key(*names)]
    return module.weight


def with_head(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``x [S, F]`` and ``x[:rows]``, whose gradient is added in place to the gradient of
    ``x``: torch's gradient of a slice, as large as ``x``, costs more than the sum. So the gradient
    of ``x`` must not be shared: only convolutions may read ``x``, not, say, ``x + y``."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x, x[:rows]
    whole, head = _WithHead.apply(x, rows)
    return whole, head


class _WithHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return x.view_as(x), x[:rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, whole: Tensor | None, head: Tensor | None) -> tuple[Tensor | None, None]:
        if head is None:
            return whole, None
        if whole is None:
            whole = head.new_zeros(ctx.shape)
        elif compat.is_view(whole) or not whole.is_contiguous():
            whole = whole.clone()
        # allocated by the convolutions' backward pass, so it may be written to
        whole[: len(head)] += head
        return whole, None
