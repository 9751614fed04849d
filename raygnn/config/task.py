"""The sections ``task`` and ``tasks``: what is predicted."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from raygnn.config.model import DecoderKind
from raygnn.config.values import Count, Fraction, Section, TaskName, Text

NODE_KINDS = ("node_classification", "node_regression")
EDGE_KINDS = ("edge_classification", "edge_regression", "link_prediction")
GRAPH_KINDS = ("graph_classification", "graph_regression")

CLASS_METRICS = ("accuracy", "f1", "roc_auc")
NUMBER_METRICS = ("mae", "rmse", "r2")
RANK_METRICS = ("mrr", "hits@1", "hits@3", "hits@10")

NUMBER_LOSSES = ("mse", "l1")
LINK_LOSSES = ("bce", "softmax", "margin", "self_adversarial")

DISTANCES = ("rotate", "transe")  # decoders whose scores are distances below 0
RELATIONAL = ("mlp", "distmult", "complex", "rotate", "transe")  # that read relations


class SplitConfig(Section):
    """Which edges are for validation and for test, of a graph that does not say so."""

    val: Fraction = Field(0.1, lt=1, description="Share of the edges to validate on.")
    test: Fraction = Field(0.1, lt=1, description="Share of the edges to test on.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the split.")


class NegativesConfig(Section):
    """The edges that are not there, which those that are must be told from."""

    kind: Literal["uniform", "degree", "in_batch", "local"] = Field(
        "uniform",
        description="Which nodes take the place of an end: uniform = any; degree = in proportion "
        "to their training edges to the power 0.75; in_batch = the ends of the step's other "
        "edges; local = those that the worker owns.",
    )
    number: Count = Field(
        512,
        description="How many nodes are drawn for a step and end; all edges of a step are told "
        "from the same (uniform, degree, local).",
    )
    ends: Literal["both", "source", "target"] = Field(
        "both", description="Which ends of an edge are replaced."
    )


class TaskConfig(Section):
    """What is predicted and how it is measured."""

    kind: Literal[
        "node_classification",
        "node_regression",
        "edge_classification",
        "edge_regression",
        "link_prediction",
        "graph_classification",
        "graph_regression",
    ] = Field(
        "node_classification",
        description="What is predicted: classes or numbers of nodes, of edges, or of whole graphs "
        "(graph.format: graphs), or which edges there are.",
    )
    target: Text = Field("label", description="Name of the array that holds the labels.")
    metric: (
        Literal[
            "accuracy",
            "f1",
            "roc_auc",
            "mae",
            "rmse",
            "r2",
            "mrr",
            "hits@1",
            "hits@3",
            "hits@10",
        ]
        | None
    ) = Field(
        None,
        description="Metric that selects the best weights: accuracy, f1 or roc_auc of classes, "
        "mae, rmse or r2 of numbers, mrr, hits@1, hits@3 or hits@10 of links; null = accuracy, "
        "mae or mrr.",
    )
    loss: Literal["mse", "l1", "bce", "softmax", "margin", "self_adversarial"] | None = Field(
        None,
        description="Loss of numbers: mse or l1; of links: bce (binary cross entropy), softmax "
        "(cross entropy of the edge among those that are not there), margin or self_adversarial "
        "(as of RotatE); null = mse, or softmax. That of classes is the cross entropy.",
    )
    ntype: Text | None = Field(
        None, description="Node type to predict for; null = the only one that has the target."
    )
    etype: Text | None = Field(
        None,
        description="Edge type to predict for, by its relation or as source:relation:target; "
        "null = the only one, or the only one that has the target or, of links, masks.",
    )
    split: SplitConfig | None = Field(
        None,
        description="Which edges are for validation and test where the edges have no masks; null = "
        "a tenth each. Edges between the same two nodes fall into the same split.",
    )
    exclude: Literal["reverse", "self", "none"] = Field(
        "reverse",
        description="Which edges messages do not pass along: reverse = those to be predicted (all "
        "for validation and test, and a step's own), and the same the other way round; self = "
        "without the latter; none = a step's own stay.",
    )
    reverse: Text | None = Field(
        None,
        description="Edge type that holds the edges of task.etype the other way round; null = the "
        "one that was made so (graph.reverse, or a table's reverse), else task.etype itself, if it "
        "joins nodes of one type.",
    )
    negatives: NegativesConfig = Field(
        NegativesConfig(),
        description="The edges that are not there, which those that are must be told from.",
    )
    margin: Annotated[float, Field(ge=0, le=10**6)] | None = Field(
        None,
        description="Of links: how far an edge's score is to be above those of others (margin; "
        "null = 1), or what is added to the scores of rotate and transe, which are distances below "
        "0 (bce, self_adversarial; null = 9).",
    )
    temperature: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        None,
        description="How much more the edges that are not there count the higher they score "
        "(self_adversarial); null = 1.",
    )

    @property
    def of_graphs(self) -> bool:
        """Whether whole graphs are the seeds."""
        return self.kind in GRAPH_KINDS

    @property
    def of_edges(self) -> bool:
        """Whether edges are the seeds."""
        return self.kind in EDGE_KINDS

    @property
    def of_links(self) -> bool:
        """Whether it is predicted which edges there are."""
        return self.kind == "link_prediction"

    @property
    def unit(self) -> str:
        """What is predicted for."""
        return "graph" if self.of_graphs else "edge" if self.of_edges else "node"

    @property
    def seeds(self) -> str:
        """The same in the plural."""
        return f"{self.unit}s"

    @property
    def classifies(self) -> bool:
        """Whether classes are predicted, rather than numbers or links."""
        return self.kind.endswith("_classification")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that suit the kind."""
        if self.of_links:
            return RANK_METRICS
        return CLASS_METRICS if self.classifies else NUMBER_METRICS

    @property
    def chosen_metric(self) -> str:
        """The metric that selects the best weights."""
        return self.metric or {RANK_METRICS: "mrr", CLASS_METRICS: "accuracy"}.get(
            self.metrics, "mae"
        )

    @property
    def chosen_loss(self) -> str:
        """The loss, of what is no class."""
        return self.loss or ("softmax" if self.of_links else "mse")


class OneOfTasks(TaskConfig):
    """One task of several: what ``task`` has, and what it is beside the others."""

    weight: float = Field(
        1.0, gt=0, le=10**6, description="What its loss counts for in the sum of all."
    )
    batch_factor: float = Field(
        1.0,
        gt=0,
        le=10**6,
        description="Its seeds of a step, as a multiple of `sampling.batch_size`.",
    )
    decoder: DecoderKind | None = Field(
        None, description="Of edges: how their ends are compared; null = `model.decoder`."
    )


Tasks: TypeAlias = Annotated[dict[TaskName, OneOfTasks], Field(min_length=1, max_length=64)]
