"""Jobs on a real Ray with a token, on two virtual hosts: submitted, followed, stopped, resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raygnn.runs.run import open_run
from tests.support.datasets import cora
from tests.support.hosts import hosts, needs_hosts
from tests.support.ray_cluster import CHECKOUT, Cluster, ray_cluster

pytestmark = [pytest.mark.system, needs_hosts(), pytest.mark.timeout(600)]

SERVER = "http://127.0.0.1:8265"
LIMIT = 180.0
BIN = Path(sys.executable).parent

_BAD = """
import torch


class Bad(torch.nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.layer = torch.nn.Linear(in_features, out_features)
        self.calls = 0

    def forward(self, blocks, x):
        self.calls += 1
        if self.calls > 2:
            raise ValueError("planted in the third step")
        return self.layer(x)[: blocks[-1].num_dst_nodes()]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """Directory that both hosts share: ``work``, from which jobs are submitted, and the runs'
    storage."""
    place = tmp_path_factory.mktemp("jobs")
    work = place / "work"
    (work / "jobs").mkdir(parents=True)
    for name in ("train.py", "cora.yaml", "runtime-env.yaml"):
        shutil.copy(CHECKOUT / "jobs" / name, work / "jobs")
    shutil.copytree(  # as in a checkout
        CHECKOUT / "raygnn", work / "raygnn", ignore=shutil.ignore_patterns("__pycache__")
    )
    (work / "bad.py").write_text(_BAD)
    job = {
        "name": "long",
        "storage": str(place / "runs"),
        "graph": {"format": "planted", "nodes": 4000, "degree": 10, "classes": 4},
        "model": {"kind": "sage", "hidden": 16},
        "sampling": {"fanout": [5, 5], "batch_size": 40},
        "train": {"epochs": 5000, "log_every": 1},
        "cluster": {"workers": 2, "probe_timeout": "1m"},
        "logging": {"loggers": []},
    }
    (work / "long.yaml").write_text(yaml.safe_dump(job))
    job |= {"name": "bad", "model": {"kind": "bad:Bad"}, "fault": {"max_failures": 0}}
    (work / "bad.yaml").write_text(yaml.safe_dump(job))
    return place


@pytest.fixture(scope="module")
def cluster(place: Path, data_dir: Path) -> Iterator[Cluster]:
    """A cluster whose Ray was started from an environment that is not activated."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != BIN)
    share = [place, *([data_dir] if data_dir.is_relative_to("/tmp") else [])]
    with (
        hosts(2, share=share) as group,
        ray_cluster(group, env={"PATH": path}, jobs=True) as cluster,
    ):
        yield cluster


@pytest.fixture
def run(cluster: Cluster, place: Path) -> Any:
    def run(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / argv[0]), *argv[1:]]
        return cluster.run(command, timeout=LIMIT, cwd=place / "work", env=env)

    return run


def set_of(**keys: Any) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def test_ray_job_submit(run: Any, place: Path, data_dir: Path) -> None:
    """Ray's own command runs Cora with our entry script on both hosts."""
    changed = ["--set", f"storage={place / 'runs'}", "--set", "train.epochs=60"]
    cora(data_dir, place / "data")
    changed += ["--set", f"graph.args.root={place / 'data'}"]
    submit = ["ray", "job", "submit", "--address", SERVER, "--working-dir", "."]
    submit += ["--runtime-env", "jobs/runtime-env.yaml", "--"]
    done = run(*submit, sys.executable, "jobs/train.py", "jobs/cora.yaml", *changed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 60/60" in done.stdout
    summary = open_run(place / "runs" / "cora").summary
    assert summary["metrics"]["test/accuracy"] > 0.75
    assert {each["host"] for each in summary["ranks"]} == {"host0", "host1"}

    relative = run(
        *submit, sys.executable, "jobs/train.py", "jobs/cora.yaml", "--set", "storage=runs"
    )
    assert "storage is a relative path" in relative.stdout
    assert relative.returncode != 0


@pytest.mark.slow
def test_follow_stop_resume(run: Any, cluster: Cluster, place: Path) -> None:
    submitted = run("raygnn", "submit", "long.yaml", "--address", SERVER, "--detach", "--json")
    assert submitted.returncode == 0, submitted.stderr
    job = json.loads(submitted.stdout)["job"]
    follow = [str(BIN / "raygnn"), "logs", "long", "--follow", "--address", SERVER]
    with cluster.popen(follow, cwd=place / "work", stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        end = time.monotonic() + LIMIT
        for line in following.stdout:
            assert time.monotonic() < end
            if line.startswith("epoch "):
                break
        listed = run("raygnn", "runs", "--storage", "../runs", "--address", SERVER, "--json")
        row = next(row for row in json.loads(listed.stdout)["jobs"] if row["job"] == job)
        assert row["state"] == "running"
        assert row["run"] == "long"
        assert "/20,000 " in row["progress"]

        stopped = run("raygnn", "stop", job, "--address", SERVER)
        assert stopped.returncode == 0, stopped.stderr
        assert "interrupted" in stopped.stdout
        rest, _ = following.communicate(timeout=LIMIT)
        assert "interrupted: saving a checkpoint" in rest
        assert following.returncode == 130

    stopped_run = open_run(place / "runs" / "long")
    assert stopped_run.status == "interrupted"
    (newest,) = (stopped_run.path / "checkpoints").glob("step-*")
    step = int(newest.name.removeprefix("step-"))
    assert step > 0

    more = set_of(**{"train.max_steps": step + 3})
    again = run("raygnn", "submit", "long.yaml", *more, "--resume", "--address", SERVER)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"step {step + 3:,}/{step + 3:,}" in again.stdout
    steps = list(stopped_run.metrics.dropna(subset=["train/loss"])["step"])
    assert steps == list(range(1, step + 4)), "each step once, before and after"
    assert stopped_run.summary["starts"] == 1


def test_exit_codes_carry_through(run: Any) -> None:
    done = run("raygnn", "submit", "bad.yaml", "--address", SERVER)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "planted in the third step" in done.stdout
    missing = run(
        "raygnn",
        "submit",
        "long.yaml",
        "--address",
        SERVER,
        *set_of(graph="{format: dgl, path: /no}"),
    )
    assert missing.returncode == 2, missing.stdout + missing.stderr
    assert "/no" in missing.stdout


WRONG = ({"RAY_AUTH_TOKEN": "f" * 64}, "its token is another one")
MISSING = ({"RAY_AUTH_TOKEN": ""}, "it requires a token")
OFF = ({"RAY_AUTH_TOKEN": "", "RAY_AUTH_MODE": "disabled"}, "it requires a token")


@pytest.mark.parametrize(
    ("verb", "given"),
    [
        (["submit", "long.yaml"], WRONG),
        (["submit", "long.yaml"], MISSING),
        (["submit", "long.yaml"], OFF),
        (["stop", "long"], WRONG),
        (["logs", "long"], MISSING),
    ],
    ids=["submit-wrong", "submit-missing", "submit-off", "stop-wrong", "logs-missing"],
)
def test_a_token_is_needed(
    run: Any, tmp_path: Path, verb: list[str], given: tuple[dict[str, str], str]
) -> None:
    env, told = given
    done = run("raygnn", *verb, "--address", SERVER, env={"HOME": str(tmp_path), **env})
    assert done.returncode == 3
    assert told in done.stderr
    assert "RAY_AUTH_TOKEN_PATH" in done.stderr
    assert "Traceback" not in done.stderr
