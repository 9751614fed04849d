"""Inputs of a job in the driver: a partition of one graph, or a collection of many graphs; stored,
or yet to be built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from raygnn.config.graph import GraphSplit
from raygnn.config.schema import Config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import ConfigError
from raygnn.graph.available_memory import check_available
from raygnn.graph.collection import CollectionMeta, MissingCollection, find_collection, split_graphs
from raygnn.graph.data import TABLE, EdgeTarget, EdgeType, GraphData, etype_str
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.sources import check_weights, load_graph, reading_bytes
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.partition_facts import collection_facts, graph_facts, partition_facts
from raygnn.runs.display import Display
from raygnn.sampling.plan import resolve_fanouts
from raygnn.util.files import retry, storage_error

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import PartitionMeta
    from raygnn.storage.remote import AnyPath

Input: TypeAlias = "PartitionInput | CollectionInput"
T = TypeVar("T")

# bytes per edge, measured with 50 edges per node: METIS takes 100 for 4 parts and 110 for 16
_PARTITIONING = 112
_EARLY = 1 << 30  # bytes of a graph that is read to count its nodes


def patient(act: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function whose first argument is the config: while storage is away, it is called
    again, for up to ``fault.storage_timeout``."""

    @wraps(act)
    def waiting(config: Config, *args: Any, **options: Any) -> T:
        seconds = config.fault.storage_timeout.seconds
        return retry(partial(act, config, *args, **options), seconds, storage_error)

    return waiting


@patient
def read_input(
    config: Config,
    workers: int,
    show: Display,
    cluster: RayCluster,
    *,
    early: PartitionInput | None = None,
    only_check: bool = False,
) -> Input:
    """Find the job's input, or read and validate the files from which it is to be built.

    A graph that is too large for memory is partitioned at once, or with ``only_check`` stays
    unread. ``early``: result of `read_early`. Raises InputError for bad input, PreflightError if
    reading, packing or partitioning needs more memory than is available.
    """
    if config.task.of_graphs:
        with show.stage("graphs"):
            graphs = find_collection(config)
        if isinstance(graphs, MissingCollection):
            check_available(config, "packing the graphs", graphs.packing_bytes)
        return CollectionInput(graphs)
    found = find_partition(config, workers, like=None if early is None else early.found)
    if not isinstance(found, Missing):
        return PartitionInput(found, None)
    # imports numba and pyarrow, a third of all import time, while Ray may be starting already
    from raygnn.driver.out_of_core import is_out_of_core, make_out_of_core

    if is_out_of_core(config):
        made = make_out_of_core(config, found, cluster, show, only_check=only_check)
        return PartitionInput(made or found, None, just_made=True)
    data = None if early is None else early.data
    with show.stage("graph") if data is None else nullcontext():
        data = _read(config) if data is None else data
        given = PartitionInput(found, data)
        check_available(config, "partitioning the graph", given.partitioning_bytes)
    return given


def read_early(config: Config, workers: int, show: Display) -> PartitionInput | None:
    """Find or read the job's graph to decide on the number of workers; None for graph-level tasks,
    graphs of more than 1 GiB to read, and graphs that are partitioned out of core. Raises the
    errors of `read_input`."""
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
def packed(given: Input) -> Iterator[Input]:
    """Yield the input; many graphs that are not packed yet are packed into a temporary directory.
    Raises InputError if they cannot be read."""
    if not isinstance(given.found, MissingCollection):
        yield given
        return
    from raygnn.graph.collection.pack import make_collection  # which imports torch

    with TemporaryDirectory(prefix="raygnn-") as directory:
        meta = make_collection(replace(given.found, place=Path(directory) / "collection"))
        yield CollectionInput(meta, temporary=True)


