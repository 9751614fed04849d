"""The crash dump of a rank, however the rank ends."""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from raygnn.config.load import load_config
from raygnn.errors import TrainingError
from raygnn.runs.diagnose.causes import whose_path
from raygnn.runs.diagnose.state_file import State, file_of, read_state
from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.clock import StepClock
from raygnn.tasks.lightning_modules import LossWindow
from raygnn.worker import blackbox, failures, main
from raygnn.worker.blackbox import Recorder, flight, memory_usage, oom_kills
from raygnn.worker.control import Control, RankProgress
from raygnn.worker.records import Closing, Records
from tests.support.ranks import run_ranks
from tests.support.small_jobs import job


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close this process's recorder after the test."""
    monkeypatch.setattr(blackbox, "_current", None)
    yield
    if blackbox._current is not None:
        blackbox._current.close()


def recorder(logs: Path, rank: int = 0, **options: Any) -> Recorder:
    return Recorder(logs, **{"rank": rank, "world": 2, "attempt": 3, **options})


def state(logs: Path, rank: int = 0) -> State:
    found = read_state(file_of(logs, rank, ".state"))
    assert found is not None
    return found


def box(logs: Path, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file_of(logs, rank, ".blackbox.json").read_bytes())
    return content


def forked(function: Callable[[], None]) -> int:
    """Call a function in a forked process; return its exit status."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.fixture
def each_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every note at once."""
    monkeypatch.setattr("raygnn.worker.blackbox._APART", 0.0)


# ── the state ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("each_note")
def test_a_killed_rank_has_left_where_it_was(tmp_path: Path) -> None:
    def rank() -> None:
        mine = recorder(tmp_path, 1, command=5.0)
        mine.note("forward", epoch=2, step=7)
        mine.note("backward")
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(rank) == -signal.SIGKILL
    found = state(tmp_path, 1)
    assert (found.attempt, found.rank, found.world, found.command) == (3, 1, 2, 5.0)
    assert (found.phase, found.epoch, found.step) == ("backward", 2, 7)
    assert 0 < found.rss < found.limit
    assert abs(found.beat - time.time()) < 600


def test_notes_that_follow_at_once_are_left_to_the_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raygnn.worker.blackbox._APART", 600.0)
    mine = recorder(tmp_path)
    mine._written = time.monotonic() - 601
    mine.note("forward", step=1)
    assert state(tmp_path).phase == "forward"
    mine.note("backward")
    assert state(tmp_path).phase == "forward"
    mine.watch()
    assert state(tmp_path).phase == "backward"
    mine.note("optimizer")
    mine.write("why")
    assert state(tmp_path).phase == "optimizer"
    mine.close()
    assert state(tmp_path).phase == "done"


def test_other_threads_say_nothing(tmp_path: Path) -> None:
    mine = recorder(tmp_path)
    mine.note("forward")
    thread = threading.Thread(target=lambda: mine.note("nonsense"))
    thread.start()
    thread.join()
    mine.watch()
    assert state(tmp_path).phase == "forward"


def test_a_new_start_begins_anew(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.note("forward", epoch=4)
    first.write("why")
    first.close()
    assert state(tmp_path).phase == "done"
    second = recorder(tmp_path, attempt=4)
    found = state(tmp_path)
    assert (found.attempt, found.phase, found.boxed) == (4, "", 0.0)
    second.close()


@pytest.mark.parametrize("what", ["missing", "file", "full"])
def test_without_storage_there_is_no_recorder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    if what == "file":
        logs.write_text("")
    mine = recorder(tmp_path if what == "full" else logs)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    if what == "full":
        monkeypatch.setattr(os, "pwrite", full)
        monkeypatch.setattr("raygnn.worker.blackbox.write_atomic", full)
    mine.note("forward")
    mine.watch()
    mine.write("why", final=True)
    if what != "full":
        mine.await_others(60)
    mine.close()


def test_a_storage_that_is_slow_is_written_by_the_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raygnn.worker.blackbox._SLOW", -1.0)
    mine = recorder(tmp_path)
    mine.note("forward", step=1)
    assert state(tmp_path).phase == ""
    mine.watch()
    assert state(tmp_path).phase == "forward"
    mine.note("backward")
    mine.close()
    assert state(tmp_path).phase == "done"


def test_notes_go_nowhere_without_a_recorder(tmp_path: Path, current: None) -> None:
    blackbox.note("forward")
    blackbox.start(tmp_path, rank=0, world=1)
    blackbox.note("forward", step=3)
    assert state(tmp_path).step == 3


# ── the black box ────────────────────────────────────────────────────────────────────────────


def test_contents_of_the_crash_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "swordfish")
    mine = recorder(tmp_path, 1)
    mine.note("forward", epoch=1, step=2)
    stop = threading.Event()

    def prepare() -> None:
        stop.wait(60)

    thread = threading.Thread(target=prepare, name="raygnn-prefetch")
    thread.start()
    watcher = threading.Thread(target=lambda: mine.write("because"))
    watcher.start()
    while watcher.is_alive():
        time.sleep(0.01)
    stop.set()
    thread.join()
    found = box(tmp_path, 1)
    assert (found["rank"], found["attempt"], found["reason"]) == (1, 3, "because")
    assert (found["phase"], found["step"]) == ("forward", 2)
    assert found["limit"] > found["rss"] > 0
    assert found["oom_kills"] >= 0
    threads = {thread["role"]: thread for thread in found["threads"]}
    frames = threads["prefetch"]["frames"]
    assert "prepare" in {f["function"] for f in frames if f["whose"] == "user"}
    assert frames[0]["whose"] == "library"
    assert __file__ in {f["file"] for f in threads["training"]["frames"] if f["whose"] == "user"}
    text = file_of(tmp_path, 1, ".blackbox.json").read_text()
    assert "swordfish" not in text
    assert state(tmp_path, 1).boxed


