"""Checkpoints are written beside training, on request, and are left out where there is no room."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from raygnn.checkpoint import hashed_files, lifecycle, store, weights
from raygnn.checkpoint.learned_rows import write_rows
from raygnn.checkpoint.lifecycle import Checkpoints
from raygnn.checkpoint.store import RowFiles
from raygnn.config.load import load_config
from raygnn.runs.run_directory import EVENTS, Events
from raygnn.sampling.exchange import Exchange, World
from raygnn.worker.comm.guard import Guard
from raygnn.worker.control import Control
from tests.support.small_jobs import JobFactory, about, job, train_on_ranks

CONFIG = load_config(job(Path("runs")))


def saver(directory: Path, requests: Control | None = None, **options: Any) -> Checkpoints:
    """Return the checkpoint writer of a single rank."""
    options = {"keep": 9, "patience": 30.0, "every": 1, "last": 99, **options}
    options.setdefault("exchange", Exchange(World(0, 1)))
    return Checkpoints(
        directory,
        requests=requests or Control(),
        about=about(CONFIG),
        events=Events(directory / EVENTS),
        **options,
    )


def begin(saving: Checkpoints, step: int, weights: torch.Tensor | None = None) -> None:
    """Begin to write a checkpoint."""
    trainer: Any = SimpleNamespace(global_step=-1)
    trainer.save_checkpoint = lambda path: saving.plugin.save_checkpoint(state(step, weights), path)
    saving.on_train_start(trainer, Mock())
    trainer.global_step = step
    saving.on_train_batch_end(trainer)


def save(saving: Checkpoints, step: int, weights: torch.Tensor | None = None) -> None:
    """Write a checkpoint, or fail to."""
    begin(saving, step, weights)
    assert wait(saving, 30)


def wait(saving: Checkpoints, seconds: float) -> bool:
    """Wait until the writer is idle."""
    assert saving._pending.write is not None
    return saving._pending.write.wait(seconds)


def state(step: int, weights: torch.Tensor | None = None) -> dict[str, Any]:
    return {
        "global_step": step,
        "state_dict": {"w": torch.zeros(3) if weights is None else weights},
    }


def told(directory: Path) -> list[str]:
    path = directory / EVENTS
    return [json.loads(s)["text"] for s in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A separate, small file system."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(directory: Path) -> Path:
    """Fill the file system."""
    path = directory / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0" * 4096):
            pass
    return path


def test_a_checkpoint_has_the_weights_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues and changes the weights before they are written."""
    go, write = threading.Event(), store.write

    def held(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    monkeypatch.setattr(store, "write", held)
    weights, saving = torch.arange(4.0), saver(tmp_path)
    begin(saving, 1, weights)
    weights.add_(1)
    assert store.newest(tmp_path) == ""
    go.set()
    assert wait(saving, 30)
    found, _ = store.find(tmp_path, CONFIG)
    assert found is not None
    assert torch.load(found.state)["state_dict"]["w"].tolist() == [0, 1, 2, 3]


def test_a_start_that_was_overtaken_writes_nothing(tmp_path: Path) -> None:
    """The rank was suspended or disconnected while the run continued without it."""
    save(saver(tmp_path), 5)
    save(saver(tmp_path, is_current=lambda: False), 3)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-0000000005"]
    assert "a later start of the run has taken over" in told(tmp_path)[0]


def test_those_that_were_put_aside_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = saver(tmp_path)
    for step in (3, 5):
        save(saving, step)
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if Path(source).name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    save(saving, 3)
    assert saving.counts["failed"] == 1
    there = sorted(path.name for path in tmp_path.glob("*step*"))
    assert there == ["step-0000000003", "step-0000000005"]


def test_files_are_synced_before_the_checkpoint_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    def noted_rename(source: Any, target: Any) -> None:
        rename(source, target)
        done.append("rename")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    store.write(tmp_path, state(1), 1, 9, about(CONFIG))
    renamed = done.index("rename")
    assert done[renamed - 1] == ".step-0000000001.tmp"
    assert "state.ckpt" in done[:renamed]
    assert any("manifest.json" in name for name in done[:renamed])
    assert tmp_path.name in done[renamed:]


def test_weights_on_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=200k") as disk:
        with pytest.raises(OSError, match="No space left"):
            weights.save(disk, torch.nn.Linear(300, 300), {"data": ""})
        assert list(disk.iterdir()) == []


def test_weights_at_the_second_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned rows are moved once; an attempt that fails afterwards must not lose them."""
    draft = weights.rows_draft(tmp_path)
    draft.mkdir()
    rows = np.ones((3, 2), np.float32)
    file = write_rows(draft / "rows-0-0.bin", "a", np.arange(3), {"row": rows})
    files, write = RowFiles(dim=2, steps=1, files=(file,)), weights.write_json
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(weights, "write_json", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        weights.save(tmp_path, torch.nn.Linear(2, 2), {"data": ""}, files)
    monkeypatch.setattr(weights, "write_json", write)
    weights.save(tmp_path, torch.nn.Linear(2, 2), {"data": ""}, files)
    assert weights.find(tmp_path).rows == files
    assert not draft.exists()


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_full_disk_skips_a_checkpoint(how: str, tmp_path: Path) -> None:
    """Nothing partial remains, no existing file is lost, and the next checkpoint is tried."""
    with mounted(tmp_path / "small", "size=1m") as disk:
        large = torch.zeros(100_000)
        saving = saver(disk, keep=1)
        save(saving, 1, large)
        filler = fill(disk) if how == "full" else None
        if filler is None:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        save(saving, 2, large)
        assert saving.counts == {"saved": 1, "failed": 1, "skipped": 0}
        assert sorted(p.name for p in disk.glob("*step*")) == ["step-0000000001"]
        found, rejected = store.find(disk, CONFIG)
        assert found is not None
        assert (found.step, rejected) == (1, [])
        if filler is None:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        else:
            filler.unlink()
        save(saving, 3, large)
        assert sorted(p.name for p in disk.glob("*step*")) == ["step-0000000003"]
        Events.flush(saving.events)
        reason = {
            "full": "the disk or the quota is full: No space left on device (free space",
            "read-only": "it cannot be written: Read-only file system (make it writable",
        }[how]
        said, again = told(disk)
        assert again == "checkpoints are written again, from step 3 on"
        assert said.startswith(f"the checkpoint of step 2 was not written: {disk}: {reason}")
        assert said.endswith(
            "; training continues, and a failure now would take it back to step-0000000001"
        )


def test_the_last_one_is_tried_again(tmp_path: Path) -> None:
    """No later checkpoint would replace it."""
    with mounted(tmp_path / "small", "size=1m") as disk:
        large = torch.zeros(100_000)
        filler = fill(disk)
        saving = saver(disk, patience=0.2, last=1)
        save(saving, 1, large)
        assert saving.counts == {"saved": 0, "failed": 1, "skipped": 0}
        control = Control()
        saving = saver(disk, control, patience=60.0, last=1)
        request = control.ask_save()
        begin(saving, 1, large)
        assert not wait(saving, 0.5)
        assert request not in control.snapshot().answers
        filler.unlink()
        assert wait(saving, 30)
        assert saving.counts == {"saved": 1, "failed": 0, "skipped": 0}
        assert control.snapshot().answers[request]
        assert store.newest(disk) == "step-0000000001"
        saving.events.flush()
        # the first one's message waited in its process
        assert not [line for line in told(disk) if "training continues" in line]


def test_the_last_one_waits_for_its_directory(tmp_path: Path) -> None:
    """The storage is unavailable when the checkpoint is due, and returns in time."""
    parent = tmp_path / "mount"
    saving = saver(parent / "checkpoints", patience=60.0, last=1)
    saving.events = Events(tmp_path / EVENTS)
    begin(saving, 1)
    assert not wait(saving, 0.5)
    parent.mkdir()
    assert wait(saving, 30)
    assert store.newest(parent / "checkpoints") == "step-0000000001"


def test_a_failed_last_checkpoint_is_reported(tmp_path: Path) -> None:
    control = Control()
    saving = saver(tmp_path / "gone" / "checkpoints", control, patience=0.0, last=4)
    saving.events = Events(tmp_path / EVENTS)
    request = control.ask_save()
    save(saving, 4)
    (said,) = told(tmp_path)
    assert said.startswith("the checkpoint of step 4 was not written: ")
    assert "it cannot be written: No such file or directory (make it writable" in said
    assert said.endswith("; it was the last one, so --resume would start from the beginning")
    assert control.snapshot().answers[request] is False


def _requests(trainer: Any) -> Any:
    (found,) = (each.requests for each in trainer.callbacks if isinstance(each, Checkpoints))
    return found


def test_a_checkpoint_on_request(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_job(fault={"checkpoint_every": "1h", "keep": 9})
    begin = Guard.on_train_batch_start

    def ask(self: Guard, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 0:
            for request in ("a", "b"):
                _requests(trainer).ask_save(request)
        begin(self, trainer, *args)

    monkeypatch.setattr(Guard, "on_train_batch_start", ask)
    monkeypatch.setattr(lifecycle, "_POLL", 0.0)  # after each step
    write = store.write

    def slow(*args: Any) -> None:  # so that later polls see the request
        time.sleep(0.5)
        write(*args)

    monkeypatch.setattr(store, "write", slow)
    answer = Control.answer_saves

    def note(self: Control, requests: Any, *, saved: bool) -> None:
        answer(self, requests, saved=saved)
        if requests:
            (config.run_dir / "answered").write_text(f"{sorted(requests)} {saved}")

    monkeypatch.setattr(Control, "answer_saves", note)
    run = train_on_ranks(config)
    assert [p.name[-1] for p in sorted(run.path.glob("checkpoints/step-*"))] == ["4", "8"]
    assert (run.path / "answered").read_text() == "['a', 'b'] True"
    assert run.summary["checkpoints"] == {"saved": 2, "failed": 0, "skipped": 0}


@pytest.mark.parametrize("every", ["1h", 1, 4])
def test_no_step_follows_the_last_checkpoint(
    every: int | str, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step after that checkpoint would be lost: the driver ends the ranks once it is written."""
    config = make_job(fault={"checkpoint_every": every})
    begin, meet = Guard.on_train_batch_start, Checkpoints._meet

    def ask(self: Guard, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 0:
            _requests(trainer).ask_save("a", last=True)
        begin(self, trainer, *args)

    def end(self: Checkpoints, *flags: int) -> list[int]:
        if self._step > 3 and (config.run_dir / "answered").exists():
            raise RuntimeError(f"the driver ended it at step {self._step}")
        return meet(self, *flags)

    def note(self: Control, requests: Any, *, saved: bool) -> None:
        if requests:
            (config.run_dir / "answered").write_text(str(saved))

    monkeypatch.setattr(Guard, "on_train_batch_start", ask)
    monkeypatch.setattr(Checkpoints, "_meet", end)
    monkeypatch.setattr(Control, "answer_saves", note)
    monkeypatch.setattr(lifecycle, "_POLL", 0.0)  # after each step
    with pytest.raises(RuntimeError, match="ended it at step 4"):
        train_on_ranks(config)
    written = sorted(p.name[-1] for p in config.run_dir.glob("checkpoints/step-*"))
    assert written == (["2", "3", "4"] if every == 1 else ["4"])  # three are kept


def test_a_disk_that_is_full_for_a_while(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "train": {"epochs": 3},
        "fault": {"checkpoint_every": 1, "keep": 99},
        "staging": {"path": str(tmp_path / "stage")},
        "partition": {"path": str(tmp_path / "parts")},
    }
    whole = train_on_ranks(make_job(**options))
    begin = Guard.on_train_batch_start

    with mounted(tmp_path / "small", "size=4m") as disk:

        def disturb(self: Guard, trainer: Any, *args: Any) -> None:
            if trainer.global_rank == 0 and trainer.global_step == 3:
                fill(disk)
            if trainer.global_rank == 0 and trainer.global_step == 8:
                (disk / "filler").unlink(missing_ok=True)
            begin(self, trainer, *args)

        monkeypatch.setattr(Guard, "on_train_batch_start", disturb)
        run = train_on_ranks(load_config(job(disk, **options)))
        new, old = (r.metrics.set_index("step")["train/loss"].dropna() for r in (run, whole))
        assert new.to_dict() == old.to_dict()
        assert run.summary["metrics"] == whole.summary["metrics"]
        counts = run.summary["checkpoints"]
        assert 3 <= counts["failed"] <= 6  # step 3's may be in progress when the disk is filled
        assert counts["failed"] + counts["saved"] == 12
        steps = {int(p.name[-2:]) for p in run.path.glob("checkpoints/step-*")}
        assert {1, 2, 12} <= steps
        assert len(steps) == counts["saved"]
        assert "No space left on device" in told(run.path / "logs")[0]


class OnGpu(torch.Tensor):
    """A tensor that torch regards as on a GPU, and that can only be copied to the CPU."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, dtype=here.dtype, device="cuda:0"
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].here)
        assert func is torch.ops.aten._to_copy.default
        assert kwargs["device"] == torch.device("cpu")
        return args[0].here.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("a tensor of a GPU is written as it is")


def test_files_hold_tensors_of_a_cpu(tmp_path: Path) -> None:
    weight = torch.randn(2, 3)
    there = OnGpu(weight)
    assert there.is_cuda
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight = torch.nn.Parameter(there)
    weights.save(tmp_path, model, {"data": ""})
    save(saver(tmp_path), 3, there)
    written = torch.load(tmp_path / weights.FILE, weights_only=True)["weight"]
    resumed = torch.load(store.state_at(tmp_path, 3), weights_only=True)["state_dict"]["w"]
    hashed_files.save_tensors({"rows": [there]}, tmp_path / "nested.pt")
    (nested,) = torch.load(tmp_path / "nested.pt", weights_only=True)["rows"]
    for found in (written, resumed, nested):
        assert type(found) is torch.Tensor
        assert found.device.type == "cpu"
        assert torch.equal(found, weight)
