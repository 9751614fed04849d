"""Words of tables keep the numbers of the training, whatever other words are there."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError, InputError
from raygnn.graph.data import GraphData
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.sources import digest, load_graph
from tests.support.graphs import partition_graph
from tests.support.tables_builder import SPEC, write_shop

BUCKET = {"column": "brand", "unknown": "bucket"}
BOUGHT = ("user", "bought", "item")


def described(brand: Any = "brand", **edges: Any) -> dict[str, Any]:
    """Return the shop's description with the category `brand`, and keys for its edges."""
    spec = copy.deepcopy(SPEC)
    spec["nodes"]["item"]["categories"] = {"brand": brand}
    spec["edges"]["user:bought:item"] |= edges
    return spec


def brands(*values: Any) -> dict[str, Any]:
    """Return items of these brands."""
    num = len(values)
    return {"sku": [1001 + i for i in range(num)], "price": [1.0] * num, "brand": [*values]}


def trained(directory: Path, kind: str = "csv", spec: Any = None, **tables: Any) -> Path:
    """Return the manifest of the shop's partition, whose vocabulary other partitions use."""
    directory.mkdir()
    data = load_graph(write_shop(directory, kind, spec or described(), **tables))
    place = directory / "partition"
    partition_graph(data, place, 1)
    return place / "raygnn.json"


def load(
    directory: Path, vocabulary: Path, kind: str = "csv", spec: Any = None, **tables: Any
) -> GraphData:
    directory.mkdir(exist_ok=True)
    graph = write_shop(directory, kind, spec or described(), **tables)
    graph = graph.model_copy(update={"vocabulary": vocabulary})
    return load_graph(graph, needs_masks=False, trains=False)


def test_fewer_nodes_than_classes(tmp_path: Path) -> None:
    """A class may have a number as large as the table, or larger."""
    classes = {"class": ["a", "b", "c"], "fold": ["train"] * 3}
    old = trained(tmp_path / "old", users=classes)
    users = {"name": ["u2"], "age": [1.0], "income": [1.0], "class": ["c"], "fold": [None]}
    bought = {"name": ["u2"], "sku": [1001], "amount": [1.0], "at": [3]}
    data = load(tmp_path / "new", old, users=users, bought=bought)
    assert data.nodes["user"].data["label"].tolist() == [2]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("before", "now"),
    [(["b", "c", "a"], ["c", "b", "c"]), ([30, 2, 100], [100, 30, 100])],
    ids=["words", "numbers"],
)
def test_a_subset_keeps_its_numbers(
    kind: str, before: list[Any], now: list[Any], tmp_path: Path
) -> None:
    """Categories and classes, of nodes and of edges, keep them in either format."""
    edges = {"label": "mood", "reverse": "by"}
    moods = {"mood": ["sad", "glad", "sad"]}
    users: dict[str, Any] = {"class": [*before[:2], None]}
    spec = described(**edges)
    old = trained(tmp_path / "old", spec=spec, items=brands(*before), users=users, bought=moods)
    data = load(
        tmp_path / "new",
        old,
        kind,
        spec,
        items=brands(*now),
        users={"class": [None, now[1], None], "fold": [None] * 3},
        bought={"mood": ["sad", "sad", None]},
    )
    words = read_meta(old.parent).names
    assert data.names == words
    for key, values in {"item/brand": now, "user/label": [None, now[1], None]}.items():
        ntype, _, name = key.partition("/")
        codes = data.nodes[ntype].data[name].tolist()
        assert [None if code < 0 else words[key][code] for code in codes] == values
    assert words["user:bought:item/label"] == ["glad", "sad"]
    for etype in (BOUGHT, ("item", "by", "user")):
        assert data.edges[etype].data["label"].tolist() == [1, 1, -1]


def test_words_of_a_run_are_taken_over_too(tmp_path: Path) -> None:
    """The run's task may be on reversed edges; arrays that its model did not read are numbered
    anew."""
    found = tmp_path / "selected.json"
    found.write_text(json.dumps({"words": {"item:by:user/label": ["glad", "so", "sad"]}}))
    spec = described(label="mood", reverse="by")
    data = load(tmp_path / "new", found, spec=spec, bought={"mood": ["sad", "sad", "glad"]})
    assert data.edges[BOUGHT].data["label"].tolist() == [2, 2, 0]
    assert data.names["item/brand"] == ["a", "b"]