@pytest.mark.usefixtures("each_note")
def test_notes_do_not_wait_for_the_crash_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, held = recorder(tmp_path), []

    def acquire() -> None:
        held.append(mine._lock.acquire(timeout=10))
        if held[-1]:
            mine._lock.release()

    def in_another_thread(*_: Any) -> list[Any]:
        thread = threading.Thread(target=acquire)
        thread.start()
        thread.join()
        return []

    monkeypatch.setattr(flight, "stacks", in_another_thread)  # called while the dump is made
    monkeypatch.setattr(os, "fsync", in_another_thread)  # which waits for storage
    mine.write("why")
    assert len(held) > 1
    assert {*held} == {True}


def test_boxes_are_written_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = recorder(tmp_path)
    begun, go = threading.Event(), threading.Event()

    def stacks(*_: Any) -> list[Any]:
        begun.set()
        go.wait(60)
        return []

    monkeypatch.setattr(flight, "stacks", stacks)
    watcher = threading.Thread(target=mine.write, args=("seen",))
    watcher.start()
    assert begun.wait(60)
    last = threading.Thread(target=mine.write, args=("raised",), kwargs={"final": True})
    last.start()
    last.join(0.2)
    go.set()
    watcher.join(60)
    last.join(60)
    assert (box(tmp_path)["reason"], box(tmp_path)["before"]["reason"]) == ("raised", "seen")


def test_the_final_crash_dump_is_not_overwritten(tmp_path: Path) -> None:
    mine = recorder(tmp_path)
    mine.write("first")
    mine.write("raised", final=True)
    mine.write("last")
    assert box(tmp_path)["before"]["reason"] == "first"
    assert box(tmp_path)["reason"] == state(tmp_path).words == "raised"


def test_a_box_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "stacks", lambda *_: ["x" * 3_000_000])
    mine = recorder(tmp_path)
    mine.write("y" * 100_000)
    assert box(tmp_path)["threads"] is None
    assert box(tmp_path)["collectives"] is not None
    assert file_of(tmp_path, 0, ".blackbox.json").stat().st_size < 1_000_000


@pytest.mark.parametrize("taken", [False, True])
def test_a_crash_leaves_a_native_traceback(taken: bool, tmp_path: Path) -> None:
    def rank() -> None:
        faulthandler.enable()
        if taken:  # as Ray's core does when a process joins a cluster
            signal.signal(signal.SIGABRT, lambda *_: None)
        recorder(tmp_path, 1)
        os.abort()

    assert forked(rank) == -signal.SIGABRT
    text = (tmp_path / "rank-1.crash").read_text()
    assert text.startswith("start 3 pid ")
    assert "Fatal Python error: Aborted" in text
    assert "test_blackbox.py" in text
    blackbox.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-1.crash"]


