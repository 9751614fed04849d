"""What one node says about itself, when it is asked on it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import raygnn
from raygnn.config.places import nearest_existing, unwritable
from raygnn.config.schema import Config
from raygnn.graph.available_memory import memory
from raygnn.preflight import machine, nvml
from raygnn.preflight.facts import NodeFacts
from raygnn.preflight.partition import fingerprint, stored_digests, stored_files, stored_jsons

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import AnyPath
    from raygnn.preflight.partition import Stored

PACKAGES = ("torch", "dgl", "ray", "lightning", "torchmetrics")

_READING = 2.0  # seconds in which the partition's files are read; staging reads all of them
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Question:
    """What a node is asked to look for.

    Attributes:
        storage: the directory of runs, absolute; None = do not look for one.
        token: a file that the driver has put into it, or into the nearest directory above it that
            exists; None where there is one node.
        cache: where a node keeps its copies of parts; None = in its temporary directory.
        partition: the partition's directory; None where it has not been made yet.
        files: the partition's files, relative to it.
        jsons: those of them that say what the partition is.
        digests: SHA-256 of the files, as far as they are known.
        share: which node of how many this is: each begins to read files at another one.
    """

    storage: str | None
    token: str | None
    cache: str | None
    partition: AnyPath | None = None
    files: tuple[str, ...] = ()
    jsons: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    share: tuple[int, int] = (0, 1)

    @classmethod
    def about(cls, config: Config, meta: Stored | None, token: str | None) -> Question:
        storage = str(Path(config.storage).absolute())
        cache = None if config.staging.path is None else str(config.staging.path)
        if meta is None:
            return cls(storage, token, cache)
        return cls(
            storage=storage,
            token=token,
            cache=cache,
            partition=meta.directory,
            files=tuple(stored_files(meta)),
            jsons=stored_jsons(meta),
            digests=stored_digests(meta),
        )


def node_facts(
    question: Question, node: str | None = None, id: str = "", address: str | None = None
) -> NodeFacts:
    """Facts of the machine that this runs on.

    Args:
        node: its name in messages; the host's name by default.
        id, address: as Ray knows it.
    """
    total, available = memory()
    partition = question.partition or Path(os.devnull)
    shm_free, shm_total = machine.space(Path("/dev/shm"))
    storage = question.storage and Path(question.storage)
    cache = Path(question.cache or Path(tempfile.gettempdir()) / f"raygnn-{os.getuid()}")
    damaged, read = _damaged(partition, question)
    return NodeFacts(
        node=node or socket.gethostname(),
        id=id,
        python=".".join(map(str, sys.version_info[:3])),
        versions=_versions(),
        code=machine.code_digest(),
        cpu=machine.cpu_model(),
        cpu_flags=machine.cpu_flags(),
        cpus=machine.cpus(),
        gpus=nvml.gpus(),
        memory=total,
        memory_available=available,
        limits=machine.limits(),
        network=machine.network(address),
        environment=machine.environment(),
        shm_free=shm_free,
        shm_total=shm_total,
        cache=_unusable(cache),
        cache_free=_free(cache),
        disk_free=_free(storage) if storage else None,
        storage=_storage(storage, question.token) if storage else "ok",
        partition_files=_sizes(partition, question.files),
        partition_fingerprint=fingerprint(partition, question.jsons),
        damaged=damaged,
        read=read,
    )


def _storage(storage: Path, token: str | None) -> str:
    if token is None:  # it will be made there
        return "readonly" if unwritable(storage) else "ok"
    there = Path(token)
    try:
        if not there.parent.is_dir():
            return "missing"
        if not there.exists():
            return "other"
    except OSError:  # it may not be looked at
        return "missing"
    own = there.with_name(f"{there.name}-{uuid.uuid4().hex}")
    try:
        own.write_text(token)
        same = own.read_text() == token
    except OSError:
        return "readonly"
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    return "ok" if same else "other"


def _unusable(cache: Path) -> str | None:
    """Why this user cannot keep copies of parts there; see `raygnn.graph.staging.node_cache`."""
    with contextlib.suppress(OSError):
        owner = cache.stat().st_uid
        if owner != os.getuid():
            return f"it belongs to another user (id {owner})"
    return unwritable(cache)


def _free(path: Path) -> int | None:
    try:
        return machine.space(nearest_existing(path))[0]
    except OSError:
        return None


def _sizes(partition: AnyPath, names: tuple[str, ...]) -> dict[str, int]:
    if not isinstance(partition, Path):
        partition = partition.listed()  # one look rather than one at each file
    paths = {name: partition / name for name in names}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def _damaged(partition: AnyPath, question: Question) -> tuple[dict[str, str], int]:
    """What is wrong with the content of files, as many as can be read in the time there is."""
    if not isinstance(partition, Path):
        return {}, 0  # far away; staging fetches and checks it
    number, of = question.share
    first = number * len(question.files) // of
    names = [*question.files[first:], *question.files[:first]]
    end = time.monotonic() + _READING
    damaged: dict[str, str] = {}
    read = 0
    for name in names:
        if name not in question.digests or not (partition / name).is_file():
            continue
        digest = hashlib.sha256()
        try:
            for chunk in _chunks(partition / name):
                digest.update(chunk)
                if time.monotonic() > end:
                    return damaged, read
        except OSError as error:
            damaged[name] = f"cannot be read: {error.strerror or error}"
            continue
        read += 1
        if digest.hexdigest() != question.digests[name]:
            damaged[name] = "has changed since it was written"
    return damaged, read


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def _versions() -> dict[str, str | None]:
    """Of the packages, and of the native libraries in them, as far as they can be told without
    loading them."""
    found = {"raygnn": raygnn.__version__} | {name: _version(name) for name in PACKAGES}
    for cuda in ("cu11", "cu12", "cu13"):
        if version := _version(f"nvidia-nccl-{cuda}"):
            found["nccl"] = version
    with contextlib.suppress(OSError):
        if (torch := _directory("torch")) is not None:
            built_for = re.search(r"^cuda\b.*= '(.+)'", (torch / "version.py").read_text(), re.M)
            found |= {"cuda": built_for[1]} if built_for else {}
    with contextlib.suppress(OSError):
        if (dgl := _directory("dgl")) is not None:
            found["libdgl.so"] = f"{(dgl / 'libdgl.so').stat().st_size} bytes"
    return found


def _directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
