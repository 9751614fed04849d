"""Collections: many graphs, packed on disk for tasks on whole graphs.

A collection is a directory of plain ``.npy`` arrays, per node type, per edge type and per graph,
and its manifest ``collection.json``. Each file holds one array of all graphs, graph after graph;
bfloat16 is stored as int16. A collection is packed once, found again by its digest, and published
only when it is complete. Neither torch nor dgl is loaded until graphs are packed or read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from raygnn.config.graph import DatasetGraph, GraphSplit, ManyGraphs
from raygnn.config.task import TaskConfig
from raygnn.config.values import Section
from raygnn.errors import ConfigError, DataError
from raygnn.graph import sources
from raygnn.graph.arrays import CODES, stored_dtype
from raygnn.graph.data import SPLITS, EdgeType
from raygnn.graph.partition.manifest import (
    FileFacts,
    check_size,
    checksum,
    read_json,
    validated,
)
from raygnn.graph.sources.input_files import check_file, sha256
from raygnn.storage.remote import RemotePath
from raygnn.storage.replica import share_directory
from raygnn.util.files import is_vacant, remove_stale, storage_errors

if TYPE_CHECKING:
    from raygnn.config.schema import Config

MANIFEST = "collection.json"
VERSION: Literal[1] = 1

REMEDY = "delete the directory: it is built again from the graphs"

INSTEAD = "set storage or partition.path elsewhere"
_SUFFIXES = (".bin", ".dgl")

# Memory for packing, per byte of the files: the graphs, their largest array joined, and scaled
_PACKED = 3

_Natural = Annotated[int, Field(ge=0)]


def dtype_of_array(name: str) -> str:
    """Return the name of a dtype. Raises ValueError for others."""
    if name not in CODES:
        raise ValueError(f"{name!r} is no dtype of an array")
    return name


class PackedArray(Section):
    """One array of all graphs: its file, the dtype of its elements and the shape of a row."""

    file: str
    dtype: Annotated[str, AfterValidator(dtype_of_array)]
    shape: Annotated[tuple[_Natural, ...], Field(strict=False)] = ()

    @property
    def stored(self) -> np.dtype[Any]:
        return stored_dtype(self.dtype)


class GraphColumn(PackedArray):
    """An array with one row per graph. ``low`` and ``high``: range of integers, else None;
    ``nonfinite``: first graph with an infinity or NaN."""

    low: int | None = None
    high: int | None = None
    nonfinite: int | None = None


class PackedNodes(Section):
    """The nodes of one type: their number in all and in the largest graph; ``offsets``, int64
    ``[G+1]``: first row of each graph in ``data``."""

    num: _Natural
    largest: _Natural
    offsets: PackedArray
    data: dict[str, PackedArray]


class PackedEdges(PackedNodes):
    """The edges of one type, likewise; ``src`` and ``dst`` number the nodes within each graph."""

    etype: Annotated[tuple[str, str, str], Field(strict=False)]
    src: PackedArray
    dst: PackedArray


class CollectionMeta(Section):
    """Directory and manifest of a collection.

    Attributes:
        source: what it was built from.
        graphs: name → array with one row per graph, such as labels.
        splits: index into `SPLITS` per graph, -1 for none; None if the graphs came without splits.
        files: name → expected size and hash.
    """

    directory: Path = Field(exclude=True)
    version: Literal[1]
    digest: str
    source: dict[str, Any]
    num_graphs: Annotated[int, Field(ge=1)]
    nodes: dict[str, PackedNodes]
    listed_edges: list[PackedEdges] = Field(alias="edges")
    graphs: dict[str, GraphColumn]
    splits: PackedArray | None = None
    files: dict[str, FileFacts]
    seconds: float

    @cached_property
    def edges(self) -> Mapping[EdgeType, PackedEdges]:
        return {edges.etype: edges for edges in self.listed_edges}

    @property
    def num_nodes(self) -> int:
        return sum(nodes.num for nodes in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(edges.num for edges in self.edges.values())

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def target(self, name: str) -> GraphColumn:
        """Return the labels of this name. Raises ConfigError, which lists the existing ones."""
        if name not in self.graphs:
            names = ", ".join(map(repr, sorted(self.graphs))) or "none at all"
            message = f"the graphs have no labels {name!r}; there are {names}"
            remedy = "name one of them, or save some: dgl.save_graphs(file, graphs, {name: array})"
            raise ConfigError(message, where="task.target", remedy=remedy)
        return self.graphs[name]

    def given_splits(self) -> dict[str, np.ndarray] | None:
        """Return the numbers of the graphs of each split; None if the graphs came without."""
        if self.splits is None:
            return None
        split_of = np.load(self.directory / self.splits.file)
        return {name: np.flatnonzero(split_of == number) for number, name in enumerate(SPLITS)}

    def classes(self, name: str) -> int | None:
        """Return the number of classes of integer labels: the greatest + 1; else None."""
        high = self.target(name).high
        return None if high is None else high + 1

    def check_target(self, task: TaskConfig, *, known: bool = True) -> None:
        """Check that the labels fit the task; ``known``: each graph must have one."""
        if not known and task.target not in self.graphs:
            return
        column = self.target(task.target)
        where = f"{self.directory}: labels {task.target!r}"
        kind = f"they are {column.dtype} of shape {[self.num_graphs, *column.shape]}"
        if len(column.shape) > 1:
            remedy = "give each graph one label, or one row of them"
            raise DataError(kind, where=where, remedy=remedy)
        if task.classifies:
            if column.high is None or column.shape not in ((), (1,)):
                message = f"{kind}, not one class number for each graph"
                remedy = "save integers from 0, or set task.labels: multi or kind: graph_regression"
                raise ConfigError(message, where=f"task.target ({where})", remedy=remedy)
            if known and column.low is not None and column.low < 0:
                message = f"the lowest class is {column.low}"
                remedy = "number the classes from 0, and leave out graphs without a class"
                raise DataError(message, where=where, remedy=remedy)
        elif known and column.nonfinite is not None and not task.several_labels:
            message = "the label is infinite or not a number"
            remedy = "leave out graphs whose label is not known"
            raise DataError(message, where=f"{where}, graph {column.nonfinite}", remedy=remedy)


def read_collection(directory: Path) -> CollectionMeta:
    """Read a collection's manifest, but not its arrays."""
    path = directory / MANIFEST
    if not path.exists():
        message = f"there is no collection of graphs here: {MANIFEST} is missing"
        remedy = "name another directory, or delete this one"
        raise DataError(message, where=str(directory), remedy=remedy)
    content = read_json(path, REMEDY)
    if content.get("version") != VERSION:
        message = f"it is of version {content.get('version')!r}; only {VERSION} can be read"
        raise damaged(path, message)
    meta = validated(CollectionMeta, {**content, "directory": directory}, path, REMEDY)
    for name, file in meta.files.items():
        check_size(directory / name, file.bytes, REMEDY)
    return meta


