"""Tables give the graph that one would build of them by hand, however they are written."""

from __future__ import annotations

import copy
import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.config.graph import TablesGraph, TriplesGraph
from raygnn.errors import ConfigError, DataError
from raygnn.graph.data import GraphData
from raygnn.graph.partition.read import read_ids
from raygnn.graph.sources import digest, load_graph
from raygnn.graph.tables import ids as numbering
from raygnn.graph.tables import reader
from raygnn.graph.tables.columns import INTEGER
from raygnn.graph.tables.description import RandomSplit
from raygnn.graph.tables.frames import draw
from tests.support.graphs import partition_graph
from tests.support.parted import assert_same as assert_same_graph
from tests.support.tables_builder import SPEC, changed, write_shop, write_table

BOUGHT = ("user", "bought", "item")
KINDS = ("csv", "csv.gz", "tsv", "parquet")


def assert_same(one: GraphData, other: GraphData) -> None:
    assert_same_graph(one, other)
    assert {t: ids.to_pylist() for t, ids in one.ids.items()} == {
        t: ids.to_pylist() for t, ids in other.ids.items()
    }
    assert one.names == other.names


@pytest.mark.parametrize("kind", KINDS)
def test_the_shop(kind: str, tmp_path: Path) -> None:
    data = load_graph(write_shop(tmp_path, kind, changed("edges user:bought:item reverse", "by")))
    assert data.reverses == {("user", "bought", "item"): ("item", "by", "user")}
    user, item, edges = data.nodes["user"], data.nodes["item"], data.edges[BOUGHT]
    assert data.ids["user"].to_pylist() == ["anna", "ben", "carl"]
    assert data.ids["item"].to_pylist() == [1001, 1002]
    assert user.data["feat"].tolist() == [[34, 2.5], [51, 1.5], [28, 3.5]]
    assert user.data["feat"].dtype == np.float32
    assert user.data["label"].tolist() == [0, 1, -1]
    assert user.data["train_mask"].tolist() == [True, False, False]
    assert user.data["val_mask"].tolist() == [False, True, False]
    assert not user.data["test_mask"].any()
    assert item.data["feat"].tolist() == [[9.5], [1.0]]
    assert item.data["brand"].tolist() == [1, 0]
    assert data.names == {"user/label": ["no", "yes"], "item/brand": ["a", "b"]}
    assert edges.src.tolist() == [0, 2, 1]
    assert edges.dst.tolist() == [1, 1, 0]
    assert edges.data["weight"].tolist() == [1, 2, 0.5]
    assert edges.data["time"].tolist() == [3, 1, 2]
    back = data.edges["item", "by", "user"]
    assert back.src.tolist() == edges.dst.tolist()
    assert back.data["weight"].tolist() == [1, 2, 0.5]


