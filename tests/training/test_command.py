"""`raygnn train` as a user runs it: a process of its own, signals and all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import raygnn
from tests.training.conftest import job, wait_for_step

ROOT = Path(__file__).resolve().parents[2]
MODELS = "tests.training.models"
MARK = "RAYGNN_TEST_MARK"


class Command:
    """One command and everything that it starts, which inherits a mark in its environment."""

    def __init__(self, args: list[str], cwd: Path):
        self.mark = uuid.uuid4().hex
        env = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT)}
        env.pop("RAY_AUTH_MODE", None)  # as on a user's machine
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raygnn", *args],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as in a terminal
        )

    def finish(self, timeout: float = 120) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def left_behind(self) -> list[str]:
        """What of it still runs."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return [line for line in found if line.strip()]

    def leaves_nothing(self, seconds: float = 10) -> bool:
        deadline = time.monotonic() + seconds
        while self.left_behind() and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.left_behind() == []


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `raygnn VERB job.yaml …` in a directory of its own; whatever is left is killed."""
    commands: list[Command] = []

    def start(verb: str, *args: str, **sections: Any) -> Command:
        config = job(tmp_path / "runs", **sections)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
        commands.append(Command([verb, "job.yaml", *args], tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


def test_train_and_its_output(run: Callable[..., Command], tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = run("train")
    code, out, err = command.finish()
    assert (code, err) == (0, "")
    for part in ("planted", "sage, 2 layers × 16", "a local Ray", "epoch 2/2", "test/accuracy"):
        assert part in out
    for chatter in ("ray::", "TrainController", "lightning", "WARNING", "Setting up process group"):
        assert chatter not in out
    assert "\x1b" not in out  # no control characters in a file
    assert command.leaves_nothing()
    assert set(os.listdir("/dev/shm")) <= before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.yaml", "runs"]


def test_ctrl_c_and_resume(run: Callable[..., Command], tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"kind": f"{MODELS}:Slow"},
        "train": {"epochs": 3},
        "fault": {"checkpoint_every": 1},
    }
    before = set(os.listdir("/dev/shm"))
    command = run("train", **sections)
    metrics = tmp_path / "runs" / "test" / "metrics.jsonl"
    wait_for_step(metrics, 3, command.process)
    os.killpg(command.process.pid, signal.SIGINT)  # what a terminal does
    code, _, err = command.finish(timeout=30)
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert "--resume" in err
    assert command.leaves_nothing()
    assert set(os.listdir("/dev/shm")) <= before
    assert raygnn.open_run(tmp_path / "runs" / "test").status == "interrupted"

    done = len(metrics.read_text().splitlines())
    code, out, _ = run("train", "--resume", "--json", **sections).finish()
    assert code == 0
    assert json.loads(out)["steps"] == 12
    first = json.loads(metrics.read_text().splitlines()[done])
    assert 3 < first["step"] < 12

    # there is nothing left to do, and fewer epochs than were made can not be made
    said = metrics.read_text()
    for epochs in (3, 2):
        sections["train"] = {"epochs": epochs}
        code, _, err = run("train", "--resume", **sections).finish()
        assert code == 2
        assert "this run is done" in err
    assert metrics.read_text() == said


def test_a_head_node_that_nobody_can_reach(run: Callable[..., Command]) -> None:
    for address in ("nowhere.invalid:6379", "127.0.0.1:9"):
        where = {"address": address, "num_cpus": None}
        code, _, err = run("check", cluster=where).finish(timeout=60)
        assert code == 3
        assert f"cluster.address: {address}" in err
        assert "Traceback" not in err


def test_sigterm_before_training(run: Callable[..., Command], tmp_path: Path) -> None:
    command = run("train", model={"kind": f"{MODELS}:Slow"})
    time.sleep(6)  # while Ray starts
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.finish(timeout=60)
    assert code == 130
    assert "Traceback" not in err
    assert command.leaves_nothing()


def test_a_failure_prints_its_cause_first(run: Callable[..., Command]) -> None:
    command = run("train", model={"kind": f"{MODELS}:Faulty", "args": {"how": "raise"}})
    code, _, err = command.finish()
    assert code == 4
    first, where = err.splitlines()[:2]
    assert first == "error: ValueError: the sixth batch is not to my liking"
    assert "rank 1" in where
    assert "models.py" in err
    assert command.leaves_nothing()
