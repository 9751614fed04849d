"""What is learnt and by which network: the sections ``task`` and ``model``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raygnn.config.section import Section
from raygnn.config.types import Count, JsonValues, ModelKind, Names, Text


class TaskConfig(Section):
    """What is predicted and how it is measured."""

    kind: Literal["node_classification", "graph_classification", "graph_regression"] = Field(
        "node_classification",
        description="What is predicted: classes of nodes, or classes or numbers of whole graphs "
        "(graph.format: graphs).",
    )
    target: Text = Field("label", description="Name of the array that holds the labels.")
    metric: Literal["accuracy", "f1", "roc_auc", "mae", "rmse", "r2"] | None = Field(
        None,
        description="Metric that selects the best weights: accuracy, f1 or roc_auc of classes, "
        "mae, rmse or r2 of numbers; null = accuracy, or mae.",
    )
    loss: Literal["mse", "l1"] | None = Field(
        None, description="Loss of numbers; null = mse. That of classes is the cross entropy."
    )
    ntype: Text | None = Field(
        None, description="Node type to classify; null = the only one that has the target."
    )

    @property
    def of_graphs(self) -> bool:
        """Whether whole graphs are the seeds."""
        return self.kind in ("graph_classification", "graph_regression")

    @property
    def classifies(self) -> bool:
        """Whether classes are predicted, rather than numbers."""
        return self.kind != "graph_regression"

    @property
    def chosen_metric(self) -> str:
        """The metric that selects the best weights."""
        return self.metric or ("accuracy" if self.classifies else "mae")


class ModelConfig(Section):
    """The network."""

    kind: ModelKind = Field(
        description="gcn, sage, gat, gatv2, gin, rgcn, hgt, han, or package.module:Class of your "
        "own torch.nn.Module."
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
        description="Normalisation after each hidden layer, and within gin's.",
    )
    features: Names = Field(
        "feat",
        description="Name of the node array that is the input, or a list of names; a node type "
        "takes those that it has. int8 arrays are scaled by NAME_scale if that is there.",
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
    def first_dropout(self) -> float:
        """Share of the input features dropped."""
        return self.dropout if self.input_dropout is None else self.input_dropout
