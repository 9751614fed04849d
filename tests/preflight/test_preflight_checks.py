"""Each check has a case in which it speaks and one in which it is silent."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.comm_plan import Interface
from raygnn.config.execution import ALLOWABLE, BINDING
from raygnn.config.load import load_config
from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.errors import PreflightError
from raygnn.preflight.cluster_checks import SUPPORTED, supported
from raygnn.preflight.connections import Link
from raygnn.preflight.facts import ArrayType, Gpu, NodeFacts, PartitionFacts
from raygnn.preflight.findings import Finding, JobFacts, error
from raygnn.preflight.probe import Survey
from raygnn.preflight.report import (
    CHECKS,
    Report,
    described,
    preflight,
    refuse,
    resolve_workers,
)
from tests.support.facts import (
    FILES,
    GIB,
    check,
    make_columns,
    make_config,
    make_job,
    make_network,
    make_node,
    make_partition,
    make_resources,
    plan_for,
    two,
    versions,
)


def unvalidated(config: Config, section: str, **changes: object) -> Config:
    """Return a config that ``load_config`` would refuse, as another front end might build it."""
    if section:
        changed = getattr(config, section).model_copy(update=changes)
        return config.model_copy(update={section: changed})
    return config.model_copy(update=changes)


def typed(*ntypes: str) -> PartitionFacts:
    return make_partition(columns={ntype: make_columns()["_N"] for ntype in ntypes})


GPU_JOB = {"cluster__gpus_per_worker": 1}
GPUS = (Gpu("H100", "GPU-1", capability=(9, 0)), Gpu("H100", "GPU-2", capability=(9, 0)))
WITH_GPUS = make_resources(("a", 2, 2))
DATE = ArrayType("int64", ())
DATED = {
    etype: {"weight": ArrayType("float32", ()), "at": DATE, "train_mask": ArrayType("bool", ())}
    for etype in (("_N", "cites", "_N"), ("_N", "by", "_N"))
}
OLD = Gpu("V100", "GPU-1", capability=(7, 0))
NEW = Gpu("H100", "GPU-2", capability=(9, 0))
CUDA = versions(torch="2.13.0", dgl="2.1.0+cu121")


def on_gpus(*nodes: NodeFacts, **job: object) -> JobFacts:
    config = make_config(cluster__gpus_per_worker=1, **job)
    given = make_resources(*((node.node, 2, len(node.gpus)) for node in nodes))
    return make_job(config, tuple(replace(n, versions=CUDA) for n in nodes), resources=given)


def with_interface(interface: Interface) -> JobFacts:
    config = make_config(comm__env={"GLOO_SOCKET_IFNAME": interface.name})
    network = make_network()
    network = replace(network, interfaces=(*network.interfaces, interface))
    return make_job(config, (make_node(network=network),))


def mixed(*dtypes: str) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(dtype, (8,)) for dtype in dtypes)


def four() -> dict[str, dict[str, tuple[ArrayType, ...]]]:
    return {"_N": {name: columns * 2 for name, columns in make_columns()["_N"].items()}}


class Case(NamedTuple):
    """A job, the check that has a finding on it, and text of the finding."""

    check: str
    severity: str
    words: list[str]
    job: JobFacts


def one(**changes: object) -> tuple[NodeFacts]:
    return (make_node(**changes),)


def speaks(text: str, *, job: JobFacts | None = None, **given: Any) -> Case:
    """Return a case from ``severity check: words | words``.

    Args:
        given: arguments of `make_job`, and else changes of the config.
    """
    (severity, check), words = text.partition(": ")[0].split(), text.partition(": ")[2].split(" | ")
    facts = {n: given.pop(n) for n in ("nodes", "partition", "resources", "links") if n in given}
    if job is None:
        config = given.pop("config", None) or make_config(**given)
        job = make_job(config, **facts)
    return Case(check, severity, words, job)


SPEAKS = {
    "a silent node": speaks(
        "error nodes_answer: no answer within 20 s | (on b)",
        nodes=(make_node(), NodeFacts("b", problem="no answer within 20 s")),
    ),
    "nobody answers": speaks(
        "error nodes_answer: none of 3 nodes | no answer within 5 s | (on a, b, c)",
        nodes=tuple(NodeFacts(n, problem="no answer within 5 s") for n in "abc"),
    ),
    "a place for copies that is none": speaks(
        "error cache_usable: staging.path is null | not a directory | (on a)",
        nodes=one(cache="/etc/passwd is not a directory"),
    ),
    "an old torch": speaks(
        "error versions_supported: torch is 2.3.1 | on a",
        nodes=one(versions=versions(torch="2.3.1")),
    ),
    "no lightning": speaks(
        "error versions_supported: lightning is not installed",
        nodes=one(versions=versions(lightning=None)),
    ),
    "a new python": speaks(
        "error versions_supported: python is 3.14.0", nodes=one(python="3.14.0")
    ),
    "nodes that differ": speaks(
        "error versions_uniform: differ in torch | 2.13.0+cpu on a | 2.12.0 on b",
        nodes=two(versions=versions(torch="2.12.0")),
    ),
    "nodes that may differ": speaks(
        "warn versions_uniform: differ in python: 3.11 on a, 3.12 on b",
        nodes=two(python="3.12.1"),
        cluster__uniform="warn",
    ),
    "a storage of one node": speaks(
        "error storage_visible: storage | does not exist there | on b", nodes=two(storage="missing")
    ),
    "a storage of the same name": speaks(
        "error storage_visible: another directory", nodes=two(storage="other")
    ),
    "a read-only storage": speaks(
        "error storage_visible: cannot be created or written", nodes=one(storage="readonly")
    ),
    "a missing part": speaks(
        "error partition_visible: 3 of | such as part0/graph.dgl | on b",
        nodes=two(partition_files={"cora.json": 500}),
    ),
    "a short part": speaks(
        "error partition_visible: part1/graph.dgl | 7 bytes, expected 9000",
        nodes=two(partition_files=FILES | {"part1/graph.dgl": 7}),
    ),
    "another partition": speaks(
        "error partition_visible: another partition", nodes=two(partition_fingerprint="0" * 64)
    ),
    "dtypes that differ": speaks(
        "error parts_agree: 'feat' | float32[8] in part 0, float64[8] in part 1",
        partition=make_partition(
            columns={"_N": {**make_columns()["_N"], "feat": mixed("float32", "float64")}}
        ),
    ),
    "an array of one part": speaks(
        "error parts_agree: 'w' | some lack it",
        partition=make_partition(
            columns={"_N": {**make_columns()["_N"], "w": (ArrayType("float32", (8,)),)}}
        ),
    ),
    "no such features": speaks(
        "error arrays_usable: 'emb' (model.features) | there are: feat, label",
        model__features="emb",
    ),
    "no input at all": speaks(
        "error arrays_usable: has no array as input | there are: feat, label",
        model__features=None,
    ),
    "one of several features": speaks(
        "error inputs_exist: 'emb' (model.features) | there are: feat, label",
        model__features=["feat", "emb"],
    ),
    "learned rows of no node type": speaks(
        "error embeddings_usable: 'user' (model.embedding.ntypes) | there are: _N",
        model__embedding={"dim": 4, "ntypes": ["user"]},
    ),
    "nothing to learn": speaks(
        "error embeddings_usable: every node type has features", model__embedding={"dim": 4}
    ),
    "no features, and rows for others": speaks(
        "error arrays_usable: 'emb' (model.features)",
        model__features="emb",
        model__embedding={"dim": 4, "ntypes": ["user"]},
    ),
    "categories that are no whole numbers": speaks(
        "error arrays_usable: 'brand' (model.categories) is float32",
        partition=make_partition(columns=make_columns(brand="float32")),
        model__categories={"brand": 4},
    ),
    "categories in rows": speaks(
        "error arrays_usable: 'brand' | rows of [3]",
        partition=make_partition(columns=make_columns(brand="int64 3")),
        model__categories={"brand": 4},
    ),
    "features of text": speaks(
        "error arrays_usable: 'feat' | is object",
        partition=make_partition(columns=make_columns(feat="object 3")),
    ),
    "features without width": speaks(
        "error arrays_usable: rows without values",
        partition=make_partition(columns=make_columns(feat="float32 0")),
    ),
    "no such target": speaks("error arrays_usable: 'y' (task.target)", task__target="y"),
    "a target of numbers": speaks(
        "error arrays_usable: 'label' (task.target) is float32[]",
        partition=make_partition(columns=make_columns(label="float32")),
    ),
    "a target of rows": speaks(
        "error arrays_usable: 'label' (task.target) is int64[3]",
        partition=make_partition(columns=make_columns(label="int64 3")),
    ),
    "a target of several types": speaks(
        "error arrays_usable: several node types have an array 'label': item, user",
        partition=typed("item", "user"),
    ),
    "no such node type": speaks(
        "error arrays_usable: no node type 'shop' | item, user",
        partition=typed("item", "user"),
        task__ntype="shop",
    ),
    "no training nodes": speaks(
        "error nodes_to_train_on: no training nodes", partition=make_partition(splits={"train": 0})
    ),
    "fewer training nodes than workers": speaks(
        "warn nodes_to_train_on: 2 workers share 1 training nodes",
        partition=make_partition(splits={"train": 1}),
    ),
    "no validation nodes": speaks(
        "warn nodes_to_train_on: no validation nodes; the best weights",
        partition=make_partition(splits={"train": 9, "val": 0}),
    ),
    "no test nodes": speaks(
        "warn nodes_to_train_on: no test nodes",
        partition=make_partition(splits={"train": 9, "test": 0}),
    ),
    "a model that fails": speaks(
        "error model_runs: m:Net fails on a batch",
        job=replace(make_job(), dry_run=error("m:Net fails on a batch", "mend it")),
    ),
    "weights and times of edges": speaks(
        "info edge_arrays_read: _N:cites:_N, _N:by:_N have at, weight | which nothing reads | "
        "sampling.time or task.split",
        partition=make_partition(edges=DATED),
    ),
    "features of edges beside weights": speaks(
        "info edge_arrays_read: _N:cites:_N, _N:by:_N have at, which",
        partition=make_partition(edges=DATED),
        sampling__edge_weight="weight",
    ),
    "edge features beside others": speaks(
        "info edge_arrays_read: _N:cites:_N, _N:by:_N have at, which",
        partition=make_partition(edges=DATED),
        model={"kind": "gin", "edge_features": "weight"},
        graph={"format": "graphs", "path": "."},
        task__kind="graph_classification",
    ),
    "no such edge features": speaks(
        "error inputs_exist: 'price' (model.edge_features) | there are: at, train_mask, weight",
        partition=make_partition(edges=DATED),
        model={"kind": "gin", "edge_features": ["weight", "price"], "edge_categories": {"at": 3}},
        graph={"format": "graphs", "path": "."},
        task__kind="graph_classification",
    ),
    "no such edge weight": speaks(
        "error inputs_exist: 'price' (sampling.edge_weight) | there are: at, train_mask, weight",
        partition=make_partition(edges=DATED),
        sampling__edge_weight="price",
    ),
    "edge categories that are no whole numbers": speaks(
        "error arrays_usable: 'weight' (model.edge_categories) is float32",
        partition=make_partition(edges=DATED),
        model={"kind": "gin", "edge_categories": {"weight": 3}, "edge_features": "at"},
        graph={"format": "graphs", "path": "."},
        task__kind="graph_classification",
    ),
    "tasks that divide the same edges": speaks(
        "error splits_agree: tasks a and b | split the edges of _N:_E:_N differently",
        partition=make_partition(edges={("_N", "_E", "_N"): {}}),
        tasks__a__kind="link_prediction",
        tasks__b__kind="link_prediction",
        tasks__b__split__seed=1,
    ),
    "no edge has a time": speaks(
        "error times_usable: no edge type has an array 'then' (sampling.time.edges) | at, train",
        partition=make_partition(edges=DATED, columns=make_columns(when="int64")),
        model__kind="sage",
        sampling__time={"edges": "then", "seeds": "when"},
    ),
    "no node has a time": speaks(
        "error times_usable: '_N' has no array 'then' (sampling.time.seeds) | feat, label, when",
        partition=make_partition(edges=DATED, columns=make_columns(when="int64")),
        model__kind="sage",
        sampling__time={"edges": "at", "seeds": "then"},
    ),
    "times of nodes that are no whole numbers": speaks(
        "error times_usable: 'feat' of node type '_N' (sampling.time.seeds) | one whole number",
        partition=make_partition(edges=DATED),
        model__kind="sage",
        sampling__time={"edges": "at", "seeds": "feat"},
    ),
    "no time to split nodes by": speaks(
        "error times_usable: '_N' has no array 'then' (task.split.time)",
        partition=make_partition(edges=DATED),
        task__split={"by": "time", "time": "then"},
    ),
    "edges to predict without times": speaks(
        "error times_usable: task a: _N:by:_N has no array 'at' (sampling.time.edges)",
        partition=make_partition(edges={**DATED, ("_N", "by", "_N"): {}}),
        model__kind="sage",
        sampling__time__edges="at",
        tasks__a={"kind": "link_prediction", "etype": "by", "exclude": "self"},
    ),
    "reversed edges without times": speaks(
        "error times_usable: '_N:by:_N' are the reverse edges of '_N:cites:_N' | 'at'",
        partition=make_partition(
            edges={**DATED, ("_N", "by", "_N"): {}},
            columns=make_columns(when="int64"),
            reverses={("_N", "cites", "_N"): ("_N", "by", "_N")},
        ),
        model__kind="sage",
        sampling__time={"edges": "at", "seeds": "when"},
    ),
    "too many workers": speaks(
        "error resources_fit: 3 × 1 CPUs do not fit: Ray has 2 CPUs | enough for 2",
        cluster__workers=3,
    ),
    "more workers than a cluster that grows has room for yet": speaks(
        "info resources_fit: 3 × 1 CPUs do not fit yet: Ray has 2 CPUs | waits up to 15m",
        resources=replace(make_resources(), growing=900.0),
        cluster__workers=3,
        cluster__wait="15m",
    ),
    "fewer workers than the most": speaks(
        "info resources_fit: starts with 2 workers of up to 4 | 2 CPUs", cluster__workers=[1, 4]
    ),
    "CPUs that others use, of the fewest": speaks(
        "warn resources_fit: 1 × 1 CPUs have to wait | leave 0 CPUs",
        resources=make_resources(free=0),
        cluster__workers=[1, 2],
    ),
    "a worker larger than any node": speaks(
        "error resources_fit: 1 × 3 CPUs do not fit | 4 CPUs | 2 nodes | enough for 0 workers",
        resources=make_resources(("a", 2, 0), ("b", 2, 0)),
        cluster__workers=1,
        cluster__cpus_per_worker=3,
    ),
    "too few GPUs": speaks(
        "error resources_fit: 2 × 1 CPUs and 1 GPUs do not fit",
        resources=make_resources(("a", 2, 1)),
        **GPU_JOB,
    ),
    "CPUs that others use": speaks(
        "warn resources_fit: have to wait | leave 1 CPUs", resources=make_resources(free=1)
    ),
    "a partition larger than memory": speaks(
        "warn memory_fits: take 9.0 GiB, but only 6.0 GiB of memory are free | read from the disk",
        partition=make_partition(bytes=9 * GIB),
    ),
    "a partition larger than free memory": speaks(
        "warn memory_fits: only 6.0 GiB of memory are free", partition=make_partition(bytes=5 * GIB)
    ),
    "a cache that several workers have in common": speaks(
        "warn memory_fits: the cache (2.0 GiB) | take 6.0 GiB, but only 6.0 GiB of memory are free",
        nodes=(make_node("a"), make_node("b", memory=64 * GIB, memory_available=64 * GIB)),
        partition=make_partition(bytes=8 * GIB),
        resources=make_resources(("a", 2, 0), ("b", 2, 0)),
        cluster__workers=4,
        sampling__cache=0.5,
    ),
    "weights larger than memory": speaks(
        "error memory_fits: optimizer state (41.7 TiB) | 8.0 GiB of memory", model__hidden=10**9
    ),
    "weights and their optimizer's state larger than what is free": speaks(
        "error memory_fits: optimizer state (6.4 GiB) | 6.0 GiB of the node's",
        model__hidden=150_000,
    ),
    "weights larger than what is free while the graph is in memory": speaks(
        "warn memory_fits: take 7.4 GiB, but only 7.0 GiB of memory are free",
        partition=make_partition(directory="", bytes=GIB),
        model__hidden=150_000,
    ),
    "learned rows larger than memory": speaks(
        "error memory_fits: embedding tables (30.3 GiB) | 8.0 GiB of memory",
        partition=make_partition(columns=make_columns(feat=None)),
        model__embedding__dim=10**6,
    ),
    "weights larger than a GPU": speaks(
        "error memory_fits: optimizer state take 21.4 GiB, but a GPU has 1.0 GiB",
        nodes=one(gpus=tuple(replace(gpu, memory=GIB) for gpu in GPUS)),
        resources=WITH_GPUS,
        **GPU_JOB,
        model__hidden=10**6,
    ),
    "little shared memory": speaks(
        "warn shared_memory: /dev/shm has 100 MiB free", nodes=one(shm_free=100 * 2**20)
    ),
    "little disk": speaks("warn disk_space: 512 MiB free", nodes=one(disk_free=GIB // 2)),
    "no disk": speaks("error disk_space: 1 KiB free", nodes=one(disk_free=1024)),
    "little disk for what goes to a store": speaks(
        "warn disk_space: staging.path has 4.0 GiB free | should have 106.8 GiB",
        nodes=one(cache_free=4 * GIB),
        storage="s3://bucket/runs",
        model__hidden=1_000_000,
    ),
    "fp16 on a cluster without GPUs": speaks(
        "error resources_fit: 1 GPUs do not fit: Ray has",
        nodes=one(versions=versions(torch="2.13.0")),
        precision="fp16-mixed",
        comm__backend="nccl",
        **GPU_JOB,
    ),
    "GPUs without CUDA": speaks(
        "error devices_suit: torch is a build without CUDA | on a", resources=WITH_GPUS, **GPU_JOB
    ),
    "another checkout": speaks(
        "error code_uniform: cccccccccccc on a | dddddddddddd on b", nodes=two(code="d" * 64)
    ),
    "another processor": speaks(
        "warn hardware_uniform: the processor | A processor on a | An old one on b",
        nodes=two(cpu="An old one"),
        cluster__uniform="warn",
    ),
    "other instructions": speaks(
        "error hardware_uniform: instructions | avx2 avx512_bf16 on a | avx2 on b",
        nodes=two(cpu_flags=("avx2",)),
    ),
    "other GPUs": speaks(
        "error hardware_uniform: V100 on a | H100 on b",
        job=on_gpus(make_node(gpus=(OLD,)), make_node("b", gpus=(NEW,))),
    ),
    "a variable on one node": speaks(
        "error environment_uniform: NCCL_ALGO | not set on a | Tree on b",
        nodes=two(environment={"NCCL_ALGO": "Tree"}),
    ),
    "no shared memory": speaks(
        "error shared_memory: /dev/shm has 1 MiB free | (on b)", nodes=two(shm_free=2**20)
    ),
    "an interface that is not there": speaks(
        "error interfaces_there: GLOO_SOCKET_IFNAME is 'eth1' | eth2 | (on b)",
        nodes=two(),
        comm__env={"GLOO_SOCKET_IFNAME": "eth1"},
    ),
    "an interface that only the other node has": speaks(
        "error interfaces_there: no interface 'eth1' | (on b)",
        nodes=two(),
        comm__env={"GLOO_SOCKET_IFNAME": "eth1,eth2"},
    ),
    "an interface that the shell names": speaks(
        "error interfaces_there: GLOO_SOCKET_IFNAME is 'eth7' | (on a)",
        nodes=one(environment={"GLOO_SOCKET_IFNAME": "eth7"}),
    ),
    "an empty name of an interface": speaks(
        "error interfaces_there: no interface ''", comm__env={"GLOO_SOCKET_IFNAME": ""}
    ),
    "loopback for two hosts": speaks(
        "error interfaces_there: lo connects the node only to itself | (on b)",
        nodes=two(),
        comm__env={"GLOO_SOCKET_IFNAME": "lo"},
    ),
    "an interface that is down": speaks(
        "error interfaces_there: eth0 is down",
        job=with_interface(Interface("eth0", ("10.1.0.1",), up=False)),
    ),
    "an interface without an address": speaks(
        "error interfaces_there: eth0 has no IPv4 address", job=with_interface(Interface("eth0"))
    ),
    "a level of debugging that there is none of": speaks(
        "error debug_level_safe: LOTS | torch accepts OFF | (on b)",
        nodes=two(environment={"TORCH_DISTRIBUTED_DEBUG": "lots"}),
    ),
    "a level of debugging that kills": speaks(
        "error debug_level_safe: DETAIL | segmentation fault | (on b)",
        nodes=two(environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    ),
    "a full cache": speaks(
        "warn cache_space: takes up to 10 KiB | has 1 KiB free | (on b)",
        nodes=two(cache_free=2**10),
    ),
    "no way between nodes": speaks(
        "error network_reach: refused", nodes=two(), links=(Link("a", "b", "refused"),)
    ),
    "bf16 on old GPUs": speaks(
        "warn bf16_is_there: V100 | bf16",
        job=on_gpus(make_node(gpus=(OLD,)), precision="bf16-mixed"),
    ),
    "one GPU for two": speaks(
        "error gpus_are_there: GPU-2 | two ranks | (on a, b)",
        job=on_gpus(make_node(gpus=(NEW,)), make_node("b", gpus=(NEW,))),
    ),
    "a GPU in use": speaks(
        "warn gpus_are_free: 77", job=on_gpus(make_node(gpus=(replace(NEW, processes=(77,)), OLD)))
    ),
}

# on both nodes, or for each of two names
TWICE = ("an interface that only the other node has", "loopback for two hosts")

SILENT: dict[str, Callable[[], JobFacts]] = {
    "one node": make_job,
    "predictions, which need no gradients and no optimizer": lambda: make_job(
        make_config(model__hidden=150_000).asking()
    ),
    "predictions by learned rows, which need no optimizer": lambda: make_job(
        make_config(model__embedding__dim=150_000).asking(),
        partition=make_partition(columns=make_columns(feat=None)),
    ),
    "as many seeds as a batch": lambda: make_job(
        partition=make_partition(splits={"train": 1024, "val": 1, "test": 1})
    ),
    "weights of edges to draw by": lambda: make_job(
        make_config(sampling__edge_weight="weight"),
        partition=make_partition(edges={("_N", "cites", "_N"): {"weight": DATE, "label": DATE}}),
    ),
    "relations": lambda: make_job(
        make_config(model__kind="rgcn"),
        partition=make_partition(edges={("_N", "cites", "_N"): {"relation": DATE}}),
    ),
    "two nodes": lambda: make_job(nodes=two(), resources=make_resources(("a", 2, 0), ("b", 2, 0))),
    "another patch of python": lambda: make_job(nodes=two(python="3.11.9")),
    "versions that may differ": lambda: make_job(
        make_config(cluster__uniform="off"), two(versions=versions(torch="2.12.0"))
    ),
    "a GPU job": lambda: make_job(
        make_config(precision="fp16-mixed", comm__backend="nccl", **GPU_JOB),
        (make_node(versions=versions(torch="2.13.0"), gpus=GPUS),),
        resources=WITH_GPUS,
    ),
    "bf16 on CPUs": lambda: make_job(make_config(precision="bf16-mixed")),
    "integer features": lambda: make_job(
        partition=make_partition(columns=make_columns(feat="uint8 9"))
    ),
    "a named type": lambda: make_job(
        make_config(task__ntype="user"), partition=typed("item", "user")
    ),
    "the only type with the target": lambda: make_job(
        partition=make_partition(
            columns={**make_columns(), "user": {"feat": make_columns()["_N"]["feat"]}}
        )
    ),
    "unknown memory": lambda: make_job(nodes=(make_node(memory=None, memory_available=None),)),
    "unknown splits": lambda: make_job(partition=make_partition(splits={})),
    "a file of somebody else's": lambda: make_job(
        nodes=(make_node(partition_files=FILES | {"notes.txt": 3}),)
    ),
    "as many workers as fit": lambda: make_job(make_config(cluster__workers="auto")),
    "a graph that is not partitioned yet": lambda: make_job(
        nodes=(make_node(partition_files={}, partition_fingerprint=None),),
        partition=make_partition(directory="", files={}, fingerprint=None),
    ),
    "four parts": lambda: make_job(partition=make_partition(num_parts=4, columns=four())),
}


@pytest.mark.parametrize("case", SPEAKS)
def test_it_speaks(case: str) -> None:
    name, severity, words, job = SPEAKS[case]
    findings = [finding for finding in check(job) if finding.check == name]
    (finding,) = [f for f in findings if all(word in f.text for word in words)]
    assert finding.severity == severity
    assert len(findings) == 1 + (case in TWICE)
    assert finding.remedy or severity == "info" or "no test nodes" in finding.what


def test_every_check_has_a_case() -> None:
    assert {case.check for case in SPEAKS.values()} == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize("case", SILENT)
def test_it_is_silent(case: str) -> None:
    assert check(SILENT[case]()) == ()


def test_free_space_of_unusable_storage_is_not_reported() -> None:
    found = check(make_job(nodes=(make_node(disk_free=0, storage="readonly"),)))
    assert [finding.check for finding in found] == ["storage_visible"]


def test_a_dead_node_does_not_cause_a_finding_on_cpus() -> None:
    """Ray counts its CPUs as used for a while."""
    dead = NodeFacts("b", problem="the actor died")
    found = check(make_job(nodes=(make_node(), dead), resources=make_resources(free=1)))
    assert [finding.check for finding in found] == ["nodes_answer"]


def test_only_silent_nodes_are_named() -> None:
    silent = tuple(NodeFacts(n, problem="no answer within 5 s") for n in "bc")
    found = check(make_job(nodes=(make_node(), *silent)))
    assert [(f.check, f.nodes) for f in found] == [
        ("nodes_answer", ("b",)),
        ("nodes_answer", ("c",)),
    ]
    (alone,) = check(make_job(nodes=silent))
    assert "cluster.probe_timeout" in alone.remedy
    assert "remove it" not in alone.remedy


def test_a_node_is_named_once() -> None:
    differ = "nodes differ in A: 1 on host0, 64 on host1"
    assert str(Finding("a", "error", differ, nodes=("host1",))) == differ
    link = "from host1 to host0 does not work"
    assert str(Finding("a", "error", link, nodes=("host1", "host0"))) == link
    more = Finding("a", "error", differ, nodes=("host1", "host10"))
    assert str(more) == f"{differ} (on host1, host10)"


def test_errors_come_first() -> None:
    job = make_job(
        make_config(cluster__workers=[1, 8]),
        partition=make_partition(splits={"train": 0}),
        nodes=(make_node(shm_free=2**27),),
    )
    severities = [finding.severity for finding in check(job)]
    assert severities == ["error", *["error"] * (len(severities) - 3), "warn", "info"]


def test_the_verdict_lists_every_error() -> None:
    findings = [
        Finding("a", "warn", "this is odd"),
        Finding("b", "error", "that is wrong", "mend it", nodes=("x", "y")),
        Finding("c", "error", "so is this", "mend this too"),
    ]
    with pytest.raises(PreflightError) as caught:
        refuse(findings, make_config())
    assert caught.value.exit_code == 3
    assert caught.value.what == (
        "the job cannot run, for 2 reasons\n  that is wrong (on x, y) [b]\n    → mend it\n"
        "  so is this [c]\n    → mend this too"
    )
    with pytest.raises(PreflightError) as caught:
        refuse(findings[:2], make_config())
    assert (caught.value.what, caught.value.remedy) == ("that is wrong (on x, y) [b]", "mend it")
    refuse(findings[:1], make_config())


def test_the_verdict_names_the_config(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\ngraph: {format: planted, nodes: 1000}\nmodel: {kind: gcn}\n")
    with pytest.raises(PreflightError) as caught:
        refuse([Finding("b", "error", "wrong")], load_config(file))
    assert caught.value.where == str(file)


def test_a_report_is_plain_and_has_a_row_per_node() -> None:
    nodes = (make_node(), NodeFacts("b", problem="no answer"))
    job = make_job(nodes=nodes)
    comm = plan_for(job.config, job.holding)
    report = Report(check(job), nodes, (), comm, 0.25)
    assert not report.ok
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["ok"] is False
    assert stored["nodes"][0]["versions"]["dgl"] == "2.1.0"
    rows = report.rows()
    assert {len(row) for row in rows} == {len(Report.COLUMNS)}
    assert rows[0][:4] == ("a", "10.0.0.1", "3.11.7", "2.13.0+cpu")
    assert rows[1][:2] == ("b", "no answer")
    assert Report(check(make_job()), nodes[:1], (), comm, 0.0).ok


def test_as_many_workers_as_fit_of_a_range() -> None:
    refused, *_ = check(make_job(make_config(cluster__workers=[3, 4])))
    assert "3 × 1 CPUs do not fit" in refused.what
    config = make_config(cluster__workers=[2, 4])
    assert [resolve_workers(config, make_resources(("a", n, 0))) for n in (1, 3, 9)] == [2, 3, 4]
    job = make_job(config, resources=make_resources(("a", 3, 0)))
    assert (job.fewest, job.workers, job.most) == (2, 3, 4)
    assert not [found for found in check(make_job(config)) if found.severity == "error"]


def test_auto_workers_are_as_many_as_fit() -> None:
    config = make_config(cluster__workers="auto", cluster__cpus_per_worker=2)
    assert resolve_workers(config, make_resources(("a", 5, 0), ("b", 3, 0))) == 3
    assert resolve_workers(config, make_resources(("a", 1, 0))) == 1


@given(
    nodes=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8)), min_size=1, max_size=6),
    cpus=st.integers(1, 16),
    gpus=st.integers(0, 4),
)
def test_workers_that_fit_can_be_placed(nodes: list[tuple[int, int]], cpus: int, gpus: int) -> None:
    resources = make_resources(*((str(i), *node) for i, node in enumerate(nodes)))
    fit = resources.workers(cpus, gpus)
    left = [list(node) for node in nodes]
    placed = 0
    for node in left:
        while node[0] >= cpus and node[1] >= gpus:
            node[0] -= cpus
            node[1] -= gpus
            placed += 1
    assert fit == placed


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        *(("2.4", True), ("2.4.0", True), ("2.13.0+cpu", True), ("2.51.0rc1", True)),
        *(("2.3.9", False), ("3.0", False), ("", False), (None, False), ("unknown", False)),
    ],
)
def test_supported(version: str | None, fits: bool) -> None:
    assert supported(version, ">= 2.4, < 3") is fits


def test_a_prediction_does_not_repeat_findings_on_edge_arrays() -> None:
    training = make_config()
    for config, said in ((training, True), (training.asking(), False)):
        job = make_job(config, partition=make_partition(edges=DATED))
        assert any(f.check == "edge_arrays_read" for f in check(job)) == said


def test_jobs_that_need_dgl_are_refused_without_it() -> None:
    kind = "tests.support.own_models:DglSage"
    nodes = one(versions=versions(dgl=None))
    assert check(make_job(nodes=nodes)) == check(make_job())
    config = make_config(model={"kind": kind})
    assert not [f for f in check(make_job(config)) if "DGL is not" in f.what]
    (finding,) = (f for f in check(make_job(config, nodes)) if f.check == "devices_suit")
    assert finding.severity == "error"
    assert finding.what == f"{kind} reads DGL's graphs, and DGL is not installed"
    assert "pip install dgl" in finding.remedy
    assert "model.interface to pyg" in finding.remedy


def test_a_dgl_that_is_too_old_may_go_as_well() -> None:
    """Uninstalling DGL is offered, too, since newer Pythons have no newer DGL."""
    (finding,) = check(make_job(nodes=one(versions=versions(dgl="0.1.3"))))
    assert finding.remedy.endswith(" there, with Python 3.12 or older, or uninstall it")
    (finding,) = check(make_job(nodes=one(versions=versions(torch="2.3.1"))))
    assert finding.remedy == "install torch >= 2.8 there"


def test_the_ranges_are_those_of_the_package() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    stated = tomllib.loads(project.read_text())["project"]
    ranges = {"python": stated["requires-python"]}
    for line in stated["dependencies"]:
        name, _, rest = re.fullmatch(r"([\w-]+)(\[.*?\])?(.*)", line).groups()  # type: ignore[union-attr]
        ranges[name] = rest.partition(";")[0]  # DGL is not for every Python
    pins = project.with_name("tests").joinpath("constraints-oldest.txt").read_text()
    for name, stated_range in ranges.items():
        floor = re.sub(r"(\.0)+$", "", stated_range.removeprefix(">=").partition(",")[0])
        assert name in ("python", "torch") or re.search(rf"(?mi)^{name}=={floor}(\.0)*$", pins)
    for name, supported_versions in SUPPORTED.items():
        assert ranges[name] == supported_versions.replace(" ", ""), name
    readme = project.with_name("README.md").read_text().lower()
    for name in ("python", "dgl"):
        oldest, limit = re.findall(r"[\d.]+", SUPPORTED[name])
        major, minor = limit.split(".")
        assert f"{name} {oldest} to {major}.{int(minor) - 1}" in readme


def test_sizes() -> None:
    sizes = [0, 1023, 2048, 512 * 2**20, 1.44 * GIB, 3 * 2**40]
    assert [size(count) for count in sizes] == [
        *("0 B", "1023 B", "2 KiB", "512 MiB", "1.4 GiB", "3.0 TiB")
    ]
    assert size(None) == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("GLOO_SOCKET_IFNAME", "eth1"), ("GLOO_SOCKET_IFNAME", "lo")),  # on one node
        *(("NCCL_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "^docker,lo")),
        *(("NCCL_SOCKET_IFNAME", "=eth1"), ("NCCL_SOCKET_IFNAME", "ib,eth")),
    ],
)
def test_interfaces_that_are_there(variable: str, value: str) -> None:
    node = make_node(gpus=(NEW, replace(NEW, uuid="GPU-3")))
    assert check(on_gpus(node, comm__env={variable: value})) == ()


def test_the_names_that_can_be_allowed_are_those_of_the_checks() -> None:
    names = {*described(), "name_free"}
    assert sorted(names) == sorted((*ALLOWABLE, *BINDING))
    assert len({*ALLOWABLE, *BINDING}) == len((*ALLOWABLE, *BINDING))


@pytest.mark.parametrize("name", described())
def test_every_check_has_a_description(name: str) -> None:
    sentence = described()[name]
    assert sentence.endswith(".")
    assert "``" not in sentence, "it is shown as Markdown"
    assert 10 < len(sentence) < 200


def test_an_allowed_finding_has_no_remedy() -> None:
    config = make_config(cluster__allow=["hardware_uniform"])
    (finding,) = check(make_job(config, two(cpu="An old one")))
    assert finding.what.endswith("(allowed)")
    assert finding.remedy == ""


def test_allowed_findings_do_not_stop_the_job() -> None:
    nodes = two(cpu="An old one", code="d" * 64)
    findings = check(make_job(make_config(cluster__allow=["hardware_uniform"]), nodes))
    severities = {finding.check: finding.severity for finding in findings}
    assert severities == {"hardware_uniform": "info", "code_uniform": "error"}
    assert check(make_job(make_config(cluster__uniform="off"), nodes)) == ()


def test_a_node_without_workers_may_differ() -> None:
    resources = make_resources(("a", 0, 0), ("b", 2, 0), ("c", 2, 0))
    nodes = (make_node("a", cpu="a small one", code="d" * 64), make_node("b"), make_node("c"))
    assert check(make_job(nodes=nodes, resources=resources)) == ()


def test_the_odd_node_is_named() -> None:
    nodes = tuple(make_node(name) for name in "abcdefgh") + (make_node("i", cpu="An old one"),)
    (finding,) = check(make_job(nodes=nodes))
    assert finding.nodes == ("i",)
    assert "A processor on a, b, c and 5 more, An old one on i" in finding.what


def test_one_node_alone_needs_no_network() -> None:
    alone = make_node(network=make_network(resolves_to=("127.0.0.1",)))
    assert check(make_job(nodes=(alone,))) == ()


def test_the_cluster_alone() -> None:
    nodes = two(shm_free=0)
    found = Survey(nodes, make_resources(("a", 2, 0), ("b", 2, 0)))
    report = preflight(make_config(), None, found, of_job=False)
    assert [finding.check for finding in report.findings] == ["shared_memory"]
    assert (report.ok, report.verdict) == (False, "refused: 1 error")
    assert report.to_dict()["communication"] is None


def test_a_thousand_nodes_are_judged_one_by_one() -> None:
    """The worst case is that every value differs on every node."""
    nodes = tuple(
        replace(
            make_node(),
            node=f"n{i}",
            id=f"{i:056x}",
            cpu=f"processor {i}",
            environment={"OMP_NUM_THREADS": str(i)},
            network=make_network(i % 250 + 1, resolves_to=("127.0.1.1",)),
        )
        for i in range(1000)
    )
    given = make_resources(*((node.node, 2, 0) for node in nodes))
    links = tuple(Link(f"n{i}", f"n{(i + 1) % 1000}", "timed out") for i in range(1000))
    report = preflight(make_config(), make_partition(), Survey(nodes, given, links))
    assert {f.check for f in report.findings} >= {"environment_uniform", "hardware_uniform"}
    assert len([f for f in report.findings if f.check == "hardware_uniform"]) == 1
    assert len(report.rows()) == len(report.comm.nodes) == 1000
    print(f"{report.seconds:.2f} s for 1,000 nodes")
