"""Workers that do not come, and what is said of what Ray reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError, WorkerGroupError
from ray.util import placement_group, remove_placement_group
from rich.console import Console

from raygnn import compat
from raygnn.config.load import load_config
from raygnn.driver import ray_cluster
from raygnn.driver import startup as module
from raygnn.driver.launch import explain
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.startup import Startup
from raygnn.errors import TrainingError
from raygnn.runs.display import Display
from raygnn.worker.failures import Failure
from tests.support.small_jobs import job


@pytest.fixture(scope="module")
def cluster(no_ray: None) -> Iterator[RayCluster]:
    """A Ray with one CPU, as for a job."""
    config = load_config(job(Path(), cluster={"num_cpus": 1, "workers": 1}))
    with RayCluster(config) as cluster:
        cluster.wait()
        yield cluster


def stand_in(name: str, **options: Any) -> Any:
    """Start an actor with the name of one of Ray Train's."""

    class Actor:
        def ping(self) -> None: ...

    Actor.__name__ = Actor.__qualname__ = name
    return ray.remote(num_cpus=0, **options)(Actor).remote()


@pytest.fixture
def controller(cluster: RayCluster) -> Iterator[None]:
    actor = stand_in("TrainController")
    ray.get(actor.ping.remote(), timeout=120)
    yield
    ray.kill(actor)


@pytest.fixture
def start(cluster: RayCluster) -> Callable[..., tuple[Startup, Display]]:
    def make(workers: int, **sections: Any) -> tuple[Startup, Display]:
        config = load_config(job(Path(), **sections))
        show = Display(Console(width=200, record=True))
        return Startup(config, workers, cluster, show), show

    return make


