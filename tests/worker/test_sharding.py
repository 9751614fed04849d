"""Sharded data parallelism trains the same model, on real ranks, and keeps less on each."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from raygnn.checkpoint.lifecycle import Checkpoints
from raygnn.errors import TrainingError
from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange
from raygnn.worker.comm import sharding
from raygnn.worker.comm.sharding import Twin, check_shardable, is_sharded, whole
from raygnn.worker.guard.callback import Guard
from raygnn.worker.job import Job
from tests.driver.test_resume import stopped
from tests.ranks import run_ranks
from tests.small_jobs import JobFactory, _train, job_of, losses, selected, train_on_ranks
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import make as graph_job

SHARDS = ("optimizer", "full")


# ── the same training ────────────────────────────────────────────────────────────────────────


SMALL: dict[str, Any] = {"nodes": 800, "degree": 6}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gcn": (2, {"model": {"kind": "gcn"}}),
    "gat": (3, {"model": {"kind": "gat"}, "train": {"clip": 0.1, "accumulate": 3}}),
    "gin": (2, {"model": {"kind": "gin", "norm": "batch"}, "train": {"accumulate": 2}}),
    "own": (2, {"model": {"kind": "tests.own_models:DglSage"}}),
    "sage": (3, {"graph": {"typed": True}, "train": {"optimizer": "sgd", "momentum": 0.9}}),
    "mixed": (2, {"precision": "bf16-mixed", "train": {"clip": 0.1, "optimizer": "adamw"}}),
    "alone": (1, {}),
}
MARKS = {"gcn": pytest.mark.slow, "mixed": pytest.mark.slow, "own": pytest.mark.dgl}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES])
def test_the_same_losses(case: str, make_job: JobFactory) -> None:
    """Of plain SGD, too, whose steps show the scale of a gradient, and of running statistics."""
    workers, sections = CASES[case]
    options: dict[str, Any] = {
        **sections,
        "graph": {**SMALL, **sections.get("graph", {})},
        "sampling": {"batch_size": 80 // workers},
        "train": {"epochs": 2, "lr": 0.05, **sections.get("train", {})},
        "cluster": {"workers": workers},
    }
    runs = {
        shard: train_on_ranks(make_job(name=shard, comm={"shard": shard}, **options))
        for shard in ("none", *SHARDS)
    }
    for shard in SHARDS:
        assert np.allclose(losses(runs["none"]), losses(runs[shard]), atol=2e-6), shard
        for name, value in runs["none"].summary["metrics"].items():
            other = runs[shard].summary["metrics"][name]
            assert other == pytest.approx(value, abs=1e-5 if "loss" in name else 5e-3), name


@pytest.mark.slow
def test_the_same_in_bf16(make_job: JobFactory) -> None:
    """Parameters and gradients in bf16, where rounding differs; ranks compare collectives."""
    options: dict[str, Any] = {"precision": "bf16", "guard": "deep", "graph": SMALL}
    runs = [
        train_on_ranks(make_job(name=shard, comm={"shard": shard}, **options))
        for shard in ("none", *SHARDS)
    ]
    assert np.allclose(losses(runs[0]), losses(runs[1]), atol=0.01)
    assert np.allclose(losses(runs[0]), losses(runs[2]), atol=0.01)


@pytest.mark.dgl
def test_graphs_of_which_ranks_evaluate_unequal_numbers(tmp_path: Path) -> None:
    """Evaluation asks nothing of other ranks: 7 graphs on two of them, one at a time."""
    sections: dict[str, Any] = {
        "graph": {**dataset(num=20), "val": 0.25, "test": 0.35},
        "sampling": {"eval_batch_size": 1},
    }
    plain, sharded = (
        train_on_ranks(graph_job(tmp_path, name=shard, comm={"shard": shard}, **sections))
        for shard in ("none", "full")
    )
    assert np.allclose(losses(plain), losses(sharded), atol=1e-5)


# ── what each rank holds ─────────────────────────────────────────────────────────────────────


def _held(exchange: Exchange, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    end = Checkpoints.on_train_batch_end

    def look(self: Checkpoints, trainer: Any, module: Any, *rest: Any) -> None:
        optimizer = trainer.optimizers[0]
        state = getattr(optimizer, "optim", optimizer).state  # of ZeRO, the rank's own optimizer
        parts = [t for held in state.values() for t in held.values() if t.dim()]
        parameters = list(module.parameters())
        found.update(
            state=sum(map(_bytes, parts)),
            parameters=sum(map(_bytes, parameters)),
            sharded=[is_sharded(p) for p in parameters],
            optimizer=type(optimizer).__name__,
        )
        end(self, trainer, module, *rest)

    Checkpoints.on_train_batch_end = look  # type: ignore[method-assign]
    found["metrics"] = _train(exchange, job)["metrics"]
    return found


def _bytes(tensor: Any) -> int:
    return int((tensor.to_local() if is_sharded(tensor) else tensor).nbytes)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_each_rank_holds(workers: int, make_job: JobFactory) -> None:
    held: dict[str, list[dict[str, Any]]] = {}
    for shard in ("none", *SHARDS):
        config = make_job(
            name=shard,
            graph=SMALL,
            model={"hidden": 48, "layers": 3},
            sampling={"fanout": [3, 3, 3]},
            train={"max_steps": 2},
            comm={"shard": shard},
            cluster={"workers": workers},
        )
        held[shard] = run_ranks(workers, _held, job_of(config), fresh=True)  # it patches
    whole_state, size = held["none"][0]["state"], held["none"][0]["parameters"]
    assert whole_state == 2 * size  # of Adam
    for rank in held["optimizer"]:
        assert rank["parameters"] == size
        assert rank["state"] == pytest.approx(whole_state / workers, rel=0.15)
        assert rank["optimizer"] == ("Adam" if workers == 1 else "ZeroRedundancyOptimizer")
    for rank in held["full"]:
        assert all(rank["sharded"]) == (workers > 1)
        assert rank["parameters"] == pytest.approx(size / workers, rel=0.15)
        assert rank["state"] == 2 * rank["parameters"]
    for shard in SHARDS:
        assert sum(rank["state"] for rank in held[shard]) == whole_state


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────


def _state(run: Run) -> dict[str, Any]:
    newest = max(run.path.glob("checkpoints/step-*"))
    state: dict[str, Any] = torch.load(newest / "state.ckpt", weights_only=True)
    return state


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs: Any = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {path: value}
    return {k: v for name, inner in pairs for k, v in _leaves(inner, f"{path}/{name}").items()}


def test_one_format(make_job: JobFactory) -> None:
    train = {"epochs": 1}
    runs = [
        train_on_ranks(make_job(name=shard, comm={"shard": shard}, train=train, graph=SMALL))
        for shard in ("none", *SHARDS)
    ]
    states = [
        # the order of gradients is DDP's, and there is none with full
        {name: leaf for name, leaf in _leaves(_state(run)).items() if "/order/" not in name}
        for run in runs
    ]
    for other in states[1:]:
        assert set(other) == set(states[0])
        for name, value in states[0].items():
            if isinstance(value, torch.Tensor):
                assert type(other[name]) is torch.Tensor, name
                assert other[name].dtype == value.dtype
                assert torch.allclose(other[name], value, atol=1e-5), name
            elif not isinstance(value, float):
                assert other[name] == value, name


# an epoch has 4 steps
@pytest.mark.parametrize(
    ("shard", "stop", "norm"),
    [("optimizer", 4, "layer"), ("full", 3, "batch"), ("full", 4, "none")],
)
def test_it_goes_on_where_it_stopped(
    shard: str, stop: int, norm: str, make_job: JobFactory
) -> None:
    options: dict[str, Any] = {
        "comm": {"shard": shard},
        "graph": SMALL,
        "sampling": {"batch_size": 20},
        "train": {"epochs": 2, "lr": 0.05},
        "model": {"dropout": 0.5, "norm": norm},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole_run = train_on_ranks(make_job(name="whole", **options))
    part = stopped(whole_run, make_job(name="part", **options), stop)
    resumed = train_on_ranks(part, resume=True)
    for column in ("train/loss", "val/accuracy", "val/loss"):
        new, old = (r.metrics.set_index("step")[column].dropna() for r in (resumed, whole_run))
        assert new.to_dict() == old.to_dict(), column  # to the bit
    assert resumed.summary["metrics"] == whole_run.summary["metrics"]
    weights = selected(whole_run)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in selected(resumed).items())


def test_it_goes_on_sharded_otherwise(make_job: JobFactory) -> None:
    """With another number of workers, too; and again when nothing is left to do."""
    options: dict[str, Any] = {
        "graph": SMALL,
        "sampling": {"fanout": [-1, -1], "batch_size": 60},
        "train": {"epochs": 4, "lr": 0.03},
        "fault": {"checkpoint_every": 1, "keep": 20},
        "partition": {"parts": 3},
    }
    stops = ((1, "none", 2), (2, "full", 5), (3, "optimizer", 12), (2, "full", 12))
    for number, (workers, shard, stop) in enumerate(stops):
        config = make_job(
            name="part",
            **{**options, "train": {**options["train"], "max_steps": stop}},
            cluster={"workers": workers},
            comm={"shard": shard},
        )
        part = train_on_ranks(config, resume=number > 0)
    whole_run = train_on_ranks(make_job(name="whole", **options, cluster={"workers": 1}))
    new, old = (run.metrics.set_index("step") for run in (part, whole_run))
    assert part.summary["steps"] == 12
    for column in ("train/loss", "val/loss"):
        assert np.allclose(new[column].dropna(), old[column].dropna(), atol=1e-4), column


def _round_trips(exchange: Exchange, seed: int) -> bool:
    """Whole state → shards of ranks → whole state, of random models."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    choose = random.Random(seed)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for _ in range(20):
        torch.manual_seed(choose.randrange(1000))
        shapes = [[choose.randint(1, 5) for _ in range(choose.randint(1, 3))] for _ in range(3)]
        momentum = partial(torch.optim.SGD, momentum=0.9)
        kind = choose.choice([torch.optim.Adam, torch.optim.Adagrad, momentum])
        made = []
        for _ in range(2):  # the first one's state, into the second
            model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
            made.append((model, kind(model.parameters(), lr=0.1)))
        (source, plain), (target, _) = made
        sum((p**2).sum() for p in source).backward()
        plain.step()
        fully_shard(target, mesh=mesh)
        sharded = kind(target.parameters(), lr=0.1)
        state = plain.state_dict()
        sharded.load_state_dict(sharding._sharded(state, sharded))
        back = sharded.state_dict()
        for number, values in state["state"].items():
            for key, value in values.items():
                there = back["state"][number][key]
                if value.dim():
                    assert is_sharded(there)
                assert torch.equal(whole(there), value)
    return True


