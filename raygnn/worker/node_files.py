"""The run directory on nodes that do not see that of the command, of a run that is kept in a store.

What ranks write on such a node, checkpoints aside, goes through the job's control actor to the
directory of the command, which has all there is, and brings it to the store. So a store that is
away holds up no record, and what watches the ranks reads their files as ever.
"""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raygnn.checkpoint.hashed_files import nothing
from raygnn.runs.diagnose.state_file import BOX, FAILURE
from raygnn.runs.run_directory import CHECKPOINTS, LOGS
from raygnn.storage.remote import Stat
from raygnn.storage.replica import files_of_run
from raygnn.util.files import replacing
from raygnn.worker.job import ROWS, Job

_AWAY = ".away"  # in such a directory
_APPENDED = (".jsonl", ".log", ".crash")  # files that grow
_EVERY = 1.0  # seconds between looks for what has changed
_PIECE = 4 * 2**20  # bytes that are sent at once
_TAIL = 256  # bytes that are compared, to see whether a file has only grown
_RANK = re.compile(r"rank-(\d+)(?!\d)")

log = logging.getLogger("raygnn")


class FileServer:
    """Reads and writes files of the command's run directory for ranks elsewhere."""

    def __init__(self, directory: Path):
        self._directory = directory

    def ends(self) -> dict[str, tuple[int, bytes]]:
        """Size and last bytes of each file that grows."""
        names = [name for name in files_of_run(self._directory) if name.endswith(_APPENDED)]
        return {name: _end_of(self._directory / name) for name in names}

    def failures(self) -> dict[str, int]:
        """The records of failures, and black boxes, and when each was written."""
        files = files_of_run(self._directory / LOGS).items()
        return {n: stat.st_mtime_ns for n, stat in files if n.endswith((FAILURE, BOX))}

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def write(self, name: str, at: int, data: bytes) -> None:
        """Write from ``at`` on, which becomes the file's end."""
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
    """Sends files of a node's own run directory to the command's, and fetches what others left.

    Args:
        rank: whose files these are; None = what ranks that died could not send any more, and
            nothing that is older than what the command has.
        serve: calls a method of the `FileServer`.
    """

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
        """Fetch what this rank has written so far, wherever it ran, and begin."""
        for name, (size, end) in self._serve("ends").items():
            path = self._directory / name
            if self._is_mine(name) and not _extends(path, size, end):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._serve("read", name))
        self._fetch_failures()
        self._thread.start()

    def close(self) -> None:
        """Send all that is left."""
        self._ended.set()
        self._thread.join()
        self.send(f"{ROWS}/")

    def send(self, *others: str) -> None:
        """Send what has changed.

        Args:
            others: directories whose files go, too.
        """
        with self._sending:
            self._send_changed(others)

    def _send_changed(self, others: Iterable[str]) -> None:
        files = files_of_run(self._directory)
        for folder in others:
            below = files_of_run(self._directory / folder)
            files |= {f"{folder}{name}": stat for name, stat in below.items()}
        changed = [n for n, stat in files.items() if self._is_mine(n) and self._sent.get(n) != stat]
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
            piece = file.read(_PIECE)
            while True:
                self._serve("write", name, at, piece)
                at += len(piece)
                if not (piece := file.read(_PIECE)):
                    return

    def _fetch_failures(self) -> None:
        there = {n: t for n, t in self._serve("failures").items() if not self._is_mine(n)}
        logs = self._directory / LOGS
        for name in [name for name, at in there.items() if self._seen.get(name) != at]:
            (logs / name).write_bytes(self._serve("read", f"{LOGS}/{name}"))
        for name in self._seen.keys() - there:
            (logs / name).unlink(missing_ok=True)
        self._seen = there

    def _is_mine(self, name: str) -> bool:
        """Whether this rank writes it: what bears no rank's number is rank 0's."""
        if self._rank is None:
            return True
        match = _RANK.search(Path(name).name)
        return (int(match[1]) if match else 0) == self._rank

    def _run(self) -> None:
        said = False
        while not self._ended.wait(_EVERY):
            try:
                self.send()
                self._fetch_failures()
            except Exception:
                if not said:
                    log.warning("files wait to be sent", exc_info=True)
                said = True


def is_away(directory: Path, token: str) -> bool:
    """Whether this node does not see the command's run directory; then it has one of its own,
    made now if it was not there. See `raygnn.runs.run_directory.RunDir` for the token."""
    if not (directory / token).exists():
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(directory.parent / f".{directory.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / token).exists():  # what lies there is of an earlier command
                shutil.rmtree(directory, ignore_errors=True)
                for folder in (LOGS, CHECKPOINTS):
                    (directory / folder).mkdir(parents=True)
                (directory / _AWAY).touch()
                (directory / token).touch()
    return (directory / _AWAY).exists()


@contextmanager
def forwarded(job: Job, rank: int) -> Iterator[Callable[[], None]]:
    """While a rank works, its files reach the command's directory, at the latest when it calls what
    this yields."""
    if job.config.store is None or not is_away(job.run_dir, job.token):
        yield nothing
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
    """On a node where ranks have ended: send what those that were killed left, and remove the
    node's own directory."""
    if (job.run_dir / _AWAY).exists() and (job.run_dir / job.token).exists():
        Forwarder(job.run_dir, None, job.control.files).send()
        shutil.rmtree(job.run_dir, ignore_errors=True)


def _end_of(path: Path) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        return size, file.read(_TAIL)


def _extends(path: Path, size: int, end: bytes) -> bool:
    """Whether a file is one of that size and end, with or without more after it."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, size - _TAIL))
            return len(end) == min(size, _TAIL) and file.read(len(end)) == end
    except FileNotFoundError:
        return False
