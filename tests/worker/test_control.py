"""Messages between the driver and the ranks: their state, and the connection."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raygnn.errors import TrainingError
from raygnn.worker import control as module
from raygnn.worker.control import (
    Control,
    ControlHandle,
    RankProgress,
    Worker,
    read_result,
)

WORKERS = [Worker("host0", "a"), Worker("host1", "b")]


def says(rank: int, attempt: int = 1, beat: int = 1, phase: str = "forward") -> RankProgress:
    return RankProgress(attempt, rank, "host", 1, phase, beat=beat)


def test_starts_are_counted_over_commands() -> None:
    control = Control(attempts=2)
    assert (control.snapshot().attempt, control.snapshot().starts) == (2, 0)
    control.begin(WORKERS)
    control.report(says(0, attempt=3))
    control.update(sending=True)
    before = control.snapshot()
    assert (before.attempt, before.starts, before.sending) == (3, 1, True)
    assert (before.host_of(1), before.node_of(1), before.node_of(2)) == ("host1", "b", None)
    control.begin(WORKERS[:1])
    after = control.snapshot()
    assert (after.attempt, after.starts, after.sending, after.progress) == (4, 2, False, {})
    assert after.workers == (WORKERS[0],)
    control.report(says(0, attempt=3))  # a rank that was asleep
    assert control.snapshot().progress == {}
    assert not control.is_current(3)
    assert before.progress  # the earlier snapshot does not change


def test_a_request_that_is_withdrawn_answers_no_other() -> None:
    """The controller withdraws its request for a checkpoint, while an interrupt waits for its own,
    which must not count as written."""
    control = Control()
    growing, interrupt = control.ask_save(), control.ask_save()
    serving = control.pending_saves()
    control.withdraw_save(growing)
    assert not control.snapshot().answers
    assert len(control.pending_saves()) == 1
    control.answer_saves(serving, saved=False)  # of both, as rank 0 knows them
    snapshot = control.snapshot()
    assert snapshot.answers == {interrupt: False}
    control.withdraw_save(interrupt)
    assert control.snapshot().answers == {}


def test_the_result_is_plain_json() -> None:
    control = Control()
    assert read_result(control.snapshot()) is None
    control.finish({"loss": float("nan"), "steps": 3})
    assert read_result(control.snapshot()) == {"loss": None, "steps": 3}


# ── by an actor ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def link(shared_ray: None) -> Iterator[ControlHandle]:
    import ray

    link = ControlHandle.create(attempts=0)
    yield link
    ray.kill(link._actor)


def until(happens: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_learns_what_is_asked_when_it_reports(link: ControlHandle) -> None:
    import ray

    rank: ControlHandle = ray.cloudpickle.loads(ray.cloudpickle.dumps(link))
    link.begin(WORKERS)
    request = link.ask_save()
    assert rank.snapshot().workers == tuple(WORKERS)
    assert not rank.pending_saves()  # it was not asked for since
    until(lambda: rank.report(says(0)).saves)
    assert len(rank.pending_saves()) == 1
    until(lambda: link.newest().progress.get(0))
    rank.update(sending=True)
    rank.answer_saves(rank.pending_saves(), saved=True)
    assert not rank.pending_saves()  # whatever the next report contains
    until(lambda: request in link.newest().answers)
    assert link.newest().sending
    assert rank.is_current(1)
    assert not rank.is_current(2)
    rank.finish({"steps": 1})
    assert read_result(link.snapshot()) == {"steps": 1}
    link.stop()
    until(lambda: rank.report(says(0)).stop)


def test_a_rank_outlives_an_actor_that_is_gone(
    link: ControlHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank does not wait for the actor; the driver, which depends on it, gets an error."""
    import ray
    from ray.exceptions import RayActorError

    def answers() -> bool:
        try:
            link.snapshot()
        except TrainingError:
            return False
        return True

    assert answers()
    ray.kill(link._actor)
    until(lambda: not answers())
    monkeypatch.setattr(module, "_SHORT", 5.0)
    assert link.is_current(1)
    begin = time.monotonic()
    for _ in range(5):
        assert not link.report(says(0)).stop
        link.update(steps_per_epoch=3)
        link.answer_saves(["a"], saved=True)
    assert time.monotonic() - begin < 5
    link.stop()
    with pytest.raises(TrainingError, match="does not answer"):
        link.finish({})

    def fails() -> bool:
        try:
            link.newest()
        except RayActorError:
            return True
        return False

    until(fails)
    other = pickle.loads(pickle.dumps(Control(2)))  # of tests and ranks without Ray
    assert other.snapshot().attempt == 2
