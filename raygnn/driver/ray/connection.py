"""The Ray that a job runs on: started here for the job, or connected to.

A local Ray listens on loopback only, wants a token that is made for it, and goes when the job
goes. Starting it takes seconds in which the driver can do something else, so it happens in the
background.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
from pathlib import Path
from typing import IO, Any

from raygnn.config.schema import Config
from raygnn.driver.ray import core_processes
from raygnn.driver.ray.reachability import Knock
from raygnn.errors import PreflightError, RaygnnError
from raygnn.preflight import machine
from raygnn.runs.interrupts import taken
from raygnn.util.files import open_regular
from raygnn.util.locks import try_flock

# Ray keeps little of ours in its object store; its default is 30 % of the memory
_OBJECT_STORE_BYTES = 200 * 2**20

_START = 180.0  # seconds for a Ray to start, or to let us in
_END = 60.0  # seconds for it to end
_LEAVE = 5.0  # seconds for its processes to follow
_ROOM = 60.0  # seconds for workers to be placed, at least

_PREFIX, _OWNER = "raygnn-", ".owner"  # of the directory made for a local Ray, and in it
# Ray lets everybody write to its own directory, in which it follows links: the one around it is
# this user's alone. Short: it is part of socket paths.
_RAYS = "r"

_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints everything twice
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; unset, it warns
}

_LOCAL = {
    # what each of Ray's processes imports first
    "RAY_preload_python_modules": "raygnn.driver.ray.preload",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # nobody preempts this machine
    # what Ray calls it where firewalls ask about every port; here it keeps to loopback as well
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # training is what this Ray is there for; its default is 15
    "RAY_worker_niceness": "0",
    # prestarted workers would not fit ours, which have an environment of their own
    "RAY_prestart_worker_first_driver": "0",
}


def patience(config: Config) -> float:
    """Seconds to wait for nodes that have room for a job's workers."""
    return max(_ROOM, config.comm.timeout.seconds)


class RayCluster:
    """One job's Ray; a context manager that leaves nothing running.

    A Ray that this process is connected to already is used, and left alone at the end.

    Args:
        verbose: let Ray's and the workers' output through.
        tell: takes a sentence for the user.
    """

    def __init__(
        self, config: Config, *, verbose: bool = False, tell: Callable[[str], object] = print
    ):
        address = config.cluster.address
        self._address = os.environ.get("RAY_ADDRESS") if address == "auto" else address
        connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        self.local = self._address in (None, "", "local") and not connected
        self._num_cpus = config.cluster.num_cpus
        self._verbose = verbose
        self._timeout = config.comm.timeout.seconds
        self._patience = patience(config)
        self._elastic = config.cluster.elastic
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._knock: Knock | None = None
        self._directory: str | None = None  # for a local Ray's sockets and logs
        self._owned: IO[str] | None = None  # what says that it is still in use
        self._core: core_processes.Children | core_processes.Endpoints | None = None
        self._death: str | None = None
        self._unpatch: Callable[[], None] = lambda: None
        self._guests: list[threading.Thread] = []
        self.ours = False  # it goes, or we leave it, when the job ends

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """What to call it."""
        return self._address or "this process's connection"

    @property
    def ready(self) -> bool:
        """Whether Ray is there."""
        return self._ready.is_set() and self._error is None

    @property
    def logs(self) -> Path | None:
        """Where a local Ray writes its logs."""
        if self._directory is None:
            return None
        return Path(self._directory, _RAYS, "session_latest", "logs")

    def death(self) -> str | None:
        """Which of Ray's core processes has died; None while the job can go on."""
        if self._death is None and self._core is not None:
            self._death = self._core.death()
        return self._death

    def answers(self) -> bool:
        """Whether Ray's core processes answer now; a call of Ray's would wait for them."""
        return self._core is None or self._core.ask()

    def start(self) -> None:
        """Begin to start or connect, in the background; only the first call does something."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raygnn-ray", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when Ray is there.

        Raises:
            PreflightError: it could not be started or reached.
        """
        self.start()
        if not self._ready.wait(_START):
            self._error = TimeoutError(f"nothing within {_START:g} s")
        if self._error is not None:
            raise self._as_preflight_error(self._error)

    def host(self, thread: threading.Thread) -> None:
        """Start what uses Ray; `close` waits for its end, too."""
        self._guests.append(thread)
        thread.start()

    def close(self) -> None:
        """End what `start` began: the Ray that was started, or the connection. Ctrl-C does not
        stop this halfway."""
        self._done.set()
        if self._knock is not None:
            self._knock.close()
        # one that still tries to connect goes with the process
        wait = _END if self._ready.is_set() or self.local else 0.0
        if self._death is not None and not self.local:
            wait = _LEAVE  # Ray would wait for the dead, and end this process
        deadline = time.monotonic() + wait
        while self._thread and self._thread.is_alive() and time.monotonic() < deadline:
            with taken():
                self._thread.join(1)

    def _run(self) -> None:
        # The thread stays until the end: Ray's processes are killed when the thread that
        # started them ends (PR_SET_PDEATHSIG).
        before = dict(os.environ)
        try:
            self._start()
        except BaseException as error:
            self._error = error
        self._ready.set()
        self._done.wait()
        try:
            if self.ours:
                import ray

                processes = core_processes.of_directory(self._directory)
                if self._death is not None:  # Ray's own end would wait for the dead
                    core_processes.kill(processes)
                ray.shutdown()
                core_processes.see_off(processes)
                for thread in self._guests:  # Python's end under them would be a crash
                    if thread.is_alive():  # a stop may have kept it from being started
                        thread.join(_LEAVE)
        finally:
            self._unpatch()
            if self._directory and self._error is None:
                _remove(self._directory)
            if self._owned is not None:
                self._owned.close()
        # what was set for Ray is not meant for another one, later in this process
        for name in os.environ.keys() - before.keys():
            if name.startswith("RAY_"):
                del os.environ[name]

    def _start(self) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        # its default is to wait for ever for a rank that does not report
        os.environ.setdefault("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", str(self._timeout))
        # its default is to wait a minute for what other jobs hold; where the number of workers may
        # change, our own policy has looked what there is
        wait = _ROOM if self._elastic else self._patience
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(wait))
        if self.local:
            for name, value in _LOCAL.items():
                os.environ.setdefault(name, value)
        if self.local and "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        if self._address and not self.local and not connected:
            self._knock = Knock(self._address)
        import ray  # which takes as long as the answer

        if self._knock is not None:
            self._knock.wait()
        if not self._verbose:
            logging.getLogger("ray").setLevel(logging.CRITICAL)

        if not ray.is_initialized():
            self._init()
        if self._directory is not None:
            self._core = core_processes.Children(self._directory)
        else:
            self._core = core_processes.Endpoints()

    def _init(self) -> None:
        import ray

        common: dict[str, Any] = {
            "log_to_driver": self._verbose,
            "logging_level": logging.INFO if self._verbose else logging.CRITICAL,
            "configure_logging": self._verbose,
        }
        self.ours = True
        self._unpatch = _patched(mute=not self._verbose)
        if not self.local:
            with _our_sigterm():
                ray.init(address=self._address, **common)
            return
        _sweep()
        self._directory, self._owned = _own_directory()
        with _our_sigterm(), _own_session():
            ray.init(
                address="local",
                num_cpus=self._num_cpus or machine.cpus(),  # what preflight counts with
                num_gpus=len(machine.gpus()),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=os.path.join(self._directory, _RAYS),
                **common,
            )
        _start_coordinator()

    def _as_preflight_error(self, error: BaseException) -> RaygnnError:
        if isinstance(error, RaygnnError):
            return error
        if self.local:
            logs = self._directory or tempfile.gettempdir()
            return PreflightError(
                f"Ray did not start: {type(error).__name__}: {error}",
                remedy=f"run again with -v, and look into {logs}",
            )
        return PreflightError(
            f"no connection to Ray: {type(error).__name__}: {error}",
            where=f"cluster.address: {self._address}",
            remedy="check that the head node runs, and that it has the same versions of Python "
            "and Ray as this machine",
        )


