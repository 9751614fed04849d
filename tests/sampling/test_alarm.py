"""A rank that can not make a batch fails the step on every rank, with its cause, and soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raygnn.errors import TrainingError
from raygnn.sampling.exchange import Exchange, FailureBroadcast, World
from raygnn.sampling.loader import Prefetcher
from tests.ranks import run_ranks

LONGEST = 12.0  # seconds; the group's own timeout is 30


def train(exchange: Exchange, culprit: int, alarmed: bool) -> tuple[str, float]:
    """Batches are made together; one rank raises between two collectives."""
    store = dist.PrefixStore("alarm", dist.distributed_c10d._get_default_store())
    alarm = FailureBroadcast(exchange.world, store) if alarmed else None

    def make(step: int) -> int:
        if step == 5 and exchange.world.rank == culprit:
            raise ValueError(f"batch {step} is broken")
        return int(exchange.sum(torch.ones(1)))

    begin = time.monotonic()
    try:
        for _ in Prefetcher(make, range(10), 2, alarm):
            time.sleep(0.01)
    except Exception as error:
        if exchange.world.rank == culprit:
            time.sleep(LONGEST)  # does not die, so that its connections say nothing
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "done", time.monotonic() - begin


@pytest.mark.alone
@pytest.mark.parametrize("culprit", [0, 2])
def test_all_ranks_hear_the_cause(culprit: int) -> None:
    found = run_ranks(3, train, culprit, True)
    for rank, (text, seconds) in enumerate(found):
        if rank == culprit:
            assert text == "ValueError: batch 5 is broken"
        else:
            assert text.startswith("TrainingError")
            assert f"rank {culprit} could not prepare its batch: ValueError: batch 5" in text
            assert seconds < LONGEST


@pytest.mark.alone
def test_without_an_alarm_the_others_wait() -> None:
    """What the alarm is for: the others hear of it when the rank's connections end."""
    found = run_ranks(2, train, 0, False)
    text, seconds = found[1]
    assert "broken" not in text
    assert seconds > LONGEST / 2


def test_an_alarm_is_quiet_until_it_rings(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    own, other = (FailureBroadcast(World(rank, 2), store) for rank in range(2))
    own.check()
    other.announce(KeyError("x"))
    other.check()  # whoever rang raises what it met itself
    own.announce(ValueError("late"))
    with pytest.raises(TrainingError, match=r"rank 1 could not .* KeyError"):
        own.check()
