"""A host that is lost in the middle of a job: its cable is pulled and its raylet killed.

`pytest -s` prints how long it took, from the fault, until the command ended or the next step came.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.ray_cluster import CHECKOUT, Cluster, ray_cluster
from tests.support.small_jobs import job, wait_for_step

pytestmark = [
    pytest.mark.system,
    needs_hosts(),
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
]

TIMEOUT = 15  # seconds, comm.timeout
ROOM = 60.0  # seconds to wait for free resources again, with such a timeout
# limit in the README until ranks notice, Ray ends them, and their last messages have arrived
END = TIMEOUT + 45.0
LIMIT = 400.0
EPOCHS = 20
SEEDS = 400  # training nodes: 0.2 of 2000

# Records what every step trained on, in a file for each process.
_MODEL = """
import json, os, time
from pathlib import Path

from raygnn.tasks.lightning_modules import TaskModule
from tests.support.own_models import DglSage

_step = TaskModule.training_step


def _noted(self, batch, number):
    seeds = batch.seeds[batch.weight > 0].tolist()
    record = {"epoch": batch.epoch, "step": batch.step, "world": self.world, "seeds": seeds}
    with open(Path(os.environ["SEEN"]) / f"{os.uname().nodename}-{os.getpid()}", "a") as file:
        file.write(json.dumps({"time": time.time(), **record}) + "\\n")
    return _step(self, batch, number)


TaskModule.training_step = _noted


class Seen(DglSage):
    def __init__(self, in_features, out_features, pause):
        super().__init__(in_features, out_features)
        self.pause = pause

    def forward(self, blocks, x):
        if self.training and not Path(os.environ["SEEN"] + ".quick").exists():
            time.sleep(self.pause)
        return super().forward(blocks, x)
"""


class Lab:
    """Two hosts with a CPU each, and jobs on them."""

    def __init__(self, group: list[Host], cluster: Cluster, shared: Path):
        self.hosts, self.cluster, self.shared = group, cluster, shared
        (shared / "seen.py").write_text(_MODEL)

    def start(self, name: str, *, pause: float = 0.3, **sections: Any) -> subprocess.Popen[Any]:
        sections["cluster"] = {"address": "auto", **sections.get("cluster", {})}
        config = job(
            self.shared / "runs",
            name=name,
            model={"kind": "seen:Seen", "args": {"pause": pause}},
            staging={"path": "/tmp/stage"},
            train={"epochs": EPOCHS, "lr_scaling": "linear"},
            comm={"timeout": TIMEOUT, "env": {"SEEN": str(self.seen(name))}},
            **sections,
        )
        del config["cluster"]["num_cpus"]
        self.seen(name).mkdir()
        (self.shared / f"{name}.yaml").write_text(yaml.safe_dump(config))
        argv = [sys.executable, "-m", "raygnn", "train", f"{name}.yaml"]
        with open(self.shared / f"{name}.out", "w") as output:
            return self.cluster.popen(argv, cwd=self.shared, stdout=output, stderr=output)

    def seen(self, name: str) -> Path:
        return self.shared / f"seen-{name}"

    def run(self, name: str) -> Path:
        return self.shared / "runs" / name

    def said(self, name: str) -> str:
        return (self.shared / f"{name}.out").read_text()

    def lose_one(self, name: str, command: subprocess.Popen[Any]) -> tuple[int, float]:
        """Lose the second host after some steps; return its rank, and the time."""
        wait_for_step(self.run(name) / "metrics.jsonl", 9, command)
        rank = next(r for r in (0, 1) if started(self.run(name), r)[-1]["host"] == "host1")
        self.cluster.lose(1)
        return rank, time.time()

    def processes(self, number: int) -> list[str]:
        """Return a host's processes that belong to a job, or to a Ray that has ended."""
        done = self.hosts[number].run(["ps", "-eo", "args"], cwd="/", timeout=60)
        lines = [line for line in done.stdout.splitlines()[1:] if not line.startswith("ps ")]
        if number == 0:  # its Ray still runs
            words = ("RayTrainWorker", "TrainController", "Synchronization", "raygnn train")
            lines = [line for line in lines if any(word in line for word in words)]
        return [line for line in lines if line.strip() != "cat"]

    def shm(self, number: int) -> set[str]:
        done = self.hosts[number].run(["ls", "-A", "/dev/shm"], cwd="/", timeout=60)
        return set(done.stdout.split())


