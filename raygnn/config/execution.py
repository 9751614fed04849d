"""Where and how a job runs: the sections ``staging``, ``comm``, ``cluster`` and ``fault``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raygnn.config.values import (
    LARGEST,
    Address,
    Count,
    Duration,
    Environment,
    InputPath,
    Interval,
    Place,
    Section,
    Workers,
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
