"""Storage that is slow costs no run its checkpoints; storage that takes nothing is told."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from raygnn.checkpoint import hashed_files, lifecycle, store
from raygnn.checkpoint.hashed_files import Hashed
from raygnn.checkpoint.learned_rows import RowState
from raygnn.checkpoint.lifecycle import Checkpoints
from raygnn.config.values import Duration
from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.embeddings import ROW
from raygnn.worker.control import Control
from raygnn.worker.job import Job
from raygnn.worker.rank import Rank
from tests.checkpoint.test_saving import begin, saver, told
from tests.support import small_jobs
from tests.support.plain_embeddings import rows_in
from tests.support.small_jobs import JobFactory, runtime, train_on_ranks
from tests.worker.test_embeddings import options

PATIENCE = 1.0  # seconds without progress of the storage


def wanted(**fault: Any) -> dict[str, Any]:
    found = options(2)
    found["train"] |= {"max_steps": 12}
    return {**found, "fault": {"checkpoint_every": 4, "keep": 9, **fault}}


def slow_down(monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[[], None]) -> None:
    """Call a function before each piece that ranks write to files with this text in their path."""
    put = Hashed._put

    def slowly(self: Hashed, piece: memoryview) -> None:
        if where in str(self._file.name):
            act()
        put(self, piece)

    monkeypatch.setattr(hashed_files, "_PIECE", 1 << 11)
    monkeypatch.setattr(Hashed, "_put", slowly)


def rows_at(run: Run, step: int) -> np.ndarray:
    place = run.path / "checkpoints" / f"step-{step:010d}"
    files = store.read_manifest(place).manifest.rows
    assert files is not None
    return rows_in(place, files)["_N"]


def events(run: Run) -> str:
    path = run.path / "logs" / "events.jsonl"
    return path.read_text() if path.exists() else ""


@pytest.mark.long
@pytest.mark.parametrize("room", [True, False])
def test_learned_rows(room: bool, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint takes longer than the storage timeout, and has the same content as ever.

    Without room for a copy of the rows training waits, so none is left out.
    """
    whole = train_on_ranks(make_job(name="whole", **wanted()))
    # some 15 pieces of a rank
    slow_down(monkeypatch, "rows-", lambda: time.sleep(PATIENCE / 10))
    monkeypatch.setattr(lifecycle, "_GRACE", 0.0)
    monkeypatch.setattr(RowState, "has_room", lambda self: room)
    config = make_job(**wanted(storage_timeout=PATIENCE))
    run = train_on_ranks(config)
    counts = run.summary["checkpoints"]
    assert counts["failed"] == 0
    assert counts["saved"] + counts["skipped"] == 3
    assert (counts["skipped"] > 0) is room
    assert ("is skipped" in events(run)) is room
    newest, rejected = store.find(run.path / "checkpoints", config)
    assert newest is not None
    assert (newest.step, rejected) == (12, [])
    for step in (4, 12):
        assert np.array_equal(rows_at(run, step), rows_at(whole, step))
    assert run.summary["metrics"] == whole.summary["metrics"]


def _hung(exchange: Exchange, job: Job) -> dict[str, Any]:
    """Train while the storage of rank 1 accepts only the first piece of each checkpoint."""
    if exchange.world.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            slow_down(patch, ".step-", lambda: time.sleep(3600))
            return Rank(job, runtime(exchange)).run()
    return Rank(job, runtime(exchange)).run()


def test_hanging_storage_loses_checkpoints_but_not_the_run(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_jobs, "_train", _hung)
    run = train_on_ranks(make_job(**wanted(storage_timeout=PATIENCE)))
    assert run.summary["checkpoints"]["saved"] == 0
    assert store.newest(run.path / "checkpoints") == ""
    said = events(run)
    assert "the checkpoint of step 12 was not written" in said
    assert "it has accepted nothing for 1 s" in said
    assert "it was the last one, so --resume would start from the beginning" in said


