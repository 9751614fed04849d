"""Look at the nodes: what is installed there, what they have, and what they see.

A local Ray is one node, looked at in this process without a task. In a cluster every node gets
one task that asks for no CPU and has a deadline: a node that does not answer is a fact too.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import raygnn
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.preflight.facts import NodeFacts, NodeResources, Resources
from raygnn.preflight.partition import fingerprint, partition_files, partition_jsons

if TYPE_CHECKING:
    from raygnn.graph.layout import AnyPath, PartitionMeta

PACKAGES = ("torch", "dgl", "ray", "lightning", "torchmetrics")


@dataclass(frozen=True)
class Question:
    """What a node is asked to look for.

    Attributes:
        storage: the directory of runs, absolute.
        token: the name of a file that the driver has put into it; None where there is one node.
        partition: the partition's directory; None where it has not been made yet.
        files: the partition's files, relative to it.
        jsons: those of them that say what the partition is.
    """

    storage: str
    token: str | None
    partition: AnyPath | None
    files: tuple[str, ...]
    jsons: tuple[str, ...]

    @classmethod
    def about(cls, config: Config, meta: PartitionMeta | None, token: str | None) -> Question:
        storage = str(Path(config.storage).absolute())
        if meta is None:
            return cls(storage, token, None, (), ())
        return cls(
            storage=storage,
            token=token,
            partition=meta.directory,
            files=tuple(partition_files(meta)),
            jsons=partition_jsons(meta),
        )


def probe_local(
    config: Config, meta: PartitionMeta | None = None
) -> tuple[list[NodeFacts], Resources]:
    """Facts of this machine, and what a Ray that is started here will have to give away.

    Args:
        meta: the partition to look for; None before there is one.
    """
    return [node_facts(Question.about(config, meta, token=None))], _local_resources(config)


def probe_cluster(
    config: Config, meta: PartitionMeta | None = None, deadline: float = 20.0
) -> tuple[list[NodeFacts], Resources]:
    """Facts of every living node of the Ray that this process is connected to.

    Args:
        meta: the partition to look for; None before there is one.
        deadline: seconds after which a node counts as not answering.

    Raises:
        InputError: the driver cannot write to the storage.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"]]
    names = _names(alive)
    with _token(Path(config.storage).absolute()) as token:
        question = Question.about(config, meta, token)
        tasks = {}
        for node in alive:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(node_facts)
            tasks[node["NodeID"]] = task.remote(question, names[node["NodeID"]])
        _, late = ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=deadline)
        facts = []
        for key, task in tasks.items():
            if task in late:
                ray.cancel(task, force=True)
                facts.append(NodeFacts(names[key], problem=f"no answer within {deadline:g} s"))
                continue
            try:
                facts.append(ray.get(task))
            except RayError as error:
                facts.append(NodeFacts(names[key], problem=_last_line(error)))
    return facts, _cluster_resources()


def probe_resources(config: Config, local: bool) -> Resources:
    """What Ray has to give away, or will have if it is to be started here (``local``)."""
    return _local_resources(config) if local else _cluster_resources()


def node_facts(question: Question, node: str | None = None) -> NodeFacts:
    """Facts of the machine that this runs on.

    Args:
        node: its name in messages; the host's name by default.
    """
    total, available = memory()
    partition = question.partition or Path(os.devnull)
    return NodeFacts(
        node=node or socket.gethostname(),
        python=".".join(map(str, sys.version_info[:3])),
        versions={"raygnn": raygnn.__version__} | {name: _version(name) for name in PACKAGES},
        cpus=_cpus(),
        gpus=_gpus(),
        memory=total,
        memory_available=available,
        shm_free=_free(Path("/dev/shm")),
        disk_free=_free(_nearest(Path(question.storage))),
        storage=_storage(Path(question.storage), question.token),
        partition_files=_sizes(partition, question.files),
        partition_fingerprint=fingerprint(partition, question.jsons),
    )


def _local_resources(config: Config) -> Resources:
    cpus, gpus = config.cluster.num_cpus or _cpus(), len(_gpus())
    return Resources((NodeResources(socket.gethostname(), cpus, gpus),), cpus, gpus)


def _cluster_resources() -> Resources:
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    names, free = _names(alive), ray.available_resources()
    return Resources(
        tuple(_resources(names[node["NodeID"]], node["Resources"]) for node in alive),
        free.get("CPU", 0.0),
        free.get("GPU", 0.0),
    )


@contextmanager
def _token(storage: Path) -> Iterator[str]:
    """A file in the storage that only a node which has the same storage can see."""
    made = [part for part in (storage, *storage.parents) if not part.exists()]
    file = storage / f".probe-{uuid.uuid4().hex}"
    try:
        storage.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise InputError(
            f"it cannot be written: {error.strerror}",
            where=str(storage),
            remedy="make it writable for this user, or change storage",
        ) from error
    try:
        yield file.name
    finally:
        file.unlink(missing_ok=True)
        for directory in made:
            if any(directory.iterdir()):
                break
            directory.rmdir()


def _storage(storage: Path, token: str | None) -> str:
    there = storage if token else _nearest(storage)
    if not there.is_dir():
        return "missing"
    if token and not (there / token).exists():
        return "other"
    return "ok" if os.access(there, os.W_OK | os.X_OK) else "readonly"


def _nearest(path: Path) -> Path:
    """The path, or the nearest directory above it that exists: it will be made there."""
    return next(part for part in (path, *path.parents) if part.exists())


def _sizes(partition: AnyPath, names: tuple[str, ...]) -> dict[str, int]:
    if not isinstance(partition, Path):
        partition = partition.listed()  # one look rather than one at each file
    paths = {name: partition / name for name in names}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpus() -> int:
    """CPUs of the process: the machine's, less affinity, less the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return count


def _gpus() -> tuple[str, ...]:
    """Models of the NVIDIA GPUs that the process may use."""
    models = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = file.read_text().splitlines()
        found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
        models.append(found[0] if found else "GPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        models = models[: len(chosen)]
    return tuple(models)


def memory() -> tuple[int | None, int | None]:
    """Bytes in all and available, of the machine or of the container if that has less."""
    fields = {}
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    cgroup = Path("/sys/fs/cgroup")
    limit, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if total and available and limit and used and limit[0].isdigit():
        stats = dict(line.split() for line in _lines(cgroup / "memory.stat"))
        # The page cache counts as used there, but is given back when memory is short.
        taken = int(used[0]) - int(stats.get("inactive_file", 0))
        total = min(total, int(limit[0]))
        available = min(available, int(limit[0]) - taken)
    return total, available


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _names(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Node id → host name, with the address where two nodes share it, and the id where even that
    is shared."""
    names = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}
    for suffix in ("NodeManagerAddress", "NodeID"):
        taken = list(names.values())
        for node in nodes:
            key = node["NodeID"]
            if taken.count(names[key]) > 1:
                names[key] = f"{names[key]} {node[suffix][:15]}"
    return names


def _resources(name: str, resources: dict[str, float]) -> NodeResources:
    return NodeResources(name, resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
