"""What preflight judges: plain facts about nodes, resources and the partition.

Nothing here looks anything up; :mod:`raygnn.preflight.probe` and
:mod:`raygnn.preflight.partition` do. All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeFacts:
    """What a node said about itself; what it could not tell is None.

    Attributes:
        node: its name in messages.
        python: e.g. ``"3.11.7"``.
        versions: package → version, None where it is not installed.
        cpus: CPUs that a process may use there.
        gpus: the models of its GPUs.
        memory, memory_available: of the machine or the container, whichever is smaller.
        shm_free: free in ``/dev/shm``.
        disk_free: free where ``storage`` lies.
        storage: whether ``storage`` is the driver's and writable: ``"ok"``, ``"missing"``,
            ``"other"`` (a directory of that name, but not the driver's) or ``"readonly"``.
        partition_files: path within the partition → size, of the files that it sees.
        partition_fingerprint: SHA-256 over the partition's json files.
        problem: why there are no facts, where there are none.
    """

    node: str
    python: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    cpus: int = 0
    gpus: tuple[str, ...] = ()
    memory: int | None = None
    memory_available: int | None = None
    shm_free: int | None = None
    disk_free: int | None = None
    storage: str = "ok"
    partition_files: Mapping[str, int] = field(default_factory=dict)
    partition_fingerprint: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class NodeResources:
    """What Ray may give away on one node."""

    node: str
    cpus: float
    gpus: float

    def workers(self, cpus: float, gpus: float) -> int:
        """How many workers of so many CPUs and GPUs each fit."""
        fits = [int(self.cpus // cpus)] if cpus else []
        fits += [int(self.gpus // gpus)] if gpus else []
        return min(fits)


@dataclass(frozen=True)
class Resources:
    """What Ray may give away.

    Attributes:
        nodes: by node, used or not.
        free_cpus, free_gpus: over all nodes, what other jobs leave now.
    """

    nodes: tuple[NodeResources, ...]
    free_cpus: float
    free_gpus: float

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    def workers(self, cpus: float, gpus: float) -> int:
        """How many workers of so many CPUs and GPUs each fit; none is split between nodes."""
        return sum(node.workers(cpus, gpus) for node in self.nodes)


@dataclass(frozen=True, order=True)
class Column:
    """An array as one part holds it: its dtype (``"float32"``) and the shape of one row."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class PartitionFacts:
    """The partition as the driver sees it, or the graph before it is partitioned.

    Attributes:
        directory: where it lies; empty before it is made.
        bytes: its size, or the graph's in memory.
        files: path within it → size.
        fingerprint: SHA-256 over its json files; None before it is made.
        nodes: node type → how many.
        columns: node type → array → one column per part.
        splits: ``train``, ``val``, ``test`` → how many nodes of the type to classify; only those
            that are known.
    """

    directory: str
    num_parts: int
    bytes: int
    files: Mapping[str, int]
    fingerprint: str | None
    nodes: Mapping[str, int]
    columns: Mapping[str, Mapping[str, tuple[Column, ...]]]
    splits: Mapping[str, int]
