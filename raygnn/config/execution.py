"""Execution of a job: ``staging``, ``comm``, ``cluster``, ``fault``, ``guard`` and ``logging``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from raygnn.config.places import HIDDEN, is_secret
from raygnn.config.problems import Problem, nearest, show
from raygnn.config.values import (
    LARGEST,
    Address,
    Conditions,
    Count,
    Duration,
    Environment,
    InputPath,
    Interval,
    JsonValues,
    Section,
    Span,
    Wait,
    Workers,
    from_seconds,
    with_arguments,
)
from raygnn.config.yaml_text import KeyPath

if TYPE_CHECKING:
    import torch

# Checks of the nodes, functions in `raygnn.preflight`, in the order of their findings.
NODE_CHECKS = (
    "nodes_answer",
    "versions_supported",
    "versions_uniform",
    "code_uniform",
    "hardware_uniform",
    "environment_uniform",
    "shared_memory",
    "interfaces_there",
    "debug_level_safe",
    "network_reach",
)
# Checks of a job on these nodes.
JOB_CHECKS = (
    "resources_fit",
    "devices_suit",
    "bf16_is_there",
    "gpus_are_there",
    "gpus_are_free",
    "model_runs",
    "storage_visible",
    "partition_visible",
    "parts_agree",
    "arrays_usable",
    "inputs_exist",
    "embeddings_usable",
    "nodes_to_train_on",
    "splits_agree",
    "times_usable",
    "edge_arrays_read",
    "memory_fits",
    "disk_space",
    "cache_usable",
    "cache_space",
)
# Checks whose errors cannot be allowed: the job would certainly fail, or wait forever.
BINDING = frozenset(
    (
        *("interfaces_there", "resources_fit", "devices_suit", "arrays_usable", "inputs_exist"),
        *("embeddings_usable", "nodes_to_train_on", "times_usable", "cache_usable", "name_free"),
    )
)
# Checks that `cluster.allow` accepts.
ALLOWABLE = tuple(name for name in (*NODE_CHECKS, *JOB_CHECKS) if name not in BINDING)


# Largest fanout on a GPU, where each sampled neighbour is compared with all previous ones.
MOST_DRAWN = 1024


@dataclass(frozen=True)
class Precision:
    """Number types of a training."""

    # name of the torch dtype of parameters, gradients and features
    weights: Literal["float64", "float32", "bfloat16"]
    # Lightning's name of the precision that layers compute in
    autocast: Literal["32-true", "bf16-mixed", "16-mixed"]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters, gradients and features."""
        import torch  # here, since configurations are read without torch

        dtype: torch.dtype = getattr(torch, self.weights)
        return dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return {"bfloat16": 2, "float32": 4, "float64": 8}[self.weights]

    @property
    def bf16(self) -> bool:
        """True if anything is stored or computed in bf16."""
        return self.weights == "bfloat16" or self.autocast == "bf16-mixed"


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("float32", "32-true"),
    "bf16": Precision("bfloat16", "32-true"),
    "bf16-mixed": Precision("float32", "bf16-mixed"),
    "fp16-mixed": Precision("float32", "16-mixed"),
}


class StagingConfig(Section):
    """Copy of a node's partitions on its local disk, which all its workers share."""

    path: InputPath | None = None
    """Directory on each node; null = raygnn-<user> in the node's temporary directory. If storage is
    a URI, a job's files are also written here before they are uploaded."""
    max_gb: Annotated[float, Field(gt=0)] | None = None
    """Largest size, GB; the least recently used entries are removed first. null = half of the
    disk."""
    resident: Literal["auto", "always", "never"] = "auto"
    """Copy the feature rows that a node's workers own into memory with huge pages, once per node,
    which is faster to read than a mapped file; auto = if they take at most a quarter of the free
    memory."""

    @property
    def root(self) -> Path:
        """Directory of the copies on a node."""
        return self.path or Path(tempfile.gettempdir()) / f"raygnn-{os.getuid()}"


