"""Several labels of a table, each an array of its own: ``labels``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from raygnn.config.graph import TablesGraph
from raygnn.config.load import load_config
from raygnn.errors import ConfigError, DataError
from raygnn.graph.sources import load_graph
from tests.graph.test_outofcore import assert_as_in_memory
from tests.support.small_jobs import job, train_on_ranks

LABELS: dict[str, Any] = {
    "churned": "churned",
    "spent": {"column": "spent", "kind": "number"},
    "likes": {"column": ["tea", "coffee"], "kind": "multi"},
}
PEOPLE = 300


def write(place: Path, **changes: Any) -> TablesGraph:
    """Write people, and whom they know."""
    rng = np.random.default_rng(0)
    people = pd.DataFrame({"id": np.arange(PEOPLE), "x": rng.normal(size=PEOPLE)})
    people["churned"] = np.where(people.x > 0, "yes", "no")
    people["spent"] = people.x * 2
    people["tea"], people["coffee"] = (people.x > 0).astype(int), (people.x < -1).astype(int)
    people["split"] = rng.choice(["train", "val", "test"], PEOPLE)
    people.loc[people.id % 3 == 0, "churned"] = None
    people.loc[people.id % 4 == 0, "spent"] = np.nan
    people.loc[people.id % 12 == 1, ["tea", "coffee"]] = np.nan
    people.to_csv(place / "people.csv", index=False)
    knows = {"a": rng.integers(0, PEOPLE, 900), "b": rng.integers(0, PEOPLE, 900)}
    pd.DataFrame(knows).to_csv(place / "knows.csv", index=False)
    node = {"files": "people.csv", "id": "id", "features": {"feat": "x"}, "labels": LABELS}
    edge = {"files": "knows.csv", "source": "a", "target": "b"}
    described = {
        "nodes": {"person": {**node, "split": "split", **changes}},
        "edges": {"person:knows:person": edge},
    }
    (place / "tables.yaml").write_text(yaml.safe_dump(described))
    return TablesGraph(format="tables", path=place / "tables.yaml")


def test_each_is_an_array(tmp_path: Path) -> None:
    data = load_graph(write(tmp_path))
    found, x = data.nodes["person"].data, data.nodes["person"].data["feat"][:, 0]
    n = np.arange(PEOPLE)
    assert found["churned"].dtype == np.int64
    assert found["churned"].tolist() == np.where(n % 3 == 0, -1, x > 0).tolist()
    assert data.names["person/churned"] == ["no", "yes"]
    np.testing.assert_allclose(found["spent"], np.where(n % 4 == 0, np.nan, 2 * x), rtol=1e-6)
    likes = np.stack([x > 0, x < -1], 1).astype(np.int8)
    likes[n % 12 == 1] = -1
    assert found["likes"].dtype == np.int8
    assert found["likes"].tolist() == likes.tolist()
    assert found["train_mask"].sum() + found["val_mask"].sum() + found["test_mask"].sum() == PEOPLE
    assert "label" not in found


def test_other_tables_take_the_words_of_the_training(tmp_path: Path) -> None:
    graph = write(tmp_path, split=None)
    people = pd.read_csv(tmp_path / "people.csv")
    kept = people[people.churned != "no"]
    kept.to_csv(tmp_path / "people.csv", index=False)
    pd.DataFrame({"a": kept.id, "b": kept.id}).to_csv(tmp_path / "knows.csv", index=False)
    known = tmp_path / "kept.json"
    known.write_text(json.dumps({"names": {"person/churned": ["no", "yes"]}}))
    later = graph.model_copy(update={"vocabulary": known})
    found = load_graph(later, needs_masks=False, trains=False).nodes["person"].data["churned"]
    assert set(found.tolist()) == {-1, 1}


@pytest.mark.parametrize("split", ["column", "shares"])
def test_out_of_core_as_in_memory(split: str, tmp_path: Path) -> None:
    shares: dict[str, Any] = {"split": None, "splits": {"train": 0.5, "val": 0.2}}
    graph = write(tmp_path, **(shares if split == "shares" else {}))
    assert_as_in_memory(graph, tmp_path, 2)


def test_a_row_in_a_split_has_one_of_them(tmp_path: Path) -> None:
    """Fractions keep rows without a label out of every split; a split column that includes one is
    refused."""
    only = {"labels": {"churned": "churned", "spent": LABELS["spent"]}}
    with pytest.raises(DataError, match="has no label") as caught:
        load_graph(write(tmp_path, **only))
    assert "people.csv, row 1 (line 2)" in str(caught.value.where)
    shares = {"split": None, "splits": {"train": 0.5, "val": 0.2}}
    found = load_graph(write(tmp_path, **only, **shares)).nodes["person"].data
    split = found["train_mask"] | found["val_mask"] | found["test_mask"]
    assert split.tolist() == (np.arange(PEOPLE) % 12 != 0).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "churned"}, "label and labels both define"),
        ({"labels": {"feat": "churned"}}, "feat"),
        ({"labels": {"both": ["tea", "coffee"]}}, "a class label needs one column"),
        ({"labels": {"spent": {"column": "spent", "kind": "numbers"}}}, "kind"),
    ],
)
def test_contradictory_labels_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_graph(write(tmp_path, **changes))


def test_three_tasks_of_one_table(tmp_path: Path) -> None:
    """Each task uses the rows that have its label."""
    graph = write(tmp_path)
    values = job(tmp_path, train={"epochs": 60}, model={"hidden": 8}, cluster={"workers": 1})
    values |= {"graph": {"format": "tables", "path": str(graph.path)}}
    values["tasks"] = {
        "churn": {"kind": "node_classification", "target": "churned"},
        "value": {"kind": "node_regression", "target": "spent"},
        "taste": {"kind": "node_classification", "target": "likes", "labels": "multi"},
    }
    run = train_on_ranks(load_config(values))
    metrics = run.summary["metrics"]
    assert metrics["test/churn/accuracy"] > 0.9
    assert metrics["test/value/r2"] > 0.6
    assert metrics["test/taste/roc_auc_0"] > 0.9
    kept = json.loads((run.path / "checkpoints" / "selected.json").read_text())
    assert kept["words"]["person/churned"] == ["no", "yes"]
