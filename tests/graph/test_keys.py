"""Foreign keys become edges with their reverses, and tables without ids are numbered by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from raygnn.config.graph import TablesGraph
from raygnn.graph.data import GraphData
from raygnn.graph.sources import digest, load_graph
from tests.graph.test_outofcore import assert_as_in_memory, out_of_core
from tests.support.builders import assert_refused
from tests.support.tables_builder import write_table

LINKS: dict[str, list[Any]] = {
    "driver": ["anna", "ben", None, "anna"],
    "team": [1, 2, 2, None],
    "day": [5, 6, 7, 8],
}


def write_staff(directory: Path, **changes: Any) -> TablesGraph:
    """Employees with a boss each but one, teams, and who was in which team, in files without ids.
    ``changes`` are of keys, such as ``person__keys``."""
    nodes: dict[str, dict[str, Any]] = {
        "person": {"files": "people.csv", "id": "name", "keys": {"boss": "person"}},
        "team": {"files": "teams.parquet", "id": "team", "splits": {"train": 1.0}},
        "membership": {
            "files": ["links.csv", "links.parquet"],
            "keys": {"driver": "person", "team": {"table": "team"}},
            "features": {"feat": "day"},
            "time": "day",
        },
    }
    for path, value in changes.items():
        ntype, _, key = path.partition("__")
        nodes[ntype][key] = value
    (directory / "staff.yaml").write_text(yaml.safe_dump({"nodes": nodes}, sort_keys=False))
    people = {"name": ["carl", "anna", "ben"], "boss": [None, "carl", "carl"]}
    write_table(directory / "people.csv", people)
    write_table(directory / "teams.parquet", {"team": [1, 2]})
    for at, name in enumerate(("links.csv", "links.parquet")):
        write_table(directory / name, {k: v[2 * at : 2 * at + 2] for k, v in LINKS.items()})
    return TablesGraph(format="tables", path=directory / "staff.yaml")


def ends(data: GraphData, *etype: str) -> list[tuple[int, int]]:
    edges = data.edges[etype[0], etype[1], etype[2]]
    return list(zip(edges.src.tolist(), edges.dst.tolist(), strict=True))


def test_keys_are_edges_and_their_reverses(tmp_path: Path) -> None:
    data = load_graph(write_staff(tmp_path))
    assert ends(data, "person", "boss", "person") == [(1, 0), (2, 0)]
    assert ends(data, "person", "rev_boss", "person") == [(0, 1), (0, 2)]
    assert data.ids["membership"].to_pylist() == [0, 1, 2, 3]
    assert ends(data, "membership", "driver", "person") == [(0, 1), (1, 2), (3, 1)]
    assert ends(data, "membership", "team", "team") == [(0, 0), (1, 1), (2, 1)]
    assert ends(data, "team", "rev_team", "membership") == [(0, 0), (1, 1), (1, 2)]
    assert data.edges["membership", "driver", "person"].data["time"].tolist() == [5, 6, 8]
    assert data.edges["person", "rev_driver", "membership"].data["time"].tolist() == [5, 6, 8]
    reverses = {etype[1]: back[1] for etype, back in data.reverses.items()}
    assert reverses == {"boss": "rev_boss", "driver": "rev_driver", "team": "rev_team"}


def test_keys_out_of_core(tmp_path: Path) -> None:
    assert_as_in_memory(write_staff(tmp_path), tmp_path, 2)


@pytest.mark.parametrize("rule", ["refuse", "drop", "add"])
def test_a_key_of_no_row(rule: str, tmp_path: Path) -> None:
    keys = {"driver": {"table": "person", "missing": rule}}
    graph = write_staff(tmp_path, membership__keys=keys)
    write_table(tmp_path / "links.csv", {"driver": ["dora", None], "team": [1, 2], "day": [5, 6]})
    if rule == "refuse":
        place = ["links.csv, row 1 (line 2), column 'driver'", "there is no person 'dora'"]
        assert_refused(lambda: load_graph(graph), place)
        assert_refused(lambda: out_of_core(graph, tmp_path / "p", 2), place)
        return
    data = load_graph(graph)
    added = rule == "add"
    assert data.ids["person"].to_pylist() == ["carl", "anna", "ben", *["dora"] * added]
    assert ends(data, "membership", "driver", "person") == [*[(0, 3)] * added, (3, 1)]


def test_keys_of_a_query(tmp_path: Path) -> None:
    """Composite ones are put together by SQL."""
    pairs = {"a": ["x", "x", "y"], "b": [1, 2, 1]}
    write_table(tmp_path / "pairs.csv", pairs)
    write_table(tmp_path / "uses.csv", {"a": ["y", "x", None], "b": [1, 2, 1]})
    joined = "select a || '/' || b as pair"
    spec = {
        "pair": {"sql": f"{joined} from 'pairs.csv'", "id": "pair", "splits": {"train": 1.0}},
        "use": {"sql": f"{joined} from 'uses.csv'", "keys": {"pair": "pair"}},
    }
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump({"nodes": spec}))
    data = load_graph(TablesGraph(format="tables", path=tmp_path / "pairs.yaml"))
    assert data.ids["pair"].to_pylist() == ["x/1", "x/2", "y/1"]
    assert ends(data, "use", "pair", "pair") == [(0, 1), (1, 2)]


def test_the_digest_of_keys(tmp_path: Path) -> None:
    graph = write_staff(tmp_path)
    before = digest(graph)
    write_table(tmp_path / "links.parquet", {k: v[:2] for k, v in LINKS.items()})
    assert digest(graph) != before


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown table": (
        {"person__keys": {"boss": "persn"}},
        ["staff.yaml: nodes.person.keys.boss (line", "no node type 'persn'", "mean person?"],
    ),
    "no such column": ({"person__keys": {"chief": "person"}}, ["no column 'chief'"]),
    "the same edges": (
        {"person__keys": {"boss": "person", "rev_boss": "person"}},
        ["nodes.person.keys.rev_boss", "already defines the edge type person:rev_boss:person"],
    ),
    "alike in letters": (
        {"person__keys": {"a b": "person", "a_b": "person"}},
        ["nodes.person.keys.a_b", "already defines the edge type person:a_b:person"],
    ),
    "no edges": ({"person__keys": {}, "membership__keys": {}}, ["there are no edges", "or keys"]),
    "no values to add": (
        {"membership__keys": {"team": {"table": "membership", "missing": "add"}}},
        ["nodes.membership.keys.team.missing", "would have no"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_keys_are_refused(name: str, tmp_path: Path) -> None:
    changes, fragments = REFUSED[name]
    graph = write_staff(tmp_path, **changes)
    assert_refused(lambda: load_graph(graph), fragments)


def test_odd_names_of_columns(tmp_path: Path) -> None:
    graph = write_staff(tmp_path, person__keys={"1st boss (name)": "person"})
    table = pd.read_csv(tmp_path / "people.csv").rename(columns={"boss": "1st boss (name)"})
    table.to_csv(tmp_path / "people.csv", index=False)
    assert len(ends(load_graph(graph), "person", "key_1st_boss__name_", "person")) == 2


def test_a_database_of_tables(tmp_path: Path, data_dir: Path) -> None:
    """All keys of Formula 1, with what pandas counts."""
    keys = {
        "races": {"circuitId": "circuits"},
        "results": {"raceId": "races", "driverId": "drivers", "constructorId": "constructors"},
        "standings": {"raceId": "races", "driverId": "drivers"},
        "constructors": {},
    }
    ids = {"races": "raceId", "results": "resultId", "constructors": "constructorId"}
    spec: dict[str, Any] = {
        name: {"files": str(data_dir / f"f1/{name}.csv"), "keys": of, "time": "date"}
        for name, of in keys.items()
    }
    del spec["constructors"]["time"]
    for name, column in {"circuits": "circuitId", "drivers": "driverId"}.items():
        spec[name] = {"files": str(data_dir / f"f1/{name}.csv"), "id": column}
    for name, column in ids.items():
        spec[name]["id"] = column
    (tmp_path / "f1.yaml").write_text(yaml.safe_dump({"nodes": spec}))
    data = load_graph(TablesGraph(format="tables", path=tmp_path / "f1.yaml"), needs_masks=False)
    assert len(data.edges) == 12
    for name, of in keys.items():
        table = pd.read_csv(data_dir / f"f1/{name}.csv")
        for column, other in of.items():
            found = data.edges[name, column, other]
            there = table[column].notna()
            np.testing.assert_array_equal(found.src, np.flatnonzero(there))
            targets = data.ids[other].to_numpy()[found.dst]
            np.testing.assert_array_equal(targets, table[column][there])
