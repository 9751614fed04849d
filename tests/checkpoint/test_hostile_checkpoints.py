"""Checkpoints made to do harm: none is loaded, whoever has signed it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raygnn.checkpoint import store, weights
from raygnn.checkpoint.remote_checkpoints import RemoteCheckpoints
from raygnn.cli import main
from raygnn.config.places import Uri
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.runs.run_directory import RunDir
from tests.support.hostile import Runs, bombs, tree
from tests.support.small_jobs import JobFactory, about, train_on_ranks

STEP = "step-0000000004"


def zipped(bomb: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a ZIP archive that `torch.load` accepts as one of its files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as file:
        file.writestr("archive/data.pkl", bomb)
        file.writestr("archive/version", b"3\n")
        file.writestr("archive/byteorder", b"little")
    return content.getvalue()


def swollen() -> bytes:
    """Return a few kilobytes that decompress to a tensor of 256 MB."""
    content, packed = io.BytesIO(), io.BytesIO()
    weights = {"w": torch.zeros(2**26)}
    torch.save({"state_dict": weights, "loops": {}, "global_step": 4}, content)
    with zipfile.ZipFile(content) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as f:
        for name in whole.namelist():
            f.writestr(name, whole.read(name))
    return packed.getvalue()


def states(marker: Path) -> dict[str, bytes]:
    found = {}
    for name, bomb in bombs(marker).items():
        found[name] = zipped(bomb)
        found[f"{name}, bare"] = bomb
    script = zipped(pickle.dumps(Runs(os.system, f"touch {marker}"), 2))
    with zipfile.ZipFile(content := io.BytesIO(script), "a") as file:
        file.writestr("archive/constants.pkl", b"\x80\x02).")  # as of TorchScript
    return {**found, "script": content.getvalue(), "swollen": swollen()}


def plant(directory: Path, config: Config, state: bytes, **lies: Any) -> None:
    """Write a checkpoint of step 4 with this state, and a manifest with its digest."""
    store.write(directory, {"global_step": 4}, 4, 9, about(config))
    swear(directory / STEP, state, **lies)


def swear(place: Path, state: bytes, **lies: Any) -> None:
    """Replace a checkpoint's state, and its size and digest in the manifest."""
    (place / "state.ckpt").write_bytes(state)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest |= {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest(), **lies}
    del manifest["digest"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (place / "manifest.json").write_text(json.dumps({**manifest, "digest": digest}))


@pytest.mark.filterwarnings("ignore:.*pickle protocol")
def test_states_that_run_things(make_job: JobFactory, tmp_path: Path) -> None:
    config, marker = make_job(), tmp_path / "marker"
    for state in states(marker).values():
        plant(tmp_path / "there", config, state)
        found = store.judge(tmp_path / "there" / STEP, config)
        with pytest.raises(InputError, match="cannot be trusted") as error:
            store.check_contents(found.state)
        assert error.value.remedy
        assert STEP in str(error.value.where)
        assert len(str(error.value)) < 2000
    assert not marker.exists()


@pytest.mark.long
def test_a_resume_refuses_hostile_checkpoints(make_job: JobFactory, tmp_path: Path) -> None:
    """Real ranks resume from them."""
    marker = tmp_path / "marker"
    options: dict[str, Any] = {"cluster": {"workers": 1}, "train": {"epochs": 1}}
    config = make_job(fault={"checkpoint_every": 1}, **options)
    train_on_ranks(config)
    directory = config.run_dir / "checkpoints"
    newest = max(directory.glob("step-*"))
    shutil.move(newest, tmp_path / "kept")
    for name in ("system", "partial, bare", "laughs"):
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "kept", newest)
        swear(newest, states(marker)[name])
        with pytest.raises(RuntimeError) as error:
            train_on_ranks(config, resume=True)
        assert "this checkpoint cannot be trusted" in str(error.value), name
        assert not marker.exists()


@pytest.mark.parametrize("name", ["../x", "/etc", "step-0000000004/../../x", "step-4", "a\0b"])
def test_names_in_a_store(name: str, tmp_path: Path) -> None:
    """Only names like ours are read, and nothing is fetched to another path."""
    place = tmp_path / "test" / "checkpoints"
    place.mkdir(parents=True)
    if "\0" not in name:
        (place / Path(name).name).mkdir()
        (place / Path(name).name / "manifest.json").write_text("{}")
    assert RemoteCheckpoints(Uri(f"file://{tmp_path}/test")).names() == []
    assert not store.NAME.fullmatch(name)


def test_links(make_job: JobFactory, tmp_path: Path) -> None:
    """A checkpoint that is a link is read through it, but only the link is removed."""
    config, run = make_job(), tmp_path / "checkpoints"
    plant(tmp_path / "elsewhere", config, b"x" * 10)
    run.mkdir()
    (run / STEP).symlink_to(tmp_path / "elsewhere" / STEP)
    before = tree(tmp_path / "elsewhere")
    store.write(run, {"global_step": 4}, 4, 1, about(config))
    store.write(run, {"global_step": 5}, 5, 1, about(config))
    assert tree(tmp_path / "elsewhere") == before
    assert [path.name for path in run.glob("step-*")] == ["step-0000000005"]


def test_a_manifest_with_a_wrong_step_or_size_is_rejected(
    make_job: JobFactory, tmp_path: Path
) -> None:
    config = make_job()
    for lie in ({"step": "../../4"}, {"step": "x"}, {"step": 5}, {"bytes": -1}):
        plant(tmp_path, config, b"x", **lie)
        with pytest.raises(DataError):
            store.judge(tmp_path / STEP, config)


def test_weights_without_their_description(tmp_path: Path) -> None:
    (tmp_path / "selected.pt").write_bytes(b"x")
    with pytest.raises(DataError, match="is missing, which describes the weights") as error:
        weights.find(tmp_path)
    assert error.value.where == str(tmp_path / "selected.json")


@pytest.mark.filterwarnings("ignore:.*pickle protocol")
def test_weights_that_run_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`raygnn predict` refuses a hostile selected.pt, and the other verbs do not open it."""
    marker, model = tmp_path / "marker", torch.nn.Linear(2, 2)
    with RunDir(str(tmp_path / "runs"), "a") as run:
        run.begin({"name": "a"})
        for name, state in states(marker).items():
            (run.checkpoints / "selected.pt").write_bytes(state)
            about = {"data": "", "sha256": hashlib.sha256(state).hexdigest()}
            (run.checkpoints / "selected.json").write_text(json.dumps(about))
            with pytest.raises(DataError) as error:
                weights.load(weights.find(run.checkpoints), model)
            assert error.value.remedy, name
            assert "selected.pt" in str(error.value.where)
    for verb in (["report", "a"], ["diagnose", "a"], ["runs"]):
        assert main([*verb, "--storage", str(tmp_path / "runs")]) == 0
    assert not marker.exists()
    capsys.readouterr()
