"""Checks of several tasks: each finding names the task and its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.preflight.data_checks import arrays_usable, nodes_to_train_on, splits_agree
from raygnn.preflight.facts import ArrayType
from raygnn.preflight.findings import JobFacts
from tests.support.facts import check, make_job, make_partition

ETYPE = ("_N", "_E", "_N")


def job(tasks: dict[str, Any], **partition: Any) -> JobFacts:
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
    facts = {"by_type": {"_N": splits}, "edges": {ETYPE: {"w": ArrayType("float32", ())}}}
    return make_job(config, partition=make_partition(**facts, **partition))


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


@pytest.mark.parametrize(
    ("dtype", "warned"), [("int64", True), ("uint8", True), ("float32", False)]
)
def test_whole_numbers_as_numbers_are_warned_of(dtype: str, warned: bool) -> None:
    """The warning does not depend on the graph's format: class numbers have no order."""
    tasks = {"a": {"kind": "edge_regression", "target": "w"}, "b": {"kind": "link_prediction"}}
    one = job(tasks)
    columns = replace(one.partition, edges={ETYPE: {"w": ArrayType(dtype, ())}})
    found = [f for f in arrays_usable(replace(one, partition=columns)) if f.severity == "warn"]
    assert [("tasks.a.target" in f.what, "edge_classification" in f.remedy) for f in found] == (
        [(True, True)] if warned else []
    )


def test_a_task_without_seeds_is_named() -> None:
    tasks = {"kind": {"kind": "node_classification"}, "links": {"kind": "link_prediction"}}
    empty = job(tasks)
    nothing = replace(empty.partition, by_type={"_N": {"train": 0, "val": 0, "test": 0}})
    found = list(nodes_to_train_on(replace(empty, partition=nothing)))
    assert {f.severity for f in found} == {"error", "warn"}
    assert all(f.what.startswith("task kind: ") for f in found)


BUYS, BOUGHT, KNOWS = ("a", "buys", "b"), ("b", "bought", "a"), ("a", "knows", "a")
LINK = {"kind": "link_prediction"}
WEIGHT = {"kind": "edge_regression", "target": "w"}


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ({"etype": "buys"}, {"etype": "buys"}, True),
        ({"etype": "buys"}, {"etype": "buys", "split": {"val": 0.1, "test": 0.1}}, True),
        ({"etype": "buys"}, {"etype": "buys", "split": {"seed": 1}}, False),
        ({"etype": "buys"}, {"etype": "buys", "split": {"val": 0.2}}, False),
        ({"etype": "buys"}, {"etype": "knows", "split": {"val": 0.2}}, True),
        ({"etype": "buys", "reverse": "bought"}, {"etype": "bought"}, False),
        ({"etype": "bought"}, {"etype": "buys", "reverse": "bought"}, False),
        ({"etype": "knows", "reverse": "knows"}, {"etype": "known_by"}, True),
        ({"etype": "knows", "reverse": "known_by"}, {"etype": "known_by"}, True),
        (
            {"etype": "knows", "reverse": "known_by"},
            {"etype": "known_by", "split": {"seed": 1}},
            False,
        ),
    ],
)
def test_none_is_trained_on_what_another_is_tested_with(
    one: dict[str, Any], other: dict[str, Any], agree: bool
) -> None:
    column = {"w": ArrayType("float32", ())}
    edges = dict.fromkeys((BUYS, BOUGHT, KNOWS, ("a", "known_by", "a")), column)
    made = job({"link": {**LINK, **one}, "weight": {**WEIGHT, **other}})
    facts = replace(made.partition, edges=edges)
    found = list(splits_agree(replace(made, partition=facts)))
    assert [f.severity for f in found] == ([] if agree else ["error"])
    assert all("link and weight" in f.what for f in found)
    assert not list(splits_agree(replace(made, partition=facts, config=made.config.asking())))
    if not agree:  # masks cover all edges, or none
        masked = {e: {**column, "val_mask": ArrayType("bool", ())} for e in edges}
        own = [{k: v for k, v in given.items() if k != "split"} for given in (one, other)]
        made = job({"link": {**LINK, **own[0]}, "weight": {**WEIGHT, **own[1]}})
        there = replace(made, partition=replace(made.partition, edges=masked))
        assert not list(splits_agree(there))
