"""The section ``model``: the network, and the rows that are learned for nodes."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from raygnn.config.values import (
    NO_LAYERS,
    Count,
    JsonValues,
    ModelKind,
    Names,
    Section,
    Text,
    to_tuple,
)


class EmbeddingConfig(Section):
    """A row of numbers for each node, which training learns."""

    dim: Count = Field(description="Width of a learned row.")
    ntypes: Annotated[tuple[Text, ...], BeforeValidator(to_tuple), Field(min_length=1)] | None = (
        Field(
            None,
            description="Node types that have learned rows, joined to their features if they have "
            "some; null = those without features.",
        )
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


DecoderKind: TypeAlias = Literal["dot", "mlp", "distmult", "complex", "rotate", "transe"]


class ModelConfig(Section):
    """The network."""

    kind: ModelKind = Field(
        description="gcn, sage, gat, gatv2, gin, rgcn, hgt, han, none (no message passing: a node "
        "is what its features and learned rows say), or package.module:Class of your own "
        "torch.nn.Module."
    )
    hidden: Count = Field(
        64, description="Width of a hidden layer; for gat, gatv2, hgt and han over all heads."
    )
    layers: int = Field(2, ge=1, le=64, description="Number of message-passing layers.")
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of a layer's inputs dropped.")
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
    heads: int = Field(
        8,
        ge=1,
        le=1024,
        description="Attention heads of a hidden layer (gat, gatv2, han), or of each layer (hgt).",
    )
    out_heads: int = Field(
        1,
        ge=1,
        le=1024,
        description="Attention heads of the last layer, averaged (gat, gatv2, han; nodes).",
    )
    attn_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Share of attention weights dropped (gat, gatv2, han); null = dropout."
    )
    residual: bool = Field(False, description="Add a layer's input to its output.")
    norm: Literal["none", "layer", "batch"] = Field(
        "none",
        description="Normalisation after each hidden layer, and within gin's; batch: by the nodes "
        "of all workers.",
    )
    features: Names = Field(
        "feat",
        description="Name of the node array that is the input, or a list of names; a node type "
        "takes those that it has. int8 arrays are scaled by NAME_scale if that is there.",
    )
    embedding: EmbeddingConfig | None = Field(
        None, description="Rows that are learned for nodes, see below; null = none."
    )
    categories: dict[Text, Count] = Field(
        {},
        description="Node arrays of whole numbers that stand for categories: name → width of "
        "their learned embedding, which is joined to the other features.",
    )
    activation: Literal["relu", "elu"] | None = Field(
        None, description="Activation of hidden layers; null = as usual for the kind."
    )
    aggregator: Literal["mean", "sum", "max"] = Field(
        "mean", description="How neighbours are combined (sage)."
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
    regularizer: Literal["basis", "block", "none"] = Field(
        "basis",
        description="What a relation's weights are made of (rgcn): basis = a sum of a few "
        "matrices that relations share, block = a few blocks on the diagonal, none = a matrix of "
        "its own.",
    )
    bases: Count = Field(8, description="How many matrices are shared, or how many blocks (rgcn).")
    mean_over: Literal["relation", "all"] = Field(
        "relation",
        description="Neighbours are averaged for each relation, or over all relations of an edge "
        "type (rgcn).",
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
    args: JsonValues = Field(
        {}, description="Keyword arguments for your own class (package.module:Class)."
    )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The input arrays, categories left out."""
        return (self.features,) if isinstance(self.features, str) else self.features

    @property
    def depth(self) -> int:
        """Message-passing layers that there are."""
        return 0 if self.kind == NO_LAYERS else self.layers

    @property
    def first_dropout(self) -> float:
        """Share of the input features dropped."""
        return self.dropout if self.input_dropout is None else self.input_dropout
