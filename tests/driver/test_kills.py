"""A rank that is killed, at any moment, costs time and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import raygnn
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.runs.run import Run
from tests.support.small_jobs import JobFactory, job, train_on_ranks

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("shared_ray")]

MODEL = "tests.support.doomed:Doomed"
STEPS = 12  # 3 epochs of 4
# where → how many such moments there are, about, in a run
MOMENTS = {"train": STEPS, "evaluate": 5, "write": 300, "sync": 30, "rename": 6, "time": 800}


def doomed(make_job: JobFactory, tmp_path: Path, moment: str, n: int, rank: int) -> Config:
    args = {"moment": moment, "n": n, "rank": rank, "flag": str(tmp_path / "died")}
    return make_job(
        model={"kind": MODEL, "args": args},
        train={"epochs": 3, "lr": 0.05},
        fault={"max_failures": 1, "checkpoint_every": 2},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a run without failures, on forked ranks instead of Ray's."""
    path = tmp_path_factory.mktemp("undisturbed")
    config = doomed(lambda **sections: load_config(job(path, **sections)), path, "never", 0, 0)
    return facts(train_on_ranks(config))


def facts(run: Run) -> dict[str, Any]:
    """Return losses and metrics by step, the weights, and the final measurements."""
    columns = ("train/loss", "val/accuracy", "val/loss", "test/accuracy")
    by_step = {c: run.metrics.set_index("step")[c].dropna().to_dict() for c in columns}
    weights = torch.load(run.path / "checkpoints" / "selected.pt")
    told = {key: run.summary[key] for key in ("metrics", "steps", "epochs", "best_epoch")}
    return {**by_step, **told, "weights": {name: w.tolist() for name, w in weights.items()}}


def draw(number: int) -> tuple[str, int, int]:
    """Choose the moment of a test: each kind occurs a few times, at a random step."""
    chance = random.Random(number)
    moment = list(MOMENTS)[number % len(MOMENTS)]
    n = chance.randint(1, MOMENTS[moment])
    return moment, n, 0 if moment in ("write", "sync", "rename") else chance.randint(0, 1)


@pytest.mark.parametrize(
    "number", [n if n == 2 else pytest.param(n, marks=pytest.mark.slow) for n in range(20)]
)
def test_killed(
    number: int, make_job: JobFactory, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Every loss, metric and weight is bitwise identical to those of a run without failures."""
    moment, n, rank = draw(number)
    run = raygnn.train(doomed(make_job, tmp_path, moment, n, rank), display=False)
    print(f"rank {rank} killed, {moment} {n}: {run.summary['starts']} starts")
    assert (tmp_path / "died").exists()
    assert run.summary["starts"] == 2
    assert facts(run) == undisturbed
