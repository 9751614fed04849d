"""The configuration: one frozen model per section, every key with its type, range and meaning.

This module checks single keys; :mod:`raygnn.config.rules` checks combinations of keys, and
:func:`raygnn.config.load.load_config` runs both. Types are strict: neither ``"3"`` nor ``3.0`` nor
``true`` is a whole number, while ``3`` is a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from raygnn.config.execution import (
    PRECISIONS,
    ClusterConfig,
    CommConfig,
    FaultConfig,
    GuardConfig,
    LoggingConfig,
    Precision,
    StagingConfig,
)
from raygnn.config.graph import GraphConfig, TablesGraph
from raygnn.config.model import FamilyConfig, InitConfig, ModelConfig
from raygnn.config.places import HIDDEN, Uri, is_secret
from raygnn.config.problems import Problem, show
from raygnn.config.search import SearchConfig
from raygnn.config.task import (
    EdgesOfTasks,
    EdgeTaskConfig,
    NodeClassification,
    NodeTaskConfig,
    TaskConfig,
    Tasks,
    TrainingTable,
)
from raygnn.config.values import (
    AutoFraction,
    AutoParts,
    Classes,
    Conditions,
    Count,
    Fanouts,
    Fraction,
    Place,
    RunName,
    Section,
    Share,
    Storage,
    Stretch,
    Text,
    TimeSpan,
    sections_in,
)
from raygnn.config.yaml_text import KeyPath


class PartitionConfig(Section):
    """Division of the graph between the workers."""

    parts: AutoParts = "auto"
    """Number of partitions; auto = one for each worker."""
    method: Literal["metis", "stream", "random"] = "metis"
    """metis = fewest edges between partitions; stream = similar, with a fraction of the memory;
    random = fastest."""
    engine: Literal["auto", "local", "ray"] = "auto"
    """Where the graph is partitioned: local = in memory; ray = out-of-core, by Ray tasks on all
    nodes; auto = ray for tables and OGB archives larger than memory."""
    path: Place | None = None
    """Directory of an existing partition, or of the one to write; null =
    <storage>/partitions/<digest>. An existing one may be a URI that pyarrow.fs opens, such as
    s3://BUCKET/DIRECTORY."""

    @property
    def used_method(self) -> str:
        """Partitioning method in use: ``stream`` for ``metis`` if it is done out-of-core."""
        return "stream" if (self.engine, self.method) == ("ray", "metis") else self.method


class TimeConfig(Section):
    """Temporal sampling: a seed's neighbours are sampled over earlier edges only."""

    edges: Text
    """Edge array of integers with the time of each edge: `time` for tables. Edge types without it
    are timeless and always sampled."""
    seeds: Text | None = None
    """Array with the time at which each node or edge is predicted; null = the edge times, for tasks
    on edges."""
    strategy: Literal["uniform", "latest"] = "uniform"
    """Which earlier edges of a node are sampled: uniform = any, latest = the most recent."""
    window: TimeSpan | None = None
    """Largest age of an edge at its seed's time, such as 30d, or a number in the units of the
    times; null = unlimited."""
    strict: bool = False
    """Rows of a training table do not see edges of their own time. Other seeds never do."""


