"""The edge type that a task predicts, chosen from those of a graph."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.graph.data import EdgeSplit, EdgeTarget, EdgeType
from raygnn.preflight.partition_facts import edge_target

BUYS: EdgeType = ("user", "buys", "item")
BY: EdgeType = ("item", "by", "user")
ALSO: EdgeType = ("item", "also", "item")
MASKS: dict[str, Any] = {"train_mask": 0, "val_mask": 0, "test_mask": 0}
JOB: dict[str, Any] = {
    "name": "edges",
    "graph": {"format": "planted", "nodes": 100, "degree": 5, "classes": 3, "train": 0.5},
    "model": {"kind": "sage"},
}


def found(
    arrays: dict[EdgeType, Any],
    model: dict[str, Any] | None = None,
    reverses: dict[EdgeType, EdgeType] | None = None,
    **task: Any,
) -> Any:
    task = {"kind": "link_prediction", **task}
    job = {**JOB, "task": task, "model": {"kind": "sage", **(model or {})}}
    return edge_target(load_config(job), arrays, reverses)


def test_the_only_type_and_the_one_with_masks() -> None:
    shares = (0.1, 0.1)
    assert found({ALSO: {}}) == EdgeTarget(EdgeSplit(ALSO, ALSO, shares))
    assert found({BUYS: {}}) == EdgeTarget(EdgeSplit(BUYS, None, shares))
    arrays = {BUYS: MASKS, BY: {}, ALSO: {}}
    assert found(arrays) == EdgeTarget(EdgeSplit(BUYS))
    assert found(arrays, reverse="by") == EdgeTarget(EdgeSplit(BUYS, BY))
    wanted = EdgeSplit(BY, None, (0.3, 0.1), 4)
    split = {"val": 0.3, "seed": 4}
    assert found(arrays, etype="item:by:user", split=split) == EdgeTarget(wanted)
    assert found({ALSO: MASKS}, exclude="self") == EdgeTarget(EdgeSplit(ALSO))


def test_reverses_that_were_made() -> None:
    """Reverse edges that raygnn added are hidden with their originals, and are not predicted by
    default."""
    back: EdgeType = ("item", "rev_also", "item")
    arrays = {ALSO: MASKS, back: MASKS}
    assert found(arrays, reverses={ALSO: back}) == EdgeTarget(EdgeSplit(ALSO, back))
    assert found(arrays, reverses={ALSO: back}, exclude="self") == EdgeTarget(EdgeSplit(ALSO))
    chosen = found(arrays, reverses={ALSO: back}, etype="rev_also")
    assert chosen == EdgeTarget(EdgeSplit(back, ALSO))


def test_relations() -> None:
    arrays = {ALSO: {**MASKS, "relation": 0, "kind": 0}}
    assert found(arrays).relation == "relation"
    assert found(arrays, {"relation": "kind"}).relation == "kind"
    assert found(arrays, {"decoder": "dot"}).relation is None
    encoder = {"kind": "rgcn", "decoder": "dot", "relation": "kind"}
    assert found(arrays, encoder).relation is None


def test_a_predicted_relation_is_no_input() -> None:
    arrays = {ALSO: {**MASKS, "relation": 0, "kind": 0}}
    task = {"kind": "edge_classification", "target": "relation"}
    assert found(arrays, **task).relation is None
    assert found(arrays, {"relation": "kind"}, **task).relation == "kind"


@pytest.mark.parametrize(
    ("arrays", "model", "task", "what"),
    [
        ({BUYS: {}, ALSO: {}}, {}, {}, "is not clear"),
        ({BUYS: MASKS, ALSO: MASKS}, {}, {}, "is not clear"),
        ({BUYS: {}}, {}, {"etype": "sells"}, "no edge type is called"),
        (
            {BUYS: {}, ("item", "buys", "item"): {}},
            {},
            {"etype": "buys"},
            "more than one edge type",
        ),
        ({BUYS: MASKS}, {}, {"split": {"val": 0.2}}, "task.split would be ignored"),
        ({BUYS: {}, ALSO: {}}, {}, {"etype": "buys", "reverse": "also"}, "is no edge type from"),
        ({BUYS: {}}, {"relation": "kind"}, {}, "no array 'kind'"),
        ({ALSO: {}}, {"kind": "none"}, {}, "no weights"),
        ({BUYS: {}}, {}, {"kind": "edge_regression", "target": "y"}, "no array 'y'"),
        (
            {BUYS: {"kind": 0}},
            {"relation": "kind"},
            {"kind": "edge_classification", "target": "kind"},
            "is the target (task.target)",
        ),
        (
            {BUYS: {"kind": 0, "w": 0}},
            {"decoder_features": ["w", "kind"]},
            {"kind": "edge_classification", "target": "kind"},
            "is the target (task.target)",
        ),
        (
            {BUYS: {"kind": 0}},
            {"decoder_features": "w"},
            {"kind": "edge_classification", "target": "kind"},
            "no array 'w' (model.decoder_features)",
        ),
    ],
)
def test_invalid_edge_tasks(arrays: Any, model: Any, task: Any, what: str) -> None:
    answer = found(arrays, model, **task)
    assert isinstance(answer, tuple)
    assert what in answer[0]
    assert answer[1]
