"""Partitions: made once, found again by digest, and never half there.

A partition is written to a temporary directory beside its place and renamed when it is complete
and on disk, so a reader sees all of it or nothing, and of two processes that make the same one
the first wins and the other takes what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.config.places import unwritable
from raygnn.errors import ConfigError, DataError
from raygnn.graph import sources
from raygnn.graph.data import GraphData
from raygnn.graph.partition.layout import LAYOUT_VERSION, MANIFEST, PartitionMeta, read_meta
from raygnn.graph.remote import RemotePath, any_path
from raygnn.util.files import is_vacant, new_directory, publish, remove_stale, storage_errors

if TYPE_CHECKING:
    from raygnn.config.graph import GraphConfig
    from raygnn.config.schema import Config

Progress = Callable[[str], object]

# Fixed, so that runs with different training seeds share one partition.
_INSTEAD = "set storage or partition.path elsewhere"
_SEED = 0


def ensure_partition(config: Config, parts: int, progress: Progress | None = None) -> PartitionMeta:
    """The partition that a job needs; made if it is not there yet.

    It lies at ``partition.path``, or else at ``<storage>/partitions/<digest>``, where the digest
    stands for the input files' contents and everything that decides the result. What is there
    is reused without reading the graph. At ``partition.path``, a partition that others wrote is
    taken as it is, and with ``partition.parts: auto`` so is ours whatever its number of parts.

    Args:
        parts: how many to make where ``partition.parts`` is ``auto``.
        progress: called with ``"load"``, ``"metis"`` (assignment), ``"assemble"``, ``"write"`` and
            ``"write, 1 of 2 parts"``.

    Raises:
        ConfigError: ``partition.path`` holds something else than asked for.
        DataError: the graph or the partition is damaged, or cannot be written.
    """
    found = find_partition(config, parts)
    if isinstance(found, PartitionMeta):
        return found
    _tell(progress, "load")
    return found.make(
        sources.load_graph(found.graph, needs_masks=config.needs_masks, trains=config.trains),
        progress,
    )


@dataclass(frozen=True)
class Missing:
    """A partition that is yet to be made.

    Attributes:
        place: the directory where it will lie.
        graph: what to load for it.
    """

    place: Path
    graph: GraphConfig
    parts: int
    method: str
    digest: str
    source: dict[str, Any]

    def make(self, data: GraphData, progress: Progress | None = None) -> PartitionMeta:
        """Make it from the loaded graph."""
        return partition_graph(
            data,
            self.place,
            parts=self.parts,
            method=self.method,
            digest=self.digest,
            source=self.source,
            seed=_SEED,
            progress=progress,
        )


def find_partition(config: Config, parts: int) -> PartitionMeta | Missing:
    """The partition that is there already, or else what is to be made.

    Raises:
        ConfigError, DataError: as `ensure_partition`.
    """
    place = None if config.partition.path is None else any_path(config.partition.path)
    there = read_meta(place) if place is not None and not is_vacant(place) else None
    if there is not None and (there.manifest is None or config.graph is None):
        _check_parts(config, there)
        return there
    if config.graph is None:
        raise ConfigError(
            f"there is no partition at {place}, and no graph to make one from",
            where=config.where("partition.path"),
            remedy="correct partition.path, or add a graph section",
        )
    if there is None and isinstance(place, RemotePath):
        raise ConfigError(
            f"there is no partition at {place}, and none can be made there",
            where=config.where("partition.path"),
            remedy="make it in a local directory with `raygnn partition`, and copy that whole",
        )
    if config.partition.parts != "auto":
        parts = config.partition.parts
    elif there is not None:
        parts = there.num_parts
    made_from = {
        "graph": sources.digest(config.graph),
        "parts": parts,
        "method": config.partition.method,
        "seed": _SEED,
        "layout": LAYOUT_VERSION,
    }
    source = {"options": config.graph.model_dump(mode="json"), "made_from": made_from}
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    if place is None:
        place = Path(config.storage) / "partitions" / digest[:16]
        there = None if is_vacant(place) else read_meta(place)
    if there is None:
        assert isinstance(place, Path)
        _check_writable(config, place)
        return Missing(place, config.graph, parts, config.partition.method, digest, source)
    if there.digest != digest:
        raise ConfigError(
            f"{place} holds another partition: {_differences(there, source)}",
            where=config.where("partition.path"),
            remedy="name another directory, or delete this one to have it made again",
        )
    if isinstance(place, Path):
        with contextlib.suppress(OSError):  # a directory that is read only
            remove_stale(place)
    return there


def partition_graph(
    data: GraphData,
    out_dir: Path,
    *,
    parts: int,
    method: str,
    digest: str,
    source: dict[str, Any],
    seed: int = 0,
    progress: Progress | None = None,
) -> PartitionMeta:
    """Divide a graph and write it to ``out_dir`` in DGL's distributed layout.

    Args:
        data: as :func:`raygnn.graph.sources.load_graph` gives it, ids in range.
        out_dir: must not exist, or be empty, or hold a partition of the same digest, which is
            then returned.
        parts: from 1; where there are more than nodes, some are empty.
        method: ``"metis"`` or ``"random"``.
        digest, source: kept in the manifest; ``source`` describes the input.
        seed: of the method ``random``.
        progress: called with ``"metis"``, ``"assemble"``, ``"write"``, ``"write, 1 of 2 parts"``.

    Raises:
        DataError: names or types that DGL's files cannot express, METIS failed, no space or
            no permission to write, or something else is in the way.
    """
    # here, because looking for a partition that is there needs neither torch nor DGL
    from raygnn.graph.partition.assemble import Assembly
    from raygnn.graph.partition.assign import assign
    from raygnn.graph.partition.write import check_storable, write_json, write_parts

    out_dir = out_dir.absolute()
    if not is_vacant(out_dir):
        return _the_same(out_dir, digest)
    check_storable(data)
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        _tell(progress, name)
        started = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - started

    with (
        storage_errors(out_dir, DataError, _INSTEAD),
        new_directory(out_dir) as directory,
    ):
        with stage("metis"):
            assignment = assign(data, parts, method, seed)
        with stage("assemble"):
            assembly = Assembly(data, assignment, parts)
        with stage("write"):
            manifest = write_parts(
                data, assembly, directory, method, lambda done: _tell(progress, f"write, {done}")
            )
        manifest |= {"digest": digest, "seed": seed, "source": source, "seconds": seconds}
        write_json(directory / MANIFEST, manifest)
        if not publish(directory, out_dir):
            return _the_same(out_dir, digest)
    return read_meta(out_dir)


def _check_writable(config: Config, place: Path) -> None:
    """Refuse a ``partition.path`` where nothing can be made, before the graph is read."""
    if config.partition.path is not None and (why := unwritable(place)) is not None:
        raise ConfigError(
            f"no partition can be made in {place}: {why}",
            where=config.where("partition.path"),
            remedy="name a directory that can be made and written",
        )


def _the_same(place: Path, digest: str) -> PartitionMeta:
    meta = read_meta(place)
    if meta.digest != digest:
        raise DataError(
            "another partition is here already",
            where=str(place),
            remedy="name another directory, or delete this one",
        )
    return meta


def _check_parts(config: Config, there: PartitionMeta) -> None:
    wanted = config.partition.parts
    if wanted not in ("auto", there.num_parts):
        raise ConfigError(
            f"{wanted}, but the partition at {config.partition.path} has {there.num_parts} parts",
            where=config.where("partition.parts"),
            remedy="set partition.parts to auto, or name another partition.path",
        )


def _differences(there: PartitionMeta, source: dict[str, Any]) -> str:
    """Which keys of the config make it another partition than the one that is there."""
    theirs = (there.manifest or {}).get("source", {})
    before, now = theirs.get("made_from", {}), source["made_from"]
    found = [
        f"partition.{key} is {before.get(key)!r} there and {now[key]!r} here"
        for key in ("parts", "method")
        if before.get(key) != now[key]
    ]
    if before.get("graph") != now["graph"]:
        old, new = theirs.get("options", {}), source["options"]
        keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        found += [f"graph.{k} is {old.get(k)!r} there and {new.get(k)!r} here" for k in keys]
        if not keys:
            found.append("the input files have changed since")
    return "; ".join(found) or "it was made by another version of raygnn"


def _tell(progress: Progress | None, stage: str) -> None:
    if progress is not None:
        progress(stage)