@contextmanager
def _lab(shared: Path) -> Iterator[Lab]:
    with hosts(2, share=[shared]) as group, ray_cluster(group) as cluster:
        yield Lab(group, cluster, shared)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with _lab(tmp_path) as lab:
        yield lab


def started(run: Path, rank: int) -> list[dict[str, Any]]:
    """Return what a rank recorded at each of its attempts."""
    lines = (run / "logs" / f"comm-rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["train/loss"] for r in records if "train/loss" in r}


def trained_on(seen: Path) -> dict[tuple[int, int], list[list[int]]]:
    """(epoch, step) → what each time that it was made it was made of, all ranks together."""
    found: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    records = [
        json.loads(line) for file in seen.iterdir() for line in file.read_text().splitlines()
    ]
    for record in sorted(records, key=lambda record: record["time"]):
        step = found.setdefault((record["epoch"], record["step"]), {})
        same = step.setdefault(record["world"], {"ranks": 0, "seeds": []})
        if same["ranks"] == record["world"]:  # once more, by as many
            same["ranks"], same["seeds"] = 0, []
        same["ranks"] += 1
        same["seeds"] += record["seeds"]
    return {
        key: [sorted(s["seeds"]) for world, s in step.items() if s["ranks"] == world]
        for key, step in found.items()
    }


def assert_every_seed_once_per_epoch(seen: Path) -> None:
    steps = trained_on(seen)
    for epoch in range(EPOCHS):
        mine = [made for (of, _), made in steps.items() if of == epoch]
        assert all(made for made in mine)
        # a step that was made again was made of the same
        assert all(again == made[0] for made in mine for again in made)
        seeds = np.concatenate([made[0] for made in mine])
        assert len(seeds) == SEEDS
        assert len(np.unique(seeds)) == SEEDS


def first_step_after(seen: Path, when: float, world: int) -> float:
    """Return the time of the first step after ``when`` of an attempt with ``world`` ranks."""
    records = [
        json.loads(line) for file in seen.iterdir() for line in file.read_text().splitlines()
    ]
    return min(r["time"] for r in records if r["time"] > when and r["world"] == world)


def wait_for_start(lab: Lab, name: str, world: int, since: float, command: Any) -> float:
    """Wait for the first step of an attempt with ``world`` ranks, and return its time."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        assert command.poll() is None, lab.said(name)
        try:
            return first_step_after(lab.seen(name), since, world)
        except ValueError:
            time.sleep(0.2)
    raise AssertionError(f"no step with {world} ranks: {lab.said(name)}")


def diagnosis(lab: Lab, name: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "raygnn", "diagnose", str(lab.run(name)), "--json"]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("failures", [0, 1])
def test_a_fixed_number_of_workers_ends(lab: Lab, failures: int) -> None:
    before = lab.shm(0)
    command = lab.start(
        "fixed", cluster={"workers": 2}, fault={"checkpoint_every": 4, "max_failures": failures}
    )
    rank, fault = lab.lose_one("fixed", command)
    assert command.wait(LIMIT) == 4, lab.said("fixed")
    took = time.time() - fault
    said = " ".join(lab.said("fixed").split())
    print(f"\nmax_failures {failures}: the command ended {took:.1f} s after the fault\n{said}")
    assert f"rank {rank} was lost with its node host1" in said
    assert took < END + failures * ROOM
    if failures:
        wait = "waiting up to 60 s for resources for 2 workers: there are resources for 1; rank"
        assert f"{wait} {rank} was lost" in said
        assert "there are resources for 1 worker of 2, after 60 s" in said
    found = diagnosis(lab, "fixed")["cause"]
    assert (found["kind"], found["rank"], found["confidence"]) == ("node_lost", rank, "high")
    assert "host1" in found["what"]
    end = time.monotonic() + 30  # its children may take a moment to end
    while any(map(lab.processes, (0, 1))) and time.monotonic() < end:
        time.sleep(0.5)
    assert [lab.processes(number) for number in (0, 1)] == [[], []]
    assert lab.shm(0) == before
    assert lab.shm(1) == set()


def test_a_range_of_workers_continues_with_the_remaining_ones(lab: Lab) -> None:
    range_ = {"workers": [1, 2]}
    fault_ = {"checkpoint_every": 4, "max_failures": 2}
    whole = lab.start("whole", pause=0.0, cluster=range_, fault=fault_)
    assert whole.wait(LIMIT) == 0, lab.said("whole")
    command = lab.start("range", cluster=range_, fault=fault_)
    rank, fault = lab.lose_one("range", command)
    assert command.wait(LIMIT) == 0, lab.said("range")
    took = first_step_after(lab.seen("range"), fault, world=1) - fault
    print(f"\nthe first step with 1 worker came {took:.1f} s after the fault\n{lab.said('range')}")
    assert took < END + 30
    said = " ".join(lab.said("range").split())
    assert f"1 worker of 2; rank {rank} was lost with its node host1" in said
    run = lab.run("range")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["workers"], summary["starts"]) == ("done", 1, 2)
    assert [start["world"] for start in started(run, 0)] == [2, 1]
    expected, found = losses(lab.run("whole")), losses(run)
    assert sorted(found) == sorted(expected) == list(range(1, 4 * EPOCHS + 1))
    np.testing.assert_allclose(
        [found[step] for step in expected], list(expected.values()), atol=1e-4
    )
    assert_every_seed_once_per_epoch(lab.seen("whole"))
    assert_every_seed_once_per_epoch(lab.seen("range"))


def test_a_host_that_comes_back_is_used_again(lab: Lab) -> None:
    command = lab.start(
        "back",
        pause=2.0,
        cluster={"workers": [1, 2]},
        fault={"checkpoint_every": 4, "max_failures": 1},
    )
    _, fault = lab.lose_one("back", command)
    small = wait_for_start(lab, "back", 1, fault, command)
    lab.hosts[1].up()
    lab.cluster.start(1)
    back = time.time()
    grown = wait_for_start(lab, "back", 2, small, command)
    print(
        f"\n1 worker {small - fault:.1f} s after the fault, 2 {grown - back:.1f} s after it joined"
    )
    assert command.wait(LIMIT) == 0, lab.said("back")
    print(lab.said("back"))
    run = lab.run("back")
    assert [start["world"] for start in started(run, 0)] == [2, 1, 2]
    assert json.loads((run / "summary.json").read_text())["workers"] == 2
    assert_every_seed_once_per_epoch(lab.seen("back"))


def test_a_host_that_is_to_go(lab: Lab) -> None:
    """Its notice causes a checkpoint, and when it goes, the other host continues."""
    command = lab.start(
        "notice",
        pause=0.5,
        cluster={"workers": [1, 2]},
        fault={"checkpoint_every": "1h", "max_failures": 1},
    )
    wait_for_step(lab.run("notice") / "metrics.jsonl", 5, command)
    (record,) = (
        start for rank in (0, 1) for start in started(lab.run("notice"), rank)
        if start["host"] == "host1"
    )  # fmt: skip
    argv = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    argv += ["--address", lab.cluster.address, "--node-id", record["node"]]
    argv += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    argv += ["--deadline-remaining-seconds", "30"]
    done = lab.cluster.run(argv, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    notice = time.time()
    checkpoints = lab.run("notice") / "checkpoints"
    while not any(checkpoints.glob("step-*")):
        assert time.time() < notice + 20, lab.said("notice")
        time.sleep(0.1)
    saved = time.time()
    small = wait_for_start(lab, "notice", 1, notice, command)
    print(f"\na checkpoint {saved - notice:.1f} s after the notice of 30 s, 1 worker "
          f"{small - notice:.1f} s after it")  # fmt: skip
    assert command.wait(LIMIT) == 0, lab.said("notice")
    print(lab.said("notice"))
    assert "will be preempted in" in lab.said("notice")
    assert json.loads((lab.run("notice") / "summary.json").read_text())["workers"] == 1
    assert_every_seed_once_per_epoch(lab.seen("notice"))
