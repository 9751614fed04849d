"""Ray of a job: an embedded one that is started for the job, or a cluster to connect to.

An embedded Ray listens on loopback only, requires a generated token, and ends with the job. It
takes seconds to start, so it starts in the background.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

import psutil

from raygnn import compat
from raygnn.config.schema import Config
from raygnn.errors import PreflightError, RaygnnError
from raygnn.preflight import machine
from raygnn.preflight.connections import Knock
from raygnn.runs.interrupts import taken
from raygnn.util import reaper
from raygnn.util.files import open_regular
from raygnn.util.locks import try_flock
from raygnn.worker.ray_nodes import takes_connection

# a job stores little in Ray's object store; the default is 30 % of the memory
_OBJECT_STORE_BYTES = 200 * 2**20

_START = 180.0  # seconds for Ray to start, or to accept a connection
_END = 60.0  # seconds for Ray to end
_LEAVE = 5.0  # seconds for its processes to end afterwards
_ROOM = 60.0  # least seconds for workers to be placed
_CHECK = 2.0  # seconds between test connections to a cluster
_RAYLET_AWAY = 10.0  # seconds without a connection after which a raylet is dead
_GCS_AWAY = 0.5  # share of the time for which Ray waits for its GCS, before it ends this process
_GCS_WAIT = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0  # Ray's setting and its default
_ROLES = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}

_CLAIMS = threading.Lock()
_OF_RAY = ("RAY_", "TORCH_PROCESS_GROUP_", "PYTHONBREAKPOINT")  # prefixes of Ray's variables
# Ray makes its directory writable for all users and follows links in it, so it is in a private
# directory. The name is short since it is part of socket paths.
_RAYS = "r"
_PREFIX, _OWNER = "raygnn-", ".owner"  # of that directory, and a file in it

_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints everything twice
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; unset, it warns
}

_LOCAL = {
    **compat.PRELOAD,
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # this machine is not preempted
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # of a controller in this process
    # restricts Ray to loopback, on Linux, too
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",  # the default is 15
    # unused statistics and task records, which cost a hundredth of a core
    "RAY_event_stats": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    # prestarted workers lack the environment of ours
    "RAY_prestart_worker_first_driver": "0",
}


def patience(config: Config) -> float:
    """Return the seconds to wait until a job's workers fit."""
    return max(_ROOM, config.comm.timeout.seconds, config.cluster.wait_seconds)


