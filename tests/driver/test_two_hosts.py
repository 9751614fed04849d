"""A job on two machines whose network does not explain itself, as two machines' often does not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import raygnn
from raygnn.runs.diagnose.state_file import read_state
from tests.support.hosts import hosts, needs_hosts
from tests.support.ray_cluster import Cluster, ray_cluster
from tests.support.small_jobs import job, wait_for_step
from tests.support.tables_builder import write_shop

pytestmark = [pytest.mark.system, needs_hosts()]

LIMIT = 180.0

# The model prints the rank's host, which is then in the rank's log.
_MODEL = """
import socket

from tests.support.own_models import DglSage


class Named(DglSage):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        print("this rank is on", socket.gethostname())
"""
_PLAIN = """
import subprocess
import sys

import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer


def loop():
    value = torch.ones(1)
    dist.all_reduce(value)
    train.report({"sum": value.item()})


trainer = TorchTrainer(
    loop,
    torch_config=TorchConfig(backend="gloo", timeout_s=5),
    scaling_config=train.ScalingConfig(num_workers=2),
    run_config=train.RunConfig(name="plain", storage_path=sys.argv[1]),
)
print("sum", trainer.fit().metrics["sum"])
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that both hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    """Two hosts, each with an interface of another name and one CPU, that do not know their own
    names, as many images do."""
    with hosts(2, share=[shared]) as group:
        for host in group:
            write = ["sh", "-c", "echo 127.0.0.1 localhost > /etc/hosts"]
            host.run(write, cwd="/", timeout=LIMIT)
        with ray_cluster(group) as cluster:
            yield cluster


