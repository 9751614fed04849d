"""A company's tables, whose features are filled in, scaled and encoded: the state of that is the
training's, in a run that goes on, and in predictions for a later month."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.read import (
    read_edge_data,
    read_node_data,
    read_original_edges,
    read_original_nodes,
)
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from tests.graph.test_transforms import CALLS, close
from tests.prediction.test_new_data import asked
from tests.prediction.test_predict import ask
from tests.support import company
from tests.support.commands import Command
from tests.support.graphs import ensure_partition, on_whole_graph
from tests.support.small_jobs import job, train_on_ranks

JOB = """\
name: leaves
graph: {format: tables, path: september/tables.yaml}
partition: {method: random}
model: {kind: sage, hidden: 16, dropout: 0.0}
sampling: {fanout: [5, 5], batch_size: 256}
train: {epochs: 2, lr: 0.01}
cluster: {workers: 2}
staging: {path: stage}
"""


def small(directory: Path, **sections: Any) -> tuple[Config, pd.DataFrame, pd.DataFrame]:
    """Return a job on the customers of a month, and these customers and their calls."""
    people, called = company.write(directory / "old", "csv", 400, 0)
    graph = {"format": "tables", "path": str(directory / "old" / "tables.yaml")}
    return load_config({**job(directory, **sections), "graph": graph}), people, called


def state(meta: PartitionMeta) -> dict[str, Any]:
    """Return the state of all transforms from the partition's manifest."""
    assert meta.manifest is not None
    assert meta.manifest.transforms.keys() == {"customer/feat", "customer:calls:customer/how"}
    return meta.manifest.transforms


def stored(meta: PartitionMeta) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of customers and of calls in a partition, in row order."""
    feats, ids, hows, numbers = [], [], [], []
    for part in range(meta.num_parts):
        feats.append(read_node_data(meta, part)["customer"]["feat"].numpy())
        ids.append(read_original_nodes(meta, part)["customer"])
        hows.append(read_edge_data(meta, part)[CALLS]["how"].numpy())
        numbers.append(read_original_edges(meta, part)[CALLS])
    nodes, edges = np.concatenate(feats), np.concatenate(hows)
    return nodes[np.argsort(np.concatenate(ids))], edges[np.argsort(np.concatenate(numbers))]


def test_a_later_month(tmp_path: Path) -> None:
    """Predictions are what the network says of features made by hand; partitions that were made
    without the training's state, or of columns that are not transformed, are refused."""
    config, people, called = small(tmp_path)
    run = train_on_ranks(config)
    new, new_calls = company.write(tmp_path / "new", "csv", 150, 1, new=True)
    wanted = company.by_hand(people[people["fold"] == "train"], new)
    path = tmp_path / "new" / "tables.yaml"
    found = asked(run, f"graph.path={path}")
    assert found.config.graph is not None
    table = ask(run, found.config, 2, sizes=found.weights.sizes).to_pandas()
    data = load_graph(found.config.graph, needs_masks=False, trains=False)
    data.nodes["customer"].data["feat"] = wanted.astype(np.float32)
    widths = {"customer": wanted.shape[1]}
    model = build_model(found.config.model, Schema(widths, list(data.edges), 2, target="customer"))
    model.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))
    shares = on_whole_graph(model, 2, data).softmax(1)
    assert np.abs(np.stack(table["scores"]) - shares.numpy()).max() < 1e-5
    made = ensure_partition(found.config, 2)
    assert state(made) == state(ensure_partition(config, 2))
    assert close(stored(made)[1], company.calls_by_hand(called, new_calls))

    frame = new.assign(leaves="no", fold="train")
    frame.to_csv(tmp_path / "new" / "customers.csv", index=False)
    graph = config.graph.model_copy(update={"path": path})
    alone = ensure_partition(config.model_copy(update={"graph": graph}), 2)
    with pytest.raises(DataError, match="customer/feat has other transforms than") as caught:
        asked(run, "graph=null", f"partition.path={alone.directory}")
    assert "graph.vocabulary" in str(caught.value.remedy)
    asked(run, "graph=null", f"partition.path={made.directory}")
    with pytest.raises(ConfigError, match="standard") as refused:
        asked(run, f"graph.path={path}", "graph.normalize=standard")
    assert "set graph.normalize=none" in str(refused.value.remedy)


def test_a_run_resumes_with_the_same_transforms(tmp_path: Path) -> None:
    """Its partition was removed meanwhile, and is built again unchanged."""
    whole, *_ = small(tmp_path / "whole", train={"epochs": 2})
    train_on_ranks(whole)
    config, *_ = small(tmp_path / "two", train={"epochs": 1})
    train_on_ranks(config)
    before = state(ensure_partition(config, 2))
    shutil.rmtree(config.storage / "partitions")
    config, *_ = small(tmp_path / "two", train={"epochs": 2})
    run = train_on_ranks(config, resume=True)
    assert state(ensure_partition(config, 2)) == before
    states = [torch.load(at / "checkpoints" / "selected.pt") for at in (whole.run_dir, run.path)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_next_month_of_a_company(tmp_path: Path) -> None:
    """100,000 customers, then 20,000 others with words that nobody had before: by the commands."""

    def run(*command: str) -> str:
        process = Command([*command], tmp_path)
        status, out, err = process.finish(400)
        assert status == 0, out + err
        assert process.left_behind() == []
        return out

    people, called = company.write(tmp_path / "september", "csv", 100_000, 0)
    new, new_calls = company.write(tmp_path / "october", "csv", 20_000, 1, new=True)
    (tmp_path / "job.yaml").write_text(JOB)
    run("train", "job.yaml")
    out = "october.parquet"
    run("predict", "leaves", "--new-data", "--set", "graph.path=october/tables.yaml", "--out", out)
    frame = pd.read_parquet(tmp_path / out)
    assert frame["node"].tolist() == new["customer"].tolist()
    assert set(frame["prediction"]) == {"no", "yes"}
    rich = (new["income"] > np.exp(10)).to_numpy()
    known = new["income"].notna().to_numpy()
    assert ((frame["prediction"] == "yes") == rich)[known].mean() > 0.9
    training = people["fold"] == "train"
    for manifest in (tmp_path / "runs" / "partitions").glob("*/raygnn.json"):
        options = json.loads(manifest.read_text())["source"]["options"]
        later = options["vocabulary"] is not None
        feat, how = stored(read_meta(manifest.parent))
        assert len(feat) == (20_000 if later else 100_000)
        assert close(feat, company.by_hand(people[training], new if later else people))
        assert close(how, company.calls_by_hand(called, new_calls if later else called))
    assert len(list((tmp_path / "runs" / "partitions").glob("*/raygnn.json"))) == 2
