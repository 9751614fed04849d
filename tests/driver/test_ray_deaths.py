"""Ray's own processes die in mid-training: the command names them, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

import raygnn
from raygnn.config.load import load_config
from raygnn.driver import ray_cluster
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import PreflightError
from raygnn.runs.run import Run
from raygnn.util import reaper
from raygnn.worker.job import attempts
from tests.support.commands import ROOT, Command
from tests.support.small_jobs import job, wait_for_step


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """A job that trains for minutes, writes checkpoints, and starts its ranks twice at most."""
    config = job(
        tmp_path / "runs",
        model={"kind": "tests.support.own_models:Slow"},
        train={"epochs": 100},
        fault={"max_failures": 1, "checkpoint_every": 2},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    command = Command(["train", "job.yaml"], tmp_path)
    yield command
    remove(command)


def remove(command: Command) -> None:
    if command.process.poll() is None:
        os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait()
    shutil.rmtree(command.temp, ignore_errors=True)


def kill(command: Command, part: str) -> int:
    """Kill the only process with this text in its command line."""
    (pid,) = [pid for pid, line in command.running().items() if part in line]
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_until(happened: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def failed(command: Command, run_dir: Path, expected: str) -> str:
    """Check that the command fails, reports the same cause everywhere and leaves nothing; return
    its output."""
    code, out, err = command.finish()
    assert code == 4, out + err
    assert err.startswith(f"error: {expected}"), err
    assert "--resume" in err
    run = Run(run_dir)
    assert run.summary["status"] == "failed"
    assert run.summary["error"].startswith(expected)
    cause = raygnn.diagnose(run_dir).cause
    assert (cause.kind, cause.what, cause.confidence) == ("ray_died", expected, "high")
    assert command.left_behind() == []
    return out


@pytest.mark.system
@pytest.mark.parametrize(
    ("program", "role"), [("/raylet/raylet", "Ray's raylet"), ("/gcs/gcs_server", "Ray's GCS")]
)
def test_a_core_process_dies(command: Command, tmp_path: Path, program: str, role: str) -> None:
    run_dir, before = tmp_path / "runs" / "test", set(os.listdir("/dev/shm"))
    wait_for_step(run_dir / "metrics.jsonl", 3, command.process)
    pid = kill(command, program)
    failed(command, run_dir, f"{role} (process {pid}) was killed by SIGKILL")
    assert {name for name in os.listdir("/dev/shm") if "plasma" in name} <= before


@pytest.mark.system
def test_nothing_of_ray_outlives_a_killed_command(command: Command, tmp_path: Path) -> None:
    """Ray's agents notice the death of their raylet only after a minute or more."""
    wait_for_step(tmp_path / "runs" / "test" / "metrics.jsonl", 3, command.process)
    assert any("agent" in line for line in command.running().values())
    command.process.kill()
    command.process.wait()
    assert command.left_behind() == []


def test_the_reaper_spares_what_the_command_started(tmp_path: Path) -> None:
    """The user's processes inherit open files; Ray's name the directory, or have a title."""
    python = f"import sys, time; open({str(tmp_path / 'log')!r}, 'a').close(); time.sleep(60)"
    with open(tmp_path / "log", "a") as log:
        own = subprocess.Popen(["sleep", "60"], stdout=log)
        rays = [
            subprocess.Popen([sys.executable, "-c", python], stdout=log),
            subprocess.Popen(["ray::IDLE", "60"], executable=shutil.which("sleep"), stdout=log),
        ]
    try:
        ended = time.monotonic() + 30  # until the executables have replaced their forks
        while not set(reaper.running(str(tmp_path))) >= {p.pid for p in rays}:
            assert time.monotonic() < ended
            time.sleep(0.1)
        assert own.pid not in reaper.running(str(tmp_path))
    finally:
        for process in (own, *rays):
            process.kill()
            process.wait()


HEAD = """
import sys
from pathlib import Path
import ray
import raygnn
from raygnn.driver.ray_cluster import RayCluster
from tests.support.small_jobs import job
with RayCluster(raygnn.load_config(job(Path(), cluster={"num_cpus": 4}))) as cluster:
    cluster.wait()
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def on_a_cluster(tmp_path: Path) -> Iterator[Callable[..., tuple[Command, psutil.Process, str]]]:
    """Starts a Ray, and on it a job that trains for minutes; returns the command, the process that
    holds that Ray, and its address."""
    head, commands = None, []

    def start(wait: int, **sections: Any) -> tuple[Command, psutil.Process, str]:
        nonlocal head
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        head = subprocess.Popen([sys.executable, "-c", HEAD], env=env, text=True, **pipes)
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        config = job(
            tmp_path / "runs",
            model={"kind": "tests.support.own_models:Slow"},
            train={"epochs": 100},
            cluster={"address": address},
            **sections,
        )
        del config["cluster"]["num_cpus"]
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
        limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(wait)}
        commands.append(Command(["train", "job.yaml"], tmp_path, **limit))
        wait_for_step(tmp_path / "runs" / "test" / "metrics.jsonl", 3, commands[0].process)
        return commands[0], psutil.Process(head.pid), address

    try:
        yield start
    finally:
        for command in commands:
            remove(command)
        if head is not None:
            head.communicate("\n", timeout=120)


@pytest.mark.system
@pytest.mark.slow
def test_the_gcs_of_a_cluster_dies(on_a_cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Ray itself would end the command after 40 s, with exit code 1 and no error."""
    command, head, address = on_a_cluster(40)
    (gcs,) = [p for p in head.children() if p.name() == "gcs_server"]
    gcs.kill()
    code, out, err = command.finish()
    assert code == 4, out + err
    assert err.startswith(f"error: the head node's GCS at {address} has accepted no connection")
    assert "--resume" in err
    assert Run(tmp_path / "runs" / "test").summary["status"] == "failed"
    assert command.left_behind() == []


