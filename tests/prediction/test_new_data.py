"""Predictions for data that the model was not trained on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import raygnn
from raygnn.config.graph import TablesGraph
from raygnn.config.schema import Config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import DataError, InputError
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.prediction.request import Asked
from raygnn.prediction.request import ask as plan
from raygnn.runs.run import Run
from raygnn.worker.job import Sizes
from tests.prediction.test_predict import ask
from tests.prediction.test_table_jobs import shop
from tests.support.graphs import ensure_partition, on_whole_graph
from tests.support.small_jobs import JobFactory, train_on_ranks


def asked(run: Run, *overrides: str) -> Asked:
    return plan(run, overrides=overrides, display=False, new_data=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_another_graph(workers: int, make_job: JobFactory) -> None:
    """The graph is larger, and lacks one of the classes."""
    config = make_job(train={"epochs": 1})
    run = train_on_ranks(config)
    found = asked(run, "graph.nodes=2500", "graph.seed=7", "graph.classes=3")
    table = ask(run, found.config, workers, sizes=found.weights.sizes)
    assert found.config.graph is not None
    data = load_graph(found.config.graph, needs_masks=False)
    model = build_model(config.model, Schema({"_N": 16}, list(data.edges), 4, target="_N"))
    model.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))
    wanted = on_whole_graph(model, 2, data).softmax(1)
    frame = table.to_pandas()
    assert frame["node"].tolist() == list(range(2500))
    assert np.allclose(np.stack(frame["scores"]), wanted, atol=1e-5)


@pytest.mark.system
def test_without_labels_and_splits(tmp_path: Path) -> None:
    """New rows of tables have neither labels nor splits."""
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
    assert (frame["prediction"] == items["kind"]).mean() > 0.9
    with pytest.raises(InputError, match="these data have no labels in the split 'test'"):
        raygnn.evaluate(run, new_data=True, overrides=data, display=False)


def branded(directory: Path, brands: dict[str | None, str], unknown: str, **more: Any) -> Config:
    """Return the shop with items of these brands, which alone determine the class."""
    directory.mkdir()
    config = shop(directory, model={"categories": {"brand": 4}}, **more)
    file, described = directory / "items.csv", directory / "shop.yaml"
    items = pd.read_csv(file).assign(x=1.0)
    items["brand"] = [list(brands)[i % len(brands)] for i in range(len(items))]
    items["kind"] = [list(brands.values())[i % len(brands)] for i in range(len(items))]
    items.to_csv(file, index=False)
    category = f"categories: {{brand: {{column: brand, unknown: {unknown}}}}}, label: kind"
    described.write_text(described.read_text().replace("label: kind", category))
    return config


def test_words_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Categories and classes keep the training's numbers in a file that has only some of them, and
    new ones. `missing` applies to unknown ones; refusals come before a Ray starts."""
    brands = {"acme": "no", "bolt": "perhaps", "zest": "yes", None: "unsure"}
    more = {"train": {"epochs": 12, "lr": 0.05}, "sampling": {"batch_size": 16}}
    run = train_on_ranks(branded(tmp_path / "old", brands, "bucket", **more))
    brands = {"zest": "yes", "newco": "unsure", "acme": "no"}
    branded(tmp_path / "new", brands, "bucket")
    described = tmp_path / "new" / "shop.yaml"
    found = asked(run, f"graph.path={described}")
    frame = ask(run, found.config, 2, sizes=found.weights.sizes).to_pandas()
    assert set(frame["label"]) == {0, 2, 3}
    file = tmp_path / "new" / "items.csv"
    unseen = "100 of 300 rows have values that the training data did not have; "
    unseen += "they are mapped to the bucket"
    assert [m for m in caplog.messages if "bucket" in m] == [f"{file}, column 'brand': {unseen}"]
    assert (frame["prediction"] == frame["label"]).mean() > 0.95

    monkeypatch.setattr(RayCluster, "start", lambda self: pytest.fail("a Ray was started"))
    described.write_text(described.read_text().replace("bucket", "error"))
    items = pd.read_csv(file)
    data, out = [f"graph.path={described}"], tmp_path / "out.parquet"
    for column in ("brand", "kind"):
        with pytest.raises(DataError, match=r"'newco' \(100\); 100 of 300 rows") as caught:
            raygnn.predict(run, out=out, new_data=True, overrides=data, display=False)
        assert caught.value.where == f"{file}, row 2 (line 3), column {column!r}"
        kinds = items["kind"].replace("unsure", "newco")
        items.assign(brand="zest", kind=kinds).to_csv(file, index=False)


