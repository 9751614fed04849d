"""The time of a step: its parts sum to it, and what is slow is in its own row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch

from raygnn.runs.metrics_files import LOADER, STEP, read_metrics
from raygnn.runs.run import Run
from raygnn.sampling.sampler import NeighborSampler
from raygnn.tasks.clock import LastGradient, StepClock
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm import reduction
from raygnn.worker.comm.guard import Guard
from tests.support.small_jobs import JobFactory, train_on_ranks

SLEEP = 0.3

Plant = Callable[[pytest.MonkeyPatch], None]


def rows(run: Run) -> pd.DataFrame:
    """Return seconds of each part of a batch by rank, the median over windows."""
    records = read_metrics(run.path / "ranks.jsonl")[1:]  # the first has a start in it
    tables = [pd.DataFrame(record["seconds"]) for record in records]
    return pd.concat(tables).groupby(level=0).median()


def sleep_before(owner: Any, name: str, rank: int | None = None) -> Plant:
    method = getattr(owner, name)

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank is None or self.global_rank == rank:
            time.sleep(SLEEP)
        return method(self, *args, **kwargs)

    return lambda patch: patch.setattr(owner, name, slow)


def slow_link(patch: pytest.MonkeyPatch) -> None:
    """Delay the end of a reduction, as a network would."""
    total = reduction.Reduction._sum

    def late(self: Any, values: Any) -> Any:
        done = total(self, values)
        time.sleep(SLEEP)
        return done

    patch.setattr(reduction.Reduction, "_sum", late)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (sleep_before(NeighborSampler, "sample_open"), {"sample": (0, 1), "wait": (0, 1)}),
        (sleep_before(TaskModule, "outputs", 1), {"forward": (1,), "peers": (0,)}),
        (slow_link, {"communicate": (0, 1)}),
        (sleep_before(Guard, "on_before_optimizer_step"), {"optimizer": (0, 1)}),
    ],
    ids=["sampling", "forward of one rank", "link", "optimizer"],
)
def test_a_sleep_is_in_its_row(
    plant: Plant,
    expected: dict[str, tuple[int, ...]],
    make_job: JobFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    run = train_on_ranks(make_job(train={"epochs": 1}, comm={"overlap": False}))
    table = rows(run)
    slow = {name: tuple(at) for name in table if len(at := table.index[table[name] > SLEEP / 2])}
    assert slow == expected, table
    assert set(table) == {*STEP, *LOADER}


@pytest.mark.alone
@pytest.mark.parametrize(("prefetch", "accumulate"), [(2, 1), (0, 2)])
def test_the_parts_sum_to_the_wall_time(
    prefetch: int, accumulate: int, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall time comes from the records' own times."""
    sleep_before(TaskModule, "outputs")(monkeypatch)
    config = make_job(
        graph={"val": 0.0},
        sampling={"prefetch": prefetch, "batch_size": 8},
        train={"epochs": 1, "log_every": 2, "accumulate": accumulate, "max_steps": 6},
    )
    run = train_on_ranks(config)
    records = run.metrics.dropna(subset="train/loss")
    parts = sum(records[f"seconds/{name}"] for name in STEP)
    batches = records["step"].diff() * accumulate
    wall = records["time"].diff()
    assert (batches * parts).iloc[1:].sum() == pytest.approx(wall.iloc[1:].sum(), rel=0.05)
    assert run.summary["train_loss"] == pytest.approx(run.metrics["train/loss"].dropna().iloc[-1])
    seeds = run.summary["seeds_per_second"]
    assert seeds == pytest.approx(run.metrics["seeds_per_second"].dropna().median(), rel=0.5)


class _Event:
    """Stand-in for a CUDA event: time advances when the stream reaches it."""

    now = 0.0
    waited = 0

    def record(self, stream: str) -> None:
        assert stream == "of training", "that of a thread of the backward pass"
        self.at = _Event.now

    def synchronize(self) -> None:
        _Event.waited += 1

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


def test_laps_along_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "of training")
    clock = StepClock(torch.device("cuda"))
    for _ in range(500):
        for part, seconds in (("forward", 0.25), ("communicate", 0.5), (None, 9.0)):
            _Event.now += seconds
            clock.lap(part)
        clock.batches += 1
    assert _Event.waited < 4  # the host does not wait for each
    seconds, reductions = clock.read()
    assert seconds == {"forward": 125.0, "communicate": 250.0}
    assert reductions == [(batch, 0.5) for batch in range(500)]
    assert clock.read() == ({}, [])


def test_the_last_gradient() -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    model, told = torch.nn.Sequential(first, second), []
    last = LastGradient(lambda: told.append(first.weight.grad is not None))
    last.watch(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        last.learn()
    assert told == [True, True]  # the first pass teaches
    last.forget()
    model(torch.ones(2, 3)).sum().backward()
    assert len(told) == 2
