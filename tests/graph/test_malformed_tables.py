"""Tables that must be refused: exit 2, with file, row and column, and nothing written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raygnn.config.graph import TablesGraph, TriplesGraph
from raygnn.errors import ConfigError
from raygnn.graph.sources import load_graph
from tests.support.builders import assert_damage_is_harmless, assert_refused
from tests.support.tables_builder import SPEC, TABLES, changed, write_shop

Build = Callable[[Path], Any]
MANY = 70_001  # more rows than a chunk has


def shop(kind: str = "csv", **changes: Any) -> Build:
    """Return a builder of the shop with changes: see `write_shop`."""
    return lambda directory: write_shop(directory, kind, **changes)


parquet = partial(shop, "parquet")


def users(**columns: Any) -> Build:
    return shop(users=columns)


def bought(**columns: Any) -> Build:
    return shop(bought=columns)


def raw(name: str, content: bytes | None, kind: str = "csv", **changes: Any) -> Build:
    """Return a builder of the shop with a file's raw content; None removes the file."""
    return shop(kind, raw={name: content}, **changes)


def spec(path: str, value: Any) -> Build:
    return shop(spec=changed(path, value))


def timed_users(path: str, value: Any) -> dict[str, Any]:
    """Return the description with times of users, and another change."""
    described = changed(path, value)
    described["nodes"]["user"]["time"] = "born"
    return described


def many(rows: Iterable[str]) -> Build:
    """Return a builder of users without splits, with these rows of a CSV."""
    text = "name,age,income,class\n" + "".join(f"{row}\n" for row in rows)
    return raw("users.csv", text.encode(), spec=changed("nodes user split", None))


def triples(content: bytes, name: str = "train.txt") -> Build:
    def build(directory: Path) -> TriplesGraph:
        (directory / "kg").mkdir()
        (directory / "kg" / name).write_bytes(content)
        return TriplesGraph(format="triples", path=directory / "kg")

    return build


