"""Tasks on whole graphs, as a user runs them: files, own datasets, own models, odd samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.train import check, partition, train
from raygnn.runs.run import Run
from raygnn.sampling.collate import GraphBatchMaker
from tests.support.small_jobs import job, slow_but, train_on_ranks

pytestmark = pytest.mark.long

DATASETS = "tests.support.datasets"


def make(storage: Path, **sections: Any) -> Config:
    """Return a job on random graphs; sections are merged into it."""
    base = job(storage)
    base |= {
        "graph": {
            "format": "dataset",
            "dataset": f"{DATASETS}:RandomGraphs",
            "args": {"num": 30},
            "val": 0.2,
            "test": 0.2,
        },
        "task": {"kind": "graph_classification"},
        "model": {"kind": "gin", "hidden": 8, "layers": 2, "dropout": 0.0},
        "sampling": {"batch_size": 3},
        "train": {"epochs": 3, "lr": 0.05, "optimizer": "sgd", "log_every": 1},
    }
    for section, values in sections.items():
        whole = section in ("graph", "model") or not isinstance(values, dict)
        base[section] = values if whole else {**base.get(section, {}), **values}
    return load_config(base)


def dataset(name: str = "RandomGraphs", **args: Any) -> dict[str, Any]:
    return {
        "format": "dataset",
        "dataset": f"{DATASETS}:{name}",
        "args": args,
        "val": 0.2,
        "test": 0.2,
    }


def losses(run: Run) -> list[float]:
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [r["train/loss"] for r in records if "train/loss" in r]


class OwnGin(nn.Module):
    """A user's GIN, built from dgl.nn."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8):
        super().__init__()
        from dgl.nn import GINConv

        self.conv = GINConv(nn.Linear(in_features, hidden), "sum")
        self.head = nn.Linear(hidden, out_features)

    def forward(self, graph, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        import dgl

        assert torch.equal(graph.ndata["feat"], x)
        graph.ndata["h"] = torch.relu(self.conv(graph, x)).float()
        return self.head(dgl.sum_nodes(graph, "h").to(x.dtype))


@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_a_dataset_through_the_command(data_dir: Path, tmp_path: Path) -> None:
    graph = {
        "format": "dataset",
        "dataset": "examples.gin_text:GinText",
        "args": {"root": str(data_dir / "graphs"), "name": "MUTAG"},
        "folds": 10,
        "fold": 3,
    }
    config = make(
        tmp_path,
        graph=graph,
        train={"epochs": 8, "lr": 0.01, "optimizer": "adam"},
        sampling={"batch_size": 16},
    )
    assert check(config, display=False).ok
    assert not (tmp_path / "partitions").exists()  # nothing was written
    assert partition(config, display=False).num_graphs == 188  # type: ignore[union-attr]
    run = train(config, display=False)
    metrics = run.summary["metrics"]
    assert metrics["test/accuracy"] > 0.6
    assert {"test/f1", "test/roc_auc", "val/accuracy"} <= metrics.keys()
    assert run.summary["skipped"] == {"steps": 0}
    assert run.summary["topology"] is None


@pytest.mark.dgl
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_as_many_ranks_as_you_like(norm: str, tmp_path: Path) -> None:
    """At the end of an epoch, there may be more ranks than graphs in a batch."""
    curves = []
    for count, size in ((1, 6), (3, 2)):
        config = make(
            tmp_path,
            name=f"on-{count}",
            cluster={"workers": count, "num_cpus": count},
            model={"kind": "gin", "hidden": 8, "layers": 2, "dropout": 0.0, "norm": norm},
            sampling={"batch_size": size},
            graph=dataset(num=27),
        )
        curves.append(losses(train_on_ranks(config)))
    assert np.allclose(*curves, atol=1e-5)


@pytest.mark.dgl
def test_your_own_model_and_a_regression(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        model={"kind": "tests.worker.test_graph_tasks:OwnGin", "args": {"hidden": 16}},
        graph=dataset("Sums", num=40),
        task={"kind": "graph_regression"},
        train={"epochs": 40, "lr": 0.01, "optimizer": "adam", "eval_every": 5},
    )
    run = train_on_ranks(config)
    metrics = run.summary["metrics"]
    assert metrics.keys() >= {"test/mae", "test/rmse", "test/r2", "val/mae"}
    assert metrics["test/r2"] > 0.9
    scores = run.metrics["val/mae"].dropna()
    assert metrics["val/mae"] == pytest.approx(scores.min(), abs=1e-6)  # the lowest is the best


BONDS: dict[str, dict[str, Any]] = {
    "gin": {"kind": "gin", "edge_features": ["amount"]},
    "gatv2": {"kind": "gatv2", "heads": 2, "edge_features": "amount"},
    "sage": {"kind": "sage", "edge_categories": {"kind": 4}},
}
TELLS = {"gin": "amount", "gatv2": "neighbour", "sage": "kind"}


def on_bonds(storage: Path, family: str, *, edges: bool, workers: int = 1, epochs: int = 20) -> Run:
    model = {"hidden": 16, "layers": 2, "dropout": 0.0, **BONDS[family]}
    if not edges:
        model = {key: value for key, value in model.items() if not key.startswith("edge_")}
    config = make(
        storage,
        name=f"{family}-{edges}-{workers}",
        cluster={"workers": workers, "num_cpus": workers},
        model=model,
        graph=dataset("Bonds", num=120, tells=TELLS[family]) | {"val": 0.3, "test": 0.3},
        sampling={"batch_size": 8 // workers},
        train={"epochs": epochs, "lr": 0.02, "optimizer": "adam", "eval_every": 5},
    )
    return train_on_ranks(config)


@pytest.mark.dgl
@pytest.mark.parametrize("family", slow_but("sage", BONDS))
def test_a_class_that_only_the_edges_tell(family: str, tmp_path: Path) -> None:
    run = on_bonds(tmp_path, family, edges=True)
    assert run.summary["metrics"]["test/accuracy"] >= 0.95
    blind = on_bonds(tmp_path, family, edges=False)
    assert blind.summary["metrics"]["test/accuracy"] < 0.75
    both = on_bonds(tmp_path, family, edges=True, workers=2, epochs=1)
    assert np.allclose(losses(run)[:6], losses(both)[:6], atol=1e-4)  # an epoch


@pytest.mark.dgl
def test_edge_arrays_that_are_not_there(tmp_path: Path) -> None:
    model = {"kind": "gin", "hidden": 8, "edge_features": ["amount", "price"]}
    config = make(tmp_path, model=model, graph=dataset("Bonds", num=20))
    with pytest.raises(RuntimeError, match="no edge type has an array 'price'"):
        train_on_ranks(config)


@pytest.mark.dgl
def test_a_fold_to_validate_on(tmp_path: Path) -> None:
    graph = {"format": "dataset", "dataset": f"{DATASETS}:RandomGraphs", "args": {"num": 30}}
    config = make(tmp_path, graph={**graph, "folds": 5, "fold": 2, "fold_for": "val"})
    run = train_on_ranks(config)
    summary = run.summary
    assert "test/accuracy" not in summary["metrics"]
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    measured = [r["val/accuracy"] for r in records if "val/accuracy" in r]
    assert summary["metrics"]["val/accuracy"] == max(measured)
    assert summary["last_metrics"]["val/accuracy"] == measured[-1]


@pytest.mark.dgl
def test_data_that_differ_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank would train on graphs that another one tests."""
    rank = property(lambda maker: str(maker.exchange.world.rank))
    monkeypatch.setattr(GraphBatchMaker, "identity", rank)
    with pytest.raises(RuntimeError, match=r"data.* on rank 1"):
        train_on_ranks(make(tmp_path, graph=dataset(num=20)))
