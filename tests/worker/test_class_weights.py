"""Class weights, focal loss, and the user's losses and metrics: any number of ranks trains alike, a
resumed run keeps them, evaluation uses them, and ranks that differ in them fail together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.checkpoint import weights
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.train import train
from raygnn.errors import ConfigError, TrainingError
from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange
from raygnn.worker.job import Job
from raygnn.worker.planes import plane
from raygnn.worker.rank import Rank
from tests.prediction.test_predict import ask
from tests.support import own_losses
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, job_of, losses, runtime, selected, train_on_ranks
from tests.worker.test_edge_tasks import config_of
from tests.worker.test_graph_tasks import dataset, make
from tests.worker.test_multitask import KIND, several

pytestmark = pytest.mark.long

OWN = "tests.support.own_losses"
FOCAL = {"loss": "focal", "class_weights": "balanced", "label_smoothing": 0.1}
SPREAD = ((1, True), (2, True), (3, False))


def of_nodes(tmp_path: Path, name: str, workers: int, **keys: Any) -> Config:
    task = {"kind": "node_classification", "ntype": "thing", "target": "group", **keys}
    return _shop(tmp_path, name, workers, task)


def of_edges(tmp_path: Path, name: str, workers: int, **keys: Any) -> Config:
    return _shop(tmp_path, name, workers, {**KIND, **keys})


def _shop(tmp_path: Path, name: str, workers: int, task: dict[str, Any]) -> Config:
    from tests.worker.test_edge_tasks import shop

    data = shop()
    things = data.nodes["thing"].data
    things["group"] = (things["price"] / 2).astype(np.int64)
    return config_of(
        tmp_path,
        name,
        data=data,
        parts=min(workers, 2),
        task=task,
        model={"hidden": 8},
        sampling={"fanout": [-1, -1], "batch_size": 120 // workers},
        cluster={"workers": workers},
        train={"epochs": 2},
    )


def of_graphs(tmp_path: Path, name: str, workers: int, **keys: Any) -> Config:
    return make(
        tmp_path,
        name=name,
        graph=dataset(num=47),
        task={"kind": "graph_classification", **keys},
        cluster={"workers": workers},
        sampling={"batch_size": 6 // workers},
    )


OF_GRAPHS = pytest.param(of_graphs, marks=pytest.mark.dgl)


def recorded(run: Run) -> dict[str, list[float]]:
    """Return the class weights that a run has kept for evaluations."""
    about = json.loads((run.path / "checkpoints" / weights.ABOUT).read_text())
    found: dict[str, list[float]] = about["class_weights"]
    return found


@pytest.mark.parametrize("kind", [of_nodes, of_edges, OF_GRAPHS])
def test_any_ranks_train_the_same(kind: Any, tmp_path: Path) -> None:
    curves, metrics, kept = [], [], []
    for workers, replicated in SPREAD[:: 1 if kind is of_nodes else 2]:
        config = kind(tmp_path, f"{workers}-{replicated}", workers, **FOCAL)
        run = train_on_ranks(config, replicated=replicated)
        curves.append(losses(run))
        metrics.append(run.summary["metrics"])
        kept.append(recorded(run))
    for curve, values, weighted in zip(curves[1:], metrics[1:], kept[1:], strict=True):
        assert np.allclose(curve, curves[0], atol=1e-4)
        assert values == pytest.approx(metrics[0], abs=2e-3)
        assert weighted == kept[0]  # to the bit
    plain = losses(train_on_ranks(kind(tmp_path, "plain", 1)))
    assert not np.allclose(plain, curves[0], atol=1e-2)


def test_balanced_is_of_the_training_labels_alone(make_job: JobFactory, tmp_path: Path) -> None:
    task = {"class_weights": "balanced", "loss": "focal", "gamma": 1.5}
    config = make_job(task=task, train={"epochs": 1}, precision="bf16")
    run = train_on_ranks(config)
    table = ask(run, config, 2).to_pandas()
    counts = table["label"][table["split"] == "train"].value_counts().sort_index().to_numpy()
    assert recorded(run)[""] == pytest.approx(list(counts.sum() / 4 / counts))
    assert ask(run, config, 1, split="test", rows=False) == pytest.approx(
        {k: v for k, v in run.summary["metrics"].items() if k.startswith("test/")}, abs=5e-3
    )


def test_a_resume_keeps_the_weights(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are the checkpoint's, even if counting again would yield others."""
    task = {"class_weights": "balanced"}
    whole = train_on_ranks(make_job(name="whole", task=task))
    train_on_ranks(make_job(name="parts", task=task, train={"max_steps": 3}))
    monkeypatch.setattr(plane, "balance", lambda *_: [100.0, 1.0, 1.0, 1.0])
    resumed = train_on_ranks(make_job(name="parts", task=task), resume=True)
    assert np.array_equal(losses(resumed), losses(whole))
    assert recorded(resumed) == recorded(whole)
    assert all(torch.equal(selected(resumed)[k], v) for k, v in selected(whole).items())


