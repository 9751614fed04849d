"""The section ``guard``, and keys that whole graphs do not use."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.errors import ConfigError

JOB: dict[str, Any] = {
    "name": "a",
    "graph": {"format": "planted", "nodes": 1000},
    "model": {"kind": "gcn"},
}


@pytest.mark.parametrize("given", ["dep", 3, {"mode": "strict"}, {"every": 0}, {"skip": 1}])
def test_invalid_values_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="guard"):
        load_config({**JOB, "guard": given})


def test_the_former_short_form_names_the_keys() -> None:
    with pytest.raises(ConfigError, match="give its keys: mode, every, nan_steps"):
        load_config({**JOB, "guard": "deep"})


@pytest.mark.parametrize(("given", "mode"), [(True, "on"), (False, "off")])
def test_modes_as_yaml_1_1_reads_them(given: bool, mode: str) -> None:
    assert load_config({**JOB, "guard": {"mode": given}}).guard.mode == mode


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"task": {"kind": "graph_classification"}}, "task.kind"),
        (
            {"graph": {"format": "graphs", "path": "/tmp"}},
            "task.kind",
        ),
        ({"task": {"metric": "mae"}}, "task.metric"),
        ({"task": {"loss": "l1"}}, "task.loss"),
    ],
)
def test_ignored_keys_are_errors(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config({**JOB, **sections})


@pytest.mark.parametrize("sampling", [{"fanout": [5, 5]}, {"cache": 0.5}, {"replace": True}])
def test_whole_graphs_are_not_sampled(sampling: dict[str, Any]) -> None:
    graph = {"format": "dataset", "dataset": "tests.support.datasets:RandomGraphs"}
    job = {**JOB, "graph": graph, "task": {"kind": "graph_regression", "metric": "rmse"}}
    assert load_config(job).task.chosen_metric == "rmse"
    with pytest.raises(ConfigError, match="reads whole graphs"):
        load_config({**job, "sampling": sampling})
