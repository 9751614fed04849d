"""A user's own modules."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raygnn.config.model import MODEL_FAMILIES, UserModelConfig
from raygnn.errors import ConfigError
from raygnn.models.graph_network import GraphSchema
from raygnn.models.network import Encoder, Schema, Typed
from raygnn.models.typed_layers import Degrees, Hidden
from raygnn.sampling.batch import DEFAULT_NTYPE, Block, GraphBatch


class ClassError(ConfigError):
    """``model.kind`` names no class that can be imported, or none that is a module."""


class _UserModule(nn.Module):
    """Holds a module that was constructed as ``Class(in_features, out_features, **model.args)``.

    On a typed graph ``in_features`` is a dictionary by node type.

    Raises:
        ConfigError: it cannot be imported or constructed, or categories are to be embedded, which
            only the built-in families do.
    """

    def __init__(self, config: UserModelConfig, schema: Typed):
        super().__init__()
        if schema.categories:
            raise ConfigError(
                f"{config.kind} would not be given the categories",
                where="model.categories",
                remedy="leave it out and name the arrays in model.features, as numbers, or take "
                f"a built-in kind ({', '.join(MODEL_FAMILIES)})",
            )
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

    def features(self, x: dict[str, Tensor]) -> Any:
        """``x`` as the module takes it: a tensor where there is one, unnamed, node type."""
        return x[DEFAULT_NTYPE] if self.plain else x


class UserModel(_UserModule, Encoder):
    """A user's own module, given DGL blocks.

    It is called as ``module(blocks, x)``: ``blocks`` is a list of DGL blocks from the inputs to
    the seeds, with the arrays of ``model.edge_features`` in their ``edata``, ``x`` the input
    features ``[S, F]``; it returns ``[B, out_features]``. On a typed graph ``x`` is a dictionary by
    node type, and it may return one, too.
    """

    def __init__(self, config: UserModelConfig, schema: Schema):
        super().__init__(config, schema)
        self.target = schema.target
        self.shapes = schema.edge_shapes

    def represent(
        self, blocks: Sequence[Block], x: Hidden, degree: Degrees, *others: object
    ) -> Hidden:
        assert not any(others)  # what is combined, or categories
        out = self.module([block.to_dgl(self.shapes) for block in blocks], self.features(x))
        return out if isinstance(out, dict) else {self.target: out}


class UserGraphModel(_UserModule):
    """A user's own module for tasks on whole graphs.

    It is called as ``module(graph, x)``: ``graph`` is a batched DGL graph with the graphs' node
    and edge data, ``x`` the input features of its nodes ``[N, F]``, on a typed graph a dictionary
    by node type; it returns ``[B, out_features]``.
    """

    def __init__(self, config: UserModelConfig, schema: GraphSchema):
        super().__init__(config, schema)

    def forward(self, batch: GraphBatch) -> Tensor:
        out: Tensor = self.module(batch.to_dgl(), self.features(batch.x))
        return out


def load_class(kind: str) -> type[nn.Module]:
    """Import ``"package.module:Class"``; the working directory is on the path.

    Raises:
        ClassError: no such module or class, or not a ``torch.nn.Module``.
    """
    module, _, name = kind.partition(":")
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ClassError(
            f"{kind} could not be imported: {error}",
            where="model.kind",
            remedy="give package.module:Class, importable on every node",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ClassError(
            f"{kind} is not a torch.nn.Module",
            where="model.kind",
            remedy="derive the class from torch.nn.Module",
        )
    return cls
