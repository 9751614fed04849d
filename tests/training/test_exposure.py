"""What a running job shows of itself: to those who list processes, read files, knock at ports."""

from __future__ import annotations

import os
import shutil
import signal
from ipaddress import ip_address
from pathlib import Path

import psutil
import yaml

from tests.commands import Command
from tests.training.conftest import job, wait_for_step

SECRETS = ("hunter2-word", "hunter2-uri", "hunter2-wandb", "hunter2-mlflow")


def with_secrets(directory: Path, secrets: list[str]) -> list[str]:
    """The files below a directory that hold one, or whose names do."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes() + str(path).encode()
            found += [f"{path}: {secret}" for secret in secrets if secret.encode() in content]
    return found


def reached(process: psutil.Process) -> list[str]:
    """Where others than this machine could reach a process, had it listened there."""
    found = []
    for each in process.net_connections():
        if each.status == psutil.CONN_LISTEN:
            address = ip_address(each.laddr.ip)
            if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                found.append(f"{process.name()}: {address}, port {each.laddr.port}")
    return found


def test_a_running_job_keeps_to_itself(tmp_path: Path) -> None:
    config = job(
        tmp_path / "runs",
        model={"kind": "tests.training.models:Slow"},
        comm={"env": {"DB_PASSWORD": SECRETS[0], "DATABASE_URL": f"postgres://u:{SECRETS[1]}@h/d"}},
        logging={"loggers": ["csv"]},
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
        assert any("raygnn.training.loggers" in line for line in lines)
        assert not [line for line in lines for secret in kept if secret in line]

        assert [each for process in running.values() for each in reached(process)] == []
        # Ray's directory is this user's alone, and goes with the job: it holds no secret even so
        assert with_secrets(command.temp, kept) == []
        assert with_secrets(tmp_path / "runs", kept) == []
        command.process.send_signal(signal.SIGINT)
        code, out, err = command.finish(60)
        assert code == 130
        assert not [secret for secret in kept if secret in out + err]
        assert with_secrets(tmp_path / "runs", kept) == []
        assert command.leaves_nothing()
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        shutil.rmtree(command.temp, ignore_errors=True)
