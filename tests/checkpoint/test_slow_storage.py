"""Storage that is slow costs no run its checkpoints; storage that takes nothing is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from raygnn.checkpoint import hashed_files, store
from raygnn.checkpoint.hashed_files import Hashed
from raygnn.checkpoint.learned_rows import RowState
from raygnn.config.values import Duration
from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.embeddings import ROW
from raygnn.worker import callbacks
from raygnn.worker.callbacks import Checkpoints
from raygnn.worker.job import Job
from raygnn.worker.rank import Rank
from tests import small_jobs
from tests.checkpoint.test_saving import saver, state, told
from tests.plain_embeddings import rows_in
from tests.small_jobs import JobFactory, runtime, train_on_ranks
from tests.worker.test_embeddings import options

PATIENCE = 1.0  # seconds for which storage may take nothing


def wanted(**fault: Any) -> dict[str, Any]:
    found = options(2)
    found["train"] |= {"max_steps": 12}
    return {**found, "fault": {"checkpoint_every": 4, "keep": 9, **fault}}


def slow_down(monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[[], None]) -> None:
    """Do something before each piece that ranks write to files with this in their path."""
    put = Hashed._put

    def slowly(self: Hashed, piece: memoryview) -> None:
        if where in str(self._file.name):
            act()
        put(self, piece)

    monkeypatch.setattr(hashed_files, "_PIECE", 1 << 11)
    monkeypatch.setattr(Hashed, "_put", slowly)


def rows_at(run: Run, step: int) -> np.ndarray:
    place = run.path / "checkpoints" / f"step-{step:010d}"
    files = store.rows_of(place / "state.ckpt")
    assert files is not None
    return rows_in(place, files)["_N"]


def events(run: Run) -> str:
    path = run.path / "logs" / "events.jsonl"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("room", [True, False])
def test_learned_rows(room: bool, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint takes longer than storage may take nothing, and is as it would have been.

    Without room for a copy of the rows training waits, so none is left out.
    """
    whole = train_on_ranks(make_job(name="whole", **wanted()))
    # some 15 pieces of a rank
    slow_down(monkeypatch, "rows-", lambda: time.sleep(PATIENCE / 10))
    monkeypatch.setattr(callbacks, "_GRACE", 0.0)
    monkeypatch.setattr(RowState, "has_room", lambda self: room)
    config = make_job(**wanted(storage_timeout=PATIENCE))
    run = train_on_ranks(config)
    counts = run.summary["checkpoints"]
    assert counts["failed"] == 0
    assert counts["saved"] + counts["skipped"] == 3
    assert (counts["skipped"] > 0) is room
    assert ("is left out" in events(run)) is room
    newest, rejected = store.find(run.path / "checkpoints", config)
    assert newest is not None
    assert (newest.step, rejected) == (12, [])
    for step in (4, 12):
        assert np.array_equal(rows_at(run, step), rows_at(whole, step))
    assert run.summary["metrics"] == whole.summary["metrics"]


def _hung(exchange: Exchange, job: Job) -> dict[str, Any]:
    """Rank 1's storage takes nothing of any checkpoint after its first piece."""
    if exchange.world.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            slow_down(patch, ".step-", lambda: time.sleep(3600))
            return Rank(job, runtime(exchange)).run()
    return Rank(job, runtime(exchange)).run()


def test_storage_that_takes_nothing(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_jobs, "_train", _hung)
    run = train_on_ranks(make_job(**wanted(storage_timeout=PATIENCE)))
    assert run.summary["checkpoints"]["saved"] == 0
    assert store.newest(run.path / "checkpoints") == ""
    said = events(run)
    assert "the checkpoint of step 12 was not written" in said
    assert "it has taken nothing for 1 s" in said
    assert "it was the last one, so --resume would go on from the beginning" in said


