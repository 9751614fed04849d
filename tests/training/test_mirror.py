"""Checkpoints in a second place, which pyarrow.fs opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from raygnn.config.resume import fixed
from raygnn.config.schema import Config
from raygnn.config.uri import Uri
from raygnn.errors import DataError, InputError
from raygnn.runs.events import EVENTS, Events
from raygnn.training import checkpoint
from raygnn.training.job import SAVE
from raygnn.training.mirror import Mirror
from raygnn.training.saving import Saver
from tests.training.conftest import JobFactory, train_on_ranks


def write(directory: Path, config: Config, *steps: int) -> None:
    about = {
        "config": fixed(config.to_dict()),
        "data": "d",
        "global_batch": 128,
        "batch_size": 64,
        "workers": 2,
    }
    for step in steps:
        checkpoint.write(directory, {"global_step": step}, step, 9, about)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["path", "uri"])
def test_there_and_back(kind: str, make_job: JobFactory, tmp_path: Path) -> None:
    config, here, there = make_job(), tmp_path / "here", tmp_path / "there"
    mirror = Mirror(there if kind == "path" else Uri(f"file://{there}"), "test")
    assert mirror.fetch(here) is None
    write(here, config, 1, 2, 3)
    for step in (1, 2, 3):
        mirror.send(here / f"step-{step:010d}", keep=2)
    assert names(there / "test") == ["step-0000000002", "step-0000000003"]
    assert mirror.fetch(here) is None  # what is there is no newer
    shutil.rmtree(here)
    assert mirror.fetch(here) == "step-0000000003"
    found, rejected = checkpoint.find(here, config)
    assert found is not None
    assert (found.step, rejected) == (3, [])
    assert torch.load(found.state) == {"global_step": 3}
    # the run went back, and on from there
    write(here, config, 2)
    mirror.send(here / "step-0000000002", keep=2)
    assert names(there / "test") == ["step-0000000002"]
    # without a manifest it is none
    (there / "test" / "step-0000000002" / "manifest.json").unlink()
    shutil.rmtree(here)
    assert mirror.fetch(here) is None


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
        Mirror(Uri(secret), "test").fetch(tmp_path)
    assert "s3cret" not in str(caught.value)
    assert "AKIDKEY" not in str(caught.value)
    assert "s3://***@bucket/some/test" in str(caught.value)


def test_a_mirror_that_is_away_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("no directory")
    saving = Saver(
        tmp_path / "here",
        tmp_path / SAVE,
        keep=2,
        about={},
        events=Events(tmp_path / EVENTS),
        patience=30.0,
        mirror=Mirror(tmp_path / "there", "test"),
    )
    (tmp_path / SAVE).touch()
    saving.save_checkpoint({"global_step": 7}, "")
    assert saving.wait(30)
    assert (saving.saved, saving.failed) == (1, 0)
    assert not (tmp_path / SAVE).exists()
    (line,) = (tmp_path / EVENTS).read_text().splitlines()
    assert json.loads(line)["text"].startswith("the checkpoint of step 7 is not in ")


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
    resumed = train_on_ranks(make_job(**options, train={"epochs": 3}), resume=True)
    losses = resumed.metrics.set_index("step")["train/loss"].dropna().to_dict()
    assert losses == {step: loss for step, loss in known.items() if step > 6}
    assert resumed.summary["metrics"] == whole.summary["metrics"]
