"""Reading YAML: values, lines, bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.yaml_text import MAX_VALUES, read_yaml, write_yaml
from raygnn.errors import ConfigError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abcdef<=~", min_size=1, max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_are_read_back(value: Any) -> None:
    text = write_yaml(value)
    assert read_yaml(text, "text")[0] == value
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "\u2029"])
def test_odd_ends_of_lines_are_kept(text: str) -> None:
    assert read_yaml(write_yaml({"a": text, "b": "ü"}), "text")[0] == {"a": text, "b": "ü"}


@pytest.mark.parametrize("text", ["1e3", "0o7", "1_0", "0x1", "yes", "12:30", "2024-01-01", ".5"])
def test_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert write_yaml([text]) == f"- '{text}'\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("off", "off"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-1", -1),
        ("1_000", 1000),
        ("1__0", "1__0"),
        ("1e3", 1000.0),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("e3", "e3"),
        (".", "."),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = read_yaml(f"a: {text}", "text")[0]["a"]
    assert read == value
    assert type(read) is type(value)


def test_not_a_number() -> None:
    assert math.isnan(read_yaml("[.nan, .NaN]", "text")[0][1])


def test_lines() -> None:
    text = "# first\nmodel:\n  kind: gcn\nlist:\n  - a: 1\n  - b: 2\n"
    assert read_yaml(text, "text")[1] == {
        ("model",): 2,
        ("model", "kind"): 3,
        ("list",): 4,
        ("list", 0, "a"): 5,
        ("list", 1, "b"): 6,
    }


def test_aliases_are_copies() -> None:
    value = read_yaml("a: &x {k: [1]}\nb: *x\n", "text")[0]
    assert value == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert value["a"] is not value["b"]


def test_many_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_VALUES} values"):
        read_yaml("[" + "1," * (MAX_VALUES + 1) + "]", "text")


@pytest.mark.parametrize(
    "tag", ["!!binary aGk=", "!!timestamp 2024-01-01", "!!set {a}", "!!omap [a: 1]", "!x a"]
)
def test_tags_are_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match="tags are not allowed"):
        read_yaml(f"a: {tag}", "text")
