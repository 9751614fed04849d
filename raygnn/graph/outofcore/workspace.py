"""Directories and tasks of a partition's stages.

A task's result is stored beside its output, so that the next attempt resumes after the last
finished task. Nothing is flushed to disk, so all tasks run again after a reboot. They also run
again if another version of raygnn wrote the results in another format.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from raygnn.errors import DataError
from raygnn.graph.available_memory import words
from raygnn.util.files import read_json, storage_errors

_MAX_THREADS = 16
_FORMAT = 2  # of results and files of tasks; increase it with each change

Result = Any  # plain JSON types
# Runs a function for each task, on one or several machines that see the workspace. Yields number
# and result of tasks as they finish; raises the error of the first task that fails. With ``gpus``,
# tasks run in persistent processes with this number of GPUs each.
Pool: TypeAlias = Callable[..., Iterator[tuple[int, Result]]]


def in_turn(
    function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], gpus: float | None = None
) -> Iterator[tuple[int, Result]]:
    """Run tasks in this process: see `Pool`."""
    for number, task in enumerate(tasks):
        yield number, function(*task)


def on_threads(
    function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Result]]:
    """Run tasks in threads, a few more than cores, since some wait for the disk: see `Pool`."""
    with ThreadPoolExecutor(min((os.cpu_count() or 1) + 2, _MAX_THREADS), "stages") as pool:
        yield from enumerate(pool.map(function, *zip(*tasks, strict=True)))


class Workspace:
    """Directory of stages. ``seconds``: duration of each stage in this attempt; ``notify``: called
    with a stage's name, finished tasks, rows per second and remaining time."""

    def __init__(self, path: Path, pool: Pool, notify: Callable[[str], object]):
        self.path, self.pool, self.notify = path, pool, notify
        self.seconds: dict[str, float] = {}
        boot, current = path / "boot", f"{_boot()} {_FORMAT}"
        if boot.exists() and boot.read_text() != current:
            for stage in path.iterdir():
                shutil.rmtree(stage, ignore_errors=True)  # the lock is a file, and stays
        boot.write_text(current)

    def directory(self, stage: str) -> Path:
        path = self.path / stage
        path.mkdir(exist_ok=True)
        return path

    def run(
        self,
        stage: str,
        function: Callable[..., Result],
        tasks: Sequence[tuple[Any, ...]],
        sizes: Sequence[int],
        gpus: float | None = None,
    ) -> list[Result]:
        """Run the tasks that are not finished yet. Returns the results of all tasks, in order.

        Args:
            function: function of a module that returns plain JSON types, writes below `directory`,
                and replaces what a killed task left.
            sizes: rows of each task, for the progress, unless results have ``rows``.
            gpus: see `Pool`.
        """
        started, done, rows = time.perf_counter(), 0, 0
        files = [self.directory(stage) / f"done-{number}.json" for number in range(len(tasks))]
        earlier = {number: read_json(file) for number, file in enumerate(files)}
        results = {number: kept["result"] for number, kept in earlier.items() if kept}
        pending = [number for number in range(len(tasks)) if number not in results]
        total = sum(sizes[number] for number in pending)
        self.notify(stage)
        pool = self.pool if gpus is None else partial(self.pool, gpus=gpus)
        for at, result in pool(function, [tasks[number] for number in pending]):
            number = pending[at]
            draft = files[number].with_suffix(".tmp")
            draft.write_text(json.dumps({"result": result}))
            draft.rename(files[number])
            results[number] = result
            done += sizes[number]
            counted = isinstance(result, dict) and "rows" in result
            rows += result["rows"] if counted else sizes[number]
            seconds = time.perf_counter() - started
            left = seconds * (total - done) / max(done, 1)
            rate = f"{rows / seconds:,.0f} rows/s" if rows else ""
            self.notify(f"{stage}, {len(results)} of {len(tasks)}, {rate}, {left:.0f} s left")
        before = self.seconds.get(stage, 0.0)
        self.seconds[stage] = before + time.perf_counter() - started
        return [results[number] for number in range(len(tasks))]

    def drop(self, stage: str) -> None:
        """Remove the output of a stage's tasks, but not the record that they are finished."""
        for path in self.directory(stage).iterdir():
            if path.suffix != ".json":
                path.unlink()


def _boot() -> str:
    """Return an id that changes with each boot of this machine."""
    return " ".join(words(Path("/proc/sys/kernel/random/boot_id")))


@contextmanager
def temporary_workspace() -> Iterator[Workspace]:
    """Yield a workspace in a temporary directory, whose tasks run in turn."""
    with (
        TemporaryDirectory(prefix="raygnn-") as place,
        storage_errors(Path(place), DataError, "set TMPDIR to a larger disk"),
    ):
        yield Workspace(Path(place), in_turn, lambda _: None)
