"""Look at the nodes: what is installed there, what they have, what they see, and the links.

A local Ray is one node, looked at in this process. In a cluster every node gets one actor that
asks for no CPU and has a deadline: a node that does not answer is a fact too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import secrets
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import raygnn
from raygnn.config.places import nearest_existing, unwritable
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.graph.available_memory import memory
from raygnn.preflight import machine
from raygnn.preflight.facts import NodeFacts, NodeResources, Resources
from raygnn.preflight.links import TOKEN_BYTES, Link, Responder, measure, pairs
from raygnn.preflight.partition_facts import StoredFiles, stored_files
from raygnn.storage.remote import AnyPath, RemotePath

if TYPE_CHECKING:
    from raygnn.preflight.partition_facts import Stored

_SHM = Path("/dev/shm")
PACKAGES = ("torch", "dgl", "ray", "lightning", "torchmetrics")

_FIRST = 30.0  # seconds for any node to answer: Python starts slowly on busy or remote disks
_NETWORK = 8.0  # seconds for one round of measurements between nodes
_CLOCKS = 64  # nodes whose clocks are compared with the driver's, one after the other
_READING = 2.0  # seconds in which the partition's files are read; staging reads all of them
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Question:
    """What a node is asked to look for.

    Attributes:
        storage: the directory of runs, absolute, or another place; None = do not look for one.
        token: a file that the driver has put into it, or into the nearest directory above it that
            exists; None where there is one node.
        cache: where a node keeps its copies of parts; None = in its temporary directory.
        partition: its files; None where it has not been made yet.
        share: which node of how many this is: each begins to read files at another one.
    """

    storage: AnyPath | None
    token: AnyPath | None
    cache: str | None
    partition: StoredFiles | None = None
    share: tuple[int, int] = (0, 1)

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
    """Every living node, what Ray may give away, and the links between nodes."""

    nodes: tuple[NodeFacts, ...]
    resources: Resources
    links: tuple[Link, ...] = ()


def probe_local(
    config: Config, meta: Stored | None = None, *, question: Question | None = None
) -> Survey:
    """Facts of this machine, and what a Ray that is started here will have to give away.

    Args:
        meta: the partition to look for; None before there is one.
        question: instead of the one about the job.
    """
    facts = node_facts(question or Question.about(config, meta, token=None))
    return Survey((facts,), _local(config, facts.cpus, len(facts.gpus)))


class Probes:
    """One on every living node of the Ray that this process is connected to; a context manager.

    They stay between questions, since a Python process is started for each. The links between
    the nodes are measured with the first answers.
    """

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._links: tuple[Link, ...] = ()

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        import ray

        while self._actors:
            _, actor = self._actors.popitem()
            with suppress(Exception):  # gone with its node
                ray.kill(actor)

    def about(self, config: Config, meta: Stored | None = None) -> Survey:
        """Ask about a job. A node that does not answer within ``cluster.probe_timeout`` is one
        with a ``problem``.

        Args:
            meta: the partition to look for; None before there is one.

        Raises:
            InputError: the driver cannot write to the storage.
        """
        with _token(_place(config)) as token:
            question = Question.about(config, meta, token)
            deadline = config.cluster.probe_timeout.seconds
            # nodes that have just come start Python from a cold disk, each of them
            return self.ask(question, max(deadline, _FIRST if config.cluster.wait_seconds else 0.0))

    def ask(self, question: Question, deadline: float) -> Survey:
        """Ask every node, at the same time.

        Args:
            deadline: seconds for each node to answer, from the first one's answer on; if none
                answers, half a minute is waited for one.
        """
        alive = _alive()
        names = _names(alive)
        changed = {node["NodeID"] for node in alive} != self._actors.keys()
        if changed:  # at first, or nodes came or went in the meantime
            self._end()
            self._actors = {node["NodeID"]: _start(node) for node in alive}
        facts = _ask(alive, names, self._actors, question, deadline)
        if changed:
            # those without anything to give away hold no rank, and may be behind other firewalls
            given = {names[n["NodeID"]] for n in alive if n["Resources"].keys() & {"CPU", "GPU"}}
            answered = [n for n in facts if n.problem is None and n.node in given]
            self._links = tuple(_measure(answered, self._actors))
        return Survey(tuple(facts), _cluster(alive, names), self._links)


def probe_resources(config: Config, local: bool) -> Resources:
    """What Ray has to give away, or will have if it is to be started here (``local``)."""
    if local:
        return _local(config, machine.cpus(), len(machine.gpus()))
    alive = _alive()
    return _cluster(alive, _names(alive))


class _Prober:
    """Runs on a node, one method after the other."""

    def __init__(self) -> None:
        self._responder: Responder | None = None

    def facts(self, question: Question, name: str, id: str, address: str) -> NodeFacts:
        return node_facts(question, name, id, address)

    def clock(self) -> float:
        return time.time()

    def listen(self, address: str, token: bytes) -> int:
        """Wait for one peer's measurement; returns the port."""
        self.close()
        self._responder = Responder(address, token, lifetime=_NETWORK)
        return self._responder.port

    def measure(
        self, source: str, target: str, address: str, port: int, token: bytes, bind: str
    ) -> Link:
        return measure(source, target, address, port, token, bind=bind)

    def close(self) -> None:
        if self._responder is not None:
            self._responder.close()
            self._responder = None


