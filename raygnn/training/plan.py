"""What is decided before anything starts: partition, nodes, workers, topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from raygnn.graph.data import EdgeType, GraphData, etype_str
from raygnn.graph.partition import Missing, find_partition
from raygnn.graph.sources import load_graph
from raygnn.graph.validate import check_weights
from raygnn.preflight.partition import graph_facts, partition_facts, task_ntype
from raygnn.preflight.probe import probe_cluster, probe_local, probe_resources
from raygnn.preflight.report import Report, preflight, resolve_workers
from raygnn.runs.display import Display
from raygnn.sampling.fanout import resolve_fanouts
from raygnn.training.cluster import RayCluster

if TYPE_CHECKING:
    from raygnn.graph.layout import AnyPath, PartitionMeta

# share of a node's free memory that the whole structure may take; its workers map one copy
_REPLICATED_SHARE = 0.25


@dataclass(frozen=True)
class Input:
    """The partition that a job trains on: there, or to be made from a graph in memory."""

    found: PartitionMeta | Missing
    data: GraphData | None

    @property
    def place(self) -> AnyPath:
        return self.found.place if isinstance(self.found, Missing) else self.found.directory

    @property
    def counts(self) -> dict[EdgeType, tuple[int, int, int]]:
        """Edge type → how many source nodes, destination nodes and edges there are."""
        if self.data is not None:
            nodes = {t: frame.num for t, frame in self.data.nodes.items()}
            edges = {e: frame.num for e, frame in self.data.edges.items()}
        else:
            nodes = {t: self.meta.num_nodes(t) for t in self.meta.ntypes}
            edges = {e: self.meta.num_edges(e) for e in self.meta.etypes}
        return {e: (nodes[e[0]], nodes[e[2]], num) for e, num in edges.items()}

    @property
    def structure_bytes(self) -> int:
        """Size of all in-edge lists as a node maps them: see `raygnn.graph.staging`."""
        return sum(
            (4 if sources < 2**31 else 8) * edges + (8 + 4) * targets
            for sources, targets, edges in self.counts.values()
        )

    def edge_arrays(self) -> set[str] | None:
        """Names of arrays of edges; None where only reading the parts would tell."""
        if self.data is not None:
            return {name for frame in self.data.edges.values() for name in frame.data}
        manifest = self.meta.manifest
        if manifest is None:
            return None
        kinds = {etype_str(etype) for etype in self.meta.etypes}
        named = (key.rpartition("/") for key in manifest["features"])
        return {name for kind, _, name in named if kind in kinds}

    @property
    def meta(self) -> PartitionMeta:
        assert not isinstance(self.found, Missing)
        return self.found

    def made(self, show: Display) -> Input:
        """The same with the partition there: made now, as a stage, if it was missing."""
        if not isinstance(self.found, Missing):
            return self
        assert self.data is not None
        with show.stage("partition") as detail:
            return Input(self.found.make(self.data, detail), None)


@dataclass(frozen=True)
class Plan:
    """A job that is ready to be judged and started.

    Attributes:
        report: of the preflight.
        ntype: the node type to classify; None when the report says why there is none.
        replicated: whether every rank holds the whole structure.
        training_nodes: how many there are.
    """

    input: Input
    report: Report
    ntype: str | None
    workers: int
    replicated: bool
    training_nodes: int

    def steps_per_epoch(self, config: Config) -> int:
        """Optimizer steps, as every rank makes them."""
        batches = -(-self.training_nodes // (config.sampling.batch_size * self.workers))
        return -(-batches // config.train.accumulate)


def count_workers(config: Config, cluster: RayCluster) -> int:
    """How many workers there will be; asks a running cluster when that decides."""
    if config.cluster.workers != "auto":
        return config.cluster.workers
    if not cluster.local:
        cluster.wait()
    return resolve_workers(config, probe_resources(config, cluster.local))


def read_input(config: Config, workers: int, show: Display) -> Input:
    """Find the partition, or read and validate the graph that one is to be made of.

    Raises:
        InputError: bad input.
    """
    found = find_partition(config, workers)
    if not isinstance(found, Missing):
        return Input(found, None)
    with show.stage("graph"):
        return Input(found, load_graph(found.graph))


def make_plan(config: Config, cluster: RayCluster, workers: int, given: Input) -> Plan:
    """Look at the nodes and check everything; nothing is raised for what the checks find.

    Raises:
        ConfigError: what is to be sampled is not in the graph.
        PreflightError: no connection to the cluster.
    """
    _check_sampling(config, given)
    if isinstance(given.found, Missing):
        assert given.data is not None
        meta, facts = None, graph_facts(config, given.data, given.found.parts)
    else:
        meta, facts = given.found, partition_facts(config, given.found)
    if cluster.local:
        found = probe_local(config, meta)
    else:
        cluster.wait()
        found = probe_cluster(config, meta)
    report = preflight(config, facts, found)
    return Plan(
        input=given,
        report=report,
        ntype=task_ntype(config, facts.columns),
        workers=workers,
        replicated=_replicated(config, given.structure_bytes, report),
        training_nodes=facts.splits.get("train", 0),
    )


def _replicated(config: Config, size: int, report: Report) -> bool:
    if config.sampling.topology != "auto":
        return config.sampling.topology == "replicated"
    free = [node.memory_available for node in report.nodes if node.memory_available is not None]
    return not free or size <= _REPLICATED_SHARE * min(free)


def _check_sampling(config: Config, given: Input) -> None:
    """Refuse fanouts and weights for edges that the graph does not have."""
    resolve_fanouts(config.sampling.fanout, list(given.counts))
    weight, arrays = config.sampling.edge_weight, given.edge_arrays()
    if weight is not None and arrays is not None and weight not in arrays:
        known = ", ".join(sorted(arrays)) or "none"
        raise ConfigError(
            f"no edge type has an array {weight!r}; there are: {known}",
            where="sampling.edge_weight",
            remedy="name one of them, or remove the key",
        )
    if weight is not None and given.data is not None:
        for etype, frame in given.data.edges.items():
            if weight in frame.data:
                check_weights(weight, etype, frame.data[weight])
