"""DGL's CSVDataset directories give the graph that DGL's own class reads from them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.config.graph import CsvGraph
from raygnn.errors import InputError
from raygnn.graph.data import MASKS, GraphData
from raygnn.graph.dgl import dgl
from raygnn.graph.sources import load_graph
from raygnn.graph.tables import reader

META: dict[str, Any] = {
    "dataset_name": "shop",
    "node_data": [
        {"file_name": "users.csv", "ntype": "user"},
        {"file_name": "items.csv", "ntype": "item", "node_id_field": "sku"},
    ],
    "edge_data": [
        {
            "file_name": "bought.csv",
            "etype": ["user", "bought", "item"],
            "src_id_field": "user",
            "dst_id_field": "sku",
        },
        {"file_name": "knows.csv", "etype": ["user", "knows", "user"]},
    ],
}
FILES: dict[str, dict[str, list[Any]]] = {
    "users": {
        "node_id": ["dora", "anna", "carl", "ben"],
        "feat": ["0.1, 0.2", "1, 2", "[3.5, -4]", "(5,6)"],
        "label": [2, 0, 1, 1],
        "train_mask": [True, False, True, False],
        "test_mask": [False, True, False, False],
        "age": [31, 25, 60, 44],
    },
    "items": {"sku": [12, 3, 100], "price": [1.5, 2, 0.25], "size": ["1, 2", "3, 4", "5, 6"]},
    "bought": {"user": ["anna", "ben", "dora"], "sku": [3, 100, 12], "weight": [1.0, 0.5, 2.0]},
    "knows": {"src_id": ["ben", "ben"], "dst_id": ["carl", "ben"], "label": [0, 1]},
}


def write(
    directory: Path, meta: dict[str, Any] | None = None, separator: str = ",", **files: Any
) -> CsvGraph:
    """The dataset with other columns, by file; None leaves one out."""
    meta = copy.deepcopy(meta or META)
    if separator != ",":
        meta["separator"] = separator
    (directory / "meta.yaml").write_text(yaml.safe_dump(meta, sort_keys=False))
    for name, columns in FILES.items():
        whole = {key: v for key, v in {**columns, **files.get(name, {})}.items() if v is not None}
        frame = pd.DataFrame({key: pd.Series(v, dtype=object) for key, v in whole.items()})
        frame.to_csv(directory / f"{name}.csv", index=False, sep=separator)
    return CsvGraph(format="csv", path=directory)


def assert_as_dgl(data: GraphData, directory: Path) -> None:
    """The same types, nodes, edges and values as DGL's class reads; masks as truth values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns without a name, which both leave out
        theirs = dgl().data.CSVDataset(str(directory), force_reload=True, verbose=False).graphs[0]
    assert {t: frame.num for t, frame in data.nodes.items()} == {
        ntype: theirs.num_nodes(ntype) for ntype in theirs.ntypes
    }
    assert set(data.edges) == set(theirs.canonical_etypes)
    frames = [(frame.data, theirs.nodes[ntype].data) for ntype, frame in data.nodes.items()]
    for etype, edges in data.edges.items():
        source, target = theirs.edges(etype=etype, order="eid")
        np.testing.assert_array_equal(edges.src, source)
        np.testing.assert_array_equal(edges.dst, target)
        frames.append((edges.data, theirs.edges[etype].data))
    for ours, their in frames:
        assert set(ours) == set(their)
        for name, array in ours.items():
            other = their[name].numpy()
            if name in MASKS:
                other = other.astype(bool)
            assert array.dtype == other.dtype, name
            np.testing.assert_array_equal(array.reshape(other.shape), other, err_msg=name)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_shop(separator: str, tmp_path: Path) -> None:
    data = load_graph(write(tmp_path, separator=separator))
    assert data.ids["user"].to_pylist() == ["anna", "ben", "carl", "dora"]
    assert data.ids["item"].to_pylist() == [3, 12, 100]
    user = data.nodes["user"].data
    assert user["feat"].tolist() == np.float32([[1, 2], [5, 6], [3.5, -4], [0.1, 0.2]]).tolist()
    assert user["label"].tolist() == [0, 1, 1, 2]
    assert_as_dgl(data, tmp_path)


