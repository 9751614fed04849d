"""Training tables as they are read: rows, splits and targets, and what is wrong with them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.dry_run import check_weights
from raygnn.errors import ConfigError, DataError
from raygnn.graph.data import TABLE, TrainingRows
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.training_rows import read_training_rows
from raygnn.prediction.request import of_rows
from raygnn.runs.run import Run
from raygnn.worker.job import TaskTarget
from tests.support.small_jobs import job

IDS = pa.array(["ann", "bob", "cem"], pa.large_string())
GOOD = "who,at,left\ncem,2024-01-01,no\nann,2024-01-02,yes\ncem,2024-02-01,yes\nbob,2024-03-01,\n"
KEPT = GOOD.replace(",no", ",kept").replace(",yes", ",went")  # no truth values to DuckDB
SELECT = 'select who, "at", "left" from visited join person on name = who'
FOLDS = ["train", "train", "val", "test"]


def config_of(place: Path, text: str = GOOD, graph: Any = None, **task: Any) -> Config:
    """Return a job whose training table has the column ``left`` as target."""
    (place / "rows.csv").write_text(text)
    table = {"files": str(place / "rows.csv"), "entity": "who", "time": "at", "target": "left"}
    table |= task.pop("table", {})
    task.setdefault("split", {"by": "time", "val": "2024-02-01", "test": "2024-03-01"})
    task = {"kind": "node_classification", "ntype": "person", "table": table, **task}
    task = {key: value for key, value in task.items() if value is not None}
    asked = job(place, task=task, model={"kind": "sage", "norm": "layer"})
    return load_config(asked if graph is None else {**asked, "graph": graph})


def read(place: Path, *args: Any, **task: Any) -> TrainingRows:
    return read_training_rows(config_of(place, *args, **task), IDS, len(IDS))


def test_rows_by_time(tmp_path: Path) -> None:
    rows = read(tmp_path)
    assert rows.nodes.tolist() == [2, 0, 2, 1]
    assert rows.times is not None
    days = (rows.times - rows.times[0]) // 86_400_000_000
    assert days.tolist() == [0, 1, 31, 60]
    assert rows.splits.tolist() == [0, 0, 1, 2]
    assert rows.targets is not None
    assert rows.targets.tolist() == [0, 1, 1, -1]  # of a later split it may be unknown
    assert rows.words == ["no", "yes"]
    assert rows.counts == {"train": 2, "val": 1, "test": 1}


def test_files_of_each_split_and_a_column_are_the_same(tmp_path: Path) -> None:
    """A split may have several files, CSV and Parquet; classes are numbered over all of them."""
    known = read(tmp_path)
    head, *lines = GOOD.splitlines()
    (tmp_path / "a1.csv").write_text(f"{head}\n{lines[0]}\n")
    (tmp_path / "a2.csv").write_text(f"{head}\n{lines[1]}\n")
    who, at, left = (pa.array([value or None]) for value in lines[2].split(","))
    pq.write_table(pa.table({"left": left, "who": who, "at": at}), tmp_path / "val.parquet")
    (tmp_path / "test.csv").write_text(f"{head}\n{lines[3]}\n")
    names = {"train": "a*.csv", "val": "val.parquet", "test": "test.csv"}
    files = {split: str(tmp_path / name) for split, name in names.items()}
    column = "\n".join(
        [f"{head},fold", *(f"{line},{fold}" for line, fold in zip(lines, FOLDS, strict=True))]
    )
    for other in (
        read(tmp_path, table={"files": files}, split=None),
        read(tmp_path, column, table={"split": "fold"}, split=None),
    ):
        for name in ("nodes", "times", "splits", "targets"):
            np.testing.assert_array_equal(getattr(other, name), getattr(known, name))
        assert other.words == known.words


def config_of_select(place: Path, sql: str = SELECT, url: str | None = None) -> Config:
    """Return a job whose training table is a query over tables of its graph."""
    (place / "people.csv").write_text("name\nann\nbob\ncem\n")
    head, *lines = KEPT.splitlines()
    (place / "visits.csv").write_text("\n".join([head, *reversed(lines)]))
    person = {"sql": "select * from 'people.csv'", "id": "name"}
    visited = {"files": "visits.csv", "source": "who", "target": "who"}
    described = {"nodes": {"person": person}, "edges": {"person:visited:person": visited}}
    (place / "tables.yaml").write_text(yaml.safe_dump(described))
    table = {"files": None, "sql": sql, "url": url}
    graph = {"format": "tables", "path": str(place / "tables.yaml")}
    return config_of(place, graph=graph, table=table)


def test_rows_of_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names tables of the graph, of which one is a query, or it runs in a database; its rows are
    in the order of their values, so that they are the same each time."""
    head, *lines = KEPT.splitlines()
    known = read(tmp_path, "\n".join([head, *sorted(lines)]))
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        pd.read_csv(tmp_path / "rows.csv").to_sql("visits", database, index=False)
        database.commit()
    monkeypatch.setenv("SHOP", f"sqlite:///{tmp_path / 'shop.db'}")
    for sql, url in [(SELECT, None), ("select * from visits", "env:SHOP")]:
        rows = read_training_rows(config_of_select(tmp_path, sql, url), IDS, len(IDS))
        for name in ("nodes", "times", "splits", "targets"):
            np.testing.assert_array_equal(getattr(rows, name), getattr(known, name))
        assert rows.words == known.words
    first, again = (read_training_rows(config_of_select(tmp_path), IDS, len(IDS)) for _ in "12")
    assert first.digest == again.digest
    (tmp_path / "next.csv").write_text("who,at\nbob,2030-01-01\n")
    asked = of_rows(config_of_select(tmp_path), tmp_path / "next.csv", "", "all")
    assert read_training_rows(asked.asking(), IDS, len(IDS)).nodes.tolist() == [1]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("select 1; select 2", "task.table.sql: this is not a single SELECT"),
        (
            "select * from visit",
            "'visit' is neither a table nor a CSV or Parquet file\n  → did you mean visited?",
        ),
        ("select * from '/etc/rows.csv'", "outside the directories that a query can read"),
        (f"{SELECT} where false", "task.table.sql: the query returns no rows"),
        (SELECT.replace("who", "'dan' as who", 1), "the query of task.table, row 1, column 'who'"),
        (
            SELECT.replace('"at"', 'null::date as "at"', 1),
            "the query of task.table, row 1, column 'at'",
        ),
    ],
)
def test_wrong_queries(sql: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_training_rows(config_of_select(tmp_path, sql), IDS, len(IDS))
    assert said in str(caught.value)


def test_rows_to_predict_need_no_target(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "next.csv").write_text("who,at\nbob,2030-01-01\n")
    asked = of_rows(config, tmp_path / "next.csv", "", "all").asking()
    rows = read_training_rows(asked, IDS, len(IDS))
    assert rows.targets is None
    assert rows.splits.tolist() == [-1]
    (tmp_path / "next.csv").write_text("who,at,left\nbob,2030-01-01,yes\n")
    found = read_training_rows(asked, IDS, len(IDS), ["maybe", "yes"])
    assert found.targets is not None
    assert found.targets.tolist() == [1]  # as the training numbered them


def test_a_table_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*given: Any) -> Any:
        (tmp_path / "rows.csv").write_text(GOOD + "ann,2024-04-01,no\n")
        return found(*given)

    found = Ids.lookup
    monkeypatch.setattr(Ids, "lookup", lookup)
    with pytest.raises(DataError, match="the file changed while it was read"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            GOOD.replace("cem,2024-02", "dan,2024-02"),
            "row 3 (line 4), column 'who': there is no person 'dan'",
        ),
        (GOOD.replace("bob,", ","), "row 4 (line 5), column 'who': there is no value"),
        (GOOD.replace("2024-02-01", ""), "row 3 (line 4), column 'at': there is no value"),
        (GOOD.replace("2024-02-01", "soon"), "row 3 (line 4), column 'at': the value is 'soon'"),
        (GOOD.replace("2024-02-01", "7"), "row 3 (line 4), column 'at': the value is '7'"),
        (GOOD.replace("02,yes", "02,"), "row 2 (line 3), column 'left': a training row has no"),
        ("who,at,left\n", "the table has no rows"),
        ("who,left\nann,yes\n", "there is no column 'at'"),
        ("who,at,left\nann,2024-05-01,yes\n", "there are no training rows"),
    ],
)
def test_bad_rows_are_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path, text)
    assert said in str(refused.value)
    assert refused.value.remedy


