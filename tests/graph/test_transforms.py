"""Features of tables that are filled in, scaled and encoded by what the rows for training say."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raygnn.config.graph import TablesGraph
from raygnn.errors import ConfigError, DataError
from raygnn.graph.data import NEVER
from raygnn.graph.outofcore import disk_graph, edge_shuffle
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.outofcore.graph_stages import size_of
from raygnn.graph.sources import load_graph, reading_bytes
from raygnn.graph.tables import feature_columns, reader
from raygnn.graph.tables.description import RandomSplit
from raygnn.graph.tables.frames import draw
from tests.graph.test_outofcore import assert_as_in_memory, missing, out_of_core
from tests.support import company
from tests.support.tables_builder import SPEC, changed, write_shop

pytestmark = pytest.mark.long

CALLS = ("customer", "calls", "customer")
SHARES = {"train": 0.4, "val": 0.1, "seed": 3}
SPLITS: dict[str, dict[str, Any]] = {
    "column": {"split": "fold"},
    "words": {"split": "fold", "split_words": {"holdout": "test"}},
    "shares": {"splits": SHARES},
}


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Return True if values differ by at most 1e-6, relatively if they are above 1."""
    assert found.shape == wanted.shape
    return bool((np.abs(found - wanted) <= 1e-6 * np.maximum(1, np.abs(wanted))).all())


def described(directory: Path, vocabulary: Path | None = None) -> TablesGraph:
    return TablesGraph(format="tables", path=directory / "tables.yaml", vocabulary=vocabulary)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("split", SPLITS)