class CommConfig(Section):
    """Communication between the workers."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the process group; auto = nccl with GPUs, else gloo."""
    timeout: Annotated[Span, from_seconds(1, "ranks may need this long to meet")] = Duration(1800.0)
    """Longest wait for a collective, such as 30m."""
    bucket_cap_mb: Count = 25
    """Size of a gradient bucket, MB."""
    overlap: bool = True
    """Exchange gradients during the backward pass; false = all at its end."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Data type in which gradients are exchanged; none = the gradients' own."""
    shard: Literal["none", "optimizer"] = "none"
    """State that is sharded over the workers instead of replicated: optimizer = optimizer state
    (ZeRO-1). Losses are the same; memory is saved at the cost of traffic."""
    find_unused_parameters: bool = False
    """Search for parameters without a gradient in each step (slow)."""
    env: Environment = Field({})
    """Environment variables of every worker; they override raygnn's choices. Values that look like
    secrets, by name or as a URI with a user, are written as `***` in the run directory."""
    debug: bool = False
    """Debugging on all ranks: collectives are compared before they run, NCCL logs to a file per
    rank, CUDA errors are raised where they occur (slow)."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        for name, value in self.env.items():
            if value == HIDDEN:
                message = f"{HIDDEN} stands for a value that a run's config.yaml does not keep"
                remedy = f"give the value, with --set comm.env.{name}=… or in your own file"
                yield Problem((*at, "env", name), message, remedy)


class ClusterConfig(Section):
    """Ray cluster that the job runs on."""

    read_if: ClassVar[Conditions] = {"num_cpus": ("address", "auto", "local")}

    address: Address = "auto"
    """HOST:PORT of a Ray head node; local = start Ray on this machine; auto = RAY_ADDRESS if it is
    set, else local."""
    workers: Workers = "auto"
    """Number of workers; auto = one for a graph of fewer than 50,000 nodes and 1 GiB, else as many
    as fit; [min, max] = elastic training: as many of them as fit, adjusted when nodes join or
    leave, with batches for max workers."""
    cpus_per_worker: Count = 1
    """CPUs of a worker."""
    gpus_per_worker: int = Field(0, ge=0, le=1024)
    """GPUs of a worker."""
    uniform: Literal["strict", "warn", "off"] = "strict"
    """If nodes that may run workers differ (checks `*_uniform` below): strict = refuse, warn =
    warn, off = ignore."""
    wait: Wait = 0
    """Longest wait for an autoscaling cluster to add nodes: the job requests resources for its
    workers (the minimum of a range) and starts when they are available; 0 = refuse a job that does
    not fit at once."""
    allow: list[str] = Field([])
    """Names of checks (see below) whose errors do not stop the job."""
    probe_timeout: Span = Duration(5.0)
    """Longest wait for a node to report its hardware, after the first node's answer; the first one
    may take half a minute, because a Python process is started for it."""
    num_cpus: Count | None = None
    """CPUs of a Ray that the command starts; null = all."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        yield from self._allowed((*at, "allow"))
        if self.wait and self.workers == "auto":
            yield Problem(
                (*at, "wait"),
                "the number of workers to wait for is unknown: cluster.workers is auto",
                "set cluster.workers to a number, or to [min, max] to start with min of them",
            )
        if self.address == "local":
            why = "cluster.address is local, and a Ray that the command starts does not grow"
            yield from self.unused(at, "wait", why=why)
        workers = self.limits[0] if self.limits else 1
        if self.num_cpus is not None and workers * self.cpus_per_worker > self.num_cpus:
            yield Problem(
                (*at, "num_cpus"),
                f"{self.num_cpus} CPUs are too few for {workers} × {self.cpus_per_worker} "
                "(cluster.workers × cluster.cpus_per_worker)",
                "raise cluster.num_cpus, or lower the number of workers or their CPUs",
            )

    def _allowed(self, at: KeyPath) -> Iterator[Problem]:
        names = dict.fromkeys(self.allow)
        if unknown := [name for name in names if name not in (*ALLOWABLE, *BINDING)]:
            near = [close for name in unknown if (close := nearest(name, ALLOWABLE))]
            checks = f"checks are: {', '.join(sorted(ALLOWABLE))}"
            remedy = f"did you mean {', '.join(dict.fromkeys(near))}?" if near else checks
            yield Problem(at, f"there is no check {', '.join(map(show, unknown))}", remedy)
        if binding := [name for name in names if name in BINDING]:
            message = (
                f"{', '.join(binding)} cannot be allowed: the job would fail later, or wait forever"
            )
            yield Problem(at, message, "remove it, and correct what the check reports")

    @property
    def worker_needs(self) -> dict[str, float]:
        """Ray resources of a worker."""
        gpus = {"GPU": float(self.gpus_per_worker)} if self.gpus_per_worker else {}
        return {"CPU": float(self.cpus_per_worker), **gpus}

    @property
    def wait_seconds(self) -> float:
        """Longest wait for nodes, seconds; 0 = none."""
        return self.wait.seconds if isinstance(self.wait, Duration) else 0.0

    @property
    def limits(self) -> tuple[int, int] | None:
        """Fewest and most workers; None for auto."""
        if self.workers == "auto":
            return None
        return (self.workers, self.workers) if isinstance(self.workers, int) else self.workers

    @property
    def elastic(self) -> bool:
        """True if the number of workers may change during the run."""
        return self.limits is not None and self.limits[0] < self.limits[1]