class RayCluster:
    """Ray of one job; a context manager that leaves nothing running.

    An existing connection of this process is used, and stays open. ``verbose``: show Ray's and the
    workers' output; ``notify``: called with notes for the user.
    """

    _owner: ClassVar[RayCluster | None] = None  # of this process's connection, guarded by _CLAIMS

    def __init__(
        self, config: Config, *, verbose: bool = False, notify: Callable[[str], object] = print
    ):
        address = config.cluster.address
        self._address = os.environ.get("RAY_ADDRESS") if address == "auto" else address
        self.local = self._address in (None, "", "local") and not _connected()
        self._config = config
        self._verbose = verbose
        self._notify = notify
        self.patience = patience(config)
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()  # Ray has started, or failed to
        self._done = threading.Event()
        # the thread has ended; on Python 3.11 Thread.join is wrong after Ctrl-C
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._knock: Knock | None = None
        self._directory: str | None = None  # for an embedded Ray's sockets and logs
        self._cleanup = contextlib.ExitStack()  # shuts Ray down if it is this job's
        self._core: Children | Endpoints | None = None
        self._death: str | None = None
        self._death_lock = threading.Lock()
        self._guests: list[threading.Thread] = []
        self._caller = threading.get_ident()
        self._up = False  # True once Ray runs, possibly not ready yet

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._address or "this process's connection"

    @property
    def ready(self) -> bool:
        return self._ready.is_set() and self._error is None

    @property
    def logs(self) -> Path | None:
        """Directory of an embedded Ray's logs."""
        if self._directory is None:
            return None
        return Path(self._directory, _RAYS, "session_latest", "logs")

    def death(self) -> str | None:
        """Describe which of Ray's core processes has died; None while the job can continue."""
        with self._death_lock:  # psutil returns a process's status once
            if self._death is None and self._core is not None:
                self._death = self._core.death()
            return self._death

    def answers(self) -> bool:
        """Return True if Ray's core processes answer now; a call of Ray would wait for them."""
        return self.death() is None and (not isinstance(self._core, Endpoints) or self._core.ask())

    def start(self) -> None:
        """Begin to start or connect, once, in the background."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raygnn-ray", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until Ray has started. Raises PreflightError if it does not, or is unreachable."""
        self.start()
        if not self._ready.wait(_START):
            self._error = TimeoutError(f"nothing within {_START:g} s")
        if self._error is not None:
            raise self._as_preflight_error(self._error)

    def host(self, thread: threading.Thread) -> None:
        """Start a thread that uses Ray; `close` waits for its end, too."""
        self._guests.append(thread)
        thread.start()

    def close(self) -> None:
        """End the embedded Ray, or the connection; not interrupted by Ctrl-C."""
        self._done.set()
        if self._knock is not None:
            self._knock.close()
        began = time.monotonic()
        has_begun = self._thread is not None and self._thread.ident is not None
        while has_begun and not self._ended.is_set():
            limit = _LEAVE if self.local else 0.0  # an attempt to connect ends with the process
            if self._up or self._ready.is_set():
                # Ray would wait for dead processes until it ends this one
                limit = _LEAVE if self._death and not self.local else _END
            if time.monotonic() - began >= limit:
                break
            with taken():
                self._ended.wait(1)
        if self._directory is not None and not self._ready.is_set():
            # an embedded Ray that is still starting could take half a minute more
            self._notify("terminating Ray, which is still starting")
            deadline = time.monotonic() + _LEAVE
            with taken():
                _kill_whole(self._directory)
                while not self._ended.wait(0.1) and time.monotonic() < deadline:
                    _kill_whole(self._directory)  # processes started since
                _remove(self._directory)

    def _run(self) -> None:
        # The thread lives until the end, since Ray's processes are killed when the thread that
        # started them ends (PR_SET_PDEATHSIG).
        before = None
        try:
            try:
                self._claim()
                before = dict(os.environ)
                try:
                    self._start()
                except Exception as error:
                    if not self.local or self._done.is_set() or isinstance(error, RaygnnError):
                        raise
                    # on a loaded machine Ray's processes miss Ray's deadlines
                    reason = next(iter(str(error).splitlines()), type(error).__name__)
                    self._notify(f"Ray did not start: {reason}; trying again")
                    self._cleanup.close()
                    self._start()
            except BaseException as error:
                self._error = error
            self._ready.set()
            self._done.wait()
            self._cleanup.close()
        finally:
            # variables set for this Ray, or by it, must not reach the next one
            for name in os.environ.keys() - before.keys() if before is not None else ():
                if name.startswith(_OF_RAY):
                    os.environ.pop(name, None)
            with _CLAIMS:
                if RayCluster._owner is self:
                    RayCluster._owner = None
            self._ended.set()

    def _keep_logs(self) -> Path | None:
        """Copy an embedded Ray's logs into the run directory, or else a temporary one."""
        if self.logs is None or not self.logs.is_dir():
            return None
        run_dir = self._config.run_dir
        kept = run_dir.is_dir()
        place = run_dir / "logs" if kept else Path(tempfile.mkdtemp(prefix="raygnn-logs-"))
        with contextlib.suppress(OSError, shutil.Error):  # Ray may still write there
            shutil.copytree(self.logs, place / "ray", dirs_exist_ok=True)
        return place / "ray"

    def _shut_down(self) -> None:
        processes = processes_of(self._directory)
        if self._death is not None:  # Ray's shutdown would wait for dead processes
            _kill(processes)
        self._wait_for_guests()  # their calls to a Ray that has ended would end this process
        with _our_sigterm() as restore:
            compat.shut_down_ray(restore)
        see_off(processes)
        self._wait_for_guests()  # they would crash when the interpreter exits

    def _wait_for_guests(self) -> None:
        for thread in filter(threading.Thread.is_alive, self._guests):  # one may not have started
            thread.join(_LEAVE)

    def _claim(self) -> None:
        """Register as the owner of this process's connection; raise if another job is."""
        with _CLAIMS:
            owner = RayCluster._owner
            # a job that the same thread began before this one ends after it
            if _connected() and (owner is None or owner._caller == self._caller):
                return
            if owner is not None:
                message = "this process already runs a job; only one job per process is supported"
                remedy = "train one after the other, or each in its own process: raygnn.launch"
                raise PreflightError(message, remedy=remedy)
            RayCluster._owner = self
        if not self.local and self._address in (None, "", "local"):
            what = "the Ray that this process was connected to has ended"
            raise PreflightError(what, remedy="start the job again")

    def _start(self) -> None:
        # the default is to wait a minute for other jobs; an elastic job's policy has counted the
        # free resources before
        wait = _ROOM if self._config.cluster.elastic else self.patience
        variables = {
            # the default is to wait forever for a rank that does not report
            "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(self._config.comm.timeout.seconds),
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(wait),
            **_QUIET,
            **(_LOCAL if self.local else {}),
        }
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        if self.local and "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        if self._address and not self.local and not _connected():
            self._knock = Knock(self._address)
        import ray  # noqa: F401, takes as long as the head node's answer

        if self._knock is not None:
            self._knock.wait()
        if not self._verbose:
            logging.getLogger("ray").setLevel(logging.CRITICAL)

        if RayCluster._owner is self:
            compat.forget_token()  # of an earlier Ray
            self._init()
        self._up = True
        if self._directory is None:
            self._core = Endpoints()
        elif not self._done.is_set():
            self._core = Children(self._directory)

    def _init(self) -> None:
        import ray

        common: dict[str, Any] = {
            "log_to_driver": self._verbose,
            "logging_level": logging.INFO if self._verbose else logging.CRITICAL,
            "configure_logging": self._verbose,
        }
        if self.local:
            _sweep()
            self._directory, owned = _own_directory()
            self._cleanup.enter_context(owned)
            program = self._cleanup.enter_context(reaper.start(self._directory))
            self._cleanup.callback(program.kill)
            self._cleanup.callback(_remove, self._directory)
        self._cleanup.callback(compat.quiet_ray(mute=not self._verbose))
        self._cleanup.callback(self._shut_down)
        if self._directory is None:
            with _our_sigterm():
                ray.init(address=self._address, **common)
            return
        with _our_sigterm(), compat.own_session(logs=self._verbose):
            ray.init(
                address="local",
                num_cpus=self._config.cluster.num_cpus or machine.cpus(),  # as in preflight
                num_gpus=len(machine.gpus()),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=os.path.join(self._directory, _RAYS),
                **common,
            )

    def _as_preflight_error(self, error: BaseException) -> RaygnnError:
        if isinstance(error, RaygnnError):
            return error
        if self.local:
            logs = self._keep_logs()
            message = f"Ray did not start: {type(error).__name__}: {error}"
            remedy = f"run again with -v{f', and read the logs in {logs}' if logs else ''}"
            return PreflightError(message, remedy=remedy)
        return PreflightError(
            f"no connection to Ray: {type(error).__name__}: {error}",
            where=f"cluster.address: {self._address}",
            remedy="check that the head node runs, and that it has the same versions of Python "
            "and Ray as this machine",
        )


