"""Malformed input through the command line: exit 2, one message, nothing written or started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from raygnn.cli import main
from tests.support.builders import MALFORMED

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 3.0  # seconds


def job(tmp_path: Path, name: str) -> list[str]:
    """Write a job on malformed input in an empty directory, and change to it."""
    (tmp_path / "input").mkdir()
    (tmp_path / "here").mkdir()
    build, fragments = MALFORMED[name]
    section = build(tmp_path / "input")
    config = {"name": "bad", "graph": section, "model": {"kind": "gcn"}, "cluster": {"workers": 1}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    return fragments.split("|")


def judge(code: int, out: str, err: str, fragments: list[str], here: Path) -> None:
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "Traceback" not in err + out
    assert all(fragment in err for fragment in fragments), err
    assert "→" in err  # a remedy
    assert list(here.iterdir()) == []  # nothing written


@pytest.mark.parametrize("name", MALFORMED)
def test_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fragments = job(tmp_path, name)
    monkeypatch.chdir(tmp_path / "here")
    code = main(["train", str(tmp_path / "job.yaml")])
    judge(code, *capsys.readouterr(), fragments, tmp_path / "here")
    assert "raygnn-ray" not in [thread.name for thread in threading.enumerate()]  # no Ray


def test_refused_without_torch(tmp_path: Path) -> None:
    """Importing torch would take most of the available time."""
    jobs = []
    for name in MALFORMED:
        (tmp_path / name).mkdir()
        job(tmp_path / name, name)
        jobs.append(str(tmp_path / name / "job.yaml"))
    code = (
        "import sys\n"
        "from raygnn.cli import main\n"
        "for job in sys.argv[1:]:\n"
        "    assert main(['train', job]) == 2, job\n"
        "    assert not {'torch', 'dgl', 'ray', 'lightning'} & sys.modules.keys(), job\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *jobs],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("error: ") == len(jobs)


@pytest.mark.alone
@pytest.mark.parametrize("name", list(MALFORMED)[::3])
def test_refused_within_seconds(name: str, tmp_path: Path) -> None:
    """A separate process refuses the job in time, its start and all imports included."""
    fragments = job(tmp_path, name)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "raygnn", "train", str(tmp_path / "job.yaml")],
        capture_output=True,
        text=True,
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    elapsed = time.monotonic() - start
    judge(done.returncode, done.stdout, done.stderr, fragments, tmp_path / "here")
    assert elapsed < LIMIT, f"{elapsed:.1f} s"
