"""Number of workers of an attempt: Ray Train's scaling policy as resources come and go."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision

from raygnn.config.load import load_config
from raygnn.config.schema import TrainConfig
from raygnn.driver import scaling as module
from raygnn.driver.launch import explain
from raygnn.driver.scaling import Scaling
from raygnn.errors import TrainingError
from raygnn.runs.run_directory import SCALING
from raygnn.tasks.optimizer import make_optimizer
from raygnn.worker import ray_nodes
from raygnn.worker.control import Control, Worker
from raygnn.worker.job import Job
from raygnn.worker.ray_nodes import Lost
from tests.support.small_jobs import job

PATIENCE = 60.0


class Clock:
    """A clock that advances when a call sleeps, or when the test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Policy:
    """A scaling policy in a cluster with resources for ``room`` workers, of which ``size`` run."""

    def __init__(self, fewest: int, most: int, run_dir: Path, clock: Clock):
        config = ScalingConfig(num_workers=most, resources_per_worker={"CPU": 1})
        self.control = Control()
        self.policy = Scaling(config, fewest, run_dir, self.control, PATIENCE)
        self.policy._maybe_send_resource_request = lambda: None  # type: ignore[attr-defined]
        self.run_dir, self.clock = run_dir, clock
        self.room = self.size = self.held = 0

    def count(self, running: Sequence[Worker]) -> int:
        assert len(running) == self.held  # held by workers that end when new ones start
        return self.room

    def start(self) -> int:
        """Start the ranks: with how many, 0 if there is to be a wait."""
        decision = self.policy.make_decision_for_non_running_worker_group()
        self.size = 0 if isinstance(decision, NoopDecision) else decision.num_workers
        if self.size:
            self.held = self.size
            self.control.begin([Worker("host", "node")] * self.size)
        return self.size

    def started(self) -> int:
        while not self.start():
            assert self.clock.now < 2000, "no end of waiting"
        return self.size

    def runs(self, seconds: float) -> int | None:
        """Let the ranks run: with how many to start anew, None if they may go on."""
        end = self.clock.now + seconds
        state = SimpleNamespace(workers=[None] * self.size)
        while self.clock.now < end:
            self.clock.sleep(2.0)
            decision = self.policy.make_decision_for_running_worker_group(state, None)
            if isinstance(decision, ResizeDecision):
                self.held = 0
                return decision.num_workers
        return None

    @property
    def asks(self) -> bool:
        return bool(self.control.pending_saves())

    def answer(self, saved: bool) -> None:
        self.control.answer_saves(self.control.pending_saves(), saved=saved)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Policy]:
    clock, made = Clock(), []
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ray_nodes, "room", lambda needs, running: made[-1].count(running))
    monkeypatch.setattr(ray_nodes, "lost", lambda workers: [Lost(1, "host1", "it is off")])

    def make(fewest: int, most: int) -> Policy:
        made.append(Policy(fewest, most, tmp_path, clock))
        return made[-1]

    return make


def test_a_fixed_number_is_asked_of_ray_at_first(make: Any) -> None:
    assert make(2, 2).start() == 2  # whatever is free: Ray waits, and the driver reports that


def test_a_fixed_number_restarts_when_resources_are_free(make: Any) -> None:
    policy = make(2, 2)
    policy.start()
    policy.room = 1
    assert [policy.start() for _ in range(10)] == [0] * 10
    policy.room = 3
    assert policy.start() == 2
    assert policy.runs(300) is None


@pytest.mark.parametrize(("fewest", "room"), [(2, 1), (1, 0)])
def test_a_wait_that_ends_names_the_missing_resources(make: Any, fewest: int, room: int) -> None:
    policy = make(fewest, 2)
    policy.room = 2
    policy.started()
    policy.room, begin = room, policy.clock.now
    with pytest.raises(TrainingError) as caught:
        policy.started()
    assert PATIENCE <= policy.clock.now - begin <= PATIENCE + 2
    assert f"resources for {room} worker" in caught.value.what
    assert f"of {fewest}, after 60 s" in caught.value.what
    assert "rank 1 was lost with its node host1: it is off" in caught.value.what
    assert (caught.value.rank, caught.value.exit_code) == (1, 4)
    assert explain(SimpleNamespace(controller_failure=caught.value), []) is caught.value  # type: ignore[arg-type]


