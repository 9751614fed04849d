"""What is decided before anything starts: partition, nodes, workers, topology."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raygnn.config.schema import Config
from raygnn.graph.data import GraphData
from raygnn.graph.partition import Missing, find_partition
from raygnn.graph.sources import load_graph
from raygnn.preflight.partition import graph_facts, partition_facts, task_ntype
from raygnn.preflight.probe import probe_cluster, probe_local, probe_resources
from raygnn.preflight.report import Report, preflight, resolve_workers
from raygnn.runs.display import Display
from raygnn.training.cluster import RayCluster

if TYPE_CHECKING:
    from raygnn.graph.layout import PartitionMeta

# share of a node's free memory that the whole structure may take, over all workers on it
_REPLICATED_SHARE = 0.25


@dataclass(frozen=True)
class Input:
    """The partition that a job trains on: there, or to be made from a graph in memory."""

    found: PartitionMeta | Missing
    data: GraphData | None

    @property
    def place(self) -> Path:
        return self.found.place if isinstance(self.found, Missing) else self.found.directory

    @property
    def structure_bytes(self) -> int:
        """Memory of all in-edge lists, as a shard holds them: see `raygnn.graph.shard.Rows`."""
        if self.data is not None:
            counts = [(f.num, self.data.nodes[e[2]].num) for e, f in self.data.edges.items()]
        else:
            assert not isinstance(self.found, Missing)
            counts = [
                (self.found.num_edges(e), self.found.num_nodes(e[2])) for e in self.found.etypes
            ]
        return sum(8 * (edges + 2 * nodes) for edges, nodes in counts)

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
        PreflightError: no connection to the cluster.
    """
    if isinstance(given.found, Missing):
        assert given.data is not None
        meta, facts = None, graph_facts(config, given.data, given.found.parts)
    else:
        meta, facts = given.found, partition_facts(config, given.found)
    if cluster.local:
        nodes, resources = probe_local(config, meta)
    else:
        cluster.wait()
        nodes, resources = probe_cluster(config, meta)
    report = preflight(config, facts, nodes, resources)
    return Plan(
        input=given,
        report=report,
        ntype=task_ntype(config, facts.columns),
        workers=workers,
        replicated=_replicated(config, given.structure_bytes, report, workers),
        training_nodes=facts.splits.get("train", 0),
    )


def _replicated(config: Config, size: int, report: Report, workers: int) -> bool:
    if config.sampling.topology != "auto":
        return config.sampling.topology == "replicated"
    free = [node.memory_available for node in report.nodes if node.memory_available is not None]
    on_a_node = -(-workers // max(1, len(report.nodes)))
    return not free or size * on_a_node <= _REPLICATED_SHARE * min(free)