IDS = {
    "whole numbers": st.integers(-(10**17), 10**17),
    "words": st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1),
    "codes": st.from_regex(r"[0-9]{1,3}|00[0-9]|-0", fullmatch=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", IDS)
def test_random_tables(
    kind: str, ids: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, lengths of files and sizes of chunks are arbitrary."""
    place = tmp_path_factory.mktemp("random")

    @settings(max_examples=4, deadline=None, database=None)
    @given(st.data())
    def run(draw: st.DataObject) -> None:
        keys = draw.draw(st.lists(IDS[ids], min_size=1, max_size=20, unique=True))
        number = st.integers(0, len(keys) - 1)
        ends = draw.draw(st.lists(st.tuples(number, number), min_size=1, max_size=40))
        rows = draw.draw(st.integers(1, 50))
        monkeypatch.setattr(reader, "ROWS", rows)
        monkeypatch.setattr(numbering, "_ROWS", rows)
        for old in place.iterdir():
            old.unlink()
        cut = draw.draw(st.integers(0, len(keys)))
        labels = [f"c{i % 3}" for i in range(len(keys))]
        feat = [i / 8 for i in range(len(keys))]
        for name, span in (("n0", slice(0, cut)), ("n1", slice(cut, None))):
            columns = {"key": keys[span], "x": feat[span], "y": labels[span]}
            if columns["key"]:
                write_table(place / f"{name}.{kind}", columns)
        source, target = ([keys[pair[end]] for pair in ends] for end in (0, 1))
        write_table(place / f"edges.{kind}", {"a": source, "b": target})
        (place / "graph.yaml").write_text(
            f"nodes: {{paper: {{files: 'n*.{kind}', id: key, features: {{feat: x}}, label: y, "
            f"splits: {{train: 1.0}}}}}}\n"
            f"edges: {{cites: {{files: edges.{kind}, source: a, target: b}}}}\n"
        )
        data = load_graph(TablesGraph(format="tables", path=place / "graph.yaml"))
        expected = keys
        if kind != "parquet" and all(re.match(INTEGER, str(key)) for key in keys):
            expected = [int(key) for key in keys]
        assert data.ids["paper"].to_pylist() == expected
        etype = ("paper", "cites", "paper")
        assert list(zip(data.edges[etype].src, data.edges[etype].dst)) == ends
        np.testing.assert_array_equal(data.nodes["paper"].data["feat"][:, 0], feat)
        names = data.names["paper/label"]
        assert [names[code] for code in data.nodes["paper"].data["label"]] == labels

    run()


def test_many_rows_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several blocks, in both formats, against pandas."""
    random = np.random.default_rng(0)
    names = [f"u{i}" for i in random.permutation(5000)]
    users = {
        "name": names,
        "age": random.integers(1, 99, 5000).tolist(),
        "income": random.random(5000).astype(np.float32).tolist(),
        "class": random.choice(["a", "b", "c"], 5000).tolist(),
        "fold": random.choice(["train", "val", "test"], 5000).tolist(),
    }
    buyers, skus = random.choice(names, 20_000).tolist(), random.choice([1001, 1002], 20_000)
    bought = {"name": buyers, "sku": skus.tolist(), "amount": [1] * 20_000, "at": [7] * 20_000}
    monkeypatch.setattr(reader, "ROWS", 777)
    monkeypatch.setattr(numbering, "_ROWS", 777)
    found = []
    for kind in ("csv", "parquet"):
        (tmp_path / kind).mkdir()
        graph = write_shop(tmp_path / kind, kind, users=users, bought=bought)
        found.append(load_graph(graph))
    assert_same(*found)
    place = pd.Index(names)
    np.testing.assert_array_equal(found[0].edges[BOUGHT].src, place.get_indexer(buyers))
    np.testing.assert_array_equal(found[0].edges[BOUGHT].dst, skus - 1001)


@pytest.mark.parametrize(
    ("missing", "source"), [("drop", [0, 1]), ("add", [0, 3, 1])], ids=["drop", "add"]
)
def test_ends_that_are_no_node(missing: str, source: list[int], tmp_path: Path) -> None:
    spec = changed("edges user:bought:item missing", missing)
    spec["nodes"]["user"]["fill"] = 0.5
    del spec["nodes"]["item"]["categories"]
    spec["nodes"]["item"]["fill"] = 0.0
    spec["edges"]["user:bought:item"]["features"] = {"count": "at"}
    graph = write_shop(tmp_path, spec=spec, bought={"name": ["anna", "zoe", "ben"]})
    data = load_graph(graph)
    edges, users = data.edges[BOUGHT], data.nodes["user"]
    assert edges.src.tolist() == source
    kept = [0, 2] if missing == "drop" else [0, 1, 2]
    assert edges.data["weight"].tolist() == [[1.0, 2.0, 0.5][row] for row in kept]
    assert edges.data["time"].tolist() == [[3, 1, 2][row] for row in kept]
    assert edges.data["count"][:, 0].tolist() == edges.data["time"].tolist()
    if missing == "add":
        assert data.ids["user"].to_pylist() == ["anna", "ben", "carl", "zoe"]
        assert users.data["feat"][3].tolist() == [0.5, 0.5]
        assert users.data["label"][3] == -1
        assert not users.data["train_mask"][3]


def test_added_nodes_are_numbered_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source comes before target, row by row, for any size of chunks."""
    write_table(tmp_path / "n.csv", {"id": [1], "y": ["a"], "s": ["train"]})
    write_table(tmp_path / "e.csv", {"a": [5, 4, 5, 9], "b": [4, 3, 1, 8]})
    (tmp_path / "g.yaml").write_text(
        "nodes: {v: {files: n.csv, id: id, label: y, split: s}}\n"
        "edges: {to: {files: e.csv, source: a, target: b, missing: add}}\n"
    )
    for rows in (1, 3, 100):
        monkeypatch.setattr(reader, "ROWS", rows)
        data = load_graph(TablesGraph(format="tables", path=tmp_path / "g.yaml"))
        assert data.ids["v"].to_pylist() == [1, 5, 4, 3, 9, 8]


def test_blank_lines_and_odd_names(tmp_path: Path) -> None:
    """Empty lines are no rows, whatever the width; names may have line ends, that are not those of
    the file; a file may be called as a pattern."""
    (tmp_path / "n[1]*.csv").write_text('\n"id"\n\n1\n2\n\n')
    lines = ["\ufeff", ' a ,"b\n"', "", "1,2", "", "2,2"]
    (tmp_path / "e.csv").write_bytes("\r\n".join(lines).encode())
    (tmp_path / "g.yaml").write_text(
        "nodes: {v: {files: 'n[1]*.csv', id: id}}\n"
        "edges: {to: {files: e.csv, source: a, target: b}}\n"
    )
    data = load_graph(TablesGraph(format="tables", path=tmp_path / "g.yaml"), needs_masks=False)
    assert data.ids["v"].to_pylist() == [1, 2]
    assert data.edges["v", "to", "v"].src.tolist() == [0, 1]


def test_undirected_edges(tmp_path: Path) -> None:
    write_table(tmp_path / "n.csv", {"id": [1, 2, 3], "y": [5, 5, 7], "s": ["train"] * 3})
    write_table(tmp_path / "e.csv", {"a": [1, 2, 3], "b": [2, 2, 1], "w": [1, 2, 3]})
    (tmp_path / "g.yaml").write_text(
        "nodes: {v: {files: n.csv, id: id, label: y, split: s}}\n"
        "edges: {to: {files: e.csv, source: a, target: b, weight: w, undirected: true}}\n"
    )
    data = load_graph(TablesGraph(format="tables", path=tmp_path / "g.yaml"))
    edges = data.edges["v", "to", "v"]
    assert edges.src.tolist() == [0, 1, 2, 1, 0]
    assert edges.dst.tolist() == [1, 1, 0, 0, 2]
    assert edges.data["weight"].tolist() == [1, 2, 3, 1, 3]
    assert data.nodes["v"].data["label"].tolist() == [0, 0, 1]
    assert data.names["v/label"] == [5, 7]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["2024-01-01", "1970-01-01 00:00:01", "1970-01-01T00:00:00.5"], 10**6),
        (["2024-01-01T01:00:00+01:00", "1970-01-01T00:00:01Z", "1970-01-01T00:00:00Z"], 10**6),
        (["2024-01-01 02:00:00.000+02", "1970-01-01T02:00:01+02:00", "1970-01-01 00:00Z"], 10**6),
        (["2024-01-01T02:00:00.000001+02:00", "1970-01-01 00:00:01Z", "1970-01-01 00:00Z"], 10**6),
        ([10, -1, 12], -1),
    ],
)
def test_times(values: list[Any], expected: int, tmp_path: Path) -> None:
    data = load_graph(write_shop(tmp_path, bought={"at": values}))
    time = data.edges[BOUGHT].data["time"]
    assert time.dtype == np.int64
    assert time[1] == expected
    if isinstance(values[0], str):
        assert time[0] // 10 == 1_704_067_200 * 10**5


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("unit", "values", "expected"),
    [
        ("s", [1289241911.72836, 5.0, -1.5], [1289241911728360, 5_000_000, -1_500_000]),
        ("s", [1289241911, 5, -1], [1289241911000000, 5_000_000, -1_000_000]),
        ("ms", [1289241911728, 5, 0], [1289241911728000, 5000, 0]),
        ("us", [1289241911728361, 5, 0], [1289241911728361, 5, 0]),
        ("ns", [1289241911728361999, -1, 0], [1289241911728361, -1, 0]),
        ("d", [14921.5, 1.0, 0.0], [1_289_217_600_000_000, 86_400_000_000, 0]),
    ],
)
def test_times_whose_unit_is_named(
    unit: str, values: list[Any], expected: list[int], kind: str, tmp_path: Path
) -> None:
    """Such times are converted to microseconds, the unit of dates in another table."""
    spec = changed("edges user:bought:item time", {"column": "at", "unit": unit})
    data = load_graph(write_shop(tmp_path, kind, spec, bought={"at": values}))
    assert data.edges[BOUGHT].data["time"].tolist() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["2024-01-01", "2024-01-02", "2024-01-03"], "give numbers of s since 1970"),
        ([1.0, float("inf"), 2.0], "inf s is no time"),
        ([1e300, 1.0, 2.0], "is no time"),
    ],
)
def test_times_that_are_no_number_are_refused(
    values: list[Any], message: str, tmp_path: Path
) -> None:
    spec = changed("edges user:bought:item time", {"column": "at", "unit": "s"})
    with pytest.raises(DataError) as caught:
        load_graph(write_shop(tmp_path, spec=spec, bought={"at": values}))
    assert message in str(caught.value)


def test_fractions_need_a_unit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"time: \{column: at, unit: s\}"):
        load_graph(write_shop(tmp_path, "parquet", bought={"at": [1.5, 2.5, 3.5]}))


def test_times_of_nodes(tmp_path: Path) -> None:
    """Times of nodes are read as times of edges are; they are stored beside the features."""
    spec = changed("nodes user time", "joined")
    joined = ["2024-01-01", "1970-01-01 00:00:01", "1970-01-01T00:00:00.5"]
    user = load_graph(write_shop(tmp_path, spec=spec, users={"joined": joined})).nodes["user"]
    assert user.data["time"].dtype == np.int64
    assert user.data["time"].tolist() == [1_704_067_200 * 10**6, 10**6, 500_000]
    assert user.data["feat"].shape == (3, 2)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_parquet(unit: str, tmp_path: Path) -> None:
    at = pa.array([1000, 2000, 3000], pa.timestamp("ms")).cast(pa.timestamp(unit))
    data = load_graph(write_shop(tmp_path, "parquet", bought={"at": at}))
    assert data.edges[BOUGHT].data["time"].tolist() == [10**6, 2 * 10**6, 3 * 10**6]


def test_times_finer_than_microseconds_are_cut(tmp_path: Path) -> None:
    """Times are rounded down, so that none is later than it was."""
    at = pa.array([1999, -1, -1001], pa.timestamp("ns"))
    data = load_graph(write_shop(tmp_path, "parquet", bought={"at": at}))
    assert data.edges[BOUGHT].data["time"].tolist() == [1, -1, -2]


def test_lists_and_fill(tmp_path: Path) -> None:
    spec = changed("nodes item fill", -1.0)
    spec["nodes"]["item"]["features"] = {"feat": ["price", "vector"], "fixed": "fixed"}
    fixed = pa.array([[1, 2], [3, None]], pa.list_(pa.int16(), 2))
    items = {"price": [None, 2.0], "vector": [[0.5, None, 1.5], [1.0, 2.0, 3.0]], "fixed": fixed}
    data = load_graph(write_shop(tmp_path, "parquet", spec, items=items)).nodes["item"].data
    assert data["feat"].tolist() == [[-1, 0.5, -1, 1.5], [2, 1, 2, 3]]
    assert data["fixed"].tolist() == [[1, 2], [3, -1]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_other_words_of_splits(kind: str, tmp_path: Path) -> None:
    spec = changed("nodes user split_words", {"1": "train", "2": "test", "0": "val"})
    users = {"fold": [1, 2, None]}
    data = load_graph(write_shop(tmp_path, kind, spec, users=users)).nodes["user"].data
    assert data["train_mask"].tolist() == [True, False, False]
    assert data["test_mask"].tolist() == [False, True, False]
    assert data["val_mask"].tolist() == [False, False, False]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_to_predict(kind: str, tmp_path: Path) -> None:
    spec = changed("nodes user label_kind", "number")
    values = {"class": [-1.5, 2, None]}
    data = load_graph(write_shop(tmp_path, kind, spec, users=values)).nodes["user"].data
    assert data["label"].dtype == np.float32
    np.testing.assert_array_equal(data["label"], np.float32([-1.5, 2, np.nan]))
    assert data["train_mask"].tolist() == [True, False, False]


LISTED = {"class": [[1.0, -1.0], None, [np.nan, 0.0]], "fold": [None, None, None]}
SEVERAL = {"class": [1, None, None], "other": [-1, np.nan, 0], "fold": [None, None, None]}


@pytest.mark.parametrize(
    ("kind", "label", "columns"),
    [
        ("csv", ["class", "other"], SEVERAL),
        ("parquet", ["class", "other"], SEVERAL),
        ("parquet", "class", LISTED),
    ],
)
@pytest.mark.parametrize("of", ["multi", "number"])
def test_several_labels(
    of: str, kind: str, label: Any, columns: dict[str, Any], tmp_path: Path
) -> None:
    """Labels come from columns or lists; null, NaN and -1 are unknown, as is a missing list."""
    spec = changed("nodes user label_kind", of)
    user = spec["nodes"]["user"]
    user |= {"label": label, "splits": {"train": 1.0}, "split": None}
    data = load_graph(write_shop(tmp_path, kind, spec, users=columns)).nodes["user"].data
    if of == "multi":
        assert data["label"].dtype == np.int8
        assert data["label"].tolist() == [[1, -1], [-1, -1], [-1, 0]]
    else:
        expected = np.float32([[1, -1], [np.nan, np.nan], [np.nan, 0]])
        np.testing.assert_array_equal(data["label"], expected)
    # one label that is known is enough, of numbers all must be
    assert data["train_mask"].tolist() == [True, False, of == "multi"]


@pytest.mark.parametrize("of", ["multi", "number"])
def test_lists_that_come_late(of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the lists is unknown until a later chunk has one."""
    monkeypatch.setattr(reader, "ROWS", 1)
    monkeypatch.setattr(reader, "_BYTES", 1)
    spec = changed("nodes user label_kind", of)
    spec["nodes"]["user"]["split"] = None
    spec["nodes"]["item"]["splits"] = {"train": 1.0}
    columns = {"class": [None, None, [1, 0, None]]}
    file = write_shop(tmp_path, "parquet", spec, users=columns)
    pq.write_table(
        pq.read_table(tmp_path / "users.parquet"), tmp_path / "users.parquet", row_group_size=1
    )
    label = load_graph(file).nodes["user"].data["label"]
    unknown = -1 if of == "multi" else np.nan
    expected = [[unknown] * 3, [unknown] * 3, [1, 0, unknown]]
    np.testing.assert_array_equal(label, expected)


@pytest.mark.parametrize(
    ("kind", "label", "columns", "said"),
    [
        (
            "csv",
            ["class", "other"],
            {"class": [1, 0, 1], "other": [0, 2, 1]},
            "'other': the label is 2",
        ),
        ("parquet", "class", {"class": [[1, 0], None, [0.5, 1]]}, "'class': the label is 0.5"),
        ("parquet", "class", {"class": [[1, 0], None, [1]]}, "the list has 1 numbers, expected 2"),
        ("parquet", ["class", "other"], {"class": [[1], None, [1]], "other": [0, 0, 0]}, "list"),
        ("csv", "class", {"class": ["yes", "no", "no"]}, "yes"),
    ],
)
def test_invalid_labels_are_refused(
    kind: str, label: Any, columns: dict[str, Any], said: str, tmp_path: Path
) -> None:
    spec = changed("nodes user label_kind", "multi")
    spec["nodes"]["user"] |= {"label": label, "split": None}
    with pytest.raises(DataError) as caught:
        load_graph(write_shop(tmp_path, kind, spec, users=columns))
    assert said in str(caught.value)


def test_several_columns_are_no_class(tmp_path: Path) -> None:
    spec = changed("nodes user label", ["class", "age"])
    with pytest.raises(ConfigError, match="a class label needs one column"):
        load_graph(write_shop(tmp_path, "csv", spec))


STARS = {"stars": [5, 1, None], "half": [0.5, None, -1.0], "part": ["train", "test", None]}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("of", ["class", "number"])
def test_labels_and_splits_of_edges(of: str, kind: str, tmp_path: Path) -> None:
    """Both directions of an edge have its label and its split."""
    table: dict[str, Any] = {"label": "stars", "split": "part", "reverse": "by"}
    if of == "number":
        table |= {"label": "half", "label_kind": "number"}
    spec = copy.deepcopy(SPEC)
    spec["edges"]["user:bought:item"] = {
        **{key: SPEC["edges"]["user:bought:item"][key] for key in ("files", "source", "target")},
        **table,
    }
    bought = STARS if of == "class" else STARS | {"part": ["train", None, None]}
    data = load_graph(write_shop(tmp_path, kind, spec, bought=bought))
    for etype in (BOUGHT, ("item", "by", "user")):
        edges = data.edges[etype].data
        if of == "class":
            assert edges["label"].tolist() == [1, 0, -1]
            assert data.names[":".join(etype) + "/label"] == [1, 5]
            assert edges["test_mask"].tolist() == [False, True, False]
        else:
            np.testing.assert_array_equal(edges["label"], np.float32([0.5, np.nan, -1]))
            assert not edges["test_mask"].any()
        assert edges["train_mask"].tolist() == [True, False, False]


def test_shares_of_edges_are_of_rows(tmp_path: Path) -> None:
    """A dropped row, or one of two directions, changes no other row's split."""
    count = 200
    random = np.random.default_rng(1)
    ends = random.integers(0, 50, (2, count))
    ends[0, ::7] = 99  # no node
    write_table(tmp_path / "n.csv", {"id": list(range(50))})
    write_table(tmp_path / "e.csv", {"a": ends[0].tolist(), "b": ends[1].tolist()})
    (tmp_path / "g.yaml").write_text(
        "nodes: {v: {files: n.csv, id: id}}\n"
        "edges: {to: {files: e.csv, source: a, target: b, missing: drop, undirected: true, "
        "splits: {train: 0.6, val: 0.2}}}\n"
    )
    edges = load_graph(TablesGraph(format="tables", path=tmp_path / "g.yaml")).edges["v", "to", "v"]
    drawn = draw(RandomSplit(train=0.6, val=0.2), count)[ends[0] != 99]
    back = np.flatnonzero(edges.src[: len(drawn)] != edges.dst[: len(drawn)])
    for code, mask in enumerate(("train_mask", "val_mask", "test_mask")):
        found = edges.data[mask]
        np.testing.assert_array_equal(found[: len(drawn)], drawn == code)
        np.testing.assert_array_equal(found[len(drawn) :], (drawn == code)[back])


def test_a_file_that_is_named_twice_is_read_twice(tmp_path: Path) -> None:
    count = 100
    write_table(tmp_path / "n.csv", {"id": list(range(count))})
    write_table(tmp_path / "e.csv", {"a": list(range(count)), "b": list(range(count))})
    (tmp_path / "g.yaml").write_text(
        "nodes: {v: {files: n.csv, id: id}}\n"
        "edges: {to: {files: [e.csv, e.csv], source: a, target: b, splits: {train: 0.5}}}\n"
    )
    edges = load_graph(TablesGraph(format="tables", path=tmp_path / "g.yaml")).edges["v", "to", "v"]
    np.testing.assert_array_equal(edges.src, [*range(count)] * 2)
    drawn = draw(RandomSplit(train=0.5), 2 * count)
    np.testing.assert_array_equal(edges.data["train_mask"], drawn == 0)


def test_random_splits_are_of_the_seed_and_the_number() -> None:
    shares = RandomSplit(train=0.6, val=0.1, test=0.2)
    many = draw(shares, 3 << 19)
    for code, share in ((0, 0.6), (1, 0.1), (2, 0.2), (-1, 0.1)):
        assert (many == code).mean() == pytest.approx(share, abs=0.005)
    np.testing.assert_array_equal(draw(shares, 1000), many[:1000])
    other = draw(RandomSplit(train=0.6, val=0.1, seed=1), 1000)
    assert (other != many[:1000]).mean() > 0.3
    assert not (other == -1).any()
    assert many[:12].tolist() == [1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0]


def test_digest_is_of_the_contents(tmp_path: Path) -> None:
    """The digest covers all files and the description, but not their paths."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = write_shop(tmp_path / "a"), write_shop(tmp_path / "b")
    assert digest(one) == digest(two)
    for name in ("users.csv", "items.csv", "bought.csv", "shop.yaml"):
        file = tmp_path / "b" / name
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert digest(one) != digest(two), name
        file.write_bytes(before)
    assert digest(one) == digest(two)


def test_a_partition_keeps_ids_and_words(tmp_path: Path) -> None:
    data = load_graph(write_shop(tmp_path))
    meta = partition_graph(data, tmp_path / "p")
    assert meta.manifest is not None
    assert meta.manifest.names["user/label"] == ["no", "yes"]
    assert read_ids(meta, "user").to_pylist() == ["anna", "ben", "carl"]
    assert read_ids(meta, "item").to_pylist() == [1001, 1002]
    file = tmp_path / "p" / "ids" / "user.arrow"
    file.write_bytes(file.read_bytes().replace(b"carl", b"karl"))
    with pytest.raises(DataError, match=r"user\.arrow.*changed"):
        read_ids(meta, "user")


@pytest.mark.parametrize("kind", ["txt", "tsv", "csv", "parquet", "txt.gz"])
def test_triples(kind: str, tmp_path: Path) -> None:
    rows = {
        "train": [("/m/a", "/r/of", '"b"'), ("c", "/r/in", "/m/a")],
        "valid": [("d", "/r/of", "c")],
        "test": [('"b"', "/r/new", "/m/a")],
    }
    for name, triples in rows.items():
        file = tmp_path / f"{name}.{kind}"
        columns = dict(zip(("head", "relation", "tail"), map(list, zip(*triples)), strict=True))
        if kind in ("csv", "parquet"):
            write_table(file, columns)
        else:
            text = "".join("\t".join(triple) + "\n" for triple in triples).encode()
            file.write_bytes(gzip.compress(text) if kind == "txt.gz" else text)
    data = load_graph(TriplesGraph(format="triples", path=tmp_path))
    (edges,) = data.edges.values()
    entities = data.ids["entity"].to_pylist()
    relations = data.names["entity:triple:entity/relation"]
    assert entities == ["/m/a", '"b"', "c", "d"]
    assert relations == ["/r/in", "/r/new", "/r/of"]
    found = [
        (entities[h], relations[r], entities[t])
        for h, r, t in zip(edges.src, edges.data["relation"], edges.dst)
    ]
    assert found == [triple for triples in rows.values() for triple in triples]
    assert edges.data["train_mask"].tolist() == [True, True, False, False]
    assert edges.data["val_mask"].tolist() == [False, False, True, False]
    assert edges.data["test_mask"].tolist() == [False, False, False, True]
    meta = partition_graph(data, tmp_path / "p")
    assert read_ids(meta, "entity").to_pylist() == entities


def test_queries_show_no_progress() -> None:
    """DuckDB would print a bar in a notebook, and in ``python -c``."""
    script = """
from pathlib import Path
from raygnn.graph.tables.reader import connect
print(*connect(Path("spill")).execute("select current_setting('enable_progress_bar')").fetchone())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


MEASURE = """
import sys
import numpy as np, pyarrow.parquet, pyarrow.csv, pyarrow.compute
from raygnn.config.graph import TablesGraph
from raygnn.graph.sources import load_graph
def high():  # ru_maxrss would begin with the memory of the process that started this one
    lines = open("/proc/self/status").readlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
small, large = (TablesGraph(format="tables", path=path) for path in sys.argv[1:])
load_graph(small)  # what it imports and compiles is not counted
before = high()
data = load_graph(large)
peak = high() - before
frames = [*data.nodes.values(), *data.edges.values()]
arrays = [a for frame in frames for a in frame.data.values()]
arrays += [a for edges in data.edges.values() for a in (edges.src, edges.dst)]
size = sum(a.nbytes for a in arrays) + sum(ids.nbytes for ids in data.ids.values())
print(peak / size, size)
"""


def written(directory: Path, kind: str, num: int) -> Path:
    """A description of tables of so many nodes, and six or seven edges for each."""
    random = np.random.default_rng(0)
    edges = num * 20 // 3
    names = np.array([f"user-{i}" for i in random.permutation(num)])
    columns = {f"x{i}": random.random(num).astype(np.float32) for i in range(16)}
    ends = {"a": random.choice(names, edges), "b": random.choice(names, edges)}
    for name, frame in {
        "n": pd.DataFrame({"id": names, **columns, "y": random.integers(0, 5, num)}),
        "e": pd.DataFrame({**ends, "w": random.random(edges)}),
    }.items():
        file = directory / f"{name}{num}.{kind}"
        if kind == "csv":
            frame.to_csv(file, index=False)
        else:
            frame.to_parquet(file, index=False)
    description = directory / f"{num}.yaml"
    description.write_text(
        f"nodes: {{v: {{files: n{num}.{kind}, id: id, label: y, "
        f"features: {{feat: [{', '.join(columns)}]}}, splits: {{train: 0.5}}}}}}\n"
        f"edges: {{to: {{files: e{num}.{kind}, source: a, target: b, weight: w}}}}\n"
    )
    return description


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_memory_is_that_of_the_arrays(kind: str, tmp_path: Path) -> None:
    """At most three times, with six million edges and 900,000 nodes called by words: beside the
    arrays there are chunks of the files, whose size is not that of the graph."""
    small, large = (written(tmp_path, kind, num) for num in (900, 900_000))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    ratio, size = map(float, done.stdout.split())
    assert size > 180e6
    assert ratio <= 3, done.stdout