def test_by_hand(kind: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features equal those of pandas for splits in any form and chunks of any size. Edges without
    splits are fitted to all rows."""
    monkeypatch.setattr(reader, "ROWS", 97)
    monkeypatch.setattr(feature_columns, "_ROWS", 64)
    people, called = company.write(tmp_path, kind, 700, 1, **SPLITS[split])
    training = people["fold"] == "train"
    if split == "shares":
        training = draw(RandomSplit(**SHARES), len(people)) == 0
    data = load_graph(described(tmp_path))
    frame = data.nodes["customer"].data
    assert frame["train_mask"].tolist() == [*training]
    assert frame["feat"].dtype == np.float32
    assert close(frame["feat"], company.by_hand(people[training], people))
    assert close(data.edges[CALLS].data["how"], company.calls_by_hand(called, called))


@pytest.mark.parametrize("split", SPLITS)
def test_edges_are_fitted_to_those_for_training(split: str, tmp_path: Path) -> None:
    """A category that no training edge has is unknown."""
    _, called = company.write(tmp_path, "csv", 200, 4)
    training = called["fold"] == "train"
    if split == "shares":
        training = pd.Series(draw(RandomSplit(**SHARES), len(called)) == 0)
    called.loc[called.index[~training][:9], "line"] = "courier"
    called.to_csv(tmp_path / "calls.csv", index=False)
    spec = company.spec("csv")
    spec["edges"]["customer:calls:customer"] |= SPLITS[split]
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(spec))
    data = load_graph(described(tmp_path))
    frame = data.edges[CALLS].data
    assert frame["train_mask"].tolist() == [*training]
    assert close(frame["how"], company.calls_by_hand(called[training], called))
    lines = data.transforms["customer:calls:customer/how"][2]
    assert lines["state"] == [[[None, "fibre", "landline", "mobile"]]]


@pytest.mark.parametrize("engine", ["memory", "disk"])
def test_tables_with_times_are_fitted_to_what_is_before_validation(
    engine: str, tmp_path: Path
) -> None:
    """Without a column of splits, later rows stay out of the fit: they could reveal the future."""
    shop, visits = {"id": [1, 2, 3], "spent": [1.0, 3.0, 900.0]}, {"from": [1, 2], "to": [2, 3]}
    pd.DataFrame({**shop, "at": [10, 19, 20]}).to_csv(tmp_path / "shop.csv", index=False)
    pd.DataFrame({**visits, "long": [2.0, 800.0], "at": [10, 40]}).to_csv(
        tmp_path / "visits.csv", index=False
    )
    seeds = {"id": [1, 2, 3, 4], "at": [5, 30, 20, 2], "fold": ["train", "test", "val", None]}
    pd.DataFrame({**seeds, "y": [0, 1, 0, 1]}).to_csv(tmp_path / "s.csv", index=False)
    scaled = {"column": "spent", "scale": "minmax"}
    nodes = {
        "shop": {"files": "shop.csv", "id": "id", "time": "at", "features": {"feat": scaled}},
        "seed": {"files": "s.csv", "id": "id", "time": "at", "label": "y", "split": "fold"},
    }
    visit = {"files": "visits.csv", "source": "from", "target": "to", "time": "at"}
    visit["features"] = {"how": {"column": "long", "impute": "mean", "scale": "minmax"}}
    spec = {"nodes": nodes, "edges": {"shop:visits:shop": visit}}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(spec))
    if engine == "memory":
        transforms = load_graph(described(tmp_path)).transforms
    else:
        out_of_core(described(tmp_path), tmp_path / "disk", 1)
        transforms = json.loads((tmp_path / "disk" / "raygnn.json").read_text())["transforms"]
    [column] = transforms["shop/feat"]
    assert (column["state"], column["before"]) == ([[[1.0, 2.0]]], 20)
    [column] = transforms["shop:visits:shop/how"]
    assert (column["state"][0][0], column["before"]) == ([2.0], 20)


@pytest.mark.parametrize("engine", ["memory", "disk"])
@pytest.mark.parametrize("time", ["at", {"column": "at", "unit": "s"}], ids=["plain", "named"])
def test_times_of_transforms_are_in_one_unit(time: Any, engine: str, tmp_path: Path) -> None:
    """Seconds beside dates become microseconds; else all rows would be before validation."""
    days = 1_600_000_000 + 86_400 * np.arange(10)
    users = {"id": range(10), "spent": np.arange(10.0), "at": days}
    pd.DataFrame(users).to_csv(tmp_path / "users.csv", index=False)
    pays = {"from": range(10), "to": range(10), "at": pd.to_datetime(days, unit="s")}
    split = ["train"] * 6 + ["val", "val", "test", "test"]
    pd.DataFrame({**pays, "split": split}).to_csv(tmp_path / "pays.csv", index=False)
    scaled = {"column": "spent", "scale": "minmax"}
    user = {"files": "users.csv", "id": "id", "time": time, "features": {"feat": scaled}}
    pay = {"files": "pays.csv", "source": "from", "target": "to", "time": "at", "split": "split"}
    spec = {"nodes": {"user": user}, "edges": {"user:pays:user": pay}}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(spec))

    def manifest() -> Any:
        if engine == "memory":
            data = load_graph(described(tmp_path), needs_masks=False)
            return {"transforms": data.transforms, "microseconds": data.microseconds}
        out_of_core(described(tmp_path), tmp_path / "disk", 1, trains=False)
        return json.loads((tmp_path / "disk" / "raygnn.json").read_text())

    if time == "at":
        message = "column 'at' of .*users.csv: 16.* seconds .*pays.csv: 16.*, microseconds"
        with pytest.raises(DataError, match=message):
            manifest()
        return
    made = manifest()
    assert made["transforms"]["user/feat"][0]["state"] == [[[0.0, 5.0]]]
    assert made["microseconds"] == ["user"]


def test_shares_are_of_rows_with_a_label(tmp_path: Path) -> None:
    people, _ = company.write(tmp_path, "csv", 300, 2, splits=SHARES)
    people.loc[::3, "leaves"] = None
    people.to_csv(tmp_path / "customers.csv", index=False)
    training = (draw(RandomSplit(**SHARES), 300) == 0) & people["leaves"].notna()
    feat = load_graph(described(tmp_path)).nodes["customer"].data["feat"]
    assert close(feat, company.by_hand(people[training], people))


@settings(max_examples=2, deadline=None, phases=(Phase.reuse, Phase.generate))  # slow to shrink
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["csv", "parquet"]),
    split=st.sampled_from(["column", "shares"]),
    parts=st.integers(1, 2),
)
def test_out_of_core_as_in_memory(seed: int, kind: str, split: str, parts: int) -> None:
    """File for file, those of a later month with the state of the training, too; which is that
    of the training's manifest, and makes of new rows what pandas makes of them."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as place:
        patch.setattr(disk_graph, "RUN", 7)
        patch.setattr(edge_shuffle, "BUCKET", 5)
        patch.setattr(reader, "ROWS", 1 + seed % 40)
        root = Path(place)
        people, called = company.write(root / "old", kind, 60, seed, **SPLITS[split])
        (root / "a").mkdir()
        assert_as_in_memory(described(root / "old"), root / "a", parts)
        kept = root / "a" / "disk" / "raygnn.json"
        new, new_calls = company.write(root / "new", kind, 30, seed + 1, True, split="fold")
        later = described(root / "new", kept)
        (root / "b").mkdir()
        data = load_graph(later, needs_masks=False, trains=False)
        make_partition(missing(root / "b" / "local", parts), data)
        out_of_core(later, root / "b" / "disk", parts, trains=False)
        manifests = [
            json.loads((root / at / "raygnn.json").read_text())["transforms"]
            for at in ("a/disk", "a/local", "b/disk", "b/local")
        ]
        assert manifests[1:] == manifests[:-1]
        training = people["fold"] == "train"
        if split == "shares":
            training = draw(RandomSplit(**SHARES), len(people)) == 0
        assert close(data.nodes["customer"].data["feat"], company.by_hand(people[training], new))
        wanted = company.calls_by_hand(called, new_calls)
        assert close(data.edges[CALLS].data["how"], wanted)


def test_files_are_one_table_out_of_core(tmp_path: Path) -> None:
    """Rows are numbered over all files, also those of edges, some of which are dropped."""
    people, called = company.write(tmp_path, "csv", 90, 5, splits=SHARES)
    for at in range(3):
        people[at * 30 : (at + 1) * 30].to_csv(tmp_path / f"customers-{at}.csv", index=False)
        called[at * 90 : (at + 1) * 90].to_csv(tmp_path / f"calls-{at}.csv", index=False)
    spec = company.spec("csv", splits=SHARES)
    spec["nodes"]["customer"]["files"] = "customers-*.csv"
    edges = spec["edges"]["customer:calls:customer"]
    edges |= {"files": "calls-*.csv", "splits": SHARES, "undirected": True}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(spec))
    graph = described(tmp_path)
    how = load_graph(graph).edges[CALLS].data["how"][: len(called)]
    training = draw(RandomSplit(**SHARES), len(called)) == 0
    assert close(how, company.calls_by_hand(called[training], called))
    assert_as_in_memory(graph, tmp_path, 2)