@dataclass(frozen=True)
class PartitionInput:
    """Partition of one graph: stored, to be built from ``data``, or of a graph that is unread."""

    found: PartitionMeta | Missing
    data: GraphData | None
    just_made: bool = False  # by this command, out of core
    # task name → what `lists` has read of its training table
    tables: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def place(self) -> AnyPath:
        """Its present or future directory."""
        return self.found.place if isinstance(self.found, Missing) else self.found.directory

    @property
    def meta(self) -> PartitionMeta | None:
        """Its stored manifest; None before it is built."""
        return None if isinstance(self.found, Missing) else self.found

    @property
    def parts(self) -> int:
        return self.found.parts if isinstance(self.found, Missing) else self.found.num_parts

    @property
    def unread(self) -> bool:
        """True for a graph that is too large to be read before it is partitioned."""
        return self.data is None and self.meta is None

    @property
    def _held(self) -> GraphData | PartitionMeta:
        held = self.meta if self.data is None else self.data
        assert held is not None
        return held

    @property
    def nodes(self) -> dict[str, int]:
        """Node type → number of nodes."""
        if isinstance(held := self._held, GraphData):
            return {t: frame.num for t, frame in held.nodes.items()}
        return {t: held.num_nodes(t) for t in held.ntypes}

    @property
    def counts(self) -> dict[EdgeType, tuple[int, int, int]]:
        """Edge type → number of source nodes, destination nodes and edges."""
        nodes = self.nodes
        if isinstance(held := self._held, GraphData):
            edges = {e: frame.num for e, frame in held.edges.items()}
        else:
            edges = {e: held.num_edges(e) for e in held.etypes}
        return {e: (nodes[e[0]], nodes[e[2]], num) for e, num in edges.items()}

    @property
    def structure_bytes(self) -> int:
        """Size of all in-edge lists as `raygnn.graph.staging.node_cache` writes them."""
        return sum(
            (4 if sources < 2**31 else 8) * edges + (8 + 4) * targets
            for sources, targets, edges in self.counts.values()
        )

    @property
    def partitioning_bytes(self) -> int:
        """Estimated memory for partitioning, without the graph itself."""
        return _PARTITIONING * sum(num for _, _, num in self.counts.values())

    def made(self, show: Display) -> PartitionInput:
        """Return the stored partition, which is built now if it is missing, as a stage."""
        if not isinstance(self.found, Missing):
            return self
        assert self.data is not None
        from raygnn.graph.outofcore.divide import make_partition  # which imports torch

        with show.stage("partition") as detail:
            return replace(self, found=make_partition(self.found, self.data, detail), data=None)

    def facts(self, config: Config) -> PartitionFacts:
        """Return its facts for the preflight. Raises InputError if it cannot be read, or lacks the
        target of a task."""
        if isinstance(self.found, Missing):
            assert self.data is not None
            return graph_facts(config, self.data, self.found.parts)
        return partition_facts(config, self.found)

    def check(self, config: Config) -> None:
        """Raise InputError for a key that the graph does not support."""
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
        """Return what files list for the task ``name``: negatives of its edges (``target``), or the
        rows of its training table; see `Job`. Raises DataError if a file is missing, damaged or
        does not fit the graph."""
        from raygnn.graph.negative_lists import lists_of, rows_of  # which import pyarrow

        if target is None:
            ntype = getattr(config.task, "ntype", None)
            if config.table is not None and name not in self.tables:
                self.tables[name] = rows_of(config, name, *self.ids(ntype))
            return self.tables.get(name, {})
        return lists_of(config, target, self.counts[target.etype][:2], self._held)

    def ids(self, ntype: str | None) -> tuple[Any, int]:
        """Return the user's ids of a node type and their number. Raises DataError if the
        partition's file of ids is damaged."""
        assert ntype is not None
        if isinstance(held := self._held, GraphData):
            return held.ids.get(ntype), self.nodes[ntype]
        from raygnn.graph.partition.read import read_ids  # which imports torch

        return read_ids(held, ntype), self.nodes[ntype]

    def _check_numbers(self, config: Config, where: str) -> None:
        """Raise ConfigError if a regression task has categories as its target."""
        task = config.task
        if task.classifies or task.several_labels or task.of_links or config.table is not None:
            return
        kinds = {etype_str(e) if task.of_edges else t for e in self.counts for t in (e[0], e[2])}
        chosen = getattr(task, "etype" if task.of_edges else "ntype", None)
        for kind in sorted(kinds):
            named = chosen in (None, kind) or (task.of_edges and kind.split(":")[1] == chosen)
            if named and f"{kind}/{task.target}" in self._held.names:
                raise ConfigError(
                    f"{task.target!r} of {kind} are classes, numbered in the order of their names, "
                    f"and {task.kind} predicts numbers",
                    where=f"{where}.kind",
                    remedy=f"set label_kind: number in the YAML of the tables, or {where}.kind to "
                    f"{task.unit}_classification",
                )


@dataclass(frozen=True)
class CollectionInput:
    """Many graphs in one directory: stored, or yet to be packed. Methods as of `PartitionInput`."""

    found: CollectionMeta | MissingCollection
    temporary: bool = False  # packed for a check only, in a directory that is removed

    parts: ClassVar[int] = 1
    structure_bytes: ClassVar[int] = 0

    @property
    def place(self) -> Path:
        found = self.found
        return found.place if isinstance(found, MissingCollection) else found.directory

    @property
    def meta(self) -> CollectionMeta | None:
        found = self.found
        return None if self.temporary or isinstance(found, MissingCollection) else found

    def made(self, show: Display) -> CollectionInput:
        if not isinstance(self.found, MissingCollection):
            return self
        from raygnn.graph.collection.pack import make_collection  # which imports torch

        with show.stage("collection") as detail:
            return CollectionInput(make_collection(self.found, detail))

    def facts(self, config: Config) -> PartitionFacts:
        """Return the facts; none of graphs that are not packed yet."""
        if isinstance(meta := self.found, MissingCollection):
            return PartitionFacts()
        meta.check_target(config.task, known=config.trains)
        splits = _splits(meta, config) if config.trains else {}
        return collection_facts(meta, splits, stored=not self.temporary)

    def check(self, config: Config) -> None:
        """Do nothing."""

    def lists(self, config: Config, name: str, target: EdgeTarget | None) -> dict[str, Any]:
        return {}

    def ids(self, ntype: str | None) -> tuple[Any, int] | None:
        """Return None for the ids, which are the graphs' numbers, and their number; None in place
        of both before the graphs are packed."""
        return None if self.meta is None else (None, self.meta.num_graphs)


def find_input(config: Config) -> Input:
    """Find a job's stored input; its ``meta`` is None if it does not exist."""
    if config.task.of_graphs:
        return CollectionInput(find_collection(config))
    return PartitionInput(find_partition(config, 1), None)


def with_rows(facts: PartitionFacts, lists: Mapping[str, Any]) -> PartitionFacts:
    """Return the facts with the splits of the only task's training table, if it has one."""
    rows = lists.get("", {}).get(TABLE)
    return facts if rows is None else replace(facts, splits=rows.counts)


def _splits(meta: CollectionMeta, config: Config) -> dict[str, int]:
    splits = meta.given_splits()
    if splits is None:
        column, classes = meta.target(config.task.target), None
        if column.high is not None and column.shape in ((), (1,)):
            classes = np.load(meta.directory / column.file).reshape(-1)
        graph = config.graph if isinstance(config.graph, GraphSplit) else GraphSplit()
        splits = split_graphs(meta.num_graphs, classes, graph)
    return {name: len(numbers) for name, numbers in splits.items()}
