"""The section ``model.embedding``, and ``model.kind: none``."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.rules import changes, fixed
from raygnn.errors import ConfigError

JOB: dict[str, Any] = {
    "name": "a",
    "graph": {"format": "planted", "nodes": 1000},
    "model": {"kind": "sage", "embedding": {"dim": 8}},
}


def test_spellings() -> None:
    config = load_config(JOB)
    assert config.model.embedding is not None
    assert config.model.embedding.bound == (3 / 8) ** 0.5
    assert load_config(config.to_dict()) == config
    wide = load_config(JOB, ["model.embedding.dim=16", "model.embedding.ntypes=[a, b]"])
    assert wide.model.embedding is not None
    assert (wide.model.embedding.dim, wide.model.embedding.ntypes) == (16, ("a", "b"))
    plain = {**JOB, "model": {"kind": "sage"}}
    assert load_config(plain, ["model.embedding.dim=4"]).model.embedding is not None
    told = changes(fixed(config.to_dict()), wide)
    assert told[0] == "model.embedding.dim was 8 and is 16"


def test_a_model_without_layers() -> None:
    model = load_config({**JOB, "model": {"kind": "none", "embedding": {"dim": 8}}}).model
    assert model.depth == 0
    assert load_config(JOB).model.depth == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"kind": "sage", "embedding": {}}}, r"model\.embedding\.dim"),
        ({"model": {"kind": "sage", "embedding": {"dim": 0}}}, r"model\.embedding\.dim"),
        (
            {"model": {"kind": "sage", "embedding": {"dims": 8}}},
            r"did you mean model\.embedding\.dim\?",
        ),
        (
            {"model": {"kind": "sage", "embedding": {"dim": 8, "optimizer": "sgd"}}},
            r"model\.embedding\.optimizer",
        ),
        (
            {"model": {"kind": "sage", "embedding": {"dim": 8, "ntypes": []}}},
            r"model\.embedding\.ntypes",
        ),
        (
            {"model": {"kind": "sage", "embedding": {"dim": 8, "ntypes": ["a", "a"]}}},
            r"expected a list of different names",
        ),
        ({"train": {"ema": 0.9}}, r"train\.ema.*every embedding row"),
        (
            {"task": {"kind": "graph_regression"}, "graph": {"format": "graphs", "path": "/tmp"}},
            r"model\.embedding",
        ),
        ({"model": {"kind": "none", "layers": 3}}, r"model\.layers: unknown key.*kind is none"),
        ({"model": {"kind": "none", "hidden": 3}}, r"model\.hidden: unknown key.*kind is none"),
        ({"model": {"kind": "none"}, "sampling": {"fanout": [5]}}, r"sampling\.fanout.*ignored"),
        ({"model": {"kind": "none"}, "sampling": {"replace": True}}, r"sampling\.replace.*ignored"),
        ({"model": {"kind": "none", "args": {"a": 1}}}, r"model\.args"),
    ],
)
def test_contradictory_keys_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        load_config({**JOB, **sections})
