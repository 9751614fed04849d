"""A real Ray over virtual hosts: a node on each, started as on real machines, by `ray start`.

with hosts(2, share=[directory]) as group, ray_cluster(group) as cluster:
    done = cluster.run([sys.executable, "-m", "raygnn", "train", "job.yaml"], timeout=120)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.hosts import Host

CHECKOUT = Path(__file__).resolve().parents[2]

_PORT = 6379
_START = 120.0  # seconds until a node is up; two to five where cores are free
_END = 30.0  # seconds for killed processes to end, or for a shell command
_POLL = 0.05
_STARTED = b"Ray runtime started"  # printed when the GCS lists the node as alive
_OBJECT_STORE = 100_000_000  # bytes
_LOGS = "/tmp/ray"
_TAIL = """
cd /tmp/ray/session_latest/logs 2>/dev/null || exit 0
for log in gcs_server.out gcs_server.err raylet.out raylet.err; do
    test -s "$log" && echo "== $log" && tail -n 15 "$log"
done
true
"""
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(CHECKOUT),
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def ray_cluster(
    hosts: Sequence[Host],
    *,
    cpus: int = 1,
    env: Mapping[str, str] | None = None,
    node_env: Mapping[int, Mapping[str, str]] | None = None,
    python: Mapping[int, str | Path] | None = None,
    shm: Mapping[int, str] | None = None,
    jobs: bool = False,
    at_first: int | None = None,
    autoscaling: Path | None = None,
) -> Iterator[Cluster]:
    """Start a Ray with its head on the first host; at the end remove its processes and logs.

    Variables of this process that are Ray's or gloo's are not passed on.

    Args:
        cpus: that each node offers.
        env: further variables, of all nodes and of the commands that are run in the cluster.
        node_env: host's number → variables of its node alone.
        python: host's number → interpreter of its node; this one where not given.
        shm: host's number → size of its /dev/shm, as mount writes it: ``"64m"``.
        jobs: with a dashboard, and so a job server, on the head's loopback.
        at_first: hosts whose nodes are started here; `Cluster.start` starts others.
        autoscaling: what Ray's autoscaler on the head goes by; none runs without.

    Raises:
        RuntimeError: a node did not start; with the end of its logs.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for i, size in (shm or {}).items():
            _resize_shm(hosts[i], size)
            stack.callback(_resize_shm, hosts[i], "50%")  # the kernel's default
        cluster = Cluster(
            hosts, cpus, env or {}, node_env or {}, python or {}, Path(directory), jobs, autoscaling
        )
        stack.callback(cluster.close)
        cluster.start(0)
        cluster.start(*range(1, len(hosts) if at_first is None else at_first))
        yield cluster


