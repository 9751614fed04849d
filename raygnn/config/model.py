"""The section ``model``: the network, and the rows that are learned for nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, TypeAdapter

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
    class_problems,
    classes_of,
    tag_of,
)
from raygnn.config.yaml_text import KeyPath

DecoderKind: TypeAlias = Literal["dot", "mlp", "distmult", "complex", "rotate", "transe"]
NO_LAYERS = "none"  # the model.kind without message passing

_KIND = (
    "gcn, sage, gat, gatv2, gin, rgcn, hgt, han, none (no message passing: a node is what its "
    "features and learned rows say), or package.module:Class of your own torch.nn.Module."
)


class EmbeddingConfig(Section):
    """A row of numbers for each node, which training learns."""

    dim: Count = Field(description="Width of a learned row.")
    ntypes: DifferentNames | None = Field(
        None,
        description="Node types that have learned rows, joined to their features if they have "
        "some; null = those without features.",
    )
    optimizer: Literal["adam", "adagrad"] = Field(
        "adam",
        description="How rows are updated, only where a batch reads them: as torch's SparseAdam, "
        "or its Adagrad with sparse gradients.",
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Learning rate of the rows, which follows train.schedule; null = train.lr.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled decay, as AdamW's: a step first multiplies the rows that its batch "
        "reads, and no others, by 1 - lr × weight_decay.",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of the numbers of learned rows dropped in training."
    )
    init: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Rows begin uniform between -init and init; null = sqrt(3 / dim), with which "
        "their mean square length is 1.",
    )

    @property
    def bound(self) -> float:
        """What the numbers lie within at first."""
        return (3 / self.dim) ** 0.5 if self.init is None else self.init

    def covers(self, ntype: str, has_inputs: bool) -> bool:
        """Whether a node type has learned rows.

        Args:
            has_inputs: whether it has features or categories that the model reads.
        """
        return not has_inputs if self.ntypes is None else ntype in self.ntypes


class _FixedWidth:
    """What decoders and heads read of a network whose width is not set here."""

    hidden: ClassVar[int] = 64
    dropout: ClassVar[float] = 0.5
    categories: ClassVar[dict[str, int]] = {}


class _Model(Section):
    kind: str = Field(description=_KIND)
    features: Names = Field(
        "feat",
        description="Name of the node array that is the input, or a list of names; a node type "
        "takes those that it has. int8 arrays are scaled by NAME_scale if that is there.",
    )
    embedding: EmbeddingConfig | None = Field(
        None, description="Rows that are learned for nodes, see below; null = none."
    )
    decoder: DecoderKind | None = Field(
        None,
        description="How the outputs for the two ends of an edge become its score, in tasks on "
        "edges; null = mlp for classes and numbers; for links distmult where edges have "
        "relations, else dot.",
    )
    relation: Text | None = Field(
        None,
        description="Edge array that holds each edge's relation; null = `relation` if there is "
        "one, else the edge type alone.",
    )
    decoder_features: Names | None = Field(
        None,
        description="Name of an array, or a list of names, of the edges whose classes or numbers "
        "are predicted, which the decoder is given beside their ends; null = none.",
    )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The input arrays, categories left out."""
        return _listed(self.features)

    @property
    def decoder_feature_names(self) -> tuple[str, ...]:
        """The arrays of edges that their decoder reads."""
        return _listed(self.decoder_features)

    @property
    def edge_feature_names(self) -> tuple[str, ...]:
        """The edge arrays that are input, categories left out."""
        return ()

    @property
    def edge_category_widths(self) -> dict[str, int]:
        """The edge arrays that are embedded → width of their embedding."""
        return {}

    @property
    def time_width(self) -> int:
        """Of the encoding of how long ago edges were; 0 = there is none."""
        return 0

    @property
    def depth(self) -> int:
        """Message-passing layers that there are."""
        return 0

    @property
    def takes_dgl(self) -> bool:
        """Whether it is given DGL's graphs, with all of their arrays."""
        return getattr(self, "interface", "") == "dgl"

    @property
    def draws_once(self) -> bool:
        """Whether all layers see one sampled graph, in which a node draws its neighbours once."""
        return getattr(self, "interface", "") == "pyg"


