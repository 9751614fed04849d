"""A job that needs more nodes than there are asks for room and waits for it: `cluster.wait`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.growing import autoscaling
from tests.support.hosts import hosts, needs_hosts
from tests.support.ray_cluster import Cluster, ray_cluster
from tests.support.small_jobs import job

pytestmark = [needs_hosts(), pytest.mark.system]

LIMIT = 180.0
# Reports requested and held resources from another process of the cluster.
_GROUPS = """
import json

import ray
from ray.util import placement_group_table

ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
groups = [[group["state"], len(group["bundles"])] for group in placement_group_table().values()]
left = [group for group in groups if group[0] != "REMOVED"]
print(json.dumps([left, ray.available_resources().get("CPU", 0.0)]))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that both hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    """A Ray on the first of two hosts, with one CPU each; the last test brings the second."""
    with hosts(2, share=[shared]) as group, ray_cluster(group, at_first=1) as cluster:
        yield cluster


def command(shared: Path, name: str, **sections: Any) -> list[str]:
    config = job(shared / "runs", name=name, staging={"path": "/tmp/stage"}, **sections)
    del config["cluster"]["num_cpus"]
    (shared / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "raygnn", "train", f"{name}.yaml"]


def asked(cluster: Cluster) -> tuple[list[list[Any]], float]:
    """Return the state and size of each existing placement group, and the number of free CPUs."""
    done = cluster.run([sys.executable, "-c", _GROUPS], timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    groups, free = json.loads(done.stdout.splitlines()[-1])
    return groups, free


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def until_it_waits(output: Path) -> None:
    until(lambda: "1 of 2 fit on 1 node" in output.read_text())


@pytest.mark.slow
def test_a_wait_that_ends_is_reported_and_releases_its_request(
    cluster: Cluster, shared: Path
) -> None:
    wait = {"address": "auto", "wait": "3s"}
    done = cluster.run(command(shared, "alone", cluster=wait), cwd=shared, timeout=LIMIT)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "after 3s Ray has resources for 1 of 2 workers with 1 CPUs each" in done.stderr
    assert "1 of 1 CPUs are free on 1 node" in done.stderr
    assert "ray status" in done.stderr
    assert not (shared / "runs" / "alone").exists()
    # the fewest of a range are enough, and they fit
    wait["workers"] = [1, 2]
    done = cluster.run(command(shared, "range", cluster=wait), cwd=shared, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((shared / "runs" / "range" / "summary.json").read_text())["workers"] == 1


def test_a_wait_that_is_ended_asks_for_nothing(cluster: Cluster, shared: Path) -> None:
    """Its request is released, even if no process remains to release it."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        argv = command(shared, number.name, cluster={"address": "auto", "wait": "10m"})
        with open(shared / "ended.out", "w+") as out:
            process = cluster.popen(argv, cwd=shared, stdout=out, stderr=out)
            until_it_waits(shared / "ended.out")
            process.send_signal(number)
            assert process.wait(LIMIT) == code, (shared / "ended.out").read_text()
        assert (shared / "runs" / number.name).exists() == (number == signal.SIGKILL)
        until(lambda: asked(cluster) == ([], 1.0))


@pytest.mark.slow
def test_a_job_starts_when_its_second_host_has_come(cluster: Cluster, shared: Path) -> None:
    argv = command(shared, "grows", cluster={"address": "auto", "wait": "2m"})
    output = shared / "grows.out"
    with open(output, "w") as out:
        process = cluster.popen(argv, cwd=shared, stdout=out, stderr=out)
        until_it_waits(output)
        assert asked(cluster) == ([["PENDING", 2]], 1.0)
        assert not (shared / "runs" / "grows" / "summary.json").exists()
        cluster.start(1)
        assert process.wait(LIMIT) == 0, output.read_text()
    said = output.read_text()
    assert "resources for 2 workers: " in said
    assert "have to wait" not in said  # resources that the job requested are free for it
    run = shared / "runs" / "grows"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["workers"], summary["starts"]) == ("done", 2, 1)
    judged = json.loads((run / "preflight.json").read_text())
    assert [node["node"] for node in judged["nodes"]] == ["host0", "host1"]
    assert [node["problem"] for node in judged["nodes"]] == [None, None]
    assert asked(cluster) == ([], 2.0)


@pytest.mark.slow
def test_rays_autoscaler_brings_the_second_host_and_takes_it_back(shared: Path) -> None:
    """The real one: what it starts and ends are files, and the hosts follow them."""
    instances = shared / "instances"
    instances.mkdir()
    with hosts(2, share=[shared]) as group:
        second = instances / group[1].address
        first = {"RAY_enable_autoscaler_v2": "0"}
        file = shared / "autoscaling.json"  # which is YAML, too
        file.write_text(json.dumps(autoscaling(instances, [h.address for h in group], idle=60.0)))
        with ray_cluster(group, at_first=1, autoscaling=file, env=first) as cluster:
            argv = command(shared, "cloud", cluster={"address": "auto", "wait": "2m"})
            output = shared / "cloud.out"
            with open(output, "w") as out:
                process = cluster.popen(argv, cwd=shared, stdout=out, stderr=out)
                until(second.exists)
                cluster.start(1)
                assert process.wait(LIMIT) == 0, output.read_text()
            until(lambda: not second.exists())
    run = shared / "runs" / "cloud"
    assert json.loads((run / "summary.json").read_text())["workers"] == 2
