"""The sections ``task`` and ``tasks``: what is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from raygnn.config.model import DecoderKind
from raygnn.config.problems import Problem, dotted
from raygnn.config.values import (
    DATABASE,
    NO_DATABASE,
    Conditions,
    Count,
    InputPath,
    JsonValues,
    Names,
    Section,
    ShareOrMoment,
    TaskName,
    Text,
    UserClass,
    UserFunction,
    by_kind,
    classes_of,
    in_utc,
    or_say,
    to_tuple,
)
from raygnn.config.yaml_text import KeyPath
from raygnn.errors import ConfigError

COMPLEX = ("complex", "rotate")  # decoders of complex vectors
DISTANCES = ("rotate", "transe")  # decoders whose scores are negative distances
RELATIONAL = ("mlp", "distmult", "complex", "rotate", "transe")  # decoders that read relations

ClassMetric: TypeAlias = Literal["accuracy", "f1", "mcc", "roc_auc", "average_precision"]
NumberMetric: TypeAlias = Literal["mae", "rmse", "r2"]
RecallAt: TypeAlias = Annotated[str, Field(pattern="^recall@[1-9][0-9]{0,8}$")]
RankMetric: TypeAlias = Literal[
    "mrr", "hits@1", "hits@3", "hits@10", "hits@20", "hits@50", "hits@100", "average_precision"
]
# metrics of the K best targets of each source
TOP_METRICS = ("recall", "ndcg", "map", "precision", "hit_rate")
TopMetric: TypeAlias = Annotated[
    str, Field(pattern=f"^({'|'.join(TOP_METRICS)})@[1-9][0-9]{{0,8}}$")
]
LinkMetric: TypeAlias = Annotated[
    RankMetric | TopMetric,
    or_say(f"{', '.join(get_args(RankMetric))}, or {'@K, '.join(TOP_METRICS)}@K"),
]

_Tops: TypeAlias = Annotated[
    Count | Annotated[tuple[Count, ...], BeforeValidator(to_tuple), Field(min_length=1)],
    or_say("a whole number from 1, or a list of them"),
]
_Candidates: TypeAlias = Annotated[
    Literal["destinations"] | Count, or_say("destinations, or a whole number from 1")
]
_OWN = "package.module:function"
_ClassMetric: TypeAlias = Annotated[
    ClassMetric | RecallAt | UserFunction,
    or_say(f"{', '.join(get_args(ClassMetric))}, recall@K or {_OWN}"),
]
_ClassLoss: TypeAlias = Annotated[
    Literal["cross_entropy", "focal"] | UserFunction, or_say(f"cross_entropy, focal or {_OWN}")
]
_NumberMetric: TypeAlias = Annotated[
    NumberMetric | UserFunction, or_say(f"{', '.join(get_args(NumberMetric))} or {_OWN}")
]
_NumberLoss: TypeAlias = Annotated[
    Literal["mse", "l1"] | UserFunction, or_say(f"mse, l1 or {_OWN}")
]
_ClassWeights: TypeAlias = Annotated[
    Literal["balanced"]
    | Annotated[
        tuple[Annotated[float, Field(gt=0, le=10**6)], ...],
        Field(min_length=1),
        BeforeValidator(to_tuple),
    ],
    or_say("balanced, or a list of numbers above 0, one for each class"),
]
_SPLIT = (
    "Split of the seeds into training, validation and test, for graphs without masks; null = for "
    "edges a tenth each for validation and test, at random (edges between the same two nodes are "
    "in the same split). Nodes can only be split by time."
)


class RankingConfig(Section):
    """Candidates among which each true edge is ranked in an evaluation."""

    read_if: ClassVar[Conditions] = {"edges": ("candidates", "destinations")}

    candidates: _Candidates | None = None
    """Number of candidates sampled uniformly for each edge and end; null = all nodes, exactly, and
    1 with temporal sampling; destinations = all targets of the edge type's edges, at the edge's
    time, without other true ones."""
    edges: Annotated[int, Field(ge=2)] | None = None
    """Number of a split's edges that are ranked, chosen at random; null = all."""
    file: InputPath | None = None
    """File of candidates for each edge, or of negative edges that all edges share (npz, parquet,
    csv: see docs/models.md)."""
    top: _Tops | None = None
    """K, or several, of the metrics per source (recall@K, ndcg@K, map@K, precision@K, hit_rate@K);
    null = the K of task.metric, if it is one of these."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.file is not None:
            why, instead = "file has the candidates", f"remove {dotted(at)}.file"
            yield from self.unused(at, "candidates", why=why, instead=instead)

    @property
    def tops(self) -> tuple[int, ...]:
        """Each K of `top`."""
        return (self.top,) if isinstance(self.top, int) else self.top or ()


class NegativesConfig(Section):
    """Negative sampling: the negative edges from which a model learns to distinguish true ones."""

    read_if: ClassVar[Conditions] = {
        "number": ("kind", "uniform", "degree", "local"),
        "ends": ("kind", "uniform", "degree", "in_batch", "local"),
        "filtered": ("kind", "uniform", "degree", "in_batch", "local"),
        "correct": ("kind", "degree", "in_batch"),
    }

    kind: Literal["uniform", "degree", "in_batch", "local", "none"] = "uniform"
    """Distribution of the nodes that replace an end of an edge: uniform; degree = in proportion to
    training degree to the power 0.75; in_batch = the ends of the step's other edges; local =
    uniform over the nodes that the worker owns; none = only those of file."""
    file: InputPath | None = None
    """File of hard negatives for each training edge (npz, parquet, csv: see docs/models.md), used
    in addition."""
    number: Count = 512
    """Negative nodes per step and end, shared by all edges of the step (uniform, degree, local)."""
    each: Count = 1
    """With temporal sampling: negative nodes per edge and end, at the edge's time, instead of
    number."""
    ends: Literal["both", "source", "target"] = "both"
    """Ends of an edge that are replaced, in training and in the rankings of evaluations."""
    filtered: bool | None = None
    """Do not count sampled nodes that form a training edge as negatives; null = true for bpr. Not
    with temporal sampling."""
    correct: bool = False
    """logQ correction of softmax: subtract the logarithm of a node's sampling probability from its
    score (degree, in_batch)."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.kind == "none" and self.file is None:
            message = "there are no negatives: kind is none, and file is not set"
            yield Problem((*at, "kind"), message, f"set {dotted(at)}.file, or another kind")
        if self.correct and self.file is not None:
            message = "nodes in file are not sampled, so they have no probability"
            yield Problem((*at, "correct"), message, f"remove it, or {dotted(at)}.file")


