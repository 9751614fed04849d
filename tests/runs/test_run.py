"""Reading runs back: by path, by name, as a list."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from raygnn.errors import DataError, InputError
from raygnn.runs.metrics_files import MetricsWriter
from raygnn.runs.run import Run, list_runs, open_run
from raygnn.runs.run_directory import RunDir


def make(storage: Path, name: str) -> Path:
    with RunDir(str(storage), name) as run:
        run.begin({"name": name})
        with closing(MetricsWriter(run.path / "metrics.jsonl")) as writer:
            writer.write({"step": 10, "epoch": 1, "time": 0.5, "train/loss": 2.0})
            writer.write({"step": 20, "epoch": 1, "time": 0.9, "val/accuracy": 0.7})
        run.update_summary(status="done", steps=20, metrics={"test/accuracy": 0.81512})
    return run.path


def test_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "runs", "cora-gcn")
    monkeypatch.chdir(tmp_path)
    assert open_run(path) == open_run("cora-gcn") == open_run("runs/cora-gcn")
    assert open_run("cora-gcn", storage=f"file://{tmp_path}/runs").path == path


def test_metrics_are_a_row_per_record(tmp_path: Path) -> None:
    frame = open_run(make(tmp_path, "a")).metrics
    assert list(frame["step"]) == [10, 20]
    assert frame["train/loss"][0] == 2.0
    assert frame["val/accuracy"].isna()[0]


def test_it_shows_itself_briefly(tmp_path: Path) -> None:
    run = open_run(make(tmp_path, "a"))
    assert repr(run) == f"Run({str(run.path)!r}: status done, test/accuracy 0.8151, steps 20)"
    assert run.to_dict()["status"] == "done"
    assert run.to_dict()["path"] == str(run.path)


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    make(tmp_path, "cora-gcn")
    make(tmp_path, "tolokers")
    with pytest.raises(InputError, match="no such run") as caught:
        open_run("cora-gnc", storage=str(tmp_path))
    assert caught.value.remedy == "did you mean cora-gcn?"
    with pytest.raises(InputError) as caught:
        open_run(tmp_path / "toloker")
    assert caught.value.remedy == "did you mean tolokers?"


def test_something_else_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="not a run directory") as caught:
        open_run(tmp_path / "b")
    assert str(tmp_path / "b") in str(caught.value)


def test_runs_newest_first_and_nothing_else(tmp_path: Path) -> None:
    for age, name in enumerate(["c", "b", "a"]):
        os.utime(make(tmp_path, name) / "config.yaml", (1000 - age, 1000 - age))
    (tmp_path / "partitions").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert [run.name for run in list_runs(str(tmp_path))] == ["c", "b", "a"]
    assert list_runs(str(tmp_path / "nowhere")) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = make(tmp_path, "a")
    (path / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json"):
        open_run(path).status  # noqa: B018
    (path / "summary.json").write_text(json.dumps({"status": "done", "metrics": ["x" * 2**22]}))
    with pytest.raises(DataError, match="larger than 4,194,304 bytes"):
        open_run(path).status  # noqa: B018
    (path / "config.yaml").write_text((path / "config.yaml").read_text() + "\n\t]")
    with pytest.raises(DataError, match=r"config\.yaml"):
        open_run(path).config  # noqa: B018
    (path / "summary.json").unlink()
    assert open_run(path).status == "killed"


def test_a_copied_run_reads_the_same(tmp_path: Path) -> None:
    path = make(tmp_path / "x", "a")
    copy = shutil.copytree(path, tmp_path / "y")
    assert open_run(copy).summary == open_run(path).summary


def test_ids_of_several_kinds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the ids cannot be read"):
        Run(tmp_path).predict(ids=[1, "a"])  # type: ignore[list-item]


def test_a_command_may_have_no_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value={"metrics": {}})
    monkeypatch.setattr("raygnn.runs.run.run_verb", asked)
    Run(tmp_path).evaluate(at=0, new_data=True, timeout=None)  # type: ignore[arg-type]
    args = ("evaluate", str(tmp_path), "--at=0", "--new-data")
    asked.assert_called_once_with(*args, timeout=None)
