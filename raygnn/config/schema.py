"""The configuration: one frozen model per section, every key with its type, range and meaning.

One key at a time is checked here; what several keys must agree on is in
:mod:`raygnn.config.rules`, and :func:`raygnn.config.load.load_config` runs both. Types are
strict: neither ``"3"`` nor ``3.0`` nor ``true`` is a whole number, while ``3`` is a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

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
from raygnn.config.model import FamilyConfig, ModelConfig
from raygnn.config.places import HIDDEN, Uri, is_secret
from raygnn.config.problems import Problem, show
from raygnn.config.task import (
    EdgesOfTasks,
    EdgeTaskConfig,
    NodeClassification,
    NodeTaskConfig,
    TaskConfig,
    Tasks,
)
from raygnn.config.values import (
    LARGEST,
    AutoFraction,
    AutoParts,
    Classes,
    Conditions,
    Count,
    Fraction,
    Place,
    RunName,
    Section,
    Share,
    Storage,
    Stretch,
    Text,
    TimeSpan,
    class_problems,
    must,
    or_say,
    sections_in,
    to_tuple,
)
from raygnn.config.yaml_text import KeyPath

Fanout: TypeAlias = Annotated[
    Annotated[int, Field(ge=-1, le=LARGEST), must(bool, "a number other than 0")],
    or_say("-1 (all neighbours) or a whole number from 1"),
]
EdgeFanouts: TypeAlias = Annotated[
    dict[Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=-1, le=LARGEST)]],
    Field(min_length=1),
]
HopFanout: TypeAlias = Annotated[
    Fanout | EdgeFanouts,
    or_say(
        "-1 (all neighbours), a whole number from 1, or such a number (or 0) for each edge type"
    ),
]
Fanouts: TypeAlias = Annotated[
    tuple[HopFanout, ...], BeforeValidator(to_tuple), Field(min_length=1, max_length=64)
]


class PartitionConfig(Section):
    """How the graph is divided between the workers."""

    parts: AutoParts = Field("auto", description="Number of parts; auto = one for each worker.")
    method: Literal["metis", "stream", "random"] = Field(
        "metis",
        description="metis keeps neighbours together; stream, too, with a fraction of its memory; "
        "random is quick.",
    )
    engine: Literal["auto", "local", "ray"] = Field(
        "auto",
        description="Where a partition is made: local, in memory; ray, out of core, by tasks on "
        "all nodes; auto = ray for tables and OGB's archives that are too large for memory.",
    )
    path: Place | None = Field(
        None,
        description="Directory of a partition to reuse, or to write; null = "
        "<storage>/partitions/<digest>. One to reuse may be a URI that pyarrow.fs opens, such as "
        "s3://BUCKET/DIRECTORY.",
    )

    @property
    def used_method(self) -> str:
        """``method``, but ``stream`` for METIS where all is made out of core."""
        return "stream" if (self.engine, self.method) == ("ray", "metis") else self.method


class TimeConfig(Section):
    """When edges and seeds are: of the edges around a seed only earlier ones are drawn."""

    edges: Text = Field(
        description="Edge array of whole numbers that says when an edge is: `time` of tables. Edge "
        "types without it have no time, and are always drawn.",
    )
    seeds: Text | None = Field(
        None,
        description="Array that says when a node, or an edge, is predicted; null = edges, of "
        "tasks on edges.",
    )
    strategy: Literal["uniform", "latest"] = Field(
        "uniform",
        description="Which of a node's earlier edges are drawn: uniform = any, latest = the last "
        "ones.",
    )
    window: TimeSpan | None = Field(
        None,
        description="How long before the seed an edge may be at most, such as 30d, or a number in "
        "the units of the times; null = any time.",
    )


class SamplingConfig(Section):
    """How minibatches are drawn."""

    fanout: Fanouts = Field(
        (10, 10),
        description="Neighbours per layer from the seeds outward; -1 = all. For a layer, also a "
        "number for each edge type (`{buys: 5, '*': 10}`, by relation or source:relation:target; "
        "`*` = all others).",
    )
    batch_size: Count = Field(
        512,
        description="Seeds per worker and step; a batch stays as large as the run began with, "
        "whatever number of workers it goes on with.",
    )
    eval_batch_size: Count | None = Field(
        None, description="Seeds per worker and step when your own class is evaluated; null = 1024."
    )
    replace: bool = Field(False, description="Draw neighbours with replacement.")
    edge_weight: Text | None = Field(
        None, description="Edge array to draw in proportion to; null, and types without it = alike."
    )
    time: TimeConfig | None = Field(None, description="Draw edges before seeds' times; null = all.")
    topology: Literal["auto", "replicated", "partitioned"] = Field(
        "auto",
        description="replicated: each node holds the whole structure; partitioned: its own parts "
        "only; auto: replicated where it fits.",
    )
    cache: AutoFraction = Field(
        "auto",
        description="Share of the feature rows of other nodes that each node keeps, once for all "
        "workers there, by how likely batches are to read them; auto = all that a sixteenth of its "
        "free memory holds.",
    )
    prefetch: int = Field(2, ge=0, le=1024, description="Batches prepared ahead.")
    sample_on: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="Who draws neighbours, the same ones; auto = a worker's GPU if it can."
    )
    features_on: Literal["auto", "cpu", "pinned", "gpu"] = Field(
        "auto",
        description="Where rows for a GPU are read, see performance.md; auto = as near as fits.",
    )

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        hops = [hop.values() if isinstance(hop, dict) else (hop,) for hop in self.fanout]
        if self.replace and any(-1 in numbers for numbers in hops):
            yield Problem(
                (*at, "replace"),
                f"replace is true, but sampling.fanout {show(self.fanout)} takes all (-1) once",
                "set sampling.replace to false, or give every layer a number of neighbours",
            )
        if self.time is not None and self.time.strategy == "latest":
            for key, value in (("replace", self.replace), ("edge_weight", self.edge_weight)):
                if value:
                    message = f"{key} would be ignored: the latest edges are drawn"
                    remedy = f"remove sampling.{key}, or set sampling.time.strategy to uniform"
                    yield Problem((*at, key), message, remedy)


class ScheduleConfig(Section):
    """How the learning rate changes, step by step.

    ``schedule: cosine`` is short for ``schedule: {kind: cosine}``.
    """

    read_if: ClassVar[Conditions] = {
        "every": ("kind", "step"),
        "gamma": ("kind", "step", "plateau"),
        "patience": ("kind", "plateau"),
        "floor": ("kind", "cosine", "plateau"),
    }

    kind: Literal["constant", "cosine", "step", "plateau", "one_cycle"] = Field(
        "constant",
        description="cosine: decays to the floor at the end of the run; step: multiplied by gamma "
        "at fixed intervals; plateau: multiplied by gamma when the validation metric stops "
        "improving by train.min_delta; one_cycle: rises and falls once. `schedule: cosine` is "
        "short for `schedule: {kind: cosine}`.",
    )
    warmup: Stretch | None = Field(
        None,
        description="Linear warm-up from near 0, or with lr_scaling from the rate of one worker: "
        "steps, or a share of the run; null = none. For one_cycle the share that rises, null = "
        "0.3.",
    )
    every: Stretch | None = Field(
        None, description="Steps, or share of the run, between two drops (step); null = 0.3."
    )
    gamma: Share | None = Field(None, description="Factor of a drop (step, plateau); null = 0.1.")
    patience: Annotated[int, Field(ge=0)] = Field(
        10, description="Evaluations without improvement before a drop (plateau)."
    )
    floor: Fraction | None = Field(
        None, description="Lowest rate, as a share of the highest (cosine, plateau); null = 0."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class TrainConfig(Section):
    """The optimisation."""

    read_if: ClassVar[Conditions] = {"momentum": ("optimizer", "sgd")}

    epochs: Count = Field(20, description="Passes over the training nodes.")
    max_steps: Count | None = Field(None, description="Stop after this many steps; null = never.")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="Optimiser.")
    lr: float = Field(0.003, gt=0, description="Learning rate; with a schedule, its highest.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="How the learning rate grows with the number of workers that a batch is made "
        "for: sampling.batch_size goes into it so often.",
    )
    schedule: ScheduleConfig = Field(
        ScheduleConfig(),
        description="How the learning rate changes, step by step.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum (sgd).")
    accumulate: Count = Field(1, description="Batches whose gradients are summed into one step.")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest norm of the gradient; null = no limit."
    )
    ema: Share | None = Field(
        None,
        description="Decay, in each step, of a moving average of the weights, which is evaluated, "
        "selected and tested in place of them; null = none.",
    )
    log_every: Count = Field(10, description="Steps between lines of metrics.jsonl.")
    eval_every: Count = Field(1, description="Epochs between evaluations.")
    patience: Count | None = Field(
        None, description="Stop after this many epochs without improvement; null = never."
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Smallest gain that counts as an improvement, in the metric's unit, for "
        "patience and for the plateau schedule.",
    )
    select: Literal["best", "last"] = Field(
        "best", description="Which weights are tested: the best on validation, or the last."
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of weights, batches and sampling.")
    callbacks: Classes = Field(
        {},
        description="Lightning callbacks of your own, package.module:Class, that every worker runs "
        "in this order: a list of them, or a mapping of each to its keyword arguments.",
    )

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        for spec in self.callbacks:
            yield from class_problems(spec, (*at, "callbacks"))


class Config(Section):
    """A job. Get one from :func:`raygnn.load_config`."""

    name: RunName = Field(description="Name of the run and of its directory in storage.")
    storage: Storage = Field(
        Path("runs"),
        description="Directory that every node sees, relative to where the command runs; or a URI "
        "that pyarrow.fs opens, such as s3://BUCKET/DIRECTORY, which every node can reach.",
    )
    graph: GraphConfig | None = Field(
        None, description="The input graph; may be left out when partition.path exists."
    )
    partition: PartitionConfig = Field(
        PartitionConfig(), description="How the graph is divided between the workers."
    )
    task: TaskConfig = Field(
        NodeClassification(), description="What is predicted and how it is measured."
    )
    tasks: Tasks | None = Field(
        None,
        description="Several tasks on one graph in place of `task`: name → what `task` has, and "
        "`weight`, `batch_factor` and `decoder`. One network serves all; the first one's metric "
        "selects the best weights.",
    )
    model: ModelConfig = Field(description="The network.")
    sampling: SamplingConfig = Field(SamplingConfig(), description="How minibatches are drawn.")
    staging: StagingConfig = Field(
        StagingConfig(),
        description="Each node's own copy of its parts, as arrays that all its workers share.",
    )
    train: TrainConfig = Field(TrainConfig(), description="The optimisation.")
    precision: Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"] = Field(
        "fp32", description="Types of weights and arithmetic; mixed keeps weights in fp32."
    )
    guard: GuardConfig = Field(
        GuardConfig(),
        description="That all ranks do the same: what they compare, and what happens to odd "
        "batches. `guard: deep` is short for `guard: {mode: deep}`.",
    )
    comm: CommConfig = Field(CommConfig(), description="Communication between the workers.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Where the job runs.")
    fault: FaultConfig = Field(FaultConfig(), description="What happens when something fails.")
    logging: LoggingConfig = Field(
        LoggingConfig(),
        description="Where the records of a training go besides the run directory.",
    )

    _file: Path | None = PrivateAttr(default=None)
    _trains: bool = PrivateAttr(default=True)
    _at_once: bool = PrivateAttr(default=False)

    @property
    def arithmetic(self) -> Precision:
        """Number types that ``precision`` stands for."""
        return PRECISIONS[self.precision]

    @property
    def file(self) -> Path | None:
        """The YAML file that this was read from, if it was."""
        return self._file

    @property
    def trains(self) -> bool:
        """Whether a model is trained: a job that asks one needs neither targets nor splits."""
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

    def problems(self, at: KeyPath = ()) -> Iterator[Problem]:
        """What the number of layers, the precision and GPUs do not agree on."""
        yield from self._sampling()
        yield from self._precision()

    def _sampling(self) -> Iterator[Problem]:
        sampling, model = self.sampling, self.model
        if self.task.of_graphs:
            yield from sampling.unused(
                ("sampling",),
                *("fanout", "replace", "edge_weight", "topology", "cache"),
                why=f"task.kind {self.task.kind} takes graphs whole",
            )
        elif not model.depth:
            yield from sampling.unused(
                ("sampling",),
                *("fanout", "replace", "edge_weight"),
                why="model.kind is none, which has no layers and draws no neighbours",
                instead="choose another model.kind",
            )
        elif len(sampling.fanout) != model.depth:
            yield Problem(
                ("sampling", "fanout"),
                f"{len(sampling.fanout)} fanouts {show(sampling.fanout)} for {model.depth} "
                "model.layers",
                f"give one number per layer, such as {show([10] * min(model.depth, 5))}, "
                "or change model.layers",
            )
        elif model.draws_once and any(hop != sampling.fanout[0] for hop in sampling.fanout):
            yield Problem(
                ("sampling", "fanout"),
                f"fanouts {show(sampling.fanout)} differ: with model.interface pyg a node draws "
                "its neighbours once, for all layers",
                "give every layer the same fanout, or set model.interface to pyg_layers",
            )

    def _precision(self) -> Iterator[Problem]:
        comm, gpus = self.comm, self.cluster.gpus_per_worker
        if self.arithmetic.weights == "bfloat16" and comm.compression != "none":
            yield Problem(
                ("comm", "compression"),
                f"{comm.compression} saves nothing: with precision bf16 gradients have 16 bits",
                "remove comm.compression",
            )
        if self.precision != "fp16-mixed":
            return
        if not gpus:
            message = f"fp16-mixed needs GPUs, but cluster.gpus_per_worker is {gpus}"
            remedy = "set precision to bf16-mixed or fp32, or give each worker a GPU"
            yield Problem(("precision",), message, remedy)
        if comm.shard == "full":
            yield Problem(
                ("precision",),
                "fp16-mixed scales the loss by what each worker sees of the gradients, which with "
                "comm.shard full is only its own share",
                "set precision to bf16-mixed or bf16, or comm.shard to optimizer or none",
            )

    def asking(self, *, at_once: bool = False) -> Config:
        """The same, for a job that asks a trained model; ``at_once``: of all seeds at one time."""
        found = self.model_copy()
        found._trains, found._at_once = False, at_once
        return found

    def with_workers(self, workers: int) -> Config:
        """Return the configuration for this number of workers."""
        cluster = self.cluster.model_copy(update={"workers": workers})
        return self.model_copy(update={"cluster": cluster})

    @property
    def by_task(self) -> dict[str, Config]:
        """Name of each task → the configuration as it is for that one alone; "" where there is
        but one."""
        return {"": self} if self.tasks is None else {name: self.of(name) for name in self.tasks}

    def of(self, name: str) -> Config:
        """The configuration as it is for one of `tasks` alone; "" = as it is."""
        if self.tasks is None:
            return self
        task = self.tasks[name]
        decoder = task.decoder if isinstance(task, EdgesOfTasks) else None
        features = None
        if task.of_edges:
            decoder = decoder or self.model.decoder
            features = None if task.of_links else self.model.decoder_features
        model = self.model.model_copy(update={"decoder": decoder, "decoder_features": features})
        return self.model_copy(update={"task": task, "tasks": None, "model": model})

    @property
    def own_steps(self) -> list[str]:
        """Classes and functions of the user's that take part in training steps, or in metrics."""
        kinds = self.model.kind, self.task.kind
        classes = [*(kind for kind in kinds if ":" in kind), *self.train.callbacks]
        functions = [spec for one in self.by_task.values() for spec in one.task.own.values()]
        return [*classes, *dict.fromkeys(functions)]

    @property
    def needs_masks(self) -> bool:
        """Whether the graph must say which of its nodes are for training."""
        tasks = [c.task for c in self.by_task.values()]
        nodes = [task for task in tasks if isinstance(task, NodeTaskConfig)]
        return self.trains and any(task.split is None for task in nodes)

    @property
    def seed_time(self) -> str | None:
        """The array that says when seeds are; None = they have no times, or are seen at one."""
        time = self.sampling.time
        return None if time is None or self._at_once else time.seeds or time.edges

    @property
    def ordered(self) -> bool:
        """Whether seeds see what was before them, and edges as seeds not themselves."""
        time = self.sampling.time
        return time is not None and time.seeds in (None, time.edges)

    @property
    def split_time(self) -> str | None:
        """The array that the seeds of the task are split by; None where they are not, by time."""
        task, time = self.task, self.sampling.time
        split = task.split if isinstance(task, (NodeTaskConfig, EdgeTaskConfig)) else None
        if split is None or split.by != "time":
            return None
        return split.time or (None if time is None else time.seeds or time.edges)

    @property
    def metric(self) -> str:
        """The metric that selects the best weights, as records call it."""
        name, config = next(iter(self.by_task.items()))
        return metric_name(name, config.task.chosen_metric)

    def where(self, key: str) -> str:
        """A key as errors name it: with the file that it stands in, if there is one."""
        return f"{self._file}: {key}" if self._file else key

    @property
    def store(self) -> Uri | None:
        """``storage``, where that is no directory."""
        return self.storage if isinstance(self.storage, Uri) else None

    @property
    def local_storage(self) -> Path:
        """``storage``, or else the directory on each node that stands for it while jobs run."""
        if isinstance(self.storage, Path):
            return self.storage
        digest = hashlib.sha256(self.storage.shared.encode()).hexdigest()
        return self.staging.root / "work" / digest[:16]

    @property
    def run_dir(self) -> Path:
        """``<storage>/<name>``, or what stands for it on each node."""
        return self.local_storage / self.name

    def sections(self) -> Iterator[tuple[KeyPath, Section]]:
        """All sections, each with its place."""
        pending: list[tuple[KeyPath, Any]] = [((), self)]
        while pending:
            at, value = pending.pop(0)
            if isinstance(value, Section):
                if at:
                    yield at, value
                keys = type(value).model_fields
                pending += [((*at, key), getattr(value, key)) for key in keys]
            elif at == ("tasks",):
                pending += [((*at, name), task) for name, task in (value or {}).items()]

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value as JSON types; ``load_config`` reads it back as an equal job."""
        return self.model_dump(mode="json")

    def recorded(self) -> dict[str, Any]:
        """The same without the values of ``comm.env`` that look like secrets: for files."""
        config = self.to_dict()
        env = config["comm"]["env"]
        env |= {name: HIDDEN for name, value in env.items() if is_secret(name, value)}
        return config


def metric_name(task: str, metric: str) -> str:
    """What records call a metric of one of several tasks, or of the only one, ""."""
    return f"{task}/{metric}" if task else metric


SECTIONS = {
    key: sections
    for key, field in Config.model_fields.items()
    if (sections := sections_in(field.annotation)) and key != "graph"
}
"""Key → the classes that its section may have; ``graph`` aside, which overrides replace."""
