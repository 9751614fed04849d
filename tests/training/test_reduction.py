"""What reduces the gradients is what the configuration says, on gloo, too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raygnn.sampling.exchange import Exchange
from raygnn.training import reduction
from raygnn.training.job import Job
from tests.ranks import run_ranks
from tests.training.conftest import JobFactory, _data, _train, train_on_ranks


def losses(run: Any) -> np.ndarray:
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return np.array([r["train/loss"] for r in records if "train/loss" in r])


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_train_nearly_the_same(compression: str, make_job: JobFactory) -> None:
    plain, short = (
        losses(train_on_ranks(make_job(name=kind, comm={"compression": kind})))
        for kind in ("none", compression)
    )
    assert np.allclose(plain, short, atol=0.02)
    assert not np.array_equal(plain, short)  # rounded, so they were compressed


def _with_a_wrong_hook(exchange: Exchange, job: Job) -> str:
    """Rank 1 compresses to another type than rank 0, unknown to whoever compares options."""
    if exchange.world.rank:
        reduction._COMPRESSED["bf16"] = reduction._COMPRESSED["fp16"]
    try:
        _train(exchange, job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("mode", ["on", "deep"])
def test_deep_compares_the_reductions_themselves(mode: str, make_job: JobFactory) -> None:
    """Without it, gloo adds bf16 to fp16 and says nothing."""
    config = make_job(
        guard=mode, comm={"compression": "bf16", "timeout": 20}, train={"max_steps": 2}
    )
    place, ntype = _data(config, 2)
    for name in ("logs", "checkpoints"):
        (config.run_dir / name).mkdir(parents=True)
    said = run_ranks(
        2, _with_a_wrong_hook, Job(config, place, config.run_dir, ntype, True, 0.0, 128)
    )
    if mode == "on":
        assert said == ["trained", "trained"]
    else:
        assert all("Detected mismatch between collectives" in text for text in said), said


def _hooked(exchange: Exchange, job: Job) -> list[str]:
    found: list[str] = []
    register = torch.nn.parallel.DistributedDataParallel.register_comm_hook

    def note(self: Any, state: Any, hook: Any) -> None:
        found.append(f"{hook.__name__} {'another group' if state is not None else 'default group'}")
        assert state is None or state is not dist.group.WORLD
        register(self, state, hook)

    torch.nn.parallel.DistributedDataParallel.register_comm_hook = note  # type: ignore[method-assign]
    _train(exchange, job)
    return found


@pytest.mark.parametrize(
    ("comm", "guard", "expected"),
    [
        ({}, "on", []),
        ({"compression": "fp16"}, "on", ["fp16_compress_hook default group"]),
        ({"compression": "bf16"}, "deep", ["bf16_hook another group"]),
        ({"debug": True}, "off", ["allreduce_hook another group"]),
    ],
)
def test_the_hook_that_ddp_gets(
    comm: dict[str, Any], guard: str, expected: list[str], make_job: JobFactory
) -> None:
    config = make_job(comm=comm, guard=guard, train={"max_steps": 1})
    place, ntype = _data(config, 2)
    for name in ("logs", "checkpoints"):
        (config.run_dir / name).mkdir(parents=True)
    said = run_ranks(2, _hooked, Job(config, place, config.run_dir, ntype, True, 0.0, 128))
    assert said == [expected, expected]
