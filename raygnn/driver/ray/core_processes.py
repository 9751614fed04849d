"""Ray's core processes, the GCS and the raylet, without which a job cannot go on.

Ray lets the driver wait for them, and then ends it from C++, without an error that Python sees.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from raygnn.worker.ray_nodes import takes_connection

_LEAVE = 5.0  # seconds for Ray's processes to end after Ray
_LOOK = 2.0  # seconds between connections to a Ray that was started elsewhere
_RAYLET_AWAY = 10.0  # seconds without a connection after which a raylet is dead
# share of the time that Ray waits for a GCS to be started again before it ends the driver
_GCS_AWAY = 0.5
_GCS_WAIT = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0  # Ray's setting and its default

_ROLES = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}


def of_directory(directory: str | None) -> list[psutil.Process]:
    """All that a local Ray has started, by the directory that it was given."""
    if directory is None:
        return []
    processes = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has gone
                if any(directory in word for word in child.cmdline()):
                    processes += [child, *child.children(recursive=True)]
    return processes


def see_off(processes: list[psutil.Process]) -> None:
    """Kill what is still there some seconds after Ray has ended: now and then one of its actors
    misses that its node has gone, and would sleep for ever."""
    _, left = psutil.wait_procs(processes, timeout=_LEAVE)
    kill(left)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


class Children:
    """The core processes of a Ray that this process has started."""

    def __init__(self, directory: str):
        self._roles: dict[psutil.Process, str] = {}
        for process in of_directory(directory):
            with contextlib.suppress(psutil.Error):  # it has gone, as Ray's short-lived ones do
                if (name := process.name()) in _ROLES:
                    self._roles[process] = _ROLES[name]

    def death(self) -> str | None:
        """Which one has ended, and how."""
        for process, role in self._roles.items():
            try:
                status = process.wait(0)
            except psutil.TimeoutExpired:
                continue
            return f"{role} (process {process.pid}) {_ended(status)}"
        return None

    def ask(self) -> bool:
        """Whether all of them run."""
        return self.death() is None


class Endpoints:
    """The core processes of a Ray that was started elsewhere: the head node's GCS, which may be
    started again, and the raylet of this node."""

    def __init__(self) -> None:
        import ray

        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        wait = float(os.environ.get(_GCS_WAIT[0], _GCS_WAIT[1]))
        self._limits = {("the head node's GCS", host, int(port)): _GCS_AWAY * wait}
        for node in ray.nodes():
            if node["NodeID"] == context.get_node_id():
                host, port = node["NodeManagerAddress"], node["NodeManagerPort"]
                self._limits["this node's raylet", host, port] = _RAYLET_AWAY
        self._silent: dict[tuple[str, str, int], float] = {}  # since when, first seen
        self._next = 0.0

    def death(self) -> str | None:
        """Which one has taken no connection for too long."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _LOOK
        self.ask()
        for (role, host, port), since in self._silent.items():
            silent = time.monotonic() - since
            if silent >= self._limits[role, host, port]:
                return f"{role} at {host}:{port} has taken no connection for {silent:.0f} s"
        return None

    def ask(self) -> bool:
        """Whether both take a connection now."""
        now = time.monotonic()
        self._silent = {
            endpoint: self._silent.get(endpoint, now)
            for endpoint in self._limits
            if not takes_connection(*endpoint[1:])
        }
        return not self._silent


def _ended(status: int | None) -> str:
    if status is None:
        return "has ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
