"""Run directory ``<storage>/<name>/``: claimed by one command, then written by it.

``config.yaml`` (resolved), ``preflight.json``, ``partition.json``, ``metrics.jsonl``,
``ranks.jsonl``, ``summary.json``, ``report.html``, ``checkpoints/``, ``loggers/``,
``logs/rank-<r>.log``. The status in ``summary.json`` is ``running``, ``done``,
``failed`` or ``interrupted``; a run whose process is gone while it says ``running`` was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError, create_model

from raygnn.config.places import SCHEMES, Uri, without_users
from raygnn.config.values import to_storage
from raygnn.config.yaml_text import read_yaml, write_yaml
from raygnn.errors import ConfigError, DataError, InputError, TrainingError
from raygnn.storage.claim import CLAIMS, Claim
from raygnn.storage.remote import AnyPath, RemotePath, Stat
from raygnn.storage.replica import UPDATES, Publisher, clear, fetch, private_directory, upload_run
from raygnn.util.files import (
    Appender,
    plain,
    read_json,
    read_regular,
    remove,
    retry,
    storage_error,
    storage_errors,
    write_atomic,
    write_json,
)
from raygnn.util.locks import LOCK, Lock, holder

Mode = Literal["new", "overwrite", "resume"]

CONFIG = "config.yaml"
PREFLIGHT = "preflight.json"
PARTITION = "partition.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
SEARCH = "search.json"  # of a search: its trials, whose runs are in `TRIALS`
TRIALS = "trials"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
SAVE = ".save"  # created by a user or a batch system to request a checkpoint
# in logs/, lines of events:
EVENTS = "events.jsonl"  # of rank 0
SCALING = "scaling.jsonl"  # of the scaling policy
LOGGERS = "loggers.jsonl"  # of the logger threads
TOLD = "told.jsonl"  # of the command, including the other events that it has printed
_TOKEN = ".run-"
_DRAFT = f".{CONFIG}.tmp-"  # as `raygnn.util.files.replacing` names it
# files with the token of the newest command: in the store, and here until everything is uploaded
_NEWEST, _UNSENT = ".newest", ".unsent"
_SHOWN = 200  # characters of an invalid path
_LARGEST_CONFIG = 2**20  # bytes
_LARGEST_SUMMARY = 4 * 2**20
_MOST_WAITING = 2**20  # bytes of events
RANK_FILE = re.compile(r"(?:comm-)?rank-(\d{1,6})\.")  # prefix of a rank's files in logs/

# types of the entries of summary.json that are read
_TYPES: dict[Any, str] = {
    str: "status error job metric selected",
    Annotated[str, AfterValidator(datetime.fromisoformat)]: "started",
    int: "steps total_steps epochs workers starts best_epoch",
    float: "seeds_per_second train_loss",
    dict[str, float | None]: "metrics best_metrics last_metrics seconds skipped",
    dict[str, Any]: "positive versions",
    dict[str, list[dict[str, float | None]]]: "thresholds",
    list[dict[str, Any]]: "ranks",
}
_FIELDS: Any = {n: (kind | None, None) for kind, names in _TYPES.items() for n in names.split()}
_SUMMARY = create_model("_SUMMARY", **_FIELDS)

# variable with the id of the Ray job that runs this command
JOB = "RAYGNN_JOB"

# first line of every config.yaml that we write, by which run directories are recognized
MARK = "# raygnn run: the configuration as it was resolved\n"


def storage_path(storage: str | Path) -> Path:
    """Return the absolute local directory for ``storage``, a path or a ``file://`` URI. Raises
    InputError for any other URI, or an invalid path."""
    place = read_storage(str(storage))
    if isinstance(place, Uri):
        remedy = "give a directory of this machine"
        raise InputError(f"{place} is not on this machine", where="storage", remedy=remedy)
    return place


def read_storage(text: str) -> Path | Uri:
    """Parse ``storage``: an absolute local directory, or the URI of an object store. Raises
    InputError if it is neither."""
    if "://" not in text:
        return local_path(text, "storage")
    try:
        return to_storage(text)
    except ValueError as error:
        message = f"{without_users(text)[:_SHOWN]!r} cannot be the storage of runs"
        remedy = f"give a directory, or a URI that begins with {', '.join(SCHEMES)}"
        raise InputError(message, where="storage", remedy=remedy) from error


def local_path(text: str, where: str) -> Path:
    """Return the absolute path for a text. Raises InputError, with ``where``, if the path is
    invalid."""
    try:
        if "\0" not in text:
            return Path(text).expanduser().absolute()
    except RuntimeError:
        pass  # ~name of no user
    message = f"{text[:_SHOWN]!r} is not a valid path here"
    raise InputError(message, where=where, remedy="give a path; ~name needs a user of that name")


def lost(path: Path, token: str) -> str | None:
    """Return ``removed`` or ``replaced`` (by another directory or command) if the run directory
    into which a command with this token writes is gone; None if it exists, or storage fails."""
    for place, fate in ((path, "removed"), (path / token, "replaced")):
        try:
            os.stat(place)
        except FileNotFoundError:
            return fate
        except OSError:
            return None
    return None


def is_run(path: Path) -> bool:
    """Return True for a run directory: its config.yaml begins with our mark."""
    file = path / CONFIG
    if file.is_symlink() or not file.is_file():
        return False
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return stream.read(len(MARK)) == MARK
    except OSError:
        return False


def is_kept(store: Uri, name: str) -> bool:
    """Return True if the store has a run of that name. Raises DataError if the store cannot be
    read."""
    return (RemotePath.of(store, "storage") / name / CONFIG).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """Read the resolved configuration of the run at ``path``. Raises DataError if the file is
    damaged."""
    file = path / CONFIG
    if file.is_symlink():  # the report would show the user's file that it links to
        raise DataError("this is a symbolic link", where=str(file), remedy="replace it by the file")
    try:
        value, _ = read_yaml(read_regular(file, _LARGEST_CONFIG).decode(), CONFIG)
    except (OSError, ValueError, ConfigError) as error:
        why = getattr(error, "what", error)
        raise DataError(f"not readable as YAML: {why}", where=str(file)) from error
    if not isinstance(value, dict):
        raise DataError("not a configuration", where=str(file))
    return value


def read_summary(path: Path) -> dict[str, Any]:
    """Return ``summary.json`` of the run at ``path``; ``{}`` if there is none. Raises DataError if
    the file is damaged, or larger than a run ever writes it."""
    summary = read_json(path / SUMMARY, _LARGEST_SUMMARY)
    try:
        _SUMMARY.model_validate(summary, strict=True)
    except ValidationError as error:
        (problem, *_) = error.errors()
        what = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise DataError(what, where=str(path / SUMMARY)) from error
    return summary


def read_status(path: Path) -> str:
    """Return ``running``, ``done``, ``failed``, ``interrupted``, or ``killed`` (process gone).
    Raises DataError if ``summary.json`` is damaged."""
    status = read_summary(path).get("status", "running")
    if status == "running" and holder(path / LOCK) is None:
        return "killed"
    return str(status)


class RunDir:
    """Run directory ``<storage>/<name>`` of this command: created and claimed, :meth:`begin`,
    written, :meth:`release`. Until it begins, nothing in it is changed.

    For a run in an object store it is the local working directory, into which the run is
    downloaded, and from which changes are uploaded.

    Args:
        mode: ``new`` needs a free name, ``resume`` an existing run; ``overwrite`` accepts both, and
            removes the old run when the new one begins.
        store: object store that contains the runs, if any.
        patience: seconds to wait, at the end, for an unavailable store.
        notify: called with notes for the user.

    Attributes:
        path: absolute path of the directory.
        uri, place: location in the object store, or None.
        begun: True once :meth:`begin` was called; until then the files are an earlier run's.
        token: name of a file in it that is unique to this command; empty before :meth:`begin`.

    Raises:
        InputError: the name is used, locked by a live process, not a run directory (nothing else is
            ever deleted), missing (``resume``), or cannot be written.
    """

    def __init__(
        self,
        storage: str | Path,
        name: str,
        *,
        mode: Mode = "new",
        store: Uri | None = None,
        patience: float = 60.0,
        notify: Callable[[str], object] = lambda text: None,
    ):
        if not name or Path(name).name != name or name == "..":
            raise InputError(f"{name!r} is not a name for a directory", where="name")
        self.path = storage_path(storage) / name
        self.uri = None if store is None else store / name
        self.place = None if self.uri is None else RemotePath.of(self.uri, "storage")
        self.notify, self._mode, self._patience = notify, mode, patience
        self.begun, self.token = False, ""
        self._lock = Lock(self.path / LOCK, "is writing into this run directory")
        self._claim = None if self.place is None else Claim(self.place)
        self._publisher: Publisher | None = None
        self._fetched: dict[str, Stat] = {}
        self._taken_over = False  # the run in the store
        if store is None:
            self._check(self.path / UPDATES)
        else:
            with storage_errors(self.path, InputError, "set staging.path elsewhere"):
                private_directory(self.path.parent)
        with storage_errors(self.path, InputError):
            self._made = [part for part in (self.path, *self.path.parents) if not part.exists()]
            while True:
                self.path.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # its last holder has just removed it
                    self._lock.acquire()
                    break
        try:
            if self._claim is not None:
                self._claim.acquire(notify)
                self._take_over()
            # again, now that no other command can change it
            self._check((self.place or self.path) / UPDATES)
        except BaseException:
            self.release()
            raise

    def _check(self, kept: AnyPath) -> None:
        """Raise InputError if the directory cannot be claimed; ``kept``: rows that a service
        keeps."""
        path, mode = self.path, self._mode
        with storage_errors(path, InputError):
            free = _is_free(path)
        what, remedy = "", "choose another name, or another storage"
        if free and mode == "resume":
            what, remedy = "there is no run to resume", "start it without --resume"
        elif path.is_symlink():
            what = "this name is a symbolic link, not a run directory"
        elif not free and not is_run(path):
            what = "this is not a run directory; nothing in it was changed"
        elif not free and mode == "new":
            what = f"the name {path.name!r} is taken by an earlier run"
            remedy = "choose another name, or pass --overwrite to replace it, --resume to resume "
            remedy += "it (in Python overwrite=True, resume=True)"
        elif mode == "overwrite" and any(kept.glob("*.json")):
            what = f"a service of this run has kept rows in {UPDATES}/, which would be removed"
            remedy = "choose another name, or move that directory away"
        if what:
            raise InputError(what, where=self.shown, remedy=remedy)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start the run: remove the old one (``overwrite``), and write the resolved configuration
        and the status ``running``. Raises InputError if the directory cannot be written."""
        text = MARK + write_yaml(plain(dict(config)))
        with storage_errors(self.path, InputError):
            if self._mode == "overwrite":
                self._clear()
                if self.place is not None:
                    clear(self.place, CLAIMS)
            for old in (*self.path.glob(f"{_TOKEN}*"), *self.path.glob(f"{_DRAFT}*")):
                old.unlink()  # of killed commands
            # before the config, which makes it a run, `release` removes all of this again
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            (self.path / LOGS).mkdir(exist_ok=True)
            write_atomic(self.path / CONFIG, text)
            self.begun = True
            token = f"{_TOKEN}{uuid.uuid4().hex}"
            (self.path / token).touch()
            self.token = token
            summary = read_summary(self.path)
            for name in ("error", "job"):  # of an earlier command
                summary.pop(name, None)
            if job := os.environ.get(JOB):
                summary["job"] = job
            summary.setdefault("started", datetime.now(UTC).isoformat(timespec="seconds"))
            write_json(self.path / SUMMARY, {**summary, "status": "running"})
            if self.place is not None:
                (self.path / _UNSENT).write_text(token)
        if self.place is not None:
            (self.place / _NEWEST).write(token.encode())
            self._publisher = Publisher(
                self.path, self.place, lambda text: self.notify(text), lambda: self._is_taken
            )
            self._publisher.start({} if self._mode == "overwrite" else self._fetched)

    def notes(self) -> Iterator[str]:
        """Yield notes on the claim for the user."""
        if stale := self._lock.stale:
            yield (
                f"process {stale.pid} on {stale.host}, which was writing into {self.path}, sends "
                "no heartbeat: this command takes over"
            )
        if self._claim is not None and self._claim.stale:
            yield f"{self._claim.stale}, which held {self.place}, sends no heartbeat"

    @property
    def lost(self) -> str | None:
        """See :func:`lost`; also ``replaced`` if another command has claimed the name."""
        return lost(self.path, self.token) or ("replaced" if self._is_taken else None)

    @property
    def _is_taken(self) -> bool:
        return self._claim is not None and self._claim.lost

    def check(self) -> None:
        """Raise TrainingError if the directory of this command was removed or replaced."""
        if lost := self.lost:
            raise TrainingError(
                f"the run directory was {lost} while the run trained, with its records and "
                "checkpoints",
                where=str(self.path),
                remedy="move it back and train with --resume, or start over; do not move it while "
                "its run trains",
            )

    @property
    def shown(self) -> str:
        """Path or URI of the run."""
        return str(self.path) if self.uri is None else self.uri.shared

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``."""
        return read_summary(self.path)

    def update_summary(self, wait: float = 0.0, **entries: Any) -> dict[str, Any]:
        """Set entries of ``summary.json``, waiting at most ``wait`` seconds for storage that is
        full or away; returns all entries. Raises TrainingError if it cannot be read or written."""

        def update() -> dict[str, Any]:
            summary = {**self.summary, **entries}
            write_json(self.path / SUMMARY, summary)
            return summary

        self.check()
        try:
            with storage_errors(self.path / SUMMARY):
                return retry(update, wait)
        except DataError as error:
            raise storage_error(error) or error from error

    def write(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a JSON file, such as ``preflight.json``. Raises TrainingError if it cannot be
        written."""
        with storage_errors(self.path / name):
            write_json(self.path / name, facts)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def release(self) -> bool:
        """Release the directory; if no run began, remove it if this command created it. The local
        copy of a run in an object store is removed once it is uploaded; returns False if not all
        could be uploaded."""
        done = not self.begun
        if self._claim is not None:
            if self._publisher is not None:
                done = self._publisher.finish(self._patience)
            self._claim.release()
            # keep files that an earlier command could not upload and no command has resumed from
            if done and self._taken_over and (self.begun or not (self.path / _UNSENT).exists()):
                self._clear()
        with contextlib.suppress(OSError):  # storage that is away must not hide why this ends
            if self.lost is None and self.token:
                (self.path / self.token).unlink(missing_ok=True)
            if done and not is_run(self.path) and _is_free(self.path):
                self._remove_made()
        self._lock.release()
        return done or self._claim is None

    def _remove_made(self) -> None:
        made = self._made or [self.path] * (self._claim is not None)
        (self.path / LOCK).unlink(missing_ok=True)
        for name in (CHECKPOINTS, LOGS) if made else ():
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rmdir()
        for directory in made:  # until one is not empty
            directory.rmdir()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the directory. Raises TrainingError if not all of a run that ended well could be
        uploaded."""
        if self.release():
            return
        what = f"not all files of the run are in {self.place}: the rest is in {self.path}"
        remedy = "restore the store, then run this with --resume on this machine, which uploads it"
        if kind is None:
            raise TrainingError(what, where=self.shown, remedy=remedy)
        self.notify(f"{what}; {remedy}")

    def _take_over(self) -> None:
        assert self.place is not None
        with storage_errors(self.path, InputError, "set staging.path elsewhere"):
            unsent, newest = self.path / _UNSENT, self.place / _NEWEST
            resumes = self._mode == "resume" and unsent.exists() and newest.is_file()
            if resumes and newest.read_bytes() == unsent.read_bytes():
                upload_run(self.path, self.place)  # no other command has written since
            else:
                self._clear()
            self._fetched = fetch(self.place, self.path)
            self._taken_over = True

    def _clear(self) -> None:
        """Remove the old run's files, its config last so that it remains recognizable."""
        entries = [entry for entry in self.path.iterdir() if entry.name not in (LOCK, CONFIG)]
        for entry in entries:
            remove(entry)
        (self.path / CONFIG).unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    """Return True if ``path`` does not exist, or has only entries of a command that was killed
    before it wrote its config."""
    if path.is_symlink() or not path.is_dir():
        return not (path.is_symlink() or path.exists())
    return all(
        entry.name == LOCK
        or entry.name.startswith(_DRAFT)
        or (entry.name in (CHECKPOINTS, LOGS) and entry.is_dir() and not any(entry.iterdir()))
        for entry in path.iterdir()
    )


class Events:
    """Writer of event lines to a file in ``logs/``; failed writes are retried with the next event.
    Threads may share it. ``path``: the file; its directory exists."""

    def __init__(self, path: Path):
        self._file = Appender(path)
        self._lock = threading.Lock()

    def notify(self, text: str) -> None:
        """Add an event: its text and the time."""
        event = {"time": round(time.time(), 3), "text": text}
        with self._lock, contextlib.suppress(OSError):
            full = len(self._file.waiting) > _MOST_WAITING
            self._file.add(b"" if full else json.dumps(event).encode() + b"\n")

    def flush(self) -> None:
        """Retry failed writes."""
        with self._lock, contextlib.suppress(OSError):
            self._file.flush()

    def close(self) -> None:
        """Close the file; unwritten events are dropped."""
        with self._lock:
            self._file.close()