def damaged(path: Path, message: str) -> DataError:
    """Build the error for a damaged file of a collection."""
    return DataError(message, where=str(path), remedy=REMEDY)


def split_graphs(num: int, classes: np.ndarray | None, graph: GraphSplit) -> dict[str, np.ndarray]:
    """Divide graphs at random, by ``graph.seed``, stratified by class.

    With ``graph.folds``, the test graphs are fold ``graph.fold`` of disjoint folds of nearly equal
    size, and ``graph.val`` is a share of the others; with ``graph.fold_for: val``, the fold is the
    validation split and there is no test split. Otherwise ``graph.val`` and ``graph.test`` are
    shares of all graphs. A share above 0 is at least one graph, if that leaves one to train on.
    Returns "train", "val" and "test" → graph numbers, int64, ascending.
    """
    # RandomState, because its stream is the same in every version of NumPy
    order = np.random.RandomState(graph.seed).permutation(num)
    if classes is not None:
        # sorted by class, so that equal steps take equal shares of each class
        order = order[np.argsort(classes[order], kind="stable")]
    if graph.folds is None:
        test, rest = _take(order, _count(graph.test, num, len(order)))
        val, train = _take(rest, _count(graph.val, num, len(rest)))
    else:
        if graph.folds > num:
            message = f"{num} graphs cannot be divided into {graph.folds} folds"
            raise ConfigError(message, where="graph.folds", remedy="lower graph.folds")
        mine = np.arange(num) % graph.folds == graph.fold
        held, rest = order[mine], order[~mine]
        if graph.fold_for == "val":
            test, val, train = held[:0], held, rest
        else:
            test = held
            val, train = _take(rest, _count(graph.val, len(rest), len(rest)))
    parts = {"train": train, "val": val, "test": test}
    return {name: np.sort(part).astype(np.int64) for name, part in parts.items()}


def _count(share: float, whole: int, available: int) -> int:
    count = max(int(share * whole + 0.5), 1) if share else 0
    return min(count, available - 1)


def _take(order: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``count`` elements at equal steps, and the others."""
    taken = np.zeros(len(order), np.bool_)
    taken[(2 * np.arange(count) + 1) * len(order) // (2 * max(count, 1))] = True
    return order[taken], order[~taken]


@dataclass(frozen=True)
class MissingCollection:
    """A collection that is yet to be packed into ``place``, which is uploaded to the object store
    ``shared`` if not all nodes see it."""

    place: Path
    graph: ManyGraphs | DatasetGraph
    digest: str
    source: dict[str, Any]
    shared: RemotePath | None = None

    @property
    def packing_bytes(self) -> int:
        """Estimated memory for packing the files, at most; 0 for a dataset, of unknown size."""
        if isinstance(self.graph, DatasetGraph):
            return 0
        return _PACKED * sum(check_file(file) for file in graph_files(self.graph.path))


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
        contents = b"".join(bytes.fromhex(sha256(file)) for file in graph_files(graph.path))
        made_from["content"] = hashlib.sha256(contents).hexdigest()
    digest = checksum(made_from)
    shared = None
    if place is None:
        place = config.local_storage / "partitions" / digest[:16]
        if config.store is not None:
            shared = RemotePath.of(config.store, "storage") / "partitions" / place.name
            with storage_errors(place, DataError, INSTEAD):
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


def graph_files(path: Path) -> tuple[Path, ...]:
    """Return the files of graphs in a directory, by name, or the file itself."""
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
