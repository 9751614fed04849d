"""A rank that is killed, at any moment, costs time and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import raygnn
from raygnn.runs.run import Run
from tests.training.conftest import JobFactory

pytestmark = pytest.mark.usefixtures("shared_ray")

MODEL = "tests.training.doomed:Doomed"
STEPS = 12  # 3 epochs of 4
# where → how many such moments there are, about, in a run
MOMENTS = {"train": STEPS, "evaluate": 5, "write": 300, "sync": 30, "rename": 6, "time": 800}


def train(make_job: JobFactory, tmp_path: Path, name: str, moment: str, n: int, rank: int) -> Run:
    args = {"moment": moment, "n": n, "rank": rank, "flag": str(tmp_path / f"{name}.died")}
    config = make_job(
        name=name,
        model={"kind": MODEL, "args": args},
        train={"epochs": 3, "lr": 0.05},
        fault={"max_failures": 1, "checkpoint_every": 2},
    )
    return raygnn.train(config, display=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run says that nobody disturbs."""
    from raygnn.config.load import load_config
    from tests.training.conftest import job

    path = tmp_path_factory.mktemp("undisturbed")
    run = train(lambda **s: load_config(job(path, **s)), path, "whole", "never", 0, 0)
    return facts(run)


def facts(run: Run) -> dict[str, Any]:
    """Losses and metrics by step, the weights, and what was measured at the end."""
    columns = ("train/loss", "val/accuracy", "val/loss", "test/accuracy")
    by_step = {c: run.metrics.set_index("step")[c].dropna().to_dict() for c in columns}
    weights = torch.load(run.path / "checkpoints" / "selected.pt")
    told = {key: run.summary[key] for key in ("metrics", "steps", "epochs", "best_epoch")}
    return {**by_step, **told, "weights": {name: w.tolist() for name, w in weights.items()}}


def draw(number: int) -> tuple[str, int, int]:
    """The moment of a test: each kind a few times, at a random place."""
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
    """To the bit: every loss, every metric, every weight."""
    moment, n, rank = draw(number)
    name = f"{moment}-{n}-{rank}"
    run = train(make_job, tmp_path, name, moment, n, rank)
    died = (tmp_path / f"{name}.died").exists()
    print(f"{name}: {'killed' if died else 'over before'}, {run.summary['starts']} starts")
    assert died
    assert run.summary["starts"] == 2
    assert facts(run) == undisturbed
