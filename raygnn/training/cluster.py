"""The Ray that a job runs on: started here for the job, or connected to.

A local Ray listens on loopback only, wants a token that is made for it, and goes when the job
goes. Starting it takes seconds in which the driver can do something else, so it happens in the
background.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from typing import Any

from raygnn.config.schema import Config
from raygnn.errors import PreflightError, RaygnnError
from raygnn.preflight import machine, nvml

# Ray keeps little of ours in its object store; its default is 30 % of the memory
_OBJECT_STORE_BYTES = 200 * 2**20

_START = 180.0  # seconds for a Ray to start, or to let us in
_REACH = 10.0  # seconds for a head node to accept a connection

_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints everything twice
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; unset, it warns
}

_LOCAL = {
    # what each of Ray's processes imports first
    "RAY_preload_python_modules": "raygnn.training.preload",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # nobody preempts this machine
    # what Ray calls it where firewalls ask about every port; here it keeps to loopback as well
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # training is what this Ray is there for; its default is 15
    "RAY_worker_niceness": "0",
    # prestarted workers would not fit ours, which have an environment of their own
    "RAY_prestart_worker_first_driver": "0",
}


class RayCluster:
    """One job's Ray; a context manager that leaves nothing running.

    A Ray that this process is connected to already is used, and left alone at the end.

    Args:
        verbose: let Ray's and the workers' output through.
    """

    def __init__(self, config: Config, *, verbose: bool = False):
        address = config.cluster.address
        self._address = os.environ.get("RAY_ADDRESS") if address == "auto" else address
        connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        self.local = self._address in (None, "", "local") and not connected
        self._num_cpus = config.cluster.num_cpus
        self._verbose = verbose
        self._timeout = config.comm.timeout.seconds
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._directory: str | None = None  # for a local Ray's sockets and logs
        self.ours = False  # it goes, or we leave it, when the job ends

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """What to call it."""
        return self._address or "this process's connection"

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

    def close(self) -> None:
        """End what `start` began: the Ray that was started, or the connection."""
        self._done.set()
        if self._thread is not None:
            # one that still tries to connect goes with the process
            self._thread.join(None if self._ready.is_set() or self.local else 0)

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
        if self.ours:
            import ray

            ray.shutdown()
        if self._directory and self._error is None:
            shutil.rmtree(self._directory, ignore_errors=True)
        # what was set for Ray is not meant for another one, later in this process
        for name in os.environ.keys() - before.keys():
            if name.startswith("RAY_"):
                del os.environ[name]

    def _start(self) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        # its default is to wait for ever for a rank that does not report
        os.environ.setdefault("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", str(self._timeout))
        if self.local:
            for name, value in _LOCAL.items():
                os.environ.setdefault(name, value)
        if self.local and "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        import ray

        if not self._verbose:
            logging.getLogger("ray").setLevel(logging.CRITICAL)

        if ray.is_initialized():
            return
        common: dict[str, Any] = {
            "log_to_driver": self._verbose,
            "logging_level": logging.INFO if self._verbose else logging.CRITICAL,
            "configure_logging": self._verbose,
        }
        self.ours = True
        if not self.local:
            _reach(self._address)
            ray.init(address=self._address, **common)
            return
        self._directory = tempfile.mkdtemp(prefix="raygnn-")  # short: it is part of socket paths
        ray.init(
            address="local",
            num_cpus=self._num_cpus or machine.cpus(),  # what preflight counts with
            num_gpus=len(nvml.gpus()),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=self._directory,
            **common,
        )
        _start_coordinator()

    def _as_preflight_error(self, error: BaseException) -> RaygnnError:
        if self.local:
            logs = self._directory or tempfile.gettempdir()
            return PreflightError(
                f"Ray did not start: {type(error).__name__}: {error}",
                remedy=f"run again with -v, and look into {logs}",
            )
        return PreflightError(
            f"no connection to Ray: {type(error).__name__}: {error}",
            where=f"cluster.address: {self._address}",
            remedy="check that the head node runs, the address, and RAY_AUTH_MODE and the token",
        )


def _reach(address: str | None) -> None:
    """See that somebody listens there: Ray itself tries for ten minutes.

    Raises:
        OSError: the name does not resolve, or nobody answers.
    """
    if "://" in (address or ""):
        raise OSError("an address of Ray's client; the one of the head node is HOST:PORT")
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH).close()


def _start_coordinator() -> None:
    """Start the actor that Ray Train waits for before it starts anything else."""
    with contextlib.suppress(ImportError):  # not in every version
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        get_or_create_autoscaling_coordinator()