def test_several_tasks_have_weights_of_their_own(tmp_path: Path) -> None:
    tasks = {
        "kind": {**KIND, **FOCAL, "decoder": "mlp"},
        "again": {**KIND, "decoder": "mlp", "loss": f"{OWN}:plain"},
    }
    found = []
    for workers in (1, 2):
        config = several(
            tmp_path,
            f"on-{workers}",
            tasks=tasks,
            cluster={"workers": workers},
            sampling={"fanout": [-1, -1], "batch_size": 120 // workers},
            train={"epochs": 2},
        )
        run = train_on_ranks(config)
        found.append(run.metrics[["train/kind/loss", "train/again/loss"]].dropna().to_numpy())
        assert recorded(run).keys() == {"kind"}
        values = ask(run, config, workers, split="test", rows=False)
        assert values["test/kind/loss"] == pytest.approx(
            run.summary["metrics"]["test/kind/loss"], abs=1e-5
        )
    assert np.abs(found[0] - found[1]).max() < 1e-3


def test_too_few_weights(make_job: JobFactory) -> None:
    with pytest.raises(RuntimeError, match="there are 3 weights, and 4 classes"):
        train_on_ranks(make_job(task={"class_weights": [1, 2, 3]}))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (of_nodes, {}),
        pytest.param(of_graphs, {}, marks=pytest.mark.dgl),
        (of_edges, {"kind": "edge_regression", "target": "stars"}),
    ],
)
def test_an_own_loss_like_ours_trains_the_same(
    kind: Any, keys: dict[str, Any], tmp_path: Path
) -> None:
    """A user's metric equal to ours selects the same epoch, and is as exact for any number of
    ranks."""
    ours = train_on_ranks(kind(tmp_path, "ours", 1, **keys))
    own = {"loss": f"{OWN}:plain", "metric": f"{OWN}:profit"}
    of_ours = ours.summary["metrics"]
    profit = -of_ours["test/mae"] if keys else of_ours["test/accuracy"]
    run = train_on_ranks(kind(tmp_path, "own", 3, **keys, **own))
    assert np.allclose(losses(run), losses(ours), atol=1e-4)
    metrics = run.summary["metrics"]
    assert metrics["test/profit"] == pytest.approx(profit, abs=1e-4)
    assert metrics["test/loss"] == pytest.approx(of_ours["test/loss"], abs=1e-4)
    assert run.summary["best_epoch"] == ours.summary["best_epoch"]
    assert metrics["val/profit"] == pytest.approx(run.metrics["val/profit"].max(), abs=1e-6)


@pytest.mark.dgl
def test_labels_that_are_not_known_reach_an_own_loss_as_minus_one(tmp_path: Path) -> None:
    curves = []
    for keys in ({}, {"loss": f"{OWN}:plain"}):
        config = make(
            tmp_path,
            name=f"run-{len(keys)}",
            graph=dataset("TwoLabels", num=30),
            task={"kind": "graph_classification", "labels": "multi", **keys},
        )
        curves.append(losses(train_on_ranks(config)))
    assert np.allclose(*curves, atol=1e-5)


