"""Trials as MLflow and W&B show them: nested runs of one parent, and a group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from raygnn.config.load import load_config
from raygnn.driver.loggers import backend_of
from raygnn.runs.run_directory import RunDir
from raygnn.search.run_search import nested
from raygnn.search.space import trial_config
from tests.support.postgres import free_port
from tests.support.small_jobs import job, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """URI of an MLflow server with a SQLite database."""
    pytest.importorskip("mlflow")
    uri = f"http://127.0.0.1:{(port := free_port())}"
    argv = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)

    def is_up() -> bool:
        assert process.poll() is None, (tmp_path / "server.log").read_text()
        try:
            return requests.get(f"{uri}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        until(is_up, 120)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_trials_are_nested_runs_of_the_search(server: str, tmp_path: Path) -> None:
    import mlflow

    given = job(tmp_path, name="mine", logging={"loggers": {"mlflow": {"tracking_uri": server}}})
    config = load_config(given)
    with RunDir(tmp_path, "mine") as search:
        search.begin(config.recorded())
        for _ in range(2):  # the second one is a resume
            with nested(config, search.path) as logged:
                trial = trial_config(logged, {"train.lr": 0.5}, (search.path / "trials", "t000"))
                with RunDir(trial.storage, "t000", mode="overwrite") as run:
                    run.begin(trial.recorded())
                    backend = backend_of("mlflow", run.path)
                    backend.open(0)
                    backend.log({"step": 1, "val/f1": 0.5})
                    backend.close("done")
    client = mlflow.MlflowClient(server)
    (experiment,) = client.search_experiments(filter_string="name = 'raygnn'")
    runs = client.search_runs([experiment.experiment_id])
    parents = [one for one in runs if one.info.run_name == "mine"]
    trials = [one for one in runs if one.info.run_name == "t000"]
    assert (len(parents), len(trials)) == (1, 2)
    assert parents[0].info.status == "FINISHED"
    for one in trials:
        assert one.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert one.data.metrics == {"val/f1": 0.5}


def test_trials_are_a_group(tmp_path: Path) -> None:
    for given, group in (({}, "test"), ({"group": "mine"}, "mine")):
        config = load_config(job(tmp_path, logging={"loggers": {"wandb": given}}))
        with nested(config, tmp_path) as logged:
            assert logged.logging.loggers == {"wandb": {"group": group}}


def test_a_server_that_does_not_answer_ends_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = {"tracking_uri": "http://127.0.0.1:9"}
    config = load_config(job(tmp_path, logging={"loggers": {"mlflow": uri}}))
    with RunDir(tmp_path, "test") as search:
        search.begin(config.recorded())
        with nested(config, search.path) as logged:
            assert logged == config
