"""The section ``train.schedule``, and keys that would be ignored."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.rules import changes, fixed
from raygnn.config.schema import ScheduleConfig
from raygnn.errors import ConfigError

JOB: dict[str, Any] = {
    "name": "a",
    "graph": {"format": "planted", "nodes": 1000},
    "model": {"kind": "gcn"},
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kind": "cosine"}, ScheduleConfig(kind="cosine")),
        ({}, ScheduleConfig()),
        ({"warmup": 7}, ScheduleConfig(warmup=7)),
        ({"warmup": 0.25}, ScheduleConfig(warmup=0.25)),
    ],
)
def test_spellings(given: Any, expected: ScheduleConfig) -> None:
    config = load_config({**JOB, "train": {"schedule": given}})
    assert config.train.schedule == expected
    assert load_config(config.to_dict()) == config


def test_from_the_command_line() -> None:
    assert load_config(JOB, ["train.schedule.warmup=0.1"]).train.schedule.warmup == 0.1


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"schedule": {"kind": "cosin"}}, r"train\.schedule\.kind.*did you mean cosine"),
        ({"schedule": {"warmpu": 3}}, r"train\.schedule\.warmpu.*did you mean train\.schedule"),
        ({"schedule": {"warmup": 0}}, r"schedule\.warmup.*whole number of steps, or a share"),
        ({"schedule": {"warmup": 1.0}}, r"train\.schedule\.warmup"),
        ({"schedule": {"every": 5}}, r"kind is constant.*to step"),
        ({"schedule": {"kind": "cosine", "gamma": 0.5}}, r"train\.schedule\.gamma"),
        ({"schedule": {"kind": "step", "floor": 0.5}}, r"train\.schedule\.floor"),
        ({"schedule": {"kind": "step", "patience": 3}}, r"train\.schedule\.patience"),
        ({"momentum": 0.9}, r"would be ignored: train\.optimizer is adam"),
        ({"ema": 1.0}, r"train\.ema"),
    ],
)
def test_invalid_or_ignored_keys_are_refused(train: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        load_config({**JOB, "train": train})


def test_other_sections() -> None:
    own = {"kind": "tests.support.own_models:DglSage", "recompute": True}
    with pytest.raises(ConfigError, match=r"model\.recompute: unknown key"):
        load_config({**JOB, "model": own})


def test_keys_that_may_change_in_a_resume() -> None:
    began = fixed(load_config(JOB).to_dict())
    free = {"train": {"patience": 3, "min_delta": 0.1}, "sampling": {"prefetch": 3}}
    assert not changes(began, load_config({**JOB, **free}))
    now = load_config({**JOB, "train": {"schedule": {"kind": "cosine"}, "ema": 0.5}})
    assert [text.split()[0] for text in changes(began, now)] == ["train.schedule.kind", "train.ema"]
