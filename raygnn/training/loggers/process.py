"""The loggers as the driver sees them: a process to start and to end."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import raygnn
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, Interrupted
from raygnn.runs.store import LOGS
from raygnn.training.loggers.kinds import PACKAGES, Status

DIRECTORY = "loggers"
LOG = "loggers.log"
FLUSH = 30.0  # seconds for the last records
_END = 5.0  # seconds more to notice that


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
    """The process that feeds the loggers of a run; a context manager that leaves none behind."""

    def __init__(self, config: Config, path: Path):
        self._wanted = bool(config.logging.loggers)
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._told = False

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all is logged, as long as that may take."""
        process = self._process
        if process is None:
            return
        self.end("failed")
        with suppress(subprocess.TimeoutExpired):
            self._wait(process)
        if process.poll() is None:
            process.kill()
            process.wait()

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
        except OSError:
            self._wanted = False

    def look(self, tell: Callable[[str], None]) -> None:
        """Say that it has gone, if it has."""
        process = self._process
        if process is None or self._ended or self._told or process.poll() is None:
            return
        self._told = True
        tell(
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
        """What is inside is all of the run: the loggers are told how it ended."""
        status: Status = "failed"
        try:
            yield
            status = "done"
        except (KeyboardInterrupt, Interrupted):
            status = "interrupted"
            raise
        finally:
            self.end(status)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Where Ctrl-C ends the wait, the process is ended, too."""
        deadline = time.monotonic() + FLUSH + _END
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            process.kill()
