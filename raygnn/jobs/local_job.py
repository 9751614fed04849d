"""Training in a child process on this machine, for notebooks."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import raygnn
from raygnn.config.load import ConfigSource
from raygnn.config.schema import Config
from raygnn.errors import InputError, Interrupted, RaygnnError, TrainingError, error_of
from raygnn.graph.sources.library_graphs import with_graph
from raygnn.jobs.handle import Handle, run_of, said_error, show_card
from raygnn.runs.interrupts import STOPS
from raygnn.runs.run import Run
from raygnn.runs.run_directory import JOB

_OF_TERMINALS = {"FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
_CHILD = "import sys, raygnn.cli; sys.exit(raygnn.cli.launched())"
_MOST_LINES = 10_000
_POLL = 0.2  # seconds
_LAST = 5.0  # seconds for its last output, once it has ended
_END = 30.0  # seconds for a killed process to end


def launch(
    config: ConfigSource,
    *,
    graph: Any = None,
    overwrite: bool = False,
    resume: bool = False,
    verbose: bool = False,
    display: bool = True,
) -> LocalJob:
    """Start `raygnn.train` in a child process, and return at once.

    The training ends with this process (in a notebook, with its kernel), after it has saved a
    checkpoint. It uses the Ray that this process is connected to, if any.

    Args:
        config: a `Config`, or an argument of `raygnn.load_config`.
        graph, overwrite, resume, verbose: see `raygnn.train`.
        display: show its progress: a card in a notebook, lines on standard output elsewhere.

    Returns:
        The handle: ``status``, ``metrics()``, ``logs()``, ``wait()``, ``stop()``.

    Raises:
        InputError: options contradict each other, or the configuration is wrong. ``wait`` raises
            all other errors.
    """
    if overwrite and resume:
        raise InputError("overwrite and resume together", remedy="choose one of them")
    config = with_graph(config, graph)
    document = config.to_dict()
    if config.store is not None:
        document["storage"] = config.store.text  # with credentials: it is written nowhere
    if config.cluster.address == "auto" and (address := _connected()):
        document["cluster"]["address"] = address
    options = {"overwrite": overwrite, "resume": resume, "verbose": verbose}
    return LocalJob(config, {"config": document, **options}, display=display)


class LocalJob(Handle):
    """Training in a child process, with its ``pid``."""

    def __init__(self, config: Config, request: dict[str, object], *, display: bool):
        self.name = config.name
        self._directory = config.run_dir
        self._kept = config.store and config.store / config.name
        self._id = f"launched-{uuid.uuid4().hex}"  # unlike the id of an earlier run of this name
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._ended = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**_environment(), JOB: self._id, "PYTHONIOENCODING": "utf-8"},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # an interrupt of a notebook is not for it
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        self._requests = self._process.stdin  # its end would interrupt the training
        with suppress(BrokenPipeError):  # it has ended, and reports why
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        self._prints = display and not show_card(self._repr_html_, self._ended)
        self._reader = threading.Thread(target=self._read, name="raygnn-job", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="raygnn-job-end", daemon=True).start()

    @property
    def status(self) -> str:
        if not self._ended.is_set():
            return "pending" if self.run is None else "running"
        return {0: "done", Interrupted.exit_code: "interrupted"}.get(self._code, "failed")

    @property
    def run(self) -> Run | None:
        run = run_of(self._directory, self._id)
        # after its end, a run in an object store has no local directory unless it was killed
        if run is None and self._kept is not None and self._ended.is_set():
            run = run_of(self._kept.text, self._id)
        return run

    def logs(self, lines: int | None = None) -> str:
        kept = list(self._lines)  # the last 10,000; logs of ranks are in the run directory
        return "\n".join(kept if lines is None else kept[-lines:])

    def stop(self, timeout: float = 120.0) -> None:
        if not self._ended.is_set():
            self._process.terminate()
            if not self._ended.wait(timeout):
                self._process.kill()
                self._ended.wait(_END)

    def _wait(self, deadline: float | None) -> None:
        # in short pieces, so that Ctrl-C and a notebook's interrupt take effect at once
        while not self._ended.wait(_POLL):
            if deadline is not None and time.monotonic() > deadline:
                return

    def _error(self) -> RaygnnError:
        code = self._code
        if code < 0:
            return TrainingError(
                f"the training's process was killed by signal {-code}",
                where=str(self._directory),
                remedy="see logs() for its last output; resume with resume=True",
            )
        said = said_error(self.logs())
        if code == Interrupted.exit_code and not said:
            return Interrupted("it was interrupted before it started", where=str(self._directory))
        run = self.run
        return error_of(code, {**said, "run": None if run is None else run.shown})

    @property
    def _code(self) -> int:
        code = self._process.returncode
        # before a command handles signals, they terminate it as any process
        return Interrupted.exit_code if -code in STOPS else code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            line = line.rstrip("\n")
            self._lines.append(line)
            with suppress(OSError, ValueError):  # standard output is closed
                if self._prints:
                    print(line, flush=True)

    def _watch(self) -> None:
        self._process.wait()
        self._reader.join(_LAST)  # a process that Ray left behind may hold the pipe
        with suppress(BrokenPipeError):
            self._requests.close()
        self._ended.set()


def _connected() -> str | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().gcs_address)


def _environment() -> dict[str, str]:
    """Return the environment of the child and its ranks: ours with the paths of modules that are
    not installed, without a notebook kernel's requests for colours."""
    ours = str(Path(raygnn.__file__).parents[1])
    dynamic = os.path.join(sysconfig.get_path("stdlib"), "lib-dynload")
    installed = {*site.getsitepackages(), *sysconfig.get_paths().values(), dynamic}
    others = [entry for entry in sys.path if entry not in installed and os.path.exists(entry)]
    kept = {name: value for name, value in os.environ.items() if name not in _OF_TERMINALS}
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*others, ours]))}
