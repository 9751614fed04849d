"""The loggers as the driver sees them: threads and processes to start and to end."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import raygnn
from raygnn.config.schema import Config
from raygnn.driver.loggers.feeder import Feeder
from raygnn.driver.loggers.kinds import KINDS, PACKAGES, Status, kind_of
from raygnn.errors import ConfigError, Interrupted
from raygnn.runs.interrupts import taken
from raygnn.runs.output import OutputLost
from raygnn.runs.run_directory import LOGGERS, LOGS, METRICS, Events

LOG = "loggers.log"
FLUSH = 30.0  # seconds for the last records
END = 5.0  # seconds more to notice that
_SILENT = 2.0  # seconds of them until that is told
_POLL = 0.05  # seconds


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
    """All that feeds the loggers of a run; a context manager that leaves no process behind.

    Args:
        path: of the run.
        tell: takes a sentence for the user.
    """

    def __init__(self, config: Config, path: Path, tell: Callable[[str], object] = print):
        self._names = config.logging.loggers
        self._path = path
        self._tell = tell
        self._events = Events(path / LOGS / LOGGERS)  # of the feeders, whose threads cannot show
        self._feeders: list[Feeder] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = self._ended = False
        self._told: set[str] = set()

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until all is logged, as long as that may take; Ctrl-C ends the wait."""
        self.end(_status(error))
        try:
            with taken():
                self._wait(_SILENT)
                if late := self._late():
                    self._tell(
                        f"waiting up to {FLUSH:.0f} s for {' and '.join(late)} to take the last "
                        f"records; Ctrl-C ends the wait alone: {self._path / METRICS} has all of "
                        "them, and the run is as it is"
                    )
                    self._wait(FLUSH + END - _SILENT)
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # with what the libraries started
                    with suppress(subprocess.TimeoutExpired):  # it may wait for dead storage
                        process.wait(END)
        failed = [feeder.name for feeder in self._feeders if not feeder.done]
        failed += [name for name, process in self._processes.items() if process.returncode]
        if missing := [name for name in failed if name not in self._told]:
            self._tell(
                f"{' and '.join(missing)} did not get all records (see {self._path / LOGS / LOG}); "
                f"{METRICS} has them"
            )
        self._events.close()

    def load(self) -> None:
        """Start the processes, which import what they need; nothing is raised where that fails."""
        for name in self._names:
            if KINDS[name].remote and name not in self._processes:
                self._launch(name)

    def start(self, step: int) -> None:
        """Begin to log, unless that was done.

        Args:
            step: of the first record of this command.
        """
        if self._started:
            return
        self._started = True
        self.load()
        for process in self._processes.values():
            self._say(process, str(step))
        for name in self._names:
            if not KINDS[name].remote:
                kind = kind_of(name, self._path)
                self._feeders.append(Feeder(kind, self._path, self._events.tell, step))
                self._feeders[-1].start()

    def look(self) -> None:
        """Say what hangs, and which process has gone."""
        for feeder in self._feeders:
            feeder.look()
        for name, process in self._processes.items():
            if not self._ended and name not in self._told and process.poll() is not None:
                self._told.add(name)
                self._tell(
                    f"{name} gets no records any more: its process ended with "
                    f"{process.returncode}; see {self._path / LOGS / LOG}; training goes on"
                )

    def end(self, status: Status) -> None:
        """No more records come; nothing is waited for."""
        if self._ended:
            return
        self._ended = True
        for feeder in self._feeders:
            feeder.finish(status)
        for process in self._processes.values():
            self._say(process, status)
            with suppress(OSError):
                process.stdin and process.stdin.close()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """What is inside is all of the run: the loggers finish while what is outside ends."""
        try:
            yield
        except BaseException as error:
            self.end(_status(error))
            raise
        self.end("done")

    def _launch(self, name: str) -> None:
        home = str(Path(raygnn.__file__).parents[1])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            with open(self._path / LOGS / LOG, "ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", __package__, str(self._path), name],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the command, which ends it
                )
        except OSError as error:
            self._names = tuple(other for other in self._names if other != name)
            self._tell(f"{name} gets no records: {error.strerror}; training goes on")

    @staticmethod
    def _say(process: subprocess.Popen[bytes], line: str) -> None:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()

    def _late(self) -> list[str]:
        """The loggers that are not through."""
        alive = [feeder.name for feeder in self._feeders if feeder.is_alive()]
        return alive + [name for name, p in self._processes.items() if p.poll() is None]

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._late() and time.monotonic() < deadline:
            time.sleep(_POLL)


def _status(error: BaseException | None) -> Status:
    """Of a run that ended so."""
    if error is None:
        return "done"
    stopped = isinstance(error, (KeyboardInterrupt, Interrupted, OutputLost))
    return "interrupted" if stopped else "failed"
