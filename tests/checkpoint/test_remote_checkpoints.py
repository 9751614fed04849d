"""Checkpoints are uploaded beside training; the object store is a directory here."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.checkpoint import store as checkpoint
from raygnn.checkpoint.learned_rows import write_rows
from raygnn.checkpoint.remote_checkpoints import Courier, RemoteCheckpoints
from raygnn.config.places import Uri
from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.runs.run_directory import EVENTS, Events
from raygnn.storage.remote import RemotePath
from raygnn.worker.control import Control
from raygnn.worker.rank import Rank
from tests.checkpoint.test_saving import save, saver
from tests.support.small_jobs import JobFactory, about, until


def write(directory: Path, config: Config, *steps: int) -> None:
    for step in steps:
        checkpoint.write(directory, {"global_step": step}, step, 9, about(config))


def remote(tmp_path: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(Uri(f"file://{tmp_path}/there"))


def courier_to(tmp_path: Path, sending: Callable[[bool], None] = lambda busy: None) -> Courier:
    return Courier(remote(tmp_path), 9, Events(tmp_path / EVENTS), sending)


def test_errors_of_the_store_and_of_the_disk(make_job: JobFactory, tmp_path: Path) -> None:
    """A local disk that fails is not the store's fault."""
    here, there = tmp_path / "here", remote(tmp_path)
    write(here, make_job(), 1)
    there.send(here / "step-0000000001", keep=2)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        there.fetch("step-0000000001", tmp_path / "file")
    with pytest.raises(DataError, match="cannot be"):
        RemoteCheckpoints(Uri(f"file://{tmp_path}/file")).send(here / "step-0000000001", keep=2)


def test_a_damaged_checkpoint_is_reported_in_the_store(
    make_job: JobFactory, tmp_path: Path
) -> None:
    """The copy on the node is no place to restore anything."""
    here, name = tmp_path / "here", "step-0000000001"
    write(here, make_job(), 1)
    remote(tmp_path).send(here / name, keep=2)
    (state,) = tmp_path.rglob(f"there/**/{name}/state.ckpt")
    state.write_bytes(bytes(state.stat().st_size))
    rank = object.__new__(Rank)
    rank.place = remote(tmp_path)
    with pytest.raises(DataError, match=r"state\.ckpt") as caught:
        rank._fetch(tmp_path / "node" / name)
    assert caught.value.where == f"{rank.place}/{name}"


def test_a_store_that_hangs_holds_up_nothing(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, sent, send = threading.Event(), [], RemoteCheckpoints.send

    def held(self: RemoteCheckpoints, directory: Path, keep: int, name: str, *args: Any) -> None:
        assert go.wait(30)
        sent.append(name[-1])
        send(self, directory, keep, name, *args)

    monkeypatch.setattr(RemoteCheckpoints, "send", held)
    here, sending = tmp_path / "here", [False]
    write(here, make_job(), 1, 2, 3)
    courier = courier_to(tmp_path, sending.append)
    for step in (1, 2, 3):
        courier.send(here / f"step-{step:010d}")
        time.sleep(0.1)
    courier.finish(0.1)
    assert "take longer than 0.1 s" in (tmp_path / EVENTS).read_text()
    assert sending[-1]
    go.set()
    courier.finish(30)
    assert sent == ["1", "3"]  # the newest of those that waited
    assert not sending[-1]


def test_a_checkpoint_that_is_replaced_before_it_is_sent(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the store itself refuses is reported."""
    courier = courier_to(tmp_path)
    courier.send(tmp_path / "here" / "step-0000000001")
    courier.finish(30)
    assert not (tmp_path / EVENTS).exists()

    def fail(self: RemoteCheckpoints, *args: Any) -> None:
        shutil.rmtree(tmp_path / "here")
        raise DataError("away")

    monkeypatch.setattr(RemoteCheckpoints, "send", fail)
    write(tmp_path / "here", make_job(), 2)
    courier.send(tmp_path / "here" / "step-0000000002")
    courier.finish(30)
    assert "step-0000000002 is not in" in (tmp_path / EVENTS).read_text()


def test_a_checkpoint_that_is_removed_while_it_is_copied(tmp_path: Path) -> None:
    checkpoint_dir = tmp_path / "here" / "step-0000000001"
    checkpoint_dir.mkdir(parents=True)
    (checkpoint_dir / "state.ckpt").touch()  # its manifest was removed already
    remove = partial(shutil.rmtree, checkpoint_dir)
    events = Events(tmp_path / EVENTS)
    courier = Courier(remote(tmp_path), 9, events, lambda busy: None, before=remove)
    courier.send(checkpoint_dir)
    courier.finish(30)
    assert not checkpoint_dir.exists()
    assert not (tmp_path / EVENTS).exists()


def test_a_truncated_file_in_the_store_is_uploaded_again(
    make_job: JobFactory, tmp_path: Path
) -> None:
    config, here, there = make_job(), tmp_path / "here", remote(tmp_path)
    draft = checkpoint.draft_of(here, 1)
    draft.mkdir(parents=True)
    row = write_rows(draft / "rows-0-0.bin", "n", np.arange(3), {"row": np.ones((3, 2), "f4")})
    files = checkpoint.RowFiles(dim=2, steps=1, files=(row,))
    checkpoint.write(here, {"global_step": 1}, 1, 9, about(config), rows=files)
    name = "step-0000000001"
    (tmp_path / "there" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "there" / "checkpoints" / name / row.name).write_bytes(b"cut")
    there.send(here / name, keep=1)
    checkpoint.judge(there.fetch(name, tmp_path / "other"), config)


def test_a_local_file_that_cannot_be_read_is_no_error_of_the_store(tmp_path: Path) -> None:
    place = RemotePath.of(Uri(f"file://{tmp_path}/there"))
    with pytest.raises(OSError, match="Input/output error"):
        (place / "file").upload(Path("/proc/self/mem"))  # nothing can be read at its start
    (tmp_path / "directory").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        RemotePath.of(Uri(f"file://{tmp_path}/directory")).write(b"x")


def test_an_outage_is_reported_once_and_fails_no_checkpoint(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raygnn.checkpoint.remote_checkpoints._AGAIN", 0.1)
    away, tried, send = threading.Event(), [], RemoteCheckpoints.send
    away.set()

    def held(self: RemoteCheckpoints, directory: Path, keep: int, name: str, *args: Any) -> None:
        tried.append(name)
        if away.is_set():
            raise DataError("away")
        send(self, directory, keep, name, *args)

    monkeypatch.setattr(RemoteCheckpoints, "send", held)
    control = Control()
    there = tmp_path / "here"
    saving = saver(there, requests=control, keep=2, courier=courier_to(tmp_path))
    request = control.ask_save()
    for step in (7, 8, 9):
        save(saving, step)
        until(lambda step=step: f"step-{step:010d}" in tried)
    away.clear()
    saving.finish_uploads(30)
    assert saving.counts == {"saved": 3, "failed": 0, "skipped": 0}
    assert control.snapshot().answers[request]
    lost, again = (tmp_path / EVENTS).read_text().splitlines()
    assert json.loads(lost)["text"].startswith("step-0000000007 is not in ")
    assert json.loads(again)["text"].startswith("step-0000000009 is in ")
    assert remote(tmp_path).names() == ["step-0000000009"]
