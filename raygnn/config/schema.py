"""The configuration: one frozen model per section, every key with its type, range and meaning.

One key at a time is checked here; what several keys must agree on is in
:mod:`raygnn.config.rules`, and :func:`raygnn.config.load.load_config` runs both. Types are
strict: neither ``"3"`` nor ``3.0`` nor ``true`` is a whole number, while ``3`` is a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from raygnn.config.duration import Duration
from raygnn.config.graphs import GraphConfig
from raygnn.config.guard import GuardConfig
from raygnn.config.logging import LoggingConfig
from raygnn.config.model import ModelConfig
from raygnn.config.sampling import SamplingConfig
from raygnn.config.secret import HIDDEN, is_secret
from raygnn.config.section import Section
from raygnn.config.several import Tasks
from raygnn.config.task import TaskConfig
from raygnn.config.train import TrainConfig
from raygnn.config.types import (
    LARGEST,
    Address,
    AutoCount,
    Count,
    Environment,
    InputPath,
    Interval,
    Place,
    RunName,
    Storage,
    Workers,
)


class PartitionConfig(Section):
    """How the graph is divided between the workers."""

    parts: AutoCount = Field("auto", description="Number of parts; auto = one for each worker.")
    method: Literal["metis", "random"] = Field(
        "metis", description="metis keeps neighbours together; random is quick."
    )
    path: Place | None = Field(
        None,
        description="Directory of a partition to reuse, or to write; null = "
        "<storage>/partitions/<digest>. One to reuse may be a URI that pyarrow.fs opens, such as "
        "s3://BUCKET/DIRECTORY.",
    )


class StagingConfig(Section):
    """Each node's own copy of its parts, as arrays that all its workers share."""

    path: InputPath | None = Field(
        None, description="Directory on each node; null = raygnn-<user> in its temporary directory."
    )
    max_gb: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Largest size, GB; what was not used for longest goes first. null = half of "
        "the disk.",
    )
    resident: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether each worker copies the feature rows that it owns into memory with "
        "large pages, which is read faster than a mapped file; auto = if those of all workers "
        "take at most a quarter of the free memory.",
    )


class CommConfig(Section):
    """Communication between the workers."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Process group; auto = nccl with GPUs, else gloo."
    )
    timeout: Duration = Field(
        Duration(1800.0), description="Longest wait for a collective, such as 30m."
    )
    bucket_cap_mb: Count = Field(25, description="Size of a gradient bucket, MB.")
    gradient_as_bucket_view: bool = Field(
        True,
        description="Gradients lie where they are exchanged from, which saves a copy and memory.",
    )
    overlap: bool = Field(
        True,
        description="Exchange gradients while the backward pass goes on; false = all at its end.",
    )
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        "none",
        description="What is exchanged of gradients: all bits, half of them, or (powersgd) "
        "products of thin matrices, where what is left out is added to the next ones.",
    )
    powersgd_rank: Count = Field(4, description="Width of these matrices.")
    powersgd_start: int = Field(
        10, ge=0, le=LARGEST, description="Steps of a run before compression by powersgd begins."
    )
    shard: Literal["none", "optimizer", "full"] = Field(
        "none",
        description="What is shared out between the workers, where each has all of it otherwise: "
        "optimizer = the optimiser's state; full = that, the parameters and the gradients. The "
        "losses are the same; memory is saved for traffic.",
    )
    find_unused_parameters: bool = Field(
        False, description="Look for parameters that got no gradient, in each step (slow)."
    )
    static_graph: bool = Field(False, description="Every step uses the same parameters.")
    env: Environment = Field(
        {},
        description="Environment variables for every worker; win over what raygnn chooses. What "
        "looks like a secret, by its name or as a URI with a user, is `***` in what a run leaves.",
    )
    debug: bool = Field(
        False,
        description="On all ranks what an investigation needs: collectives compared before they "
        "run, NCCL's log in a file per rank, CUDA errors where they happen (slow).",
    )


class ClusterConfig(Section):
    """Where the job runs."""

    address: Address = Field(
        "auto",
        description="HOST:PORT of a Ray head node; local = start Ray here; auto = RAY_ADDRESS "
        "if it is set, else local.",
    )
    workers: Workers = Field(
        "auto",
        description="Number of workers; auto = as many as fit; [min, max] = as many of them as "
        "fit, again whenever nodes go or come, with batches of sampling.batch_size × max.",
    )
    cpus_per_worker: Count = Field(1, description="CPUs of a worker.")
    gpus_per_worker: int = Field(0, ge=0, le=1024, description="GPUs of a worker.")
    uniform: Literal["strict", "warn", "off"] = Field(
        "strict",
        description="When nodes that may hold workers differ (the checks `*_uniform` below): "
        "refuse, warn, ignore.",
    )
    allow: list[str] = Field(
        [], description="Names of checks (see below) whose errors shall not stop the job."
    )
    probe_timeout: Duration = Field(
        Duration(5.0),
        description="Longest wait for a node to say what it has, from the first node's answer on; "
        "half a minute is waited for that one, since a Python process is started for it.",
    )
    num_cpus: Count | None = Field(
        None, description="CPUs of the Ray that is started here; null = all."
    )

    @property
    def limits(self) -> tuple[int, int] | None:
        """Fewest and most workers; None for auto."""
        if self.workers == "auto":
            return None
        return (self.workers, self.workers) if isinstance(self.workers, int) else self.workers

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change while the job runs."""
        return self.limits is not None and self.limits[0] < self.limits[1]