INF = float("inf")
USERS = b"name,age,income,class,fold\n"
MALFORMED: dict[str, tuple[Build, list[str]]] = {
    "empty glob": (spec("nodes user files", "u/*.csv"), ["'u/*.csv'", "no file matches"]),
    "unknown kind": (spec("nodes user files", "users.xls"), ["users.xls", "tables end in"]),
    "wrong type in row 70,001": (
        many([*(f"u{i},{i},1,no" for i in range(1, MANY)), "last,old,1,no"]),
        [f"row {MANY} (line {MANY + 1})", "'age'", "'old'"],
    ),
    "infinity": (parquet(users={"income": [1.0, 2.0, float("inf")]}), ["row 3, column 'income'"]),
    "too large for float32": (users(age=[1, 2, 1e39]), ["row 3", "1e+39"]),
    "feature missing": (users(age=[1, None, 2]), ["row 2 (line 3), column 'age'", "fill"]),
    "feature of words": (parquet(users={"age": ["a", "b", "c"]}), ["row 1, column 'age'", "'a'"]),
    "value cut": (users(age=["x" * 200, 1, 2]), ["'" + "x" * 59 + "…"]),
    "empty id": (parquet(users={"name": ["anna", "", "carl"]}), ["row 2", "empty text"]),
    "null id": (users(name=["anna", None, "carl"]), ["row 2 (line 3), column 'name'", "no value"]),
    "duplicate id": (
        users(name=["anna", "ben", "anna"]),
        ["users.csv, row 3 (line 4), column 'name'", "'anna'", "row 1 (line 2)"],
    ),
    "unknown end": (
        bought(name=["anna", "zoe", "ben"]),
        ["bought.csv, row 2 (line 3), column 'name'", "there is no user 'zoe'", "missing"],
    ),
    "null end": (
        bought(sku=[1002, None, 1001]),
        ["row 2 (line 3), column 'sku'", "there is no value"],
    ),
    "ids int and text": (
        parquet(bought={"sku": ["1002", "1002", "1001"]}),
        ["bought.parquet, row 1, column 'sku'", "'1002' is text"],
    ),
    "end of words, ids int": (bought(sku=["1002", "x", "1"]), ["row 2", "'x' is text"]),
    "ids text, ends int": (parquet(bought={"name": [1, 2, 3]}), ["row 1", "1 is a number"]),
    "negative weight": (bought(amount=[1, -2, 1]), ["row 2 (line 3), column 'amount'", "-2"]),
    "no weight": (bought(amount=[1, 2, None]), ["row 3 (line 4), column 'amount'"]),
    "bad time": (bought(at=["2024-01-01", "soon", "2024-01-02"]), ["row 2", "'soon'"]),
    "mixed times": (bought(at=[1, 2, "2024-01-01"]), ["row 3", "'2024-01-01'", "not both"]),
    "times in a zone and in none": (
        bought(at=["2024-01-01 10:00:00", "2024-01-01 10:00:00Z", "2024-01-01"]),
        ["row 2", "10:00:00Z'", "either all dates have a time zone, or none"],
    ),
    "time of truth": (parquet(bought={"at": [True, False, True]}), ["'at'", "bool"]),
    "node without time": (
        shop(spec=changed("nodes user time", "born"), users={"born": [1, None, 2]}),
        ["users.csv, row 2 (line 3), column 'born'", "no value", "leave time out"],
    ),
    "bad split word": (
        users(fold=["train", "valid", None]),
        ["row 2 (line 3), column 'fold'", "'valid' is no split", "split_words"],
    ),
    "split without label": (
        users(fold=["train", "val", "test"]),
        ["users.csv, row 3 (line 4), column 'class'", "in test and has no label"],
    ),
    "no training nodes": (users(fold=["val", "val", None]), ["no training nodes"]),
    "fractional class": (
        parquet(users={"class": [0.0, 1.5, None]}),
        ["row 2, column 'class'", "1.5"],
    ),
    "class too large": (parquet(users={"class": [0.0, 2.0**53, None]}), ["row 2", "9007199"]),
    "too many classes": (
        many(f"u{i},1,1,c{i}" for i in range(2**16 + 5)),
        ["row 65537 (line 65538), column 'class'", "65,536 classes"],
    ),
    "category missing": (
        shop(items={"brand": ["a", None]}),
        ["items.csv, row 2 (line 3), column 'brand'"],
    ),
    "no edges": (raw("bought.csv", b"name,sku,amount,at\n"), ["no edges"]),
    "no nodes": (
        shop(
            users={column: [] for column in TABLES["users"]},
            raw={"items.csv": b"sku,price,brand\n", "bought.csv": b"name,sku,amount,at\n"},
        ),
        ["no nodes"],
    ),
    "yaml syntax": (raw("shop.yaml", b"nodes: [\n"), ["shop.yaml", "line 2"]),
    "yaml of a list": (raw("shop.yaml", b"- a\n"), ["shop.yaml", "expected sections"]),
    "yaml empty": (raw("shop.yaml", b"# nothing\n"), ["shop.yaml", "is empty"]),
    "yaml binary": (raw("shop.yaml", b"\xff\xfe\x00"), ["shop.yaml", "UTF-8"]),
    "masks, which were columns of truth values": (
        spec("nodes user masks", {"train": "age"}),
        ["unknown key 'masks'", "label_kind, labels, split,"],
    ),
    "unknown key": (
        spec("nodes user lable", "class"),
        ["shop.yaml", "nodes.user.lable (line 11)", "did you mean nodes.user.label?"],
    ),
    "unknown section": (spec("edge", {}), ["edge (line", "did you mean edges?"]),
    "missing key": (
        spec("nodes user features", {"feat": {"scale": "log"}}),
        ["'column' is missing"],
    ),
    "no nodes section": (spec("nodes", None), ["'nodes' is missing"]),
    "wrong type": (spec("nodes user id", 3), ["nodes.user.id", "expected text, got 3"]),
    "no edge type": (spec("edges bought", SPEC["edges"]["user:bought:item"]), ["no edge type"]),
    "no edge types": (
        spec("edges", dict.fromkeys(("bought", "user:saw"), SPEC["edges"]["user:bought:item"])),
        ["edges.bought (line", "edges.user:saw (line"],
    ),
    "unknown node type": (
        spec("edges usr:saw:item", SPEC["edges"]["user:bought:item"]),
        ["edges.usr:saw:item (line", "'usr'", "did you mean user?"],
    ),
    "a slash in a type": (
        spec("nodes ../user", SPEC["nodes"]["user"]),
        ["then letters", "got '../user'"],
    ),
    "a slash in an array": (
        spec("nodes item features", {"a/b": "price"}),
        ["then letters", "got 'a/b'"],
    ),
    "a feature called label": (spec("nodes user features", {"label": "age"}), ["'label' already"]),
    "split and splits": (spec("nodes user splits", {"train": 0.5}), ["split and splits"]),
    "what else to do with unknown words": (
        spec("nodes item categories", {"brand": {"column": "brand", "unknown": "buckt"}}),
        ["nodes.item.categories.brand.unknown (line", "did you mean bucket?"],
    ),
    "a category's unknown key": (
        spec("nodes item categories", {"brand": {"column": "brand", "unknwon": "bucket"}}),
        ["nodes.item.categories.brand.unknwon (line", "brand.unknown?"],
    ),
    "a category without a column": (
        spec("nodes item categories", {"brand": {"unknown": "bucket"}}),
        ["nodes.item.categories.brand.column", "'column' is missing"],
    ),
    "a category that is a number": (
        spec("nodes item categories", {"brand": 3}),
        ["nodes.item.categories.brand", "expected text, got 3"],
    ),
    "rare words without a bucket": (
        spec("nodes item categories", {"brand": {"column": "brand", "min_count": 2}}),
        ["brand.min_count (line", "set nodes.item.categories.brand.unknown to bucket"],
    ),
    "shares above 1": (
        spec("nodes item splits", {"train": 0.8, "val": 0.3}),
        ["nodes.item.splits (line", "more than 1"],
    ),
    "number to predict of words": (
        spec("nodes user label_kind", "number"),
        ["users.csv, row 1 (line 2), column 'class'", "'no'"],
    ),
    "infinite number to predict": (
        parquet(spec=changed("nodes user label_kind", "number"), users={"class": [1, INF, 2]}),
        ["users.parquet, row 2, column 'class'", "inf"],
    ),
    "number to predict missing": (
        shop(spec=changed("nodes user label_kind", "number"), users={"class": [1, None, 2]}),
        ["users.csv, row 2 (line 3), column 'class'", "in val and has no label"],
    ),
    "kind of no label": (
        spec("nodes item label_kind", "number"),
        ["nodes.item.label_kind (line", "nodes.item.label is null"],
    ),
    "class of an edge": (
        parquet(
            spec=changed("edges user:bought:item label", "stars"), bought={"stars": [1.0, 0.5, 2.0]}
        ),
        ["bought.parquet, row 2, column 'stars'", "0.5"],
    ),
    "split of an edge": (
        shop(
            spec=changed("edges user:bought:item split", "part"),
            bought={"part": ["train", "all", None]},
        ),
        ["bought.csv, row 2 (line 3), column 'part'", "'all' is no split"],
    ),
    "edge in a split without label": (
        shop(
            spec=changed(
                "edges user:bought:item",
                {**SPEC["edges"]["user:bought:item"], "split": "part", "label": "stars"},
            ),
            bought={"part": ["train", "test", None], "stars": ["a", None, None]},
        ),
        ["bought.csv, row 2 (line 3), column 'stars'", "the edge is in test and has no label"],
    ),
    "split and shares of edges": (
        spec(
            "edges user:bought:item",
            {**SPEC["edges"]["user:bought:item"], "split": "at", "splits": {"train": 0.5}},
        ),
        ["edges.user:bought:item.splits (line", "split and splits"],
    ),
    "a feature of edges called label": (
        spec("edges user:bought:item features", {"label": "amount"}),
        ["'label' already"],
    ),
    "undirected between types": (
        spec("edges user:bought:item undirected", True),
        ["undirected", "two types"],
    ),
    "reverse that is there": (
        shop(
            spec={
                "nodes": SPEC["nodes"],
                "edges": {
                    "user:a:item": {**SPEC["edges"]["user:bought:item"], "reverse": "b"},
                    "item:b:user": {"files": "bought.csv", "source": "sku", "target": "name"},
                },
            }
        ),
        ["edges.user:a:item already defines the edge type item:b:user"],
    ),
    "add without times": (
        shop(spec=timed_users("edges user:bought:item missing", "add")),
        ["added node of type user would have no time", "missing (line"],
    ),
    "an array called time": (
        shop(spec=timed_users("nodes user features", {"time": "age"})),
        ["time defines an array 'time' already"],
    ),
    "add without fill": (spec("edges user:bought:item missing", "add"), ["fill", "missing (line"]),
    "triples: none": (triples(b"", "readme.md"), ["kg", "no file to train on"]),
    "triples: two columns": (
        triples(b"a\tr\tb\nc\tr\n"),
        ["train.txt, row 2 (line 2)", "2 columns, expected 3"],
    ),
    "triples: empty end": (triples(b"a\tr\tb\n\tr\tc\n"), ["row 2 (line 2), column 'head'"]),
    "triples: not UTF-8": (triples(b"a\tr\tb\na\tr\t\xff\n"), ["row 2 (line 2)", "not UTF-8"]),
    "triples: empty": (triples(b""), ["train.txt", "empty"]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tables_are_refused(name: str, tmp_path: Path) -> None:
    build, fragments = MALFORMED[name]
    graph = build(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert_refused(lambda: load_graph(graph), fragments)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_damage_anywhere_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    graph = write_shop(tmp_path, kind)
    assert_damage_is_harmless(lambda: load_graph(graph), tmp_path, 25)
    if kind == "parquet":  # a schema with another name than its column
        file = tmp_path / "items.parquet"
        file.write_bytes(file.read_bytes().replace(b"sku", b"skv", 1))
        assert_refused(lambda: load_graph(graph), ["items.parquet", "sku"])


@pytest.mark.parametrize("name", ["users.csv", "users.parquet"])
def test_a_table_in_place_of_its_description(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PAR1\xff" if name.endswith("t") else b"name,age\nada,36\n")
    with pytest.raises(ConfigError, match="is a table") as error:
        load_graph(TablesGraph(format="tables", path=tmp_path / name))
    assert "sections nodes and edges" in str(error.value.remedy)
