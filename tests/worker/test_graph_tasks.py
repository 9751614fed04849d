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
from raygnn.errors import DataError, InputError, TrainingError
from raygnn.runs.run import Run
from tests.support.small_jobs import job, slow_but, train_on_ranks

DATASETS = "tests.support.datasets"


def make(storage: Path, **sections: Any) -> Config:
    """Return a job on random graphs; sections are merged into it."""
    base = job(storage)
    base |= {
        "graph": {
            "format": "graphs",
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
        "format": "graphs",
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
    assert run.summary["skipped"] == {"steps": 0, "samples": 0}
    assert run.summary["topology"] is None


@pytest.mark.dgl
@pytest.mark.parametrize(("workers", "norm"), [(2, "none"), (3, "none"), (3, "batch")])
def test_as_many_ranks_as_you_like(workers: int, norm: str, tmp_path: Path) -> None:
    """At the end of an epoch, there may be more ranks than graphs in a batch."""
    curves = []
    for count, size in ((1, 6), (workers, 6 // workers)):
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
def test_bad_samples_are_left_out_together(tmp_path: Path) -> None:
    """The training equals one on a dataset without the bad samples."""
    graph = dataset("Chosen", num=20, bad=[1, 4, 5])
    without = dataset("Chosen", num=20, without=[1, 4, 5])
    train_all = {"epochs": 2, "accumulate": 2}
    curves = [
        losses(
            train_on_ranks(
                make(
                    tmp_path,
                    name=name,
                    graph=data,
                    guard={"bad_samples": 100},
                    train=train_all,
                    sampling={"batch_size": 10},  # a batch is an epoch
                )
            )
        )
        for name, data in (("bad", graph), ("without", without))
    ]
    assert np.allclose(*curves, atol=1e-5)
    run = Run(tmp_path / "bad")
    assert run.summary["skipped"]["samples"] == 3


@pytest.mark.dgl
@pytest.mark.system
@pytest.mark.parametrize(
    ("guard", "cause"),
    [
        ({}, "graph file 4 is unreadable"),
        pytest.param({"bad_samples": 1}, "more than guard.bad_samples", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("shared_ray")
def test_a_bad_sample_ends_the_run_with_its_cause(
    guard: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    graph = {**dataset(num=20, bad=[4, 7]), "val": 0.0, "test": 0.0}
    config = make(tmp_path, graph=graph, guard=guard, fault={"max_failures": 0})
    with pytest.raises(TrainingError, match=cause) as caught:
        train(config, display=False)
    if not guard:
        assert "graph 4 could not be loaded" in str(caught.value)
        assert "in __getitem__" in (caught.value.trace or "")
    else:
        logs = "".join(p.read_text() for p in (config.run_dir / "logs").glob("rank-*.log"))
        assert "graph 7 is skipped: graph 7 could not be loaded: OSError: graph file 7" in logs


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"odd": "array"}, r"graph 5 has no array 'feat'"),
        ({"odd": "width"}, r"graph 5 has _N/feat of shape \[3, 7\], expected \[3, 4\]"),
        ({"odd": "kind"}, r"graph 5 has _N/feat of torch.int64"),
        ({"odd": "label"}, r"graph 5 has the target 0.5, expected one class"),
    ],
)
def test_a_graph_unlike_the_others(args: dict[str, str], cause: str, tmp_path: Path) -> None:
    graph = {**dataset("OneOddGraph", **args), "val": 0.0, "test": 0.0}
    with pytest.raises(RuntimeError, match=cause) as caught:
        train_on_ranks(make(tmp_path, graph=graph))
    assert DataError.__name__ in str(caught.value)


@pytest.mark.dgl
@pytest.mark.parametrize("first", [0, 3])
def test_the_first_graph_may_be_the_odd_one(first: int, tmp_path: Path) -> None:
    """The schema is that of most graphs, wherever the odd graph is."""
    graph = {**dataset("Wide", num=12, wide=first), "val": 0.0, "test": 0.0}
    run = train_on_ranks(make(tmp_path, graph=graph, guard={"bad_samples": 100}))
    assert run.summary["skipped"]["samples"] == 1
    assert np.isfinite(losses(run)).all()


@pytest.mark.dgl
def test_a_graph_with_nan_does_not_become_padding(tmp_path: Path) -> None:
    """Only the steps with graph 0, which is not finite, are skipped."""
    graph = {**dataset("NotFinite", num=7), "val": 0.0, "test": 0.0}
    train_once = {"epochs": 3}
    run = train_on_ranks(make(tmp_path, graph=graph, sampling={"batch_size": 2}, train=train_once))
    assert run.summary["skipped"]["steps"] == 3


@pytest.mark.dgl
@pytest.mark.parametrize(("label", "said"), [(-1, "-1"), (-100, "-100"), (5, "5")])
def test_classes_that_are_not_there(label: int, said: str, tmp_path: Path) -> None:
    graph = {**dataset("Labelled", num=8, label=label), "val": 0.0, "test": 0.0}
    with pytest.raises(RuntimeError, match=rf"graph 5 has the target {said}, expected 0 to 1"):
        train_on_ranks(make(tmp_path, graph=graph))
    run = train_on_ranks(make(tmp_path, name="skip", graph=graph, guard={"bad_samples": 100}))
    assert run.summary["skipped"]["samples"] == 1


@pytest.mark.dgl
def test_splits_that_differ_between_ranks(tmp_path: Path) -> None:
    """Otherwise a rank would train on graphs that another one tests."""
    with pytest.raises(RuntimeError, match=r"data.* on rank 1"):
        train_on_ranks(make(tmp_path, graph=dataset("SplitByRank", num=20)))


@pytest.mark.dgl
def test_a_resume_on_another_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dataset("SplitByVariable", num=20)
    monkeypatch.setenv("RAYGNN_TEST_SPLIT", "16")
    run = train_on_ranks(make(tmp_path, graph=graph, train={"epochs": 2}))
    records = (run.path / "metrics.jsonl").read_text()
    longer = {"epochs": 4}
    other = make(tmp_path, graph={**graph, "seed": 9}, train=longer)
    with pytest.raises(InputError, match=r"graph\.seed was 0 and is 9"):
        train_on_ranks(other, resume=True)
    monkeypatch.setenv("RAYGNN_TEST_SPLIT", "12")
    with pytest.raises(RuntimeError, match="on another split of them"):
        train_on_ranks(make(tmp_path, graph=graph, train=longer), resume=True)
    assert (run.path / "metrics.jsonl").read_text() == records


@pytest.mark.dgl
def test_the_same_graph_left_out_every_epoch_counts_once(tmp_path: Path) -> None:
    graph = {**dataset(num=8, bad=[2]), "val": 0.0, "test": 0.0}
    guard = {"bad_samples": 1}
    run = train_on_ranks(make(tmp_path, graph=graph, guard=guard, train={"epochs": 6}))
    assert run.summary["skipped"]["samples"] == 1


@pytest.mark.dgl
def test_what_evaluation_leaves_out_is_said(tmp_path: Path) -> None:
    guard = {"bad_samples": 100}
    graph = dataset("Chosen", num=20, bad=[18], val=[15, 16, 17], test=[18, 19])
    run = train_on_ranks(make(tmp_path, graph=graph, guard=guard))
    assert run.summary["metrics"]["test/left_out"] == 1
    assert "val/left_out" not in run.summary["metrics"]
    graph = dataset("Chosen", num=20, bad=[18, 19], val=[15, 16, 17], test=[18, 19])
    with pytest.raises(RuntimeError, match="none of the graphs of split test can be loaded"):
        train_on_ranks(make(tmp_path, name="none", graph=graph, guard=guard))


@pytest.mark.dgl
def test_whole_numbers_of_two_widths_are_refused_for_own_models(tmp_path: Path) -> None:
    own = {"kind": "tests.worker.test_graph_tasks:OwnGin"}
    graph = {**dataset("Tagged", num=8), "val": 0.0, "test": 0.0}
    with pytest.raises(RuntimeError, match=r"graph \d has _N/tag of torch.int32, others"):
        train_on_ranks(make(tmp_path, graph=graph, model=own))


@pytest.mark.dgl
def test_the_cause_is_not_lost_to_slow_ranks(tmp_path: Path) -> None:
    """Rank 0 learns of the failure before rank 1 meets it; both report its cause."""
    graph = {**dataset("SlowThenBad", num=40), "val": 0.0, "test": 0.0}
    config = make(tmp_path, graph=graph, sampling={"batch_size": 1, "prefetch": 8})
    with pytest.raises(RuntimeError, match="the last graph is broken"):
        train_on_ranks(config)


@pytest.mark.dgl
def test_a_fold_to_validate_on(tmp_path: Path) -> None:
    graph = {"format": "graphs", "dataset": f"{DATASETS}:RandomGraphs", "args": {"num": 30}}
    config = make(tmp_path, graph={**graph, "folds": 5, "fold": 2, "fold_for": "val"})
    run = train_on_ranks(config)
    summary = run.summary
    assert "test/accuracy" not in summary["metrics"]
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    measured = [r["val/accuracy"] for r in records if "val/accuracy" in r]
    assert summary["metrics"]["val/accuracy"] == max(measured)
    assert summary["last_metrics"]["val/accuracy"] == measured[-1]
