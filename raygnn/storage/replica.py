"""Runs in an object store: local copies, uploads while a run is in progress, and transfers.

A run in an object store has a local run directory where it is written or read. For checkpoints see
`raygnn.checkpoint.remote_checkpoints`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raygnn.config.places import Uri
from raygnn.errors import DataError, InputError
from raygnn.storage.claim import held_by
from raygnn.storage.remote import RemotePath, Stat
from raygnn.util.files import new_directory, publish, storage_errors
from raygnn.util.locks import LOCK

_INSTEAD = "set TMPDIR to another directory"

log = logging.getLogger("raygnn")

AT_ONCE = 8  # concurrent transfers
FIRST = "config.yaml"  # marks a directory as a run
UPDATES = "updates"  # rows that a service of the run has received
_APART = ("checkpoints", "rows", UPDATES)
_FRESH = 2.0  # seconds for which a copy is not compared again
_MOST = 10 * 2**30  # bytes of all copies
_EVERY = 5.0  # seconds between checks for changed files
_RATE = 2**20  # bytes per second at which a growing file is uploaded again


class Replica:
    """Local, read-only copy of a run in an object store. It is in the temporary directory, and the
    least recently used copies are removed.

    Args:
        only: names of the files to copy; empty = all but checkpoints.

    Attributes:
        uri, place: location of the run.
        directory: directory of the copy.

    Raises:
        DataError: the store cannot be opened.
    """

    def __init__(self, uri: Uri, only: Collection[str] = ()):
        self.uri = uri
        self._only = only
        self.place = RemotePath.of(uri, "storage")
        root = Path(tempfile.gettempdir()) / f"raygnn-{os.getuid()}" / "read"
        digest = hashlib.sha256(uri.parent.shared.encode()).hexdigest()
        self.directory = root / f"{digest[:16]}" / uri.name
        self._refreshed = -_FRESH

    def refresh(self) -> None:
        """Download changed files; see `fetch`. Raises DataError if the store cannot be read,
        and InputError if the copy cannot be written."""
        if time.monotonic() - self._refreshed < _FRESH:
            return
        with storage_errors(self.directory, InputError, _INSTEAD):
            private_directory(self.directory)
            files = fetch(self.place, self.directory, self._only)
            lock = self.directory / LOCK
            if held := held_by(files):
                (self.place / held).download(lock)
            else:
                lock.unlink(missing_ok=True)
            os.utime(self.directory)
            _remove_unused(self.directory.parent)
        self._refreshed = time.monotonic()

    def fetch(self, name: str) -> Path:
        """Download a file or a directory that `refresh` skips; returns its path. Raises DataError
        if it cannot be read."""
        target = self.directory / name
        with storage_errors(target, InputError, _INSTEAD):
            if (self.place / name).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                (self.place / name).download(target)
            else:
                shutil.rmtree(target, ignore_errors=True)
                download_directory(self.place / name, target)
        return target


@dataclass
class Publisher:
    """Uploads a run directory to an object store while the run is in progress, in a thread. Failed
    uploads are repeated until they succeed.

    Attributes:
        place: location of the run in the store.
        notify: called once when uploads start to fail, and once when they succeed again.
        is_lost: returns True if another command has taken over the run.
    """

    directory: Path
    place: RemotePath
    notify: Callable[[str], object]
    is_lost: Callable[[], bool]

    def __post_init__(self) -> None:
        self._sent: dict[str, tuple[Stat, float]] = {}  # name → state and time of its upload
        self._failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raygnn-publisher", daemon=True)

    def start(self, known: Mapping[str, Stat]) -> None:
        """Start the thread; ``known``: files in the store, from `fetch`."""
        self._sent = {name: (stat, 0.0) for name, stat in known.items() if travels(name)}
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        """Upload the remaining changes, for at most so long; returns True if all are uploaded."""
        self._ended.set()
        deadline = time.monotonic() + seconds
        self._thread.join(seconds)
        while not self._thread.is_alive() and not self.is_lost():
            if self._round(at_end=True):
                return True
            if time.monotonic() >= deadline:
                break
            time.sleep(min(_EVERY, seconds))
        return False

    def _run(self) -> None:
        while not self.is_lost():
            try:
                self._round()
            except Exception:
                log.warning("the run's files could not be uploaded; retrying", exc_info=True)
            if self._ended.wait(_EVERY):
                return

    def _round(self, *, at_end: bool = False) -> bool:
        """Upload changed files; returns True if none failed."""
        files, now = files_of_run(self.directory), time.monotonic()
        gone = [name for name in self._sent if name not in files]
        due = [n for n, stat in files.items() if at_end or self._is_due(n, stat, now)]
        due = [n for n in due if n not in self._sent or self._sent[n][0] != files[n]]
        due.sort(key=lambda name: name != FIRST)
        try:
            for name in due[:1]:  # tests the connection before all threads wait for it
                self._send(name, files[name])
            _at_once(lambda name: self._send(name, files[name]), due[1:])
            _at_once(self._remove, gone)
        except DataError as error:
            if not self._failing:
                why = f"{error.where}: {error.what}"
                self.notify(f"uploads fail, and the run's files wait in {self.directory}: {why}")
            self._failing = True
            return False
        if self._failing and (due or gone):
            self.notify(f"the run's files are uploaded to {self.place} again")
            self._failing = False
        return True

    def _is_due(self, name: str, stat: Stat, now: float) -> bool:
        """True if a changed file is to be uploaded now; larger files are uploaded less often."""
        return name not in self._sent or now - self._sent[name][1] >= stat.st_size / _RATE

    def _send(self, name: str, stat: Stat) -> None:
        try:
            (self.place / name).upload(self.directory / name)
        except FileNotFoundError:
            return  # removed meanwhile
        self._sent[name] = stat, time.monotonic()

    def _remove(self, name: str) -> None:
        (self.place / name).remove()
        del self._sent[name]


def private_directory(directory: Path) -> None:
    """Create a directory that is writable for this user only, with its two parents. Raises
    InputError if one of the three belongs to another user, and OSError if it cannot be created."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (directory, *directory.parents[:2]):
        if path.lstat().st_uid not in (os.getuid(), 0):
            message = f"it belongs to another user (id {path.lstat().st_uid})"
            remedy = "set staging.path, or TMPDIR, to a directory of your own"
            raise InputError(message, where=str(path), remedy=remedy)