# -- one transform at a time


def feat(
    directory: Path,
    column: dict[str, Any],
    values: Any,
    train: int | None = None,
    kind: str = "csv",
) -> list[Any]:
    """Return the features of users with these values; the first ``train`` users are for
    training."""
    spec = copy.deepcopy(SPEC)
    spec["nodes"]["user"] |= {"features": {"feat": {"column": "v", **column}}}
    num = len(values)
    names = [f"u{n}" for n in range(num)]
    fold = ["train" if n < (train or num) else "test" for n in range(num)]
    users = {"name": names, "age": None, "income": None, "v": values}
    graph = write_shop(
        directory,
        kind,
        spec,
        users={**users, "class": ["no"] * num, "fold": fold},
        bought={"name": names[:1] * 3},
    )
    rows: list[Any] = load_graph(graph).nodes["user"].data["feat"].tolist()
    return [row[0] if len(row) == 1 else row for row in rows]


WHEN = ["2024-02-29 23:30:00", "2024-12-31 00:00:00"]
ONE_BY_ONE: dict[str, tuple[dict[str, Any], list[Any], int | None, list[Any]]] = {
    "standard, of equal numbers": ({"scale": "standard"}, [0.1, 0.1, 0.1, 1.1], 3, [0, 0, 0, 1]),
    "minmax, beyond the training's": ({"scale": "minmax"}, [2, 4, 3, 8], 2, [0, 1, 0.5, 3]),
    "minmax, of equal numbers": ({"scale": "minmax"}, [2, 2, 3], 2, [0, 0, 1]),
    "log of nothing": ({"scale": "log"}, [0, np.e - 1], None, [0, 1]),
    "rank_gauss, of one number": ({"scale": "rank_gauss"}, [5], None, [0]),
    "rank_gauss, of equal numbers": ({"scale": "rank_gauss"}, [5, 5, 5], None, [0, 0, 0]),
    "rank_gauss": (
        {"scale": "rank_gauss"},
        [1, 2, 3, 9, -9, 2.5],
        3,
        [-0.967422, 0, 0.967422, 0.967422, -0.967422, 0.674490],
    ),
    "the mean of an even number": ({"impute": "median"}, [1, 2, 5, 9, None], 4, [1, 2, 5, 9, 3.5]),
    "imputed before it is scaled": (
        {"impute": 5, "scale": "minmax"},
        [1, None, 3],
        None,
        [0, 1, 0.5],
    ),
    "missing ones have a feature of their own": (
        {"impute": "mean", "indicator": True, "scale": "minmax"},
        [1, None, 3],
        None,
        [[0, 0], [0.5, 1], [1, 0]],
    ),
    "impute alone": ({"impute": -1}, [1, None], None, [1, -1]),
    "a bound is in the bucket above": (
        {"bucket": [1, 2]},
        [0, 1, 2, 3],
        None,
        [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]],
    ),
    "two quantiles": ({"bucket": 2}, [1, 2, 3, 9], 3, [[1, 0], [0, 1], [0, 1], [0, 1]]),
    "numbers as words": ({"onehot": True}, [10, 9, 10], None, [[0, 1], [1, 0], [0, 1]]),
    "words, and one for others": (
        {"onehot": True, "unknown": "bucket"},
        ["b", "a", None, "c"],
        2,
        [[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 0, 0]],
    ),
    "a word for missing ones": (
        {"onehot": True, "impute": "a"},
        ["b", "a", None],
        None,
        [[0, 1], [1, 0], [1, 0]],
    ),
    "a word for missing ones that is in rows for training": (
        {"onehot": True, "impute": "a"},
        ["b", "a", None],
        2,
        [[0, 1], [1, 0], [1, 0]],
    ),
    "a number for missing ones": (
        {"onehot": True, "impute": 0},
        [0, 1, None],
        None,
        [[1, 0], [0, 1], [1, 0]],
    ),
    "truth values": ({"scale": "minmax"}, [True, False, True], None, [1, 0, 1]),
    "parts": (
        {"parts": ["year", "quarter", "month", "week", "day", "weekday", "day_of_year", "hour",
                   "minute", "second"]},
        WHEN,
        None,
        [[2024, 1, 2, 9, 29, 3, 60, 23, 30, 0], [2024, 4, 12, 1, 31, 1, 366, 0, 0, 0]],
    ),
    "parts as words": ({"parts": "year", "onehot": True}, ["2023-01-01", "2021-01-01"], None,
                       [[0, 1], [1, 0]]),
    "sine and cosine of parts": (
        {"cyclic": ["month", "hour"]},
        WHEN,
        None,
        [[3**0.5 / 2, 0.5, np.sin(23 / 12 * np.pi), np.cos(23 / 12 * np.pi)], [0, 1, 0, 1]],
    ),
    "several words": (
        {"onehot": True, "separator": "|", "unknown": "bucket"},
        ["b| a", "b", None, "c|a|a"],
        2,
        [[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 0]],
    ),
    "days since": ({"since": "2024-02-28"}, WHEN, None, [1 + 23.5 / 24, 307]),
    "days since, of a zone": ({"since": "2024-02-29T01:30:00+02:00"}, WHEN, None,
                              [1, 306 + 1 / 48]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one(name: str, kind: str, tmp_path: Path) -> None:
    column, values, train, wanted = ONE_BY_ONE[name]
    if kind == "parquet" and values is WHEN:
        values = [pd.Timestamp(value).to_pydatetime() for value in values]
    elif kind == "parquet" and values == ["2023-01-01", "2021-01-01"]:
        values = [pd.Timestamp(value).date() for value in values]
    assert close(np.array(feat(tmp_path, column, values, train, kind)), np.array(wanted))


def test_a_hash_is_of_the_word_alone(tmp_path: Path) -> None:
    """The bucket depends neither on the stored type nor on the other values."""
    many = feat(tmp_path, {"hash": 50}, list(range(30)), kind="parquet")
    few = feat(tmp_path, {"hash": 50}, ["7", "29", "x"])
    assert few[:2] == [many[7], many[29]]
    assert all(sum(row) == 1 for row in many)
    assert len({row.index(1) for row in many}) > 15


def test_points_in_time_with_a_zone_are_of_utc(tmp_path: Path) -> None:
    values = [pd.Timestamp("2024-01-01 01:00", tz="Europe/Berlin").to_pydatetime()]
    assert feat(tmp_path, {"parts": ["year", "hour"]}, values, kind="parquet") == [[2024, 0]]
    assert feat(tmp_path, {"parts": ["year", "hour"]}, ["2024-01-01T01:00:00+02:00"]) == [
        [2023, 23]
    ]


def test_lists_are_as_many_features(tmp_path: Path) -> None:
    """Each element has its own state, also where one is missing."""
    values = [[1.0, 10.0], [3.0, None], [2.0, 40.0], [7.0, 20.0]]
    column = {"impute": "mean", "scale": "minmax"}
    wanted = [[0, 0], [1, 0.5], [0.5, 1], [3, 1 / 3]]
    found = feat(tmp_path, column, values, 3, "parquet")
    assert np.allclose(found, wanted, atol=1e-6)
    ((state, other),) = [one["state"] for one in _manifest(tmp_path)["user/feat"]]
    assert state == [[2.0], [1.0, 2.0]]
    assert other == [[25.0], [10.0, 30.0]]


def test_several_words_in_a_list(tmp_path: Path) -> None:
    """A feature for each word of a list; a hash of several is that of each."""
    lists = [["b", "a"], [], None, ["b", None], ["c"]]
    found = feat(tmp_path, {"onehot": True, "unknown": "bucket"}, lists, 4, "parquet")
    assert found == [[0, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 1], [1, 0, 0]]
    twice, column = [["a", "a"], ["b"], ["b"]], {"onehot": True, "unknown": "bucket"}
    found = feat(tmp_path, {**column, "min_count": 2}, twice, 3, "parquet")
    assert found == [[1, 0], [0, 1], [0, 1]]  # "a" is in one row
    with pytest.raises(DataError, match="no training row has 'c'") as caught:
        feat(tmp_path, {"onehot": True, "impute": "a"}, lists, 4, "parquet")
    assert "row 5" in str(caught.value.where)
    of_each = np.array(feat(tmp_path, {"hash": 5}, [["b"], ["a"]], None, "parquet"))
    assert feat(tmp_path, {"hash": 5}, lists[:1], None, "parquet") == [[*of_each.max(0)]]
    assert feat(tmp_path, {"onehot": True}, [[3, 10], [9]], None, "parquet") == [
        [1, 0, 1],
        [0, 1, 0],
    ]


def test_times_for_seeds_are_stored_as_they_are(tmp_path: Path) -> None:
    found = feat(tmp_path, {"since": "seed"}, ["2024-01-01", None, "1960-01-01"])
    assert found == [1704067200 * 10**6, NEVER, -315619200 * 10**6]


def test_half_precision_is_scaled_in_double(tmp_path: Path) -> None:
    half = pa.array(np.array([1, 3, 2], np.float16))
    assert feat(tmp_path, {"scale": "minmax"}, half, kind="parquet") == [0, 1, 0.5]


def _manifest(directory: Path) -> dict[str, Any]:
    return load_graph(TablesGraph(format="tables", path=directory / "shop.yaml")).transforms


def test_fill_stands_in_before_scaling(tmp_path: Path) -> None:
    """The table's `fill` replaces missing values before a column without its own is scaled."""
    spec = changed("nodes user fill", 9.0)
    spec["nodes"]["user"]["features"]["feat"] = ["age", {"column": "income", "scale": "minmax"}]
    users = {"age": [None, 2.0, 3.0], "income": [1.0, None, 5.0], "fold": ["train"] * 3,
             "class": ["no"] * 3}  # fmt: skip
    found = load_graph(write_shop(tmp_path, spec=spec, users=users)).nodes["user"].data["feat"]
    assert found.tolist() == [[9, 0], [2, 1], [3, 0.5]]


# -- what is refused


def test_missing_values_are_counted(tmp_path: Path) -> None:
    """The message names the column, their number, the first row and a remedy before any
    transform."""
    ages = [1.0] * 100_000
    ages[70_000] = ages[70_001] = ages[99_999] = None
    users = {
        "name": [f"u{n}" for n in range(100_000)],
        "age": ages,
        "income": [1.0] * 100_000,
        "class": ["no"] * 100_000,
        "fold": ["train"] * 100_000,
    }
    plain = write_shop(tmp_path, users=users, bought={"name": ["u1"] * 3})
    text = (tmp_path / "shop.yaml").read_text()
    for said in (text, text.replace("- age", "- {column: age, scale: log}")):
        (tmp_path / "shop.yaml").write_text(said)
        with pytest.raises(
            DataError, match="there is no number; 3 of 100,000 are missing"
        ) as caught:
            load_graph(plain)
        place = "users.csv, row 70001 (line 70002), column 'age'"
        assert str(caught.value.where).endswith(place)
        assert "{column: age, impute: median}" in str(caught.value.remedy)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_missing_truth_values(suffix: str, tmp_path: Path) -> None:
    """They can be imputed by a value; the remedy names one."""
    users = pd.DataFrame({"name": ["u1", "u2"], "here": pd.array([True, None], "boolean")})
    write = users.to_csv if suffix == "csv" else users.to_parquet
    write(tmp_path / f"users.{suffix}", index=False)
    pd.DataFrame({"source": ["u1"], "target": ["u2"]}).to_csv(tmp_path / "knows.csv", index=False)
    for impute in ("", ", impute: 0"):
        (tmp_path / "users.yaml").write_text(
            f"nodes: {{user: {{files: users.{suffix}, id: name, features: {{feat: "
            f"[{{column: here{impute}}}]}}}}}}\n"
            "edges: {'user:knows:user': {files: knows.csv, source: source, target: target}}\n"
        )
        graph = TablesGraph(format="tables", path=tmp_path / "users.yaml")
        if not impute:
            with pytest.raises(DataError) as caught:
                load_graph(graph, needs_masks=False)
            assert "or impute: 0 for false" in str(caught.value.remedy)
        else:
            made = load_graph(graph, needs_masks=False).nodes["user"].data["feat"]
            assert made.tolist() == [[1.0], [0.0]]


REFUSED: dict[str, tuple[dict[str, Any], list[Any], str, str]] = {
    "no word": ({"onehot": True}, ["a", None], "no value; 1 of 2", "unknown: bucket"),
    "no word to hash": ({"hash": 3}, ["a", None], "no value; 1 of 2", "impute"),
    "an unknown word": ({"onehot": True}, ["a", "b", "c"], "has 'b', 'c'", "unknown: bucket"),
    "log of less": ({"scale": "log"}, [1, -1.5], "above -1, and the number is -1.5", ""),
    "no date": ({"parts": "year"}, ["2024-01-01", "soon"], "'soon'", "dates such as"),
    "whole numbers": ({"parts": "year"}, [20240101, 1], "integers", "need dates"),
    "half a word": ({"onehot": True}, [1.5, 2], "'1.5'|1.5", ""),
    "nothing to average": ({"impute": "mean"}, [None, 1.0], "no training row has a number", ""),
    "text": ({"scale": "standard"}, ["a", "b"], "'a'", "onehot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    column, values, message, remedy = REFUSED[name]
    kind = "parquet" if name in ("half a word", "whole numbers") else "csv"
    with pytest.raises(DataError, match=message) as caught:
        feat(tmp_path, column, values, 1, kind)
    assert "users" in str(caught.value.where)
    assert "column 'v'" in str(caught.value.where)
    assert remedy in str(caught.value.remedy)


def test_an_invalid_date_names_a_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column '2024-13-01'"):
        feat(tmp_path, {"since": "2024-13-01"}, ["2024-01-01", "2024-01-02"])


def test_points_in_time_need_parts(tmp_path: Path) -> None:
    when = [pd.Timestamp("2024-01-01").to_pydatetime()]
    with pytest.raises(DataError, match="timestamp") as caught:
        feat(tmp_path, {}, when, kind="parquet")
    assert "parts or since" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"column": "age", "scale": "standard"}, "there are no training rows"),
        ({"column": "age", "onehot": True, "unknown": "bucket"}, "there are 0 categories"),
    ],
)
def test_without_rows_for_training(column: Any, message: str, tmp_path: Path) -> None:
    spec = changed("nodes user features", {"feat": column})
    graph = write_shop(tmp_path, spec=spec, users={"fold": ["val", "val", None]})
    with pytest.raises(DataError, match=message) as caught:
        load_graph(graph, needs_masks=False, trains=False)
    assert "column 'age'" in str(caught.value.where)