def test_remedies_are_those_of_training_tables(tmp_path: Path) -> None:
    """Not those of a graph's tables, whose keys a training table does not have."""
    table = {"split": "fold"}
    folds = "who,at,left,fold\nann,1,no,train\nbob,2,yes,dev\n"
    with pytest.raises(DataError, match="'dev' is no split") as raised:
        read(tmp_path, folds, table=table, split=None)
    assert raised.value.remedy == "use train, val, test or nothing"
    with pytest.raises(DataError) as raised:
        read(tmp_path, "who,at,left\nann,1.5,no\n")
    assert "unit" not in str(raised.value.remedy)
    with pytest.raises(DataError, match=r"^no file matches '/.*rows-\*\.csv'") as raised:
        read(tmp_path, table={"files": str(tmp_path / "rows-*.csv")})
    assert "training table" in str(raised.value.remedy)


def test_class_weights_are_counted(tmp_path: Path) -> None:
    class Given:
        def lists(self, config: Config, name: str, target: Any) -> dict[str, Any]:
            return {TABLE: read_training_rows(config, IDS, len(IDS))}

    goals = {"": TaskTarget("person", None)}
    check_weights(config_of(tmp_path, class_weights=[1, 2]), cast(Any, Given()), goals)
    with pytest.raises(ConfigError, match="there are 3 weights, and 2 classes"):
        check_weights(config_of(tmp_path, class_weights=[1, 2, 3]), cast(Any, Given()), goals)


