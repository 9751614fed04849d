"""The JSON Schema that editors use."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from raygnn.config.graph import GraphConfig
from raygnn.config.load import json_schema, load_config
from raygnn.config.schema import SECTIONS, Config
from raygnn.config.values import Section, classes_of

JOB: dict[str, Any] = {
    "name": "a",
    "graph": {"format": "planted", "nodes": 1000},
    "model": {"kind": "gcn"},
}


def test_it_is_a_schema() -> None:
    schema = json_schema()
    assert "2020-12" in schema["$schema"]
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "section",
    dict.fromkeys([Config, *chain(*SECTIONS.values()), *classes_of(GraphConfig).values()]),
)
def test_every_key_is_described(section: type[Section]) -> None:
    assert section.__doc__
    for name in section.model_fields:
        assert section.meaning(name), name
        assert section.meaning(name).endswith((".", ")")), name


def test_valid_jobs_are_accepted() -> None:
    validator = Draft202012Validator(json_schema())
    validator.validate(JOB)
    validator.validate(load_config(JOB).to_dict())
    validator.validate({**JOB, "comm": {"timeout": 30}, "partition": {"parts": 4}})


WRONG: list[dict[str, Any]] = [
    {**JOB, "trian": {}},
    {**JOB, "train": {"lrr": 1}},
    {**JOB, "train": {"lr": "fast"}},
    {**JOB, "comm": {"timeout": "soon"}},
    {**JOB, "graph": {"format": "tables"}},
    {**JOB, "model": {"kind": "gin", "out_heads": 2}},
    {**JOB, "model": {"kind": "gin", "aggregator": "sum"}},
    {**JOB, "model": {"kind": "torch.nn:Linear", "readout": "max"}},
    {**JOB, "model": {"kind": "none", "layers": 1}},
    {**JOB, "task": {"ntype": "a", "etype": "b"}},
    {**JOB, "partition": {"parts": "all"}},
    {"name": "a"},
]


def test_keys_of_other_kinds_at_their_defaults_are_left_out() -> None:
    """Configs that older versions recorded contain such keys."""
    plain = load_config(JOB)
    older = {
        "model": {"kind": "gcn", "heads": 8, "attn_dropout": None, "args": {}},
        "task": {"kind": "node_classification", "etype": None, "exclude": "reverse", "loss": None},
    }
    older["task"]["negatives"] = {"kind": "uniform", "number": 512, "ends": "both"}
    assert load_config({**JOB, **older}) == plain
    assert not {"heads", "etype", "negatives"} & set(str(plain.to_dict()).split("'"))


@pytest.mark.parametrize("job", WRONG)
def test_invalid_jobs_are_refused(job: dict[str, Any]) -> None:
    assert not Draft202012Validator(json_schema()).is_valid(job)
