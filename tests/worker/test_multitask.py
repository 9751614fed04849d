"""Several tasks on one graph: one network, trained together, the same on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.graph.data import etype_str
from raygnn.models.heads import MultitaskModel
from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.lightning_modules import MultitaskTask
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job
from raygnn.worker.planes.multitask_plane import MultitaskPlane
from tests.prediction.test_predict import ask
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, goals_of, losses, train_on_ranks
from tests.worker.test_edge_tasks import LIKED_BY, LIKES, LINKS, TRAIN, config_of, paid, shop

pytestmark = pytest.mark.long

PRICE = {"kind": "node_regression", "ntype": "thing", "target": "price"}
KIND = {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"}
LINK = {**LINKS, "negatives": {"number": 40}, "decoder": "distmult"}
TASKS: dict[str, dict[str, Any]] = {
    "link": {**LINK, "weight": 0.5},
    "price": {**PRICE, "batch_factor": 0.5},
    "kind": {**KIND, "decoder": "mlp"},
}


def several(tmp_path: Path, name: str = "several", tasks: Any = None, **more: Any) -> Config:
    model = {"hidden": 8, **more.pop("model", {})}
    return config_of(tmp_path, name, tasks=tasks or TASKS, model=model, **more)


def test_any_ranks_train_the_same(tmp_path: Path) -> None:
    """Losses, in total and by task, and metrics agree, also for accumulated batches in windows that
    are short at an epoch's end."""
    found = []
    for workers, parts, replicated in ((1, 1, True), (2, 2, True), (3, 2, False)):
        config = several(
            tmp_path,
            f"{workers}-{replicated}",
            parts=parts,
            sampling={"fanout": [-1, -1], "batch_size": 120 // workers},
            cluster={"workers": workers},
            train={"epochs": 2, "accumulate": 3},
        )
        run = train_on_ranks(config, replicated=replicated)
        columns = [f"train/{name}" for name in ("loss", "link/loss", "price/loss", "kind/loss")]
        found.append((run.metrics[columns].dropna().to_numpy(), run.summary["metrics"]))
    assert len(found[0][0]) > 3
    for other, metrics in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-3
        assert metrics == pytest.approx(found[0][1], abs=5e-3)
    total = found[0][0] @ np.array([-1, 0.5, 1, 1])
    assert np.abs(total).max() < 1e-5  # the weighted sum


def test_ranks_may_have_shares_of_unequal_size(tmp_path: Path) -> None:
    """The number of edges is no multiple of the workers, and a task has fewer nodes than
    workers."""
    tasks = {
        "link": {**LINK, "batch_factor": 1.3},
        "kind": {**KIND, "batch_factor": 1e6},
        "price": {**PRICE, "batch_factor": 1e-6},
    }
    found = []
    for workers in (1, 3):
        config = several(
            tmp_path,
            str(workers),
            tasks=tasks,
            sampling={"fanout": [-1, -1], "batch_size": 60 // workers},
            cluster={"workers": workers},
            train={"epochs": 1},
        )
        found.append(losses(train_on_ranks(config)))
    assert found[1] == pytest.approx(found[0], abs=1e-3)


def test_one_of_the_decoders_reads_the_edges(tmp_path: Path) -> None:
    model = {"decoder_features": ["amount", "pieces"]}
    config = several(tmp_path, data=paid(), model=model, train={**TRAIN, "epochs": 12})
    run = train_on_ranks(config)
    assert run.summary["metrics"]["test/kind/accuracy"] > 0.8
    weights = torch.load(run.path / "checkpoints" / "selected.pt")
    read = [name for name in weights if name.endswith("decoder.features.weight")]
    assert [name.split(".")[1] for name in read] == [":kind"]


def test_each_task_is_learnt_and_predicted(tmp_path: Path) -> None:
    config = several(tmp_path, train={**TRAIN, "epochs": 30})
    run = train_on_ranks(config)
    metrics = run.summary["metrics"]
    assert metrics["test/link/mrr"] > 0.1  # a guess has 0.04
    assert metrics["test/price/r2"] > 0.7
    assert metrics["test/kind/accuracy"] > 0.8
    best = run.metrics["val/link/mrr"].dropna()  # of the first task
    assert metrics["val/link/mrr"] == pytest.approx(best.max(), abs=1e-6)

    data = shop()
    for workers in (1, 3):
        again = ask(run, config, workers, split="test", rows=False)
        wanted = {name: value for name, value in metrics.items() if name.startswith("test/")}
        assert again == pytest.approx(wanted, abs=2e-3)
    one = ask(run, config, 2, split="test", rows=False, task="kind")
    assert set(one) == {f"test/kind/{name}" for name in ("accuracy", "f1", "mcc", "loss")}
    prices = ask(run, config, 2, task="price").to_pandas()
    assert prices["node"].tolist() == list(range(data.nodes["thing"].num))
    test = prices[prices["split"] == "test"]
    rmse = np.sqrt(((test["prediction"] - test["label"]) ** 2).mean())
    assert rmse == pytest.approx(metrics["test/price/rmse"], rel=1e-4)
    kinds = ask(run, config, 2, task="kind").to_pandas()
    test = kinds[kinds["split"] == "test"]
    right = (test["prediction"] == test["label"]).mean()
    assert right == pytest.approx(metrics["test/kind/accuracy"], abs=1e-6)
    assert "score" in ask(run, config, 1, task="link").column_names
    rows = ask(run, config, 2, embeddings=True, ntype="person").to_pandas()
    assert rows["node"].tolist() == list(range(data.nodes["person"].num))
    few = ask(run, config, 2, task="price", wanted=np_ids([3, 50])).to_pandas()
    by_node = prices.set_index("node")["prediction"]
    assert few["prediction"].tolist() == pytest.approx(by_node[[3, 50]].tolist(), abs=1e-4)


def np_ids(ids: list[int]) -> Any:
    import pyarrow as pa

    return pa.array(ids, pa.int64())


def _step(exchange: Exchange, job: Job) -> dict[str, Any]:
    """Compute one step of all tasks, and of each task alone with the same network and seeds."""
    plane = MultitaskPlane.open(job, Ranks.join(job.config, exchange.world, torch.device("cpu")))
    task = plane.task()
    assert isinstance(task, MultitaskTask)
    assert isinstance(task.model, MultitaskModel)
    batch = plane.batches(task)(0, 0)
    task.training_step(batch, 0).backward()
    parameters = dict(task.model.named_parameters())
    together = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    alone = {name: torch.zeros_like(grad) for name, grad in together.items()}
    for name, own in plane.planes.items():
        task.zero_grad()
        one = task.of(name)
        one.training_step(own.batches(one)(0, 0), 0).backward()
        for key, p in parameters.items():
            if p.grad is not None:
                alone[key] += task.weights[name] * p.grad
    hidden = {}
    for etype in (LIKES, LIKED_BY):
        hidden[etype_str(etype)] = int(plane.shard.topology[etype].num_edges)
    return {"together": together, "alone": alone, "edges": hidden}


def test_the_gradient_is_the_weighted_sum_of_the_tasks_own(tmp_path: Path) -> None:
    """With complete neighbourhoods, each task sees what it would see alone, and none sees an edge
    that any task is tested with."""
    edges = {"exclude": "none", "reverse": None}
    open_tasks = {n: t if n == "price" else {**t, **edges} for n, t in TASKS.items()}
    config = several(
        tmp_path,
        tasks=open_tasks,
        sampling={"fanout": [-1, -1], "batch_size": 40},
        cluster={"workers": 1},
    )
    place = config.partition.path
    job = Job(config, place, config.run_dir, goals_of(config, place), True, 0.0, 40)
    (found,) = run_ranks(1, _step, job)
    assert len(found["together"]) > 8
    for name, grad in found["together"].items():
        assert torch.allclose(grad, found["alone"][name], atol=1e-5), name
    data = shop().edges[LIKES].data
    tested = int((data["val_mask"] | data["test_mask"]).sum())
    assert found["edges"][etype_str(LIKES)] == shop().edges[LIKES].num - tested


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The resumed run is bitwise identical, from within the epochs of the shorter tasks."""

    def config(name: str, steps: int) -> Config:
        return several(
            tmp_path,
            name,
            train={"epochs": 3, "max_steps": steps, "lr": 0.02},
            fault={"checkpoint_every": 1, "max_failures": 0},
        )

    whole = train_on_ranks(config("whole", 14))
    train_on_ranks(config("part", 9))
    resumed = train_on_ranks(config("part", 14), resume=True)
    states = [weights_of(run) for run in (whole, resumed)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert losses(resumed).tolist() == losses(whole).tolist()


def test_what_was_trained_cannot_change_on_resume(tmp_path: Path) -> None:
    train = {"epochs": 1, "max_steps": 3}
    run = train_on_ranks(several(tmp_path, train=train))
    assert run.summary["steps"] == 3
    for change in (
        {"link": TASKS["link"], "price": TASKS["price"]},
        {**TASKS, "link": {**TASKS["link"], "weight": 0.4}},
        dict(reversed(TASKS.items())),
    ):
        with pytest.raises(InputError, match=r"tasks"):
            train_on_ranks(several(tmp_path, tasks=change, train=train), resume=True)


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run.path / "checkpoints" / "selected.pt")
    return found


def test_sharded_training_is_the_same(tmp_path: Path) -> None:
    found = []
    for comm in ({}, {"comm": {"shard": "optimizer"}}):
        name, train = f"sharded-{len(found)}", {"epochs": 2, "max_steps": 8}
        config = several(tmp_path, name, train=train, **comm)
        found.append(train_on_ranks(config))
    assert losses(found[1]) == pytest.approx(losses(found[0]), abs=1e-5)
    metrics = found[0].summary["metrics"]
    assert found[1].summary["metrics"] == pytest.approx(metrics, abs=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_other_precisions(precision: str, tmp_path: Path) -> None:
    config = several(tmp_path, precision=precision, train={**TRAIN, "epochs": 12})
    metrics = train_on_ranks(config).summary["metrics"]
    assert metrics["test/kind/accuracy"] > 0.6
    assert metrics["test/link/mrr"] > 0.07  # a guess has 0.04


def test_learned_rows_serve_all_tasks(tmp_path: Path) -> None:
    embedding = {"dim": 8, "ntypes": ["person"]}
    config = several(tmp_path, model={"embedding": embedding}, train={**TRAIN, "epochs": 12})
    run = train_on_ranks(config)
    assert run.summary["metrics"]["test/price/r2"] > 0.5
    assert run.summary["embeddings"]["rows"] > 0


@pytest.mark.dgl
def test_your_own_encoder(make_job: JobFactory) -> None:
    """The user's encoder is called as for one task, with the hidden width as its output width."""
    links = {"kind": "link_prediction", "negatives": {"number": 50}, "decoder": "distmult"}
    config = make_job(
        graph={"nodes": 300, "degree": 6, "noise": 1.0},
        tasks={"kind": {"kind": "node_classification"}, "links": links},
        model={"kind": "tests.support.own_models:DglSage"},
        train=TRAIN,
    )
    metrics = train_on_ranks(config).summary["metrics"]
    assert metrics["test/kind/accuracy"] > 0.7
    assert metrics["test/links/mrr"] > 0.03


def test_the_first_task_selects(tmp_path: Path) -> None:
    """The job is refused if the first task has no validation data and another task has."""
    data = shop()
    del data.nodes["thing"].data["val_mask"]
    tasks = {"price": PRICE, "kind": KIND}
    config = several(tmp_path, data=data, tasks=tasks)
    with pytest.raises(RuntimeError, match=r"tasks.price: price, the first of the tasks"):
        train_on_ranks(config)


def test_a_task_with_nothing_to_train_on_is_named(tmp_path: Path) -> None:
    data = shop()
    data.nodes["thing"].data["train_mask"][:] = False
    with pytest.raises(RuntimeError, match=r"check tasks.price.target and the masks"):
        train_on_ranks(several(tmp_path, data=data))


def test_a_run_goes_on_with_other_workers(tmp_path: Path) -> None:
    """A task's number of seeds in a step stays the same."""

    def config(name: str, workers: int, steps: int) -> Config:
        return several(
            tmp_path,
            name,
            tasks={name: {**task, "batch_factor": 0.7} for name, task in TASKS.items()},
            parts=1,
            sampling={"fanout": [-1, -1], "batch_size": 21},
            cluster={"workers": workers},
            train={"epochs": 2, "max_steps": steps, "accumulate": 2, "lr": 0.02},
            fault={"checkpoint_every": 1, "max_failures": 0},
        )

    whole = train_on_ranks(config("whole", 3, 9))
    train_on_ranks(config("part", 3, 4))
    resumed = train_on_ranks(config("part", 2, 9), resume=True)
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-3)
