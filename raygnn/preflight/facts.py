"""Facts about nodes, resources and the partition, collected by `raygnn.preflight.probe` and
`raygnn.preflight.partition_facts`. All sizes are in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raygnn.config.comm_plan import NodeNetwork
from raygnn.graph.data import EdgeType


@dataclass(frozen=True)
class Gpu:
    """NVIDIA GPU; unknown facts are None."""

    model: str
    uuid: str | None = None
    memory: int | None = None
    driver: str | None = None  # version, e.g. ``"550.54.15"``
    capability: tuple[int, int] | None = None  # compute capability, e.g. ``(9, 0)``; bf16 needs 8.0
    ecc: bool | None = None  # True if error correction is on
    processes: tuple[int, ...] = ()  # ids of the processes that use it


@dataclass(frozen=True)
class NodeFacts:
    """Facts that a node reports about itself; unknown ones are None."""

    node: str  # its name in messages
    id: str = ""  # Ray's id; empty on an embedded Ray
    python: str = ""  # e.g. ``"3.11.7"``
    # package → version, None if it is not installed
    versions: Mapping[str, str | None] = field(default_factory=dict)
    code: str | None = None  # SHA-256 over raygnn's source files
    cpu: str | None = None  # the processor's model
    # supported instruction sets among ``avx2``, ``avx512f``, ``avx512_bf16`` and ``amx_bf16``
    cpu_flags: tuple[str, ...] = ()
    cpus: int = 0  # available to a process
    gpus: tuple[Gpu, ...] = ()  # available to a process
    memory: int | None = None  # of the machine or the container, whichever has less
    memory_available: int | None = None  # free part of it
    network: NodeNetwork = field(default_factory=NodeNetwork)
    # variables of communication and threads that are set on the node
    environment: Mapping[str, str] = field(default_factory=dict)
    shm_free: int | None = None  # free space in ``/dev/shm``
    cache: str | None = None  # why ``staging.path`` cannot be used; None = it can
    cache_free: int | None = None  # free space in ``staging.path``
    disk_free: int | None = None  # free space in ``storage``
    # ``"ok"`` if ``storage`` is the driver's directory and writable; ``"missing"``, ``"other"``
    # (another directory at the same path) or ``"readonly"``
    storage: str = "ok"
    # problem and remedy if ``storage`` is an object store that is not ``"ok"``
    storage_error: tuple[str, str] | None = None
    # file of the partition that the node sees (path within it) → size
    partition_files: Mapping[str, int] = field(default_factory=dict)
    partition_fingerprint: str | None = None  # SHA-256 over the partition's json files
    problem: str | None = None  # why the node did not answer; None if it did


@dataclass(frozen=True)
class NodeResources:
    """CPUs and GPUs that Ray may assign on one node."""

    node: str
    cpus: float
    gpus: float

    def workers(self, cpus: float, gpus: float) -> int:
        """Return the number of workers that fit, with this many CPUs and GPUs each."""
        fits = [int(self.cpus // cpus)] if cpus else []
        fits += [int(self.gpus // gpus)] if gpus else []
        return min(fits)


@dataclass(frozen=True)
class Resources:
    """Resources that Ray may assign: of each node, used or free, and the free sums."""

    nodes: tuple[NodeResources, ...]
    free_cpus: float
    free_gpus: float
    growing: float = 0.0  # seconds that a job would wait for more nodes; 0 if none will join

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    def workers(self, cpus: float, gpus: float) -> int:
        """Return the number of workers that fit, each on one node."""
        return sum(node.workers(cpus, gpus) for node in self.nodes)


@dataclass(frozen=True, order=True)
class ArrayType:
    """Type of an array: dtype (``"float32"``) and shape of one row."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class PartitionFacts:
    """Partition as the driver sees it, or the graph before it is partitioned; without arguments,
    graphs that have not been read."""

    directory: str = ""  # its path; empty before it is built
    num_parts: int = 1
    bytes: int = 0  # of its files, or of the graph in memory
    files: Mapping[str, int] = field(default_factory=dict)  # path within it → size
    fingerprint: str | None = None  # SHA-256 over its json files; None before it is built
    nodes: Mapping[str, int] = field(default_factory=dict)  # node type → number of nodes
    # node type → array → its type in each part; a single one if ``alike``
    columns: Mapping[str, Mapping[str, tuple[ArrayType, ...]]] = field(default_factory=dict)
    # ``train``, ``val``, ``test`` → number of nodes of the target type, or of graphs; splits of
    # unknown size are missing
    splits: Mapping[str, int] = field(default_factory=dict)
    # node type → its ``splits``
    by_type: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    alike: bool = False  # the arrays have one type in all parts
    # edge type → array → its type in the first part that has edges
    edges: Mapping[EdgeType, Mapping[str, ArrayType]] = field(default_factory=dict)
    # edge type → the type of its reverse edges, if known
    reverses: Mapping[EdgeType, EdgeType] = field(default_factory=dict)
