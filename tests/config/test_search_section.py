"""The section ``search``: spaces, their checks, and the sampled settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.rules import changes, fixed
from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from raygnn.search.run_search import tune
from raygnn.search.space import metric_of, sample, speed_search, trial_config

JOB: dict[str, Any] = {
    "name": "a",
    "graph": {"format": "planted", "nodes": 1000},
    "model": {"kind": "gcn", "layers": 2},
}
SPACE: dict[str, Any] = {
    "train.lr": {"loguniform": [1e-4, 0.1]},
    "model.dropout": {"uniform": [0, 0.6]},
    "model.hidden": {"choice": [16, 32]},
    "train.epochs": {"randint": [1, 4]},
}


def config(space: Any, seed: int = 0, **search: Any) -> Config:
    return load_config(JOB, search={"space": space, **search}, train={"seed": seed})


def test_samples_are_valid_and_depend_on_the_seed_alone() -> None:
    found = sample(config(SPACE))
    assert len(found) == 20
    assert found == sample(config(SPACE, trials=20))
    assert found[:5] == sample(config(SPACE, trials=5))
    assert found != sample(config(SPACE, seed=1))
    for one in found:
        assert list(one) == list(SPACE)
        assert 1e-4 <= one["train.lr"] <= 0.1
        assert 0 <= one["model.dropout"] <= 0.6
        assert one["model.hidden"] in (16, 32)
        assert one["train.epochs"] in (1, 2, 3)
    assert sum(one["train.lr"] < 10**-2.5 for one in found) > 4  # uniform in the logarithm


def test_a_grid_has_all_combinations() -> None:
    space = {"model.hidden": {"choice": [16, 32]}, "train.lr": {"choice": [0.1, 0.01, 0.001]}}
    found = sample(config(space, algorithm="grid"))
    assert [tuple(one.values()) for one in found] == [
        (hidden, lr) for hidden in (16, 32) for lr in (0.1, 0.01, 0.001)
    ]


def test_a_trial_is_an_ordinary_configuration(tmp_path: Path) -> None:
    base = config(SPACE)
    found = trial_config(base, {"train.lr": 0.5}, (tmp_path, "t001"), tmp_path / "p")
    assert (found.train.lr, found.search, found.name) == (0.5, None, "t001")
    assert (found.storage, found.partition.path) == (tmp_path, tmp_path / "p")
    assert found.model == base.model


def test_a_resume_may_change_the_section() -> None:
    assert changes(fixed(load_config(JOB).to_dict()), config(SPACE)) == []


@pytest.mark.parametrize(
    ("space", "search", "where", "text"),
    [
        ({}, {}, "search.space", "at least 1"),
        (
            {"model.hidden": {"choice": [16]}},
            {},
            "search.space.model.hidden.choice",
            "fewer than two values",
        ),
        (
            {"train.lr": {"uniform": [0.1, 0.1]}},
            {},
            "search.space.train.lr.uniform",
            "fewer than two values",
        ),
        ({"model.layers": {"randint": [2, 3]}}, {}, "randint", "fewer than two values"),
        ({"train.lr": {"uniform": [0.2, 0.1]}}, {}, "search.space.train.lr.uniform", "empty range"),
        ({"train.lr": {"loguniform": [0, 0.1]}}, {}, "loguniform", "logarithm of 0"),
        ({"train.lr": {}}, {}, "search.space.train.lr", "expected one of"),
        ({"train.lr": {"uniform": [0, 1], "choice": [1, 2]}}, {}, "train.lr", "got 2"),
        ({"train.lr": {"normal": [0, 1]}}, {}, "search.space.train.lr", "unknown key"),
        ({"graph.nodes": {"randint": [9, 99]}}, {}, "graph.nodes", "cannot differ"),
        ({"train.lr": {"uniform": [0, 1]}}, {"algorithm": "grid"}, "train.lr", "needs a choice"),
        (
            {"train.lr": {"choice": [0.1, 0.2]}},
            {"algorithm": "grid", "trials": 5},
            "search.trials",
            "would be ignored",
        ),
        ({"train.lr": {"choice": [0.1, 0.2]}}, {"trials": 20_000}, "search", "more than 10,000"),
    ],
)
def test_bad_sections(space: Any, search: Any, where: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(space, **search)
    assert where in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("space", "where", "text"),
    [
        ({"model.hiden": {"choice": [16, 32]}}, "model.hiden", "did you mean"),
        ({"model.hidden": {"choice": [16, "wide"]}}, "model.hidden", "expected a whole number"),
        ({"model.dropout": {"uniform": [0, 1.5]}}, "model.dropout", "model.dropout=1.5"),
        ({"model.layers": {"choice": [2, 3]}}, "model.layers", "fanouts"),
    ],
)
def test_values_are_checked_as_the_configuration_is(space: Any, where: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sample(config(space))
    assert caught.value.where == f"search.space.{where}"
    assert text in str(caught.value)


def test_metrics() -> None:
    assert metric_of(config(SPACE)) == ("val/accuracy", "max")
    assert metric_of(config(SPACE, metric="val/loss")) == ("val/loss", "min")
    with pytest.raises(ConfigError, match="did you mean val/accuracy") as caught:
        metric_of(config(SPACE, metric="val/acuracy"))
    assert caught.value.where == "search.metric"
    with pytest.raises(ConfigError, match="no section search"):
        sample(load_config(JOB))


def test_a_search_for_speed_begins_with_the_own_values() -> None:
    found = speed_search(load_config(JOB, sampling={"prefetch": 3}, search={"space": SPACE}))
    assert (found.name, found.train.max_steps) == ("a-speed", 200)
    assert metric_of(found) == ("seeds_per_second", "max")
    first, *others = sample(found)
    assert first["sampling.prefetch"] == 3
    assert first["comm.bucket_cap_mb"] == 25
    assert len(others) == 11
    assert {one["sampling.prefetch"] for one in others} <= {1, 2, 4, 8}
    assert speed_search(load_config(JOB, train={"max_steps": 9})).train.max_steps == 9


def test_a_search_for_speed_leaves_out_what_the_job_cannot_use() -> None:
    found = speed_search(load_config(Path(__file__).parents[2] / "jobs/mutag-gin.yaml")).search
    assert found is not None
    assert "sampling.topology" not in found.space
    assert "comm.overlap" in found.space


def test_a_search_needs_a_directory() -> None:
    given = {**JOB, "storage": "s3://bucket/runs", "search": {"space": SPACE}}
    with pytest.raises(ConfigError, match="not in an object store") as caught:
        tune(given, display=False)
    assert caught.value.where == "storage"


def test_optuna_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(config(SPACE, algorithm="optuna")) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Optuna is not installed"):
        sample(config(SPACE, algorithm="optuna"))