def test_too_many_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_columns, "MAX_WIDTH", 2)
    with pytest.raises(DataError, match="there are 3 categories, expected 1 to 2") as caught:
        feat(tmp_path, {"onehot": True}, ["a", "b", "c"])
    assert "categories" in str(caught.value.remedy)


DESCRIBED = {
    "parts and their waves": ({"parts": "month", "cyclic": "month"}, "parts and cyclic both"),
    "no such wave": ({"cyclic": "year"}, "weekday"),
    "separator of what": ({"separator": "|"}, "separator '|' would be ignored"),
    "a seed's time, scaled": ({"since": "seed", "scale": "log"}, "scale .* would be ignored"),
    "parts and since": ({"parts": "year", "since": "2024-01-01"}, "parts and since both"),
    "two codes": ({"onehot": True, "hash": 3}, "onehot and hash both"),
    "scaled words": ({"onehot": True, "scale": "log"}, "onehot and scale both"),
    "a later log": ({"scale": ["standard", "log"]}, "log applies to the values themselves"),
    "unknown of what": ({"scale": "log", "unknown": "bucket"}, "unknown 'bucket' would be ignored"),
    "count of what": ({"onehot": True, "min_count": 2}, "min_count 2 .* there is no bucket"),
    "count of hashes": ({"hash": 3, "min_count": 2}, "min_count 2 .* there is no onehot"),
    "mean of words": ({"hash": 3, "impute": "mean"}, "categories have no mean"),
    "an indicator of words": ({"onehot": True, "indicator": True}, "indicator true would be ign"),
    "a word for a number": ({"scale": "log", "impute": "none"}, "'none' is not a number"),
    "no such scale": ({"scale": "standart"}, "standard"),
    "no such part": ({"parts": "decade"}, "weekday"),
    "no such key": ({"imputed": 1}, "impute"),
    "one bucket": ({"bucket": 1}, "from 2 to 1024"),
    "bounds": ({"bucket": [3, 3]}, "ascending"),
    "a number for a time": ({"since": 2024}, "since"),
    "true in place of a number": ({"impute": True}, "mean, median, or the value itself"),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_descriptions_that_cannot_be(name: str, tmp_path: Path) -> None:
    column, message = DESCRIBED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        feat(tmp_path, column, [1, 2])
    assert "shop.yaml: nodes.user.features.feat" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "columns"),
    [
        ("nodes user features feat", ["age", {"column": "age", "since": "seed"}]),
        ("edges user:bought:item features", {"how": {"column": "at", "since": "seed"}}),
    ],
)
def test_a_time_for_seeds_is_an_array_of_nodes(place: str, columns: Any, tmp_path: Path) -> None:
    graph = write_shop(tmp_path, spec=changed(place, columns))
    with pytest.raises(ConfigError, match="since: seed needs a separate array, in a table of"):
        load_graph(graph)