def look(startup: Startup) -> None:
    """Poll until it raises."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        startup.poll()
        time.sleep(0.1)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL", 0.1)
    monkeypatch.setattr(module, "_NOTE_AFTER", 0.2)
    monkeypatch.setattr(module, "_NO_ROOM", 0.6)
    monkeypatch.setattr(module, "patience", lambda config: config.comm.timeout.seconds)


@pytest.mark.system
@pytest.mark.comfort  # the actors' states
def test_workers_that_come(cluster: RayCluster, start: Any, hurry: None) -> None:
    actor = stand_in("RayTrainWorker")
    startup, show = start(1)
    assert startup.detail == "starting Ray"
    ray.get(actor.ping.remote(), timeout=120)
    startup.poll()
    assert startup.detail == ""
    ray.kill(actor)  # Ray Train reports what happens to it later
    time.sleep(1)
    startup.poll()
    assert show.console.export_text() == ""


@pytest.mark.system
def test_resources_that_never_become_free(controller: None, start: Any, hurry: None) -> None:
    group = placement_group([{"CPU": 1}] * 3)
    startup, show = start(3)
    with pytest.raises(TrainingError) as caught:
        look(startup)
    remove_placement_group(group)
    assert startup.detail == "waiting for resources for 3 workers"
    what = "resources for 3 workers with 1 CPUs each: 1 of 1 CPUs are free"
    assert caught.value.what.startswith(f"Ray has no {what}, after ")
    assert "lower cluster.workers" in str(caught.value.remedy)
    assert show.console.export_text() == f"waiting up to 1 s for {what}\n"


@pytest.mark.system
def test_resources_of_another_job_are_waited_for(controller: None, start: Any, hurry: None) -> None:
    taken = placement_group([{"CPU": 1}])
    assert taken.wait(30)
    group = placement_group([{"CPU": 1}])
    startup, show = start(1, comm={"timeout": 3})
    with pytest.raises(TrainingError, match="0 of 1 CPUs are free"):
        look(startup)
    for each in (group, taken):
        remove_placement_group(each)
    assert "waiting up to 3 s" in show.console.export_text()


@pytest.mark.system
@pytest.mark.comfort  # the actors' states
def test_resources_for_the_minimum_that_never_become_free(
    controller: None, start: Any, hurry: None
) -> None:
    """Our scaling policy checks for free resources before it requests any of Ray."""
    startup, show = start(3, cluster={"workers": [2, 3]})
    with pytest.raises(TrainingError, match="Ray has no resources for 2 workers"):
        look(startup)
    assert "waiting up to 1 s for resources for 2 workers" in show.console.export_text()


@pytest.mark.system
@pytest.mark.comfort  # the actors' states
def test_fewer_workers_than_the_most_that_come(
    cluster: RayCluster, start: Any, hurry: None
) -> None:
    actor = stand_in("RayTrainWorker")
    startup, _ = start(3, cluster={"workers": [1, 3]})
    ray.get(actor.ping.remote(), timeout=120)
    startup.poll()
    assert startup._phase == "done"
    ray.kill(actor)


@pytest.mark.system
def test_workers_that_die_at_once(cluster: RayCluster, start: Any, hurry: None) -> None:
    broken = {"env_vars": {"PYTHONHOME": "/nowhere"}}
    actor = stand_in("RayTrainWorker", runtime_env=broken)
    startup, _ = start(1)
    with pytest.raises(TrainingError) as caught:
        look(startup)
    ray.kill(actor)
    assert caught.value.what == (
        "the workers' processes die as soon as they start: "
        "ModuleNotFoundError: No module named 'encodings'"
    )
    assert "PYTHONHOME = '/nowhere'" in (caught.value.trace or "")
    assert "comm.env" in str(caught.value.remedy)


@pytest.mark.system
@pytest.mark.comfort  # the actors' states
def test_workers_that_do_not_register(
    cluster: RayCluster, start: Any, hurry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROCESSES", 0.5)
    monkeypatch.setattr(module, "_stillborn", lambda logs: 0)
    broken = {"env_vars": {"PYTHONHOME": "/nowhere"}}
    actor = stand_in("RayTrainWorker", runtime_env=broken)
    startup, _ = start(1)
    with pytest.raises(TrainingError, match="have not started within"):
        look(startup)
    assert startup.detail == "starting processes, 0 of 1 workers"
    ray.kill(actor)


# ── what Ray reports ─────────────────────────────────────────────────────────────────────────

_TASK = """\
\x1b[36mray::RayTrainWorker.execute()\x1b[39m (pid=7, ip=10.0.0.1)
  File "backend.py", line 3, in on_start
RuntimeError: Unable to find address for: nope0"""


class _TaskError(Exception):
    """An error like Ray's, whose text is a coloured traceback."""

    def __init__(self, text: str, cause: BaseException | None = None):
        super().__init__(text)
        self.cause = cause


@pytest.mark.parametrize("cause", [None, RuntimeError("Unable to find address for: nope0")])
def test_the_cause_comes_first(cause: BaseException | None) -> None:
    error = explain(ControllerError(_TaskError(_TASK, cause)), [])
    assert error.what.startswith("Ray Train failed: ")
    assert error.what.endswith("Error: Unable to find address for: nope0") or cause is None
    assert "\n" not in error.what
    assert "Unable to find address for: nope0" in error.what
    assert "GLOO_SOCKET_IFNAME" in str(error.remedy)
    assert "\x1b" not in f"{error}{error.trace}"
    assert "on_start" in str(error.trace)


def test_our_own_error_in_a_worker_is_reported() -> None:
    ours = TrainingError("NCCL_DEBUG is 'a'", rank=1)
    assert explain(ControllerError(_TaskError(_TASK, ours)), []) is ours


def test_a_dead_worker_is_reported_by_its_error() -> None:
    error = explain(WorkerGroupError("", {1: _TaskError(_TASK)}), [])
    assert error.what == "a worker died: RuntimeError: Unable to find address for: nope0"
    assert error.rank == 1
    assert "\x1b" not in f"{error}{error.trace}"
    error = explain(WorkerGroupError("", {0: Exception("The actor died.\n  pid 7")}), [])
    assert error.what == "a worker died: The actor died."


def test_a_kill_for_memory_is_reported_as_such() -> None:
    """Ray's own exception is recognised, whether a rank or Ray Train's controller was killed."""
    killed = OutOfMemoryError(
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.7, ID: 26dd0d) was 22.71GB used / 23.54GB limit (0.964)\nOOM kill reason: Memory "
        "usage 24B exceeded threshold of 23B (95.0% of 25B limit)\nSelected to kill: (Task: job "
        "ID=01, task name=TrainController.__init__, required resources={}, pid=26595, actual "
        "memory used=0.05GB, worker ID=41f7)"
    )
    of_rank = explain(WorkerGroupError("", {1: killed}), [])
    of_job = explain(ControllerError(killed), [])
    caller = Failure(0, 0.0, "the command … does not answer", trace=f"OutOfMemoryError: {killed}")
    assert explain(WorkerGroupError("", {0: RuntimeError()}), [caller]).what == of_job.what
    assert (of_rank.rank, of_rank.where, of_job.where) == (1, "rank 1", "10.0.0.7")
    assert of_job.what.startswith("TrainController was killed by Ray for memory: its node 10.0.0.7")
    for error in (of_rank, of_job):
        assert "22.71GB of 23.54GB of memory in use, more than the 95.0%" in error.what
        assert "sampling.batch_size" in str(error.remedy)


def test_directories_of_commands_that_were_killed_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine, owned = ray_cluster._own_directory()
    stale, other = tmp_path / "raygnn-stale", tmp_path / "raygnn-0"
    for directory in (stale, other):
        (directory / "logs").mkdir(parents=True)
    (stale / ".owner").touch()
    # any user may have put these there: reading would block, or follow a link
    waits, leads = tmp_path / "raygnn-waits", tmp_path / "raygnn-leads"
    waits.mkdir()
    os.mkfifo(waits / ".owner")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".owner").touch()
    leads.symlink_to(tmp_path / "elsewhere")
    ray_cluster._sweep()
    assert (tmp_path / "elsewhere" / ".owner").exists()
    shutil.rmtree(waits)
    leads.unlink()
    shutil.rmtree(tmp_path / "elsewhere")
    assert sorted(tmp_path.iterdir()) == sorted([Path(mine), other])
    owned.close()
    ray_cluster._sweep()
    assert list(tmp_path.iterdir()) == [other]