def _start(node: dict[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": place}
    if node["Resources"].get("GPU"):  # older ones hide the GPUs from who asks for none
        options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    return ray.remote(_Prober).options(**options).remote()


def _ask(
    alive: Sequence[dict[str, Any]],
    names: dict[str, str],
    probers: dict[str, Any],
    question: Question,
    deadline: float,
) -> list[NodeFacts]:
    import ray
    from ray.exceptions import RayError

    tasks = {}
    for number, node in enumerate(alive):
        key = node["NodeID"]
        asked = replace(question, share=(number, len(alive)))
        task = probers[key].facts.remote(asked, names[key], key, node["NodeManagerAddress"])
        tasks[key] = task
    # how long starting Python takes here, the first answer tells
    _, late = ray.wait(list(tasks.values()), num_returns=1, timeout=max(deadline, _FIRST))
    if late:
        _, late = ray.wait(late, num_returns=len(late), timeout=deadline)
    late = set(late)
    facts: list[NodeFacts] = []
    for key, task in tasks.items():
        if task in late:
            facts.append(NodeFacts(names[key], key, problem=f"no answer within {deadline:g} s"))
            continue
        try:
            facts.append(ray.get(task, timeout=deadline))
        except RayError as error:
            facts.append(NodeFacts(names[key], key, problem=_last_line(error)))
            continue
        if len(facts) <= _CLOCKS:
            with suppress(RayError):  # then nobody knows the time there
                facts[-1] = replace(facts[-1], clock=_clock(probers[key], deadline))
    return facts


def _clock(prober: Any, deadline: float) -> float:
    """How far a node's clock is ahead of this one's, seconds, within half of the round trip."""
    import ray

    before = time.time()
    clock: float = ray.get(prober.clock.remote(), timeout=deadline)
    return clock - (before + time.time()) / 2


def _measure(nodes: Sequence[NodeFacts], probers: dict[str, Any]) -> Iterator[Link]:
    """Each node to the next one around a ring, in rounds that do not share a node."""
    import ray
    from ray.exceptions import RayError

    by_name = {node.node: node for node in nodes}
    for round_of_pairs in pairs(list(by_name)):
        token = secrets.token_bytes(TOKEN_BYTES)
        tasks = {}
        for source, target in round_of_pairs:
            address = by_name[target].network.address
            port = probers[by_name[target].id].listen.remote(address, token)
            tasks[source, target] = probers[by_name[source].id].measure.remote(
                *(source, target, address, port, token, by_name[source].network.address)
            )
        done, _ = ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=_NETWORK)
        finished = set(done)
        for (source, target), task in tasks.items():
            if task not in finished:
                problem = f"not measured within {_NETWORK:g} s"
                yield Link(source, target, None, None, problem)
                continue
            try:
                yield ray.get(task, timeout=_NETWORK)
            except RayError as error:
                yield Link(source, target, None, None, _last_line(error))


def _local(config: Config, cpus: int, gpus: int) -> Resources:
    cpus = config.cluster.num_cpus or cpus
    return Resources((NodeResources(socket.gethostname(), cpus, gpus),), cpus, gpus)


def _cluster(alive: Sequence[dict[str, Any]], names: dict[str, str]) -> Resources:
    import ray

    free = ray.available_resources()
    return Resources(
        tuple(
            NodeResources(names[node["NodeID"]], given.get("CPU", 0.0), given.get("GPU", 0.0))
            for node in alive
            for given in [node["Resources"]]
        ),
        free.get("CPU", 0.0),
        free.get("GPU", 0.0),
    )


def _place(config: Config) -> AnyPath:
    store = config.store
    return config.local_storage.absolute() if store is None else RemotePath.of(store, "storage")


@contextmanager
def _token(storage: AnyPath) -> Iterator[AnyPath]:
    """A file that only a node which has the same storage can see.

    Where there is no such directory yet it lies in the nearest one above: of several commands that
    look at once, none makes or removes what another needs.
    """
    name = f".probe-{uuid.uuid4().hex}"
    if isinstance(storage, RemotePath):
        there = _put(storage, name)
        try:
            yield there
        finally:
            with suppress(DataError):
                there.remove()
        return
    try:
        file = nearest_existing(storage) / name
        file.touch()
    except OSError as error:
        why = unwritable(storage) or error.strerror
        raise InputError(
            f"it cannot be made or written: {why}",
            where=str(storage),
            remedy="make it writable for this user, or change storage",
        ) from error
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _alive() -> list[dict[str, Any]]:
    """Ray's living nodes, which it lists in any order: node2 before node10."""
    import ray

    def by_name(node: dict[str, Any]) -> list[tuple[int, str]]:
        words = re.findall(
            r"\d+|\D+", f"{node['NodeManagerHostname']} {node['NodeManagerAddress']}"
        )
        return [(int(word), "") if word.isdigit() else (-1, word) for word in words]

    return sorted((node for node in ray.nodes() if node["Alive"]), key=by_name)


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


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


# -------------------------------------------------------------------------------- on a node


def node_facts(
    question: Question, node: str | None = None, id: str = "", address: str | None = None
) -> NodeFacts:
    """Facts of the machine that this runs on.

    Args:
        node: its name in messages; the host's name by default.
        id, address: as Ray knows it.
    """
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
        open_files=machine.open_files(),
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
        damaged=_damaged(partition, *question.share) if partition else {},
    )


