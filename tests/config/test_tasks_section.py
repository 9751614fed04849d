"""The section ``tasks``: several tasks on one graph."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from raygnn.config.load import json_schema, load_config
from raygnn.config.rules import changes, fixed
from raygnn.errors import ConfigError

JOB: dict[str, Any] = {
    "name": "tasks",
    "graph": {"format": "planted", "nodes": 100, "degree": 5, "classes": 3, "train": 0.5},
    "model": {"kind": "sage"},
}
KIND: dict[str, Any] = {"kind": "node_classification"}
LINKS: dict[str, Any] = {"kind": "link_prediction", "decoder": "distmult", "weight": 0.5}
TWO: dict[str, Any] = {"kind": KIND, "links": LINKS}


def test_each_task_has_a_configuration_of_its_own() -> None:
    config = load_config({**JOB, "tasks": TWO}, ["tasks.kind.metric=f1"])
    assert config.metric == "kind/f1"  # of the first
    own = config.by_task
    assert list(own) == ["kind", "links"]
    assert own["kind"].task.kind == "node_classification"
    assert own["kind"].model.decoder is None
    assert own["links"].task.chosen_metric == "mrr"
    assert own["links"].model.decoder == "distmult"
    assert own["links"].tasks is None
    assert config.needs_masks
    assert not load_config({**JOB, "tasks": {"links": LINKS}}).needs_masks
    again = load_config(config.to_dict())
    assert again == config
    assert list(again.tasks or ()) == list(config.tasks or ())
    Draft202012Validator(json_schema()).validate(config.to_dict())


def test_a_single_task_is_the_config_itself() -> None:
    config = load_config(JOB)
    assert config.by_task == {"": config}
    assert config.metric == "accuracy"


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"tasks": {}}, "tasks"),
        ({"tasks": {"a b": KIND}}, "tasks.a b"),
        ({"tasks": {"-a": KIND}}, "expected a letter, then letters"),
        ({"tasks": {"a": None}}, "tasks.a"),
        ({"tasks": {"a": {"kimd": 1}}}, "did you mean tasks.a.kind"),
        (
            {"tasks": {"a": {"kind": "link_prediction", "negatives": {"numbr": 1}}}},
            "did you mean tasks.a.negatives.number",
        ),
        ({"tasks": {"a": {**LINKS, "weight": 0}}}, "tasks.a.weight"),
        ({"tasks": {"a": {**LINKS, "batch_factor": -1}}}, "tasks.a.batch_factor"),
        ({"tasks": {"a": {"kind": "graph_classification"}}}, "tasks.a.kind"),
        ({"tasks": {"a": {**KIND, "loss": "mse"}}}, "tasks.a.loss: expected cross_entropy"),
        ({"tasks": {"a": {**KIND, "decoder": "dot"}}}, "remove tasks.a.decoder"),
        ({"tasks": {"a": {**KIND, "etype": "e"}}}, "tasks.a.etype"),
        ({"tasks": {"a": {**KIND, "metric": "mrr"}}}, "tasks.a.metric"),
        (
            {"tasks": {"a": {**LINKS, "decoder": "rotate"}}, "model": {"hidden": 7}},
            "tasks.a.decoder",
        ),
        ({"tasks": {"a": KIND}, "model": {"decoder": "dot"}}, "no task is on edges"),
        ({"tasks": TWO, "task": {"metric": "f1"}}, "task: task would be ignored"),
        ({"tasks": TWO, "model": {"kind": "none"}}, "model.kind"),
        ({"tasks": TWO, "graph": {"format": "graphs", "path": "x"}}, "tasks need one graph"),
        ({"tasks": {"a": KIND}, "model": {"relation": "r"}}, "model.relation"),
    ],
)
def test_invalid_tasks_are_refused(changed: dict[str, Any], key: str) -> None:
    model = {**JOB["model"], **changed.pop("model", {})}
    with pytest.raises(ConfigError) as caught:
        load_config({**JOB, "model": model, **changed})
    assert key in str(caught.value)
    assert str(caught.value).count("\n") < 12


def test_a_key_that_one_task_uses_is_accepted() -> None:
    """One task on edges reads a key of the model that the other, on nodes, does not."""
    load_config({**JOB, "tasks": TWO, "model": {"kind": "sage", "relation": "r"}})
    tasks = {"a": KIND, "b": {"kind": "link_prediction"}}
    config = load_config({**JOB, "tasks": tasks, "model": {"kind": "sage", "decoder": "mlp"}})
    assert config.of("b").model.decoder == "mlp"


def test_tasks_come_goes_and_change_are_changes() -> None:
    both = load_config({**JOB, "tasks": TWO})
    before = fixed(both.to_dict())
    assert changes(before, load_config({**JOB, "tasks": TWO}, ["train.epochs=9"])) == []
    for other, told in (
        (load_config(JOB), "tasks was"),
        (load_config({**JOB, "tasks": {"kind": KIND}}), "tasks was"),
        (load_config({**JOB, "tasks": dict(reversed(TWO.items()))}), "tasks was"),
        (
            load_config({**JOB, "tasks": TWO}, ["tasks.links.weight=2"]),
            "tasks.links.weight was 0.5",
        ),
    ):
        found = changes(before, other)
        assert len(found) == 1
        assert found[0].startswith(told)
    assert changes(fixed(load_config(JOB).to_dict()), both)
    old = {key: value for key, value in fixed(load_config(JOB).to_dict()).items() if key != "tasks"}
    assert changes(old, load_config(JOB)) == []  # of a version without them
