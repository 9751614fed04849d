"""Probes of the nodes: software, hardware, storage, partition, and the connections between them.

This machine is probed in this process. In a cluster, one actor per node, which needs no CPU, probes
the node within a deadline; a node that does not answer is reported.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import raygnn
from raygnn.config.places import nearest_existing, unwritable
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.graph.available_memory import memory
from raygnn.preflight import machine
from raygnn.preflight.connections import Link, listen, reach
from raygnn.preflight.facts import NodeFacts, NodeResources, Resources
from raygnn.preflight.partition_facts import Stored, StoredFiles, stored_files
from raygnn.storage.remote import AnyPath, RemotePath
from raygnn.util.files import is_away, retry

_SHM = Path("/dev/shm")
PACKAGES = ("torch", "dgl", "ray", "lightning", "torchmetrics")

_FIRST = 30.0  # seconds for the first answer: Python starts slowly on busy or remote disks
_NETWORK = 20.0  # seconds for the connections between nodes
_AWAY = 2.0  # seconds for storage that cannot be reached

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Question:
    """Paths and files that a node checks."""

    storage: AnyPath | None  # location of runs; None = not checked
    # file that the driver has written into it, or into the nearest existing directory above it;
    # None on one node
    token: AnyPath | None
    cache: str | None  # ``staging.path``; None = the temporary directory
    partition: StoredFiles | None = None  # its files; None before it is built

    @classmethod
    def about(cls, config: Config, meta: Stored | None, token: AnyPath | None) -> Question:
        path = config.staging.path
        return cls(
            storage=_place(config),
            token=token,
            cache=None if path is None else str(path),
            partition=None if meta is None else stored_files(meta),
        )


@dataclass(frozen=True)
class Survey:
    """Facts of all living nodes, Ray's resources, and the links between nodes."""

    nodes: tuple[NodeFacts, ...]
    resources: Resources
    links: tuple[Link, ...] = ()


def probe_local(
    config: Config, meta: Stored | None = None, *, question: Question | None = None
) -> Survey:
    """Return the facts of this machine, and the resources of an embedded Ray; ``question``: default
    is the job's."""
    facts = node_facts(question or Question.about(config, meta, token=None))
    return Survey((facts,), _local(config, facts.cpus, len(facts.gpus)))


class Probes(ExitStack):
    """Actors on all living nodes of the connected Ray; a context manager. They are kept between
    questions, since each is a Python process. After the first answers the nodes connect to each
    other."""

    def __init__(self) -> None:
        super().__init__()
        self._actors: dict[str, Any] = {}
        self._links: tuple[Link, ...] = ()

    def about(self, config: Config, meta: Stored | None = None) -> Survey:
        """Probe the nodes for a job; ``meta``: the partition, None before it is built. A node that
        does not answer within ``cluster.probe_timeout`` gets a ``problem``. Raises InputError if
        the driver cannot write to the storage."""
        with _token(_place(config)) as token:
            question = Question.about(config, meta, token)
            deadline = config.cluster.probe_timeout.seconds
            # new nodes start Python from a cold disk
            return self.ask(question, max(deadline, _FIRST if config.cluster.wait_seconds else 0.0))

    def ask(self, question: Question, deadline: float) -> Survey:
        """Probe all nodes at the same time; ``deadline``: seconds for each node, counted from the
        first answer, which may take 30 s."""
        import ray

        alive = _alive()
        names = _names(alive)
        changed = names.keys() != self._actors.keys()
        if changed:  # at first, or after nodes joined or left
            self.close()
            self._actors = {node["NodeID"]: self._start(node) for node in alive}
        tasks = {}
        for node in alive:
            key = node["NodeID"]
            read = partial(node_facts, question, names[key], key, node["NodeManagerAddress"])
            tasks[key] = self._actors[key].call.remote(retry, read, _AWAY, is_away)
        # the first answer shows how long starting Python takes here
        ray.wait(list(tasks.values()), num_returns=1, timeout=max(deadline, _FIRST))
        facts = [
            answer if isinstance(answer, NodeFacts) else NodeFacts(names[key], key, problem=answer)
            for key, answer in _answers(tasks, deadline).items()
        ]
        if changed:
            # nodes without CPUs and GPUs run no rank, and may be behind other firewalls
            given = {n["NodeID"] for n in alive if n["Resources"].keys() & {"CPU", "GPU"}}
            self._links = self._connect([n for n in facts if not n.problem and n.id in given])
        return Survey(tuple(facts), _cluster(alive), self._links)

    def _start(self, node: dict[str, Any]) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": place}
        if node["Resources"].get("GPU"):  # older Rays hide GPUs from actors that request none
            options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
        actor = ray.remote(_Prober).options(**options).remote()
        self.callback(_kill, actor)
        return actor

    def _connect(self, nodes: Sequence[NodeFacts]) -> tuple[Link, ...]:
        """Have each node connect to the next one in a ring."""
        if len(nodes) < 2:
            return ()
        call = {node.node: self._actors[node.id].call.remote for node in nodes}
        ports = {n.node: call[n.node](listen, n.network.address) for n in nodes}
        tasks = {}
        for one, other in zip(nodes, [*nodes[1:], nodes[0]]):
            source, target = one.node, other.node
            addresses = (other.network.address, ports[target], one.network.address)
            tasks[source, target] = call[source](reach, source, target, *addresses)
        answers = _answers(tasks, _NETWORK)
        return tuple(a if isinstance(a, Link) else Link(*ends, a) for ends, a in answers.items())