class FaultConfig(Section):
    """Fault tolerance: checkpoints, restarts and timeouts."""

    max_failures: int = Field(3, ge=0, le=10**6)
    """Restarts before the job fails."""
    checkpoint_every: Interval = Duration(600.0)
    """Interval between checkpoints: steps (a number) or time (such as 10m); the last step is always
    saved."""
    keep: Count = 3
    """Number of checkpoints kept."""
    straggler: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 1.5
    """A rank is reported as slow if its own busy time is at least this multiple of the other ranks'
    median in three consecutive windows of `train.log_every` steps; null = never."""
    save_timeout: Span = Duration(30.0)
    """Longest wait for the last checkpoint when a run is interrupted (Ctrl-C, SIGTERM, `ray job
    stop`); a second Ctrl-C ends the wait."""
    storage_timeout: Span = Duration(60.0)
    """Longest wait for storage that is full or unreachable, where the run needs it: at its start
    and end. In between, records are buffered and checkpoints are skipped. Slow storage is waited
    for as long as it accepts some bytes in this time."""
    heartbeat: Annotated[
        Span, from_seconds(5, "a healthy rank may be silent for a second or two")
    ] = Duration(60.0)
    """Longest silence of a rank, from 5s. Each rank sends a heartbeat every second, whatever it
    computes. A rank without a heartbeat is frozen (stopped, swapping, stuck in the kernel or in
    storage): it is named and killed, and all ranks restart. After another rank's collective has
    timed out, 10s are enough. Code that holds the GIL, such as a native call or the import of large
    libraries from slow storage, looks frozen, too: raise the value if yours does, or to hold a rank
    in a debugger."""


# YAML 1.1 parsers other than ours read on and off as booleans.
_OnOff = BeforeValidator(lambda v: ("on" if v else "off") if isinstance(v, bool) else v)


class GuardConfig(Section):
    """Comparison of the ranks, and limits on bad batches."""

    mode: Annotated[Literal["on", "deep", "off"], _OnOff] = "on"
    """on = ranks compare their parameters, dtypes, batch arrays and options before a step; deep =
    also each collective before it runs (slow); off = no comparison."""
    every: Count = 100
    """Steps between comparisons; the first step of each attempt is always compared."""
    nan_steps: int = Field(10, ge=0, le=LARGEST)
    """Consecutive steps with a non-finite gradient that all ranks skip together; one more fails the
    run."""


Loggers: TypeAlias = Annotated[
    dict[Literal["tensorboard", "mlflow", "wandb"], JsonValues],
    BeforeValidator(with_arguments),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object"}]}),
]


# Arguments that raygnn passes: the run directory, and the log that a resumed run continues.
_SET_BY_US = {
    "mlflow": ("save_dir", "run_id"),
    "wandb": ("save_dir", "dir", "id", "version", "resume", "experiment"),
}
_VARIABLES = {
    "mlflow": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,",
    "wandb": "WANDB_API_KEY",
}


class LoggingConfig(Section):
    """Loggers that receive the training records, besides the run directory."""

    loggers: Loggers = Field({"tensorboard": {}})
    """Loggers that receive every record of metrics.jsonl: a list, or a mapping of each to its
    arguments. tensorboard writes to `loggers/` in the run directory; mlflow and wandb need their
    package and pass arguments to Lightning's MLFlowLogger and WandbLogger, such as `{mlflow:
    {tracking_uri: …}}`. Secrets belong in the environment of the command (MLFLOW_TRACKING_TOKEN,
    WANDB_API_KEY), not here. A logger that fails never stops a training."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        for name, arguments in self.loggers.items():
            here = (*at, "loggers", name)
            if arguments and name not in _SET_BY_US:
                yield Problem(here, f"{name} accepts no arguments", "remove them")
                continue
            for key, value in arguments.items():
                if key in _SET_BY_US[name]:
                    message = f"{key} is set by raygnn, so that a resumed run continues its log"
                    yield Problem((*here, key), message, "remove it")
                elif secret := _secret(key, value):
                    yield Problem(
                        (*here, key),
                        f"{secret} looks like a secret; the run's config.yaml would store it",
                        f"remove it, and set {_VARIABLES[name]} in the environment of the command",
                    )


def _secret(key: str, value: Any) -> str | None:
    """Return the secret in an argument, by its name or as a URI with a user; None without one."""
    if is_secret(key):
        return show(key)
    if isinstance(value, dict):
        found = (_secret(str(inner), item) for inner, item in value.items())
        return next((secret for secret in found if secret), None)
    if isinstance(value, list):
        return next((secret for item in value if (secret := _secret(key, item))), None)
    return f"a value of {show(key)}" if is_secret("", json.dumps(value)) else None
