"""Runs side by side, and their mean over seeds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from raygnn.cli import main
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver import train as driver
from raygnn.errors import ConfigError, InputError
from raygnn.runs.comparison import mean_of
from raygnn.runs.run import Run
from raygnn.runs.run_directory import RunDir
from tests.support.small_jobs import job


def make_run(storage: Path, name: str, accuracy: float, **train: Any) -> Run:
    """Write the directory of a finished run."""
    with RunDir(storage, name) as run:
        run.begin(load_config(job(storage, name=name, train=train)).to_dict())
        metrics, versions = {"test/accuracy": accuracy}, {"torch": "2.13.0"}
        run.update_summary(
            status="done", steps=8, seeds_per_second=1500.5, metrics=metrics, versions=versions
        )
    return Run(storage / name)


def compared(
    storage: Path, capsys: pytest.CaptureFixture[str], *names: str, as_json: bool = True
) -> Any:
    argv = ["runs", "--storage", str(storage), *["--json"] * as_json, "--compare", *names]
    assert main(argv) == 0
    said = capsys.readouterr().out
    return json.loads(said) if as_json else said


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", 0.5, lr=0.1)
    make_run(tmp_path, "two", 0.75, lr=0.2, seed=3)
    found = compared(tmp_path, capsys, "one", "two")
    assert found["settings"] == {"train.lr": [0.1, 0.2], "train.seed": [0, 3]}
    assert found["metrics"] == {"test/accuracy": [0.5, 0.75]}
    assert found["speed"]["seeds_per_second"] == [1500.5, 1500.5]
    assert found["versions"] == {"torch": ["2.13.0", "2.13.0"]}
    assert found["mean"] is None
    said = compared(tmp_path, capsys, "one", "two", as_json=False)
    (line,) = (line for line in said.splitlines() if "train.lr" in line)
    assert line.split() == ["train.lr", "0.1", "0.2"]


def test_the_mean_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [0.5, 0.75, 0.6]
    for seed, value in enumerate(values):
        make_run(tmp_path, f"run-{seed}", value, seed=seed)
    found = compared(tmp_path, capsys, "run-0", "run-1", "run-2")
    mean = found["mean"]["test/accuracy"]
    assert mean == pytest.approx({"mean": sum(values) / 3, "deviation": statistics.stdev(values)})
    said = compared(tmp_path, capsys, "run-0", "run-1", "run-2", as_json=False)
    assert "0.6167 ± 0.1258" in said


def test_the_comparison_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, value in enumerate([0.5, 0.75]):
        make_run(tmp_path, f"run-{seed}", value, seed=seed)
    page = tmp_path / "page.html"
    compared(tmp_path, capsys, "run-0", "run-1", "--html", str(page))
    text = page.read_text()
    for said in ("<th>run-1</th>", "settings that differ", "<td>0.75</td>", "0.6250 ± 0.1768"):
        assert said in text


def test_a_mean_needs_finished_runs(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one", 0.5)
    with pytest.raises(InputError, match="one run has no deviation"):
        mean_of([one])
    with RunDir(tmp_path, "two", mode="new") as run:
        run.begin(load_config(job(tmp_path, name="two")).to_dict())
        run.update_summary(status="failed")
    with pytest.raises(InputError, match="it is failed"):
        mean_of([one, Run(tmp_path / "two")])


def test_a_run_for_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--resume`` runs that exist are resumed, and the others are started."""
    began: list[tuple[str, int, bool]] = []

    def train(config: Config, *, resume: bool, **_: Any) -> Run:
        began.append((config.name, config.train.seed, resume))
        if resume:
            return Run(config.run_dir)
        return make_run(tmp_path, config.name, config.train.seed / 4, seed=config.train.seed)

    monkeypatch.setattr(driver, "train", train)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job(tmp_path)))
    assert main(["train", str(file), "--seeds", "2"]) == 0
    assert began == [("test-seed-0", 0, False), ("test-seed-1", 1, False)]
    assert "0.1250 ± 0.1768" in capsys.readouterr().out
    began.clear()
    assert main(["train", str(file), "--seeds", "1,4", "--resume", "--json"]) == 0
    assert began == [("test-seed-1", 1, True), ("test-seed-4", 4, False)]
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found["runs"]] == ["test-seed-1", "test-seed-4"]
    assert found["mean"]["test/accuracy"]["mean"] == 0.625
    with pytest.raises(ConfigError, match=r"train\.seed"):  # before the first run starts
        driver.train_seeds(load_config(job(tmp_path)), [0, 2**32])
    assert len(began) == 2


@pytest.mark.parametrize("text", ["1", "0,0", "a", "0,x", "-1,2", ""])
def test_wrong_seeds(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "job.yaml", f"--seeds={text}"])
    assert "--seeds" in capsys.readouterr().err