def test_what_meta_leaves_out(tmp_path: Path) -> None:
    """One type of each, under DGL's own names; a graph's number in every row."""
    meta = {
        "version": "1.0.0",
        "dataset_name": "plain",
        "node_data": [{"file_name": "nodes.csv"}],
        "edge_data": [{"file_name": "edges.csv"}],
    }
    (tmp_path / "meta.yaml").write_text(yaml.safe_dump(meta))
    (tmp_path / "nodes.csv").write_text("graph_id,node_id,train_mask,\n0,1,1,5\n0,0,0,6\n")
    (tmp_path / "edges.csv").write_text("graph_id,src_id,dst_id\n0,0,1\n0,1,1\n")
    data = load_graph(CsvGraph(format="csv", path=tmp_path))
    assert data.nodes["_V"].data["train_mask"].tolist() == [False, True]
    assert_as_dgl(data, tmp_path)


def test_labels_that_are_missing_or_numbers(tmp_path: Path) -> None:
    unknown = {"label": [1, None, 0, 1], "test_mask": None}
    user = load_graph(write(tmp_path, users=unknown)).nodes["user"].data
    assert user["label"].tolist() == [-1, 1, 0, 1]
    numbers = {"label": [1.5, None, 0, 1], "test_mask": None}
    user = load_graph(write(tmp_path, users=numbers)).nodes["user"].data
    np.testing.assert_array_equal(user["label"], np.float32([np.nan, 1, 0, 1.5]))


