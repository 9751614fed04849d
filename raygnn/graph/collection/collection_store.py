"""Collections: packed once, found again by digest, published only when complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.config.graph import ManyGraphs
from raygnn.errors import ConfigError, DataError
from raygnn.graph.collection.collection_manifest import (
    MANIFEST,
    VERSION,
    CollectionMeta,
    read_collection,
)
from raygnn.graph.collection.pack import pack
from raygnn.graph.sources import gin_text, saved_graphs
from raygnn.graph.sources.input_files import check_file, opened, out_of_memory, sha256
from raygnn.graph.sources.saved_graphs import GraphSet
from raygnn.storage.remote import RemotePath
from raygnn.storage.replica import share_directory
from raygnn.util.files import is_vacant, new_directory, publish, remove_stale, storage_errors, sync

if TYPE_CHECKING:
    from raygnn.config.schema import Config

_INSTEAD = "set storage or partition.path elsewhere"
_PARSED = 40  # memory of a parsed file in GIN's text format, over the file's size
_SUFFIXES = (".bin", ".dgl")


@dataclass(frozen=True)
class MissingCollection:
    """A collection that is yet to be packed.

    Attributes:
        place: its directory.
        files: input files, in order.
        normalize: how to scale the features.
        tags, labels: values that GIN's text format numbers 0, 1, …; None = those of each file.
        shared: object store that the directory is uploaded to, if not all nodes see it.
    """

    place: Path
    files: tuple[Path, ...]
    normalize: str
    digest: str
    source: dict[str, Any]
    tags: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    shared: RemotePath | None = None

    def reading_bytes(self) -> int:
        """Estimate the memory that packing takes, in bytes: a file in GIN's text format is read at
        once; otherwise one graph at a time is in memory, which counts as 0."""
        (file, *others) = self.files
        return 0 if others or _head(file) == saved_graphs.MAGIC else _PARSED * check_file(file)

    def make(self, progress: Callable[[str], object] | None = None) -> CollectionMeta:
        """Pack it; ``progress`` is called with ``"pack"``.

        Raises:
            ConfigError: a graph lacks what ``graph`` requires.
            DataError: a graph or the collection is damaged, or it cannot be written.
        """
        place = self.place.absolute()
        if progress is not None:
            progress("pack")
        several = len(self.files) > 1
        with storage_errors(place, DataError, _INSTEAD), new_directory(place) as directory:
            try:
                packed = pack(
                    (self._open(file, several) for file in self.files),
                    directory,
                    method=self.normalize,
                    digest=self.digest,
                    source=self.source,
                )
            except MemoryError as error:
                raise out_of_memory(str(self.source["path"]), error) from None
            file = directory / MANIFEST
            file.write_text(packed.model_dump_json(indent=1, by_alias=True))
            sync(file)
            publish(directory, place)  # if another process was first, its result is the same
        existing = read_collection(place)
        if existing.digest != self.digest:
            raise DataError(
                "another collection exists here already",
                where=str(place),
                remedy="name another directory, or delete this one",
            )
        if self.shared is not None:
            share_directory(place, self.shared, MANIFEST)
        return existing

    def _open(self, file: Path, several: bool) -> AbstractContextManager[GraphSet]:
        """Open a file of either format, which its first bytes show; several files are all DGL's."""
        head = _head(file)
        if head == saved_graphs.MAGIC:
            for key in ("tags", "labels"):
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"{file} was written by dgl.save_graphs; graph.{key} applies only to GIN's "
                        "text format",
                        where=f"graph.{key}",
                        remedy="set graph.tags and graph.labels to null; tags and labels keep the "
                        "numbers that they have in the file",
                    )
            return saved_graphs.read_all(file)
        if several or not head.split()[:1] or not head.split()[0].isdigit():
            raise DataError(
                "it is neither a file that dgl.save_graphs wrote"
                + ("" if several else " nor text as GIN's, which begins with the number of graphs"),
                where=str(file),
                remedy="check graph.path, or save the graphs with dgl.save_graphs",
            )
        return gin_text.read_all(file, self.tags, self.labels)


def find_collection(config: Config) -> CollectionMeta | MissingCollection:
    """Return the existing collection, or the one to be packed.

    It is stored at ``partition.path``, or else at ``<storage>/partitions/<digest>``. The digest
    covers the contents of the input files and how they are packed, but not the split of the graphs.

    Raises:
        ConfigError: ``partition.path`` holds another collection than the config describes.
        DataError: the collection is damaged, or there are no input files.
    """
    place, graph = config.partition.path, config.graph
    if place is not None and not isinstance(place, Path):
        raise ConfigError(
            f"{place} is not on a disk of this machine, as a collection of graphs must be",
            where=config.where("partition.path"),
            remedy="name a directory, or leave partition.path out",
        )
    existing = read_collection(place) if place is not None and not is_vacant(place) else None
    if graph is None:
        if existing is None:
            raise ConfigError(
                f"there is no collection at {place}, and no graphs to pack",
                where=config.where("partition.path"),
                remedy="correct partition.path, or add a graph section",
            )
        return existing
    assert isinstance(graph, ManyGraphs)
    assert graph.path is not None
    files = _input_files(graph.path)
    normalize = graph.normalize or "none"
    contents = b"".join(bytes.fromhex(sha256(file)) for file in files)
    content = hashlib.sha256(contents).hexdigest()
    made_from = {"content": content, "normalize": normalize, "version": VERSION}
    named = {"tags": graph.tags, "labels": graph.labels}
    made_from |= {key: list(values) for key, values in named.items() if values is not None}
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    shared = None
    if place is None:
        place = config.local_storage / "partitions" / digest[:16]
        if config.store is not None:
            shared = RemotePath.of(config.store, "storage") / "partitions" / place.name
            with storage_errors(place, DataError, _INSTEAD):
                share_directory(place, shared, MANIFEST)
        existing = None if is_vacant(place) else read_collection(place)
    if existing is None:
        source = {"path": str(graph.path), "made_from": made_from}
        return MissingCollection(place, files, normalize, digest, source, **named, shared=shared)
    if existing.digest != digest:
        before = existing.source.get("made_from", {})
        difference = "it was packed from other files, or from these before they changed"
        for key in ("normalize", "tags", "labels"):
            if (old := before.get(key)) != (new := made_from.get(key)):
                difference = f"graph.{key} is {old!r} there and {new!r} here"
                break
        raise ConfigError(
            f"{place} holds another collection: {difference}",
            where=config.where("partition.path"),
            remedy="name another directory, or delete this one to pack it again",
        )
    with contextlib.suppress(OSError):  # the directory may be read-only
        remove_stale(place)
    return existing


def _head(file: Path) -> bytes:
    """Return the first bytes of a file, which show its format."""
    with opened(file) as stream:
        return stream.read(len(saved_graphs.MAGIC))


def _input_files(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    try:
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    except OSError as error:
        raise DataError(
            f"the directory cannot be read: {error.strerror}",
            where=str(path),
            remedy="check the permissions of the directory",
        ) from None
    if not files:
        raise DataError(
            f"there are no files *{' or *'.join(_SUFFIXES)} in this directory",
            where=str(path),
            remedy="name the directory, or the file, that holds the graphs",
        )
    return tuple(files)