def test_rows_that_change_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage took nothing for too long, and there was no room for a copy: no checkpoint has the
    rows of a later step."""
    again = threading.Event()
    slow_down(monkeypatch, "rows-", lambda: again.wait(60))
    monkeypatch.setattr(RowState, "has_room", lambda self: False)
    table, control, saving = torch.zeros(64, 4), Exchange(World(0, 1)), saver(tmp_path)
    embeddings: Any = SimpleNamespace(
        rows={"_N": 64}, ids={"_N": np.arange(64)}, dim=4, steps=4, arrays=lambda _: {ROW: table}
    )
    rows = RowState(embeddings, control, 0.1)
    records: Any = SimpleNamespace(begin_pause=lambda: 0.0, end_pause=lambda began: None)
    callback = Checkpoints(
        saving, tmp_path, control, records, every=4, last=99, rows=rows, patience=0.1
    )
    trainer: Any = SimpleNamespace(
        global_step=0,
        save_checkpoint=lambda path, storage_options: saving.save_checkpoint(
            state(4), path, storage_options
        ),
    )
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]
    trainer.global_step = 4
    callback.on_train_batch_end(trainer)
    table.add_(1)
    again.set()
    assert rows._write is not None
    assert rows._write.wait(60)
    callback.finish()
    assert not [*tmp_path.glob("*step-*")]
    assert (saving.saved, saving.failed) == (0, 1)
    assert (
        "training went on before the learned rows were written (rank 0) (see" in told(tmp_path)[0]
    )


class Storage:
    """A saver whose checkpoints take as long as the test says, by a clock of its own.

    Args:
        seconds: that each takes, one after the other.
        stalls: which of them never end, and take nothing meanwhile.
    """

    def __init__(self, seconds: list[float], stalls: set[int]):
        self.now = 0.0
        self.seconds, self.stalls = seconds, stalls
        self.begun: list[int] = []
        self.skipped: list[int] = []
        self.failed: list[int] = []
        self.requests: dict[int, int | None] = {}  # step of the request → of its answer
        self._end = self._began = 0.0

    @property
    def stalled(self) -> bool:
        return len(self.begun) - 1 in self.stalls

    @property
    def busy(self) -> bool:
        return bool(self.begun) and (self.stalled or self.now < self._end)

    @property
    def silence(self) -> float:
        return self.now - self._began if self.stalled else 0.0

    ends_training = False

    @property
    def asked(self) -> frozenset[int]:
        return frozenset(step for step, answer in self.requests.items() if answer is None)

    def save_checkpoint(self, step: int) -> None:
        assert not self.busy, "two at a time"
        for request in self.asked:
            self.requests[request] = step
        self._began, self._end = self.now, self.now + self.seconds[len(self.begun)]
        self.begun.append(step)

    def skip(self, step: int, stalled: float | None, last: bool) -> None:
        assert self.busy
        (self.skipped if stalled is None else self.failed).append(step)
        if stalled is not None:
            for request in self.asked:
                self.requests[request] = -1

    def finish(self, seconds: float) -> None:
        if self.busy:
            self.failed.append(self.begun[-1])

    def answer_rest(self) -> None: ...


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
    """Whatever the speed of steps and storage: one is written at a time, the last one always
    unless the storage takes nothing, and a request is answered by a later state."""
    storage, last, waited = Storage(seconds, stalls), 40, []
    trainer = SimpleNamespace(
        global_step=0,
        save_checkpoint=lambda path, storage_options: storage.save_checkpoint(trainer.global_step),
    )
    records = SimpleNamespace(begin_pause=lambda: storage.now, end_pause=waited.append)

    def sleep(some: float) -> None:
        storage.now += some

    exchange: Any = SimpleNamespace(world=World(0, 1), sum=lambda values: values)
    callback = Checkpoints(
        storage,  # type: ignore[arg-type]
        SimpleNamespace(__truediv__=lambda self, name: name),  # type: ignore[arg-type]
        exchange,
        records,  # type: ignore[arg-type]
        every=every,
        last=last,
        rows=None,
        patience=60.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: storage.now, sleep=sleep)
        patch.setattr(callbacks, "time", clock)
        patch.setattr(callbacks.store, "state_at", lambda directory, step: None)
        patch.setattr(callbacks, "_APART", 0.5)
        begins: dict[int, float] = {}
        callback.on_train_start(trainer, None)  # type: ignore[arg-type]
        for step in range(1, last + 1):
            storage.now += pace
            if step in requests:
                storage.requests[step] = None
            trainer.global_step, before = step, storage.now
            callback.on_train_batch_end(trainer)  # type: ignore[arg-type]
            if step < last and storage.now > before + 1e-9:
                under_way = len(storage.begun) - (storage.begun[-1:] == [step])
                begins[under_way] = begins.get(under_way, 0.0) + storage.now - before
        callback.finish()
    assert all(spent <= callbacks._GRACE + 0.5 for spent in begins.values())  # once for each
    if not stalls & set(range(len(storage.begun))):
        assert storage.begun[-1] == last
        assert not storage.failed
    else:
        assert last in (*storage.failed, *storage.begun)
        assert storage.failed
    if isinstance(every, int) and not storage.skipped and not storage.failed:
        assert {*range(every, last, every)} <= {*storage.begun}
    if every == 1000:  # a request waits for its turn
        assert not storage.skipped
    for request, answer in storage.requests.items():
        assert answer is not None or storage.failed
        assert answer is None or answer == -1 or answer >= request