class SamplingConfig(Section):
    """Neighbour sampling and minibatches."""

    fanout: Fanouts = (10, 10)
    """Neighbours sampled per layer, from the seeds outward; -1 = all. In a heterogeneous graph a
    layer may also have a number for each edge type (`{buys: 5, '*': 10}`, by relation or
    source:relation:target; `*` = all others)."""
    batch_size: Count = 512
    """Seeds per worker and step. The global batch does not change when the number of workers
    changes during a run."""
    eval_batch_size: Count | None = None
    """Seeds per worker and step in the evaluation of your own model class; null = 1024."""
    replace: bool = False
    """Sample neighbours with replacement."""
    edge_weight: Text | None = None
    """Edge array of sampling weights; null, and edge types without it = uniform."""
    time: TimeConfig | None = None
    """Temporal sampling: only edges before a seed's time; null = all edges."""
    topology: Literal["auto", "replicated", "partitioned"] = "auto"
    """replicated = each node stores the whole graph structure; partitioned = only its own
    partitions; auto = replicated if it fits."""
    cache: AutoFraction = "auto"
    """Fraction of the other nodes' feature rows that each node caches, most likely first, once for
    all its workers; auto = as many as fit in a sixteenth of its free memory."""
    prefetch: int = Field(2, ge=0, le=1024)
    """Batches prepared ahead."""
    sample_on: Literal["auto", "cpu", "gpu"] = "auto"
    """Device that samples neighbours, with identical results; auto = the worker's GPU if it can."""
    features_on: Literal["auto", "cpu", "pinned", "gpu"] = "auto"
    """Memory that holds rows of features, and of embedding tables while they train, for a GPU, see
    performance.md; auto = the nearest in which they fit."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.replace and -1 in self.fanouts:
            yield Problem(
                (*at, "replace"),
                f"replace is true, but sampling.fanout {show(self.fanout)} samples all (-1) once",
                "set sampling.replace to false, or give every layer a number of neighbours",
            )
        if self.time is not None and self.time.strategy == "latest":
            why, instead = "the latest edges are sampled", "set sampling.time.strategy to uniform"
            yield from self.unused(at, "replace", "edge_weight", why=why, instead=instead)

    @property
    def fanouts(self) -> list[int]:
        """Fanouts of all layers and edge types."""
        hops = (hop.values() if isinstance(hop, dict) else (hop,) for hop in self.fanout)
        return [number for numbers in hops for number in numbers]


class ScheduleConfig(Section):
    """Learning-rate schedule."""

    read_if: ClassVar[Conditions] = {
        "every": ("kind", "step"),
        "gamma": ("kind", "step", "plateau"),
        "patience": ("kind", "plateau"),
        "floor": ("kind", "cosine", "plateau"),
    }

    kind: Literal["constant", "cosine", "step", "plateau", "one_cycle"] = "constant"
    """cosine: decays to the floor at the end of the run; step: multiplied by gamma at fixed
    intervals; plateau: multiplied by gamma when the validation metric stops improving by
    train.min_delta; one_cycle: rises and falls once."""
    warmup: Stretch | None = None
    """Linear warm-up from near 0, or with lr_scaling from the rate of one worker: steps, or a share
    of the run; null = none. For one_cycle the share that rises, null = 0.3."""
    every: Stretch | None = None
    """Steps, or share of the run, between two drops (step); null = 0.3."""
    gamma: Share | None = None
    """Factor of a drop (step, plateau); null = 0.1."""
    patience: Annotated[int, Field(ge=0)] = 10
    """Evaluations without improvement before a drop (plateau)."""
    floor: Fraction | None = None
    """Lowest rate, as a share of the highest (cosine, plateau); null = 0."""


class TrainConfig(Section):
    """Optimisation."""

    read_if: ClassVar[Conditions] = {"momentum": ("optimizer", "sgd")}

    epochs: Count = 20
    """Passes over the training seeds."""
    max_steps: Count | None = None
    """Stop after this many steps; null = unlimited."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer."""
    lr: float = Field(0.003, gt=0)
    """Learning rate; with a schedule, its highest value."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of the learning rate with the number of workers in a global batch."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum (sgd)."""
    accumulate: Count = 1
    """Gradient accumulation: batches whose gradients are summed into one step."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Gradient clipping: largest norm; null = unlimited."""
    ema: Share | None = None
    """Decay per step of an exponential moving average of the weights, which is evaluated, selected
    and tested instead of them; null = none."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: Count = 1
    """Epochs between evaluations."""
    patience: Count | None = None
    """Early stopping: epochs without improvement before training stops; null = never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest gain that counts as an improvement, in the metric's unit, for patience and for the
    plateau schedule."""
    select: Literal["best", "last"] = "best"
    """Weights that are tested: best = best on validation, last = after the last step."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Random seed of weights, batches and sampling."""
    init: InitConfig | None = None
    """Initial weights from another run (transfer learning); null = random ones."""
    callbacks: Classes = Field({})
    """Your own Lightning callbacks, package.module:Class, which every worker runs in this order: a
    list, or a mapping of each to its keyword arguments."""


