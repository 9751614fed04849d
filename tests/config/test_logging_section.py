"""The section `logging`: names of loggers, their arguments, and no secrets."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.rules import changes, fixed
from raygnn.config.schema import Config
from raygnn.errors import ConfigError


def load(logging: dict[str, Any], *overrides: str) -> Config:
    job = {"name": "a", "graph": {"format": "planted", "nodes": 999}, "model": {"kind": "gcn"}}
    return load_config({**job, "logging": logging}, overrides)


def test_defaults_and_overrides() -> None:
    assert load({}).logging.loggers == {"tensorboard": {}}
    config = load({}, "logging.loggers={wandb: {project: graphs}}")
    assert config.logging.loggers == {"wandb": {"project": "graphs"}}
    assert load_config(config.to_dict()) == config
    assert load({"loggers": []}).logging.loggers == {}


@pytest.mark.parametrize(
    ("loggers", "key", "said"),
    [
        (["tensorbord"], "loggers", "expected 'tensorboard'"),
        (["wandb", "wandb"], "loggers", "each name once"),
        ({"tensorboard": {"name": "a"}}, "loggers.tensorboard", "accepts no arguments"),
        ({"wandb": {"api_key": "a"}}, "loggers.wandb.api_key", "WANDB_API_KEY"),
        (
            {"wandb": {"settings": {"token": "a"}}},
            "loggers.wandb.settings",
            "'token' looks like a secret",
        ),
        ({"wandb": {"settings": [{"token": "a"}]}}, "loggers.wandb.settings", "'token' looks like"),
        ({"mlflow": {"tracking_uri": "http://u:p@host"}}, "loggers.mlflow.tracking_uri", "secret"),
        ({"wandb": {"id": "a"}}, "loggers.wandb.id", "set by raygnn"),
        ({"mlflow": {"save_dir": "a"}}, "loggers.mlflow.save_dir", "set by raygnn"),
    ],
)
def test_invalid_loggers_are_refused(loggers: Any, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load({"loggers": loggers})
    assert f"logging.{key}" in str(refused.value)
    assert said in str(refused.value)
    assert "u:p" not in str(refused.value)


def test_a_resumed_run_may_log_elsewhere() -> None:
    assert changes(fixed(load({}).to_dict()), load({"loggers": []})) == []
