"""Partitions: built once, found again by digest, published only when complete.

A partition is written to a temporary directory beside its destination and renamed when it is
complete and on disk, so that readers see all of it or nothing. Of two processes that build the
same one, the second uses the partition of the first.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.config.places import unwritable
from raygnn.errors import ConfigError, DataError
from raygnn.graph import sources
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.manifest import LAYOUT_VERSION, MANIFEST, checksum
from raygnn.storage.remote import AnyPath, RemotePath, any_path
from raygnn.storage.replica import upload_directory
from raygnn.util.files import is_vacant, remove_stale

if TYPE_CHECKING:
    from raygnn.config.graph import GraphConfig
    from raygnn.config.schema import Config

SEED = 0  # fixed, so that runs with different training seeds share one partition


@dataclass(frozen=True)
class Missing:
    """A partition that is yet to be built, on this machine in ``draft``; `upload` moves it to
    ``place``."""

    place: AnyPath
    parts: int
    method: str
    digest: str
    source: dict[str, Any]
    draft: Path
    seed: int = SEED

    @property
    def stages(self) -> Path:
        """Directory of its stages until it is complete, if it is built out of core."""
        place = self.draft.absolute()
        return place.parent / f".{place.name}.stages-{self.digest[:16]}"

    def upload(
        self, made: PartitionMeta, progress: Callable[[str], object] | None = None
    ) -> PartitionMeta:
        """Move the built partition to ``place`` if that is an object store."""
        if not isinstance(self.place, RemotePath):
            return made
        if progress is not None:
            progress("upload")
        upload_directory(self.draft, self.place, [MANIFEST, made.config_file.name])
        shutil.rmtree(self.draft, ignore_errors=True)
        return read_meta(self.place)


def is_partition(place: AnyPath) -> bool:
    """Return True if the upload of a partition is complete: its json comes last."""
    return any(path.name != MANIFEST for path in place.glob("*.json"))


def find_partition(
    config: Config, parts: int, *, like: PartitionMeta | Missing | None = None
) -> PartitionMeta | Missing:
    """Return a job's existing partition, or the one to be built.

    It is stored at ``partition.path``, or else at ``<storage>/partitions/<digest>``; the digest
    covers the contents of the input files and everything else that determines the result. An
    existing partition is reused without reading the graph. At ``partition.path``, a partition of
    another tool is accepted, and one of raygnn with ``stream`` in place of ``metis``; with ``parts:
    auto``, any number of parts.

    Args:
        parts: number of parts to build if ``partition.parts`` is ``auto``.
        like: partition of the same graph found just before; its files are not hashed again.
    """
    key, graph = config.where("partition.path"), config.graph
    place = None if config.partition.path is None else any_path(config.partition.path)
    meta = None if place is None or is_vacant(place) else read_meta(place)
    if meta is not None and (meta.manifest is None or graph is None):
        if config.partition.parts not in ("auto", meta.num_parts):
            message = f"{config.partition.parts}, but the one at {place} has {meta.num_parts} parts"
            remedy = "set partition.parts to auto, or name another partition.path"
            raise ConfigError(message, where=config.where("partition.parts"), remedy=remedy)
        return meta
    if graph is None:
        message = f"there is no partition at {place}, and no graph to partition"
        remedy = "correct partition.path, or add a graph section"
        raise ConfigError(message, where=key, remedy=remedy)
    if meta is None and isinstance(place, RemotePath):
        message = f"there is no partition at {place}, and none can be built there"
        remedy = "build it in a local directory with `raygnn partition`, and copy that directory"
        raise ConfigError(message, where=key, remedy=remedy)
    if config.partition.parts != "auto":
        parts = config.partition.parts
    elif meta is not None:
        parts = meta.num_parts
    method = config.partition.used_method
    source = _origin(graph, like, parts, method)
    digest = checksum(source["made_from"])
    draft = config.local_storage / "partitions" / digest[:16]
    if place is None:
        place, whole = draft, not is_vacant(draft)
        if config.store is not None:
            place = RemotePath.of(config.store, "storage") / "partitions" / draft.name
            whole = is_partition(place)
        meta = read_meta(place) if whole else None
    if meta is None:
        draft = draft if isinstance(place, RemotePath) else place
        if config.partition.path is not None and (why := unwritable(draft)) is not None:
            message = f"no partition can be built in {place}: {why}"
            remedy = "name a directory that can be created and written"
            raise ConfigError(message, where=key, remedy=remedy)
        return Missing(place, parts, method, digest, source, draft)
    _check_origin(config, meta, source)
    if isinstance(place, Path):
        with contextlib.suppress(OSError):  # the directory may be read-only
            remove_stale(place)
    return meta


def _origin(
    graph: GraphConfig, like: PartitionMeta | Missing | None, parts: int, method: str
) -> dict[str, Any]:
    """Return the values of a `PartitionSource`."""
    if isinstance(like, Missing):
        same = like.source["made_from"]["graph"]
    else:
        same = like and like.manifest and like.manifest.source.made_from.get("graph")
    made_from = {
        "graph": same or sources.digest(graph),
        "parts": parts,
        "method": method,
        "seed": SEED,
        "layout": LAYOUT_VERSION,
    }
    return {"options": graph.model_dump(mode="json"), "made_from": made_from}


def same_partition(place: Path, digest: str) -> PartitionMeta:
    """Return the existing partition. Raises DataError if it has another digest."""
    meta = read_meta(place)
    if meta.digest != digest:
        message = "another partition exists here already"
        remedy = "name another directory, or delete this one"
        raise DataError(message, where=str(place), remedy=remedy)
    return meta


def _check_origin(config: Config, meta: PartitionMeta, source: dict[str, Any]) -> None:
    """Raise ConfigError if an existing partition is of another graph, or was built otherwise. It
    may be of the method that replaces METIS for graphs that do not fit into memory."""
    assert meta.manifest is not None
    before, now = meta.manifest.source.made_from, source["made_from"]
    methods = [now["method"]]
    if methods == ["metis"] and config.partition.engine != "local":
        methods.append("stream")
    if meta.digest in [checksum({**now, "method": method}) for method in methods]:
        return
    keys = [(f"partition.{key}", before.get(key), now[key]) for key in ("parts", "method")]
    old, new = meta.manifest.source.options, source["options"]
    if before.get("graph") != now["graph"]:
        keys += [(f"graph.{k}", old.get(k), new.get(k)) for k in sorted(old.keys() | new.keys())]
    changed = [f"{key} is {was!r} there and {to!r} here" for key, was, to in keys if was != to]
    if before.get("graph") != now["graph"] and old == new:
        changed.append("the input files have changed since")
    how = "; ".join(changed) or "it was written by another version of raygnn"
    message = f"{meta.directory} holds another partition: {how}"
    remedy = "name another directory, or delete this one to build it again"
    raise ConfigError(message, where=config.where("partition.path"), remedy=remedy)
