"""Records of steps: when they are written, while their sums are computed during training."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raygnn.sampling.exchange import World
from raygnn.worker.records import Records
from tests.support.facts import make_config


class Work:
    """A sum that other ranks have not joined yet."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def is_completed(self) -> bool:
        return self.waited


class Run:
    """Records of rank 0 of several, with one after each step."""

    def __init__(self, ranks: int) -> None:
        self.works: list[Work] = []
        self.written: list[Mapping[str, Any]] = []
        writer: Any = SimpleNamespace(write=self.written.append, waiting=None, close=lambda s: None)
        idle: Any = SimpleNamespace(write=lambda record: None, waiting=None, close=lambda s: None)
        exchange: Any = SimpleNamespace(world=World(0, ranks), begin_sum=self.begin_sum)
        stragglers: Any = SimpleNamespace(add=lambda *given: {})
        config = make_config(train__log_every=1)
        job: Any = SimpleNamespace(config=config, started=0.0)
        counted: Any = (lambda: (0, 0)), (lambda: 0)
        self.records = Records(exchange, [writer, idle], stragglers, *counted, job)
        self.trainer: Any = SimpleNamespace(global_step=0, current_epoch=0)
        window = SimpleNamespace(loss=2.0, parts={}, steps=1, seeds=3, reset=lambda: None)
        model = torch.nn.Linear(1, 1)
        self.module: Any = SimpleNamespace(
            device=torch.device("cpu"), window=window, clock=None, model=model, embeddings=None
        )
        self.module.parameters = model.parameters
        self.records.on_train_start(self.trainer, self.module)

    def begin_sum(self, table: Tensor) -> tuple[Tensor, Work | None]:
        if self.records._exchange.world.size == 1:
            return table, None
        self.works.append(Work())
        return table, self.works[-1]

    def step(self) -> None:
        self.trainer.global_step += 1
        self.records.on_train_batch_end(self.trainer, self.module)

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.written]


def test_a_step_waits_for_the_sum_of_the_one_before() -> None:
    run = Run(ranks=2)
    run.step()
    assert (run.steps, run.works[0].waited) == ([], False)
    run.step()
    assert (run.steps, run.works[0].waited, run.works[1].waited) == ([1], True, False)
    run.records.on_train_end()
    assert run.steps == [1, 2]
    assert [record["train/loss"] for record in run.written] == [2.0, 2.0]


@pytest.mark.parametrize("what", ["pause", "write", "close", "on_train_end"])
def test_a_record_is_written_before_a_checkpoint_or_evaluation(what: str) -> None:
    """A run that resumes from there does not write it again."""
    run = Run(ranks=2)
    run.step()
    given = {"write": (1, 0, {"val/accuracy": 1.0}), "close": (0.0,)}.get(what, ())
    if (entered := getattr(run.records, what)(*given)) is not None:
        entered.__enter__()
    assert run.steps[0] == 1
    assert "train/loss" in run.written[0]


def test_a_single_rank_does_not_wait() -> None:
    run = Run(ranks=1)
    run.step()
    assert run.steps == [1]


@pytest.mark.parametrize("arrived", [False, True])
def test_a_rank_that_fails_leaves_what_it_knows(arrived: bool) -> None:
    run = Run(ranks=2)
    run.step()
    run.works[0].waited = arrived
    run.records.write_pending(wait=False)
    assert run.steps == ([1] if arrived else [])
