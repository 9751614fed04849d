"""Each check has a case in which it speaks and one in which it is silent."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.load import load_config
from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.errors import PreflightError
from raygnn.preflight.cluster_checks import SUPPORTED, supported
from raygnn.preflight.comm_plan import make_comm_plan
from raygnn.preflight.facts import Column, DryRun, Gpu, NodeFacts, PartitionFacts
from raygnn.preflight.findings import Finding, Job
from raygnn.preflight.report import Report, refuse, resolve_workers
from tests.facts import (
    FILES,
    GIB,
    check,
    make_columns,
    make_config,
    make_job,
    make_node,
    make_partition,
    make_resources,
    two,
    versions,
)


def unvalidated(config: Config, section: str, **changes: object) -> Config:
    """A config that ``load_config`` would not let through, as another front end might make it."""
    if section:
        changed = getattr(config, section).model_copy(update=changes)
        return config.model_copy(update={section: changed})
    return config.model_copy(update=changes)


def typed(*ntypes: str) -> PartitionFacts:
    return make_partition(columns={ntype: make_columns()["_N"] for ntype in ntypes})


GPU_JOB = {"cluster__gpus_per_worker": 1}
GPUS = (Gpu("H100", "GPU-1", capability=(9, 0)), Gpu("H100", "GPU-2", capability=(9, 0)))
WITH_GPUS = make_resources(("a", 2, 2))
DATE = Column("int64", ())
DATED = {
    etype: {"weight": Column("float32", ()), "at": DATE, "train_mask": Column("bool", ())}
    for etype in (("_N", "cites", "_N"), ("_N", "by", "_N"))
}

# name of the case → (job, check that speaks, severity, words in what it says)
SPEAKS: dict[str, tuple[Callable[[], Job], str, str, list[str]]] = {
    "a silent node": (
        lambda: make_job(nodes=(make_node(), NodeFacts("b", problem="no answer within 20 s"))),
        *("nodes_answer", "error", ["no answer within 20 s", "(on b)"]),
    ),
    "nobody answers": (
        lambda: make_job(nodes=tuple(NodeFacts(n, problem="no answer within 5 s") for n in "abc")),
        *("nodes_answer", "error", ["none of 3 nodes", "no answer within 5 s", "(on a, b, c)"]),
    ),
    "a place for copies that is none": (
        lambda: make_job(nodes=(make_node(cache="/etc/passwd is not a directory"),)),
        *("cache_usable", "error", ["staging.path is null", "not a directory", "(on a)"]),
    ),
    "an old torch": (
        lambda: make_job(nodes=(make_node(versions=versions(torch="2.3.1")),)),
        *("versions_supported", "error", ["torch is 2.3.1", "on a"]),
    ),
    "a new dgl": (
        lambda: make_job(nodes=(make_node(versions=versions(dgl="2.2.1+cu121")),)),
        *("versions_supported", "error", ["dgl is 2.2.1+cu121"]),
    ),
    "no lightning": (
        lambda: make_job(nodes=(make_node(versions=versions(lightning=None)),)),
        *("versions_supported", "error", ["lightning is not installed"]),
    ),
    "a new python": (
        lambda: make_job(nodes=(make_node(python="3.13.0"),)),
        *("versions_supported", "error", ["python is 3.13.0"]),
    ),
    "nodes that differ": (
        lambda: make_job(nodes=two(versions=versions(torch="2.12.0"))),
        *("versions_uniform", "error", ["differ in torch", "2.13.0+cpu on a", "2.12.0 on b"]),
    ),
    "nodes that may differ": (
        lambda: make_job(make_config(cluster__uniform="warn"), two(python="3.12.1")),
        *("versions_uniform", "warn", ["differ in python: 3.11 on a, 3.12 on b"]),
    ),
    "a storage of one node": (
        lambda: make_job(nodes=two(storage="missing")),
        *("storage_visible", "error", ["storage", "does not exist there", "on b"]),
    ),
    "a storage of the same name": (
        lambda: make_job(nodes=two(storage="other")),
        *("storage_visible", "error", ["another directory"]),
    ),
    "a read-only storage": (
        lambda: make_job(nodes=(make_node(storage="readonly"),)),
        *("storage_visible", "error", ["cannot be made or written"]),
    ),
    "a missing part": (
        lambda: make_job(nodes=two(partition_files={"cora.json": 500})),
        *("partition_visible", "error", ["3 of", "part0/graph.dgl the first", "on b"]),
    ),
    "a short part": (
        lambda: make_job(nodes=two(partition_files=FILES | {"part1/graph.dgl": 7})),
        *("partition_visible", "error", ["part1/graph.dgl", "7 bytes, expected 9000"]),
    ),
    "another partition": (
        lambda: make_job(nodes=two(partition_fingerprint="0" * 64)),
        *("partition_visible", "error", ["another partition"]),
    ),
    "dtypes that differ": (
        lambda: make_job(
            partition=make_partition(
                columns={"_N": {**make_columns()["_N"], "feat": mixed("float32", "float64")}}
            )
        ),
        *("parts_agree", "error", ["'feat'", "float32[8] in part 0, float64[8] in part 1"]),
    ),
    "widths that differ": (
        lambda: make_job(
            partition=make_partition(
                columns={
                    "_N": {**make_columns()["_N"], "w": (Column("f", (8,)), Column("f", (9,)))}
                }
            )
        ),
        *("parts_agree", "error", ["'w'", "f[8] in part 0, f[9] in part 1"]),
    ),
    "an array of one part": (
        lambda: make_job(
            partition=make_partition(
                columns={"_N": {**make_columns()["_N"], "w": (Column("float32", (8,)),)}}
            )
        ),
        *("parts_agree", "error", ["'w'", "some lack it"]),
    ),
    "no such features": (
        lambda: make_job(make_config(model__features="emb")),
        *("arrays_usable", "error", ["'emb' (model.features)", "there are: feat, label"]),
    ),
    "one of several features": (
        lambda: make_job(make_config(model__features=["feat", "emb"])),
        *("inputs_exist", "error", ["'emb' (model.features)", "there are: feat, label"]),
    ),
    "learned rows of no node type": (
        lambda: make_job(make_config(model__embedding={"dim": 4, "ntypes": ["user"]})),
        *("embeddings_usable", "error", ["'user' (model.embedding.ntypes)", "there are: _N"]),
    ),
    "nothing to learn": (
        lambda: make_job(make_config(model__embedding={"dim": 4})),
        *("embeddings_usable", "error", ["every node type has features"]),
    ),
    "no features, and rows for others": (
        lambda: make_job(
            make_config(model__features="emb", model__embedding={"dim": 4, "ntypes": ["user"]})
        ),
        *("arrays_usable", "error", ["'emb' (model.features)"]),
    ),
    "categories that are no whole numbers": (
        lambda: make_job(
            make_config(model__categories={"brand": 4}),
            partition=make_partition(columns=make_columns(brand="float32")),
        ),
        *("arrays_usable", "error", ["'brand' (model.categories) is float32"]),
    ),
    "categories in rows": (
        lambda: make_job(
            make_config(model__categories={"brand": 4}),
            partition=make_partition(columns=make_columns(brand="int64 3")),
        ),
        *("arrays_usable", "error", ["'brand'", "rows of [3]"]),
    ),
    "features of text": (
        lambda: make_job(partition=make_partition(columns=make_columns(feat="object 3"))),
        *("arrays_usable", "error", ["'feat'", "is object"]),
    ),
    "features without width": (
        lambda: make_job(partition=make_partition(columns=make_columns(feat="float32 0"))),
        *("arrays_usable", "error", ["rows without values"]),
    ),
    "no such target": (
        lambda: make_job(make_config(task__target="y")),
        *("arrays_usable", "error", ["'y' (task.target)"]),
    ),
    "a target of numbers": (
        lambda: make_job(partition=make_partition(columns=make_columns(label="float32"))),
        *("arrays_usable", "error", ["'label' (task.target) is float32[]"]),
    ),
    "a target of rows": (
        lambda: make_job(partition=make_partition(columns=make_columns(label="int64 3"))),
        *("arrays_usable", "error", ["'label' (task.target) is int64[3]"]),
    ),
    "a target of several types": (
        lambda: make_job(partition=typed("item", "user")),
        *("arrays_usable", "error", ["several node types have an array 'label': item, user"]),
    ),
    "no such node type": (
        lambda: make_job(make_config(task__ntype="shop"), partition=typed("item", "user")),
        *("arrays_usable", "error", ["no node type 'shop'", "item, user"]),
    ),
    "no training nodes": (
        lambda: make_job(partition=make_partition(splits={"train": 0})),
        *("nodes_to_train_on", "error", ["no training nodes"]),
    ),
    "fewer training nodes than workers": (
        lambda: make_job(partition=make_partition(splits={"train": 1})),
        *("nodes_to_train_on", "warn", ["2 workers share 1 training nodes"]),
    ),
    "no validation nodes": (
        lambda: make_job(partition=make_partition(splits={"train": 9, "val": 0})),
        *("nodes_to_train_on", "warn", ["no validation nodes; the best weights"]),
    ),
    "no test nodes": (
        lambda: make_job(partition=make_partition(splits={"train": 9, "test": 0})),
        *("nodes_to_train_on", "warn", ["no test nodes"]),
    ),
    "a model that fails": (
        lambda: replace(make_job(), dry_run=DryRun("error", "m:Net fails on a batch", "mend it")),
        *("model_runs", "error", ["m:Net fails on a batch"]),
    ),
    "a fold that selects and is reported": (
        lambda: make_job(
            make_config(
                task__kind="graph_classification",
                graph={"format": "graphs", "path": ".", "folds": 5, "fold_for": "val"},
            )
        ),
        *("fold_is_unseen", "warn", ["selects the best epoch"]),
    ),
    "a batch of all training nodes": (
        lambda: make_job(partition=make_partition(splits={"train": 1023, "val": 1, "test": 1})),
        *("batch_size_fits", "info", ["a batch of 2 × 512 seeds", "1,023 training nodes"]),
    ),
    "weights and times of edges": (
        lambda: make_job(partition=make_partition(edges=DATED)),
        *("edge_arrays_read", "info", ["_N:cites:_N, _N:by:_N have at, weight", "no model reads"]),
    ),
    "features of edges beside weights": (
        lambda: make_job(
            make_config(sampling__edge_weight="weight"), partition=make_partition(edges=DATED)
        ),
        *("edge_arrays_read", "info", ["_N:cites:_N, _N:by:_N have at, which"]),
    ),
    "tasks that divide the same edges": (
        lambda: make_job(
            make_config(
                tasks__a__kind="link_prediction",
                tasks__b__kind="link_prediction",
                tasks__b__split__seed=1,
            ),
            partition=make_partition(edges={("_N", "_E", "_N"): {}}),
        ),
        *("splits_agree", "error", ["tasks a and b", "_N:_E:_N differently"]),
    ),
    "too many workers": (
        lambda: make_job(make_config(cluster__workers=3)),
        *("resources_fit", "error", ["3 × 1 CPUs do not fit: Ray has 2 CPUs", "room for 2"]),
    ),
    "too many workers at the least": (
        lambda: make_job(make_config(cluster__workers=[3, 4])),
        *("resources_fit", "error", ["3 × 1 CPUs do not fit: Ray has 2 CPUs", "room for 2"]),
    ),
    "fewer workers than the most": (
        lambda: make_job(make_config(cluster__workers=[1, 4])),
        *("resources_fit", "info", ["starts with 2 workers of up to 4", "2 CPUs"]),
    ),
    "memory for many workers only": (
        lambda: make_job(
            make_config(cluster__workers=[1, 2], sampling__cache=0.0),
            nodes=(make_node("a", memory=3 * GIB), make_node("b", memory=9 * GIB)),
            partition=make_partition(bytes=4 * GIB),
        ),
        *("memory_fits", "warn", ["with 1 worker", "4.0 GiB", "3.0 GiB"]),
    ),
    "CPUs that others use, of the fewest": (
        lambda: make_job(make_config(cluster__workers=[1, 2]), resources=make_resources(free=0)),
        *("resources_fit", "warn", ["1 × 1 CPUs have to wait", "leave 0 CPUs"]),
    ),
    "a worker larger than any node": (
        lambda: make_job(
            make_config(cluster__workers=1, cluster__cpus_per_worker=3),
            resources=make_resources(("a", 2, 0), ("b", 2, 0)),
        ),
        *(
            "resources_fit",
            "error",
            ["1 × 3 CPUs do not fit", "4 CPUs", "2 nodes", "room for 0 such workers"],
        ),
    ),
    "too few GPUs": (
        lambda: make_job(make_config(**GPU_JOB), resources=make_resources(("a", 2, 1))),
        *("resources_fit", "error", ["2 × 1 CPUs and 1 GPUs do not fit"]),
    ),
    "CPUs that others use": (
        lambda: make_job(resources=make_resources(free=1)),
        *("resources_fit", "warn", ["have to wait", "leave 1 CPUs"]),
    ),
    "CPUs that are not there": (
        lambda: make_job(resources=make_resources(("a", 8, 0))),
        *("cpus_are_there", "warn", ["told of 8 CPUs, the machine has 2"]),
    ),
    "a partition larger than memory": (
        lambda: make_job(partition=make_partition(bytes=9 * GIB)),
        *("memory_fits", "error", ["9.0 GiB", "8.0 GiB of memory"]),
    ),
    "a partition larger than free memory": (
        lambda: make_job(partition=make_partition(bytes=5 * GIB)),
        *("memory_fits", "warn", ["only 6.0 GiB of memory are free"]),
    ),
    "weights larger than memory": (
        lambda: make_job(make_config(model__hidden=10**9)),
        *("memory_fits", "error", ["optimizer state (41.7 TiB)", "8.0 GiB of memory"]),
    ),
    "weights and their optimizer's state larger than what is free": (
        lambda: make_job(make_config(model__hidden=150_000)),
        *("memory_fits", "error", ["optimizer state (6.4 GiB)", "6.0 GiB are available"]),
    ),
    "weights larger than what is free while the graph is in memory": (
        lambda: make_job(
            make_config(model__hidden=150_000), partition=make_partition(directory="", bytes=GIB)
        ),
        *("memory_fits", "warn", ["take 7.4 GiB, only 7.0 GiB of memory are free"]),
    ),
    "learned rows larger than memory": (
        lambda: make_job(
            make_config(model__embedding__dim=10**6),
            partition=make_partition(columns=make_columns(feat=None)),
        ),
        *("memory_fits", "error", ["learned rows (30.3 GiB)", "8.0 GiB of memory"]),
    ),
    "weights larger than a GPU": (
        lambda: make_job(
            make_config(**GPU_JOB, model__hidden=10**6),
            nodes=(make_node(gpus=tuple(replace(gpu, memory=GIB) for gpu in GPUS)),),
            resources=WITH_GPUS,
        ),
        *("memory_fits", "error", ["optimizer state take 21.4 GiB, a GPU has 1.0 GiB"]),
    ),
    "little shared memory": (
        lambda: make_job(nodes=(make_node(shm_free=100 * 2**20),)),
        *("shared_memory", "warn", ["/dev/shm has 100 MiB free"]),
    ),
    "little disk": (
        lambda: make_job(nodes=(make_node(disk_free=GIB // 2),)),
        *("disk_space", "warn", ["512 MiB free"]),
    ),
    "no disk": (
        lambda: make_job(nodes=(make_node(disk_free=1024),)),
        *("disk_space", "error", ["1 KiB free"]),
    ),
    "fp16 without GPUs": (
        lambda: make_job(unvalidated(make_config(), "", precision="fp16-mixed")),
        *("devices_suit", "error", ["fp16-mixed needs GPUs"]),
    ),
    "fp16 on a cluster without GPUs": (
        lambda: make_job(
            make_config(precision="fp16-mixed", **GPU_JOB),
            (make_node(versions=versions(torch="2.13.0")),),
        ),
        *("devices_suit", "error", ["fp16-mixed needs GPUs"]),
    ),
    "nccl without GPUs": (
        lambda: make_job(unvalidated(make_config(), "comm", backend="nccl")),
        *("devices_suit", "error", ["nccl works between GPUs"]),
    ),
    "an old torch that shards": (
        lambda: make_job(
            make_config(comm__shard="full"), (make_node(versions=versions(torch="2.8.0+cpu")),)
        ),
        *("devices_suit", "error", ["torch >= 2.9 on CPUs, and there is 2.8.0+cpu", "on a"]),
    ),
    "GPUs without CUDA": (
        lambda: make_job(make_config(**GPU_JOB), resources=WITH_GPUS),
        *("devices_suit", "error", ["torch is a build without CUDA", "on a"]),
    ),
    "parts that do not divide": (
        lambda: make_job(partition=make_partition(num_parts=3)),
        *("parts_and_workers", "info", ["3 parts do not divide evenly between 2 workers"]),
    ),
}

SILENT: dict[str, Callable[[], Job]] = {
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
    "an old torch that shards nothing for one worker": lambda: make_job(
        make_config(comm__shard="full", cluster__workers=1),
        (make_node(versions=versions(torch="2.8.0+cpu")),),
    ),
    "an old torch that shards the optimizer": lambda: make_job(
        make_config(comm__shard="optimizer"), (make_node(versions=versions(torch="2.8.0+cpu")),)
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


def mixed(*dtypes: str) -> tuple[Column, ...]:
    return tuple(Column(dtype, (8,)) for dtype in dtypes)


def four() -> dict[str, dict[str, tuple[Column, ...]]]:
    return {"_N": {name: columns * 2 for name, columns in make_columns()["_N"].items()}}


@pytest.mark.parametrize("case", SPEAKS)
def test_it_speaks(case: str) -> None:
    job, name, severity, words = SPEAKS[case]
    found = [finding for finding in check(job()) if finding.check == name]
    assert [finding.severity for finding in found] == [severity]
    for word in words:
        assert word in str(found[0])
    assert found[0].remedy or "no test nodes" in found[0].what


@pytest.mark.parametrize("case", SILENT)
def test_it_is_silent(case: str) -> None:
    assert check(SILENT[case]()) == ()


def test_a_storage_that_is_none_has_no_room_to_speak_of() -> None:
    found = check(make_job(nodes=(make_node(disk_free=0, storage="readonly"),)))
    assert [finding.check for finding in found] == ["storage_visible"]


def test_what_a_dead_node_had_is_not_given_to_others() -> None:
    """Ray counts its CPUs as taken for a while."""
    dead = NodeFacts("b", problem="the actor died")
    found = check(make_job(nodes=(make_node(), dead), resources=make_resources(free=1)))
    assert [finding.check for finding in found] == ["nodes_answer"]


def test_one_that_answers_is_not_blamed_for_the_others() -> None:
    silent = tuple(NodeFacts(n, problem="no answer within 5 s") for n in "bc")
    found = check(make_job(nodes=(make_node(), *silent)))
    assert [(f.check, f.nodes) for f in found] == [
        ("nodes_answer", ("b",)),
        ("nodes_answer", ("c",)),
    ]
    (alone,) = check(make_job(nodes=silent))
    assert "cluster.probe_timeout" in alone.remedy
    assert "take it out" not in alone.remedy


def test_a_node_is_named_once() -> None:
    differ = "nodes differ in A: 1 on host0, 64 on host1"
    assert str(Finding("a", "error", differ, nodes=("host1",))) == differ
    link = "from host1 to host0 does not work"
    assert str(Finding("a", "error", link, nodes=("host1", "host0"))) == link
    more = Finding("a", "error", differ, nodes=("host1", "host10"))
    assert str(more) == f"{differ} (on host1, host10)"


def test_errors_come_first() -> None:
    job = make_job(
        partition=make_partition(num_parts=3, splits={"train": 0}),
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
        "2 things stop this job\n  that is wrong (on x, y) [b]\n    → mend it\n"
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
    comm = make_comm_plan(job.config, job.holding)
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
    assert supported(version, "2.4", "3") is fits


def test_the_ranges_are_those_of_the_package() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    project = Path(__file__).parents[2] / "pyproject.toml"
    stated = tomllib.loads(project.read_text())["project"]
    ranges = {"python": stated["requires-python"]}
    for line in stated["dependencies"]:
        name, _, rest = re.fullmatch(r"([\w-]+)(\[.*?\])?(.*)", line).groups()  # type: ignore[union-attr]
        ranges[name] = rest
    for name, (oldest, limit) in SUPPORTED.items():
        assert ranges[name] == f">={oldest}" + (f",<{limit}" if limit else ""), name


def test_sizes() -> None:
    sizes = [0, 1023, 2048, 512 * 2**20, 1.44 * GIB, 3 * 2**40]
    assert [size(count) for count in sizes] == [
        *("0 B", "1023 B", "2 KiB", "512 MiB", "1.4 GiB", "3.0 TiB")
    ]
    assert size(None) == ""
