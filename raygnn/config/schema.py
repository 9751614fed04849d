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
from raygnn.config.section import Section
from raygnn.config.types import (
    Address,
    AutoCount,
    Count,
    Environment,
    Fanouts,
    Fraction,
    InputPath,
    Interval,
    JsonValues,
    ModelKind,
    Names,
    PartitionPath,
    RunName,
    Storage,
    Text,
)


class PartitionConfig(Section):
    """How the graph is divided between the workers."""

    parts: AutoCount = Field("auto", description="Number of parts; auto = one for each worker.")
    method: Literal["metis", "random"] = Field(
        "metis", description="metis keeps neighbours together; random is quick."
    )
    path: PartitionPath | None = Field(
        None,
        description="Directory of a partition to reuse, or to write; null = "
        "<storage>/partitions/<digest>. One to reuse may be a URI that pyarrow.fs opens, such as "
        "s3://BUCKET/DIRECTORY.",
    )


class TaskConfig(Section):
    """What is predicted and how it is measured."""

    kind: Literal["node_classification"] = Field(
        "node_classification", description="What is predicted."
    )
    target: Text = Field("label", description="Name of the array that holds the labels.")
    metric: Literal["accuracy", "f1", "roc_auc"] = Field(
        "accuracy", description="Metric that is reported and that selects the best weights."
    )
    ntype: Text | None = Field(
        None, description="Node type to classify; null = the only one that has the target."
    )


class ModelConfig(Section):
    """The network."""

    kind: ModelKind = Field(
        description="gcn, sage, gat, gatv2, or package.module:Class of your own torch.nn.Module."
    )
    hidden: Count = Field(
        64, description="Width of a hidden layer; for gat and gatv2 over all heads."
    )
    layers: int = Field(2, ge=1, le=64, description="Number of message-passing layers.")
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of a layer's inputs dropped.")
    input_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Share of the input features dropped; null = dropout. With 0, gcn and sage "
        "combine the features of the first layer's neighbours without copying them out.",
    )
    kernels: Literal["auto", "torch", "dgl"] = Field(
        "auto",
        description="Message passing in plain torch or by DGL's kernels; auto = the faster one "
        "that the device has.",
    )
    heads: int = Field(
        8, ge=1, le=1024, description="Attention heads of a hidden layer (gat, gatv2)."
    )
    out_heads: int = Field(
        1, ge=1, le=1024, description="Attention heads of the last layer, averaged (gat, gatv2)."
    )
    attn_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Share of attention weights dropped (gat, gatv2); null = dropout."
    )
    residual: bool = Field(False, description="Add a layer's input to its output.")
    norm: Literal["none", "layer", "batch"] = Field(
        "none", description="Normalisation after each hidden layer."
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


class SamplingConfig(Section):
    """How minibatches are drawn."""

    fanout: Fanouts = Field(
        (10, 10),
        description="Neighbours per layer from the seeds outward; -1 = all. For a layer, also a "
        "number for each edge type (`{buys: 5, '*': 10}`, by relation or source:relation:target; "
        "`*` = all others).",
    )
    batch_size: Count = Field(512, description="Seeds per worker and step.")
    eval_batch_size: Count | None = Field(
        None, description="Seeds per worker and step when your own class is evaluated; null = 1024."
    )
    replace: bool = Field(False, description="Draw neighbours with replacement.")
    edge_weight: Text | None = Field(
        None,
        description="Edge array that neighbours are drawn in proportion to; null = alike. Edge "
        "types without it draw alike.",
    )
    topology: Literal["auto", "replicated", "partitioned"] = Field(
        "auto",
        description="replicated: each node holds the whole structure; partitioned: its own parts "
        "only; auto: replicated where it fits.",
    )
    cache: Fraction = Field(0.1, description="Share of the remote feature rows kept locally.")
    cache_policy: Literal["vip", "degree"] = Field(
        "vip",
        description="Which rows are kept: vip = those most likely to be asked for, by the "
        "sampling itself; degree = those with most edges.",
    )
    prefetch: int = Field(2, ge=0, le=1024, description="Batches prepared ahead.")


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


class TrainConfig(Section):
    """The optimisation."""

    epochs: Count = Field(20, description="Passes over the training nodes.")
    max_steps: Count | None = Field(None, description="Stop after this many steps; null = never.")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="Optimiser.")
    lr: float = Field(0.003, gt=0, description="Learning rate.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="How the learning rate grows with the number of workers."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum (sgd).")
    accumulate: Count = Field(1, description="Batches whose gradients are summed into one step.")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest norm of the gradient; null = no limit."
    )
    log_every: Count = Field(10, description="Steps between lines of metrics.jsonl.")
    eval_every: Count = Field(1, description="Epochs between evaluations.")
    patience: Count | None = Field(
        None, description="Stop after this many epochs without improvement; null = never."
    )
    select: Literal["best", "last"] = Field(
        "best", description="Which weights are tested: the best on validation, or the last."
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of weights, batches and sampling.")


class CommConfig(Section):
    """Communication between the workers."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Process group; auto = nccl with GPUs, else gloo."
    )
    timeout: Duration = Field(
        Duration(1800.0), description="Longest wait for a collective, such as 30m."
    )
    bucket_cap_mb: Count = Field(25, description="Size of a gradient bucket, MB.")
    compression: Literal["none", "fp16", "bf16"] = Field(
        "none", description="Type in which gradients are exchanged."
    )
    find_unused_parameters: bool = Field(
        False, description="Look for parameters that got no gradient, in each step (slow)."
    )
    static_graph: bool = Field(False, description="Every step uses the same parameters.")
    env: Environment = Field(
        {}, description="Environment variables for every worker; win over what raygnn chooses."
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
    workers: AutoCount = Field("auto", description="Number of workers; auto = as many as fit.")
    cpus_per_worker: Count = Field(1, description="CPUs of a worker.")
    gpus_per_worker: int = Field(0, ge=0, le=1024, description="GPUs of a worker.")
    uniform: Literal["strict", "warn", "off"] = Field(
        "strict",
        description="When nodes differ in software, hardware or variables: refuse, warn, ignore.",
    )
    allow: list[str] = Field(
        [], description="Names of checks whose errors are known and shall not stop the job."
    )
    probe_timeout: Duration = Field(
        Duration(5.0), description="Longest wait for a node to say what it has."
    )
    num_cpus: Count | None = Field(
        None, description="CPUs of the Ray that is started here; null = all."
    )


class FaultConfig(Section):
    """What happens when something fails."""

    max_failures: int = Field(3, ge=0, le=10**6, description="Restarts before the job gives up.")
    checkpoint_every: Interval = Field(
        Duration(600.0), description="Steps (a number) or time (such as 10m) between checkpoints."
    )
    keep: Count = Field(3, description="Checkpoints kept.")


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
    comm: CommConfig = Field(CommConfig(), description="Communication between the workers.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Where the job runs.")
    fault: FaultConfig = Field(FaultConfig(), description="What happens when something fails.")

    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The YAML file that this was read from, if it was."""
        return self._file

    @property
    def run_dir(self) -> Path:
        """``<storage>/<name>``."""
        return Path(self.storage) / self.name

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value as JSON types; ``load_config`` reads it back as an equal job."""
        return self.model_dump(mode="json")


SECTIONS: dict[str, type[Section]] = {
    "partition": PartitionConfig,
    "task": TaskConfig,
    "model": ModelConfig,
    "sampling": SamplingConfig,
    "staging": StagingConfig,
    "train": TrainConfig,
    "comm": CommConfig,
    "cluster": ClusterConfig,
    "fault": FaultConfig,
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