def test_a_good_end_leaves_nothing(tmp_path: Path) -> None:
    mine = recorder(tmp_path)
    mine.close()
    mine.close()  # harmless
    mine.note("more")
    blackbox.tidy(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rays_errors_of_dead_workers_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    cause = RuntimeError("x" * 10_000)
    cause.worker_failures = {1: OSError("gone"), 0: TrainingError("no")}  # type: ignore[attr-defined]
    failures.record_driver(tmp_path, TrainingError("a worker died", rank=1), cause, 2)
    found = json.loads((tmp_path / "logs" / "driver.json").read_bytes())
    assert (found["error"], found["rank"], found["oom_kills"]) == ("a worker died", 1, 2)
    assert found["workers"]["1"] == {"type": "OSError", "text": "gone", "said": False}
    assert found["workers"]["0"]["said"]
    assert len(found["ray"]["text"]) < 10_000
    failures.record_driver(tmp_path / "nowhere", TrainingError("no"), None, 0)
    for kind in (".state", ".crash", ".failure.json", ".blackbox.json"):
        (tmp_path / "logs" / f"rank-0{kind}").touch()
    failures.clear(tmp_path)  # else a diagnosis of the next command would be of this one
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_full_disk_does_not_fail_what_prints(tmp_path: Path) -> None:
    with failures.log_to(Path("/dev/full")):
        print("said")
        logging.getLogger("raygnn").warning("said")


# ── watching, and waiting for witnesses ──────────────────────────────────────────────────────


def test_another_ranks_failure_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "rank-1.failure.json").write_text("of an earlier start")
    mine = recorder(tmp_path)
    (tmp_path / "rank-0.failure.json").write_text("mine")
    (tmp_path / "rank-1.log").write_text("")
    mine.watch()
    assert not state(tmp_path).boxed
    os.utime(tmp_path / "rank-1.failure.json", (1, 1))  # written again
    mine.watch()
    assert box(tmp_path)["reason"] == "rank 1 recorded a failure"
    first = state(tmp_path).boxed
    mine.watch()
    assert state(tmp_path).boxed == first  # once is enough
    (tmp_path / "rank-2.blackbox.json").write_text("{}")
    mine.watch()
    assert box(tmp_path)["reason"].startswith("rank 2")


def test_witnesses_are_awaited(tmp_path: Path) -> None:
    mine, other = recorder(tmp_path), recorder(tmp_path, 1)
    waiting = threading.Thread(target=mine.await_others, args=(60,))
    waiting.start()
    assert mine._is_awaited(1)
    other.write("seen")
    waiting.join(30)
    assert not waiting.is_alive()


def test_the_wait_for_witnesses_ends(tmp_path: Path) -> None:
    mine = recorder(tmp_path)
    mine.await_others(0.2)  # rank 1 has not even begun
    other = recorder(tmp_path, 1)
    mine.await_others(0.2)
    other.close()
    mine.await_others(600)  # it came to its end
    forked(lambda: os._exit(0 if recorder(tmp_path, 1) else 1))
    mine.await_others(600)  # it is dead
    recorder(tmp_path, 0, world=1).await_others(600)


def test_a_stop_is_honoured_despite_errors_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        looks = 0

        def progress(self) -> RankProgress:
            return RankProgress(1, 0, "host", 1)

        def watch(self) -> None:
            self.looks += 1
            if self.looks == 3:
                there.control.stop()
            raise ValueError("of some library")

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(main, "_WATCH", 0.0)
    there: Any = SimpleNamespace(
        run_dir=tmp_path, lost=None, config=load_config(job(tmp_path)), control=Control()
    )
    main._watch(there, Broken())  # type: ignore[arg-type]
    assert ended == [1]
    assert len([r for r in caplog.records if r.exc_info]) == 1


# ── consequences ─────────────────────────────────────────────────────────────────────────────


_LIB, _OURS = "/v/lib/python3.11/site-packages", "/src/raygnn/sampling/exchange.py"


def _failed(what: str, *files: str, **more: Any) -> bool:
    """Return True if a failure is a consequence of another; ``files`` are the trace, innermost
    last."""
    trace = "".join(f'  File "{file}", line 1, in f\n' for file in files)
    more = {"kind": what.partition(":")[0], **more}
    return failures.Failure(1, 0.0, what, trace, **more).is_consequence


def test_failures_that_are_consequences() -> None:
    reset = "Connection reset by peer"
    gloo = f"RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: {reset}"
    assert _failed(gloo, _OURS, f"{_LIB}/torch/distributed/distributed_c10d.py")
    assert _failed(gloo, _OURS, "/home/me/net.py")  # it waits for an earlier collective
    assert _failed(f"DistNetworkError: {reset}", "/home/me/net.py")
    assert _failed(f"RuntimeError: {reset}", _OURS, f"{_LIB}/torch/autograd/graph.py")
    assert _failed(f"ConnectionResetError: {reset}", _OURS)
    assert _failed("rank 1 could not prepare its batch: KeyError: 3", _OURS, kind="TrainingError")