def test_random_datasets(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any ids and values, in chunks of any size."""
    place = tmp_path_factory.mktemp("random")
    whole = st.integers(-(10**6), 10**6)
    number = st.one_of(whole, st.floats(-100, 100, width=32))
    ids = st.one_of(
        st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=15, unique=True),
        st.lists(
            st.text("abcXYZäß_", min_size=1).filter(lambda t: t not in ("NA", "nan")),
            min_size=2,  # with one row DGL's reader fails
            max_size=15,
            unique=True,
        ),
    )

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.data())
    def run(draw: st.DataObject) -> None:
        monkeypatch.setattr(reader, "ROWS", draw.draw(st.integers(1, 20)))
        keys = draw.draw(ids)
        at = st.integers(0, len(keys) - 1)
        ends = draw.draw(st.lists(st.tuples(at, at), min_size=2, max_size=20))
        kind = draw.draw(st.sampled_from([whole, number, st.booleans()]))
        values = st.lists(kind, min_size=len(keys), max_size=len(keys))
        width = draw.draw(st.integers(2, 4))
        vectors = [draw.draw(st.lists(number, min_size=width, max_size=width)) for _ in keys]
        nodes = {
            "node_id": keys,
            "value": draw.draw(values),
            "vector": [", ".join(map(repr, vector)) for vector in vectors],
            "train_mask": [1] * len(keys),
        }
        edges = {"src_id": [keys[a] for a, _ in ends], "dst_id": [keys[b] for _, b in ends]}
        pd.DataFrame(nodes).to_csv(place / "n.csv", index=False)
        pd.DataFrame(edges).to_csv(place / "e.csv", index=False)
        (place / "meta.yaml").write_text(
            "dataset_name: any\nnode_data: [{file_name: n.csv}]\nedge_data: [{file_name: e.csv}]\n"
        )
        assert_as_dgl(load_graph(CsvGraph(format="csv", path=place)), place)

    run()


Build = Callable[[Path], Any]


def users(**columns: Any) -> Build:
    return lambda directory: write(directory, users=columns)


def meta(*path: Any, value: Any = None) -> Build:
    """meta.yaml with one key changed, or removed."""

    def build(directory: Path) -> CsvGraph:
        changed = copy.deepcopy(META)
        section: Any = changed
        for key in path[:-1]:
            section = section[key]
        if value is None:
            del section[path[-1]]
        else:
            section[path[-1]] = value
        return write(directory, changed)

    return build


def without(name: str) -> Build:
    def build(directory: Path) -> CsvGraph:
        graph = write(directory)
        (directory / name).unlink()
        return graph

    return build


MALFORMED: dict[str, tuple[Build, list[str]]] = {
    "no meta": (without("meta.yaml"), ["meta.yaml", "does not exist"]),
    "no file": (without("users.csv"), ["users.csv", "does not exist"]),
    "unknown key": (meta("nodes", value=[]), ["nodes (line", "meta.yaml"]),
    "no name": (meta("dataset_name"), ["'dataset_name' is missing"]),
    "version": (meta("version", value="2.0.0"), ["version (line", "2.0.0"]),
    "etype of two": (
        meta("edge_data", 1, "etype", value=["user", "user"]),
        ["edge_data[1].etype (line"],
    ),
    "unknown type": (
        meta("edge_data", 1, "etype", value=["user", "knows", "person"]),
        ["no node type 'person'", "user, item"],
    ),
    "one type twice": (meta("node_data", 1, "ntype", value="user"), ["'user' is there already"]),
    "separator of two": (meta("separator", value="::"), ["separator (line", "one character"]),
    "graphs": (
        meta("graph_data", value={"file_name": "g.csv"}),
        ["graph_data (line", "save_graphs"],
    ),
    "yaml with code": (
        lambda p: (
            write(p),
            (p / "meta.yaml").write_text("dataset_name: !!python/object/apply:os.getpid []\n"),
        )[0],
        ["meta.yaml"],
    ),
    "no id": (users(node_id=None), ["users.csv", "no column 'node_id'"]),
    "one id twice": (users(node_id=["a", "b", "a", "c"]), ["users.csv, row 3 (line 4)", "'a'"]),
    "two graphs": (
        users(graph_id=[0, 0, 1, 1]),
        ["users.csv, row 3 (line 4), column 'graph_id'", "graph '1'", "save_graphs"],
    ),
    "unknown end": (
        lambda p: write(p, knows={"dst_id": ["carl", "zoe"]}),
        ["knows.csv, row 2 (line 3), column 'dst_id'", "'zoe' is no user"],
    ),
    "words": (users(age=["old", 1, 2, 3]), ["users.csv, row 1 (line 2), column 'age'", "'old'"]),
    "a word among numbers": (users(age=[1, 2, "x", 3]), ["row 3 (line 4), column 'age'", "'x'"]),
    "a missing number": (users(age=[1, None, 2, 3]), ["row 2 (line 3), column 'age'"]),
    "a number among truths": (
        users(train_mask=[True, False, 2, False]),
        ["row 3 (line 4), column 'train_mask'", "'2'"],
    ),
    "a missing truth": (users(label=[True, None, False, True]), ["row 2 (line 3)", "no value"]),
    "a missing vector": (users(label=["1,2", None, "1,2", "1,2"]), ["row 2 (line 3)", "no value"]),
    "vectors of two lengths": (
        users(feat=["1, 2", "1, 2", "1, 2, 3", "1, 2"]),
        ["row 3 (line 4), column 'feat'", "'1, 2, 3' has 3 numbers, expected 2"],
    ),
    "a word in a vector": (
        users(feat=["1, 2", "1, x", "1, 2", "1, 2"]),
        ["row 2 (line 3), column 'feat'", "'x'"],
    ),
    "nan in a vector": (users(feat=["1, 2", "1, nan", "1, 2", "1, 2"]), ["users.csv", "nan"]),
    "a mask of numbers": (users(train_mask=[1, 0, 3, 0]), ["users.csv, column 'train_mask'", "3"]),
    "ragged": (
        lambda p: (write(p), (p / "items.csv").write_text("sku,price,size\n1,2\n"))[0],
        ["items.csv, row 1 (line 2)", "2 columns, expected 3"],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_datasets_are_refused(name: str, tmp_path: Path) -> None:
    build, expected = MALFORMED[name]
    with pytest.raises(InputError) as error:
        load_graph(build(tmp_path))
    for text in expected:
        assert text in str(error.value)