def test_several_columns_have_one_transform(tmp_path: Path) -> None:
    both = {"column": ["age", "income"], "impute": 0, "scale": "standard"}
    each = [{**both, "column": one} for one in both["column"]]
    found = []
    for number, columns in enumerate((both, each)):
        (directory := tmp_path / str(number)).mkdir()
        spec = changed("nodes user features feat", columns)
        found.append(load_graph(write_shop(directory, spec=spec)).nodes["user"].data["feat"])
    assert found[0].shape[1] == 2
    assert np.array_equal(*found)


def test_nodes_that_edges_add_have_nothing_to_transform(tmp_path: Path) -> None:
    spec = changed("edges user:bought:item missing", "add")
    spec["nodes"]["user"]["fill"] = spec["nodes"]["item"]["fill"] = 0.0
    spec["nodes"]["item"]["categories"] = {}
    spec["nodes"]["user"]["features"]["feat"] = {"column": "age", "scale": "standard"}
    with pytest.raises(ConfigError, match="no values to transform"):
        load_graph(write_shop(tmp_path, spec=spec))


# -- the state of the training


def trained(directory: Path, column: Any = None) -> Path:
    directory.mkdir()
    spec = changed("nodes user features feat", column or {"column": "age", "scale": "minmax"})
    graph = write_shop(directory, spec=spec, users={"fold": ["train"] * 3, "class": ["no"] * 3})
    make_partition(missing(directory / "p", 1), load_graph(graph))
    return directory / "p" / "raygnn.json"