@pytest.mark.system
@pytest.mark.slow
def test_the_controller_dies(on_a_cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Its first death counts as a failure of a rank; `max_failures` ends the run. With an embedded
    Ray it is in the driver."""
    run_dir = tmp_path / "runs" / "test"
    metrics = run_dir / "metrics.jsonl"
    command, head, _ = on_a_cluster(60, fault={"max_failures": 1, "checkpoint_every": 2})

    def kill_controller() -> None:
        titles = {p: " ".join(p.cmdline()) for p in head.children(recursive=True)}
        (controller,) = [p for p, title in titles.items() if "ray::TrainController" in title]
        controller.kill()

    kill_controller()
    wait_until(lambda: attempts(run_dir) == 2, command)
    size = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > size, command)
    kill_controller()
    out = failed(
        command,
        run_dir,
        "Ray Train's controller, the process that starts and watches the ranks, died",
    )
    assert "attempt 2 of at most 2, from step-" in out
    assert Run(run_dir).summary["starts"] == 2


class Port:
    """Port on loopback that accepts connections while it is open."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._socket.getsockname()[1]))

    def close(self) -> None:
        self._socket.close()

    def open(self) -> None:
        self._socket = socket.create_server(self.address)


def test_a_process_that_goes_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short-lived helpers of Ray do not make its start a failure."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    child.wait()
    monkeypatch.setattr(ray_cluster, "processes_of", lambda directory: [process])
    assert ray_cluster.Children("").death() is None


def test_a_core_process_elsewhere_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GCS may be started again; a raylet is not."""
    gcs, raylet = Port(), Port()
    context = SimpleNamespace(gcs_address="{}:{}".format(*gcs.address), get_node_id=lambda: "here")
    nodes = [
        {"NodeID": "there", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1},
        dict(zip(("NodeID", "NodeManagerAddress", "NodeManagerPort"), ("here", *raylet.address))),
    ]
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "40")
    now = 1000.0
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now))
    core = ray_cluster.Endpoints()

    def after(seconds: float) -> str | None:
        nonlocal now
        now += seconds
        return core.death()

    assert after(5) is None
    gcs.close()
    assert (after(5), after(15)) == (None, None)
    assert not core.ask()
    gcs.open()
    assert after(10) is None
    assert core.ask()
    raylet.close()
    assert (after(5), after(9)) == (None, None)
    host, port = raylet.address
    assert after(2) == f"this node's raylet at {host}:{port} has accepted no connection for 11 s"
    raylet.open()
    gcs.close()
    assert (after(5), after(15), after(4)) == (None, None, None)
    assert "the head node's GCS at" in str(after(2))
    raylet.close()


@pytest.mark.system
@pytest.mark.usefixtures("no_ray")
def test_a_stop_while_the_rest_of_ray_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shutdown waits longer for a Ray that is partly up, and does not report its failure."""
    comes = threading.Event()

    def fail_late(directory: str) -> None:
        comes.set()
        time.sleep(4)
        raise RuntimeError("a process of Ray's was ended")

    place = tempfile.mkdtemp(prefix="t-")  # short: sockets are in it
    monkeypatch.setattr(tempfile, "tempdir", place)
    monkeypatch.setattr(ray_cluster, "_LEAVE", 1.0)
    monkeypatch.setattr(ray_cluster, "Children", fail_late)
    messages: list[str] = []
    with RayCluster(load_config(job(tmp_path)), notify=messages.append) as cluster:
        cluster.start()
        assert comes.wait(120)
        processes = ray_cluster.processes_of(str(next(Path(place).iterdir())))
        assert processes
    assert messages == []  # none of a Ray that was just starting
    assert not [process for process in processes if process.is_running()]
    os.rmdir(place)  # it is empty


@pytest.mark.parametrize("tries", [1, 2])
def test_a_ray_that_does_not_start_is_tried_again_and_leaves_its_logs(
    tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is tried once more; the second one's output is in the run directory."""
    config = load_config(job(tmp_path, cluster={"address": "local"}))
    (config.run_dir / "logs").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    begun: list[str] = []

    def init(*, _temp_dir: str, **_: Any) -> None:
        begun.append(_temp_dir)
        logs = Path(_temp_dir, "session_latest", "logs")
        logs.mkdir(parents=True)
        (logs / "gcs_server.out").write_text(f"try {len(begun)}")
        if len(begun) <= tries:
            raise ConnectionError("no answer")

    said: list[str] = []
    monkeypatch.setattr("ray.init", init)
    with RayCluster(config, notify=said.append) as cluster:
        if tries == 1:
            cluster.wait()
        else:
            with pytest.raises(PreflightError, match="no answer") as error:
                cluster.wait()
            assert str(config.run_dir / "logs" / "ray") in str(error.value.remedy)
    assert said == ["Ray did not start: no answer; trying again"]
    assert len(begun) == 2
    assert not [*(tmp_path / "t").iterdir()]
    kept = config.run_dir / "logs" / "ray" / "gcs_server.out"
    assert kept.exists() == (tries == 2)
    assert tries == 1 or kept.read_text() == "try 2"
