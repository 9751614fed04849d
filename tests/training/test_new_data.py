"""Predictions for data that the model was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import raygnn
from raygnn.errors import DataError, InputError
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.runs.run import Run
from raygnn.training.asking import Asked
from raygnn.training.asking import ask as plan
from raygnn.training.job import Sizes
from tests.graphs import on_whole_graph
from tests.training.conftest import JobFactory, train_on_ranks
from tests.training.test_predict import ask
from tests.training.test_table_jobs import shop


def asked(run: Run, *overrides: str) -> Asked:
    return plan(run, ("all",), "all", "runs", overrides, False, False, None, True)


@pytest.mark.parametrize("workers", [1, 2])
def test_another_graph(workers: int, make_job: JobFactory) -> None:
    """Larger, and without one of the classes."""
    config = make_job(train={"epochs": 1})
    run = train_on_ranks(config)
    found = asked(run, "graph.nodes=2500", "graph.seed=7", "graph.classes=3")
    table = ask(run, found.config, workers, sizes=found.weights.sizes)
    assert found.config.graph is not None
    data = load_graph(found.config.graph, needs_masks=False)
    model = build_model(config.model, Schema({"_N": 16}, list(data.edges), "_N", 4))
    model.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))
    wanted = on_whole_graph(model, 2, data).softmax(1)
    frame = table.to_pandas()
    assert frame["node"].tolist() == list(range(2500))
    assert np.allclose(np.stack(frame["scores"]), wanted, atol=1e-5)


def test_without_labels_and_splits(tmp_path: Path) -> None:
    """As new rows of tables come."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    config = shop(tmp_path / "old", train={"epochs": 8, "lr": 0.05})
    run = train_on_ranks(config)
    shop(tmp_path / "new")
    items = pd.read_csv(tmp_path / "new" / "items.csv")
    items["name"] = "new " + items["name"]
    items.drop(columns=["kind", "fold"]).to_csv(tmp_path / "new" / "items.csv", index=False)
    bought = pd.read_csv(tmp_path / "new" / "bought.csv")
    bought["item"] = "new " + bought["item"]
    bought.to_csv(tmp_path / "new" / "bought.csv", index=False)
    described = tmp_path / "new" / "shop.yaml"
    described.write_text(described.read_text().replace(", label: kind, split: fold", ""))
    out = tmp_path / "out.parquet"
    data = [f"graph.path={described}", "cluster.workers=1"]
    made = raygnn.predict(run, out=out, new_data=True, overrides=data, display=False)
    assert made.rows == len(items)
    frame = pq.read_table(out).to_pandas()
    assert frame["node"].tolist() == items["name"].tolist()
    assert frame["split"].isna().all()
    assert frame["label"].isna().all()
    names = (items["kind"] == "yes").astype(int)
    assert (frame["prediction"] == names).mean() > 0.9
    with pytest.raises(InputError, match="nothing in the split"):
        raygnn.evaluate(run, new_data=True, overrides=data, display=False)


def test_words_keep_their_numbers(tmp_path: Path) -> None:
    """The class no is 0; without it yes would be."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    run = train_on_ranks(shop(tmp_path / "old", train={"epochs": 1}))
    config = shop(tmp_path / "new")
    table = tmp_path / "new" / "items.csv"
    items = pd.read_csv(table)
    assert config.graph is not None
    for kinds, refused in (
        ({"yes": None}, False),
        ({"no": "nay"}, "'nay' is number 0, .* 'no' was"),
        ({"no": None}, "'yes' is number 0, .* 'no' was"),
    ):
        changed = items.assign(kind=items["kind"].replace(kinds))
        changed.loc[changed["kind"].isna(), "fold"] = None
        changed.to_csv(table, index=False)
        found = asked(run, f"graph.path={tmp_path / 'new' / 'shop.yaml'}")
        if refused:
            with pytest.raises(RuntimeError, match=str(refused)):
                ask(run, found.config, 2, sizes=found.weights.sizes)
        else:
            ask(run, found.config, 2, sizes=found.weights.sizes)


def test_more_classes_than_it_knows(make_job: JobFactory) -> None:
    run = train_on_ranks(make_job(train={"epochs": 1}))
    found = asked(run, "graph.classes=6")
    with pytest.raises(RuntimeError, match="6 classes, and the model was trained for 4"):
        ask(run, found.config, 1, sizes=found.weights.sizes)
    found = asked(run, "graph.features=9")
    with pytest.raises(RuntimeError, match="not the weights of the model"):
        ask(run, found.config, 1, sizes=found.weights.sizes)


@pytest.mark.parametrize(
    ("change", "overrides", "what"),
    [
        ({}, [], "no other data are named"),
        ({"model": {"embedding": {"dim": 4}}}, ["graph.seed=2"], "no learned rows"),
        ({"old": True}, ["graph.seed=2"], "no record"),
        ({}, ["graph.normalize=row"], "scaled by none when .* by row here"),
        ({"graph": {"normalize": "row"}}, ["graph.normalize=none"], "by row when .* by none"),
        ({"graph": {"normalize": "standard"}}, ["graph.seed=2"], "standard takes mean"),
        ({}, ["graph.seed=2", "train.lr=1"], "a trained model cannot be changed: train.lr"),
    ],
)
def test_refused(
    change: dict[str, Any], overrides: list[str], what: str, make_job: JobFactory
) -> None:
    run = _trained(make_job)
    if change.pop("old", False):
        about = run.path / "checkpoints" / "selected.json"
        known = json.loads(about.read_text())
        del known["sizes"]
        about.write_text(json.dumps(known))
    config = run.config
    for section, keys in change.items():
        config[section] = {**(config.get(section) or {}), **keys}
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match=what) as caught:
        asked(run, *overrides)
    assert caught.value.remedy


def _trained(make_job: JobFactory) -> Run:
    return train_on_ranks(make_job(train={"epochs": 1}))


def test_sizes() -> None:
    first = Sizes()
    assert first.settle("classes", 3) == 3
    assert first.found == {"classes": 3}
    later = Sizes(first.found)
    assert later.settle("classes", 2) == 3
    with pytest.raises(DataError, match="4 classes"):
        later.settle("classes", 4)
    with pytest.raises(DataError, match="1 relations"):
        later.settle("relations", 1)
