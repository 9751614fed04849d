"""The loader: which batches are prepared, when preparation stops, and how a rank's failure reaches
the other ranks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raygnn.errors import InputError, TrainingError
from raygnn.sampling.exchange import Exchange, FailureBroadcast, World
from raygnn.sampling.loader import BatchLoader, Prefetcher
from raygnn.sampling.plan import SeedPlan
from tests.support.ranks import run_ranks

PER_EPOCH = 3


def make_loader(**options: Any) -> tuple[BatchLoader, list[tuple[int, int]]]:
    """Return a loader over epochs of three batches, and the list of prepared batches, in order."""
    made: list[tuple[int, int]] = []

    class Maker:
        plan = SeedPlan(num_seeds=30, global_batch=10, accumulate=options.pop("accumulate", 1))
        identity = options.pop("identity", "")
        exchange = Exchange(World(0, 1))

        def __call__(self, epoch: int, step: int) -> Any:
            made.append((epoch, step))
            return SimpleNamespace(epoch=epoch, step=step)

    defaults: dict[str, Any] = {"prefetch": 5, "limit": 4 * PER_EPOCH}
    return BatchLoader(Maker(), **{**defaults, **options}), made  # type: ignore[arg-type]


def settled(made: list[Any]) -> list[Any]:
    """Return ``made`` once nothing is added to it any more."""
    before = None
    while before != len(made):
        before = len(made)
        time.sleep(0.3)
    return made


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_every_batch_comes_once_and_in_order(across: bool, prefetch: int) -> None:
    loader, made = make_loader(across=across, prefetch=prefetch, limit=2 * PER_EPOCH + 1)
    wanted = [(epoch, step) for epoch in range(3) for step in range(PER_EPOCH)][:7]
    got = [(batch.epoch, batch.step) for _ in range(3) for batch in loader]
    assert got == made == wanted
    assert loader.epochs_done == 2


def test_batches_are_prepared_across_the_end_of_an_epoch_unless_training_may_stop_there() -> None:
    """Lightning requests an epoch's batches, but does not ask for the end of the epoch."""
    for across, ahead in ((True, 2 * PER_EPOCH), (False, PER_EPOCH)):
        loader, made = make_loader(across=across)
        batches = iter(loader)
        for _ in range(PER_EPOCH):
            next(batches)
        assert len(settled(made)) >= ahead
        assert (len(made) > PER_EPOCH) is across
        assert next(iter(loader)).epoch == 1
        loader.close()


def test_closing_ends_the_preparation() -> None:
    loader, _ = make_loader()
    next(iter(loader))
    loader.close()
    end = time.monotonic() + 10
    while [t for t in threading.enumerate() if t.name == "raygnn-prefetch"]:
        assert time.monotonic() < end, "the thread stays"
        time.sleep(0.05)


def test_a_position_of_other_steps_is_refused() -> None:
    state = make_loader(accumulate=2)[0].state_dict()
    with pytest.raises(InputError, match="accumulate 2, this run has 1"):
        make_loader()[0].load_state_dict(state)


def test_a_position_in_other_data_is_refused() -> None:
    state = make_loader(identity="one graph")[0].state_dict()
    make_loader(identity="one graph")[0].load_state_dict(state)
    with pytest.raises(InputError, match="trained on other data"):
        make_loader(identity="another")[0].load_state_dict(state)


LONGEST = 6.0  # seconds; the group's own timeout is 30


def train(exchange: Exchange, culprit: int, alarmed: bool) -> tuple[str, float]:
    """Train while ranks prepare batches together; one rank raises between two collectives."""
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
            time.sleep(LONGEST)  # stays alive, so that its connections do not reveal the failure
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "done", time.monotonic() - begin


@pytest.mark.alone
@pytest.mark.parametrize("culprit", [0, 2])
def test_all_ranks_raise_the_cause(culprit: int) -> None:
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
    """Without the alarm, the other ranks notice a failure only when its connections close."""
    found = run_ranks(2, train, 0, False, fresh=True)  # they close with its process
    text, seconds = found[1]
    assert "broken" not in text
    assert seconds > LONGEST / 2


def test_an_alarm_is_quiet_until_it_rings(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    own, other = (FailureBroadcast(World(rank, 2), store) for rank in range(2))
    own.check()
    other.announce(KeyError("x"))
    other.check()  # the rank that raised the alarm raises its own error
    own.announce(ValueError("late"))
    with pytest.raises(TrainingError, match=r"rank 1 could not .* KeyError"):
        own.check()


@pytest.mark.parametrize(("waits", "nice"), [(False, 10), (True, 4)])
def test_batches_that_no_rank_waits_for_are_prepared_with_low_priority(
    waits: bool, nice: int
) -> None:
    """The thread is nicer from its second batch on if the first one needed no other rank."""
    waited, seen = 0.0, []

    def make(step: int) -> int:
        nonlocal waited
        waited += waits
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return step

    before = os.getpriority(os.PRIO_PROCESS, 0)
    steps = list(Prefetcher(make, range(3), 2, waited=lambda: waited))
    assert steps == [0, 1, 2]
    assert [one - before for one in seen] == [4, nice, nice]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_training_that_starves_has_its_batches_made_without_more_niceness() -> None:
    """The prefetch thread gives up its extra niceness if training keeps waiting; batches and their
    order stay the same."""
    seen = []

    def make(step: int) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        time.sleep(0.002)
        return step

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert list(Prefetcher(make, range(60), 2)) == list(range(60))  # which waits all the time
    assert [one - before for one in seen[:10]] == [4, *[10] * 9]
    assert {one - before for one in seen[30:]} == {4}
