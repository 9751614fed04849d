"""Proposed descriptions of directories of tables: the keys that are there and no other, and a graph
that is read as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raygnn.cli import main
from raygnn.config.graph import TablesGraph
from raygnn.graph.data import GraphData
from raygnn.graph.sources import load_graph
from raygnn.graph.tables.proposal import propose
from tests.support.builders import assert_refused
from tests.support.tables_builder import write_table


def read(directory: Path, text: str) -> GraphData:
    (directory / "graph.yaml").write_text(text)
    graph = TablesGraph(format="tables", path=directory / "graph.yaml")
    return load_graph(graph, needs_masks=False)


def keys_of(text: str) -> set[tuple[str, str, str]]:
    """Table, column and other table of each foreign key."""
    nodes = yaml.safe_load(text)["nodes"].items()
    return {(t, column, of) for t, one in nodes for column, of in one.get("keys", {}).items()}


def test_a_database_with_thirteen_keys(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f1.yaml"
    assert main(["tables", str(data_dir / "f1"), "--out", str(out)]) == 0
    text = out.read_text()
    race = {"constructor_results", "constructor_standings", "qualifying", "results", "standings"}
    driver = {"qualifying", "results", "standings"}
    constructor = {"constructor_results", "constructor_standings", "qualifying", "results"}
    assert keys_of(text) == {
        *((table, "raceId", "races") for table in race),
        *((table, "driverId", "drivers") for table in driver),
        *((table, "constructorId", "constructors") for table in constructor),
        ("races", "circuitId", "circuits"),
    }
    nodes = yaml.safe_load(text)["nodes"]
    ids = {name: table["id"] for name, table in nodes.items()}
    assert ids["results"] == "resultId"
    assert ids["standings"] == "driverStandingsId"
    assert {name for name, table in nodes.items() if "time" in table} == race | {"races"}
    data = read(tmp_path, text)
    assert {name: frame.num for name, frame in data.nodes.items()}["results"] == 26_559
    assert len(data.edges) == 26
    assert main(["tables", str(data_dir / "f1"), "--out", str(out)]) == 2
    assert "name a new file" in capsys.readouterr().err


def traps() -> dict[str, dict[str, list[Any]]]:
    random = np.random.default_rng(0)
    grades = random.integers(1, 9, 60).tolist()
    words = [f"note {n}" for n in range(60)]
    return {
        "customers.csv": {
            "id": list(range(1, 41)),
            "grade": grades[:40],  # by chance ids of customers and of visits
            "boss_id": [None, *random.integers(1, 40, 39).tolist()],
            "born": ["1990-01-02"] * 39 + ["1980-02-03"],
            "joined_at": [f"2024-01-{1 + n % 28:02} 10:00:00" for n in range(40)],
        },
        "items.parquet": {
            "sku": [f"s{n}" for n in range(20)],
            "active": [n % 3 == 0 for n in range(20)],
            "price": random.random(20).tolist(),
            "colour": [["red", "blue", None][n % 3] for n in range(20)],
            "code": list(range(20)),
        },
        "baskets.csv": {  # a link of two, without an id
            "customer_id": grades,
            "item": [None, *(f"s{n}" for n in random.integers(0, 20, 59))],
            "amount": [None, *random.random(59).tolist()],
            "note": words,
        },
        "visits.csv": {
            "number": list(range(100, 160)),
            "customerId": [*range(1, 41), *grades[:19], 999],  # who is not there
            "statusId": random.integers(1, 5, 60).tolist(),
        },
        "profile.csv": {
            "customer_id": list(range(1, 41)),
            "visit_id": list(range(1_000, 1_040)),  # which have other numbers here
            "text": words[:40],
        },
    }


def test_traps(tmp_path: Path) -> None:
    for name, columns in traps().items():
        write_table(tmp_path / name, columns)
    (tmp_path / "readme.md").write_text("no table")
    text = propose(str(tmp_path), tmp_path)
    nodes = yaml.safe_load(text)["nodes"]
    drops = {"table": "customers", "missing": "drop"}
    assert {name: table.get("keys") for name, table in nodes.items()} == {
        "customers": None,
        "items": None,
        "baskets": {"customer_id": "customers", "item": "items"},
        "visits": {"customerId": drops},
        "profile": {"customer_id": "customers"},
    }
    ids = {name: table.get("id") for name, table in nodes.items()}
    assert ids["customers"] == "id"
    assert ids["items"] == "sku"
    assert ids["visits"] == "number"
    assert ids["baskets"] is None
    assert nodes["customers"]["time"] == "joined_at"
    assert nodes["items"]["categories"]["colour"] == {"column": "colour", "unknown": "bucket"}
    assert {"column": "amount", "impute": "median", "scale": "standard"} in nodes["baskets"][
        "features"
    ]["feat"]
    for comment in (
        "boss_id: its values are ids of customers; a key, by chance?",
        "customerId: 1 of its values are no customers",
        "statusId: its values are ids of",
        "visit_id: 40 of its values are no visits",
        "id: number is unique, but is it the id?",
        "id: none is found: by row",
        "note: not used, 60 values (text)",
        "features: {column: born, since: joined_at, scale: standard}",
    ):
        assert f"# {comment}" in text, comment
    data = read(tmp_path, text)
    edges = data.edges["baskets", "item", "items"]
    assert edges.src.tolist() == list(range(1, 60))
    assert len(data.edges["visits", "customerId", "customers"].src) == 59


def test_files_are_relative_to_the_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "data").mkdir()
    (tmp_path / "jobs").mkdir()
    write_table(data / "a b.csv", {"id": [1, 2], "a": [2, 1], "yes": ["on", "on"], "label": [1, 2]})
    text = propose(str(data), tmp_path / "jobs")
    assert yaml.safe_load(text)["nodes"]["a_b"]["files"] == "../data/a b.csv"
    assert main(["tables", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["yaml"] == propose(str(data), data)


def test_what_is_no_directory_of_tables(tmp_path: Path) -> None:
    assert_refused(lambda: propose(str(tmp_path / "none"), tmp_path), ["no such directory", "none"])
    assert_refused(lambda: propose(str(tmp_path), tmp_path), ["no CSV or Parquet"])
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not")
    assert_refused(lambda: propose(str(tmp_path), tmp_path), ["x.parquet", "correct the file"])