def test_a_partition_with_other_words(tmp_path: Path) -> None:
    """Such a partition is refused unless it was built with the training's vocabulary."""
    (tmp_path / "old").mkdir()
    run = train_on_ranks(shop(tmp_path / "old", train={"epochs": 1}))
    (tmp_path / "new").mkdir()
    config = shop(tmp_path / "new")
    items = pd.read_csv(tmp_path / "new" / "items.csv").replace({"no": "yes"})
    items.to_csv(tmp_path / "new" / "items.csv", index=False)
    overrides = ["graph=null", f"partition.path={ensure_partition(config, 2).directory}"]
    with pytest.raises(DataError, match="0 of item/label is 'yes', but was 'no' in") as caught:
        asked(run, *overrides)
    assert "graph.vocabulary" in str(caught.value.remedy)
    assert isinstance(config.graph, TablesGraph)
    words = run.path / "checkpoints" / "selected.json"
    graph = config.graph.model_copy(update={"vocabulary": words})
    made = ensure_partition(config.model_copy(update={"graph": graph}), 2)
    found = asked(run, "graph=null", f"partition.path={made.directory}")
    table = ask(run, found.config, 2, sizes=found.weights.sizes)
    assert set(table["label"].to_pylist()) == {1}


def test_more_classes_than_it_knows(make_job: JobFactory) -> None:
    run = train_on_ranks(make_job(train={"epochs": 1}))
    found = asked(run, "graph.classes=6")
    with pytest.raises(RuntimeError, match="6 classes, but the model was trained for 4"):
        ask(run, found.config, 1, sizes=found.weights.sizes)
    found = asked(run, "graph.features=9")
    with pytest.raises(RuntimeError, match="do not belong to the model"):
        ask(run, found.config, 1, sizes=found.weights.sizes)


@pytest.mark.parametrize(
    ("change", "overrides", "what"),
    [
        ({}, [], "no new data are named"),
        ({"model": {"embedding": {"dim": 4}}}, ["graph.seed=2"], "no rows in the embedding table"),
        ({}, ["graph.normalize=row"], "scaled by none when .* by row here"),
        ({"graph": {"normalize": "row"}}, ["graph.normalize=none"], "by row when .* by none"),
        ({"graph": {"normalize": "standard"}}, ["graph.seed=2"], "standard scales by"),
        ({}, ["graph.seed=2", "train.lr=1"], "a trained model cannot be changed: train.lr"),
    ],
)
def test_refused(
    change: dict[str, Any], overrides: list[str], what: str, trained: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(trained.path, tmp_path / "test"))
    config = run.config
    for section, keys in change.items():
        config[section] = {**(config.get(section) or {}), **keys}
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match=what) as caught:
        asked(run, *overrides)
    assert caught.value.remedy


def test_sizes() -> None:
    first = Sizes()
    assert first.resolve("classes", 3) == 3
    assert first.found == {"classes": 3}
    later = Sizes(first.found)
    assert later.resolve("classes", 2) == 3
    with pytest.raises(DataError, match="4 classes"):
        later.resolve("classes", 4)
    with pytest.raises(DataError, match="1 relations"):
        later.resolve("relations", 1)
