"""A training beside this process: what its handle says, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas  # before a run begins, since the import takes as long as the run
import psutil
import pytest

import raygnn
from raygnn.config.schema import Config
from raygnn.jobs.local_job import LocalJob
from raygnn.runs.run import open_run
from raygnn.runs.run_directory import JOB, RunDir
from tests.support.stores import LocalStore

pytestmark = pytest.mark.system

LIMIT = 150.0

_PARENT = """
import sys, time
import raygnn

config = raygnn.load_config(sys.argv[1])
job = raygnn.launch(config, display=False)
print(job.pid, flush=True)
while job.metrics().empty:
    time.sleep(0.1)
print("training", flush=True)
time.sleep(600)
"""


def config_of(storage: Path | str, **changes: Any) -> Config:
    return raygnn.load_config(
        {
            "name": "beside",
            "storage": str(storage),
            "graph": {"format": "planted", "nodes": 2000, "degree": 8, "classes": 4},
            "model": {"kind": "sage", "hidden": 8},
            "sampling": {"fanout": [5, 5], "batch_size": 80},
            "train": {"epochs": 3, "log_every": 1},
            "cluster": {"workers": 1, "address": "local"},
            "logging": {"loggers": []},
        },
        changes,
    )


def until(true: Callable[[], Any], limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_from_its_beginning_to_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = raygnn.launch(config_of(tmp_path, train={"epochs": 5000}))
    assert "pending" in repr(job)
    assert job.run is None
    assert job.metrics().equals(pandas.DataFrame())
    until(lambda: "epoch 1/5000" in job.logs() or job.over)
    assert job.status == "running", job.logs()
    assert len(job.metrics()) > 0
    assert list(job.metrics().columns[:1]) == ["step"]
    assert f"beside → {tmp_path / 'beside'}" in job.logs()
    assert job.logs(1) in job.logs()
    html = job._repr_html_()
    assert "running" in html
    assert "<progress" in html
    with pytest.raises(TimeoutError, match="still running"):
        job.wait(timeout=0.3)

    children = psutil.Process(job.pid).children(recursive=True)
    assert len(children) > 3  # a Ray
    job.stop()
    assert job.status == "interrupted"
    with pytest.raises(raygnn.Interrupted, match="can resume from step"):
        job.wait()
    assert list((tmp_path / "beside" / "checkpoints").glob("step-*"))
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, [each.name() for each in alive]
    assert "epoch 1/5000" in capsys.readouterr().out, "it is shown meanwhile"
    job.stop()  # once more does nothing


def test_a_run_that_is_kept_in_a_store(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job shows the local run while it is written, and the one in the store afterwards."""
    config = config_of(store.uri, staging={"path": str(tmp_path / "stage")})
    request = {"config": {}, "overwrite": False, "resume": False, "verbose": False}
    job = LocalJob(config, request, display=False)
    theirs = psutil.Process(job.pid).environ()[JOB]
    for ours in (False, True):
        monkeypatch.setenv(JOB, theirs if ours else "another")
        with RunDir(config.local_storage, config.name, store=config.store, mode="overwrite") as run:
            run.begin(config.recorded())
            shown = job.run
            assert (shown is not None and shown.shown == str(run.path)) is ours
            job.stop()
        shown = job.run
        assert (shown is not None and shown.shown == run.shown) is ours


def test_refusals_are_raised(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "mine.txt").write_text("mine")
    job = raygnn.launch(config_of(tmp_path), display=False)
    with pytest.raises(raygnn.InputError) as error:
        job.wait(timeout=LIMIT)
    assert type(error.value) is raygnn.InputError
    assert error.value.where == str(tmp_path / "beside")
    assert error.value.remedy
    assert job.status == "failed"
    assert job.run is None
    assert "failed" in job._repr_html_()
    with pytest.raises(raygnn.InputError, match="together"):
        raygnn.launch(config_of(tmp_path), overwrite=True, resume=True)


def test_the_error_of_a_training_has_its_run() -> None:
    failed = "error: no\n  at rank 1, step 3\n"
    run = SimpleNamespace(shown="runs/beside")
    job: Any = SimpleNamespace(_code=4, logs=lambda: failed, run=run)
    error = LocalJob._error(job)
    assert isinstance(error, raygnn.TrainingError)
    assert (error.rank, error.run) == (1, "runs/beside")


def test_a_killed_training_is_an_error(tmp_path: Path) -> None:
    job = raygnn.launch(config_of(tmp_path), display=False)
    os.kill(job.pid, signal.SIGKILL)
    with pytest.raises(raygnn.TrainingError, match="killed by signal 9"):
        job.wait(timeout=LIMIT)
    assert isinstance(job, LocalJob)


def test_a_stop_before_it_began(tmp_path: Path) -> None:
    job = raygnn.launch(config_of(tmp_path), display=False)
    job.stop()
    assert job.status == "interrupted"
    with pytest.raises(raygnn.Interrupted):
        job.wait(timeout=LIMIT)
    assert job.run is None


def test_a_long_error_comes_whole(tmp_path: Path) -> None:
    """The error is longer than a pipe's buffer."""
    wrong = {f"unknown_{i:05}": i for i in range(4000)}
    request = {"config": wrong, "overwrite": False, "resume": False, "verbose": False}
    job = LocalJob(config_of(tmp_path), request, display=False)
    with pytest.raises(raygnn.InputError) as error:
        job.wait(timeout=LIMIT)
    assert len(str(error.value)) > 2**16


@pytest.mark.slow
def test_a_training_ends_with_its_parent(tmp_path: Path) -> None:
    """A training ends with a checkpoint when its parent is killed, such as a notebook's kernel."""
    import yaml

    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path, train={"epochs": 5000}).to_dict()))
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(file)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert parent.stdout.readline() == "training\n"
        finally:
            parent.kill()
    processes = [child, *child.children(recursive=True)]
    _, alive = psutil.wait_procs(processes, timeout=90)
    assert not alive, [each.name() for each in alive]
    assert open_run(tmp_path / "beside").status == "interrupted"
    assert list((tmp_path / "beside" / "checkpoints").glob("step-*"))
