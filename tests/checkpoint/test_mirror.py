"""Checkpoints in a second place, which pyarrow.fs opens."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raygnn.checkpoint import store as checkpoint
from raygnn.checkpoint.remote_checkpoints import Courier, RemoteCheckpoints
from raygnn.checkpoint.writer import Saver
from raygnn.config.places import Uri
from raygnn.config.schema import Config
from raygnn.driver.resume import find_start
from raygnn.errors import ConfigError, DataError, InputError
from raygnn.runs.display import NullDisplay
from raygnn.runs.run_directory import EVENTS, Events, RunDir
from raygnn.worker.control import Control, SaveRequest
from tests.small_jobs import JobFactory, about, train_on_ranks


def write(directory: Path, config: Config, *steps: int) -> None:
    for step in steps:
        checkpoint.write(directory, {"global_step": step}, step, 9, about(config))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["path", "uri"])
def test_there_and_back(kind: str, make_job: JobFactory, tmp_path: Path) -> None:
    config, here, there = make_job(), tmp_path / "here", tmp_path / "there"
    mirror = RemoteCheckpoints(there if kind == "path" else Uri(f"file://{there}"), "test")
    assert mirror.names() == []
    write(here, config, 1, 2, 3, 4)
    for step in (4, 1, 2, 3):  # the run went back, and those after it are not touched
        mirror.send(here / f"step-{step:010d}", keep=2)
    assert mirror.names() == [f"step-{step:010d}" for step in (2, 3, 4)]
    (here / "step-0000000003" / "state.ckpt").write_bytes(b"damaged")
    found = checkpoint.judge(mirror.fetch("step-0000000003", here), config)
    assert isinstance(found, checkpoint.Checkpoint)
    assert torch.load(found.state) == {"global_step": 3}
    assert "passed-over-step-0000000003" in names(here)
    # without a manifest it is none
    (there / "test" / "step-0000000003" / "manifest.json").unlink()
    assert mirror.names() == ["step-0000000002", "step-0000000004"]
    mirror.clear()
    assert mirror.names() == []


def test_its_own_errors_and_the_disks(make_job: JobFactory, tmp_path: Path) -> None:
    """A local disk that fails is not the mirror's fault."""
    here, mirror = tmp_path / "here", RemoteCheckpoints(tmp_path / "there", "test")
    write(here, make_job(), 1)
    mirror.send(here / "step-0000000001", keep=2)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        mirror.fetch("step-0000000001", tmp_path / "file")
    for place in (tmp_path, Uri(f"file://{tmp_path}")):
        with pytest.raises(ConfigError, match="the run's own checkpoints"):
            RemoteCheckpoints(place, "here").check(here)
    mirror.check(here)
    with pytest.raises(DataError, match="cannot be"):
        RemoteCheckpoints(tmp_path / "file", "test").send(here / "step-0000000001", keep=2)