def test_a_job_uses_both_hosts(cluster: Cluster, shared: Path) -> None:
    config = job(
        shared / "runs",
        model={"kind": "named:Named"},
        staging={"path": "/tmp/stage"},  # each host has its own
        cluster={"address": "auto"},
    )
    del config["cluster"]["num_cpus"]
    (shared / "named.py").write_text(_MODEL)
    (shared / "job.yaml").write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "raygnn", "train", "job.yaml"]
    done = cluster.run(argv, cwd=shared, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    run = shared / "runs" / "test"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["workers"]) == ("done", 2)
    logs = [(run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    places = [set(re.findall(r"this rank is on (\w+)", log)) for log in logs]
    assert places in ([{"host0"}, {"host1"}], [{"host1"}, {"host0"}])


_NOTED = """
import socket
from pathlib import Path

import ray

import raygnn

remote = ray.remote


def noted(*given, **options):
    function = given[0] if given else None
    if not getattr(function, "__module__", "").startswith("raygnn.graph."):
        return remote(*given, **options)  # Ray's own, for one with options only

    def run(*task):
        Path(RAN, f"{function.__name__}-{socket.gethostname()}").touch()
        return function(*task)

    return remote(run)


ray.remote = noted
raygnn.partition("shop-job.yaml", display=False)
"""


@pytest.mark.slow
def test_both_hosts_make_the_partition_that_one_makes(cluster: Cluster, shared: Path) -> None:
    (shared / "shop").mkdir()
    config = {
        "name": "shop",
        "graph": {"format": "tables", "path": str(write_shop(shared / "shop").path)},
        "partition": {"engine": "ray", "method": "random", "parts": 4},
        "model": {"kind": "sage"},
    }
    on_ray = {**config, "storage": str(shared / "on-ray"), "cluster": {"address": "auto"}}
    (shared / "shop-job.yaml").write_text(yaml.safe_dump(on_ray))
    (shared / "noted.py").write_text(f"RAN = {str(shared / 'ran')!r}\n{_NOTED}")
    (shared / "ran").mkdir()
    done = cluster.run([sys.executable, "noted.py"], cwd=shared, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (shared / "ran").iterdir()} >= {"_write-host0", "_write-host1"}
    partition = config["partition"] | {"engine": "local"}
    local = raygnn.partition(
        {**config, "storage": str(shared / "local"), "partition": partition}, display=False
    )
    (made,) = (shared / "on-ray" / "partitions").glob("*/raygnn.json")
    assert local.manifest is not None
    assert json.loads(made.read_text())["files"] == local.manifest.model_dump()["files"]


@pytest.mark.slow
def test_plain_ray_train_does_not_find_the_other_host(cluster: Cluster, shared: Path) -> None:
    """Gloo alone offers the other host the address that its own name resolves to."""
    (shared / "plain.py").write_text(_PLAIN)
    argv = [sys.executable, "plain.py", str(shared / "plain")]
    done = cluster.run(argv, cwd=shared, timeout=LIMIT)
    assert done.returncode != 0
    assert "sum" not in done.stdout
    assert re.search(
        r"Connection refused.*\[127\.0\.0\.1\]|\[127\.0\.0\.1\].*Connection refused", done.stderr
    )


@pytest.mark.slow
def test_a_rank_that_is_stopped_on_the_other_host(cluster: Cluster, shared: Path) -> None:
    """The driver cannot see its process, and ends it through Ray."""
    config = job(
        shared / "runs",
        name="frozen",
        model={"kind": "tests.support.own_models:Slow"},
        staging={"path": "/tmp/stage"},
        cluster={"address": "auto"},
        fault={"heartbeat": "8s", "max_failures": 1, "checkpoint_every": 1},
    )
    del config["cluster"]["num_cpus"]
    (shared / "frozen.yaml").write_text(yaml.safe_dump(config))
    run = shared / "runs" / "frozen"
    argv = [sys.executable, "-m", "raygnn", "train", "frozen.yaml"]
    with open(shared / "output", "w+") as output:
        command = cluster.popen(argv, cwd=shared, stdout=output, stderr=output)
        wait_for_step(run / "metrics.jsonl", 3, command)
        states = [read_state(run / "logs" / f"rank-{rank}.state") for rank in (0, 1)]
        (start,) = [s for s in states if s is not None and s.host == "host1"]
        host = cluster.hosts[1]
        host.run(["sh", "-c", f"kill -STOP {start.pid}"], cwd="/", timeout=LIMIT)
        assert command.wait(LIMIT) == 0, (shared / "output").read_text()
    said = (shared / "output").read_text()
    assert f"rank {start.rank} sent no heartbeat" in said
    assert f"host1, pid {start.pid}, phase" in said
    assert "could not be terminated" not in said
    assert json.loads((run / "summary.json").read_text())["starts"] == 2
    there = ["test", "-e", f"/proc/{start.pid}"]
    assert host.run(there, cwd="/", timeout=LIMIT, check=False).returncode == 1


@pytest.mark.slow
def test_a_restart_on_another_node_gets_its_variables_too(shared: Path) -> None:
    with hosts(3, share=[shared]) as group:
        for host in group:
            write = ["sh", "-c", "echo 127.0.0.1 localhost > /etc/hosts"]
            host.run(write, cwd="/", timeout=LIMIT)
        with ray_cluster(group) as cluster:
            config = job(
                shared / "runs",
                name="restarted",
                model={"kind": "tests.support.own_models:Slow"},
                staging={"path": "/tmp/stage"},
                train={"epochs": 15},
                cluster={"address": "auto"},
                comm={"timeout": 30},
                fault={"checkpoint_every": 1, "max_failures": 5},
            )
            del config["cluster"]["num_cpus"]
            (shared / "restarted.yaml").write_text(yaml.safe_dump(config))
            run = shared / "runs" / "restarted"
            argv = [sys.executable, "-m", "raygnn", "train", "restarted.yaml"]
            with open(shared / "output", "w+") as output:
                command = cluster.popen(argv, cwd=shared, stdout=output, stderr=output)
                wait_for_step(run / "metrics.jsonl", 5, command)
                before = [given(run, rank)[-1]["host"] for rank in (0, 1)]
                lost = max(before)  # not the first host, which has the head and the driver
                cluster.stop(int(lost.removeprefix("host")))
                assert command.wait(LIMIT) == 0, (shared / "output").read_text()
    planned = json.loads((run / "preflight.json").read_text())["communication"]["nodes"]
    after = [given(run, rank)[-1] for rank in (0, 1)]
    assert lost not in [record["host"] for record in after]
    assert sorted(record["host"] for record in after) != sorted(before)
    for rank in (0, 1):
        for record in given(run, rank):  # of each start
            found = record["given"]
            assert (found.pop("backend"), found.pop("timeout")) == ("gloo", 30)
            assert found == {v["name"]: v["value"] for v in planned[record["node"]]}
            assert found["GLOO_SOCKET_IFNAME"] == record["host"].replace("host", "lan")


def given(run: Path, rank: int) -> list[dict[str, Any]]:
    """Return the communication plan that a rank recorded at each of its attempts."""
    lines = (run / "logs" / f"comm-rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