def later(directory: Path, kept: Path, column: Any) -> TablesGraph:
    directory.mkdir()
    spec = changed("nodes user features feat", column)
    users = {"class": ["no"] * 3, "fold": [None] * 3, "years": [31.0, 62.5, -15.0]}
    graph = write_shop(directory, spec=spec, users=users)
    return graph.model_copy(update={"vocabulary": kept})


def test_the_column_may_have_another_name(tmp_path: Path) -> None:
    """The training's users were 28 to 51 years old."""
    graph = later(
        tmp_path / "new", trained(tmp_path / "old"), {"column": "years", "scale": "minmax"}
    )
    data = load_graph(graph, needs_masks=False, trains=False)
    wanted = (np.array([31.0, 62.5, -15.0]) - 28) / 23
    assert np.allclose(data.nodes["user"].data["feat"][:, 0], wanted)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (None, "age"),
        ("age", {"column": "age", "scale": "minmax"}),
        (None, {"column": "age", "scale": "standard"}),
        (None, {"column": "age", "scale": "minmax", "impute": 0}),
        (None, [{"column": "age", "scale": "minmax"}, "income"]),
    ],
)
@pytest.mark.parametrize("engine", ["memory", "disk"])
def test_other_transforms_than_the_training_had(
    engine: str, then: Any, now: Any, tmp_path: Path
) -> None:
    graph = later(tmp_path / "new", trained(tmp_path / "old", then), now)

    def read() -> None:
        if engine == "memory":
            load_graph(graph, needs_masks=False, trains=False)
        else:
            out_of_core(graph, tmp_path / "p", 1, trains=False)

    said = (
        "columns are not transformed as in the training: ('age'$|there are 2 columns, and were 1)"
    )
    with pytest.raises(DataError) as caught:
        read()
    assert re.match(said, caught.value.what)
    assert "user/feat" in str(caught.value)


def test_memory_is_estimated_with_what_columns_become(tmp_path: Path) -> None:
    rows = 30_000
    pq.write_table(pa.table({"name": range(rows), "word": ["w"] * rows}), tmp_path / "u.parquet")
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "e.parquet")

    def estimates(column: Any) -> tuple[int, int, int]:
        (tmp_path / "tables.yaml").write_text(
            yaml.safe_dump(
                {
                    "nodes": {"u": {"files": "u.parquet", "id": "name", "features": {"x": column}}},
                    "edges": {"to": {"files": "e.parquet", "source": "a", "target": "b"}},
                }
            )
        )
        size = size_of(described(tmp_path))
        assert size is not None
        data = load_graph(described(tmp_path), needs_masks=False, trains=False)
        array = data.nodes["u"].data["x"].nbytes
        return reading_bytes(described(tmp_path)), size.node_bytes, array

    for before, now in zip(estimates("name"), estimates({"column": "word", "hash": 100})):
        assert now - before == pytest.approx(rows * 4 * 100, rel=0.02)