def fetch(place: RemotePath, directory: Path, only: Collection[str] = ()) -> dict[str, Stat]:
    """Update a directory to a run in an object store; equal files are not downloaded.

    Args:
        only: names of the files to download; empty = all but checkpoints.

    Returns:
        All files of the run in the store.

    Raises:
        DataError: the store cannot be read.
        OSError: the directory cannot be written.
    """
    found = place.files()
    names = {n for n in without_conflicts(found) if travels(n) and (not only or n in only)}
    here = files_of_run(directory)
    for name in here.keys() - names:
        if not only:
            (directory / name).unlink(missing_ok=True)

    def download(name: str) -> None:
        target, stat = directory / name, found[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        (place / name).download(target)
        os.utime(target, ns=(stat.st_mtime_ns, stat.st_mtime_ns))

    _at_once(download, sorted(name for name in names if here.get(name) != found[name]))
    return found


def without_conflicts(names: Iterable[str]) -> set[str]:
    """Drop, with a warning, objects that no directory can hold: an object with the name of a
    directory of the run, or below one of its files. raygnn writes neither."""
    kept = set(names)
    for name in sorted(kept):
        for parent in map(str, PurePosixPath(name).parents):
            if parent in kept:
                odd = name if PurePosixPath(parent).suffix else parent  # files of runs have one
                log.warning("object %s in the run's place is not raygnn's: ignored", odd)
                kept.discard(odd)
    return kept


def upload_run(directory: Path, place: RemotePath) -> None:
    """Upload a run directory without checkpoints. Raises DataError if the store cannot be
    written."""
    _upload(directory, place, files_of_run(directory))


def upload_directory(directory: Path, place: RemotePath, last: Collection[str]) -> None:
    """Upload a complete directory; the files in ``last`` follow the others, in order. Raises
    DataError if the store cannot be written."""
    names = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*"))]
    names = [name for name in names if (directory / name).is_file() and name not in last]
    _upload(directory, place, names)
    for name in last:
        (place / name).upload(directory / name)


def _upload(directory: Path, place: RemotePath, names: Iterable[str]) -> None:
    _at_once(lambda name: (place / name).upload(directory / name), names)


def _at_once(act: Callable[[str], object], names: Iterable[str]) -> None:
    """Call a function with each name, in several threads. Raises the first error."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(act, names))


def share_directory(directory: Path, place: RemotePath, mark: str) -> None:
    """Download a directory from the store, or else upload it; ``mark``: the file that is written
    last. Raises DataError if the store cannot be read or written, and OSError if the directory
    cannot be written."""
    if (place / mark).is_file():
        download_directory(place, directory)
    elif directory.exists():
        upload_directory(directory, place, [mark])


def download_directory(place: RemotePath, directory: Path) -> None:
    """Download a complete directory unless it exists here. Raises DataError if the store cannot be
    read, and OSError if the directory cannot be written."""
    if directory.exists():
        return
    with new_directory(directory) as draft:
        names = [name for name in place.files() if _stays_inside(name)]
        for name in names:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
        _at_once(lambda name: (place / name).download(draft / name), names)
        publish(draft, directory)


def clear(place: RemotePath, keep: str) -> None:
    """Remove a run from the store, except for the directory ``keep``."""
    tops = {name.split("/")[0] for name in place.files()} - {keep}
    # the file that marks it as a run is removed last
    for name in sorted(tops, key=lambda name: name == FIRST):
        (place / name).remove()


def _remove_unused(root: Path) -> None:
    """Remove the least recently used directories in ``root``, down to a total of 10 GiB."""
    directories = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for directory in directories:
        total += sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        if total > _MOST and directory != directories[0]:
            shutil.rmtree(directory, ignore_errors=True)


def files_of_run(directory: Path) -> dict[str, Stat]:
    """Return the files that are uploaded with a run, by relative path."""
    files = {}
    for path, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            relative = Path(path, name).relative_to(directory).as_posix()
            if travels(relative):
                try:
                    info = os.lstat(directory / relative)
                except FileNotFoundError:
                    continue
                files[relative] = Stat(info.st_size, info.st_mtime_ns)
    return files


def travels(name: str) -> bool:
    """True if a file is uploaded with its run, unlike hidden files and checkpoints."""
    parts = PurePosixPath(name).parts
    hidden = any(part.startswith(".") for part in parts)
    return not hidden and parts[0] not in _APART and _stays_inside(name)


def _stays_inside(name: str) -> bool:
    """True if a relative path stays within its directory."""
    return ".." not in PurePosixPath(name).parts and not name.startswith("/") and "\0" not in name
