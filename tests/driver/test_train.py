"""Whole jobs on a real Ray."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raygnn
from raygnn.errors import DataError, InputError, PreflightError, TrainingError
from raygnn.graph.dgl import dgl
from raygnn.runs.run import Run
from raygnn.runs.run_directory import EVENTS, TOLD
from tests.support.graphs import random_graph
from tests.support.small_jobs import JobFactory, slow_but, train_on_ranks

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("shared_ray")]

MODELS = "tests.support.own_models"


def train(config: raygnn.Config, **options: Any) -> Run:
    return raygnn.train(config, display=False, **options)


def test_run_directory(make_job: JobFactory) -> None:
    config = make_job(
        train={"epochs": 3, "log_every": 2},
        model={"kind": f"{MODELS}:DglSage", "args": {"hidden": 24}},
    )
    run = train(config)
    assert run.status == "done"
    assert sorted(p.name for p in run.path.iterdir() if not p.name.startswith(".")) == [
        "checkpoints", "config.yaml", "logs", "metrics.jsonl", "partition.json", "preflight.json",
        "ranks.jsonl", "report.html", "summary.json",
    ]  # fmt: skip
    assert raygnn.load_config(run.config).to_dict() == config.to_dict()
    assert json.loads((run.path / "preflight.json").read_text())["ok"]
    logs = {p.name for p in (run.path / "logs").iterdir()} - {EVENTS, TOLD}  # of a slow rank, say
    assert sorted(logs) == [*("comm-rank-0.jsonl", "comm-rank-1.jsonl", "rank-0.log", "rank-1.log")]

    frame = run.metrics
    assert frame["step"].is_monotonic_increasing
    assert frame["step"].max() == 3 * 4  # 400 training nodes, 2 × 64 a step
    assert set(frame["step"][frame["train/loss"].notna()]) == {1, 2, 4, 6, 8, 10, 12}
    assert frame["val/accuracy"].notna().sum() == 3
    summary = run.summary
    assert summary["steps"] == 12
    assert summary["workers"] == summary["parts"] == 2
    assert summary["metrics"]["test/accuracy"] > 0.6  # 4 classes
    assert set(summary["seconds"]) >= {"sample", "features", "compute", "wait", "total"}
    assert summary["versions"]["torch"]
    assert raygnn.open_run(run.path).summary == summary

    with pytest.raises(InputError, match="taken"):
        train(config)
    checked = raygnn.check(config, display=False)
    assert ("name_free", "warn") in [(f.check, f.severity) for f in checked.findings]
    comm = [json.loads((run.path / "logs" / f"comm-rank-{r}.jsonl").read_text()) for r in (0, 1)]
    assert [record["rank"] for record in comm] == [0, 1]
    (planned,) = json.loads((run.path / "preflight.json").read_text())["communication"][
        "nodes"
    ].values()
    for record in comm:
        given = record["given"]
        assert (given.pop("backend"), given.pop("timeout", 1800)) == ("gloo", 1800)
        assert given == {variable["name"]: variable["value"] for variable in planned}


def test_a_fault_on_one_rank_is_the_cause_that_is_shown(make_job: JobFactory) -> None:
    config = make_job(
        model={"kind": f"{MODELS}:FailsOnRank1", "args": {"how": "raise"}},
        fault={"max_failures": 5},
    )
    with pytest.raises(TrainingError) as caught:
        train(config)
    error = caught.value
    assert error.what == "ValueError: the sixth batch is not to my liking"
    assert error.rank == 1
    assert error.exit_code == 4
    assert "models.py" in (error.trace or "")
    run = raygnn.open_run(config.run_dir)
    assert run.status == "failed"
    log = (run.path / "logs" / "rank-1.log").read_text()
    assert log.count("ERROR raygnn: failed") == 2  # the same again ends it, with starts left


@pytest.mark.parametrize("how", slow_but("removed", ["removed", "replaced"]))
def test_a_run_directory_that_goes_in_mid_run(how: str, make_job: JobFactory) -> None:
    """The run is not reported as done, and nothing is written to what replaced its directory."""
    config = make_job(
        model={"kind": f"{MODELS}:Slow"}, train={"epochs": 99}, fault={"storage_timeout": 2}
    )
    place, kept = config.run_dir, config.run_dir.with_name("kept")

    def take_away() -> None:
        deadline = time.monotonic() + 120
        while not (place / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        place.rename(kept)
        if how == "replaced":
            place.mkdir()

    thread = threading.Thread(target=take_away)
    thread.start()
    with pytest.raises(TrainingError, match=f"the run directory was {how}") as caught:
        train(config)
    thread.join()
    assert (caught.value.exit_code, caught.value.where) == (4, str(place))
    assert "move it back" in str(caught.value.remedy)
    assert [*place.glob("*")] == []
    assert raygnn.open_run(kept).status == "killed"  # the run can be recognised and resumed


@pytest.mark.slow
def test_a_rank_that_is_killed_is_the_cause(make_job: JobFactory) -> None:
    """The lost connection of the other rank is not reported as the cause."""
    config = make_job(model={"kind": f"{MODELS}:FailsOnRank1", "args": {"how": "die"}})
    with pytest.raises(TrainingError, match="rank 1 ended without a report: SIGKILL") as caught:
        train(config)
    assert caught.value.rank == 1
    assert "dmesg" in (caught.value.remedy or "")
    assert "ended without a report" in raygnn.open_run(config.run_dir).summary["error"]


def test_a_rank_that_hangs_ends_at_the_timeout(make_job: JobFactory) -> None:
    """The process group has our timeout, not Lightning's or torch's half an hour."""
    config = make_job(
        model={"kind": f"{MODELS}:FailsOnRank1", "args": {"how": "hang"}}, comm={"timeout": 8}
    )
    with pytest.raises(TrainingError, match=r"models.py:\d+ in forward: rank 1 was in forward"):
        train(config)
    log = (config.run_dir / "logs" / "rank-0.log").read_text()
    times = [float(n) for n in re.findall(r"Timed out waiting (\d+)ms", log)]
    assert times
    assert max(times) == 8000


def test_arguments_that_the_model_does_not_accept(make_job: JobFactory) -> None:
    """The trial of the model reports it before anything starts."""
    config = make_job(model={"kind": f"{MODELS}:DglSage", "args": {"width": 3}})
    with pytest.raises(PreflightError, match="width"):
        train(config)
    assert not config.run_dir.exists()


def test_preflight_refuses(make_job: JobFactory) -> None:
    config = make_job(cluster={"workers": 64, "num_cpus": None})
    with pytest.raises(PreflightError, match="64") as caught:
        train(config)
    assert caught.value.exit_code == 3
    assert not config.run_dir.exists()


def test_check_writes_nothing(make_job: JobFactory, tmp_path: Path) -> None:
    assert raygnn.check(make_job(), display=False).ok
    assert not raygnn.check(make_job(cluster={"workers": 64, "num_cpus": None}), display=False).ok
    assert list(tmp_path.iterdir()) == []


@pytest.mark.dgl
def test_a_partition_that_dgl_wrote(make_job: JobFactory, tmp_path: Path) -> None:
    data = random_graph(nodes=300)
    ((_, nodes),) = data.nodes.items()
    ((_, edges),) = data.edges.items()
    graph = dgl().graph((torch.from_numpy(edges.src), torch.from_numpy(edges.dst)), num_nodes=300)
    for name, array in nodes.data.items():
        graph.ndata[name] = torch.from_numpy(array)
    dgl().distributed.partition_graph(
        graph, "theirs", 2, str(tmp_path / "theirs"), part_method="random"
    )
    config = make_job(graph=None, partition={"path": str(tmp_path / "theirs")})
    run = train_on_ranks(config)
    assert run.status == "done"
    assert np.isfinite(run.metrics["train/loss"].dropna()).all()


def test_a_damaged_part(make_job: JobFactory) -> None:
    config = make_job(train={"max_steps": 1})
    meta = raygnn.partition(config, display=False)
    meta.files[1].graph.write_bytes(b"garbage")
    with pytest.raises((PreflightError, DataError)):
        train(config)
    assert not config.run_dir.exists()