def test_the_users_own_connections_are_causes() -> None:
    reset = "Connection reset by peer"
    user, http = "/home/me/data.py", f"{_LIB}/http/client.py"
    for kind in ("ConnectionResetError", "RuntimeError", "OSError", "TimeoutError"):
        assert not _failed(f"{kind}: {reset}", _OURS, user, http)
    assert not _failed(f"OSError: {reset}", _OURS, http)
    assert not _failed(f"it cannot be read: {reset}", _OURS, kind="DataError", exit_code=2)


# ── collectives ──────────────────────────────────────────────────────────────────────────────


def _one_waits(exchange: Exchange, logs: Path) -> tuple[list[dict[str, Any]], float, str | None]:
    """Let rank 0 wait in a collective that rank 1 joins only when rank 0 has polled."""
    rank = exchange.world.rank
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        mine = recorder(logs, timeout=0.5)
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
        work = dist.all_reduce(torch.ones(5, 2), async_op=True)
        time.sleep(0.6)
        found, waited = flight.collectives(), flight.longest_wait()
        mine.watch()
        (logs / "go").touch()
        work.wait()
        mine.close()
        return found, waited, box(logs)["reason"]
    dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    while not (logs / "go").exists():
        time.sleep(0.05)
    dist.all_reduce(torch.ones(5, 2))
    return flight.collectives(), flight.longest_wait(), None


def test_a_collective_that_waits_is_seen(tmp_path: Path) -> None:
    (waits, waited, reason), (done, none, _) = run_ranks(2, _one_waits, tmp_path, fresh=True)
    assert waited > 0.5
    assert reason is not None
    assert reason.startswith("a collective has waited")
    last = waits[-1]
    assert (last["op"], last["seq"], last["pending"]) == ("gloo:all_reduce", 3, True)
    assert last["inputs"] == {"sizes": [[5, 2]], "dtypes": ["Float"]}
    assert (last["at"]["function"], last["at"]["file"]) == ("_one_waits", __file__)
    assert [e["op"].partition(":")[2] for e in waits] == ["all_reduce", "all_gather", "all_reduce"]
    assert none < waited
    # the last may just have come to its end
    assert not any(entry["pending"] for entry in [*waits[:-1], *done[:-1]])
    json.dumps([waits, done])


def test_without_collectives_there_are_none() -> None:
    assert flight.longest_wait() == 0.0
    assert flight.collectives() == []


# ── parts ────────────────────────────────────────────────────────────────────────────────────


def test_frames_are_attributed_to_user_raygnn_or_library() -> None:
    assert whose_path(__file__) == "user"
    assert whose_path(blackbox.__file__) == "raygnn"
    assert whose_path(torch.__file__) == "library"
    assert whose_path(threading.__file__) == "library"
    assert whose_path("<frozen x>") == "library"
    assert whose_path(torch.__file__, ("/torch/__init__.py",)) == "user"


def test_memory_is_known_here() -> None:
    rss, used, limit = memory_usage()
    assert 0 < rss < limit
    assert 0 < used < limit
    assert oom_kills() >= 0


@dataclass(frozen=True)
class _Batch:
    x: dict[str, Tensor]
    names: list[str]
    epoch: int
    step: int


class _StateReader(pl.LightningModule):
    def __init__(self, logs: Path):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.clock, self.window = StepClock(), LossWindow()
        self.logs = logs
        self.seen: list[tuple[str, int | None, int | None]] = []

    def look(self) -> None:
        now = state(self.logs)
        self.seen.append((now.phase, now.epoch, now.step))

    def training_step(self, batch: _Batch, batch_idx: int) -> Tensor:
        self.window.steps = 1
        self.look()
        return self.layer(batch.x["paper"]).sum()

    def backward(self, loss: Tensor) -> None:
        self.look()
        loss.backward()

    def transfer_batch_to_device(self, batch: _Batch, *_: Any) -> _Batch:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.look()


class _Look(pl.Callback):
    """A callback that polls between two other ones."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(module, _StateReader)
        module.look()


@pytest.mark.usefixtures("each_note")
def test_the_phases_of_a_step(tmp_path: Path, current: None) -> None:
    blackbox.start(tmp_path, rank=0, world=1)
    net = _StateReader(tmp_path)
    given: Any = SimpleNamespace(config=load_config(job(tmp_path)), started=0.0)
    unused: Any = None
    records = Records(Exchange(World(0, 1)), [], unused, lambda: (0, 0), lambda: 0, given)
    batches = [_Batch({"paper": torch.ones(3, 4)}, [], 5, step) for step in (7, 8)]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[records, _Look(), Closing(), _Look()],
    )  # fmt: skip
    trainer.fit(net, train_dataloaders=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert net.seen == [
        (phase, 5, step)
        for step in (7, 8)
        for phase in ("forward", "backward", "optimizer", "between", "batch")
    ]
    assert state(tmp_path).phase == "between"
