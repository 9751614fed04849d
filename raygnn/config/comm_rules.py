"""What the variables and times of communication and the checks to pass over must be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.config.execution import CommConfig
from raygnn.config.places import HIDDEN
from raygnn.config.problems import Problem, show
from raygnn.config.schema import Config

DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")
MAX_PARTS = 1 << 20  # that a partition may have

# What only `DistributedDataParallel` is told.
_DDP_ONLY = (
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "overlap",
    "compression",
    "find_unused_parameters",
    "static_graph",
)

_SHORTEST = 1.0  # seconds: torch's store fails with less before all ranks are there
_SHORTEST_SILENCE = 5.0  # seconds: a busy machine gives a thread no time for one or two


def communication(config: Config) -> Iterator[Problem]:
    """``comm.timeout``, ``fault.heartbeat`` and what is known of variables in ``comm.env``."""
    comm = config.comm
    if comm.timeout.seconds < _SHORTEST:
        yield Problem(
            ("comm", "timeout"),
            f"{comm.timeout} is shorter than ranks need to meet",
            "set it to 1s or longer; minutes are usual",
        )
    if (heartbeat := config.fault.heartbeat).seconds < _SHORTEST_SILENCE:
        yield Problem(
            ("fault", "heartbeat"),
            f"{heartbeat} is shorter than a rank that is well may be silent on a busy machine",
            f"set it to {_SHORTEST_SILENCE:g}s or longer; a minute is usual",
        )
    for name, value in comm.env.items():
        if value == HIDDEN:
            yield Problem(
                ("comm", "env", name),
                f"{HIDDEN} stands for a value that a run's config.yaml does not keep",
                f"give the value, with --set comm.env.{name}=… or in your own file",
            )
        elif name == "OMP_NUM_THREADS" and not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", value):
            yield Problem(
                ("comm", "env", name),
                f"expected a whole number from 1, got {show(value)}",
                "correct it or leave it out: it is cluster.cpus_per_worker then",
            )
        elif name == "TORCH_DISTRIBUTED_DEBUG" and value.upper() not in DEBUG_LEVELS:
            yield Problem(
                ("comm", "env", name),
                f"torch knows no such level, {show(value)}; there are: {', '.join(DEBUG_LEVELS)}",
                "remove it, and set comm.debug to true for what an investigation needs",
            )


def compression(config: Config) -> Iterator[Problem]:
    """A compression that has an effect, and its own keys only."""
    comm, defaults = config.comm, CommConfig.model_fields
    for key in ("powersgd_rank", "powersgd_start"):
        value = getattr(comm, key)
        if comm.compression != "powersgd" and value != defaults[key].default:
            yield Problem(
                ("comm", key),
                f"{key} {value} would be ignored: comm.compression is {comm.compression}",
                f"remove comm.{key}, or set comm.compression to powersgd",
            )
    if comm.compression == "powersgd" and config.precision == "fp16-mixed":
        yield Problem(
            ("comm", "compression"),
            "powersgd adds what it left out of gradients to later ones, which with fp16-mixed have "
            "another scale",
            "set comm.compression to fp16 or none, or precision to bf16-mixed",
        )
    if comm.compression == "powersgd" and comm.find_unused_parameters:
        yield Problem(
            ("comm", "find_unused_parameters"),
            "torch throws the exchanged gradient of an unused parameter away, and powersgd would "
            "lose what it had left out of it",
            "set comm.compression to bf16 or none",
        )
    if config.precision == "bf16" and comm.compression in ("bf16", "fp16"):
        yield Problem(
            ("comm", "compression"),
            f"{comm.compression} saves nothing: with precision bf16 gradients have 16 bits",
            "remove comm.compression, or set it to powersgd",
        )


def sharding(config: Config) -> Iterator[Problem]:
    """``comm.shard`` leaves nothing to do for what is of `DistributedDataParallel` alone."""
    comm, cluster = config.comm, config.cluster
    if comm.shard == "optimizer" and comm.compression == "powersgd":
        yield Problem(
            ("comm", "compression"),
            "powersgd keeps the errors of all gradients on every worker, and so undoes what "
            "comm.shard optimizer saves",
            "set comm.compression to bf16 or none, or comm.shard to none",
        )
    if comm.shard != "full":
        return
    for key in _DDP_ONLY:
        value, default = getattr(comm, key), CommConfig.model_fields[key].default
        if value != default:
            yield Problem(
                ("comm", key),
                f"{key} {show(value)} would be ignored: comm.shard is full, which exchanges "
                "gradients in its own way",
                f"remove comm.{key}, or set comm.shard to optimizer or none",
            )
    if config.train.ema is not None:
        yield Problem(
            ("train", "ema"),
            "an average of weights is kept whole on every worker, which comm.shard full has not",
            "remove train.ema, or set comm.shard to optimizer or none",
        )
    if config.precision == "fp16-mixed":
        yield Problem(
            ("precision",),
            "fp16-mixed scales the loss by what each worker sees of the gradients, which with "
            "comm.shard full is only its own share",
            "set precision to bf16-mixed or bf16, or comm.shard to optimizer or none",
        )
    if cluster.gpus_per_worker and comm.backend == "gloo":
        yield Problem(
            ("comm", "backend"),
            "gloo does not move what comm.shard full keeps on GPUs",
            "set comm.backend to auto",
        )


def sizes(config: Config) -> Iterator[Problem]:
    """As many parts, one for each worker unless ``partition.parts`` says so, as can be written."""
    parts, limits = config.partition.parts, config.cluster.limits
    counts = {
        ("partition", "parts"): 0 if parts == "auto" else parts,
        ("cluster", "workers"): limits[1] if limits else 0,
    }
    for key, count in counts.items():
        if count > MAX_PARTS:
            yield Problem(key, f"{count} is more than {MAX_PARTS}", f"lower {'.'.join(key)}")
