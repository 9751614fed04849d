"""PowerSGD: what is left out comes back, on all ranks alike, and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raygnn.tasks.task import Task
from raygnn.worker.comm.powersgd import PowerSGD
from tests.small_jobs import JobFactory, train_on_ranks


def alone(values: Tensor) -> Tensor:
    return values


def parameters(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]


def reduce(
    power: PowerSGD,
    named: list[tuple[str, nn.Parameter]],
    *values: Tensor,
    made: bool = True,
) -> list[Tensor]:
    """One step; its state counts if it was made."""
    out = [value.clone() for value in values]
    power.reduce([parameter for _, parameter in named], out, alone)
    power.settle(made)
    return out


def test_a_gradient_of_that_rank_is_exact() -> None:
    named = parameters((40, 30), (30,))
    power = PowerSGD(named, rank=2, start=0, seed=0)
    torch.manual_seed(0)
    matrix, vector = torch.randn(40, 2) @ torch.randn(2, 30), torch.randn(30)
    found = reduce(power, named, matrix, vector)
    assert torch.allclose(found[0], matrix, atol=1e-4)
    assert torch.equal(found[1], vector)
    assert power.bytes == 4 * ((40 + 30) * 2 + 30)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 99))
def test_nothing_is_lost(rank: int, start: int, seed: int) -> None:
    """What came out and what is still left out sum to what went in."""
    named = parameters((24, 20), (5, 6, 9))
    power = PowerSGD(named, rank, start, seed)
    torch.manual_seed(seed)
    given = [torch.zeros(24, 20), torch.zeros(5, 6, 9)]
    came = [torch.zeros(24, 20), torch.zeros(5, 6, 9)]
    for step in range(8):
        values = [torch.randn(24, 20), torch.randn(5, 6, 9)]
        out = reduce(power, named, *values)
        assert step >= start or all(map(torch.equal, out, values))
        for total, value in zip([*given, *came], [*values, *out]):
            total += value
    left = power.state()["left"]
    for (name, _), total, out_total in zip(named, given, came):
        rest = left.get(name, torch.zeros(total.numel())).reshape(total.shape)
        assert torch.allclose(out_total + rest, total, atol=1e-4)


def test_the_order_in_buckets_does_not_matter() -> None:
    named = parameters((24, 20), (20, 30))
    together, apart = (PowerSGD(named, 1, 0, 5) for _ in range(2))
    for step in range(3):
        torch.manual_seed(step)
        values = [torch.randn(24, 20), torch.randn(20, 30)]
        one = reduce(together, named, *values)
        two = [reduce(apart, [named[i]], values[i])[0] for i in (1, 0)][::-1]
        assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("matrix", [torch.zeros(24, 20), torch.ones(24, 20)])
def test_dependent_columns(matrix: Tensor) -> None:
    named = parameters((24, 20))
    (found,) = reduce(PowerSGD(named, 3, 0, 0), named, matrix)
    assert torch.allclose(found, matrix, atol=1e-5)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1.0])
def test_a_step_that_is_left_out_leaves_nothing(odd: float) -> None:
    named = parameters((24, 20))
    power, plain = (PowerSGD(named, 2, 0, 0) for _ in range(2))
    torch.manual_seed(0)
    values = torch.randn(24, 20)
    reduce(power, named, values)
    reduce(plain, named, values)
    bad = values.clone()
    bad[3, 4] = odd
    (found,) = reduce(power, named, bad, made=False)
    # all of it, so that whoever looks leaves the step out
    assert found.isfinite().any() == found.isfinite().all() == (odd == 1.0)
    assert torch.equal(*(reduce(p, named, values)[0] for p in (power, plain)))


def test_half_precision_loses_nothing_either() -> None:
    named = [("p", nn.Parameter(torch.zeros(24, 20, dtype=torch.bfloat16)))]
    power = PowerSGD(named, 1, 0, 0)
    torch.manual_seed(0)
    whole = torch.zeros(24, 20)
    for _ in range(100):
        value = torch.randn(24, 20).bfloat16()
        (out,) = reduce(power, named, value)
        whole += value.float() - out.float()
    left = power.state()["left"]["p"]
    assert left.dtype == torch.float32
    assert (whole - left).norm() < 0.05 * whole.norm()  # the outputs are rounded


def test_gradients_that_are_not_finite_once(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, in one batch: that step is left out, and training goes on."""
    step = Task.training_step

    def odd(self: Task, batch: Any, index: int) -> Tensor:
        loss = step(self, batch, index)
        bad = self.global_rank == 1 and (batch.epoch, batch.step) == (1, 1)
        return loss * float("nan") if bad else loss

    monkeypatch.setattr(Task, "training_step", odd)
    thin = {"compression": "powersgd", "powersgd_rank": 1, "powersgd_start": 1}
    run = train_on_ranks(make_job(comm=thin, model={"hidden": 64}, train={"epochs": 3}))
    assert run.summary["skipped"]["steps"] == 1
    assert run.metrics["train/loss"].dropna().iloc[-1] < 1.0


@pytest.mark.parametrize("stop", [2, 3, 5])  # before it begins, at an epoch's end, within one
def test_a_run_goes_on_to_the_bit(stop: int, make_job: JobFactory) -> None:
    options: dict[str, Any] = {
        "comm": {"compression": "powersgd", "powersgd_rank": 1, "powersgd_start": 3},
        "model": {"hidden": 64},
        "train": {"epochs": 3},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    train_on_ranks(make_job(name="part", **options))
    for path in (whole.path.parent / "part" / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > stop:
            (path / "manifest.json").unlink()
    resumed = train_on_ranks(make_job(name="part", **options), resume=True)
    losses = [
        r.metrics.set_index("step")["train/loss"].dropna().to_dict() for r in (whole, resumed)
    ]
    assert losses[0] == losses[1]
    more = train_on_ranks(
        make_job(name="part", **options | {"train": {"epochs": 4}, "cluster": {"workers": 1}}),
        resume=True,
    )
    assert more.summary["epochs"] == 4  # what two ranks had left out, one has taken over
