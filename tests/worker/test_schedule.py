"""The learning rate of each step: as torch's own schedulers have it, and in a run."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from raygnn.checkpoint.lifecycle import Checkpoints
from raygnn.config.schema import Config, ScheduleConfig, TrainConfig
from raygnn.runs.run import Run
from raygnn.tasks.optimizer import make_optimizer, with_schedules
from raygnn.worker.rank_setup import total_steps
from tests.driver.test_resume import cut
from tests.support.small_jobs import JobFactory, selected, train_on_ranks

STEPS = 50


def optimizer(**train: Any) -> torch.optim.Optimizer:
    config = TrainConfig(lr=0.5, **train)
    return make_optimizer({"w": torch.nn.Parameter(torch.zeros(2))}, config, 1.0, False)


def followed(found: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Return the rate of each step."""
    seen = []
    for _ in range(steps):
        seen.append(float(found.param_groups[0]["lr"]))
        found.step()
        scheduler.step()
    return seen


def own(schedule: dict[str, Any], planned: float = 1.0, **train: Any) -> list[float]:
    config = TrainConfig(lr=0.5, schedule=ScheduleConfig(**schedule), **train)
    found = make_optimizer({"w": torch.nn.Parameter(torch.zeros(2))}, config, planned, False)
    ([found], [told]) = with_schedules(found, config, planned, STEPS)
    return followed(found, told["scheduler"], STEPS)


def warm(found: torch.optim.Optimizer, after: Any, steps: int = 10) -> Any:
    ramp = lr_scheduler.LinearLR(found, start_factor=1 / (steps + 1), total_iters=steps)
    return lr_scheduler.SequentialLR(found, [ramp, after], [steps])


