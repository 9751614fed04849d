"""Run directory on nodes that do not see the command's, of a run that is kept in an object store.

Ranks on such a node write to a directory of their own. Its files, checkpoints aside, are sent
through the job's control actor to the command's directory, which is complete and uploaded from
there. So an unavailable store delays no record, and the driver reads the ranks' files as usual.
"""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raygnn.checkpoint import weights
from raygnn.runs.diagnose.state_file import BOX, FAILURE
from raygnn.runs.run_directory import CHECKPOINTS, LOGS
from raygnn.storage.remote import RemotePath, Stat
from raygnn.storage.replica import download_directory, files_of_run
from raygnn.util.files import replacing
from raygnn.worker.job import ROWS, Job

_AWAY = ".away"  # marks such a directory
_APPENDED = (".jsonl", ".log", ".crash")  # files that grow
_EVERY = 1.0  # seconds between polls for changes
_PIECE = 4 * 2**20  # bytes that are sent at once
_TAIL = 256  # last bytes that are compared to find whether a file has only grown
_RANK = re.compile(r"rank-(\d+)(?!\d)")

log = logging.getLogger("raygnn")


class FileServer:
    """Reads and writes files of the command's run directory for ranks on other nodes."""

    def __init__(self, directory: Path):
        self._directory = directory

    def ends(self) -> dict[str, tuple[int, bytes]]:
        """Return the size and the last bytes of each file that grows."""
        names = [name for name in files_of_run(self._directory) if name.endswith(_APPENDED)]
        return {name: _end_of(self._directory / name) for name in names}

    def failures(self) -> dict[str, int]:
        """Return the times of all failure records and crash dumps, by name, in nanoseconds."""
        files = files_of_run(self._directory / LOGS).items()
        return {n: stat.st_mtime_ns for n, stat in files if n.endswith((FAILURE, BOX))}

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def write(self, name: str, at: int, data: bytes) -> None:
        """Write data at an offset, and cut the file off after it."""
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not at and len(data) < _PIECE:  # all of it
            with replacing(path) as draft:
                draft.write(data)
            return
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.truncate(at)
            file.seek(at)
            file.write(data)


class Forwarder:
    """Sends a rank's files to the command's run directory, and fetches the other ranks' failures.
    ``rank``: rank whose files to send; None = all that dead ranks have left, unless the command has
    newer ones. ``serve``: calls a method of the `FileServer`."""

    def __init__(self, directory: Path, rank: int | None, serve: Callable[..., Any]):
        self._directory = directory
        self._rank = rank
        self._serve = serve
        self._sent: dict[str, Stat] = {}
        self._seen: dict[str, int] = {}
        self._ended = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="raygnn-files", daemon=True)

    def start(self) -> None:
        """Fetch the files that this rank has written in earlier attempts, on any node, and start
        the thread."""
        for name, (size, end) in self._serve("ends").items():
            path = self._directory / name
            if self._is_mine(name) and not _extends(path, size, end):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._serve("read", name))
        self._fetch_failures()
        self._thread.start()

    def close(self) -> None:
        """Send all remaining changes."""
        self._ended.set()
        self._thread.join()
        self.send(rows=True)

    def send(self, *, rows: bool = False) -> None:
        """Send changed files. ``rows``: also predicted rows, which are complete."""
        with self._sending:
            files = files_of_run(self._directory)
            if rows:
                below = files_of_run(self._directory / ROWS)
                files |= {f"{ROWS}/{name}": stat for name, stat in below.items()}
            mine = [name for name in files if self._is_mine(name)]
            changed = [name for name in mine if self._sent.get(name) != files[name]]
            ends = self._serve("ends") if changed else {}
            for name in changed:
                at = 0
                if name in ends and _extends(self._directory / name, *ends[name]):
                    at = ends[name][0]
                elif self._rank is None and (name in ends or not name.endswith(_APPENDED)):
                    continue
                self._send(name, at)
                self._sent[name] = files[name]

    def _send(self, name: str, at: int) -> None:
        with open(self._directory / name, "rb") as file:
            file.seek(at)
            piece: bytes | None = file.read(_PIECE)
            while piece is not None:  # also an empty file
                self._serve("write", name, at, piece)
                at += len(piece)
                piece = file.read(_PIECE) or None

    def _fetch_failures(self) -> None:
        there = {n: t for n, t in self._serve("failures").items() if not self._is_mine(n)}
        logs = self._directory / LOGS
        for name in [name for name, at in there.items() if self._seen.get(name) != at]:
            (logs / name).write_bytes(self._serve("read", f"{LOGS}/{name}"))
        for name in self._seen.keys() - there:
            (logs / name).unlink(missing_ok=True)
        self._seen = there

    def _is_mine(self, name: str) -> bool:
        """Return whether this rank writes the file; rank 0 writes files without a number."""
        if self._rank is None:
            return True
        match = _RANK.search(Path(name).name)
        return (int(match[1]) if match else 0) == self._rank

    def _run(self) -> None:
        warned = False
        while not self._ended.wait(_EVERY):
            try:
                self.send()
                self._fetch_failures()
            except Exception:
                if not warned:
                    log.warning("files wait to be sent", exc_info=True)
                warned = True


def is_away(directory: Path, token: str) -> bool:
    """Return whether this node does not see the command's run directory. Then the node has its own,
    which is created if needed. See `raygnn.runs.run_directory.RunDir` for the token."""
    if not (directory / token).exists():
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(directory.parent / f".{directory.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / token).exists():  # it is of an earlier command
                shutil.rmtree(directory, ignore_errors=True)
                for folder in (LOGS, CHECKPOINTS):
                    (directory / folder).mkdir(parents=True)
                (directory / _AWAY).touch()
                (directory / token).touch()
    return (directory / _AWAY).exists()


def available_weights(job: Job, given: weights.Weights, kept: RemotePath | None) -> weights.Weights:
    """Return another run's weights as this node sees them, downloaded if needed. ``kept``: see
    `raygnn.worker.job.Request`."""
    if kept is None or not is_away(job.run_dir, job.token):
        return given
    directory = job.run_dir / "weights"
    directory.mkdir(exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in (weights.FILE, weights.ABOUT):
            if not (directory / name).exists():
                (kept / name).download(directory / name)
        if given.rows is not None:
            download_directory(kept / weights.ROWS, directory / weights.ROWS)
    return weights.find(directory)


@contextmanager
def forwarded(job: Job, rank: int) -> Iterator[Callable[[], None]]:
    """Send a rank's files to the command's directory during the block, and at each call of the
    function that is yielded."""
    if job.config.store is None or not is_away(job.run_dir, job.token):
        yield lambda: None
        return
    forwarder = Forwarder(job.run_dir, rank, job.control.files)
    forwarder.start()
    try:
        yield forwarder.send
    finally:
        try:
            forwarder.close()
        except Exception:
            log.warning("not all files were sent", exc_info=True)


def collect(job: Job) -> None:
    """Send the files that killed ranks have left on this node, and remove the node's own run
    directory."""
    if (job.run_dir / _AWAY).exists() and (job.run_dir / job.token).exists():
        Forwarder(job.run_dir, None, job.control.files).send()
        shutil.rmtree(job.run_dir, ignore_errors=True)


def _end_of(path: Path) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        return size, file.read(_TAIL)


def _extends(path: Path, size: int, end: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, size - _TAIL))
            return len(end) == min(size, _TAIL) and file.read(len(end)) == end
    except FileNotFoundError:
        return False
