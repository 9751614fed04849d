"""The loggers as the driver sees them: a process to start and to end."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import raygnn
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, Interrupted
from raygnn.runs.interrupts import taken
from raygnn.runs.output import OutputLost
from raygnn.runs.store import LOGS
from raygnn.training.loggers.kinds import PACKAGES, Status

DIRECTORY = "loggers"
LOG = "loggers.log"
FLUSH = 30.0  # seconds for the last records
END = 5.0  # seconds more to notice that
_SILENT = 5.0  # seconds of them until that is told


def check_packages(config: Config) -> None:
    """Refuse loggers whose package is not there.

    Raises:
        ConfigError: naming it.
    """
    for name in config.logging.loggers:
        module = PACKAGES.get(name)
        if module is not None and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"the logger {name} needs a package that is not installed here",
                where=config.where("logging.loggers"),
                remedy=f"install it with `pip install {module}`, or leave {name} out",
            )


class Loggers:
    """The process that feeds the loggers of a run; a context manager that leaves none behind.

    Args:
        path: of the run.
        tell: takes a sentence for the user.
    """

    def __init__(self, config: Config, path: Path, tell: Callable[[str], object] = print):
        self._wanted = bool(config.logging.loggers)
        self._path = path
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._told = False

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until all is logged, as long as that may take; Ctrl-C ends the wait."""
        process = self._process
        if process is None:
            return
        self.end(_status(error))
        try:
            with suppress(subprocess.TimeoutExpired), taken():
                self._wait(process)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what the libraries started
                with suppress(subprocess.TimeoutExpired):  # it may be waiting for dead storage
                    process.wait(END)

    def start(self, step: int) -> None:
        """Start it, unless it was; nothing is raised where that fails.

        Args:
            step: of the first record of this command.
        """
        if not self._wanted or self._process is not None:
            return
        home = str(Path(raygnn.__file__).parents[1])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            with open(self._path / LOGS / LOG, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __package__, str(self._path), str(step)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the command, which ends it
                )
        except OSError as error:
            self._wanted = False
            self._tell(f"no logger gets records: {error.strerror}; training goes on")

    def look(self) -> None:
        """Say that it has gone, if it has."""
        process = self._process
        if process is None or self._ended or self._told or process.poll() is None:
            return
        self._told = True
        self._tell(
            f"no logger gets records any more: their process ended with {process.returncode}; "
            f"see {self._path / LOGS / LOG}; training goes on"
        )

    def end(self, status: Status) -> None:
        """Tell it that no more records come; it is not waited for."""
        process = self._process
        if process is None or self._ended or process.stdin is None:
            return
        self._ended = True
        with suppress(OSError):
            process.stdin.write(f"{status}\n".encode())
            process.stdin.close()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """What is inside is all of the run: the loggers finish while what is outside ends."""
        try:
            yield
        except BaseException as error:
            self.end(_status(error))
            raise
        self.end("done")

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SILENT)
            return
        self._tell(f"the loggers have up to {FLUSH:.0f} s for their last records; Ctrl-C ends that")
        process.wait(max(0.0, FLUSH + END - _SILENT))


def _status(error: BaseException | None) -> Status:
    """Of a run that ended so."""
    if error is None:
        return "done"
    stopped = isinstance(error, (KeyboardInterrupt, Interrupted, OutputLost))
    return "interrupted" if stopped else "failed"