@pytest.mark.parametrize("kind", ["file", "frame"])
def test_a_notebook_predicts_for_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Run.predict` asks the command with the rows, as a file."""
    frame = pd.DataFrame({"who": ["bob", "ann"], "at": [1, 7]})
    frame = frame[frame["at"] > 1]  # whose index is no column
    frame.to_parquet(tmp_path / "rows.parquet", index=False)

    def asked(verb: str, run: str, *args: str, timeout: float) -> None:
        options = dict(arg[2:].split("=", 1) for arg in args)
        rows = pq.read_table(options["rows"]).to_pandas(ignore_metadata=True)
        rows.assign(prediction=1).to_parquet(options["out"])

    monkeypatch.setattr("raygnn.runs.run.run_verb", asked)
    monkeypatch.setattr(Run, "shown", "run")
    run = object.__new__(Run)
    found = run.predict(rows=frame if kind == "frame" else tmp_path / "rows.parquet")
    assert found.to_dict("list") == {"who": ["ann"], "at": [7], "prediction": [1]}


def test_a_test_before_the_training_is_refused(tmp_path: Path) -> None:
    text = "who,at,left,fold\nann,2024-02-01,yes,train\nbob,2024-01-31,no,test\n"
    with pytest.raises(DataError, match=r"row 2 .*'at': the row is in test, and earlier than"):
        read(tmp_path, text, table={"split": "fold"}, split=None)
    read(tmp_path, text.replace("01-31", "02-01"), table={"split": "fold"}, split=None)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"ntype": None}, "the node type of the table"),
        ({"table": {"target": ["a", "b"]}}, "a class label needs one column"),
        ({"split": None}, "in exactly one way"),
        ({"table": {"split": "fold"}}, "in exactly one way"),
        ({"split": {"by": "random"}}, "rows are split by their time"),
        ({"table": {"time": None}}, "rows are split by their time"),
        (
            {"table": {"files": {"train": "a.csv"}, "split": "fold"}},
            "split 'fold' would be ignored",
        ),
        ({"table": {"files": {"dev": "a.csv"}}}, "train"),
        ({"table": {"entity": ""}}, "entity"),
        ({"table": {"files": None}}, "files and sql are both missing"),
        ({"table": {"sql": "select 1"}}, "files and sql are both set"),
        ({"table": {"files": None, "sql": "select 1"}}, "graph.format is not tables"),
        ({"table": {"url": "env:SHOP"}}, "table.url"),
        ({"table": {"url": "postgresql://ann:secret@host/shop"}}, "a password written here"),
        ({"target": "left"}, "target 'left' would be ignored"),
    ],
)
def test_contradictions_are_refused(task: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **task)
    assert said in str(refused.value)
    assert "task" in str(refused.value)
    assert "secret" not in str(refused.value)
