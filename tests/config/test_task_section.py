"""The section ``task``: what suits a kind, and what would be ignored."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.rules import changes, fixed
from raygnn.config.task import TASKS, LinkPrediction
from raygnn.errors import ConfigError
from tests.support.builders import read_task

JOB: dict[str, Any] = {
    "name": "task",
    "graph": {"format": "planted", "nodes": 100, "degree": 5, "classes": 3, "train": 0.5},
    "model": {"kind": "sage"},
}
OWN = "tests.support.own_losses"
LINKS: dict[str, Any] = {"kind": "link_prediction"}
ROWS: dict[str, Any] = {"embedding": {"dim": 8}}


@pytest.mark.parametrize(
    ("task", "model", "key"),
    [
        ({"kind": "node_classification", "etype": "x"}, {}, "task.etype"),
        ({"kind": "node_regression", "split": {"val": 0.2}}, {}, "task.split"),
        ({"kind": "node_classification", "exclude": "self"}, {}, "task.exclude"),
        ({"kind": "node_classification", "negatives": {"number": 3}}, {}, "task.negatives"),
        ({"kind": "edge_classification", "negatives": {"number": 3}}, {}, "task.negatives"),
        ({"kind": "edge_regression", "ntype": "x"}, {}, "task.ntype"),
        ({**LINKS, "target": "x"}, {}, "task.target"),
        ({**LINKS, "metric": "accuracy"}, {}, "task.metric"),
        ({"kind": "edge_regression", "metric": "mrr"}, {}, "task.metric"),
        ({"kind": "node_classification", "metric": "recall@0"}, {}, "task.metric"),
        ({"kind": "node_classification", "metric": "averageprecision"}, {}, "did you mean average"),
        ({"kind": "node_regression", "metric": f"{OWN}:mae"}, {}, "task.metric"),
        ({"kind": "node_classification", "metric": f"{OWN}:loss"}, {}, "another name"),
        ({"kind": "node_classification", "gamma": 1.0}, {}, "task.gamma"),
        ({"kind": "node_classification", "loss": "focal", "gamma": -1.0}, {}, "task.gamma"),
        ({"kind": "node_classification", "label_smoothing": 1.0}, {}, "task.label_smoothing"),
        ({"kind": "node_classification", "class_weights": [1, 0]}, {}, "task.class_weights"),
        ({"kind": "node_classification", "class_weights": "even"}, {}, "task.class_weights"),
        ({"kind": "node_regression", "class_weights": "balanced"}, {}, "task.class_weights"),
        (
            {"kind": "edge_classification", "loss": f"{OWN}:plain", "class_weights": [1, 2]},
            {},
            "task.class_weights",
        ),
        ({"kind": "node_classification", "labels": "multi", "metric": "f1"}, {}, "task.metric"),
        ({"kind": "node_classification", "loss": "mse"}, {}, "task.loss"),
        ({"kind": "edge_regression", "loss": "softmax"}, {}, "task.loss"),
        ({**LINKS, "loss": "l1"}, {}, "task.loss"),
        ({**LINKS, "margin": 2.0}, {}, "task.margin"),
        ({**LINKS, "loss": "bce", "margin": 2.0}, {"decoder": "dot"}, "task.margin"),
        ({**LINKS, "loss": "bce", "temperature": 2.0}, {}, "set task.loss to self_adversarial or"),
        ({**LINKS, "negatives": {"correct": True}}, {}, "task.negatives.correct"),
        (
            {**LINKS, "loss": "bpr", "negatives": {"kind": "in_batch", "correct": True}},
            {},
            "task.negatives.correct",
        ),
        (
            {**LINKS, "negatives": {"kind": "degree", "file": "x.csv", "correct": True}},
            {},
            "task.negatives.correct",
        ),
        (LINKS, {"kind": "lightgcn"}, "model.embedding"),
        (LINKS, {"kind": "lightgcn", "features": "age", **ROWS}, "model.features"),
        ({"kind": "node_classification"}, {"kind": "lightgcn", **ROWS}, "model.kind"),
        ({**LINKS, "exclude": "self", "reverse": "x"}, {}, "task.reverse"),
        ({**LINKS, "split": {"val": 0.6, "test": 0.4}}, {}, "task.split.val"),
        ({**LINKS, "negatives": {"kind": "in_batch", "number": 3}}, {}, "task.negatives.number"),
        ({**LINKS, "metric": "recall@0"}, {}, "task.metric"),
        ({**LINKS, "metric": "hits@20", "ranking": {"top": 0}}, {}, "task.ranking.top"),
        ({**LINKS, "ranking": {"top": 5, "candidates": 9}}, {}, "task.ranking"),
        ({**LINKS, "metric": "map@5", "ranking": {"candidates": 9}}, {}, "task.ranking"),
        ({"kind": "node_classification"}, {"decoder": "dot"}, "model.decoder"),
        ({"kind": "edge_classification"}, {"decoder": "dot"}, "model.decoder"),
        (LINKS, {"decoder": "dot", "relation": "r"}, "model.decoder"),
        (LINKS, {"decoder_features": "w"}, "model.decoder_features"),
        ({"kind": "node_classification"}, {"decoder_features": "w"}, "model.decoder_features"),
        ({"kind": "edge_classification"}, {"pair_history": True}, "model.pair_history"),
        (LINKS, {"pair_history": True, "decoder": "mlp"}, "model.pair_history"),
        ({**LINKS, "ranking": {"edges": 9}}, {}, "task.ranking.edges"),
        ({**LINKS, "ranking": {"candidates": "destinations"}}, {}, "task.ranking.candidates"),
        ({"kind": "node_classification"}, {"ages": {"born": 8}}, "model.ages"),
        (LINKS, {"decoder": "rotate", "hidden": 7}, "model.decoder"),
        (LINKS, {"kind": "none", "embedding": {"dim": 7}, "decoder": "complex"}, "model.decoder"),
    ],
)
def test_keys_that_do_not_suit_the_task_are_refused(
    task: dict[str, Any], model: dict[str, Any], key: str
) -> None:
    job = {**JOB, "task": task, "model": {**JOB["model"], **model}}
    with pytest.raises(ConfigError) as caught:
        load_config(job)
    assert key in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("val", "test", "message"),
    [
        ("2026-01-01T00:00", "2026-01-01T02:00+05:00", "begins at .*, after test"),
        ("2026-01-01", 1_800_000_000, "are neither two shares nor"),
        (1_800_000_000, "2026-01-01", "are neither two shares nor"),
        (20, 10, "begins at 20, after test at 10"),
        ("2026-01-01", "2025-12-31T23:30-01:00", None),  # half an hour after it
        ("2026-01-01", "2026-01-01", None),
    ],
)
def test_splits_in_time_begin_in_their_order(val: Any, test: Any, message: str | None) -> None:
    split = {"by": "time", "val": val, "test": test, "time": "at"}
    job = {**JOB, "task": {**LINKS, "split": split}}
    if message is None:
        load_config(job)
        return
    with pytest.raises(ConfigError, match=message):
        load_config(job)


@pytest.mark.parametrize(
    ("task", "metric", "loss"),
    [
        ({"kind": "node_regression"}, "mae", "mse"),
        ({"kind": "edge_classification"}, "accuracy", ""),
        ({"kind": "edge_regression", "loss": "l1", "metric": "r2"}, "r2", "l1"),
        ({"kind": "node_classification", "labels": "multi"}, "roc_auc", ""),
        ({"kind": "node_classification", "metric": "recall@100"}, "recall@100", ""),
        ({"kind": "node_classification", "metric": f"{OWN}:profit"}, "profit", ""),
        ({"kind": "node_regression", "loss": f"{OWN}:plain"}, "mae", f"{OWN}:plain"),
        (LINKS, "mrr", "softmax"),
        ({**LINKS, "metric": "hits@3", "loss": "margin", "margin": 2.0}, "hits@3", "margin"),
    ],
)
def test_default_metrics_and_losses(task: dict[str, Any], metric: str, loss: str) -> None:
    found = load_config({**JOB, "task": task}).task
    assert (found.chosen_metric, getattr(found, "chosen_loss", "")) == (metric, loss)


def test_lengths_of_lists_are_those_of_the_metric_and_those_named() -> None:
    """With times they are of all destinations."""
    for metric, top, tops in (
        (None, None, ()),
        ("mrr", 10, (10,)),
        ("recall@20", None, (20,)),
        ("ndcg@20", [50, 10], (10, 20, 50)),
    ):
        job = {**JOB, "task": {**LINKS, "metric": metric, "ranking": {"top": top}}}
        task = load_config(job).task
        assert isinstance(task, LinkPrediction)
        assert (task.tops, task.ranks_edges) == (tops, metric in (None, "mrr"))
        if tops:
            with pytest.raises(ConfigError, match="metrics per source and time rank all"):
                load_config({**job, "sampling": {"time": {"edges": "t"}}})


def test_a_relation_may_be_the_encoders_alone() -> None:
    model = {**JOB["model"], "kind": "rgcn", "decoder": "dot", "relation": "r"}
    assert load_config({**JOB, "task": LINKS, "model": model}).model.relation == "r"


def test_every_kind_has_metrics_and_a_unit() -> None:
    units = {kind: read_task(kind=kind).unit for kind in TASKS}
    assert all(kind.startswith((unit, "link")) for kind, unit in units.items())
    assert all(read_task(kind=kind).chosen_metric for kind in TASKS)


def test_a_section_that_comes_or_goes_is_a_change() -> None:
    """Another split would train on the test set of the first."""
    without = load_config({**JOB, "task": LINKS})
    split = load_config({**JOB, "task": {**LINKS, "split": {"seed": 5}}})
    assert changes(fixed(without.to_dict()), without) == []
    assert changes(fixed(split.to_dict()), split) == []
    assert changes(fixed(without.to_dict()), split) == ["task.split was null and is not"]
    assert changes(fixed(split.to_dict()), without) == ["task.split is null and was not"]


def test_bpr_filters_its_negatives() -> None:
    """Unless it is told otherwise; other losses do if they are."""
    task: Any = read_task(**LINKS, loss="bpr")
    assert task.filters
    task = read_task(**LINKS, loss="bpr", negatives={"filtered": False})
    assert not task.filters
    assert not read_task(**LINKS).filters  # type: ignore[union-attr]
    assert read_task(**LINKS, negatives={"filtered": True}).filters  # type: ignore[union-attr]