def test_rows_that_change_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a timeout, and without memory for a copy, no checkpoint has rows of a later step."""
    again = threading.Event()
    slow_down(monkeypatch, "rows-", lambda: again.wait(60))
    monkeypatch.setattr(RowState, "has_room", lambda self: False)
    table, control = torch.zeros(64, 4), Exchange(World(0, 1))
    embeddings: Any = SimpleNamespace(
        rows={"_N": 64}, ids={"_N": np.arange(64)}, dim=4, steps=4, arrays=lambda _: {ROW: table}
    )
    rows = RowState(embeddings, control, 0.1)
    saving = saver(tmp_path, exchange=control, every=4, rows=rows, patience=0.1)
    begin(saving, 4)
    table.add_(1)
    again.set()
    assert rows._write is not None
    assert rows._write.wait(60)
    saving.finish()
    assert not [*tmp_path.glob("*step-*")]
    assert saving.counts == {"saved": 0, "failed": 1, "skipped": 0}
    reason = "training continued before the embedding rows were written (rank 0) (find"
    assert reason in told(tmp_path)[0]


class Storage:
    """Storage on which checkpoints take as long as the test says, by a clock of its own.

    Args:
        seconds: that each takes, one after the other.
        stalls: which of them never end, and take nothing meanwhile.
    """

    def __init__(self, seconds: list[float], stalls: set[int]):
        self.now = 0.0
        self.seconds, self.stalls = seconds, stalls
        self.writes: list[Writing] = []
        self.written = -1  # the newest step

    def begin(self, act: Callable[[Any], None], name: str) -> Writing:
        assert not any(write.busy for write in self.writes), "two at a time"
        self.writes.append(Writing(self, act, len(self.writes)))
        return self.writes[-1]

    def write(self, directory: Path, state: Any, step: int, *_: Any) -> None:
        self.written = step

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Writing:
    """Stand-in for a `Write`."""

    def __init__(self, storage: Storage, act: Callable[[Any], None], number: int):
        self._storage, self._act, self._began = storage, act, storage.now
        self._stalls = number in storage.stalls
        self._end = math.inf if self._stalls else storage.now + storage.seconds[number]

    @property
    def busy(self) -> bool:
        if self._storage.now < self._end:
            return True
        act, self._act = self._act, lambda moved: None
        act(None)
        return False

    @property
    def silence(self) -> float:
        return self._storage.now - self._began if self._stalls else 0.0

    def wait(self, seconds: float) -> bool:
        return not self.busy


@given(
    st.lists(st.floats(0.1, 100.0), min_size=40, max_size=40),
    st.sets(st.integers(0, 4), max_size=1),
    st.sets(st.integers(1, 39), max_size=3),
    st.floats(0.1, 9.0),
    st.sampled_from([1, 3, 7, 1000, Duration(5.0)]),
)
@example([30.0] * 40, set(), {2, 5}, 1.0, 1000)
def test_one_at_a_time_and_always_the_last(
    seconds: list[float], stalls: set[int], requests: set[int], pace: float, every: Any
) -> None:
    """At any speed of steps and storage, one checkpoint is written at a time, the last one always
    unless the storage hangs, and a request is answered by a later state."""
    storage, last = Storage(seconds, stalls), 40
    asked: dict[str, int] = {}  # request → its step
    answers: dict[str, int] = {}  # request → the step of the checkpoint that answers it

    class Noted(Control):
        def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None:
            answers.update(dict.fromkeys(requests, storage.written if saved else -1))
            super().answer_saves(requests, saved=saved)

    control, said, begun = Noted(), list[str](), list[int]()
    events: Any = SimpleNamespace(notify=said.append)
    exchange: Any = SimpleNamespace(world=World(0, 1), sum=lambda values: values)
    saving = Checkpoints(
        Path("nowhere"),
        exchange,
        control,
        every=every,
        last=last,
        keep=9,
        about={},
        events=events,
        patience=60.0,
    )

    def save(path: Path) -> None:
        begun.append(trainer.global_step)
        saving.plugin.save_checkpoint({"global_step": trainer.global_step}, path)

    trainer: Any = SimpleNamespace(global_step=0, save_checkpoint=save)
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: storage.now, sleep=storage.sleep)
        patch.setattr(lifecycle, "time", clock)
        patch.setattr(lifecycle, "Write", storage.begin)
        patch.setattr(store, "write", storage.write)
        patch.setattr(lifecycle, "_APART", 0.5)
        spent: dict[int, float] = {}
        saving.on_train_start(trainer, Mock())
        for step in range(1, last + 1):
            storage.now += pace
            if step in requests:
                asked[f"at {step}"] = step
                control.ask_save(f"at {step}")
            trainer.global_step, before = step, storage.now
            saving.on_train_batch_end(trainer)
            if step < last and storage.now > before + 1e-9:
                under_way = len(begun) - (begun[-1:] == [step])
                spent[under_way] = spent.get(under_way, 0.0) + storage.now - before
        saving.finish()
    counts = saving.counts
    assert all(one <= lifecycle._GRACE + 0.5 for one in spent.values())  # once for each
    if not stalls & set(range(len(begun))):
        assert begun[-1] == last
        assert (counts["saved"], counts["failed"]) == (len(begun), 0)
    else:
        assert last in begun or any(f"step {last} was not written" in text for text in said)
        assert counts["failed"]
    if isinstance(every, int) and not counts["skipped"] and not counts["failed"]:
        assert {*range(every, last, every)} <= {*begun}
    if every == 1000:  # a request waits for its turn
        assert not counts["skipped"]
    for request, step in asked.items():
        assert request in answers or counts["failed"]
        assert answers.get(request, -1) in (-1, *range(step, last + 1))
        assert answers.get(request) != -1 or counts["failed"]
