"""Runs that really go down, and what `raygnn.diagnose` says of each: which rank, and what."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raygnn
from raygnn.config.load import load_config
from raygnn.errors import Interrupted, TrainingError
from raygnn.runs.diagnose.judge import Diagnosis
from raygnn.runs.run import Run
from tests.support import faulty
from tests.support.small_jobs import JobFactory, job

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("shared_ray")]

MODEL = "tests.support.faulty:Faulty"
SLOW = pytest.mark.slow


@pytest.fixture
def make_job(make_job: JobFactory) -> JobFactory:
    """Jobs that start on a busy machine, too."""

    def make(**sections: Any) -> raygnn.Config:
        patience = {"probe_timeout": "1m", **sections.pop("cluster", {})}
        return make_job(cluster=patience, **sections)

    return make


def diagnose_copy(config: raygnn.Config) -> Diagnosis:
    """Diagnose a copy of the run directory, since nothing else may be used."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(config.run_dir, copy)
        return raygnn.diagnose(copy)


def fail(config: raygnn.Config) -> Diagnosis:
    """Train, require a failure, and diagnose it."""
    with pytest.raises(TrainingError) as caught:
        raygnn.train(config, display=False)
    assert caught.value.run == str(config.run_dir)
    found = diagnose_copy(config)
    assert json.loads(json.dumps(found.to_dict()))["cause"]["kind"] == found.cause.kind
    assert found.cause.remedy
    assert found.cause.evidence
    return found


@pytest.mark.parametrize(
    ("how", "kind", "where", "extra"),
    [
        pytest.param("raise", "model", "faulty.py", {}, marks=SLOW),
        pytest.param("data", "data", "faulty.py", {}, marks=SLOW),
        pytest.param("kill", "died", "", {}, marks=SLOW),
        pytest.param("exit", "died", "", {}, marks=SLOW),
        pytest.param("memory", "memory", "faulty.py", {}, marks=SLOW),
        pytest.param("abort", "crash", "faulty.py", {}, marks=SLOW),
        pytest.param("hang", "stuck", "faulty.py", {"comm": {"timeout": 8}}, marks=SLOW),
        pytest.param("stop", "frozen", "", {"comm": {"timeout": 8}}, marks=SLOW),
        pytest.param(
            *("collective", "ranks_differ", "faulty.py", {"comm": {"timeout": 8}}), marks=SLOW
        ),
        pytest.param("dtype", "ranks_differ", "faulty.py", {"comm": {"debug": True}}, marks=SLOW),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure(
    how: str, kind: str, where: str, extra: dict[str, Any], make_job: JobFactory
) -> None:
    found = fail(make_job(model={"kind": MODEL, "args": {"how": how}}, **extra))
    cause = found.cause
    assert (cause.kind, cause.rank) == (kind, None if how == "dtype" else faulty.ODD)
    assert where in (cause.where or "")
    assert found.notes == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system with space for little more than a run."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@SLOW
def test_a_full_storage(small_disk: Path, tmp_path: Path) -> None:
    config = load_config(
        job(
            small_disk,
            partition={"path": str(tmp_path / "parts")},
            staging={"path": str(tmp_path / "stage")},
            cluster={"allow": ["disk_space"], "probe_timeout": "1m"},
            model={"kind": MODEL, "args": {"how": "storage", "run": str(small_disk / "test")}},
            fault={"max_failures": 3, "storage_timeout": "1s"},
        )
    )
    with pytest.raises(TrainingError) as caught:
        raygnn.train(config, display=False)
    error = caught.value
    assert (error.exit_code, error.rank) == (4, 0)  # rank 0 writes the metrics
    assert "the disk or the quota is full: No space left on device" in error.what
    assert str(config.run_dir) in str(error.where)
    assert "free space or raise the quota there" in str(error.remedy)
    assert len(list(tmp_path.glob("made-*"))) == 2  # ranks, which were not started again
    assert diagnose_copy(config).cause.kind == "storage"


@SLOW
def test_an_interrupt(make_job: JobFactory) -> None:
    config = make_job(model={"kind": "tests.support.own_models:Slow"}, train={"epochs": 50})
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        metrics, deadline = config.run_dir / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        live = raygnn.diagnose(config.run_dir)
        seen.append((live.cause.kind, [rank.state for rank in live.ranks]))
        signal.pthread_kill(main, signal.SIGINT)

    seen: list[Any] = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        raygnn.train(config, display=False)
    thread.join()
    assert seen == [("running", ["running", "running"])]
    assert diagnose_copy(config).cause.kind == "interrupted"


@SLOW
def test_the_last_of_several_starts(make_job: JobFactory) -> None:
    """The same failure twice ends a run that has attempts left."""
    config = make_job(model={"kind": MODEL, "args": {"how": "raise"}}, fault={"max_failures": 3})
    found = fail(config)
    assert (found.cause.kind, found.cause.rank, found.attempt) == ("model", faulty.ODD, 2)


@SLOW
def test_a_run_that_is_well(make_job: JobFactory) -> None:
    config = make_job()
    raygnn.train(config, display=False)
    assert diagnose_copy(config).cause.kind == "none"
    left = {path.name for path in (Run(config.run_dir).path / "logs").iterdir()}
    assert not any(name.endswith((".state", ".crash", ".blackbox.json")) for name in left)
