"""`ray up` with cluster/onprem.yaml over real sshd: a job through the tunnel, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.pinned import needs_pinned

CHECKOUT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SSHD = "/usr/sbin/sshd"  # which wants to be called by its whole path
MISSING = [name for name in ("ssh", "rsync", SSHD) if not shutil.which(name)]

pytestmark = [
    pytest.mark.system,
    needs_hosts(),
    needs_pinned(),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (openssh-server, rsync)"),
]

HOME = "/tmp/home"  # which each host has for itself
DASHBOARD = "http://127.0.0.1:8265"
UP = 120.0  # seconds for `ray up`, or for a job; 10 to 20 where cores are free
LIMIT = 60.0

# A machine of its own: home, /run and /mnt are private but for the storage, which all see. sshd
# reads the home of a user in passwd; Ray takes the address of the default route for its own.
_MACHINE = f"""
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /mnt
mkdir -p /run/sshd /mnt/raygnn {HOME}/.ssh
mount --bind "$1/storage" /mnt/raygnn
sed 's|^root:.*|root:x:0:0:root:{HOME}:/bin/bash|' /etc/passwd > /run/passwd
mount --bind /run/passwd /etc/passwd
ip route add default via 10.77.0.254
cp "$1/key" {HOME}/.ssh/key
cp "$1/key.pub" {HOME}/.ssh/authorized_keys
cp "$1/bashrc" {HOME}/.bashrc
chmod -R go= {HOME}
ssh-keygen -q -t ed25519 -N '' -f /run/host_key
"""
_SSHD = """
HostKey /run/host_key
PidFile none
UsePAM no
PasswordAuthentication no
"""
_STATUS = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/api/jobs/", timeout=5)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(type(error.reason).__name__)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    """A head, a worker and the machine that people sit at; sshd runs on the first two."""
    (tmp_path / "storage").mkdir()
    (tmp_path / "sshd").write_text(_SSHD)
    # the test's interpreter is a complete environment, so nothing is installed
    path = f"export PATH={BIN}:$PATH PYTHONPATH={CHECKOUT}\n"
    (tmp_path / "bashrc").write_text(path)
    make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(make_key, check=True, timeout=LIMIT)
    with hosts(3, share=[tmp_path]) as group:
        for host in group:
            host.run(["bash", "-c", _MACHINE, "machine", str(tmp_path)], timeout=LIMIT)
        for host in group[:2]:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            host.popen([SSHD, "-D", "-e", "-f", str(tmp_path / "sshd")], **quiet)
        yield group


class Laptop:
    """A machine outside of the cluster, which runs commands from this checkout."""

    def __init__(self, host: Host):
        self.host = host
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        path = {"HOME": HOME, "PATH": f"{BIN}:{inherited['PATH']}", "PYTHONPATH": str(CHECKOUT)}
        self.env = {**inherited, **path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}

    def run(self, *argv: str | Path, check: bool = True) -> str:
        done = self.host.run(
            [str(word) for word in argv], timeout=UP, check=check, env=self.env, cwd=CHECKOUT
        )
        return done.stdout

    def status(self, url: str) -> str:
        """Return the HTTP status of a request without the token, or the error."""
        return self.run(sys.executable, "-c", _STATUS, url).strip()

    @contextlib.contextmanager
    def tunnel(self, file: Path) -> Iterator[None]:
        """Run `ray dashboard` in the background, and yield once it forwards."""
        argv = ["ray", "dashboard", str(file)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = self.host.popen(argv, env=self.env, cwd=CHECKOUT, **quiet)
        try:
            _until(lambda: self.status(DASHBOARD) == "401")
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT)


def test_up_a_job_and_down(machines: list[Host], tmp_path: Path) -> None:
    head, worker, outside = machines
    laptop = Laptop(outside)
    file = _cluster_file(head, worker, tmp_path)
    laptop.run("ray", "get-auth-token", "--generate")

    try:
        laptop.run("ray", "up", "-y", file)
    except RuntimeError:  # Ray gives a node 30 s to start; on a busy machine people try again, too
        laptop.run("ray", "up", "-y", file)
    _until(lambda: all("raylet" in _processes(host) for host in (head, worker)))
    for host in (head, worker):
        mode = host.run(["stat", "-c", "%a", f"{HOME}/.ray/auth_token"], timeout=LIMIT).stdout
        assert mode.strip() == "600"
    assert laptop.status(f"http://{head.address}:8265") == "ConnectionRefusedError"

    work = _job(tmp_path)
    with laptop.tunnel(file):
        job = ("submit", work / "job.yaml", "--working-dir", work, "--address", DASHBOARD)
        laptop.run("raygnn", *job)
    run = tmp_path / "storage" / "runs" / "planted"
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    nodes = json.loads((run / "preflight.json").read_text())["nodes"]
    assert {node["node"] for node in nodes} == {head.name, worker.name}

    laptop.run("ray", "down", "-y", file)
    _until(lambda: not _processes(head) | _processes(worker))


def _cluster_file(head: Host, worker: Host, directory: Path) -> Path:
    """Write cluster/onprem.yaml with these machines and no other change."""
    text = (CHECKOUT / "cluster" / "onprem.yaml").read_text()
    for theirs, ours in (
        ("head_ip: 192.0.2.10", f"head_ip: {head.address}"),
        ("[192.0.2.11, 192.0.2.12]", f"[{worker.address}]"),
        ("ssh_user: ubuntu", "ssh_user: root"),
        ("~/.ssh/id_ed25519", "~/.ssh/key"),
    ):
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    file = directory / "onprem.yaml"
    file.write_text(text)
    return file


def _job(directory: Path) -> Path:
    """A working directory with a job for one worker on each machine."""
    graph = {"format": "planted", "nodes": 500, "degree": 5, "classes": 4, "features": 8}
    cores = os.cpu_count() or 1
    job = {
        "name": "planted",
        "storage": "/mnt/raygnn/runs",
        "graph": graph,
        "model": {"kind": "sage", "hidden": 8},
        "sampling": {"batch_size": 64},
        "train": {"epochs": 1},
        "cluster": {"workers": 2, "cpus_per_worker": cores, "wait": "2m", "probe_timeout": "1m"},
    }
    work = directory / "work"
    work.mkdir()
    (work / "job.yaml").write_text(yaml.safe_dump(job))
    return work


def _processes(host: Host) -> set[str]:
    """Return the names of all processes on the host, except the test's."""
    shown = host.run(["sh", "-c", "cat /proc/[0-9]*/comm; true"], timeout=LIMIT).stdout
    return set(shown.split("\n")) - {"", "cat", "sh", "sshd"}


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + UP
    while not true():
        assert time.monotonic() < end, f"not so after {UP:g} s"
        time.sleep(0.5)