class Cluster:
    """A running Ray.

    Attributes:
        address: of its head, ``"10.77.0.1:6379"``.
        env: the environment of commands, complete, with RAY_ADDRESS and the token.
        hosts: the first has the head.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        cpus: int,
        env: Mapping[str, str],
        node_env: Mapping[int, Mapping[str, str]],
        python: Mapping[int, str | Path],
        directory: Path,
        jobs: bool,
        autoscaling: Path | None,
    ):
        self.hosts = list(hosts)
        self.address = f"{hosts[0].address}:{_PORT}"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_"))}
        self._ray_env = {**inherited, **_SETTINGS, **token, **env}
        self.env = {"RAY_ADDRESS": self.address, **self._ray_env}
        self._cpus = cpus
        self._jobs = jobs
        self._autoscaling = autoscaling
        self._node_env = node_env
        self._python = python
        self._directory = directory
        self._nodes: dict[int, subprocess.Popen[Any]] = {}
        self._commands: list[subprocess.Popen[Any]] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        host: int = 0,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, whatever that is; options as of `Host.run`.

        Raises:
            subprocess.TimeoutExpired: it took more than ``timeout`` seconds, and was killed.
        """
        env = {**self.env, **(env or {})}
        return self.hosts[host].run(argv, timeout=timeout, check=False, env=env, **options)

    def popen(
        self,
        argv: Sequence[str],
        *,
        host: int = 0,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, which ends with the cluster.

        Args:
            options: as of `Host.popen`.
        """
        process = self.hosts[host].popen(argv, env={**self.env, **(env or {})}, **options)
        self._commands.append(process)
        return process

    def start(self, *numbers: int) -> None:
        """Start the nodes of these hosts, and return when the head knows them as alive.

        Raises:
            RuntimeError: one did not start; with the end of its logs.
        """
        for i in numbers:
            self._nodes[i] = self._launch(i)
        end = time.monotonic() + _START
        for i in numbers:
            while _STARTED not in self._said(i):
                if (code := self._nodes[i].poll()) is not None:
                    raise RuntimeError(f"ray start ended with {code} on {self._logs(i)}")
                if time.monotonic() > end:
                    raise RuntimeError(f"no Ray within {_START:g} s on {self._logs(i)}")
                time.sleep(_POLL)

    def stop(self, number: int) -> None:
        """Kill all of a host's Ray at once, as when the machine dies; the host stays.

        Nothing says goodbye: the head takes a while to count the node as dead.
        """
        if (process := self._nodes.pop(number, None)) is None:
            return
        process.send_signal(signal.SIGSTOP)  # it would end, and its orphans be lost to us
        end = time.monotonic() + _END
        while living := _descendants(process.pid):
            if time.monotonic() > end:
                raise RuntimeError(f"{self.hosts[number].name}: {living} can not be killed")
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL / 5)
        process.kill()
        process.wait(_END)

    def lose(self, number: int) -> None:
        """Pull a host's cable and kill its raylet, and nothing else of its Ray."""
        self.hosts[number].down()
        found = [pid for pid in _descendants(self._nodes[number].pid) if _name(pid) == "raylet"]
        if len(found) != 1:
            raise RuntimeError(f"{self.hosts[number].name}: raylets {found}")
        os.kill(found[0], signal.SIGKILL)

    @contextlib.contextmanager
    def frozen(self, number: int) -> Iterator[None]:
        """Suspend a host's Ray while the block runs."""
        tree = [self._nodes[number].pid, *_descendants(self._nodes[number].pid)]
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill all that runs in the cluster, and remove the logs."""
        for command in self._commands:
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
                command.wait(_END)
        for i, host in enumerate(self.hosts):
            self.stop(i)
            with contextlib.suppress(RuntimeError):  # switched off
                host.run(["rm", "-rf", _LOGS], cwd="/", timeout=_END)

    def _launch(self, number: int) -> subprocess.Popen[Any]:
        host = self.hosts[number]
        if number == 0:
            place = ["--head", f"--port={_PORT}", f"--include-dashboard={self._jobs}"]
            place += ["--dashboard-host=127.0.0.1"]
            if self._autoscaling is not None:
                place += [f"--autoscaling-config={self._autoscaling}"]
        else:
            place = [f"--address={self.address}"]
        python = str(self._python.get(number, sys.executable))
        argv = [python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        argv += [*place, f"--node-ip-address={host.address}", f"--num-cpus={self._cpus}"]
        argv += [f"--object-store-memory={_OBJECT_STORE}"]
        with open(self._output(number), "wb") as output:
            return host.popen(
                argv,
                env={**self._ray_env, **self._node_env.get(number, {})},
                cwd="/",
                stdout=output,
                stderr=output,
                preexec_fn=_adopt_orphans,
            )

    def _output(self, number: int) -> Path:
        return self._directory / f"{self.hosts[number].name}.out"

    def _said(self, number: int) -> bytes:
        return self._output(number).read_bytes()

    def _logs(self, number: int) -> str:
        """Return the end of a node's logs, after its host's name."""
        host = self.hosts[number]
        written = host.run(["sh", "-c", _TAIL], cwd="/", timeout=_END, check=False).stdout
        said = self._said(number).decode(errors="replace")
        return f"{host.name}:\n{said[-3000:]}\n{written[-5000:]}"


def _resize_shm(host: Host, size: str) -> None:
    host.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], cwd="/", timeout=_END)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own has ended, so that none is lost."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _descendants(pid: int) -> list[int]:
    """Return the living processes below this one."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
            if state in "ZX":
                ended.add(int(entry.parent.name))
    found, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return [each for each in found if each not in ended]
