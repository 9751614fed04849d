"""Two machines that share no directory, and a store that both reach: train, lose a rank, go on
exactly, predict; also with a network to the store that is slow, and while the store is away."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import yaml

from raygnn.config.load import load_config
from raygnn.runs.run_directory import EVENTS, LOGS
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.ray_cluster import Cluster, ray_cluster
from tests.support.small_jobs import job, losses, train_on_ranks, wait_for_step
from tests.support.stores import KEYS, served

pytestmark = [needs_hosts(), pytest.mark.system, pytest.mark.timeout(1800)]

LIMIT = 900.0
AWAY = "is not in s3://bucket/runs/test/checkpoints: "
BACK = "is in s3://bucket/runs/test/checkpoints again"
SHOW = """
import sys, raygnn
run = raygnn.open_run(sys.argv[1])
run.metrics.to_json("/tmp/metrics.json")
print(run.summary["starts"], run.status)
"""
RAYGNN = [sys.executable, "-m", "raygnn"]


def seen(host: Host, path: str) -> Path:
    """Return a host's file as it is named from outside."""
    return Path(f"/proc/{host.pid}/root{path}")


def settings(storage: str, *, pause: float = 0.0, at: int = 6, **sections: Any) -> dict[str, Any]:
    args = {"pause": pause, "at": at, "flag": "/tmp/died"}
    config = job(
        Path("/tmp"),
        model={"kind": "tests.support.own_models:Dying", "args": args},
        cluster={"address": "auto"},
        fault={"max_failures": 1, "checkpoint_every": 2, "keep": 2},
        comm={"timeout": 60},
        staging={"path": None},  # in each host's private /tmp
        **sections,
    )
    del config["cluster"]["num_cpus"]
    return {**config, "storage": storage}


def start(cluster: Cluster, config: dict[str, Any]) -> subprocess.Popen[Any]:
    directory = seen(cluster.hosts[0], "/tmp/work")
    directory.mkdir()
    (directory / "job.yaml").write_text(yaml.safe_dump(config))
    with open(directory / "output", "w") as output:
        argv = [*RAYGNN, "train", "job.yaml"]
        return cluster.popen(argv, cwd="/tmp/work", stdout=output, stderr=output)


def said(cluster: Cluster) -> str:
    return seen(cluster.hosts[0], "/tmp/work/output").read_text()


def undisturbed(tmp_path: Path, config: dict[str, Any]) -> np.ndarray:
    """Losses of the same training without a failure."""
    flag = tmp_path / "died"
    flag.touch()
    plain = {**config, "storage": str(tmp_path), "staging": {"path": str(tmp_path / "stage")}}
    args = {"pause": 0.0, "at": 1, "flag": str(flag)}
    plain |= {"model": {**config["model"], "args": args}, "cluster": {"workers": 2}}
    return losses(train_on_ranks(load_config(plain)))


def check(cluster: Cluster, place: str, expected: np.ndarray) -> None:
    """See that the run is in the store, its losses are those of one that nothing disturbed, nothing
    of it is left on the machines, and the one that did not start it can predict with it."""
    host, run = cluster.hosts[1], place.replace("/runs?", "/runs/test?")
    done = cluster.run([sys.executable, "-c", SHOW, run], host=1, cwd="/tmp", timeout=LIMIT)
    assert done.stdout.split() == ["2", "done"], done.stdout + done.stderr
    metrics = pandas.read_json(seen(host, "/tmp/metrics.json"))
    found = metrics["train/loss"].dropna().to_numpy(np.float32)
    # Ray's workers and ranks that are forked here may differ in the last place of a loss
    np.testing.assert_array_max_ulp(found, expected.astype(np.float32), maxulp=1)
    for number in (0, 1):
        left = seen(cluster.hosts[number], "/tmp/raygnn-0/work").rglob("*")
        assert not [path for path in left if path.is_file() and not path.name.startswith(".")]
    argv = [*RAYGNN, "predict", run, "--trust", "--out", "/tmp/out.parquet"]
    done = cluster.run(argv, host=1, cwd="/tmp", timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pandas.read_parquet(seen(host, "/tmp/out.parquet"))
    assert sorted(rows["node"]) == list(range(2000))


@pytest.mark.slow
def test_a_run_continues_after_the_death_of_a_rank(tmp_path: Path) -> None:
    with hosts(3) as group, served(group[2]) as place, ray_cluster(group[:2], env=KEYS) as cluster:
        config = settings(place)
        command = start(cluster, config)
        assert command.wait(LIMIT) == 0, said(cluster)
        check(cluster, place, undisturbed(tmp_path, config))


@pytest.mark.slow
def test_a_network_that_takes_300_ms(tmp_path: Path) -> None:
    with (
        hosts(3) as group,
        served(group[2], delay=0.3) as place,
        ray_cluster(group[:2], env=KEYS) as cluster,
    ):
        config = settings(place)
        command = start(cluster, config)
        assert command.wait(LIMIT) == 0, said(cluster)
        check(cluster, place, undisturbed(tmp_path, config))


@pytest.mark.slow
def test_an_outage_of_the_store_for_a_minute(tmp_path: Path) -> None:
    """Steps are made and recorded meanwhile, the user is told, once, that the store is away and
    that it is back, the state goes up then, and a rank that dies later takes the run back no
    further than that."""
    with hosts(3) as group, served(group[2]) as place, ray_cluster(group[:2], env=KEYS) as cluster:
        config = settings(place, pause=2.0, at=55, train={"epochs": 16})
        command = start(cluster, config)
        (work,) = wait_for(lambda: list(seen(group[0], "/tmp/raygnn-0/work").glob("*/test")))
        wait_for_step(work / "metrics.jsonl", 4, command)
        group[2].down()
        time.sleep(60)
        steps = (work / "metrics.jsonl").read_text().count("train/loss")
        assert steps > 12, said(cluster)  # of 30 that fit into a minute
        assert outages(work, cluster) == (1, 0), said(cluster)
        group[2].up()
        wait_for(lambda: [work] * outages(work, cluster)[1])
        assert command.wait(LIMIT) == 0, said(cluster)
        shown = " ".join(said(cluster).split())
        assert (shown.count(AWAY), shown.count(BACK)) == (1, 1), shown
        check(cluster, place, undisturbed(tmp_path, config))


def outages(work: Path, cluster: Cluster) -> tuple[int, int]:
    """Count the events of uploads that began to fail, and of those that succeeded again."""
    told = (work / LOGS / EVENTS).read_text()
    return told.count(AWAY), told.count(BACK)


def wait_for(look: Callable[[], list[Path]]) -> list[Path]:
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found
