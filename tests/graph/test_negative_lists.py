"""Files of edges that are not there: the same lists in any format, and one error for bad ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.errors import DataError
from raygnn.graph.data import EdgeType, NegativeLists
from raygnn.graph.negative_lists import read_lists
from raygnn.graph.tables import reader

BUYS: EdgeType = ("user", "buys", "item")
USERS, ITEMS = 9, 7
NAMES = {"user": pa.array([f"u{i}" for i in range(USERS)], pa.large_string())}
LISTS = st.dictionaries(
    st.tuples(st.integers(0, USERS - 1), st.integers(0, ITEMS - 1)),
    st.lists(st.integers(1, ITEMS - 1), min_size=1, max_size=4),  # after the target, in a circle
    min_size=1,
    max_size=6,
)


def read(file: Path, names: bool = False, relations: Any = None) -> NegativeLists:
    return read_lists(file, BUYS, (USERS, ITEMS), NAMES if names else {}, relations)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ROWS", 1)


@settings(max_examples=30)
@given(lists=LISTS)
def test_any_format_gives_the_same(lists: dict[tuple[int, int], list[int]]) -> None:
    """Lists have any length and name nodes by id, or there is one node in each row."""
    absent = [[(edge[1] + step) % ITEMS for step in steps] for edge, steps in lists.items()]
    source, target = zip(*lists)
    width = max(map(len, absent))
    with TemporaryDirectory() as place:
        frame = pd.DataFrame({"source": source, "target": target, "target_neg": absent})
        frame.to_parquet(Path(place) / "a.parquet")
        frame.explode("target_neg").to_csv(Path(place) / "b.csv", index=False)
        named = frame.assign(source=[f"u{i}" for i in source])
        named.to_parquet(Path(place) / "c.parquet")
        found = [read(Path(place) / name) for name in ("a.parquet", "b.csv")]
        found.append(read(Path(place) / "c.parquet", names=True))
        full = [row + [(t + 1) % ITEMS] * (width - len(row)) for row, t in zip(absent, target)]
        arrays = {"source": source, "target": target, "target_neg": full}
        np.savez(Path(place) / "d.npz", **{k: np.array(v, np.int32) for k, v in arrays.items()})
        archived = read(Path(place) / "d.npz")
    for one in found:
        assert one.ends is not None
        assert one.pairs is None
        assert list(one.others) == ["target"]
        rows = {}
        for s, t, nodes in zip(*one.ends.tolist(), one.others["target"].tolist()):
            count = len(lists[s, t])
            assert nodes[count:] == [t] * (width - count)  # which never counts
            rows[s, t] = nodes[:count]
        assert rows == dict(zip(lists, absent))
    assert archived.ends is not None
    at = [list(lists).index((s, t)) for s, t in zip(*archived.ends.tolist())]
    assert archived.others["target"].tolist() == [full[i] for i in at]
    assert len({one.digest for one in found}) == 3


def test_relations_and_both_ends(tmp_path: Path) -> None:
    """A pair of nodes with two relations has two lists."""
    frame = pd.DataFrame(
        {"source": [1, 1], "target": [2, 2], "relation": ["likes", "owns"], "source_neg": [3, 4]}
    )
    frame.assign(target_neg=[[0, 1], [5]]).to_parquet(tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet", relations=["owns", "likes"])
    assert found.relation is not None
    assert found.relation.tolist() == [0, 1]
    assert found.others["source"].tolist() == [[4], [3]]
    assert found.others["target"].tolist() == [[5, 2], [0, 1]]
    frame["relation"] = [1, 0]
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert read(tmp_path / "a.csv", relations=[]).others["source"].tolist() == [[4], [3]]


def test_a_list_for_all(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", source=np.arange(5), target=np.arange(5))
    found = read(tmp_path / "a.npz")
    assert found.ends is None
    assert found.pairs is not None
    assert found.pairs.tolist() == [[0, 1, 2, 3, 4]] * 2


def table(name: str, **columns: Any) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        file = place / name
        given = {"source": [1, 2], "target": [3, 4], "target_neg": [5, 6], **columns}
        given = {key: value for key, value in given.items() if value is not None}
        if name.endswith(".npz"):
            np.savez(file, **given)
        else:
            frame = pd.DataFrame(given)
            frame.to_csv(file, index=False) if name == "a.csv" else frame.to_parquet(file)
        return file

    return write


def truncated(place: Path) -> Path:
    file = table("a.parquet")(place)
    file.write_bytes(file.read_bytes()[:-20])
    return file


BAD: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "missing": (lambda place: place / "a.npz", ["a.npz", "does not exist"]),
    "kind": (lambda place: place / "a.json", ["a.json", "tables end in"]),
    "damaged": (truncated, ["a.parquet", "not a complete Parquet file"]),
    "no rows": (table("a.csv", source=[], target=[], target_neg=[]), ["a.csv", "no rows"]),
    "no column": (table("a.csv", target=None), ["a.csv", "no column 'target'"]),
    "no array": (table("a.npz", source=None), ["a.npz", "no array source", "source_neg"]),
    "out of range": (
        table("a.csv", target_neg=[5, 7]),
        ["a.csv, row 2 (line 3), column 'target_neg'", "there is no item 7", "use ids of nodes"],
    ),
    "below 0": (table("a.npz", source=[1, -1]), ["row 2, column 'source'", "there is no user -1"]),
    "in a list": (
        table("a.parquet", target_neg=[[5], [6, 0, 9]]),
        ["a.parquet, row 2, column 'target_neg'", "there is no item 9"],
    ),
    "itself": (
        table("a.parquet", target_neg=[[5], [6, 4]]),
        ["a.parquet, row 2", "target_neg has the edge itself"],
    ),
    "text": (table("a.parquet", source=["a", "b"]), ["column 'source'", "'a' is text"]),
    "fractions": (table("a.npz", target_neg=[[0.5], [1.0]]), ["'target_neg'", "double"]),
    "no node": (table("a.parquet", target_neg=[[1], None]), ["row 2", "there is no value"]),
    "shape": (table("a.npz", target_neg=np.ones((2, 2, 2), int)), ["target_neg", "(2, 2, 2)"]),
    "length": (table("a.npz", target_neg=np.ones((3, 2), int)), ["target_neg", "(3, 2)"]),
    "ends as lists": (table("a.npz", source=np.ones((2, 2), int)), ["'source'", "fixed_size_list"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    write, expected = BAD[name]
    with pytest.raises(DataError) as caught:
        read(write(tmp_path))
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert caught.value.remedy or name == "damaged"
