"""Users' own modules, called with DGL graphs or with tensors as PyG modules are."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raygnn.config.model import MODEL_FAMILIES, UserModelConfig
from raygnn.errors import ClassError, ConfigError
from raygnn.models.network import Encoder, Schema, Typed
from raygnn.models.typed_layers import Degrees, Hidden
from raygnn.sampling.batch import DEFAULT_NTYPE, Adjacency, Block, EdgeType, GraphBatch

C = TypeVar("C")


class _UserModule(nn.Module):
    """Holds a module constructed as ``Class(in_features, out_features, **model.args)``.

    With ``model.interface`` pyg or pyg_layers, parameters called ``in_channels``, ``out_channels``
    or ``metadata``, as PyG's, are passed by name instead. On a typed graph ``in_features`` is a
    dictionary by node type; ``metadata`` are node types and edge types.

    Raises:
        ConfigError: it cannot be imported or constructed, or ``model.categories`` is set, which
            only the built-in families embed.
    """

    def __init__(self, config: UserModelConfig, schema: Typed):
        super().__init__()
        if schema.categories:
            what, families = f"{config.kind} does not receive categories", ", ".join(MODEL_FAMILIES)
            remedy = "remove it and list the arrays in model.features, as numbers, or use a "
            remedy += f"built-in kind ({families})"
            raise ConfigError(what, where="model.categories", remedy=remedy)
        self.plain = list(schema.in_features) == [DEFAULT_NTYPE]
        given = self.features(dict(schema.in_features))
        cls: type[nn.Module] = load_class(config.kind, nn.Module, "torch.nn.Module", "model.kind")
        metadata = list(schema.in_features), list(schema.etypes)
        named = {"in_channels": given, "out_channels": schema.out_features, "metadata": metadata}
        names = () if config.takes_dgl else inspect.signature(cls).parameters
        named = {name: value for name, value in named.items() if name in names}
        first = () if named else (given, schema.out_features)
        words = ", ".join([*(named or ("in_features", "out_features")), "**model.args"])
        self.module = construct(cls, "model.args", words, *first, **{**named, **config.args})

    def features(self, x: dict[str, Any]) -> Any:
        """Return the module's argument: a single value on a homogeneous graph, else by type."""
        return x[DEFAULT_NTYPE] if self.plain else x


class UserModel(_UserModule, Encoder):
    """A user's module on DGL blocks.

    It is called as ``module(blocks, x)``: ``blocks`` is a list of DGL blocks from the inputs to
    the seeds, with the arrays of ``model.edge_features`` in their ``edata``, ``x`` the input
    features ``[S, F]``; it returns ``[B, out_features]``. On a typed graph ``x`` is a dictionary by
    node type, and so may be the result.
    """

    def __init__(self, config: UserModelConfig, schema: Schema):
        super().__init__(config, schema)
        self.target = schema.target
        self.shapes = schema.edge_shapes

    def represent(
        self, blocks: Sequence[Block], x: Hidden, degree: Degrees, *others: object
    ) -> Hidden:
        out = self.module([block.to_dgl(self.shapes) for block in blocks], self.features(x))
        return out if isinstance(out, dict) else {self.target: out}


class UserGraphModel(_UserModule):
    """A user's module for graph-level tasks.

    It is called as ``module(graph, x)``: ``graph`` is a batched DGL graph with the graphs' node
    and edge data, ``x`` the input features of its nodes ``[N, F]``, on a typed graph a dictionary
    by node type; it returns ``[B, out_features]``.
    """

    def forward(self, batch: GraphBatch) -> Tensor:
        return self.module(batch.to_dgl(), self.features(batch.x))


class _PygModule(_UserModule):
    """Holds a module that is called with tensors as PyG modules are.

    Lazy parameters are initialised by a pass over a graph with one node and one edge of each type.
    """

    def __init__(self, config: UserModelConfig, schema: Typed):
        super().__init__(config, schema)
        self.one_type = self.plain and len(schema.etypes) == 1
        self.layers = config.depth if config.interface == "pyg_layers" else 0
        if any(map(is_lazy, self.module.parameters())):
            self.eval()
            self._make_lazy(schema)
            self.train()

    @torch.no_grad()
    def _make_lazy(self, schema: Typed) -> None:
        one = torch.zeros(1, dtype=torch.int64)
        x = {t: torch.zeros(1, width) for t, width in schema.in_features.items()}
        rows = {e: torch.zeros(1, width) for e, width in schema.edge_features.items()}
        adj = {e: Adjacency(torch.tensor([0, 1]), one, rows=rows.get(e)) for e in schema.etypes}
        block = Block(adj, dict.fromkeys(x, 1), dict.fromkeys(x, 1))
        self._run(
            x,
            [block] * max(1, self.layers),
            **self._graphs(dict.fromkeys(x, one + 1), dict.fromkeys(x, 1)),
        )

    def _graphs(self, sizes: dict[str, Tensor], num: dict[str, int]) -> dict[str, Any]:
        return {}

    def _run(self, x: Hidden, blocks: Sequence[Block], **more: Any) -> Any:
        """Call the module with all blocks, or with the first one if it takes a single graph."""
        if self.layers:
            return self.module(self.features(x), [self._layer(block) for block in blocks], **more)
        index, attributes, _ = self._layer(blocks[0])
        if attributes is not None:
            more["edge_attr"] = attributes
        return self.module(self.features(x), index, **more)

    def _layer(self, block: Block) -> tuple[Any, Any, Any]:
        index = {e: torch.stack([adj.src, adj.dst]) for e, adj in block.adj.items()}
        rows = {e: adj.rows for e, adj in block.adj.items() if adj.rows is not None}
        size = {e: (block.num_src[e[0]], block.num_dst[e[2]]) for e in block.adj}
        return self._by_type(index), self._by_type(rows) if rows else None, self._by_type(size)

    def _by_type(self, values: dict[EdgeType, Any]) -> Any:
        """Return the module's argument: a single value on a homogeneous graph, else by type."""
        return next(iter(values.values())) if self.one_type else values


