"""``raygnn tune`` on a real Ray: trials, early stopping, failures, kill -9 and resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import raygnn
from raygnn import compat
from raygnn.runs.run import Run
from raygnn.search.record import SearchResult
from tests.search.test_optuna import suggestions
from tests.support.commands import Command
from tests.support.hosts import hosts, needs_hosts
from tests.support.ray_cluster import ray_cluster
from tests.support.small_jobs import job, until

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(900)]

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
def raygnn_command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `raygnn VERB …`; whatever is left is killed."""
    commands: list[Command] = []

    def start(*args: str) -> Command:
        commands.append(Command(list(args), tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        shutil.rmtree(command.temp, ignore_errors=True)


def write_job(tmp_path: Path, **sections: Any) -> None:
    cluster = {"address": "local", "workers": 1, "num_cpus": 2}
    graph = {"train": 0.05, "val": 0.05}
    given = job(tmp_path / "runs", cluster=cluster, graph=graph, **sections)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(given, sort_keys=False))


def test_a_search(raygnn_command: Callable[..., Command], tmp_path: Path) -> None:
    """Killed after its first trial and resumed, it keeps that trial; one is stopped early, and the
    failed ones are shown with their cause."""
    path = tmp_path / "runs" / "test"
    record = path / "search.json"
    (tmp_path / "net.py").write_text(NET)
    model = {"kind": "net:Net", "args": {"fails": False}}
    write_job(tmp_path, model=model, train={"epochs": 4}, search=SEARCH)
    first = raygnn_command("tune", "job.yaml")
    titles: set[str] = set()

    def has_best() -> bool:
        titles.update(first.running().values())
        return record.exists() and bool(json.loads(record.read_text())["best"])

    until(has_best, LIMIT)
    # Ray Train's controller is in the trial's process
    assert "RayTrainWorker" in " ".join(titles)
    if not os.environ.get(compat.PLAIN):
        assert "TrainController" not in " ".join(titles)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.communicate()
    assert first.left_behind(30) == []
    before = json.loads(record.read_text())
    kept = path / "trials" / "t000"
    written = (kept / "metrics.jsonl").read_bytes()

    code, out, err = raygnn_command("tune", "job.yaml").finish()
    assert code == 2
    assert "is taken by an earlier run" in err

    second = raygnn_command("tune", "job.yaml", "--resume")
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


@pytest.mark.slow
def test_two_trials_at_once(raygnn_command: Callable[..., Command], tmp_path: Path) -> None:
    """Ctrl-C stops both with a checkpoint, from which they are resumed; they begin with another
    run's weights. The search's name stands for its best trial."""
    path = tmp_path / "runs" / "test"
    space = {"train.lr": {"choice": [0.05, 1e-9]}}
    write_job(tmp_path, name="base", train={"epochs": 1, "lr": 1e-9})
    assert raygnn_command("train", "job.yaml").finish(LIMIT)[0] == 0
    search = {"space": space, "algorithm": "grid", "scheduler": "none"}
    write_job(tmp_path, train={"epochs": 150, "init": {"run": "base"}}, search=search)
    first = raygnn_command("tune", "job.yaml")
    trials = [path / "trials" / name for name in ("t000", "t001")]
    until(lambda: all((trial / "metrics.jsonl").exists() for trial in trials), LIMIT)
    os.kill(first.process.pid, signal.SIGINT)
    code, out, err = first.finish(LIMIT)
    assert (code, err.count("continue it with --resume")) == (130, 1), err
    assert "2 at a time" in out
    assert first.left_behind(30) == []
    found = SearchResult(path)
    statuses = [one["status"] for one in found.to_dict()["trials"]]
    assert statuses == ["interrupted"] * 2
    assert [Run(trial).status for trial in trials] == ["interrupted"] * 2
    assert Run(path).status == "interrupted"

    code, out, err = raygnn_command("tune", "job.yaml", "--resume").finish(LIMIT)
    assert (code, err) == (0, "")
    assert [one["status"] for one in found.to_dict()["trials"]] == ["done"] * 2
    for trial in trials:
        assert "resume: from step" in (trial / "logs" / "told.jsonl").read_text()
        assert Run(trial).summary["init"]["run"] == str(tmp_path / "runs" / "base")

    out = raygnn_command("evaluate", "test", "--split", "val", "--json").finish(LIMIT)[1]
    value = json.loads(out)["metrics"]["val/accuracy"]
    assert value == pytest.approx(found.best.summary["metrics"]["val/accuracy"])
    out = raygnn_command("predict", "test", "--out", "out.parquet", "--json").finish(LIMIT)[1]
    assert json.loads(out)["rows"] == 2000
    code, out, err = raygnn_command("train", "job.yaml", "--resume").finish(LIMIT)
    assert code == 2
    best = found.best.path / "config.yaml"
    assert f"{best} --resume" in err
    more = ("--resume", "--set", "train.epochs=151", "--json")
    code, out, err = raygnn_command("train", str(best), *more).finish(LIMIT)
    assert (code, json.loads(out)["epochs"]) == (0, 151), err


def test_a_cluster_too_small_for_a_trial(
    raygnn_command: Callable[..., Command], tmp_path: Path
) -> None:
    write_job(tmp_path, search={"space": {"train.lr": {"uniform": [0.1, 0.2]}}})
    few = ("--set", "cluster.num_cpus=null", "--set", f"cluster.workers={os.cpu_count()}000")
    code, _, err = raygnn_command("tune", "job.yaml", *few).finish(LIMIT)
    assert code == 3, err
    assert "CPUs" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@needs_hosts()
def test_two_hosts(tmp_path: Path) -> None:
    """Two trials at once, each on a host of its own, on one partition."""
    shared = tmp_path / "shared"
    shared.mkdir()
    search = {"space": {"train.lr": {"choice": [0.05, 0.01]}}, "algorithm": "grid"}
    given = job(
        shared / "runs",
        staging={"path": "/tmp/stage"},  # each host has its own
        cluster={"address": "auto", "workers": 1},
        search=search,
    )
    del given["cluster"]["num_cpus"]
    (shared / "job.yaml").write_text(yaml.safe_dump(given))
    with hosts(2, share=[shared]) as group, ray_cluster(group) as cluster:
        argv = [sys.executable, "-m", "raygnn", "tune", "job.yaml"]
        done = cluster.run(argv, cwd=shared, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "2 at a time" in done.stdout
    runs = [Run(shared / "runs" / "test" / "trials" / name) for name in ("t000", "t001")]
    assert [run.status for run in runs] == ["done"] * 2
    ranks = [run.path / "logs" / "comm-rank-0.jsonl" for run in runs]
    assert {json.loads(rank.read_text())["host"] for rank in ranks} == {"host0", "host1"}
    assert len(list((shared / "runs" / "partitions").iterdir())) == 1


@pytest.mark.slow
def test_optuna(raygnn_command: Callable[..., Command], tmp_path: Path) -> None:
    """A search that is killed and resumed suggests what one without interruption would."""
    path = tmp_path / "runs" / "test"
    space = {"train.lr": {"loguniform": [1e-4, 0.1]}, "model.hidden": {"choice": [8, 16]}}
    search = {"space": space, "algorithm": "optuna", "trials": 3}
    search |= {"scheduler": "none", "concurrent": 1}
    write_job(tmp_path, train={"epochs": 1, "seed": 7}, search=search)
    first = raygnn_command("tune", "job.yaml")
    found = SearchResult(path)
    until(lambda: (path / "search.json").exists() and found.to_dict()["best"], LIMIT)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.communicate()
    assert first.left_behind(30) == []
    before = found.to_dict()["trials"]

    code, out, err = raygnn_command("tune", "job.yaml", "--resume").finish(LIMIT)
    assert (code, err) == (0, "")
    assert "(3/3) completed" in out
    trials = found.to_dict()["trials"]
    assert [one["status"] for one in trials] == ["done"] * 3
    assert trials[0]["metrics"] == before[0]["metrics"]
    searcher = suggestions(path, search, seed=7)
    for number, trial in enumerate(trials):
        name = trial["id"]
        assert searcher.suggest(name)["trial"] == {"number": number, "settings": trial["settings"]}
        searcher.on_trial_complete(name, {"val/accuracy": trial["value"]})
    assert (
        suggestions(path, search, seed=8).suggest("a")["trial"]["settings"] != trials[0]["settings"]
    )