def test_a_mirror_that_hangs_holds_up_nothing(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, sent, send = threading.Event(), [], RemoteCheckpoints.send

    def held(self: RemoteCheckpoints, checkpoint: Path, *args: Any) -> None:
        assert go.wait(30)
        sent.append(checkpoint.name[-1])
        send(self, checkpoint, *args)

    monkeypatch.setattr(RemoteCheckpoints, "send", held)
    here, sending = tmp_path / "here", [False]
    write(here, make_job(), 1, 2, 3)
    courier = Courier(
        RemoteCheckpoints(tmp_path / "there", "t"), 9, Events(tmp_path / EVENTS), sending.append
    )
    for step in (1, 2, 3):
        courier.send(here / f"step-{step:010d}")
        time.sleep(0.1)
    courier.finish(0.1)
    assert "takes more than 0.1 s" in (tmp_path / EVENTS).read_text()
    assert sending[-1]
    go.set()
    courier.finish(30)
    assert sent == ["1", "3"]  # the newest of those that waited
    assert not sending[-1]


@pytest.mark.parametrize(
    ("error", "is_told"), [(DataError("away"), True), (OSError("gone"), False)]
)
def test_a_checkpoint_is_replaced_while_it_is_sent(
    error: Exception,
    is_told: bool,
    make_job: JobFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what the place itself refuses is worth a word."""

    def fail(self: RemoteCheckpoints, checkpoint: Path, *args: Any) -> None:
        shutil.rmtree(checkpoint)
        raise error

    monkeypatch.setattr(RemoteCheckpoints, "send", fail)
    write(tmp_path / "here", make_job(), 1)
    mirror = RemoteCheckpoints(tmp_path / "there", "t")
    courier = Courier(mirror, 9, Events(tmp_path / EVENTS), lambda busy: None)
    courier.send(tmp_path / "here" / "step-0000000001")
    courier.finish(30)
    assert (tmp_path / EVENTS).exists() == is_told


def test_what_is_secret_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow.fs import FileSystem

    secret = "s3://AKIDKEY:s3cret@bucket/some?region=eu"

    class Fails:
        @staticmethod
        def from_uri(text: str) -> Any:
            raise OSError(f"no access to {text} with s3cret")

    monkeypatch.setattr("pyarrow.fs.FileSystem", Fails)
    assert FileSystem is not Fails
    with pytest.raises(DataError) as caught:
        RemoteCheckpoints(Uri(secret), "test").names()
    assert "s3cret" not in str(caught.value)
    assert "AKIDKEY" not in str(caught.value)
    assert "s3://***@bucket/some" in str(caught.value)


def test_a_mirror_that_is_away_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "raygnn.checkpoint.remote_checkpoints.files_of", lambda _: []
    )  # they have no state
    (tmp_path / "there").write_text("no directory")
    events = Events(tmp_path / EVENTS)
    courier = Courier(RemoteCheckpoints(tmp_path / "there", "test"), 2, events, lambda busy: None)
    control = Control()
    saving = Saver(
        tmp_path / "here",
        control,
        keep=2,
        about={},
        events=events,
        patience=30.0,
        courier=courier,
    )
    request = SaveRequest(control)
    for step in (7, 8, 9):
        if step == 9:
            (tmp_path / "there").unlink()
        saving.save_checkpoint({"global_step": step}, "")
        saving.finish(30)
        saving.finish_sending(30)
    assert (saving.saved, saving.failed) == (3, 0)
    assert request.answer(control.snapshot()) is True
    away, again = (tmp_path / EVENTS).read_text().splitlines()
    assert json.loads(away)["text"].startswith("step-0000000007 is not in ")
    assert json.loads(again)["text"].startswith("step-0000000009 is in ")


def test_a_machine_that_has_never_seen_the_run(make_job: JobFactory, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "fault": {"checkpoint_every": 2, "mirror": str(tmp_path / "there")},
        "partition": {"path": str(tmp_path / "parts")},
    }
    whole = train_on_ranks(make_job(name="whole", **options, train={"epochs": 3}))
    known = whole.metrics.set_index("step")["train/loss"].dropna().to_dict()

    with pytest.raises(InputError, match="neither here nor in the mirror"):
        train_on_ranks(make_job(**options), resume=True)
    part = train_on_ranks(make_job(**options, train={"epochs": 3, "max_steps": 6}))
    shutil.rmtree(part.path)
    with pytest.raises(InputError, match=r"no checkpoint can be used.*model.hidden was 16 and is"):
        train_on_ranks(make_job(**options, model={"hidden": 8}), resume=True)
    assert not part.path.exists()
    with pytest.raises(InputError, match="the mirror has checkpoints of a run of this name"):
        train_on_ranks(make_job(**options))
    newest = tmp_path / "there" / "test" / "step-0000000006" / "state.ckpt"
    whole_one = newest.read_bytes()
    newest.write_bytes(whole_one[:-1])  # so that the one before is taken
    older = find_start(make_job(**options), RunDir(part.path, "new"), 2, NullDisplay(), resume=True)
    assert older.checkpoint is not None
    assert older.checkpoint.step == 4
    assert older.rejected[0].startswith("step-0000000006 in ")
    newest.write_bytes(whole_one)
    newer = find_start(make_job(**options), RunDir(part.path, "new"), 2, NullDisplay(), resume=True)
    assert newer.checkpoint is not None
    assert newer.checkpoint.step == 6  # though that of step 4 is here by now
    shutil.rmtree(part.path)
    resumed = train_on_ranks(make_job(**options, train={"epochs": 3}), resume=True)
    losses = resumed.metrics.set_index("step")["train/loss"].dropna().to_dict()
    assert losses == {step: loss for step, loss in known.items() if step > 6}
    assert resumed.summary["metrics"] == whole.summary["metrics"]
