"""``train.ema``: what the average is, that it is what is tested, and that it goes on exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raygnn.worker.callbacks import Averaging
from tests.support.small_jobs import JobFactory, selected, train_on_ranks
from tests.worker.test_schedule import goes_on

pytestmark = pytest.mark.long


class _Trainer:
    """A trainer at some step."""

    def __init__(self) -> None:
        self.global_step = 0


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def moved(averaging: Averaging, module: pl.LightningModule, steps: int) -> Any:
    """Change the module ``steps`` times; return its AveragedModel."""
    trainer: Any = _Trainer()
    torch_own = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaging.on_train_start(trainer, module)
    for step in range(steps):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        module.model(torch.randn(16, 4).to(next(module.parameters()).dtype))
        averaging.on_train_batch_end(trainer, module)  # within a window: nothing happens
        trainer.global_step = step + 1
        averaging.on_train_batch_end(trainer, module)
        torch_own.update_parameters(module)
    return torch_own.module


def test_the_average_is_torchs() -> None:
    averaging, module = Averaging(0.9), _Module()
    expected = moved(averaging, module, 5).state_dict()
    before = copy.deepcopy(module.state_dict())
    with averaging.applied(module):
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                assert torch.equal(value, expected[name]), name
            else:
                assert value == 5  # a count is no mean of counts
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_small_changes_are_not_lost_in_bf16() -> None:
    averaging = Averaging(0.999)
    module, trainer = _Module().bfloat16(), _Trainer()
    averaging.on_train_start(trainer, module)  # type: ignore[arg-type]
    for step in range(300):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1.0 if step == 0 else 2.0)
        trainer.global_step += 1
        averaging.on_train_batch_end(trainer, module)  # type: ignore[arg-type]
    averaging.put(module)
    expected = 2 - 0.999**299
    assert float(module.model[0].weight.detach()[0, 0]) == pytest.approx(expected, abs=0.01)  # type: ignore[index]


OPTIONS: dict[str, Any] = {
    "model": {"norm": "batch", "dropout": 0.3},
    "train": {"epochs": 3, "lr": 0.05, "ema": 0.7},
    "fault": {"checkpoint_every": 1, "keep": 20},
}


@pytest.mark.parametrize(("ema", "select"), [(0.7, "last"), (None, "best")])
def test_averaged_weights_resume_bitwise(
    ema: float | None, select: str, make_job: JobFactory
) -> None:
    """Running statistics differ by rank; the run resumes within an epoch of 4 steps and at its
    end."""
    train = {**OPTIONS["train"], "ema": ema, "select": select}
    goes_on(make_job(**{**OPTIONS, "train": train}), 6, 4)


def test_the_average_is_evaluated_selected_and_saved(make_job: JobFactory, tmp_path: Path) -> None:
    """Validation and saved weights are the average's: with a decay near 1, nearly those after the
    first step."""
    train: dict[str, Any] = {"epochs": 3, "lr": 0.05, "select": "last"}
    one = train_on_ranks(make_job(name="one", train={**train, "max_steps": 1}))
    plain = train_on_ranks(make_job(name="plain", train=train))
    slow = train_on_ranks(make_job(name="slow", train={**train, "ema": 0.999999}))
    columns = {r.path.name: r.metrics.set_index("step") for r in (one, plain, slow)}
    losses = [columns[name]["train/loss"].dropna().to_list() for name in ("plain", "slow")]
    assert losses[0] == losses[1]  # what is trained is not the average
    first = columns["one"]["val/loss"].dropna().to_list()[0]
    assert columns["slow"]["val/loss"].dropna().to_list() == pytest.approx([first] * 3, rel=1e-4)
    assert columns["plain"]["val/loss"].dropna().to_list()[-1] < 0.9 * first
    weights = selected(slow)
    for name, value in selected(one).items():
        assert torch.allclose(value, weights[name], atol=1e-4), name
    tested = [r.summary["metrics"]["test/loss"] for r in (one, slow)]
    assert tested[0] == pytest.approx(tested[1], rel=1e-4)


def test_the_best_weights_are_the_best_average(make_job: JobFactory) -> None:
    train = {"epochs": 6, "lr": 0.3, "ema": 0.6, "patience": 5}
    run = train_on_ranks(make_job(train=train))
    scores = run.metrics["val/accuracy"].dropna().to_list()
    assert run.summary["metrics"]["val/accuracy"] == pytest.approx(max(scores), abs=1e-6)
