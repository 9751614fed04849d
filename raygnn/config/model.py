"""Section ``model``: the network and its embedding tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from raygnn.config.problems import Problem
from raygnn.config.values import (
    USER_CLASS,
    Conditions,
    Count,
    DifferentNames,
    JsonValues,
    Names,
    Section,
    Text,
    UserClass,
    by_kind,
    classes_of,
    tag_of,
    to_tuple,
)
from raygnn.config.yaml_text import KeyPath
from raygnn.errors import ConfigError

DecoderKind: TypeAlias = Literal["dot", "cosine", "mlp", "distmult", "complex", "rotate", "transe"]
NO_LAYERS = "none"  # model.kind without message passing


class EmbeddingConfig(Section):
    """Embedding tables: a learned row for each node."""

    dim: Count
    """Width of an embedding row."""
    ntypes: DifferentNames | None = None
    """Node types with an embedding table, joined to their features if they have some; null = those
    without features."""
    optimizer: Literal["adam", "adagrad"] = "adam"
    """Sparse optimizer, which updates only the rows that a batch reads: torch's SparseAdam, or its
    Adagrad with sparse gradients."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the embedding rows, which follows train.schedule; null = train.lr."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay as in AdamW: each step first multiplies the rows that its batch reads,
    and no others, by 1 - lr × weight_decay."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of embedding rows."""
    init: Annotated[float, Field(gt=0)] | None = None
    """Rows are initialised uniformly between -init and init; null = sqrt(3 / dim), for a mean
    squared length of 1."""

    @property
    def bound(self) -> float:
        """Bound of the initial values."""
        return (3 / self.dim) ** 0.5 if self.init is None else self.init

    def covers(self, ntype: str, has_inputs: bool) -> bool:
        """Return True if a node type has an embedding table; ``has_inputs``: True if it has
        features or categories that the model reads."""
        return not has_inputs if self.ntypes is None else ntype in self.ntypes


class _FixedWidth:
    """Width, dropout and columns of a model without keys for them."""

    hidden: ClassVar[int] = 64
    dropout: ClassVar[float] = 0.5
    categories: ClassVar[dict[str, int]] = {}
    columns: ClassVar[str] = "raw"
    ages: ClassVar[dict[str, int]] = {}


class _Model(Section):
    kind: str
    """gcn, sage, gat, gatv2, gin, rgcn, hgt, han, lightgcn, none (no message passing: a node is its
    features and its embedding row), or package.module:Class of your own torch.nn.Module."""
    features: Names | None = "feat"
    """Name of the node array that is the input, or a list of names; a node type uses those that it
    has; null = none. int8 arrays are scaled by NAME_scale if it exists."""
    embedding: EmbeddingConfig | None = None
    """Embedding tables: learned rows for nodes, see below; null = none."""
    decoder: DecoderKind | None = None
    """Score of an edge from the outputs of its two ends, in tasks on edges; null = mlp for
    classification and regression; for links distmult if edges have relations, else dot."""
    relation: Text | None = None
    """Edge array with each edge's relation; null = `relation` if it exists, else the edge type
    alone."""
    decoder_features: Names | None = None
    """Edge features of the predicted edges, an array or a list of arrays, which the decoder reads
    besides their ends; null = none."""
    pair_history: bool = False
    """Temporal link prediction: the decoder (mlp) also reads how many earlier edges the two ends
    have with each other and with any node, and the time since the last ones."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Input arrays, without categories."""
        return _listed(self.features)

    @property
    def node_arrays(self) -> dict[str, str]:
        """Node arrays that the model reads → the key that names them."""
        keys = ("features", "categories", "ages")
        given: list[Any] = [self.feature_names, *(getattr(self, key) for key in keys[1:])]
        return {name: f"model.{key}" for key, names in zip(keys, given) for name in names}

    @property
    def decoder_feature_names(self) -> tuple[str, ...]:
        """Edge arrays that the decoder reads."""
        return _listed(self.decoder_features)

    @property
    def edge_feature_names(self) -> tuple[str, ...]:
        """Edge features, without categories."""
        return _listed(getattr(self, "edge_features", None))

    @property
    def edge_category_widths(self) -> dict[str, int]:
        """Embedded edge arrays → width of their embedding."""
        widths: dict[str, int] = getattr(self, "edge_categories", {})
        return widths

    @property
    def time_width(self) -> int:
        """Width of the encoding of an edge's age; 0 = none."""
        return getattr(self, "time_encoding", None) or 0

    @property
    def depth(self) -> int:
        """Number of message-passing layers."""
        return getattr(self, "layers", 0)

    @property
    def takes_dgl(self) -> bool:
        """True if the model receives DGL graphs, with all of their arrays."""
        return getattr(self, "interface", "") == "dgl"

    @property
    def draws_once(self) -> bool:
        """True if all layers share one sampled graph, with a node's neighbours sampled once."""
        return getattr(self, "interface", "") == "pyg"


