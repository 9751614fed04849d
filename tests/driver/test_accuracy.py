"""Accuracy of models: near the published figures on real graphs, and above a model without edges.

Job files as they are, but with one seed and on forked ranks in place of Ray's workers.
`benchmarks/bench_accuracy.py` holds means over seeds, on Ray, against the published figures.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import raygnn
from raygnn.config.schema import Config
from raygnn.graph.sources import load_graph
from tests.conftest import CHECKOUT
from tests.support.datasets import cora, tolokers
from tests.support.pages import PAGES, blocks
from tests.support.small_jobs import JobFactory, train_on_ranks

RealJob = Callable[..., Config]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout: these trainings take longer than those of other tests."""
    monkeypatch.setattr("tests.support.ranks.TIMEOUT", 900.0)


@pytest.fixture
def real_job(data_dir: Path, tmp_path: Path) -> RealJob:
    """Load a job file with the graph of ``data_dir``; sections are merged into it."""

    def load(job: str, **sections: Any) -> Config:
        file = CHECKOUT / "jobs" / f"{job}.yaml"
        root = tmp_path / "data"
        (tolokers if job.startswith("tolokers") else cora)(data_dir, root)
        keys = {"storage": str(tmp_path), "graph.args.root": str(root)}
        return raygnn.load_config(file, keys, **sections)

    return load


def score(config: Config) -> float:
    """Return the test metric, in 0 … 1."""
    return float(train_on_ranks(config).summary["metrics"][f"test/{config.task.chosen_metric}"])


@pytest.mark.system
@pytest.mark.slow
def test_cora_gcn_with_1_2_and_4_workers(real_job: RealJob) -> None:
    """The global batch is always all 140 training nodes; only dropout masks differ."""
    scores = {}
    for workers in (1, 2, 4):
        config = real_job(
            "cora-gcn",
            name=f"with-{workers}",
            partition={"parts": workers},
            sampling={"batch_size": 140 // workers},
            cluster={"workers": workers},
            train={"epochs": 100, "eval_every": 5},
        )
        scores[workers] = score(config)
    assert min(scores.values()) >= 0.79, scores
    assert max(scores.values()) - min(scores.values()) <= 0.015, scores


@pytest.mark.system
def test_cora_gat(real_job: RealJob) -> None:
    config = real_job("cora-gat", train={"epochs": 120, "eval_every": 5})
    assert score(config) >= 0.80


@pytest.mark.system
@pytest.mark.slow
def test_cora_with_a_model_of_pygs(data_dir: Path, tmp_path: Path) -> None:
    """The job of docs/models.md: GATv2, entirely PyG's."""
    (page,) = [path for path in PAGES if path.name == "models.md"]
    (text,) = [block for block in blocks("yaml", page) if "cora-pyg" in block]
    cora(data_dir, tmp_path / "data")
    keys = {"storage": str(tmp_path), "graph.args.root": str(tmp_path / "data")}
    more = {"partition": {"parts": 2}, "cluster": {"workers": 2}}
    assert score(raygnn.load_config({**yaml.safe_load(text), **more}, keys)) >= 0.81


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tolokers(real_job: RealJob) -> None:
    assert score(real_job("tolokers-sage")) >= 0.81


@pytest.mark.system
def test_college_links(data_dir: Path, tmp_path: Path) -> None:
    """Messages and their times alone predict the next recipient better than TGAT's 79.6 %."""
    write = runpy.run_path(str(CHECKOUT / "examples" / "college.py"))["write"]
    tables = write(data_dir / "temporal" / "CollegeMsg.txt", tmp_path / "college")
    keys = {"storage": str(tmp_path), "graph.path": str(tables), "cluster.workers": 1}
    few = {"train.epochs": 1, "model.layers": 1, "sampling.fanout": [20]}
    assert (
        score(raygnn.load_config(CHECKOUT / "jobs" / "college-links.yaml", {**keys, **few})) >= 0.79
    )


def test_neighbours_tell_what_features_do_not(make_job: JobFactory) -> None:
    """A generated graph on which a node's own features say little, and its neighbours much."""
    config = make_job(
        graph={"nodes": 4000, "degree": 12, "classes": 6, "noise": 6.0},
        model={"hidden": 32},
        train={"epochs": 6},
    )
    alone = features_alone(config)
    assert 1 / 6 < alone < 0.45
    assert score(config) >= alone + 0.3


def features_alone(config: Config) -> float:
    """Return the test accuracy of a logistic regression on the nodes' own features."""
    assert config.graph is not None
    (frame,) = load_graph(config.graph).nodes.values()
    data = {name: torch.as_tensor(array) for name, array in frame.data.items()}
    x, y = data["feat"], data["label"].long()
    linear = torch.nn.Linear(x.shape[1], int(y.max()) + 1)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        train = data["train_mask"]
        value = F.cross_entropy(linear(x[train]), y[train])
        value.backward()
        return value

    optimizer.step(loss)
    test = data["test_mask"]
    return float((linear(x[test]).argmax(1) == y[test]).float().mean())