def _connected() -> bool:
    asked = getattr(sys.modules.get("ray"), "is_initialized", None)
    return asked is not None and bool(asked())


@contextlib.contextmanager
def _our_sigterm() -> Iterator[Callable[[], object]]:
    """Keep the handler of SIGTERM, which Ray replaces, and resets to the default when it ends.
    Yield a function that restores it in between. Uses Python's C interface, since only the main
    thread may call `signal.signal`."""
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    restore = partial(put, signal.SIGTERM, get(signal.SIGTERM))
    try:
        yield restore
    finally:
        restore()


def _own_directory() -> tuple[str, IO[str]]:
    directory = tempfile.mkdtemp(prefix=_PREFIX)  # short: it is part of socket paths
    draft = Path(directory, f"{_OWNER}.tmp")
    owned = open(draft, "w")  # noqa: SIM115
    try_flock(owned.fileno())
    draft.rename(Path(directory, _OWNER))
    return directory, owned


def _sweep() -> None:
    """Remove directories of this user's commands that were killed together with their reaper."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        # any user may create files there, such as a FIFO, whose open would block
        with contextlib.suppress(OSError), open_regular(owner) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                continue
            if try_flock(file.fileno()):  # not in use
                shutil.rmtree(owner.parent, ignore_errors=True)


def _remove(directory: str) -> None:
    """Remove the directory; a process of Ray may still be writing its last line there."""
    for _ in range(10):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(0.2)


# ── Ray's core processes, without which a job cannot continue ──────────────────────────────────
# Ray lets the driver wait for them, and then ends it from C++ without an exception in Python.


def processes_of(directory: str | None) -> list[psutil.Process]:
    """Return all processes of an embedded Ray, found by its directory."""
    processes = []
    for child in _children(directory):
        with contextlib.suppress(psutil.Error):
            processes += [child, *child.children(recursive=True)]
    return processes


def _children(directory: str | None) -> list[psutil.Process]:
    if directory is None:
        return []
    children = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if any(directory in word for word in child.cmdline()):
                children.append(child)
    return children


def _kill_whole(directory: str) -> None:
    """Kill a starting Ray; suspend it first, since a raylet could start an agent after its children
    were listed, which would outlive it and write into the directory."""
    for child in _children(directory):
        with contextlib.suppress(psutil.Error):
            child.suspend()
    _kill(processes_of(directory))


def see_off(processes: list[psutil.Process]) -> None:
    """Kill processes that remain some seconds after Ray has ended: an actor can miss that its node
    is gone, and would sleep forever."""
    _, left = psutil.wait_procs(processes, timeout=_LEAVE)
    _kill(left)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


class Children:
    """Core processes of an embedded Ray."""

    def __init__(self, directory: str):
        self._roles: dict[psutil.Process, str] = {}
        for process in processes_of(directory):
            with contextlib.suppress(psutil.Error):  # it was short-lived
                if (name := process.name()) in _ROLES:
                    self._roles[process] = _ROLES[name]

    def death(self) -> str | None:
        """Describe which process has ended, and how."""
        for process, role in self._roles.items():
            try:
                status = process.wait(0)
            except psutil.TimeoutExpired:
                continue
            return f"{role} (process {process.pid}) {how_it_ended(status)}"
        return None


class Endpoints:
    """Core processes of a cluster: the head node's GCS, which may restart, and this node's
    raylet."""

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
        """Describe which process has accepted no connection for too long."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _CHECK
        self.ask()
        for (role, host, port), since in self._silent.items():
            silent = time.monotonic() - since
            if silent >= self._limits[role, host, port]:
                return f"{role} at {host}:{port} has accepted no connection for {silent:.0f} s"
        return None

    def ask(self) -> bool:
        """Return True if both accept a connection now."""
        now = time.monotonic()
        self._silent = {
            endpoint: self._silent.get(endpoint, now)
            for endpoint in self._limits
            if not takes_connection(*endpoint[1:])
        }
        return not self._silent


def how_it_ended(status: int | None) -> str:
    """Describe the end of a process by its exit status, such as "was killed by SIGKILL"."""
    if status is None:
        return "has ended"
    if status < 0:
        name = f"signal {-status}"
        with contextlib.suppress(ValueError):  # most real-time signals have no name
            name = signal.Signals(-status).name
        return f"was killed by {name}"
    return f"ended with exit status {status}"