def test_the_bucket(tmp_path: Path) -> None:
    """Number 0 stands for missing values and rare categories in training, and for unknown ones
    later."""
    brand = {**BUCKET, "min_count": 2}
    values = ["b", "a", None, "c", "b", "a"]
    old = trained(tmp_path / "old", spec=described(brand), items=brands(*values))
    data = load_graph(TablesGraph(format="tables", path=tmp_path / "old" / "shop.yaml"))
    assert data.names["item/brand"] == [None, "a", "b"]
    assert data.nodes["item"].data["brand"].tolist() == [2, 1, 0, 0, 2, 1]
    now = brands("new", "b", "c", None, "a")
    data = load(tmp_path / "new", old, spec=described(brand), items=now)
    assert data.nodes["item"].data["brand"].tolist() == [0, 2, 0, 0, 1]
    assert data.names["item/brand"] == [None, "a", "b"]


def test_added_nodes_are_in_the_bucket(tmp_path: Path) -> None:
    spec = described(BUCKET, missing="add")
    for ntype in ("user", "item"):
        spec["nodes"][ntype]["fill"] = 0.0
    data = load_graph(write_shop(tmp_path, spec=spec, bought={"sku": [1001, 1002, 7]}))
    assert data.nodes["item"].data["brand"].tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("before", "now", "remedy"),
    [
        ("brand", "brand", "train with unknown: bucket"),
        ("brand", BUCKET, "train with unknown: bucket"),
        (BUCKET, "brand", "set unknown: bucket for this category, as in the training"),
    ],
    ids=["neither", "no row", "no wish"],
)
def test_unknown_words_are_refused(before: Any, now: Any, remedy: str, tmp_path: Path) -> None:
    """The message names file, row, column, categories and counts."""
    old = trained(tmp_path / "old", spec=described(before), items=brands("a", "b"))
    items = brands("a", "x", "b", "y", "x", *"cdef", "x")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "new", old, spec=described(now), items=items)
    error = caught.value
    assert isinstance(error, InputError)
    assert error.exit_code == 2
    assert str(error.where).endswith("items.csv, row 2 (line 3), column 'brand'")
    assert "'x' (3), 'y' (1), 'c' (1), 'd' (1), 'e' (1) and 1 more; 8 of 10 rows" in error.what
    assert remedy in str(error.remedy)


def test_a_missing_value_without_a_bucket_is_refused(tmp_path: Path) -> None:
    old = trained(tmp_path / "old", items=brands("a", "b"))
    with pytest.raises(DataError, match=r"no value \(1\); 1 of 2 rows"):
        load(tmp_path / "new", old, spec=described(BUCKET), items=brands("a", None))
    with pytest.raises(DataError, match="there is no value"):
        load(tmp_path / "newer", old, "parquet", items=brands(1.0, float("nan")))


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    old = trained(tmp_path / "old")
    with pytest.raises(DataError, match=r"classes: 'perhaps' \(1\)") as caught:
        load(tmp_path / "new", old, users={"class": ["no", "perhaps", None]})
    assert "column 'class'" in str(caught.value.where)
    assert "leave these labels empty" in str(caught.value.remedy)


def test_the_digest(tmp_path: Path) -> None:
    """The digest covers the vocabulary's entries but not its path; without one it is unchanged."""
    graph = write_shop(tmp_path)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for file in (one, two):
        file.write_text('{"names": {"item/brand": ["b", "a"]}}')
    before = digest(graph)
    assert before == digest(graph.model_copy(update={"vocabulary": None}))
    first, second = (digest(graph.model_copy(update={"vocabulary": each})) for each in (one, two))
    assert first == second != before
    two.write_text('{"names": {"item/brand": ["a", "b"]}}')
    assert digest(graph.model_copy(update={"vocabulary": two})) != first
    data = load_graph(graph.model_copy(update={"vocabulary": one}))
    np.testing.assert_array_equal(data.nodes["item"].data["brand"], [0, 1])


@pytest.mark.parametrize(
    ("content", "what"), [("{}", "no vocabulary of tables"), ("[", "JSON"), (None, "not exist")]
)
def test_invalid_vocabularies_are_refused(content: str | None, what: str, tmp_path: Path) -> None:
    file = tmp_path / "words.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=what) as caught:
        load(tmp_path / "new", file)
    assert str(file) in str(caught.value.where)
