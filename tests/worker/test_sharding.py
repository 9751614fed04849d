"""Sharded data parallelism trains the same model, on real ranks, and keeps less on each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from raygnn.checkpoint.lifecycle import Checkpoints
from raygnn.errors import TrainingError
from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange
from raygnn.worker.comm import reduction
from raygnn.worker.comm.reduction import check_shardable
from raygnn.worker.job import Job
from tests.driver.test_resume import stopped
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, _train, job_of, losses, selected, train_on_ranks

pytestmark = pytest.mark.long

# ── the same training ────────────────────────────────────────────────────────────────────────


SMALL: dict[str, Any] = {"nodes": 800, "degree": 6}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gcn": (2, {"model": {"kind": "gcn"}}),
    "gat": (3, {"model": {"kind": "gat"}, "train": {"clip": 0.1, "accumulate": 3}}),
    "gin": (2, {"model": {"kind": "gin", "norm": "batch"}, "train": {"accumulate": 2}}),
    "own": (2, {"model": {"kind": "tests.support.own_models:DglSage"}}),
    "sage": (3, {"graph": {"typed": True}, "train": {"optimizer": "sgd", "momentum": 0.9}}),
    "mixed": (2, {"precision": "bf16-mixed", "train": {"clip": 0.1, "optimizer": "adamw"}}),
    "alone": (1, {}),
}
MARKS = {"gcn": pytest.mark.slow, "mixed": pytest.mark.slow, "own": pytest.mark.dgl}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES])
def test_the_same_losses(case: str, make_job: JobFactory) -> None:
    """Losses are equal for plain SGD, which shows a gradient's scale, and for running
    statistics."""
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
        for shard in ("none", "optimizer")
    }
    assert np.allclose(losses(runs["none"]), losses(runs["optimizer"]), atol=2e-6)
    for name, value in runs["none"].summary["metrics"].items():
        other = runs["optimizer"].summary["metrics"][name]
        assert other == pytest.approx(value, abs=1e-5 if "loss" in name else 5e-3), name


@pytest.mark.slow
def test_the_same_in_bf16(make_job: JobFactory) -> None:
    """Parameters and gradients in bf16 are rounded differently; ranks compare collectives."""
    options: dict[str, Any] = {"precision": "bf16", "guard": {"mode": "deep"}, "graph": SMALL}
    runs = [
        train_on_ranks(make_job(name=shard, comm={"shard": shard}, **options))
        for shard in ("none", "optimizer")
    ]
    assert np.allclose(losses(runs[0]), losses(runs[1]), atol=0.01)


# ── what each rank holds ─────────────────────────────────────────────────────────────────────


def _held(exchange: Exchange, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    end = Checkpoints.on_train_batch_end

    def look(self: Checkpoints, trainer: Any, module: Any, *rest: Any) -> None:
        optimizer = trainer.optimizers[0]
        state = getattr(optimizer, "optim", optimizer).state  # for ZeRO, the rank's optimizer
        parts = [t for held in state.values() for t in held.values() if t.dim()]
        found.update(
            state=sum(part.nbytes for part in parts),
            parameters=sum(p.nbytes for p in module.parameters()),
            optimizer=type(optimizer).__name__,
        )
        end(self, trainer, module, *rest)

    Checkpoints.on_train_batch_end = look  # type: ignore[method-assign]
    found["metrics"] = _train(exchange, job)["metrics"]
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_what_each_rank_holds(workers: int, make_job: JobFactory) -> None:
    held: dict[str, list[dict[str, Any]]] = {}
    for shard in ("none", "optimizer"):
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
    assert sum(rank["state"] for rank in held["optimizer"]) == whole_state


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
        for shard in ("none", "optimizer")
    ]
    states = [_leaves(_state(run)) for run in runs]
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
@pytest.mark.parametrize(("stop", "norm"), [(3, "batch"), (4, "layer")])
def test_a_stopped_run_resumes_with_sharding(stop: int, norm: str, make_job: JobFactory) -> None:
    options: dict[str, Any] = {
        "comm": {"shard": "optimizer"},
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


def _loads(exchange: Exchange) -> int:
    """Return how often counts are moved when rank 0 loads the state of a sharded Adam."""
    model, moved = nn.Linear(2, 2), list[Any]()
    config: Any = SimpleNamespace(comm=SimpleNamespace(shard="optimizer"))
    ranks: Any = SimpleNamespace(config=config, world=exchange.world, compared=False)
    task: Any = SimpleNamespace(model=model)
    reduction.shard_optimizer(ranks, task)
    with patch.object(reduction, "_counts_to_devices", moved.append):
        optimizer = task.construct(torch.optim.Adam, list(model.parameters()), {"fused": True})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if exchange.world.rank == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    return len(moved)


def test_counts_of_steps_go_to_the_parameters_device() -> None:
    """A fused Adam of a GPU would refuse those that torch puts on the CPU."""
    assert run_ranks(2, _loads) == [1, 0]
    states = {nn.Parameter(torch.empty(1, device="meta")): {"step": torch.tensor(3.0)}}
    reduction._counts_to_devices(SimpleNamespace(optim=SimpleNamespace(state=states)))
    assert [state["step"].device.type for state in states.values()] == ["meta"]


def test_a_resume_with_other_sharding(make_job: JobFactory) -> None:
    """The number of workers changes, too; the last resume has no step left."""
    options: dict[str, Any] = {
        "graph": SMALL,
        "sampling": {"fanout": [-1, -1], "batch_size": 60},
        "train": {"epochs": 4, "lr": 0.03},
        "fault": {"checkpoint_every": 1, "keep": 20},
        "partition": {"parts": 3},
    }
    stops = ((1, "none", 2), (2, "optimizer", 5), (3, "optimizer", 12), (2, "none", 12))
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


def test_several_types_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(TrainingError, match=r"1\.bias \(torch\.bfloat16\), 0\.bias") as caught:
        check_shardable(model)
    assert "comm.shard: optimizer" in str(caught.value)
