"""`raygnn train` as a user runs it: a process of its own, signals and all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import raygnn
from raygnn import compat
from raygnn.driver import launch
from raygnn.driver.ray_cluster import RayCluster
from tests.support.commands import ROOT, Command
from tests.support.small_jobs import JobFactory, job, job_of, until, wait_for_step

pytestmark = pytest.mark.system

MODELS = "tests.support.own_models"
SLOW = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `raygnn VERB job.yaml …` in a directory of its own; whatever is left is killed."""
    commands: list[Command] = []

    def start(verb: str, *args: str, **sections: Any) -> Command:
        config = job(tmp_path / "runs", **sections)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
        commands.append(Command([verb, "job.yaml", *args], tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        shutil.rmtree(command.temp, ignore_errors=True)


@pytest.mark.alone
def test_train_and_its_output(run: Callable[..., Command], tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = run("train")
    code, out, err = command.finish()
    assert (code, err) == (0, "")
    for part in ("planted", "sage, 2 layers × 16", "a local Ray", "epoch 2/2", "test/accuracy"):
        assert part in out
    for chatter in ("ray::", "TrainController", "lightning", "WARNING", "Setting up process group"):
        assert chatter not in out
    assert "\x1b" not in out  # no control characters in a file
    assert command.left_behind() == []
    assert set(os.listdir("/dev/shm")) <= before
    assert raygnn.open_run(tmp_path / "runs" / "test").summary["metric"] == "accuracy"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.yaml", "runs"]


@pytest.mark.alone
@pytest.mark.comfort
def test_ctrl_c_and_resume(run: Callable[..., Command], tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"kind": f"{MODELS}:Slow"},
        "train": {"epochs": 3},
        "fault": {"checkpoint_every": "1h"},
    }
    before = set(os.listdir("/dev/shm"))
    command = run("train", **sections)
    metrics = tmp_path / "runs" / "test" / "metrics.jsonl"
    wait_for_step(metrics, 3, command.process)
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    code, out, err = command.finish(timeout=30)
    assert code == 130
    assert "interrupted: saving a checkpoint" in out
    assert "raylet" not in out + err
    saved = re.search(r"interrupted; .* can resume from step (\d+)\n", err)
    assert saved is not None
    steps = [step for line in metrics.read_text().splitlines() if (step := of_loss(line))]
    assert 3 <= int(saved[1]) == steps[-1], "no step follows the checkpoint, to be lost"
    assert "Traceback" not in err
    assert "--resume" in err
    assert command.left_behind() == []
    assert set(os.listdir("/dev/shm")) <= before
    assert raygnn.open_run(tmp_path / "runs" / "test").status == "interrupted"

    code, out, _ = run("train", "--resume", "--json", **sections).finish()
    assert code == 0
    assert json.loads(out)["steps"] == 12
    steps = [step for line in metrics.read_text().splitlines() if (step := of_loss(line))]
    assert steps == list(range(1, 13))

    said = metrics.read_text()
    sections["train"] = {"epochs": 2}  # fewer than were made
    code, out, err = run("train", "--resume", **sections).finish()
    assert (code, err) == (0, "")
    assert "this run is done: it made 12 steps" in out
    assert metrics.read_text() == said


def of_loss(line: str) -> int | None:
    """Return the step of a record of the training loss."""
    record = json.loads(line)
    return int(record["step"]) if "train/loss" in record else None


def test_an_unreachable_head_node(run: Callable[..., Command]) -> None:
    for address in ("nowhere.invalid:6379", "127.0.0.1:9"):
        where = {"address": address, "num_cpus": None}
        code, _, err = run("check", cluster=where).finish(timeout=60)
        assert code == 3
        assert f"cluster.address: {address}" in err
        assert "Traceback" not in err


@SLOW
def test_a_port_that_is_not_rays(run: Callable[..., Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = run("check", "--json", cluster={"address": address, "num_cpus": None})
        code, out, err = command.finish(timeout=120)  # half a minute, and the import of Ray
    assert code == 3
    error = json.loads(out)["error"]
    assert error["what"] == "no answer from a head node of Ray within 30 s"
    assert error["where"] == f"cluster.address: {address}"
    assert err.startswith(f"error: {error['what']}\n")
    assert command.left_behind() == []


_HEAD = """
import raygnn, sys
from pathlib import Path
from raygnn.driver.ray_cluster import RayCluster
from tests.support.small_jobs import job
import ray
with RayCluster(raygnn.load_config(job(Path(), cluster={"num_cpus": 1, "workers": 1}))) as ray_:
    ray_.wait()
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
"""


def test_a_token_that_is_not_the_clusters(
    run: Callable[..., Command], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray looks for a token, too
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
    env["RAY_AUTH_TOKEN"] = "1" * 64
    head = subprocess.Popen(
        [sys.executable, "-c", _HEAD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with head:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        for token, told in (
            ("0" * 64, "its token is another one"),
            ("", "it requires a token, and there is none here"),
        ):
            if token:
                monkeypatch.setenv("RAY_AUTH_TOKEN", token)
            else:
                monkeypatch.delenv("RAY_AUTH_TOKEN")
            command = run("check", cluster={"address": address, "num_cpus": None})
            code, _, err = command.finish(timeout=60)
            assert code == 3
            first, where, remedy = err.splitlines()
            assert first == f"error: the cluster refused us: {told}"
            assert where == f"  at cluster.address: {address}"
            assert "RAY_AUTH_TOKEN" in remedy
            assert command.left_behind() == []
        head.communicate("\n", timeout=60)


def slow(run: Callable[..., Command], tmp_path: Path) -> Command:
    """A command during training."""
    command = run("train", model={"kind": f"{MODELS}:Slow"}, train={"epochs": 100})
    wait_for_step(tmp_path / "runs" / "test" / "metrics.jsonl", 3, command.process)
    return command


@pytest.mark.parametrize(
    "how",
    [
        "term",
        pytest.param("twice", marks=SLOW),
        pytest.param("group", marks=SLOW),
        pytest.param("hangup", marks=SLOW),
    ],
)
def test_stopped_from_outside(run: Callable[..., Command], tmp_path: Path, how: str) -> None:
    command = slow(run, tmp_path)
    if how == "term":
        command.process.send_signal(signal.SIGTERM)
    elif how == "group":  # as a job manager does
        os.killpg(command.process.pid, signal.SIGTERM)
    elif how == "hangup":  # as a terminal does that is closed
        os.killpg(command.process.pid, signal.SIGHUP)
    else:
        for _ in range(2):
            os.killpg(command.process.pid, signal.SIGINT)
            time.sleep(0.3)
    code, _, err = command.finish(timeout=60)
    assert code == 130
    lines = err.splitlines()
    assert lines[0].startswith("error: interrupted; ")
    assert len(lines) == 2  # the remedy; no stack
    assert command.left_behind() == []
    assert raygnn.open_run(tmp_path / "runs" / "test").status == "interrupted"


@SLOW
@pytest.mark.comfort
def test_a_command_that_is_killed(run: Callable[..., Command], tmp_path: Path) -> None:
    """Its Ray ends with it, and the run resumes from the newest checkpoint."""
    sections: dict[str, Any] = {
        "model": {"kind": f"{MODELS}:Slow"},
        "train": {"epochs": 3},
        "fault": {"checkpoint_every": 2},
    }
    command = run("train", **sections)
    metrics = tmp_path / "runs" / "test" / "metrics.jsonl"
    wait_for_step(metrics, 5, command.process)
    command.process.kill()
    command.process.wait()
    deadline = time.monotonic() + 120  # Ray's agents look for its head for a minute
    while command.running() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert command.running() == {}  # the directory goes with the next command
    again = run("train", "--resume", **sections)
    code, out, _ = again.finish()
    assert code == 0
    assert "resume: from step 4" in out
    steps = [step for line in metrics.read_text().splitlines() if (step := of_loss(line))]
    assert steps == list(range(1, 13))


@SLOW
def test_a_reader_that_goes(run: Callable[..., Command], tmp_path: Path) -> None:
    command = slow(run, tmp_path)
    assert command.process.stdout is not None
    command.process.stdout.close()  # as head does
    command.process.wait(60)
    assert command.process.returncode == 128 + signal.SIGPIPE
    assert command.process.stderr is not None
    assert command.process.stderr.read() == ""
    assert command.left_behind() == []
    assert raygnn.open_run(tmp_path / "runs" / "test").status == "interrupted"


@pytest.mark.comfort
def test_workers_that_cannot_start(run: Callable[..., Command], tmp_path: Path) -> None:
    command = run("train", comm={"env": {"PYTHONHOME": "/nowhere"}})
    code, _, err = command.finish()
    assert code == 4
    assert err.startswith(
        "error: the workers' processes die as soon as they start: "
        "ModuleNotFoundError: No module named 'encodings'\n"
    )
    assert command.left_behind() == []
    assert raygnn.open_run(tmp_path / "runs" / "test").status == "failed"


# while Ray starts; some of these meet threads that import, or a compiler
@pytest.mark.parametrize(
    "delay", [6, *(pytest.param(d, marks=SLOW) for d in (2, 3, 4, 4.5, 5, 5.5, 6.5, 7, 7.5))]
)
def test_sigterm_before_training(run: Callable[..., Command], delay: float) -> None:
    command = run("train", model={"kind": f"{MODELS}:Slow"})
    time.sleep(delay)
    command.process.send_signal(signal.SIGTERM)
    code, out, err = command.finish(timeout=120)  # Ray is waited for, at most a minute
    assert code == 130, (out, err)
    assert "Traceback" not in err
    assert command.left_behind() == []


_LATECOMER = """
import ray, sys, threading, time
from pathlib import Path
import raygnn
from raygnn.driver.ray_cluster import RayCluster
from tests.support.small_jobs import job
def ask():
    while ray.is_initialized():
        time.sleep(0.01)
    try:
        ray.get(ray.put(1))
    except Exception as error:
        print(type(error).__name__, flush=True)
    time.sleep(1)
    print("ended", flush=True)
with RayCluster(raygnn.load_config(job(Path(), cluster={"num_cpus": 1, "workers": 1}))) as cluster:
    cluster.wait()
    cluster.host(threading.Thread(target=ask, daemon=True))
print("closed", ray.is_initialized(), ray._private.auto_init_hook.enable_auto_connect)
"""


@pytest.mark.comfort
def test_late_calls_do_not_start_another_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LATECOMER],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
    )
    lines = done.stdout.splitlines()
    assert lines[1:] == ["ended", "closed False True"], done.stderr
    assert "Error" in lines[0] or "Exception" in lines[0], lines


_AGAIN = """
import os, signal, threading, time
from pathlib import Path
import raygnn
from raygnn.driver.ray_cluster import RayCluster
from tests.support.small_jobs import job
def train(name):
    config = job(Path("runs"), name=name, cluster={"num_cpus": 1, "workers": 1})
    try:
        print(name, raygnn.train(config, display=False).status, flush=True)
    except raygnn.errors.PreflightError as error:
        print(name, error.what, flush=True)
before, ended = dict(os.environ), threading.Event()
def handler(*_):
    ended.set()
signal.signal(signal.SIGTERM, handler)
threads = [threading.Thread(target=train, args=[name]) for name in ("first", "second")]
threads[0].start()
while threads[0].is_alive() and RayCluster._owner is None:
    time.sleep(0.01)
threads[1].start()
for thread in threads[::-1]:
    thread.join()
train("third")
os.kill(os.getpid(), signal.SIGTERM)
print("handled", ended.wait(10), {n for n in os.environ if before.get(n) != os.environ[n]})
"""


@pytest.mark.comfort
@pytest.mark.slow
def test_one_job_after_the_other_in_a_process(tmp_path: Path) -> None:
    """Each has a token of its own, and two cannot run at once. The caller's SIGTERM handler and
    variables are restored."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    del env["RAY_AUTH_MODE"]
    argv = [sys.executable, "-c", _AGAIN]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    other = "this process already runs a job; only one job per process is supported"
    expected = [f"second {other}", "first done", "third done", "handled True set()"]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


@pytest.mark.usefixtures("no_ray")
def test_a_stop_while_ray_comes_up(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for Ray then requests nothing; a request in progress is waited for."""
    came, asked = threading.Event(), []

    def start() -> None:
        cluster._cleanup.callback(cluster._shut_down)
        came.wait(60)

    def ask(*_: object) -> None:
        asked.append("ask")
        time.sleep(1)
        asked.append("asked")

    monkeypatch.setattr(compat, "shut_down_ray", lambda then: asked.append("end"))
    monkeypatch.setattr(launch.ControlHandle, "create", ask)
    for begun in (False, True):
        asked.clear()
        came.clear()
        cluster = RayCluster(make_job())
        monkeypatch.setattr(cluster, "_start", start)
        with cluster:
            given: Any = job_of(make_job()), 1, None, cluster
            going = launch.Launch(*given)
            if begun:
                came.set()
                until(lambda: bool(asked))
            else:
                going.stop()
                came.set()
        assert asked == (["ask", "asked", "end"] if begun else ["end"])


def test_a_thread_that_a_stop_kept_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RayCluster(raygnn.load_config(job(Path(), cluster={"workers": 1})))

    def start() -> None:
        cluster._cleanup.callback(cluster._shut_down)
        os.environ["RAY_OF_THIS_JOB"] = "1"

    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compat, "shut_down_ray", lambda then: None)  # other tests' Ray may run
    monkeypatch.setattr(cluster, "_start", start)
    thread = threading.Thread()
    monkeypatch.setattr(thread, "start", stopped)
    with cluster:
        cluster.wait()
        with pytest.raises(KeyboardInterrupt):
            cluster.host(thread)
    assert os.environ.pop("RAY_OF_THIS_JOB", None) is None  # which is the last that is seen to


def test_a_failure_prints_its_cause_first(run: Callable[..., Command]) -> None:
    command = run("train", model={"kind": f"{MODELS}:FailsOnRank1", "args": {"how": "raise"}})
    code, _, err = command.finish()
    assert code == 4
    first, where = err.splitlines()[:2]
    assert first == "error: ValueError: the sixth batch is not to my liking"
    assert "rank 1" in where
    assert re.search(r"^  \S+/tests/support/own_models.py:\d+ in forward$", err, re.M)
    assert "site-packages" not in err  # the complete trace is elsewhere
    (log,) = re.findall(r"^  the complete trace is in (\S+/logs/rank-1.log)$", err, re.M)
    assert "site-packages/lightning" in Path(log).read_text()
    assert command.left_behind() == []


def test_a_memory_monitor_that_kills(
    run: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own monitor is set to kill from a thousandth of the machine's memory on."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    code, _, err = run("train", "--set", "fault.max_failures=0").finish(timeout=240)
    assert code == 4, err
    assert "killed by Ray for memory: its node 127.0.0.1 had" in err
    assert "more than the 0.1% that Ray allows" in err
    assert "sampling.batch_size" in err
    (run_dir,) = (path.parent for path in tmp_path.rglob("summary.json"))
    cause = raygnn.diagnose(run_dir).cause
    assert (cause.kind, cause.confidence) == ("memory", "high")
    assert any("used most there" in line for line in cause.evidence)
