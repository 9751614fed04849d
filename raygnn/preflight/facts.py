"""What preflight judges: plain facts about nodes, resources and the partition.

Nothing here looks anything up; :mod:`raygnn.preflight.probe` and
:mod:`raygnn.preflight.partition_facts` do. All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raygnn.config.comm_plan import NodeNetwork
from raygnn.graph.data import EdgeType


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; what could not be found out is None.

    Attributes:
        uuid: tells it from all others.
        memory: in bytes.
        driver: version of its driver, e.g. ``"550.54.15"``.
        capability: compute capability, e.g. ``(9, 0)``; bf16 needs 8.0.
        ecc: whether error correction is on.
        processes: process ids that use it.
    """

    model: str
    uuid: str | None = None
    memory: int | None = None
    driver: str | None = None
    capability: tuple[int, int] | None = None
    ecc: bool | None = None
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """What a node said about itself; what it could not tell is None.

    Attributes:
        node: its name in messages.
        id: Ray's; empty on a Ray that is started for the job.
        python: e.g. ``"3.11.7"``.
        versions: package → version, None where it is not installed.
        code: SHA-256 over raygnn's own source files.
        cpu: the processor's model.
        cpu_flags: what it has of ``avx2``, ``avx512f``, ``avx512_bf16`` and ``amx_bf16``.
        cpus: CPUs that a process may use there.
        gpus: those that a process may use.
        memory, memory_available: of the machine or the container, whichever is smaller.
        open_files: how many may be open; None = no limit.
        network: how it is connected.
        environment: variables of communication and threads that are set there already.
        clock: how far its clock is ahead of the driver's, seconds.
        shm_free: free in ``/dev/shm``.
        cache: why the node cannot keep copies of parts where it should; None = it can.
        cache_free: free there.
        disk_free: free where ``storage`` lies.
        storage: whether ``storage`` is the driver's and writable: ``"ok"``, ``"missing"``,
            ``"other"`` (a directory of that name, but not the driver's) or ``"readonly"`` (it can
            be neither made nor written).
        storage_error: of a store that is not ``"ok"``: what is wrong, and what to do about it.
        partition_files: path within the partition → size, of the files that it sees.
        partition_fingerprint: SHA-256 over the partition's json files.
        damaged: path within the partition → what is wrong with its content, of those of its
            files that there was time to read.
        problem: why there are no facts, where there are none.
    """

    node: str
    id: str = ""
    python: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    code: str | None = None
    cpu: str | None = None
    cpu_flags: tuple[str, ...] = ()
    cpus: int = 0
    gpus: tuple[Gpu, ...] = ()
    memory: int | None = None
    memory_available: int | None = None
    open_files: int | None = None
    network: NodeNetwork = field(default_factory=NodeNetwork)
    environment: Mapping[str, str] = field(default_factory=dict)
    clock: float | None = None
    shm_free: int | None = None
    cache: str | None = None
    cache_free: int | None = None
    disk_free: int | None = None
    storage: str = "ok"
    storage_error: tuple[str, str] | None = None
    partition_files: Mapping[str, int] = field(default_factory=dict)
    partition_fingerprint: str | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
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
    """What Ray may give away: on each node, used or not, and over all what other jobs leave now.

    Attributes:
        growing: seconds that a job would wait for more of it; 0 where there will be no more.
    """

    nodes: tuple[NodeResources, ...]
    free_cpus: float
    free_gpus: float
    growing: float = 0.0

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    def workers(self, cpus: float, gpus: float) -> int:
        """How many workers of so many CPUs and GPUs each fit; none is split between nodes."""
        return sum(node.workers(cpus, gpus) for node in self.nodes)


@dataclass(frozen=True)
class DryRun:
    """What came of one batch through a model of the user's own, as a finding says it; severity
    None = it works."""

    severity: Literal["error", "warn"] | None = None
    what: str = ""
    remedy: str = ""


@dataclass(frozen=True, order=True)
class ArrayType:
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
        columns: node type → array → one column per part, or a single one where ``alike``.
        splits: ``train``, ``val``, ``test`` → how many nodes of the type to predict for, or how
            many graphs; only those that are known.
        by_type: the same of each node type.
        alike: every part has the same arrays, since they come, or will come, from one array each.
        edges: edge type → array → its column, in the first part that has some.
        reverses: edge type → the one that holds its edges the other way round, as far as known.
    """

    directory: str
    num_parts: int
    bytes: int
    files: Mapping[str, int]
    fingerprint: str | None
    nodes: Mapping[str, int]
    columns: Mapping[str, Mapping[str, tuple[ArrayType, ...]]]
    splits: Mapping[str, int]
    by_type: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    alike: bool = False
    edges: Mapping[EdgeType, Mapping[str, ArrayType]] = field(default_factory=dict)
    reverses: Mapping[EdgeType, EdgeType] = field(default_factory=dict)