def test_states_are_shared_out_and_gathered() -> None:
    assert run_ranks(3, _round_trips, 0) == [True] * 3


# ── what is watched ──────────────────────────────────────────────────────────────────────────


def _poisoned(exchange: Exchange, job: Job) -> dict[str, Any]:
    """An overflow in rank 1's share of the gradients, of the third step."""
    step = Guard.on_before_optimizer_step

    def poison(self: Guard, trainer: Any, module: Any, optimizer: Any) -> None:
        if exchange.world.rank == 1 and trainer.global_step == 2 and not self.skipped_steps:
            shard = next(p.grad.to_local() for p in module.parameters() if p.grad is not None)
            shard.fill_(float("inf"))
        step(self, trainer, module, optimizer)

    Guard.on_before_optimizer_step = poison  # type: ignore[method-assign]
    return _train(exchange, job)


def test_a_step_is_left_out_by_all_ranks(make_job: JobFactory) -> None:
    config = make_job(comm={"shard": "full"}, train={"epochs": 1})
    said = run_ranks(2, _poisoned, job_of(config), fresh=True)
    assert [rank["skipped"]["steps"] for rank in said] == [1, 1]
    assert said[0]["metrics"] == said[1]["metrics"]
    assert np.isfinite(said[0]["metrics"]["test/loss"])