class Config(Section):
    """Complete configuration of a job. Get one from :func:`raygnn.load_config`."""

    name: RunName
    """Name of the run and of its directory in storage."""
    storage: Storage = Path("runs")
    """Directory that every node sees, relative to the working directory of the command; or a URI
    that pyarrow.fs opens, such as s3://BUCKET/DIRECTORY, which every node can reach."""
    graph: GraphConfig | None = None
    """Input graph; may be omitted if partition.path exists."""
    partition: PartitionConfig = PartitionConfig()
    """Division of the graph between the workers."""
    task: TaskConfig = NodeClassification()
    """What is predicted, its loss and its metric."""
    tasks: Tasks | None = None
    """Multi-task learning: several tasks on one graph instead of `task`: name → the keys of `task`,
    and `weight`, `batch_factor` and `decoder`. All share one network; the first task's metric
    selects the best weights."""
    model: ModelConfig
    """Graph neural network."""
    sampling: SamplingConfig = SamplingConfig()
    """Neighbour sampling and minibatches."""
    staging: StagingConfig = StagingConfig()
    """Copy of a node's partitions on its local disk, which all its workers share."""
    train: TrainConfig = TrainConfig()
    """Optimisation."""
    precision: Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"] = "fp32"
    """Number types of weights and arithmetic; the mixed ones (mixed precision) keep weights in
    fp32."""
    guard: GuardConfig = GuardConfig()
    """Comparison of the ranks, and limits on bad batches."""
    comm: CommConfig = CommConfig()
    """Communication between the workers."""
    cluster: ClusterConfig = ClusterConfig()
    """Ray cluster that the job runs on."""
    fault: FaultConfig = FaultConfig()
    """Fault tolerance: checkpoints, restarts and timeouts."""
    logging: LoggingConfig = LoggingConfig()
    """Loggers that receive the training records, besides the run directory."""

    search: SearchConfig | None = None
    """Hyperparameter search of `raygnn tune`; other commands ignore it."""

    _file: Path | None = PrivateAttr(default=None)
    _trains: bool = PrivateAttr(default=True)
    _at_once: bool = PrivateAttr(default=False)
    _words: Mapping[str, Sequence[Any]] = PrivateAttr(default_factory=dict)
    _rows_of: Sequence[str] | None = PrivateAttr(default=None)

    @property
    def arithmetic(self) -> Precision:
        """Number types that ``precision`` stands for."""
        return PRECISIONS[self.precision]

    @property
    def file(self) -> Path | None:
        """YAML file that this was read from, or None."""
        return self._file

    @property
    def trains(self) -> bool:
        """True if the job trains a model; a prediction job needs neither targets nor splits."""
        return self._trains

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        model = self.model
        if (
            isinstance(self.graph, TablesGraph)
            and isinstance(model, FamilyConfig)
            and "dropout" not in model.model_fields_set
        ):
            object.__setattr__(self, "model", model.model_copy(update={"dropout": 0.1}))

    @property
    def words(self) -> Mapping[str, Sequence[Any]]:
        """Categories of the training tables' classes in the run whose model predicts, by task."""
        return self._words

    def reads_rows(self, name: str) -> bool:
        """Return True if the job needs the training table of a task."""
        return self._rows_of is None or name in self._rows_of

    def asking(
        self,
        words: Mapping[str, Sequence[Any]] | None = None,
        *,
        at_once: bool = False,
        rows_of: Sequence[str] | None = None,
    ) -> Config:
        """Return a copy for a prediction job.

        Args:
            words: see `words`.
            at_once: True if all seeds are predicted for the same time.
            rows_of: tasks whose training tables are read; None = all.
        """
        found = self.model_copy()
        found._trains, found._at_once, found._words = False, at_once, words or {}
        found._rows_of = rows_of
        return found

    def with_workers(self, workers: int) -> Config:
        """Return the configuration for this number of workers."""
        cluster = self.cluster.model_copy(update={"workers": workers})
        return self.model_copy(update={"cluster": cluster})

    @property
    def by_task(self) -> dict[str, Config]:
        """Task name → configuration of that task alone; "" if there is only one."""
        return {"": self} if self.tasks is None else {name: self.of(name) for name in self.tasks}

    def of(self, name: str) -> Config:
        """Return the configuration of one of `tasks` alone; "" = this one."""
        if self.tasks is None:
            return self
        task = self.tasks[name]
        decoder = task.decoder if isinstance(task, EdgesOfTasks) else None
        read = self.model.decoder_features if task.of_edges and not task.of_links else None
        decoder = decoder or self.model.decoder if task.of_edges else None
        history = self.model.pair_history and task.of_links
        update = {"decoder": decoder, "decoder_features": read, "pair_history": history}
        model = self.model.model_copy(update=update)
        return self.model_copy(update={"task": task, "tasks": None, "model": model})

    @property
    def own_steps(self) -> list[str]:
        """User classes and functions that take part in training steps or in metrics."""
        kinds = self.model.kind, self.task.kind
        classes = [*(kind for kind in kinds if ":" in kind), *self.train.callbacks]
        functions = [spec for one in self.by_task.values() for spec in one.task.own.values()]
        return [*classes, *dict.fromkeys(functions)]

    @property
    def needs_masks(self) -> bool:
        """True if the graph must have a training mask for its nodes."""
        tasks = [c.task for c in self.by_task.values()]
        nodes = [task for task in tasks if isinstance(task, NodeTaskConfig)]
        return self.trains and any(task.split is None and task.table is None for task in nodes)

    @property
    def table(self) -> TrainingTable | None:
        """Training table of the task; None if its seeds are nodes, edges or graphs themselves."""
        return self.task.table if isinstance(self.task, NodeTaskConfig) else None

    @property
    def seed_time(self) -> str | None:
        """Array, or column of the training table, with the seeds' times; None if they have no times
        or all the same."""
        time = self.sampling.time
        if time is None or self._at_once:
            return None
        return time.seeds or time.edges if self.table is None else self.table.time

    @property
    def ordered(self) -> bool:
        """True if edges as seeds see only earlier edges, and not themselves."""
        time = self.sampling.time
        return time is not None and time.seeds in (None, time.edges)

    @property
    def split_time(self) -> str | None:
        """Array of times by which the task's seeds are split; None without a temporal split."""
        task, time = self.task, self.sampling.time
        split = task.split if isinstance(task, (NodeTaskConfig, EdgeTaskConfig)) else None
        if split is None or split.by != "time" or self.table is not None:
            return None
        return split.time or (None if time is None else time.seeds or time.edges)

    @property
    def metric(self) -> str:
        """Metric that selects the best weights, by its name in the records."""
        name, config = next(iter(self.by_task.items()))
        return metric_name(name, config.task.chosen_metric)

    def where(self, key: str) -> str:
        """Return a key as errors name it, after the file if there is one."""
        return f"{self._file}: {key}" if self._file else key

    @property
    def store(self) -> Uri | None:
        """``storage`` if it is a URI, else None."""
        return self.storage if isinstance(self.storage, Uri) else None

    @property
    def local_storage(self) -> Path:
        """``storage``, or for a URI the local directory on each node that replaces it."""
        if isinstance(self.storage, Path):
            return self.storage
        digest = hashlib.sha256(self.storage.shared.encode()).hexdigest()
        return self.staging.root / "work" / digest[:16]

    @property
    def run_dir(self) -> Path:
        """``<storage>/<name>``, or its local replacement."""
        return self.local_storage / self.name

    def to_dict(self) -> dict[str, Any]:
        """Return every key with its value as JSON types, which ``load_config`` reads back."""
        return self.model_dump(mode="json")

    def recorded(self) -> dict[str, Any]:
        """Return `to_dict` with the secrets in ``comm.env`` hidden, for files."""
        config = self.to_dict()
        env = config["comm"]["env"]
        env |= {name: HIDDEN for name, value in env.items() if is_secret(name, value)}
        return config


def metric_name(task: str, metric: str) -> str:
    """Return a metric's name in the records; ``task``: "" if there is only one task."""
    return f"{task}/{metric}" if task else metric


SECTIONS = {
    key: sections
    for key, field in Config.model_fields.items()
    if (sections := sections_in(field.annotation)) and key != "graph"
}
"""Key → classes of its section, without ``graph``, which overrides can replace."""