class NoLayersConfig(_FixedWidth, _Model):
    """No network: nodes are what their features and learned rows say."""

    kind: Literal["none"] = Field(description=_KIND)


class _Layers(_Model):
    layers: int = Field(2, ge=1, le=64, description="Number of message-passing layers.")

    @property
    def depth(self) -> int:
        return self.layers


class _EdgeFeatures(_Layers):
    """The models that read arrays of edges."""

    edge_features: Names | None = Field(
        None,
        description="Name of the edge array that messages read, or a list of names; an edge type "
        "takes those that it has. Null = none.",
    )

    @property
    def edge_feature_names(self) -> tuple[str, ...]:
        return _listed(self.edge_features)


class UserModelConfig(_FixedWidth, _EdgeFeatures):
    """A class of your own."""

    kind: UserClass = Field(description=_KIND)
    args: JsonValues = Field(
        {}, description="Keyword arguments for your own class (package.module:Class)."
    )
    interface: Literal["dgl", "pyg", "pyg_layers"] = Field(
        "dgl",
        description="What your own class is given: dgl = DGL blocks; pyg = x and edge_index of one "
        "sampled graph, as PyG's modules take them; pyg_layers = x and an edge_index for each "
        "layer, between its sources and its destinations.",
    )

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        return class_problems(self.kind, (*at, "kind"))


class FamilyConfig(_Layers):
    """What the families of networks have in common."""

    hidden: Count = Field(
        64, description="Width of a hidden layer; for gat, gatv2, hgt and han over all heads."
    )
    dropout: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Share of a layer's inputs dropped; where it is not given, 0.1 for tables, "
        "which have few columns.",
    )
    input_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Share of the input features dropped; null = dropout. With 0, gcn, sage and "
        "gin combine the features of the first layer's neighbours without copying them out.",
    )
    kernels: Literal["auto", "torch", "dgl"] = Field(
        "auto",
        description="Message passing in plain torch or by DGL's kernels; auto = the faster one "
        "that the device has.",
    )
    residual: bool = Field(False, description="Add a layer's input to its output.")
    norm: Literal["none", "layer", "batch"] = Field(
        "none",
        description="Normalisation after each hidden layer, and within gin's; batch: by the nodes "
        "of all workers.",
    )
    categories: dict[Text, Count] = Field(
        {},
        description="Node arrays of whole numbers that stand for categories: name → width of "
        "their learned embedding, which is joined to the other features.",
    )
    activation: Literal["relu", "elu"] | None = Field(
        None, description="Activation of hidden layers; null = as usual for the kind."
    )
    readout: Literal["sum", "mean", "max"] | None = Field(
        None,
        description="How the nodes of a graph become one row, in tasks on whole graphs; null = "
        "sum for gin, else mean.",
    )
    recompute: bool = Field(
        False,
        description="Keep only the layers' inputs for the backward pass, which computes the rest "
        "again: less memory, more time, the same gradients.",
    )

    @property
    def first_dropout(self) -> float:
        """Share of the input features dropped."""
        return self.dropout if self.input_dropout is None else self.input_dropout

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        for name in sorted(set(self.feature_names) & set(self.categories)):
            yield Problem(
                (*at, "categories"),
                f"{name} is in model.features and in model.categories",
                "keep it in one of them: categories are embedded, features are taken as numbers",
            )


class GcnConfig(FamilyConfig):
    """The graph convolutional network."""

    kind: Literal["gcn"] = Field(description=_KIND)


