"""Jobs on tables: predictions come by the ids that the tables have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.inputs import PartitionInput
from raygnn.errors import ConfigError
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.partition.read import read_ids
from raygnn.graph.sources import load_graph
from raygnn.prediction import merge
from raygnn.preflight.probe import probe_local
from raygnn.preflight.report import preflight
from raygnn.worker.job import ROWS
from tests.prediction.test_predict import ask
from tests.support.graphs import ensure_partition
from tests.support.small_jobs import job, train_on_ranks

ITEMS, USERS = 300, 100


def shop(directory: Path, **sections: Any) -> Config:
    """A job on items, called by words or numbers, whose class shows in their features."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, ITEMS)
    names = [f"item {i}" for i in random.permutation(ITEMS)]
    items = {
        "name": names,
        "x": labels * 2.0 - 1,
        "y": 0.5,
        "kind": np.array(["no", "yes"])[labels],
    }
    items["fold"] = random.choice(["train", "val", "test"], ITEMS)
    pd.DataFrame(items).to_csv(directory / "items.csv", index=False)
    users = random.permutation(10_000)[:USERS]
    pd.DataFrame({"id": users, "x": 1.0, "y": 1.0}).to_parquet(directory / "users.parquet")
    bought = {"user": random.choice(users, 2000), "item": random.choice(names, 2000)}
    pd.DataFrame(bought).to_csv(directory / "bought.csv", index=False)
    (directory / "shop.yaml").write_text(
        "nodes:\n"
        "  item: {files: items.csv, id: name, features: {feat: [x, y]}, label: kind, split: fold}\n"
        "  user: {files: users.parquet, id: id, features: {feat: [x, y]}}\n"
        "edges:\n"
        "  user:bought:item: {files: bought.csv, source: user, target: item, reverse: by}\n"
    )
    graph = {"format": "tables", "path": str(directory / "shop.yaml")}
    return load_config({**job(directory, **sections), "graph": graph})


def test_predictions_are_by_the_ids_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions follow the order of the tables' rows, whichever rank owns a node."""
    config = shop(tmp_path, train={"epochs": 8, "lr": 0.05})
    run = train_on_ranks(config)
    assert run.summary["metrics"]["test/accuracy"] > 0.9
    numbers = ask(run, config, 2, scores=False).to_pandas()
    assert numbers["node"].tolist() == list(range(ITEMS))

    ids = read_ids(ensure_partition(config, 2), "item")
    rows = sorted((tmp_path / ".predicting" / "all-2" / ROWS).iterdir())
    monkeypatch.setattr(merge, "_ROWS", 60)  # many batches
    monkeypatch.setattr(merge, "_FEWEST", 20)
    with open(tmp_path / "out.parquet", "wb") as file:
        assert merge.merge_files(rows, file, "node", {"node": ids}) == ITEMS
    items = pd.read_csv(tmp_path / "items.csv")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.schema.field("node").type == pa.large_string()
    frame = found.to_pandas()
    assert frame["node"].tolist() == items["name"].tolist()
    assert frame["split"].tolist() == items["fold"].tolist()
    assert frame["label"].tolist() == (items["kind"] == "yes").astype(int).tolist()
    assert frame["prediction"].tolist() == numbers["prediction"].tolist()
    assert read_ids(read_meta(ensure_partition(config, 2).directory), "user").type == pa.int64()


def test_triples_have_no_task_yet(tmp_path: Path) -> None:
    """Jobs on triples are refused before and after they are partitioned, which is possible."""
    (tmp_path / "kg").mkdir()
    (tmp_path / "kg" / "train.txt").write_text("a\tr\tb\nb\ts\tc\n")
    graph = {"format": "triples", "path": str(tmp_path / "kg")}
    config = load_config({**job(tmp_path), "graph": graph})
    assert config.graph is not None
    missing = PartitionInput(find_partition(config, 2), load_graph(config.graph))
    made = PartitionInput(ensure_partition(config, 2), None)
    for given in (missing, made):
        facts = given.facts(config)
        (finding,) = preflight(config, facts, probe_local(config, given.meta)).findings[:1]
        assert finding.what == "no node type has an array 'label' (task.target)"
        assert "set task.kind to link_prediction" in finding.remedy


def test_numbers_that_stand_for_words_are_not_predicted(tmp_path: Path) -> None:
    config = shop(tmp_path, task={"kind": "node_regression"})
    assert config.graph is not None
    found = find_partition(config, 2)
    assert isinstance(found, Missing)
    given = PartitionInput(found, load_graph(config.graph))
    with pytest.raises(ConfigError, match="'label' of item are classes") as caught:
        given.check(config)
    assert "label_kind" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="are classes"):
        PartitionInput(ensure_partition(config, 2), None).check(config)
    described = tmp_path / "shop.yaml"
    text = described.read_text().replace("label: kind", "label: x, label_kind: number")
    described.write_text(text)
    PartitionInput(ensure_partition(config, 2), None).check(config)
