"""Facts of made-up nodes and jobs, for the checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from raygnn.config.comm_plan import CommPlan, Interface, NodeNetwork, make_comm_plan
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.preflight.connections import Link
from raygnn.preflight.facts import ArrayType, NodeFacts, NodeResources, PartitionFacts, Resources
from raygnn.preflight.findings import Finding, JobFacts, run_checks
from raygnn.preflight.report import CHECKS, resolve_workers

GIB = 2**30
VERSIONS = {
    "raygnn": "0.1.0",
    "torch": "2.13.0+cpu",
    "dgl": "2.1.0",
    "ray": "2.60.0",
    "lightning": "2.6.6",
    "torchmetrics": "1.9.0",
}
FILES = {"cora.json": 500, "raygnn.json": 900, "part0/graph.dgl": 10_000, "part1/graph.dgl": 9_000}


def plan_for(config: Config, nodes: Iterable[NodeFacts]) -> CommPlan:
    return make_comm_plan(config, {node.id: (node.network, node.environment) for node in nodes})


def make_network(number: int = 1, **changes: object) -> NodeNetwork:
    address, own = f"10.0.0.{number}", f"eth{number}"
    interfaces = (Interface("lo", ("127.0.0.1",), loopback=True), Interface(own, (address,)))
    return replace(NodeNetwork(address, own, interfaces, (address,)), **changes)


def make_node(name: str = "a", **changes: object) -> NodeFacts:
    number = ord(name[0]) - ord("a") + 1
    node = NodeFacts(
        node=name,
        id=name * 3,
        network=make_network(number),
        code="c" * 64,
        cpu="A processor",
        cpu_flags=("avx2", "avx512_bf16"),
        python="3.11.7",
        versions=VERSIONS,
        cpus=2,
        memory=8 * GIB,
        memory_available=6 * GIB,
        shm_free=4 * GIB,
        disk_free=100 * GIB,
        partition_files=FILES,
        partition_fingerprint="f" * 64,
    )
    return replace(node, **changes)


def make_resources(*nodes: tuple[str, float, float], free: float | None = None) -> Resources:
    kept = tuple(NodeResources(*node) for node in nodes or (("a", 2, 0),))
    cpus = sum(node.cpus for node in kept)
    return Resources(kept, cpus if free is None else free, sum(node.gpus for node in kept))


def make_columns(**changes: str | None) -> dict[str, dict[str, tuple[ArrayType, ...]]]:
    kinds: dict[str, str | None] = {"feat": "float32 1433", "label": "int64", **changes}
    columns = {}
    for name, kind in kinds.items():
        if kind is not None:
            dtype, *shape = kind.split()
            columns[name] = (ArrayType(dtype, tuple(map(int, shape))),) * 2
    return {"_N": columns}


def make_partition(**changes: object) -> PartitionFacts:
    facts = PartitionFacts(
        directory="/data/parts",
        num_parts=2,
        bytes=20_400,
        files=FILES,
        fingerprint="f" * 64,
        nodes={"_N": 2708},
        columns=make_columns(),
        splits={"train": 1200, "val": 500, "test": 1000},
    )
    return replace(facts, **changes)


def make_config(**overrides: object) -> Config:
    graph = {"format": "planted", "nodes": 1000}
    job = {"name": "a", "graph": graph, "model": {"kind": "gcn"}, "cluster": {"workers": 2}}
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(job, dotted)


def make_job(
    config: Config | None = None,
    nodes: tuple[NodeFacts, ...] | None = None,
    partition: PartitionFacts | None = None,
    resources: Resources | None = None,
    links: tuple[Link, ...] = (),
) -> JobFacts:
    config, nodes = config or make_config(), nodes or (make_node(),)
    partition = partition or make_partition()
    resources = resources or make_resources(*((node.node, 2, 0) for node in nodes))
    return JobFacts(
        config=config,
        partition=partition,
        resources=resources,
        nodes=tuple(node for node in nodes if not node.problem),
        silent=tuple(node for node in nodes if node.problem),
        workers=resolve_workers(config, resources),
        links=links,
    )


def two(**changes: object) -> tuple[NodeFacts, ...]:
    return make_node("a"), make_node("b", **changes)


def versions(**changes: str | None) -> dict[str, str | None]:
    return {**VERSIONS, **changes}


def check(job: JobFacts) -> tuple[Finding, ...]:
    """Run all checks on a job, and return their findings."""
    return run_checks(job, CHECKS)
