"""Inputs of a job in the driver: a partitioned graph, a collection of graphs, or a dataset."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from raygnn.config.graph import GraphSplit
from raygnn.config.schema import Config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import ConfigError
from raygnn.graph.available_memory import check_available
from raygnn.graph.collection import CollectionMeta, MissingCollection, find_collection, split_graphs
from raygnn.graph.data import TABLE, EdgeTarget, EdgeType, GraphData, etype_str
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.sources import load_graph, reading_bytes
from raygnn.graph.validate import check_weights
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.partition_facts import (
    Stored,
    collection_facts,
    dataset_facts,
    graph_facts,
    partition_facts,
)
from raygnn.runs.display import Display
from raygnn.sampling.plan import resolve_fanouts
from raygnn.util.files import retry, storage_error

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import PartitionMeta
    from raygnn.storage.remote import AnyPath

T = TypeVar("T")

# bytes per edge, measured with 50 edges per node: METIS takes 100 for 4 parts and 110 for 16
_PARTITIONING = 112
# with `cluster.workers: auto`, graphs with fewer nodes than this get one worker
FEW_NODES = 50_000
_EARLY = 1 << 30  # bytes of a graph that is read to count its nodes


def patient(act: Callable[..., T]) -> Callable[..., T]:
    """Let a function of a config and more wait ``fault.storage_timeout`` for storage that is away:
    it is called again."""

    @wraps(act)
    def waiting(config: Config, *args: Any, **options: Any) -> T:
        seconds = config.fault.storage_timeout.seconds
        return retry(partial(act, config, *args, **options), seconds, storage_error)

    return waiting


class Input:
    """Input of a job, stored or yet to be built."""

    @property
    def place(self) -> AnyPath | None:
        """Its present or future directory; None if that is not known yet."""
        return None

    @property
    def meta(self) -> Stored | None:
        """Its stored manifest; None before it is built."""
        return None

    @property
    def structure_bytes(self) -> int:
        """Size of all in-edge lists as a node maps them; 0 if they are not mapped."""
        return 0

    @property
    def parts(self) -> int:
        return 1

    def made(self, show: Display) -> Input:
        """Return it built; a missing one is built now, as a stage."""
        return self

    def facts(self, config: Config) -> PartitionFacts:
        """Return its facts for the preflight. Raises InputError if it cannot be read, or lacks the
        target of a task."""
        return dataset_facts()

    def known(self, config: Config) -> PartitionFacts:
        """Return the `facts` that are known without reading data."""
        return self.facts(config)

    def lists(self, config: Config, name: str, target: EdgeTarget | None) -> dict[str, Any]:
        """Return what files list for a task of this ``name``: negatives of its edges (``target``),
        or the rows of its training table; see `Job`. Raises DataError if a file is missing, damaged
        or does not fit the graph."""
        return {}

    def ids(self, ntype: str | None) -> tuple[Any, int] | None:
        """Return the user's ids of a node type, or of graphs (None = their numbers), and their
        number; None if only the ranks know. Raises DataError if the partition's file of ids is
        damaged."""
        return None

    def check(self, config: Config) -> None:
        """Raise InputError for a key that the data does not support."""


class UnreadGraph(Input):
    """Graph that is too large to be read before it is partitioned."""


@patient
def read_input(
    config: Config,
    workers: int,
    show: Display,
    cluster: RayCluster,
    *,
    early: PartitionInput | None = None,
    only_look: bool = False,
) -> Input:
    """Find the job's input, or read and validate the files from which it is to be built.

    A graph that is too large for memory is partitioned at once, or with ``only_look`` returned as
    an `UnreadGraph`. ``early`` is the graph as `read_early` read it. Raises InputError for bad
    input, PreflightError if reading or partitioning needs more memory than is available.
    """
    if config.task.of_graphs:
        with show.stage("graphs"):
            return CollectionInput(find_collection(config))
    found = find_partition(config, workers, like=None if early is None else early.found)
    if not isinstance(found, Missing):
        return PartitionInput(found, None)
    # imports numba and pyarrow, a third of all import time; by now Ray may be starting meanwhile
    from raygnn.driver.out_of_core import is_out_of_core, make_out_of_core

    if is_out_of_core(config):
        made = make_out_of_core(config, found, cluster, show, only_look=only_look)
        return UnreadGraph() if made is None else PartitionInput(made, None, just_made=True)
    data = None if early is None else early.data
    with show.stage("graph") if data is None else nullcontext():
        data = _read(config) if data is None else data
        given = PartitionInput(found, data)
        check_available(config, "partitioning the graph", given.partitioning_bytes)
    return given


def read_early(config: Config, workers: int, show: Display) -> PartitionInput | None:
    """Find or read the job's graph to decide on the number of workers; None for graph-level tasks,
    for a graph of more than 1 GiB to read, and for one that is partitioned out of core. Raises as
    `read_input` does."""
    if config.task.of_graphs or config.partition.engine == "ray":
        return None
    if config.graph is not None and reading_bytes(config.graph) > _EARLY:
        return None
    found = find_partition(config, workers)
    if isinstance(found, Missing):
        found = find_partition(config, 1, like=found)
    if not isinstance(found, Missing):
        return PartitionInput(found, None)
    from raygnn.driver.out_of_core import is_out_of_core  # as in `read_input`

    if is_out_of_core(config):
        return None
    with show.stage("graph"):
        return PartitionInput(found, _read(config))


def _read(config: Config) -> GraphData:
    assert config.graph is not None
    check_available(config, "reading the graph", reading_bytes(config.graph))
    return load_graph(config.graph, needs_masks=config.needs_masks, trains=config.trains)


@contextmanager
def to_look_at(given: Input) -> Iterator[Input]:
    """The same, with graphs that are yet to be packed in a directory that goes afterwards. Raises
    InputError if they cannot be read."""
    if not isinstance(given, CollectionInput) or not isinstance(given.found, MissingCollection):
        yield given
        return
    with TemporaryDirectory(prefix="raygnn-") as directory:
        meta = replace(given.found, place=Path(directory) / "collection").make()
        yield CollectionInput(meta, passing=True)


@dataclass(frozen=True)
class PartitionInput(Input):
    """Partition of one graph: stored, or to be built from ``data``."""

    found: PartitionMeta | Missing
    data: GraphData | None
    just_made: bool = False  # by this command, out of core
    # task name → what `lists` has read of its training table
    tables: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def place(self) -> AnyPath:
        return self.found.place if isinstance(self.found, Missing) else self.found.directory

    @property
    def meta(self) -> PartitionMeta | None:
        return None if isinstance(self.found, Missing) else self.found

    @property
    def parts(self) -> int:
        return self.found.parts if isinstance(self.found, Missing) else self.found.num_parts

    @property
    def nodes(self) -> dict[str, int]:
        """Node type → number of nodes."""
        if self.data is not None:
            return {t: frame.num for t, frame in self.data.nodes.items()}
        assert self.meta is not None
        return {t: self.meta.num_nodes(t) for t in self.meta.ntypes}

    @property
    def counts(self) -> dict[EdgeType, tuple[int, int, int]]:
        """Edge type → number of source nodes, destination nodes and edges."""
        nodes, meta = self.nodes, self.meta
        if self.data is not None:
            edges = {e: frame.num for e, frame in self.data.edges.items()}
        else:
            assert meta is not None
            edges = {e: meta.num_edges(e) for e in meta.etypes}
        return {e: (nodes[e[0]], nodes[e[2]], num) for e, num in edges.items()}

    @property
    def has_few_nodes(self) -> bool:
        """True if one worker is enough for the graph."""
        return sum(self.nodes.values()) < FEW_NODES

    @property
    def structure_bytes(self) -> int:
        """Size of the in-edge lists as `raygnn.graph.staging.node_cache` writes them."""
        return sum(
            (4 if sources < 2**31 else 8) * edges + (8 + 4) * targets
            for sources, targets, edges in self.counts.values()
        )

    @property
    def partitioning_bytes(self) -> int:
        """Estimated memory for partitioning, without the graph itself."""
        return _PARTITIONING * sum(num for _, _, num in self.counts.values())

    def made(self, show: Display) -> PartitionInput:
        if not isinstance(self.found, Missing):
            return self
        assert self.data is not None
        from raygnn.graph.outofcore.divide import make_partition  # which imports torch

        with show.stage("partition") as detail:
            return replace(self, found=make_partition(self.found, self.data, detail), data=None)

    def facts(self, config: Config) -> PartitionFacts:
        if isinstance(self.found, Missing):
            assert self.data is not None
            return graph_facts(config, self.data, self.found.parts)
        return partition_facts(config, self.found)

    def check(self, config: Config) -> None:
        for name, one in config.by_task.items():
            where = f"tasks.{name}" if name else "task"
            self._check_numbers(one, where)
            if self.data is not None and getattr(one.task, "ntype", None) in self.nodes:
                self.lists(one, name, None)  # before anything is written
        sampling = config.sampling
        resolve_fanouts(sampling.fanout, list(self.counts))
        weight = sampling.edge_weight
        if weight is not None and self.data is not None:
            for etype, frame in self.data.edges.items():
                if weight in frame.data:
                    check_weights(weight, etype, frame.data[weight])

    def lists(self, config: Config, name: str, target: EdgeTarget | None) -> dict[str, Any]:
        from raygnn.graph.negative_lists import lists_of, rows_of  # which import pyarrow

        if target is None:
            ntype = getattr(config.task, "ntype", None)
            if config.table is not None and name not in self.tables:
                self.tables[name] = rows_of(config, name, *self.ids(ntype))
            return self.tables.get(name, {})
        held = self.data if self.data is not None else self.meta
        assert held is not None
        return lists_of(config, target, self.counts[target.etype][:2], held)

    def ids(self, ntype: str | None) -> tuple[Any, int]:
        assert ntype is not None
        if self.data is not None:
            return self.data.ids.get(ntype), self.nodes[ntype]
        from raygnn.graph.partition.read import read_ids  # which imports torch

        assert self.meta is not None
        return read_ids(self.meta, ntype), self.nodes[ntype]

    def _check_numbers(self, config: Config, where: str) -> None:
        task = config.task
        if task.classifies or task.several_labels or task.of_links or config.table is not None:
            return
        kinds = {etype_str(e) if task.of_edges else t for e in self.counts for t in (e[0], e[2])}
        chosen = getattr(task, "etype" if task.of_edges else "ntype", None)
        for kind in sorted(kinds):
            named = chosen in (None, kind) or (task.of_edges and kind.split(":")[1] == chosen)
            if named and f"{kind}/{task.target}" in self._names:
                raise ConfigError(
                    f"{task.target!r} of {kind} are classes, numbered in the order of their words, "
                    f"and {task.kind} predicts numbers",
                    where=f"{where}.kind",
                    remedy=f"set label_kind: number in the YAML of the tables, or {where}.kind to "
                    f"{task.unit}_classification",
                )

    @property
    def _names(self) -> Container[str]:
        """``"<type>/<array>"`` of the arrays that hold numbers of categories."""
        if self.data is not None:
            return self.data.names
        assert self.meta is not None
        return self.meta.names


@dataclass(frozen=True)
class CollectionInput(Input):
    """Many graphs in one directory: there, or yet to be packed."""

    found: CollectionMeta | MissingCollection
    passing: bool = False  # packed to be looked at, in a directory that goes

    @property
    def place(self) -> Path:
        found = self.found
        return found.place if isinstance(found, MissingCollection) else found.directory

    @property
    def meta(self) -> CollectionMeta | None:
        found = self.found
        return None if self.passing or isinstance(found, MissingCollection) else found

    def made(self, show: Display) -> CollectionInput:
        if not isinstance(self.found, MissingCollection):
            return self
        with show.stage("collection") as detail:
            return CollectionInput(self.found.make(detail))

    def facts(self, config: Config) -> PartitionFacts:
        meta = self.found
        assert isinstance(meta, CollectionMeta)
        meta.check_target(config.task, known=config.trains)
        splits = _splits(meta, config) if config.trains else {}
        return collection_facts(meta, splits, stored=not self.passing)

    def known(self, config: Config) -> PartitionFacts:
        return dataset_facts() if self.meta is None else self.facts(config)

    def ids(self, ntype: str | None) -> tuple[Any, int] | None:
        return None if self.meta is None else (None, self.meta.num_graphs)


def find_input(config: Config) -> PartitionInput | CollectionInput:
    """Find a job's stored input; its ``meta`` is None if there is none."""
    if config.task.of_graphs:
        return CollectionInput(find_collection(config))
    return PartitionInput(find_partition(config, 1), None)


def with_rows(facts: PartitionFacts, lists: Mapping[str, Any]) -> PartitionFacts:
    """Return the facts with the splits of the only task's training table, if it has one."""
    rows = lists.get("", {}).get(TABLE)
    return facts if rows is None else replace(facts, splits=rows.counts)


def _splits(meta: CollectionMeta, config: Config) -> dict[str, int]:
    column = meta.target(config.task.target)
    if (given := meta.given_splits()) is not None:
        return {name: len(numbers) for name, numbers in given.items()}
    graph = config.graph if isinstance(config.graph, GraphSplit) else GraphSplit()
    classes = None
    if column.high is not None and column.shape in ((), (1,)):
        classes = np.load(meta.directory / column.file).reshape(-1)
    splits = split_graphs(meta.num_graphs, classes, graph)
    return {name: len(numbers) for name, numbers in splits.items()}