class NoLayersConfig(_FixedWidth, _Model):
    """Model without message passing: a node is its features and its embedding row."""

    kind: Literal["none"]


class _Layers(_Model):
    layers: int = Field(2, ge=1, le=64)
    """Number of message-passing layers."""


class LightGcnConfig(_FixedWidth, _Layers):
    """LightGCN: layers without weights on embedding tables."""

    kind: Literal["lightgcn"]

    @property
    def hidden(self) -> int:  # type: ignore[override]
        """Width of all rows."""
        return self.embedding.dim if self.embedding else 0

    @property
    def feature_names(self) -> tuple[str, ...]:
        return ()

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        yield from self.unused(at, "features", why="lightgcn reads embedding tables only")
        if self.embedding is None:
            message = "lightgcn trains embedding tables only, and model.embedding is not set"
            yield Problem((*at, "embedding"), message, "set model.embedding.dim, such as 64")


class _EdgeFeatures(_Layers):
    """Models that read edge features."""

    edge_features: Names | None = None
    """Edge features that messages read: an edge array or a list of them; an edge type uses those
    that it has. null = none."""


class UserModelConfig(_FixedWidth, _EdgeFeatures):
    """User-defined torch.nn.Module."""

    kind: UserClass
    args: JsonValues = Field({})
    """Keyword arguments of your own class (package.module:Class)."""
    interface: Literal["dgl", "pyg", "pyg_layers"] = "dgl"
    """Input of your own class: dgl = DGL blocks; pyg = x and edge_index of one sampled graph, as
    PyG modules take them; pyg_layers = x and one edge_index per layer, from its sources to its
    targets."""


class FamilyConfig(_Layers):
    """Keys of all built-in models."""

    hidden: Count = 64
    """Width of a hidden layer; for gat, gatv2, hgt and han over all heads."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """Dropout of a layer's inputs; for tables, which have few columns, 0.1 unless it is set."""
    input_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of the input features; null = dropout. With 0, gcn, sage and gin aggregate the
    features of the first layer without copying them."""
    residual: bool = False
    """Add a layer's input to its output."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation after each hidden layer, and inside gin's; batch = over the nodes of all
    workers."""
    categories: dict[Text, Count] = Field({})
    """Categorical node features: integer array → width of its embedding, which is joined to the
    other features."""
    ages: dict[Text, Count] = Field({})
    """Relative times: integer node array of times → width of a learned encoding of the time from
    each to its seed's time (temporal sampling), which is joined to the other features. A later time
    counts as the seed's."""
    columns: Literal["raw", "learned"] = "raw"
    """Input of the first layer: raw = features and embedded categories side by side; learned = a
    column encoder of these for each node type, to the width hidden."""
    activation: Literal["relu", "elu"] | None = None
    """Activation of hidden layers; null = the model's usual one."""
    readout: Literal["sum", "mean", "max"] | None = None
    """Pooling of a graph's nodes in graph-level tasks; null = sum for gin, else mean."""
    recompute: bool = False
    """Activation checkpointing: keep only the layers' inputs for the backward pass and recompute
    the rest; less memory, more time, the same gradients."""

    @property
    def first_dropout(self) -> float:
        """Dropout of the input features."""
        return self.dropout if self.input_dropout is None else self.input_dropout

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        named = {
            "features": self.feature_names,
            "categories": self.categories,
            "ages": self.ages,
            "edge_features": self.edge_feature_names,
            "edge_categories": self.edge_category_widths,
        }
        for one, other in (*combinations(list(named)[:3], 2), list(named)[3:]):
            for name in sorted({*named[one]} & {*named[other]}):
                message = f"{name} is in model.{one} and in model.{other}"
                remedy = "keep it in one: categories are embedded, features are read as numbers"
                yield Problem((*at, other), message, remedy)


class GcnConfig(FamilyConfig):
    """Graph convolutional network."""

    kind: Literal["gcn"]


class _EdgeFamily(FamilyConfig, _EdgeFeatures):
    """Built-in models whose messages read edge features."""

    edge_categories: dict[Text, Count] = Field({})
    """Categorical edge features: integer array → width of its embedding, which is joined to
    edge_features."""

    time_encoding: Count | None = None
    """Width of a learned encoding of an edge's age (temporal sampling), which is joined to
    edge_features; null = none."""


class GinConfig(_EdgeFamily):
    """Graph isomorphism network."""

    kind: Literal["gin"]


class SageConfig(_EdgeFamily):
    """GraphSAGE."""

    kind: Literal["sage"]
    aggregator: Literal["mean", "sum", "max"] = "mean"
    """Aggregation of neighbours; a sum over sampled neighbours is scaled to the full degree, but
    not with `sampling.time`."""


