"""Exposure of a running job: to process listings, to readers of files, to connections from
outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.commands import Command
from tests.support.small_jobs import job, wait_for_step

pytestmark = pytest.mark.system

SECRETS = ("hunter2-word", "hunter2-uri", "hunter2-wandb", "hunter2-mlflow")


def with_secrets(directory: Path, secrets: list[str]) -> list[str]:
    """Return the files below a directory that contain a secret, or whose names do."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes() + str(path).encode()
            found += [f"{path}: {secret}" for secret in secrets if secret.encode() in content]
    return found


def reached(process: psutil.Process) -> list[str]:
    """Return the addresses at which other machines could reach a process."""
    found = []
    for each in psutil.net_connections():
        if each.pid == process.pid and each.status == psutil.CONN_LISTEN:
            address = ip_address(each.laddr.ip)
            if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                found.append(f"{process.name()}: {address}, port {each.laddr.port}")
    return found


NOBODY = 65534
ATTACKS = (
    'cd "$1"',
    'ls "$1"',
    'mv "$1/session_latest/sockets/raylet" "$1/session_latest/sockets/gone"',
    # the raylet writes its state there every few seconds, wherever the name leads
    'ln -sf "$2" "$1/session_latest/logs/debug_state.txt"',
    'touch "$1/session_latest/logs/new"',
)


def open_to_others(directory: Path, victim: Path) -> list[str]:
    """Return the attacks that another user succeeds with in a directory of Ray's. Without root none
    is tried, since only root can act as another user."""
    if os.getuid() != 0:
        return []
    return [
        attack
        for attack in ATTACKS
        if subprocess.run(
            ["/bin/sh", "-c", attack, "sh", directory, victim],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            timeout=60,
        ).returncode
        == 0
    ]


@pytest.mark.comfort  # torch's stores listen on every address
def test_a_running_job_keeps_to_itself(tmp_path: Path) -> None:
    config = job(
        tmp_path / "runs",
        model={"kind": "tests.support.own_models:Slow"},
        train={"epochs": 1000},  # it is ended
        comm={"env": {"DB_PASSWORD": SECRETS[0], "DATABASE_URL": f"postgres://u:{SECRETS[1]}@h/d"}},
        logging={"loggers": ["tensorboard"]},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    command = Command(
        ["train", "job.yaml", "-v"],
        tmp_path,
        WANDB_API_KEY=SECRETS[2],
        MLFLOW_TRACKING_PASSWORD=SECRETS[3],
    )
    try:
        wait_for_step(tmp_path / "runs" / "test" / "metrics.jsonl", 3, command.process)
        running = {pid: psutil.Process(pid) for pid in command.running()}
        tokens = {process.environ().get("RAY_AUTH_TOKEN", "") for process in running.values()}
        (token,) = tokens - {""}
        assert len(token) == 64
        kept = [*SECRETS, token]

        lines = [*command.running().values()]
        assert any("ray::" in line for line in lines)
        assert not [line for line in lines for secret in kept if secret in line]

        assert [each for process in running.values() for each in reached(process)] == []

        command.temp.chmod(0o1777)  # as /tmp is
        (made,) = command.temp.glob("raygnn-*")
        (session,) = made.glob("**/session_latest")
        (session / "sockets" / "raylet").stat()
        assert open_to_others(session.parent, tmp_path / "job.yaml") == []
        assert made.stat().st_mode & 0o777 == 0o700
        # Ray's directory is private and removed with the job, but may hold no secret either
        assert with_secrets(command.temp, kept) == []
        assert with_secrets(tmp_path / "runs", kept) == []
        command.process.send_signal(signal.SIGINT)
        code, out, err = command.finish(60)
        assert code == 130
        assert not [secret for secret in kept if secret in out + err]
        assert with_secrets(tmp_path / "runs", kept) == []
        assert command.left_behind() == []
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        shutil.rmtree(command.temp, ignore_errors=True)