def test_processes_left_by_ray_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raylet that ignores its node's end is killed with its children; other processes stay."""
    monkeypatch.setattr(ray_cluster, "_LEAVE", 0.2)
    place = str(tmp_path / "raygnn-here")
    script = "trap '' TERM; sleep 1000 & wait"
    raylet = subprocess.Popen(["sh", "-c", script, place], start_new_session=True)
    other = subprocess.Popen(["sleep", "1000"])
    try:
        while not psutil.Process(raylet.pid).children():
            time.sleep(0.01)
        found = ray_cluster.processes_of(place)
        assert len(found) == 2
        ray_cluster.see_off(found)
        psutil.wait_procs(found, timeout=10)
        assert not [each for each in found if each.is_running()]
        assert other.poll() is None
        assert ray_cluster.processes_of(None) == []
    finally:
        other.kill()
        other.wait()
        raylet.kill()
        raylet.wait()


# ── a Ray of our own ─────────────────────────────────────────────────────────────────────────


def test_unneeded_processes_of_ray_are_not_started(cluster: RayCluster) -> None:
    """Each such process delays the start of training by a second."""
    assert cluster.logs is not None
    directory = str(cluster.logs.parents[2])
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    own = [line for line in lines if directory in line]
    assert any("gcs_server" in line for line in own)
    idle = ("/monitor.py", "dashboard/dashboard.py", "log_monitor.py")
    assert not [line for line in own if any(name in line for name in idle)]


@pytest.mark.parametrize("logs", [False, True])
def test_a_later_ray_starts_all_its_processes(logs: bool) -> None:
    from ray._private import node, services

    names = ("start_monitor", "start_api_server", "start_log_monitor")
    before = [getattr(node.Node, name) for name in names], services.ConsolePopen
    with compat.own_session(logs=logs):
        kept = [getattr(node.Node, name) is own for name, own in zip(names, before[0])]
        assert kept == [False, False, logs]  # with -v these lines are on our output
        assert services.ConsolePopen is not before[1]
    assert ([getattr(node.Node, name) for name in names], services.ConsolePopen) == before