def _storage(storage: Path, token: AnyPath | None) -> str:
    if token is None:  # it will be made there
        return "readonly" if unwritable(storage) else "ok"
    seen = Path(str(token))
    try:
        if not seen.parent.is_dir():
            return "missing"
        if not seen.exists():
            return "other"
    except OSError:  # it may not be looked at
        return "missing"
    return "readonly" if unwritable(seen.parent) else "ok"


def _store(storage: RemotePath, token: AnyPath | None) -> tuple[str, tuple[str, str] | None]:
    """As `_storage`; a file is put there and removed."""
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
    """An empty file there, or in the nearest directory above that exists: to remove the only file
    of a directory in an object store leaves an empty object in the directory's place. Where one
    may write into the storage alone, it is there all the same.

    Raises:
        DataError: it cannot be written.
    """
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
    """Why this user cannot keep copies of parts there; see `raygnn.graph.staging.node_cache`."""
    with suppress(OSError):
        owner = cache.stat().st_uid
        if owner != os.getuid():
            return f"it belongs to another user (id {owner})"
    return unwritable(cache)


def _sizes(partition: StoredFiles) -> dict[str, int]:
    root = partition.directory
    if not isinstance(root, Path):
        root = root.listed()  # one look rather than one at each file
    paths = {name: root / name for name in partition.sizes}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def _damaged(partition: StoredFiles, number: int, of: int) -> dict[str, str]:
    """What is wrong with the content of files, as many as can be read in the time there is."""
    root, names, damaged = partition.directory, [*partition.sizes], dict[str, str]()
    if not isinstance(root, Path):
        return {}  # far away; staging fetches and checks it
    first, end = number * len(names) // of, time.monotonic() + _READING
    for name in [*names[first:], *names[:first]]:
        if name not in partition.digests or not (root / name).is_file():
            continue
        digest = hashlib.sha256()
        try:
            with (root / name).open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    if time.monotonic() > end:
                        return damaged
        except OSError as error:
            damaged[name] = f"cannot be read: {error.strerror or error}"
            continue
        if digest.hexdigest() != partition.digests[name]:
            damaged[name] = "has changed since it was written"
    return damaged


def _versions() -> dict[str, str | None]:
    """Of the packages, and of the native libraries in them, as far as they can be told without
    loading them."""
    versions = {"raygnn": raygnn.__version__} | {name: _version(name) for name in PACKAGES}
    for cuda in ("cu11", "cu12", "cu13"):
        if version := _version(f"nvidia-nccl-{cuda}"):
            versions["nccl"] = version
    with suppress(OSError):
        if (torch := _directory("torch")) is not None:
            built_for = re.search(r"^cuda\b.*= '(.+)'", (torch / "version.py").read_text(), re.M)
            versions |= {"cuda": built_for[1]} if built_for else {}
    with suppress(OSError):
        if (dgl := _directory("dgl")) is not None:
            versions["libdgl.so"] = f"{(dgl / 'libdgl.so').stat().st_size} bytes"
    return versions


def _directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