class _EdgeFamily(FamilyConfig, _EdgeFeatures):
    """The families whose messages read the edges' features."""

    edge_categories: dict[Text, Count] = Field(
        {},
        description="Edge arrays of whole numbers that stand for categories: name → width of "
        "their learned embedding, which is joined to edge_features.",
    )

    time_encoding: Count | None = Field(
        None,
        description="Width of a learned encoding of how long ago an edge was (sampling.time), "
        "which is joined to edge_features; null = none.",
    )

    @property
    def edge_category_widths(self) -> dict[str, int]:
        return self.edge_categories

    @property
    def time_width(self) -> int:
        return self.time_encoding or 0

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        yield from super()._conflicts(at)
        for name in sorted(set(self.edge_feature_names) & set(self.edge_categories)):
            yield Problem(
                (*at, "edge_categories"),
                f"{name} is in model.edge_features and in model.edge_categories",
                "keep it in one of them: categories are embedded, features are taken as numbers",
            )


class GinConfig(_EdgeFamily):
    """The graph isomorphism network."""

    kind: Literal["gin"] = Field(description=_KIND)


class SageConfig(_EdgeFamily):
    """GraphSAGE."""

    kind: Literal["sage"] = Field(description=_KIND)
    aggregator: Literal["mean", "sum", "max"] = Field(
        "mean",
        description="How neighbours are combined; a sum over sampled ones is scaled to all.",
    )


class _Heads(_EdgeFamily):
    heads: int = Field(
        8,
        ge=1,
        le=1024,
        description="Attention heads of a hidden layer, or (hgt) of each layer.",
    )

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        yield from super()._conflicts(at)
        if self.hidden % self.heads:
            message = f"hidden {self.hidden} does not divide into {self.heads} heads"
            remedy = "make model.hidden a multiple of model.heads: it is the width over all heads"
            yield Problem((*at, "hidden"), message, remedy)


class HgtConfig(_Heads):
    """The heterogeneous graph transformer."""

    kind: Literal["hgt"] = Field(description=_KIND)


class AttentionConfig(_Heads):
    """The families with attention between neighbours."""

    kind: Literal["gat", "gatv2", "han"] = Field(description=_KIND)
    out_heads: int = Field(
        1,
        ge=1,
        le=1024,
        description="Attention heads of the last layer, averaged; not in tasks on whole graphs.",
    )
    attn_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Share of attention weights dropped; null = dropout."
    )


class RgcnConfig(_EdgeFamily):
    """The relational GCN."""

    read_if: ClassVar[Conditions] = {"bases": ("regularizer", "basis", "block")}

    kind: Literal["rgcn"] = Field(description=_KIND)
    regularizer: Literal["basis", "block", "none"] = Field(
        "basis",
        description="What a relation's weights are made of: basis = a sum of a few "
        "matrices that relations share, block = a few blocks on the diagonal, none = a matrix of "
        "its own.",
    )
    bases: Count = Field(8, description="How many matrices are shared, or how many blocks.")
    mean_over: Literal["relation", "all"] = Field(
        "relation",
        description="Neighbours are averaged for each relation, or over all relations of an edge "
        "type.",
    )


ModelConfig: TypeAlias = Annotated[
    Annotated[GcnConfig, Tag("gcn")]
    | Annotated[SageConfig, Tag("sage")]
    | Annotated[AttentionConfig, Tag("gat")]
    | Annotated[AttentionConfig, Tag("gatv2")]
    | Annotated[GinConfig, Tag("gin")]
    | Annotated[RgcnConfig, Tag("rgcn")]
    | Annotated[HgtConfig, Tag("hgt")]
    | Annotated[AttentionConfig, Tag("han")]
    | Annotated[NoLayersConfig, Tag(NO_LAYERS)]
    | Annotated[UserModelConfig, Tag(USER_CLASS)],
    Discriminator(lambda value: _tag(value)),
    by_kind(lambda: MODELS),
]
MODELS = classes_of(ModelConfig)
MODEL_FAMILIES = tuple(
    kind for kind, section in MODELS.items() if issubclass(section, FamilyConfig)
)


def read_model(**keys: Any) -> ModelConfig:
    """The section with these keys.

    Raises:
        pydantic.ValidationError: a key or a value is wrong.
    """
    model: ModelConfig = TypeAdapter(ModelConfig).validate_python(keys)
    return model


def _listed(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _tag(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return None if kind is None else tag_of(kind)
