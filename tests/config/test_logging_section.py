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
    assert load({}).logging.loggers == ("tensorboard", "csv")
    assert load({}).logging.prometheus
    config = load({}, "logging.loggers=[wandb]", "logging.wandb.project=graphs")
    assert config.logging.wandb == {"project": "graphs"}
    assert load_config(config.to_dict()) == config
    assert load({"loggers": []}).logging.loggers == ()


@pytest.mark.parametrize(
    ("logging", "key", "said"),
    [
        ({"loggers": ["tensorbord"]}, "loggers", "expected 'tensorboard'"),
        ({"loggers": ["csv", "csv"]}, "loggers", "named once"),
        ({"mlflow": {"run_name": "a"}}, "mlflow", "add mlflow to logging.loggers"),
        ({"wandb": {"api_key": "a"}}, "wandb.api_key", "WANDB_API_KEY"),
        ({"wandb": {"settings": {"token": "a"}}}, "wandb.settings", "'token' looks like a secret"),
        ({"wandb": {"settings": [{"token": "a"}]}}, "wandb.settings", "'token' looks like"),
        ({"mlflow": {"tracking_uri": "http://u:p@host"}}, "mlflow.tracking_uri", "secret"),
        ({"wandb": {"id": "a"}}, "wandb.id", "set by raygnn"),
        ({"mlflow": {"save_dir": "a"}}, "mlflow.save_dir", "set by raygnn"),
    ],
)
def test_what_is_refused(logging: dict[str, Any], key: str, said: str) -> None:
    if "loggers" not in logging and said != "add mlflow to logging.loggers":
        logging = {"loggers": ["mlflow", "wandb"], **logging}
    with pytest.raises(ConfigError) as refused:
        load(logging)
    assert f"logging.{key}" in str(refused.value)
    assert said in str(refused.value)
    assert "u:p" not in str(refused.value)


def test_a_resumed_run_may_log_elsewhere() -> None:
    assert changes(fixed(load({}).to_dict()), load({"loggers": [], "prometheus": False})) == []
