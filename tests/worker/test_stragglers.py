"""A rank that slows down the other ranks is named; noise is not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.runs.display import _slow
from raygnn.runs.metrics_files import STEP
from raygnn.runs.run_directory import EVENTS
from raygnn.sampling.exchange import Exchange
from raygnn.worker.comm.guard import Guard
from raygnn.worker.job import Job
from raygnn.worker.rank import Rank
from raygnn.worker.stragglers import Stragglers
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, job_of, runtime, train_on_ranks

WORLD = 4


def watch(factor: float | None = 1.5, host: str | None = None) -> tuple[Stragglers, list[str]]:
    told: list[str] = []
    return Stragglers(factor, told.append, lambda rank: host), told


def window(compute: list[float], wait: list[float] | None = None) -> dict[str, list[float]]:
    most = max(compute)
    return dict.fromkeys(STEP, [0.0] * len(compute)) | {
        "forward": compute,
        "peers": [most - own for own in compute],
        "wait": wait or [0.0] * len(compute),
    }


def drawn(low: float, high: float) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(st.floats(low, high), min_size=WORLD, max_size=WORLD), min_size=1)


@given(drawn(0.1, 0.14) | drawn(1e-3, 5e-3))
def test_noise_is_not_told(windows: list[list[float]]) -> None:
    stragglers, told = watch()
    for step, times in enumerate(windows):
        stragglers.add(step, window(times))
    assert told == []
    assert all(rank["slow"] == 0 for rank in stragglers.summary())


@pytest.mark.parametrize(("factor", "is_told"), [(1.5, True), (3, False), (None, False)])
def test_the_factor_is_that_of_the_configuration(
    factor: float | None, is_told: bool, make_job: JobFactory
) -> None:
    config = make_job(cluster={"workers": 1}, fault={"straggler": factor})
    run_ranks(1, _slow_fourth_rank, job_of(config))
    events = config.run_dir / "logs" / EVENTS
    assert (events.exists() and "rank 3" in events.read_text()) is is_told


def _slow_fourth_rank(exchange: Exchange, job: Job) -> None:
    stragglers = Rank(job, runtime(exchange)).stragglers
    for step in range(5):
        stragglers.add(step, window([1.0, 1.0, 1.0, 2.0]))


@given(
    slow=st.integers(0, WORLD - 1),
    base=st.floats(0.02, 10.0),
    factor=st.floats(1.6, 100.0),
    begin=st.integers(0, 20),
    windows=st.integers(3, 40),
)
def test_a_slow_rank_is_told_once(
    slow: int, base: float, factor: float, begin: int, windows: int
) -> None:
    stragglers, told = watch(host="node-b")
    for step in range(begin):
        record = stragglers.add(step, window([base] * WORLD))
    times = [base] * WORLD
    times[slow] *= factor
    for step in range(begin, begin + windows):
        record = stragglers.add(step, window(times))
    (said,) = told
    assert said.startswith(f"rank {slow} on node-b slows down the other ranks: ")
    assert said.endswith(f"since step {begin:,}")
    assert record["ranks/slowest"] == slow
    assert record["ranks/slowest_seconds"] == pytest.approx(base * factor)
    assert record["ranks/median_seconds"] == pytest.approx(base)
    shares = [rank["slow"] for rank in stragglers.summary()]
    assert shares[slow] == pytest.approx(windows / (begin + windows))
    assert sum(shares) == shares[slow]


def test_a_rank_that_is_slow_again_is_reported_once() -> None:
    stragglers, told = watch()
    slow, well = window([0.1, 0.3]), window([0.1, 0.1])
    for step, seconds in enumerate([slow, slow, well, slow, slow, slow, slow, well] * 5):
        stragglers.add(step, seconds)
    (said,) = told
    assert said.endswith("since step 3")
    for step in range(100, 104):
        stragglers.add(step, window([0.3, 0.1]))
    assert [line[:6] for line in told] == ["rank 1", "rank 0"]
    assert watch(None)[0].add(0, slow)["ranks/slowest"] == 1


def test_ranks_of_average_speed_are_not_counted_as_slow() -> None:
    """Ranks that are slow in fewer windows than a report requires are not counted either."""
    stragglers, _ = watch()
    for times in ([0.1, 0.3], [0.3, 0.1]):
        stragglers.add(0, window(times))
    stragglers.add(0, window([0.1, 0.3]))
    assert [rank["slow"] > 0 for rank in stragglers.summary()] == [False, True]
    stragglers.add(0, window([0.3, 0.1]))
    assert [rank["slow"] for rank in stragglers.summary()] == [0, 0]
    for times in ([0.1, 0.3001], [0.3, 0.1]) * 200:
        stragglers.add(0, window(times))
    assert [rank["slow"] for rank in stragglers.summary()] == [0, 0]
    stragglers, _ = watch()
    for _ in range(2):
        stragglers.add(0, window([0.1, 0.3]))
    assert [rank["slow"] for rank in stragglers.summary()] == [0, 0]


def test_loaders_that_starve_their_ranks() -> None:
    stragglers, told = watch()
    for waits in ([0.001, 0.04, 0.03], [0.04, 0.001, 0.001], [0.001, 0.04, 0.001]) * 2:
        for step in range(5):
            stragglers.add(step, window([0.1, 0.1, 0.1], waits))
    (said,) = told
    assert said.startswith("2 ranks, rank 1 most, wait for the next batch 29% of the time, since")


def test_a_rank_that_is_late_after_a_start() -> None:
    stragglers, told = watch()
    for step in range(9):
        stragglers.add(step, window([0.1, 0.1, 0.1], [1.0, 31.0, 1.2] if step == 0 else None))
    assert told == ["rank 1 was ready for its first batch 29.9 s after the other ranks"]
    assert all(rank["busy"] == pytest.approx(0.1) for rank in stragglers.summary())


@pytest.mark.alone
def test_ranks_that_train(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Guard.on_train_batch_start

    def dawdle(self: Guard, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.4)
        begin(self, trainer, *args)

    monkeypatch.setattr(Guard, "on_train_batch_start", dawdle)
    run = train_on_ranks(make_job())
    told = [json.loads(line)["text"] for line in (run.path / "logs" / EVENTS).open()]
    (said,) = (text for text in told if "slows down" in text)
    assert said.startswith("rank 1 slows down the other ranks: it is busy for ")
    steps = run.metrics.dropna(subset="train/loss")
    assert (steps["ranks/slowest"] == 1).mean() > 0.5
    assert (steps["ranks/slowest_seconds"] > 0.4).all()
    assert steps["ranks/median_seconds"].median() < steps["ranks/slowest_seconds"].median()
    # the other rank waits in the backward pass, so the mean of both is half of that
    assert steps["seconds/peers"].median() > 0.1
    assert steps["seconds/communicate"].median() < 0.1
    assert _slow(run.summary["ranks"]).startswith("rank 1: busy for ")
