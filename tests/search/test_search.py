"""``raygnn tune`` on a real Ray: trials, early stopping, failures, kill -9 and resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import raygnn
from raygnn.runs.run import Run
from raygnn.search.record import SearchResult
from tests.support.commands import Command
from tests.support.small_jobs import job, until

pytestmark = [pytest.mark.system, pytest.mark.alone]

NET = """
from tests.support.own_models import DglSage

class Net(DglSage):
    def __init__(self, in_features, out_features, fails):
        super().__init__(in_features, out_features)
        if fails:
            raise ValueError("this net does not like its arguments")
"""
SEARCH = {
    "space": {"train.lr": {"choice": [0.05, 1e-9]}, "model.args.fails": {"choice": [False, True]}},
    "algorithm": "grid",
    "concurrent": 1,
}
LIMIT = 500  # seconds


@pytest.fixture
def tune(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `raygnn tune job.yaml …`; whatever is left is killed."""
    commands: list[Command] = []
    (tmp_path / "net.py").write_text(NET)
    given = job(
        tmp_path / "runs",
        model={"kind": "net:Net", "args": {"fails": False}},
        train={"epochs": 4},
        cluster={"address": "local", "workers": 1, "num_cpus": 2},
        search=SEARCH,
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(given, sort_keys=False))

    def start(*args: str) -> Command:
        commands.append(Command(["tune", "job.yaml", *args], tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        shutil.rmtree(command.temp, ignore_errors=True)


def test_a_search(tune: Callable[..., Command], tmp_path: Path) -> None:
    """Killed after its first trial and resumed, it keeps that trial; one is stopped early, and the
    failed ones are shown with their cause."""
    path = tmp_path / "runs" / "test"
    record = path / "search.json"
    first = tune()
    until(lambda: record.exists() and json.loads(record.read_text())["best"], LIMIT)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.communicate()
    assert first.left_behind(30) == []
    before = json.loads(record.read_text())
    kept = path / "trials" / "t000"
    written = (kept / "metrics.jsonl").read_bytes()

    code, out, err = tune().finish()
    assert code == 2
    assert "is taken by an earlier run" in err

    second = tune("--resume")
    code, out, err = second.finish(LIMIT)
    assert (code, err) == (0, "")
    assert second.left_behind(30) == []
    assert "t001 failed" in out
    assert "this net does not like its arguments" in out
    assert "t000 (best)" in out
    found = SearchResult(path)
    facts = found.to_dict()
    assert [one["settings"] for one in facts["trials"]] == [
        one["settings"] for one in before["trials"]
    ]
    assert [one["status"] for one in facts["trials"]] == ["done", "failed", "stopped", "failed"]
    assert (kept / "metrics.jsonl").read_bytes() == written
    assert facts["trials"][2]["epochs"] < 4
    stopped = Run(path / "trials" / "t002")
    assert stopped.status == "interrupted"
    assert stopped.config["train"]["lr"] == 1e-9
    assert list((tmp_path / "runs" / "partitions").iterdir())
    assert not (path / "trials" / "partitions").exists()
    assert found.best.path == kept == raygnn.open_run("test", str(tmp_path / "runs")).path
    assert found.best.summary["metrics"]["val/accuracy"] == facts["trials"][0]["value"]
    table = found.trials
    assert list(table["id"]) == ["t000", "t001", "t002", "t003"]
    assert list(table["train.lr"]) == [0.05, 0.05, 1e-9, 1e-9]