SGD = {"optimizer": "sgd"}
ORACLES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "warm-up": (
        {"warmup": 0.2},
        {},
        lambda o: lr_scheduler.LinearLR(o, start_factor=1 / 11, total_iters=10),
    ),
    "cosine": (
        {"kind": "cosine", "floor": 0.1},
        {},
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.05),
    ),
    "cosine after a warm-up": (
        {"kind": "cosine", "warmup": 10},
        {},
        lambda o: warm(o, lr_scheduler.CosineAnnealingLR(o, STEPS - 10)),
    ),
    "step": (
        {"kind": "step", "every": 7, "gamma": 0.3},
        {},
        lambda o: lr_scheduler.StepLR(o, 7, 0.3),
    ),
    "step after a warm-up": (
        {"kind": "step", "every": 0.2, "warmup": 10},
        {},
        lambda o: warm(o, lr_scheduler.StepLR(o, 10, 0.1)),
    ),
    "one_cycle": (
        {"kind": "one_cycle"},
        SGD,
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, STEPS, pct_start=0.3, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_rates_are_those_of_torch(name: str) -> None:
    schedule, train, make = ORACLES[name]
    seen = own(schedule, **train)
    found = optimizer(**train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = followed(found, make(found), STEPS)
    for number, (rate, wanted) in enumerate(zip(seen, expected, strict=True)):
        assert rate == pytest.approx(wanted, rel=1e-6, abs=1e-9), number


def test_a_scaled_rate_is_reached_from_that_of_one_worker() -> None:
    seen = own({"warmup": 10}, planned=4.0, lr_scaling="linear")
    assert seen[:11] == pytest.approx([0.5 + 0.15 * step for step in range(11)])
    assert set(seen[10:]) == {2.0}
    alone = own({"warmup": 10}, planned=1.0, lr_scaling="sqrt")
    assert set(alone) == {0.5}
    assert own({"warmup": 10}, planned=4.0)[0] == pytest.approx(0.5 / 11)


def goes_on(config: Config, *stops: int) -> Run:
    """Train, and resume from each of these steps as if killed there; losses, rates, metrics and
    weights are bitwise identical."""

    def facts(run: Run) -> dict[str, Any]:
        table = run.metrics.drop_duplicates("step", keep="last").set_index("step")
        columns = ("train/loss", "train/lr", "val/loss")
        values = {c: run.metrics.set_index("step")[c].dropna().to_dict() for c in columns}
        assert len(values["train/loss"]) == len(table)
        return {**values, "metrics": run.summary["metrics"]}

    whole = train_on_ranks(config)
    known, tensors = facts(whole), selected(whole)
    for stop in stops:
        cut(config.run_dir, stop)
        resumed = train_on_ranks(config, resume=True)
        assert facts(resumed) == known
        assert all(torch.equal(t, tensors[name]) for name, t in selected(resumed).items())
    return whole


def in_run(run: Run) -> dict[int, float]:
    return run.metrics.set_index("step")["train/lr"].dropna().to_dict()


def test_a_run_has_the_rates_and_goes_on_with_them(make_job: JobFactory) -> None:
    """Each optimizer step has one rate, accumulated batches included, and it is exact after a
    resume."""
    options: dict[str, Any] = {
        "train": {
            "epochs": 7,
            "accumulate": 2,
            "max_steps": 12,
            "lr": 0.5,
            "schedule": {"kind": "one_cycle"},
        },
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = goes_on(make_job(**options), 5)
    config = TrainConfig(lr=0.5, schedule=ScheduleConfig(kind="one_cycle"))
    found = make_optimizer({"w": torch.nn.Parameter(torch.zeros(2))}, config, 1.0, False)
    _, [told] = with_schedules(found, config, 1.0, 12)
    expected = followed(found, told["scheduler"], 12)
    assert in_run(whole) == dict(zip(range(1, 13), expected))  # of the step, not of the next


def test_a_longer_run_has_the_longer_schedule(make_job: JobFactory) -> None:
    def config(steps: int) -> Config:
        train = {"epochs": 9, "max_steps": steps, "lr": 1.0, "schedule": {"kind": "cosine"}}
        return make_job(train={**train, "optimizer": "sgd"}, fault={"checkpoint_every": 1})

    train_on_ranks(config(4))
    seen = in_run(train_on_ranks(config(8), resume=True))
    assert [seen[5], seen[7]] == pytest.approx([0.5, (1 + math.cos(0.75 * math.pi)) / 2])


def test_plateau_follows_the_validation(make_job: JobFactory) -> None:
    """All ranks agree, also after a resume within an epoch of 4 steps, and at its end."""
    schedule = {"kind": "plateau", "patience": 0, "gamma": 0.5, "warmup": 2}
    options: dict[str, Any] = {
        "train": {"epochs": 4, "lr": 0.1, "min_delta": 2.0, "schedule": {**schedule, "floor": 0.4}},
        "fault": {"checkpoint_every": 1, "keep": 40},
    }
    seen = in_run(goes_on(make_job(**options), 12, 10))
    # nothing beats the first evaluation by 2
    assert list(seen.values()) == pytest.approx(
        [0.1 / 3, 0.2 / 3, *[0.1] * 6, *[0.05] * 4, *[0.04] * 4]
    )


def test_the_threshold_of_a_plateau_is_a_difference() -> None:
    """An accuracy of 0.58 exceeds 0.5 by 0.08, less than a threshold of 0.1, though by 16 %."""
    plateau = ScheduleConfig(kind="plateau", patience=0, gamma=0.5)
    config = TrainConfig(lr=0.5, min_delta=0.1, schedule=plateau)
    found = make_optimizer({"w": torch.nn.Parameter(torch.zeros(2))}, config, 1.0, False)
    ([found], [told]) = with_schedules(found, config, 1.0, STEPS)
    seen = []
    for metric in (0.5, 0.58, 0.69):
        told["scheduler"].step(metric)
        seen.append(found.param_groups[0]["lr"])
    assert seen == [0.5, 0.25, 0.25]


def test_plateau_needs_a_validation(make_job: JobFactory) -> None:
    config = make_job(
        graph={"val": 0.0}, train={"schedule": {"kind": "plateau"}}, cluster={"workers": 1}
    )
    with pytest.raises(RuntimeError, match="the validation split is empty"):
        train_on_ranks(config)


def test_steps_that_are_left_out_count(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raygnn.tasks.lightning_modules import TaskModule

    step = TaskModule.training_step

    def overflowing(self: TaskModule, batch: Any, number: int) -> Any:
        loss = step(self, batch, number)
        return loss * float("inf") if batch.step == 1 else loss

    monkeypatch.setattr(TaskModule, "training_step", overflowing)
    train = {"epochs": 1, "lr": 1.0, "optimizer": "sgd", "schedule": {"warmup": 3}}
    run = train_on_ranks(make_job(train=train))
    assert run.summary["skipped"]["steps"] == 1
    assert list(in_run(run).values()) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_less_than_min_delta_is_no_improvement(make_job: JobFactory) -> None:
    train = {"epochs": 12, "lr": 0.01, "patience": 2, "min_delta": 2.0}
    run = train_on_ranks(make_job(train=train))
    assert run.summary["epochs"] == 3
    scores = run.metrics["val/accuracy"].dropna().to_list()
    assert run.summary["best_epoch"] == scores.index(max(scores)) > 0  # all the same


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_no_step_sees_more_than_clip(
    name: str, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gradient is the optimizer's, also for the fused one, on both ranks."""
    begin = Checkpoints.on_train_batch_end

    def note(self: Checkpoints, trainer: Any, *rest: Any) -> None:
        found = trainer.optimizers[0]
        gradients = [p.grad for group in found.param_groups for p in group["params"]]
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        fused = bool(found.defaults.get("fused"))
        with open(tmp_path / f"norms-{trainer.global_rank}", "a") as file:
            file.write(json.dumps([norm, fused]) + "\n")
        begin(self, trainer, *rest)

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", note)
    seen = {}
    for clip in (None, 0.05):
        train = {"epochs": 1, "clip": clip, "optimizer": name}
        train_on_ranks(make_job(name=f"clip-{clip}", train=train))
        lines = [(tmp_path / f"norms-{rank}").read_text().splitlines() for rank in (0, 1)]
        assert lines[0] == lines[1]
        seen[clip] = [json.loads(line) for line in lines[0]]
        for rank in (0, 1):
            (tmp_path / f"norms-{rank}").unlink()
    assert all(fused is (name == "adam") for _, fused in seen[0.05])
    assert min(norm for norm, _ in seen[None]) > 0.06
    assert [norm for norm, _ in seen[0.05]] == pytest.approx([0.05] * 4, rel=1e-4)


def test_the_length_is_that_of_the_run(make_job: JobFactory, monkeypatch: Any) -> None:
    """A warm-up given as a fraction is one of the run's steps, whichever limit ends it."""
    for train, steps in (({"epochs": 3}, 12), ({"epochs": 9, "max_steps": 5}, 5)):
        config = make_job(train=train)
        assert total_steps(config, 4) == steps