def _patched(*, mute: bool) -> Callable[[], None]:
    """Keep Ray from starting another one for who still asks after the end of ours, and from
    printing, whatever it was told, on this process's output that a worker has gone, which we say
    in our own words; returns what undoes that."""
    from ray._private import auto_init_hook, worker

    changes: list[tuple[Any, str, Any]] = [(auto_init_hook, "enable_auto_connect", False)]
    if mute:
        changes.append((worker, "print_to_stdstream", lambda *args, **options: None))
    # not in every version
    changes = [change for change in changes if hasattr(change[0], change[1])]
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)

    def undo() -> None:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)

    return undo


@contextlib.contextmanager
def _our_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does: Ray has it print a stack of C++ first.

    Through Python's C interface, since only the main thread may use `signal.signal`.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before = get(signal.SIGTERM)
    try:
        yield
    finally:
        put(signal.SIGTERM, before)


@contextlib.contextmanager
def _own_session() -> Iterator[None]:
    """Let what Ray starts have a session of its own.

    What a terminal or a job manager sends to all of us would end Ray's processes first, and us
    in the middle of waiting for them.
    """
    from ray._private import services

    popen = getattr(services, "ConsolePopen", None)
    if popen is None:  # not in every version
        yield
        return
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _own_directory() -> tuple[str, IO[str]]:
    """A new directory for a local Ray, and a file that is locked for as long as it is in use."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)  # short: it is part of socket paths
    draft = Path(directory, f"{_OWNER}.tmp")
    owned = open(draft, "w")  # noqa: SIM115
    try_flock(owned.fileno())
    draft.rename(Path(directory, _OWNER))
    return directory, owned


def _sweep() -> None:
    """Remove the directories of commands that were killed."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        # anybody may put things there: a FIFO would be waited for
        with contextlib.suppress(OSError), open_regular(owner) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                continue
            if try_flock(file.fileno()):  # else it is in use
                shutil.rmtree(owner.parent, ignore_errors=True)


def _remove(directory: str) -> None:
    """Remove it, while a process of Ray's may be writing its last line there."""
    for _ in range(10):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(0.2)


def _start_coordinator() -> None:
    """Start the actor that Ray Train waits for before it starts anything else."""
    with contextlib.suppress(ImportError):  # not in every version
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        get_or_create_autoscaling_coordinator()