@pytest.mark.dgl
def test_filler_graphs_have_a_valid_target(tmp_path: Path) -> None:
    """A rank without a graph for a batch receives one that has no influence."""
    config = make(
        tmp_path,
        graph=dataset("Numbered", num=11),  # seven of them for training
        task={"kind": "graph_regression", "loss": f"{OWN}:logarithmic"},
        cluster={"workers": 3},
        sampling={"batch_size": 2},
        train={"lr": 1e-3},
    )
    run = train_on_ranks(config)
    assert run.summary["skipped"] == {"steps": 0}
    assert np.isfinite(losses(run)).all()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none_on_one", "none_on_one returned NoneType, expected [64]: a loss of each seed"),
        ("scalar_on_one", "scalar_on_one returned [], expected [64]: a loss of each seed"),
        ("constant_on_one",
         "the result of tests.support.own_losses:constant_on_one has no gradient"),
        ("infinite_on_one", "in 3 steps in a row (guard.nan_steps: 2): the loss was not finite on "
         "rank 1, in epoch 0, batch 2"),
    ],
)  # fmt: skip
def test_one_rank_whose_loss_is_odd(name: str, said: str, make_job: JobFactory) -> None:
    config = make_job(task={"loss": f"{OWN}:{name}"}, guard={"nan_steps": 2})
    with pytest.raises(RuntimeError) as caught:
        train_on_ranks(config)
    assert said in str(caught.value)


@pytest.mark.system
def test_it_is_one_sentence_and_names_the_rank(make_job: JobFactory) -> None:
    config = make_job(task={"loss": f"{OWN}:none_on_one"}, cluster={"allow": ["model_runs"]})
    with pytest.raises(TrainingError) as caught:
        train(config, display=False)
    assert caught.value.what == (
        f"{OWN}:none_on_one returned NoneType, expected [64]: a loss of each seed"
    )
    assert (caught.value.where, caught.value.rank) == ("rank 1, task.loss", 1)


def _with_other(exchange: Exchange, job: Job) -> None:
    if exchange.world.rank == 1:
        own_losses.plain = own_losses.none_on_one  # type: ignore[assignment]
    Rank(job, runtime(exchange)).run()


def test_ranks_whose_files_differ(make_job: JobFactory) -> None:
    config = make_job(task={"loss": f"{OWN}:plain"})
    with pytest.raises(
        RuntimeError,
        match=r"ranks differ: option task\.loss source: \w+ on rank 0, \w+ on rank 1\n",
    ):
        run_ranks(2, _with_other, job_of(config), fresh=True)


def test_a_user_metric_that_returns_no_number(make_job: JobFactory) -> None:
    config = make_job(task={"metric": f"{OWN}:words"})
    with pytest.raises(RuntimeError, match="words returned str, expected one number"):
        train_on_ranks(config)


def test_predictions_need_no_loss(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations need one."""
    config = make_job(task={"loss": f"{OWN}:plain"}, train={"epochs": 1}, cluster={"workers": 1})
    run = train_on_ranks(config)
    monkeypatch.delattr(own_losses, "plain")
    assert len(ask(run, config, 1)) == 2000
    with pytest.raises(RuntimeError, match="plain could not be imported"):
        ask(run, config, 1, split="test", rows=False)


@pytest.mark.parametrize("metric", ["recall@60", "average_precision", "mcc"])
def test_metrics_select_the_best_weights(metric: str, make_job: JobFactory) -> None:
    config = make_job(task={"metric": metric}, train={"epochs": 4, "lr": 0.05, "patience": 3})
    run = train_on_ranks(config)
    scores = run.metrics[f"val/{metric}"].dropna()
    assert run.summary["metrics"][f"val/{metric}"] == pytest.approx(scores.max(), abs=1e-6)
    assert len(set(scores)) > 1


@pytest.mark.parametrize("name", ["loss", "metric"])
def test_the_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.chdir(examples)
    monkeypatch.setattr(sys, "path", [str(examples), *sys.path])  # of ranks forked for this
    tiny = [f"storage={tmp_path}", "graph.nodes=1000", "train.epochs=3", f"staging.path={tmp_path}"]
    run = train_on_ranks(load_config(examples / f"own_{name}.yaml", tiny))
    assert losses(run)[-1] < losses(run)[0]
    if name == "metric":
        gains = run.metrics["val/net_gain"].dropna()
        assert run.summary["metrics"]["val/net_gain"] == pytest.approx(gains.max(), abs=1e-6)
        assert gains.max() > 0


def test_specs_that_name_no_function() -> None:
    from raygnn.models.user import load_function

    for spec, said in (("math:pi", "is a float"), (f"{OWN}:Any", "is a "), ("math:no", "imported")):
        with pytest.raises(ConfigError, match=said) as caught:
            load_function(spec, "task.loss")
        assert caught.value.where == "task.loss"