def probe_resources(config: Config, local: bool) -> Resources:
    """Return the resources of the connected Ray, or of an embedded Ray (``local``)."""
    if local:
        return _local(config, machine.cpus(), len(machine.gpus()))
    return _cluster(_alive())


class _Prober:
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # it ended with its node
        ray.kill(actor)


def _answers(tasks: dict[_Key, Any], timeout: float) -> dict[_Key, Any]:
    """Return the result of each task of Ray; a text if it failed, or is not done in time."""
    import ray
    from ray.exceptions import RayError

    answers: dict[_Key, Any] = dict.fromkeys(tasks, f"no answer within {timeout:g} s")
    _, late = ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=timeout)
    for key, task in tasks.items():
        if task not in late:
            try:
                answers[key] = ray.get(task, timeout=timeout)
            except RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                answers[key] = lines[-1] if lines else type(error).__name__
    return answers


def _local(config: Config, cpus: int, gpus: int) -> Resources:
    cpus = config.cluster.num_cpus or cpus
    return Resources((NodeResources(socket.gethostname(), cpus, gpus),), cpus, gpus)


def _cluster(alive: Sequence[dict[str, Any]]) -> Resources:
    import ray

    free, names = ray.available_resources(), _names(alive)
    totals = {names[node["NodeID"]]: node["Resources"] for node in alive}
    nodes = (NodeResources(n, t.get("CPU", 0.0), t.get("GPU", 0.0)) for n, t in totals.items())
    return Resources(tuple(nodes), free.get("CPU", 0.0), free.get("GPU", 0.0))


def _place(config: Config) -> AnyPath:
    store = config.store
    return config.local_storage.absolute() if store is None else RemotePath.of(store, "storage")


@contextmanager
def _token(storage: AnyPath) -> Iterator[AnyPath]:
    """Yield a file that only a node with the same storage can see. Before the storage exists, the
    file is in the nearest existing directory above it, so that no command creates or removes a
    directory that a concurrent command uses."""
    name = f".probe-{uuid.uuid4().hex}"
    if isinstance(storage, RemotePath):
        file: AnyPath = _put(storage, name)
    else:
        try:
            file = nearest_existing(storage) / name
            file.touch()
        except OSError as error:
            why = unwritable(storage) or error.strerror
            message = f"storage cannot be created or written: {why}"
            remedy = "make it writable for this user, or change storage"
            raise InputError(message, where=str(storage), remedy=remedy) from error
    try:
        yield file
    finally:
        with suppress(DataError):  # an object store that cannot be reached any more
            file.remove() if isinstance(file, RemotePath) else file.unlink(missing_ok=True)


def _alive() -> list[dict[str, Any]]:
    import ray

    living = (node for node in ray.nodes() if node["Alive"])
    return sorted(living, key=lambda n: (n["NodeManagerHostname"], n["NodeManagerAddress"]))