class SplitConfig(Section):
    """Random or temporal split of a task's seeds into training, validation and test."""

    read_if: ClassVar[Conditions] = {"seed": ("by", "random"), "time": ("by", "time")}

    by: Literal["random", "time"] = "random"
    """random = uniformly at random (edges only); time = the earliest for training, the latest for
    test."""
    val: ShareOrMoment = 0.1
    """Validation fraction; by time also the start of the validation period (2026-01-31)."""
    test: ShareOrMoment = 0.1
    """Test fraction; by time also the start of the test period (2026-02-28)."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Random seed of the split."""
    time: Text | None = None
    """Array with the seeds' times; null = the array of sampling.time."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        name, val, test = dotted(at), self.val, self.test
        begin, end = (in_utc(v) if isinstance(v, str) else v for v in (val, test))
        kinds = {type(val), type(test)}
        if len(kinds) > 1 or (self.by == "random" and kinds != {float}):
            message = f"val {val} and test {test} are neither two shares nor, by time, two times"
            remedy = "give both as shares from 0.0 to 1.0, both as dates, or both as whole numbers"
            yield Problem((*at, "val"), message, remedy)
        elif kinds != {float} and begin > end:  # type: ignore[operator]
            message = f"val begins at {val}, after test at {test}"
            yield Problem((*at, "val"), message, f"let {name}.val begin before {name}.test")
        elif isinstance(val, float) and isinstance(test, float) and val + test >= 1:
            message = f"val {val:g} + test {test:g} leaves nothing to train on"
            remedy = f"lower {name}.val or {name}.test until they sum to less than 1"
            yield Problem((*at, "val"), message, remedy)


Files: TypeAlias = Annotated[
    InputPath | Annotated[dict[Literal["train", "val", "test"], InputPath], Field(min_length=1)],
    or_say("a file or a pattern, or {train: …, val: …, test: …}"),
]


class TrainingTable(Section):
    """Training table (Robinson et al. 2024, RelBench): each row is a seed with an entity, a time
    and a target. A row sees what was known at its time, including edges of that time."""

    files: Files | None = None
    """CSV or Parquet: a file or a pattern such as rows/*.parquet, or one for each split: {train: …,
    val: …, test: …}."""
    sql: Text | None = None
    """Instead of files: a SELECT over the tables of graph.path, by their names, and over files,
    relative to it."""
    url: Text | None = None
    """With sql: the database that runs it, env:NAME or sqlite:///FILE; null = DuckDB, over tables
    and files."""
    entity: Text
    """Column with the id of a node of task.ntype."""
    time: Text | None = None
    """Column with the time of a row; needed with sampling.time."""
    target: Names
    """Column to predict (empty = unknown); for regression and multi-label also several columns, or
    one column of lists."""
    split: Text | None = None
    """Column with train, val, test or nothing, if one file or pattern has all rows and task.split
    does not split them by time."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if (self.files is None) == (self.sql is None):
            state = "missing" if self.sql is None else "set"
            yield Problem(at, f"files and sql are both {state}", "set exactly one of them")
        if self.sql is None:
            yield from self.unused(at, "url", why="sql is not set")
        if self.url is not None and not DATABASE.fullmatch(self.url):
            yield Problem((*at, "url"), *NO_DATABASE)
        if isinstance(self.files, dict):
            why, instead = "each split has its own files", "name one file or pattern"
            yield from self.unused(at, "split", why=why, instead=instead)


LOWER_IS_BETTER = ("mae", "rmse", "loss")


class _Task(Section):
    kind: str
    """Prediction: classes (classification) or numbers (regression) of nodes, of edges, or of whole
    graphs (graph.format: graphs), or which edges exist (link_prediction); or package.module:Class
    of your own raygnn.Task."""
    like: str
    """For your own class: the kind whose seeds, targets, evaluation and other keys it shares."""
    args: JsonValues = Field({})
    """Keyword arguments of your own class."""
    metric: str | None = None

    unit: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    @property
    def own_class(self) -> str | None:
        """User class that implements the step; None for the built-in kinds."""
        return self.kind if ":" in self.kind else None

    @property
    def of_graphs(self) -> bool:
        """True for graph-level tasks."""
        return self.unit == "graph"

    @property
    def of_edges(self) -> bool:
        """True for tasks on edges."""
        return self.unit == "edge"

    @property
    def of_links(self) -> bool:
        """True for link prediction."""
        return self.like == "link_prediction"

    @property
    def seeds(self) -> str:
        """Plural noun of the seeds: nodes, edges or graphs."""
        return f"{self.unit}s"

    @property
    def classifies(self) -> bool:
        """True for single-label classification."""
        return self.like.endswith("_classification") and not self.several_labels

    @property
    def several_labels(self) -> bool:
        """True for multi-label classification."""
        return False

    @property
    def chosen_metric(self) -> str:
        """Name in the records of the metric that selects the best weights."""
        return (self.metric or self.metrics[0]).rpartition(":")[2]

    @property
    def own(self) -> dict[str, str]:
        """``loss`` and ``metric`` → user function, for those that are one."""
        named = {key: getattr(self, key, None) for key in ("loss", "metric")}
        return {key: name for key, name in named.items() if name and ":" in name}

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if "metric" in self.own and self.chosen_metric in (*self.metrics, *LOWER_IS_BETTER):
            message = f"{self.chosen_metric} is the name of a built-in metric"
            yield Problem((*at, "metric"), message, "give your function another name")


class ClassTask(_Task):
    """Classification: one class for each seed, or multi-label."""

    target: Text = "label"
    """Name of the label array."""
    labels: Literal["one", "multi"] = "one"
    """one = single-label: one class number per seed; multi = multi-label: a row of 0, 1, and -1 or
    NaN for unknown, per seed."""
    metric: _ClassMetric | None = None
    """Metric that selects the best weights; null = accuracy, or roc_auc for multi-label. accuracy
    and f1 are single-label only; recall@K = fraction of the positive seeds among the K with the
    highest score; package.module:function = your own."""
    positive: int | Text | None = None
    """Positive class, by category or number, of average_precision, roc_auc and recall@K, such as
    fraud; null = class 1 of two, else the mean over all classes."""
    loss: _ClassLoss | None = None
    """cross_entropy (binary for multi-label), focal (Lin et al. 2017), or your own
    package.module:function; null = cross_entropy."""
    gamma: Annotated[float, Field(ge=0, le=100)] | None = None
    """Focusing parameter of the focal loss; null = 2."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Fraction of a target that is spread evenly over all classes."""
    class_weights: _ClassWeights | None = None
    """Weight of each class in the loss, by class number; balanced = inversely proportional to its
    number of training seeds; for multi-label the weight of a positive label relative to a negative
    one."""

    metrics = get_args(ClassMetric)

    @property
    def several_labels(self) -> bool:
        return self.labels == "multi"

    @property
    def chosen_metric(self) -> str:
        return super().chosen_metric if self.metric or not self.several_labels else "roc_auc"

    def check_weights(self, num: int | None, where: str = "task.class_weights") -> None:
        """Raise ConfigError unless `class_weights` has one weight for each of ``num`` classes; None
        = unknown."""
        given = self.class_weights
        if isinstance(given, tuple) and num not in (None, len(given)):
            raise ConfigError(
                f"there are {len(given)} weights, and {num} "
                f"{'labels' if self.several_labels else 'classes'}",
                where=where,
                remedy="give one for each, in the order of their numbers, or balanced",
            )

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.several_labels:
            yield from self.unused(at, "positive", why=f"{dotted((*at, 'labels'))} is multi")
        if self.several_labels and self.metric in self.metrics[:2]:
            message = f"{self.metric} is not defined if task.labels is {self.labels}"
            fitting = " or ".join(self.metrics[2:])
            yield Problem((*at, "metric"), message, f"set it to {fitting}")
        why = f"{dotted((*at, 'loss'))} is {self.loss or 'cross_entropy'}"
        if "loss" in self.own:
            yield from self.unused(at, "class_weights", "label_smoothing", why=why)
        if self.loss != "focal":
            yield from self.unused(at, "gamma", why=why, instead="set it to focal")
        yield from super()._conflicts(at)


class _NumberTask(_Task):
    target: Text = "label"
    """Name of the label array."""
    metric: _NumberMetric | None = None
    """Metric that selects the best weights, or your own package.module:function; null = mae."""
    loss: _NumberLoss | None = None
    """mse, l1, or your own package.module:function; null = mse."""

    metrics = get_args(NumberMetric)

    @property
    def chosen_loss(self) -> str:
        """Loss in use."""
        return self.loss or "mse"


class _Nodes(_Task):
    unit = "node"
    ntype: Text | None = None
    """Node type to predict for; null = the only one that has the target."""
    table: TrainingTable | None = None
    """Training table: its rows are the seeds, any number per node; null = each node of the type is
    a seed, and task.target names an array of the graph."""
    split: SplitConfig | None = Field(None, description=_SPLIT)


class _Edges(_Task):
    unit = "edge"
    read_if: ClassVar[Conditions] = {"reverse": ("exclude", "reverse")}
    etype: Text | None = None
    """Edge type to predict for, by its relation or as source:relation:target; null = the only one,
    or the only one that has the target (or masks, for links)."""
    split: SplitConfig | None = Field(None, description=_SPLIT)
    exclude: Literal["reverse", "self", "none"] = "reverse"
    """Edges that messages do not use: reverse = held-out edges, the step's seed edges, and the
    reverse edges of both; self = the same without reverse edges; none = only held-out edges."""
    reverse: Text | None = None
    """Edge type with the reverse edges of task.etype; null = the one that graph.reverse or a
    table's reverse added, else task.etype itself if both its ends have one node type."""


class NodeClassification(ClassTask, _Nodes):
    """Node classification."""

    kind: Literal["node_classification"] | UserClass = "node_classification"
    like: Literal["node_classification"] = "node_classification"


class NodeRegression(_NumberTask, _Nodes):
    """Node regression."""

    kind: Literal["node_regression"] | UserClass
    like: Literal["node_regression"] = "node_regression"


class EdgeClassification(ClassTask, _Edges):
    """Edge classification."""

    kind: Literal["edge_classification"] | UserClass
    like: Literal["edge_classification"] = "edge_classification"


class EdgeRegression(_NumberTask, _Edges):
    """Edge regression."""

    kind: Literal["edge_regression"] | UserClass
    like: Literal["edge_regression"] = "edge_regression"


class LinkPrediction(_Edges):
    """Link prediction: which edges exist."""

    kind: Literal["link_prediction"] | UserClass
    like: Literal["link_prediction"] = "link_prediction"
    metric: LinkMetric | None = None
    """Metric that selects the best weights; null = mrr. recall@K, ndcg@K, map@K, precision@K and
    hit_rate@K evaluate the K best targets of each source; all five are then reported, instead of
    mrr and hits."""
    loss: Literal["bce", "bpr", "softmax", "margin", "self_adversarial"] | None = None
    """bce = binary cross entropy; bpr = Bayesian personalized ranking; softmax = cross entropy of
    the true edge among the negatives; margin = hinge loss; self_adversarial = as in RotatE (Sun et
    al. 2019); null = softmax."""
    negatives: NegativesConfig = NegativesConfig()
    """Negative sampling in training."""
    ranking: RankingConfig = RankingConfig()
    """Candidates among which each true edge is ranked in an evaluation."""
    margin: Annotated[float, Field(ge=0, le=10**6)] | None = None
    """Margin of the hinge loss (margin; null = 1), or offset of the scores of rotate and transe,
    which are negative distances (bce, self_adversarial; null = 9)."""
    temperature: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Scores are divided by it (softmax), or multiplied to weigh negatives (self_adversarial); null
    = 1."""

    metrics = get_args(RankMetric)
    read_if: ClassVar[Conditions] = {
        **_Edges.read_if,
        "temperature": ("loss", "self_adversarial", "softmax", None),
    }
    target: ClassVar[str] = ""  # no array holds the targets

    @property
    def chosen_loss(self) -> str:
        """Loss in use."""
        return self.loss or "softmax"

    @property
    def filters(self) -> bool:
        """True if nodes that form a training edge do not count as negatives."""
        given = self.negatives.filtered
        return self.loss == "bpr" if given is None else given

    @property
    def ranks_edges(self) -> bool:
        """True if each edge is ranked, for ``mrr`` and ``hits``."""
        return self.chosen_metric in self.metrics

    @property
    def tops(self) -> tuple[int, ...]:
        """Each K of the metrics per source, ascending; empty if there are none."""
        chosen = () if self.ranks_edges else (int(self.chosen_metric.partition("@")[2]),)
        return tuple(sorted({*self.ranking.tops, *chosen}))

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.chosen_loss != "softmax":
            why, instead = f"{dotted((*at, 'loss'))} is {self.loss}", "set it to softmax"
            here = (*at, "negatives")
            yield from self.negatives.unused(here, "correct", why=why, instead=instead)
        ranking = self.ranking
        some = ranking.file is not None or ranking.edges is not None
        if self.tops and (some or ranking.candidates not in (None, "destinations")):
            message = "metrics per source rank all targets, but task.ranking selects some of them"
            remedy = f"remove file, edges and a number of candidates in {dotted((*at, 'ranking'))}"
            yield Problem((*at, "ranking"), message, remedy)


class _Graphs(_Task):
    unit = "graph"


class GraphClassification(ClassTask, _Graphs):
    """Graph classification."""

    kind: Literal["graph_classification"] | UserClass
    like: Literal["graph_classification"] = "graph_classification"


class GraphRegression(_NumberTask, _Graphs):
    """Graph regression."""

    kind: Literal["graph_regression"] | UserClass
    like: Literal["graph_regression"] = "graph_regression"


NodeTaskConfig: TypeAlias = NodeClassification | NodeRegression
EdgeTaskConfig: TypeAlias = EdgeClassification | EdgeRegression | LinkPrediction
TaskConfig: TypeAlias = Annotated[
    Annotated[NodeClassification, Tag("node_classification")]
    | Annotated[NodeRegression, Tag("node_regression")]
    | Annotated[EdgeClassification, Tag("edge_classification")]
    | Annotated[EdgeRegression, Tag("edge_regression")]
    | Annotated[LinkPrediction, Tag("link_prediction")]
    | Annotated[GraphClassification, Tag("graph_classification")]
    | Annotated[GraphRegression, Tag("graph_regression")],
    Discriminator(lambda value: built_in_kind(value)),
    by_kind(lambda: TASKS, "node_classification"),
]
TASKS = classes_of(TaskConfig)


def built_in_kind(value: Any) -> str | None:
    """Return the built-in kind of a task; for a user class, the value of ``like``."""
    get = value.get if isinstance(value, dict) else partial(getattr, value)
    kind = get("kind", None)
    return get("like", "node_classification") if ":" in str(kind) else kind


class OneOfTasks(Section):
    """Keys of a task in multi-task learning."""

    weight: float = Field(1.0, gt=0, le=10**6)
    """Weight of the task's loss in the sum."""
    batch_factor: float = Field(1.0, gt=0, le=10**6)
    """Seeds of the task per step, as a multiple of `sampling.batch_size`."""


class EdgesOfTasks(OneOfTasks):
    """Keys of an edge task in multi-task learning."""

    decoder: DecoderKind | None = None
    """Decoder of an edge task; null = `model.decoder`."""


class NodeClassificationOfTasks(NodeClassification, OneOfTasks):
    """Node classification in multi-task learning."""


class NodeRegressionOfTasks(NodeRegression, OneOfTasks):
    """Node regression in multi-task learning."""


class EdgeClassificationOfTasks(EdgeClassification, EdgesOfTasks):
    """Edge classification in multi-task learning."""


class EdgeRegressionOfTasks(EdgeRegression, EdgesOfTasks):
    """Edge regression in multi-task learning."""


class LinkPredictionOfTasks(LinkPrediction, EdgesOfTasks):
    """Link prediction in multi-task learning."""


AnyOfTasks: TypeAlias = Annotated[
    Annotated[NodeClassificationOfTasks, Tag("node_classification")]
    | Annotated[NodeRegressionOfTasks, Tag("node_regression")]
    | Annotated[EdgeClassificationOfTasks, Tag("edge_classification")]
    | Annotated[EdgeRegressionOfTasks, Tag("edge_regression")]
    | Annotated[LinkPredictionOfTasks, Tag("link_prediction")],
    Discriminator(lambda value: built_in_kind(value)),
    by_kind(lambda: SEVERAL_TASKS, "node_classification"),
]
SEVERAL_TASKS = classes_of(AnyOfTasks)
Tasks: TypeAlias = Annotated[dict[TaskName, AnyOfTasks], Field(min_length=1, max_length=64)]
