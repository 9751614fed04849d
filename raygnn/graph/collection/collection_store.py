"""Collections: packed once, found again by digest, published only when complete."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.config.graph import DatasetGraph, ManyGraphs
from raygnn.errors import ConfigError, DataError
from raygnn.graph import sources
from raygnn.graph.collection.collection_manifest import (
    MANIFEST,
    VERSION,
    CollectionMeta,
    read_collection,
)
from raygnn.graph.partition.manifest import checksum
from raygnn.graph.sources import datasets, library_graphs
from raygnn.graph.sources.input_files import out_of_memory, sha256
from raygnn.graph.sources.library_graphs import GraphSet
from raygnn.storage.remote import RemotePath
from raygnn.storage.replica import share_directory
from raygnn.util.files import is_vacant, new_directory, publish, remove_stale, storage_errors, sync

if TYPE_CHECKING:
    from raygnn.config.schema import Config

_INSTEAD = "set storage or partition.path elsewhere"
_SUFFIXES = (".bin", ".dgl")


@dataclass(frozen=True)
class MissingCollection:
    """A collection that is yet to be packed into ``place``, which is uploaded to the object store
    ``shared`` if not all nodes see it."""

    place: Path
    graph: ManyGraphs | DatasetGraph
    digest: str
    source: dict[str, Any]
    shared: RemotePath | None = None

    def make(self, progress: Callable[[str], object] | None = None) -> CollectionMeta:
        """Pack it; ``progress`` is called with ``"pack"``."""
        from raygnn.graph.collection.pack import pack  # which imports torch

        place = self.place.absolute()
        if progress is not None:
            progress("pack")
        with storage_errors(place, DataError, _INSTEAD), new_directory(place) as directory:
            method = self.graph.normalize or "none"
            about = {"digest": self.digest, "source": self.source}
            try:
                packed = pack(self._sources(), directory, method, about)
            except MemoryError as error:
                raise out_of_memory(str(self.source["path"]), error) from None
            file = directory / MANIFEST
            file.write_text(packed.model_dump_json(indent=1, by_alias=True))
            sync(file)
            publish(directory, place)  # if another process was first, its result is the same
        existing = read_collection(place)
        if existing.digest != self.digest:
            message = "another collection exists here already"
            remedy = "name another directory, or delete this one"
            raise DataError(message, where=str(place), remedy=remedy)
        if self.shared is not None:
            share_directory(place, self.shared, MANIFEST)
        return existing

    def _sources(self) -> Iterator[AbstractContextManager[GraphSet]]:
        if isinstance(self.graph, DatasetGraph):
            yield datasets.read_all(self.graph)
            return
        for file in _input_files(self.graph.path):
            if file.suffix == ".txt":
                message = "text is not a file that dgl.save_graphs wrote"
                remedy = "read GIN's text with a dataset class, as examples/gin_text.py does"
                raise DataError(message, where=str(file), remedy=remedy)
            yield library_graphs.read_all(file)


def find_collection(config: Config) -> CollectionMeta | MissingCollection:
    """Return the existing collection, or the one to be packed.

    It is stored at ``partition.path``, or else at ``<storage>/partitions/<digest>``. The digest
    covers the contents of the input files and how they are packed, but not the split of the graphs.
    """
    place, graph = config.partition.path, config.graph
    if place is not None and not isinstance(place, Path):
        message = f"{place} is not on a disk of this machine, as a collection of graphs must be"
        remedy = "name a directory, or leave partition.path out"
        raise ConfigError(message, where=config.where("partition.path"), remedy=remedy)
    existing = read_collection(place) if place is not None and not is_vacant(place) else None
    if graph is None:
        if existing is None:
            message = f"there is no collection at {place}, and no graphs to pack"
            remedy = "correct partition.path, or add a graph section"
            raise ConfigError(message, where=config.where("partition.path"), remedy=remedy)
        return existing
    assert isinstance(graph, (ManyGraphs, DatasetGraph))
    made_from: dict[str, Any] = {"normalize": graph.normalize or "none", "version": VERSION}
    if isinstance(graph, DatasetGraph):
        source = graph.dataset
        made_from["content"] = sources.digest(graph)
    else:
        source = str(graph.path)
        contents = b"".join(bytes.fromhex(sha256(file)) for file in _input_files(graph.path))
        made_from["content"] = hashlib.sha256(contents).hexdigest()
    digest = checksum(made_from)
    shared = None
    if place is None:
        place = config.local_storage / "partitions" / digest[:16]
        if config.store is not None:
            shared = RemotePath.of(config.store, "storage") / "partitions" / place.name
            with storage_errors(place, DataError, _INSTEAD):
                share_directory(place, shared, MANIFEST)
        existing = None if is_vacant(place) else read_collection(place)
    if existing is None:
        about = {"path": source, "made_from": made_from}
        return MissingCollection(place, graph, digest, about, shared)
    if existing.digest != digest:
        old, new = existing.source.get("made_from", {}).get("normalize"), made_from["normalize"]
        difference = "it was packed from other graphs, or from these before they changed"
        if old != new:
            difference = f"graph.normalize is {old!r} there and {new!r} here"
        message = f"{place} holds another collection: {difference}"
        remedy = "name another directory, or delete this one to pack it again"
        raise ConfigError(message, where=config.where("partition.path"), remedy=remedy)
    with contextlib.suppress(OSError):  # the directory may be read-only
        remove_stale(place)
    return existing


def _input_files(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    try:
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    except OSError as error:
        message, remedy = f"the directory cannot be read: {error.strerror}", "check its permissions"
        raise DataError(message, where=str(path), remedy=remedy) from None
    if not files:
        message = f"there are no files *{' or *'.join(_SUFFIXES)} in this directory"
        remedy = "name the directory, or the file, that holds the graphs"
        raise DataError(message, where=str(path), remedy=remedy)
    return tuple(files)