class PygModel(_PygModule, Encoder):
    """A user's module on a sampled graph, called as PyG modules are.

    ``interface: pyg``: it is called as ``module(x, edge_index)``, and with ``edge_attr=`` if there
    are ``model.edge_features``: ``x`` are the features of all nodes of the sampled graph
    ``[S, F]``, the seeds first; ``edge_index`` int64 ``[2, E]``, sources and destinations, ordered
    by destination; ``edge_attr`` ``[E, F]``. It returns a row for each node ``[S, out_features]``,
    or for each seed. A node's neighbours are sampled once, so that all layers see the same graph.

    ``interface: pyg_layers``: it is called as ``module(x, layers)``, with ``(edge_index, edge_attr,
    size)`` for each layer from the input nodes to the seeds; ``size`` are the numbers of sources
    and of destinations, which are the first sources. It returns ``[B, out_features]``.

    On a graph of several types each of these is a dictionary by node or edge type.
    """

    def __init__(self, config: UserModelConfig, schema: Schema):
        super().__init__(config, schema)
        self.target = schema.target

    def represent(
        self, blocks: Sequence[Block], x: Hidden, degree: Degrees, *others: object
    ) -> Hidden:
        out = self._run(x, blocks)
        rows = out if isinstance(out, dict) else {self.target: out}
        nodes, seeds = blocks[0].num_src, blocks[-1].num_dst
        return {
            t: h[: seeds[t]] if isinstance(h, Tensor) and h.shape[:1] == (nodes.get(t),) else h
            for t, h in rows.items()
        }


class PygGraphModel(_PygModule):
    """A user's module for graph-level tasks, on graphs batched as in PyG.

    It is called as ``module(x, edge_index, batch=…)``, and with ``edge_attr=`` if there are
    ``model.edge_features``: see `PygModel`; ``batch`` int64 ``[N]`` is the graph of each node. If
    its ``forward`` has a parameter ``batch_size``, this is the number of graphs. It returns
    ``[B, out_features]``.
    """

    def forward(self, batch: GraphBatch) -> Tensor:
        return self._run(batch.x, [batch.block], **self._graphs(batch.sizes, batch.num_nodes))

    def _graphs(self, sizes: dict[str, Tensor], num: dict[str, int]) -> dict[str, Any]:
        graph = {
            t: torch.repeat_interleave(counts, output_size=num[t]) for t, counts in sizes.items()
        }
        more: dict[str, Any] = {"batch": self.features(graph)}
        if "batch_size" in inspect.signature(self.module.forward).parameters:
            more["batch_size"] = len(next(iter(sizes.values())))
        return more


def load_class(spec: str, base: type[C], name_of_base: str, where: str) -> type[C]:
    """Import ``"package.module:Class"``, named by the key ``where``; the working directory is on
    the path. Raises ClassError if there is no such class, or it is not derived from ``base``, whose
    public name is ``name_of_base``."""
    cls = _load(spec, where)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        remedy = f"derive the class from {name_of_base}"
        raise ClassError(f"{spec} is not a {name_of_base}", where=where, remedy=remedy)
    return cls


def load_function(spec: str, where: str) -> Callable[..., Any]:
    """Import ``"package.module:function"``, named by the key ``where``, as `load_class` does.
    Raises ClassError if there is no such module or function."""
    function = _load(spec, where)
    if not callable(function) or isinstance(function, type):
        found = type(function).__name__
        raise ClassError(f"{spec} is a {found}", where=where, remedy="name a function")
    return cast("Callable[..., Any]", function)


def _load(spec: str, where: str) -> object:
    module, _, name = spec.partition(":")
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        what, remedy = f"{spec} could not be imported: {error}", "make it importable on every node"
        raise ClassError(what, where=where, remedy=remedy) from error


def construct(cls: Callable[..., C], where: str, given: str, /, *first: Any, **args: Any) -> C:
    """Construct an object of a user's class from arguments of the key ``where``, described by
    ``given``. Raises ConfigError if it has other parameters."""
    try:
        return cls(*first, **args)
    except TypeError as error:
        what = f"{cls.__name__} could not be constructed: {error}"
        remedy = f"it is called as {cls.__name__}({given}); its signature is "
        raise ConfigError(what, where=where, remedy=f"{remedy}{inspect.signature(cls)}") from error