class FaultConfig(Section):
    """What happens when something fails."""

    max_failures: int = Field(3, ge=0, le=10**6, description="Restarts before the job gives up.")
    checkpoint_every: Interval = Field(
        Duration(600.0),
        description="Steps (a number) or time (such as 10m) between checkpoints; one more "
        "comes after the last step.",
    )
    keep: Count = Field(3, description="Checkpoints kept.")
    mirror: Place | None = Field(
        None,
        description="A second place for checkpoints, such as s3://BUCKET/DIRECTORY or whatever "
        "else pyarrow.fs opens: each is copied to `<mirror>/<name>`, and `--resume` takes the "
        "newest of both places, also on a machine that has never seen the run.",
    )
    straggler: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        1.5,
        description="A rank is named as slow that, on its own, is busy for so many times the "
        "median of the other ranks, in three windows of `train.log_every` steps in a row; null = "
        "never.",
    )
    save_timeout: Duration = Field(
        Duration(30.0),
        description="Longest wait for a last checkpoint when a run is interrupted (Ctrl-C, "
        "SIGTERM, `ray job stop`); a second Ctrl-C ends the wait.",
    )
    storage_timeout: Duration = Field(
        Duration(60.0),
        description="Longest wait for storage that is full or away, where a run cannot go on "
        "without it: where it starts and where it ends. In between, records wait and checkpoints "
        "are left out. Slow storage is waited for as long as it takes some bytes in this time.",
    )
    heartbeat: Duration = Field(
        Duration(60.0),
        description="Longest silence of a rank, from 5s. Each gives a sign of life every second, "
        "whatever it computes; one that gives none for so long is frozen (stopped, swapping, stuck "
        "in the kernel or in storage): it is named and ended, and all ranks start again. 10s are "
        "enough once another's wait for it has failed, as comm.timeout has it. A call that keeps "
        "Python's lock looks the same, such as into native code, or an import of large libraries "
        "from slow storage: raise it if one takes longer, or to hold a rank in a debugger.",
    )


class Config(Section):
    """A job. Get one from :func:`raygnn.load_config`."""

    name: RunName = Field(description="Name of the run and of its directory in storage.")
    storage: Storage = Field(
        "runs", description="Directory that every node sees, relative to where the command runs."
    )
    graph: Annotated[GraphConfig, Field(discriminator="format")] | None = Field(
        None, description="The input graph; may be left out when partition.path exists."
    )
    partition: PartitionConfig = Field(
        PartitionConfig(), description="How the graph is divided between the workers."
    )
    task: TaskConfig = Field(TaskConfig(), description="What is predicted and how it is measured.")
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

    @property
    def file(self) -> Path | None:
        """The YAML file that this was read from, if it was."""
        return self._file

    @property
    def trains(self) -> bool:
        """Whether a model is trained: a job that asks one needs neither targets nor splits."""
        return self._trains

    def asking(self) -> Config:
        """The same, for a job that asks a trained model."""
        found = self.model_copy()
        found._trains = False
        return found

    @property
    def by_task(self) -> dict[str, Config]:
        """Name of each task → the configuration as it is for that one alone; "" where there is
        but one."""
        return {"": self} if self.tasks is None else {name: self.of(name) for name in self.tasks}

    def of(self, name: str) -> Config:
        """The configuration as it is for one of `tasks` alone; "" = as it is."""
        if self.tasks is None:
            return self
        one = self.tasks[name]
        keys = {key: getattr(one, key) for key in TaskConfig.model_fields}
        decoder = one.decoder or (self.model.decoder if one.of_edges else None)
        model = self.model.model_copy(update={"decoder": decoder})
        task = TaskConfig.model_construct(one.model_fields_set & keys.keys(), **keys)
        return self.model_copy(update={"task": task, "tasks": None, "model": model})

    @property
    def needs_masks(self) -> bool:
        """Whether the graph must say which of its nodes are for training."""
        return self.trains and any(c.task.seeds == "nodes" for c in self.by_task.values())

    @property
    def metric(self) -> str:
        """The metric that selects the best weights, as records call it."""
        name, config = next(iter(self.by_task.items()))
        return metric_name(name, config.task.chosen_metric)

    def where(self, key: str) -> str:
        """A key as errors name it: with the file that it stands in, if there is one."""
        return f"{self._file}: {key}" if self._file else key

    @property
    def run_dir(self) -> Path:
        """``<storage>/<name>``."""
        return Path(self.storage) / self.name

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


SECTIONS: dict[str, type[Section]] = {
    "partition": PartitionConfig,
    "task": TaskConfig,
    "model": ModelConfig,
    "sampling": SamplingConfig,
    "staging": StagingConfig,
    "train": TrainConfig,
    "guard": GuardConfig,
    "comm": CommConfig,
    "cluster": ClusterConfig,
    "fault": FaultConfig,
    "logging": LoggingConfig,
}


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a configuration, for editors that complete and check YAML."""
    schema = Config.model_json_schema()
    for section in schema["$defs"].values():
        for key in section.get("properties", {}).values():
            if isinstance(key.get("default"), dict) and "seconds" in key["default"]:
                key["default"] = str(Duration(**key["default"]))  # as it is written in YAML
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "raygnn configuration",
    }