def test_a_range_starts_with_what_there_is(make: Any) -> None:
    policy = make(1, 4)
    policy.room = 3
    assert policy.start() == 0  # more may become free
    assert policy.started() == 3
    policy.room = 9
    policy.clock.sleep(100)
    assert policy.start() == 4


def test_a_range_shrinks_and_grows(make: Any) -> None:
    policy = make(1, 2)
    (policy.run_dir / "logs").mkdir()
    policy.room = 2
    assert policy.started() == 2
    policy.room = 1  # while they run, that is no reason for anything
    assert policy.runs(300) is None
    assert policy.started() == 1
    assert policy.runs(300) is None
    assert not policy.asks
    policy.room = 2
    assert policy.runs(14) is None  # seen once, at most
    assert policy.runs(30) is None
    assert policy.asks
    (policy.run_dir / "checkpoints" / "step-0000000004").mkdir(parents=True)
    policy.answer(True)
    assert policy.runs(3) == 2
    assert policy.started() == 2
    assert policy.runs(300) is None
    told = (policy.run_dir / "logs" / SCALING).read_text().splitlines()
    assert [json.loads(line)["text"] for line in told][-2:] == [
        "there are resources for 2 workers: saving a checkpoint first",
        "restarting with 2 workers from step-0000000004",
    ]


def asking(make: Any) -> Any:
    """Return a policy with one worker that has found resources for two, and first requests a
    checkpoint."""
    policy = make(1, 2)
    policy.room = 1
    policy.started()
    policy.room = 2
    while not policy.asks:
        assert policy.runs(2) is None
    return policy


@pytest.mark.parametrize("answer", [False, True])
def test_without_a_checkpoint_nothing_is_lost(answer: bool, make: Any) -> None:
    policy = asking(make)
    if answer:  # it could not be written
        policy.answer(False)
    assert policy.runs(100) is None
    assert not policy.asks
    while not policy.asks:
        assert policy.runs(30) is None
    (policy.run_dir / "checkpoints" / "step-0000000008").mkdir(parents=True)
    policy.answer(True)
    assert policy.runs(30) == 2


def test_resources_that_disappear_again_are_ignored(make: Any) -> None:
    policy = asking(make)
    other = policy.control.ask_save()
    policy.room = 1
    assert policy.runs(200) is None
    assert len(policy.control.pending_saves()) == 1
    assert other not in policy.control.snapshot().answers
    policy.answer(True)
    assert policy.control.snapshot().answers[other]


def test_the_end_of_the_command_ends_the_wait(make: Any) -> None:
    policy = make(1, 2)
    policy.control.stop()
    with pytest.raises(TrainingError, match="ended the run"):
        policy.started()


def test_a_lost_rank_is_what_ended_the_others() -> None:
    error = explain(None, [], [Lost(1, "host1", "it takes no connection")])
    assert (error.rank, error.where) == (1, "host1")
    assert error.what == "rank 1 was lost with its node host1: it takes no connection"


def test_the_learning_rate_grows_with_the_batch_not_with_the_ranks(tmp_path: Path) -> None:
    config = load_config(job(tmp_path, cluster={"workers": [1, 2]}, sampling={"batch_size": 64}))
    found = Job(config, None, tmp_path, {}, True, 0.0, global_batch=128)
    train = TrainConfig(optimizer="sgd", lr=0.1, lr_scaling="linear")
    parameters = dict(torch.nn.Linear(2, 2).named_parameters())
    assert make_optimizer(parameters, train, found.planned, False).defaults["lr"] == 0.2