def _names(nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return node id → host name, with the address if two nodes share the name, and the id if
    they share that, too."""
    names = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}
    for suffix in ("NodeManagerAddress", "NodeID"):
        taken = list(names.values())
        for node in nodes:
            key = node["NodeID"]
            if taken.count(names[key]) > 1:
                names[key] = f"{names[key]} {node[suffix][:15]}"
    return names


def node_facts(
    question: Question, node: str | None = None, id: str = "", address: str | None = None
) -> NodeFacts:
    """Return the facts of this machine. ``node``: its name in messages; None = the host name.
    ``id``, ``address``: its id and address in Ray."""
    total, available = memory()
    partition = question.partition
    storage, state, why = question.storage, "ok", None
    if isinstance(storage, RemotePath):
        state, why = _store(storage, question.token)
    elif storage is not None:
        state = _storage(storage, question.token)
    cache = Path(question.cache or Path(tempfile.gettempdir()) / f"raygnn-{os.getuid()}")
    return NodeFacts(
        node=node or socket.gethostname(),
        id=id,
        python=".".join(map(str, sys.version_info[:3])),
        versions=_versions(),
        code=machine.code_digest(),
        cpu=machine.cpu_model(),
        cpu_flags=machine.cpu_flags(),
        cpus=machine.cpus(),
        gpus=machine.gpus(),
        memory=total,
        memory_available=available,
        network=machine.network(address),
        environment=machine.environment(),
        shm_free=machine.free_space(_SHM) if _SHM.is_dir() else None,
        cache=_unusable(cache),
        cache_free=machine.free_space(cache),
        disk_free=machine.free_space(storage) if isinstance(storage, Path) else None,
        storage=state,
        storage_error=why,
        partition_files=_sizes(partition) if partition else {},
        partition_fingerprint=partition.fingerprint if partition else None,
    )


def _storage(storage: Path, token: AnyPath | None) -> str:
    if token is None:  # this node is the driver, which will create it
        return "readonly" if unwritable(storage) else "ok"
    seen = Path(str(token))
    try:
        if not seen.parent.is_dir():
            return "missing"
        if not seen.exists():
            return "other"
    except OSError:  # no permission
        return "missing"
    return "readonly" if unwritable(seen.parent) else "ok"


def _store(storage: RemotePath, token: AnyPath | None) -> tuple[str, tuple[str, str] | None]:
    """Return the state of an object store, with problem and remedy; writes and removes a file."""
    state = "missing"
    try:
        if token is not None and not token.is_file():
            return "other", None
        state = "readonly"
        _put(storage, f".probe-{uuid.uuid4().hex}").remove()
    except DataError as error:
        return state, (error.what, error.remedy or "")
    return "ok", None


def _put(storage: RemotePath, name: str) -> RemotePath:
    """Write an empty file into the nearest existing directory at or above ``storage``: removing the
    only file of a directory in an object store would leave an empty object instead of the
    directory. Without permission there, it is written into ``storage``. Raises DataError if it
    cannot be written."""
    try:
        place = storage
        while not place.is_dir() and "/" in place.path.strip("/"):
            place = place.parent
        (place / name).write(b"")
    except DataError as error:
        if "denied" not in error.what.lower():
            raise
        place = storage
        (place / name).write(b"")
    return place / name


def _unusable(cache: Path) -> str | None:
    """Return why parts cannot be cached there; see `raygnn.graph.staging.node_cache`."""
    with suppress(OSError):
        owner = cache.stat().st_uid
        if owner != os.getuid():
            return f"it belongs to another user (id {owner})"
    return unwritable(cache)


def _sizes(partition: StoredFiles) -> dict[str, int]:
    root = partition.directory
    if not isinstance(root, Path):
        root = root.listed()  # one request instead of one per file
    paths = {name: root / name for name in partition.sizes}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def _versions() -> dict[str, str | None]:
    versions = {"raygnn": raygnn.__version__} | {name: _version(name) for name in PACKAGES}
    nccl = [_version(f"nvidia-nccl-{cuda}") for cuda in ("cu13", "cu12", "cu11")]
    return versions | ({"nccl": next(filter(None, nccl))} if any(nccl) else {})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