def _exchanged(exchange: Exchange, job: Job) -> list[bool]:
    """After each batch, whether the ranks have their shares of the gradients."""
    found: list[bool] = []
    after = Guard.on_after_backward

    def look(self: Guard, trainer: Any, module: Any) -> None:
        found.append(all(p.grad is not None for p in module.parameters()))
        after(self, trainer, module)

    Guard.on_after_backward = look  # type: ignore[method-assign]
    _train(exchange, job)
    return found


def test_gradients_are_exchanged_once_a_step(make_job: JobFactory) -> None:
    config = make_job(comm={"shard": "full"}, train={"accumulate": 3, "epochs": 1})
    for found in run_ranks(2, _exchanged, job_of(config), fresh=True):
        assert found == [False, False, True, True]  # of an epoch's 4 batches


@pytest.mark.dgl
@pytest.mark.parametrize("rank", [1, -1])
def test_a_parameter_without_a_gradient(rank: int, make_job: JobFactory) -> None:
    """It would make one rank's exchange shorter than the others'."""
    model = {"kind": "tests.own_models:Branching", "args": {"rank": rank}}
    config = make_job(model=model, comm={"shard": "full", "timeout": 20})
    with pytest.raises(RuntimeError) as caught:
        train_on_ranks(config)
    assert "no gradient for module.extra.bias, module.extra.weight on rank" in str(caught.value)


# ── what cannot be sharded ───────────────────────────────────────────────────────────────────


def test_a_scalar_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(TrainingError, match="scale") as caught:
        check_shardable(model, "full")
    assert "torch.zeros(1)" in str(caught.value)


@pytest.mark.parametrize("shard", SHARDS)
def test_several_types_are_named(shard: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(TrainingError, match=r"1\.bias \(torch\.bfloat16\), 0\.bias") as caught:
        check_shardable(model, shard)
    assert f"comm.shard: {shard}" in str(caught.value)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="cannot be copied") as caught:
        Twin(model)
    assert caught.value.where == "model.kind"


def test_a_twin_without_shards_is_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    twin = Twin(model)
    with torch.no_grad():
        model[0].weight.add_(1)
        model[1].running_mean.add_(1)
    x = torch.randn(4, 3)
    copy = twin.unsharded(model)
    assert torch.equal(copy(x), model(x))
    assert not copy.training
    assert copy[1].running_mean is not model[1].running_mean
