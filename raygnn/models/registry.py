"""From the config's ``model`` section to a module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raygnn.config.schema import ModelConfig
from raygnn.errors import ConfigError
from raygnn.models.layers import Combine, GATConv, GCNConv, SAGEConv
from raygnn.models.network import (
    Categories,
    Combined,
    ConvFactory,
    Degrees,
    LayerSpec,
    Network,
    Schema,
    activation,
    stack,
)
from raygnn.sampling.batch import DEFAULT_NTYPE, Block, EdgeType


def build_model(config: ModelConfig, schema: Schema) -> nn.Module:
    """The network that the config names.

    Raises:
        ConfigError: a user's class that cannot be imported or constructed.
    """
    family = FAMILIES.get(config.kind)
    return family(config, schema) if family else UserModel(config, schema)


def needs_degree(config: ModelConfig) -> bool:
    """Whether batches must carry the degrees of the whole graph."""
    return config.kind == "gcn"


def _network(
    config: ModelConfig,
    schema: Schema,
    conv: ConvFactory,
    *,
    own: bool,
    act: str,
    combine: Combine | None,
) -> Network:
    return Network(
        stack(schema, config.layers, config.hidden, conv, own=own),
        schema=schema,
        dropout=config.dropout,
        input_dropout=config.first_dropout,
        activation=activation(config.activation or act),
        norm=config.norm,
        residual=config.residual,
        needs_degree=needs_degree(config),
        combine=combine,
    )


def gcn(config: ModelConfig, schema: Schema) -> Network:
    """Kipf & Welling, "Semi-supervised classification with graph convolutional networks"."""

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        same = etype[0] == etype[2]
        return GCNConv(
            spec.in_features[etype[0]],
            spec.out_features,
            same_type=same,
            kernels=config.kernels,
        )

    return _network(config, schema, conv, own=False, act="relu", combine="gcn")


def sage(config: ModelConfig, schema: Schema) -> Network:
    """Hamilton, Ying & Leskovec, "Inductive representation learning on large graphs"."""

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        return SAGEConv(
            spec.in_features[etype[0]],
            spec.out_features,
            reduce=config.aggregator,
            kernels=config.kernels,
        )

    return _network(config, schema, conv, own=True, act="relu", combine=config.aggregator)


def _gat(config: ModelConfig, schema: Schema, *, dynamic: bool) -> Network:
    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        heads = config.out_heads if spec.last else config.heads
        return GATConv(
            spec.in_features[etype[0]],
            spec.in_features.get(etype[2], 0),
            spec.out_features if spec.last else config.hidden // heads,
            heads=heads,
            mean_heads=spec.last,
            attn_dropout=config.dropout if config.attn_dropout is None else config.attn_dropout,
            dynamic=dynamic,
            same_type=etype[0] == etype[2],
            kernels=config.kernels,
        )

    return _network(config, schema, conv, own=False, act="elu", combine=None)


def gat(config: ModelConfig, schema: Schema) -> Network:
    """Veličković et al., "Graph attention networks"."""
    return _gat(config, schema, dynamic=False)


def gatv2(config: ModelConfig, schema: Schema) -> Network:
    """Brody, Alon & Yahav, "How attentive are graph attention networks?"."""
    return _gat(config, schema, dynamic=True)


FAMILIES: dict[str, Callable[[ModelConfig, Schema], nn.Module]] = {
    "gcn": gcn,
    "sage": sage,
    "gat": gat,
    "gatv2": gatv2,
}


class UserModel(nn.Module):
    """A user's own module, given DGL blocks.

    It is constructed as ``Class(in_features, out_features, **model.args)`` and called as
    ``module(blocks, x)``: ``blocks`` is a list of DGL blocks from the inputs to the seeds, ``x``
    the input features ``[S, F]``; it returns ``[B, out_features]``. On a typed graph
    ``in_features`` and ``x`` are dictionaries by node type, and it may return one, too.

    Raises:
        ConfigError: it cannot be imported or constructed, or categories are to be embedded, which
            only the built-in families do.
    """

    def __init__(self, config: ModelConfig, schema: Schema):
        super().__init__()
        if schema.categories:
            raise ConfigError(
                f"{config.kind} would not be given the categories",
                where="model.categories",
                remedy="leave it out and name the arrays in model.features, as numbers, or take "
                f"a built-in kind ({', '.join(FAMILIES)})",
            )
        self.target = schema.target
        self.plain = list(schema.in_features) == [DEFAULT_NTYPE]
        given: Any = dict(schema.in_features)
        if self.plain:
            given = given[DEFAULT_NTYPE]
        cls = load_class(config.kind)
        try:
            self.module = cls(given, schema.out_features, **config.args)
        except TypeError as error:
            raise ConfigError(
                f"{config.kind} could not be constructed: {error}",
                where="model.args",
                remedy=f"it is called as {cls.__name__}(in_features, out_features, **model.args); "
                f"its signature is {inspect.signature(cls)}",
            ) from error

    def forward(
        self,
        blocks: Sequence[Block],
        x: dict[str, Tensor],
        degree: Degrees,
        combined: Combined | None = None,
        categories: Categories | None = None,
    ) -> Tensor:
        assert not combined
        assert not categories
        h: Any = x[DEFAULT_NTYPE] if self.plain else x
        out = self.module([block.to_dgl() for block in blocks], h)
        return out[self.target] if isinstance(out, dict) else out


def load_class(kind: str) -> type[nn.Module]:
    """Import ``"package.module:Class"``; the working directory is on the path.

    Raises:
        ConfigError: no such module or class, or not a ``torch.nn.Module``.
    """
    module, _, name = kind.partition(":")
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{kind} could not be imported: {error}",
            where="model.kind",
            remedy="give package.module:Class, importable on every node",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(
            f"{kind} is not a torch.nn.Module",
            where="model.kind",
            remedy="derive the class from torch.nn.Module",
        )
    return cls
