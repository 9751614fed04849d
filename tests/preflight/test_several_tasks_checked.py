"""What is found of one task of several names that task, and its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raygnn.config.load import load_config
from raygnn.preflight.checks import check
from raygnn.preflight.data_checks import arrays_usable, nodes_to_train_on
from raygnn.preflight.facts import Column
from raygnn.preflight.job import Job
from tests.facts import make_job, make_partition

ETYPE = ("_N", "_E", "_N")


def job(tasks: dict[str, Any], **partition: Any) -> Job:
    config = load_config(
        {
            "name": "a",
            "graph": {"format": "planted", "nodes": 1000},
            "model": {"kind": "gcn"},
            "cluster": {"workers": 2},
            "tasks": tasks,
        }
    )
    splits = {"train": 140, "val": 500, "test": 1000}
    facts = {"by_type": {"_N": splits}, "edges": {ETYPE: {"w": Column("float32", ())}}}
    made = make_job(config, partition=make_partition(**facts, **partition))
    return replace(made, ntype=None)


def test_good_tasks_pass() -> None:
    tasks = {"kind": {"kind": "node_classification"}, "links": {"kind": "link_prediction"}}
    assert not [f for f in check(job(tasks)) if f.severity == "error"]
    one = job(tasks).by_task
    assert one["kind"].ntype == "_N"
    assert one["kind"].partition.splits["train"] == 140
    assert one["links"].partition.splits == {}


def test_each_is_judged() -> None:
    tasks = {
        "kind": {"kind": "node_classification", "target": "nothing"},
        "number": {"kind": "edge_regression", "target": "u"},
        "good": {"kind": "edge_regression", "target": "w"},
    }
    found = list(arrays_usable(job(tasks)))
    assert [f.what.partition(":")[0] for f in found] == ["task kind", "task number"]
    assert "tasks.kind.target" in found[0].remedy + found[0].what
    assert "tasks.number.target" in found[1].what


def test_a_task_without_seeds_is_named() -> None:
    tasks = {"kind": {"kind": "node_classification"}, "links": {"kind": "link_prediction"}}
    empty = job(tasks)
    nothing = replace(empty.partition, by_type={"_N": {"train": 0, "val": 0, "test": 0}})
    found = list(nodes_to_train_on(replace(empty, partition=nothing)))
    assert {f.severity for f in found} == {"error", "warn"}
    assert all(f.what.startswith("task kind: ") for f in found)