class _Heads(_EdgeFamily):
    heads: int = Field(8, ge=1, le=1024)
    """Attention heads of a hidden layer, or (hgt) of each layer."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        yield from super()._conflicts(at)
        if self.hidden % self.heads:
            message = f"hidden {self.hidden} does not divide into {self.heads} heads"
            remedy = "make model.hidden a multiple of model.heads: it is the width over all heads"
            yield Problem((*at, "hidden"), message, remedy)


class HgtConfig(_Heads):
    """Heterogeneous graph transformer."""

    kind: Literal["hgt"]


class AttentionConfig(_Heads):
    """Models with attention between neighbours."""

    kind: Literal["gat", "gatv2", "han"]
    out_heads: int = Field(1, ge=1, le=1024)
    """Attention heads of the last layer, averaged; not in graph-level tasks."""
    attn_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of attention weights; null = dropout."""


class RgcnConfig(_EdgeFamily):
    """Relational graph convolutional network."""

    read_if: ClassVar[Conditions] = {"bases": ("regularizer", "basis", "block")}

    kind: Literal["rgcn"]
    regularizer: Literal["basis", "block", "none"] = "basis"
    """Decomposition of a relation's weights: basis = a combination of matrices that relations
    share, block = blocks on the diagonal, none = one matrix per relation."""
    bases: Count = 8
    """Number of shared matrices, or of blocks."""
    mean_over: Literal["relation", "all"] = "relation"
    """Average neighbours per relation, or over all relations of an edge type."""


ModelConfig: TypeAlias = Annotated[
    Annotated[GcnConfig, Tag("gcn")]
    | Annotated[SageConfig, Tag("sage")]
    | Annotated[AttentionConfig, Tag("gat")]
    | Annotated[AttentionConfig, Tag("gatv2")]
    | Annotated[GinConfig, Tag("gin")]
    | Annotated[RgcnConfig, Tag("rgcn")]
    | Annotated[HgtConfig, Tag("hgt")]
    | Annotated[AttentionConfig, Tag("han")]
    | Annotated[LightGcnConfig, Tag("lightgcn")]
    | Annotated[NoLayersConfig, Tag(NO_LAYERS)]
    | Annotated[UserModelConfig, Tag(USER_CLASS)],
    Discriminator(lambda value: _tag(value)),
    by_kind(lambda: MODELS),
]
MODELS = classes_of(ModelConfig)
MODEL_FAMILIES = tuple(
    kind for kind, section in MODELS.items() if issubclass(section, FamilyConfig | LightGcnConfig)
)


Patterns: TypeAlias = Annotated[tuple[Text, ...], BeforeValidator(to_tuple)]


class InitConfig(Section):
    """Initial weights from another run (transfer learning, fine-tuning).

    Patterns such as `layers.0.*` match names of weights in `checkpoints/selected.pt`, and
    `rows.TYPE` the embedding table of a node type.
    """

    run: Text
    """Finished run whose selected weights are used: its name in storage, path or URI. Weights are
    matched by name and shape, embedding rows by your node ids."""
    exclude: Patterns = ()
    """Patterns of weights and tables that keep their random values."""
    freeze: Patterns = ()
    """Patterns of weights and tables that do not train."""
    lr_scale: dict[Text, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field({})
    """Pattern of weights → factor of their learning rate; the first pattern that matches counts."""

    def matches(self, key: str, name: str) -> bool:
        """Return True if a pattern of ``exclude``, ``freeze`` or ``lr_scale`` matches a name."""
        return any(_fits(name, pattern) for pattern in getattr(self, key))

    def scale(self, name: str) -> float:
        """Return the learning-rate factor of a weight."""
        found = (v for pattern, v in self.lr_scale.items() if _fits(name, pattern))
        return next(found, 1.0)

    def check(self, key: str, names: Iterable[str]) -> None:
        """Raise ConfigError if a pattern of ``key`` matches none of the names."""
        known = list(names)
        for pattern in getattr(self, key):
            if not any(_fits(name, pattern) for name in known):
                raise ConfigError(
                    f"{pattern!r} matches no weight",
                    where=f"train.init.{key}",
                    remedy=f"use names, or patterns of names, among {', '.join(known)}",
                )


def _fits(name: str, pattern: str) -> bool:
    return any(fnmatchcase(each, pattern) for each in (name, name.removeprefix("encoder.")))


def read_model(**keys: Any) -> ModelConfig:
    """Return a model section. Raises pydantic.ValidationError for a wrong key or value."""
    model: ModelConfig = TypeAdapter(ModelConfig).validate_python(keys)
    return model


def _listed(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _tag(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return None if kind is None else tag_of(kind)
