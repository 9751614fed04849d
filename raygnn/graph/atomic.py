"""Directories that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from raygnn.errors import DataError
from raygnn.graph.remote import AnyPath


def is_vacant(place: AnyPath) -> bool:
    """Whether something can be put there: nothing, or an empty directory, is in the way.

    Raises:
        DataError: it cannot be looked at.
    """
    try:
        return not place.exists() or (place.is_dir() and not any(place.iterdir()))
    except OSError as error:
        raise DataError(
            f"cannot be looked at: {error.strerror or error}",
            where=str(place),
            remedy="correct the path, or the permissions of its directories",
        ) from error


@contextlib.contextmanager
def writing(what: str, place: Path) -> Iterator[None]:
    """Turn errors of the file system into ours.

    Raises:
        DataError: ``what`` ("the partition") cannot be written.
    """
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "free some space, or set storage or partition.path to a larger disk",
            errno.EDQUOT: "raise the quota, or set storage or partition.path to another disk",
            errno.EACCES: "make it writable, or set storage or partition.path elsewhere",
        }
        raise DataError(
            f"{what} cannot be written: {error.strerror or error}",
            where=str(place),
            remedy=remedies.get(error.errno or 0, "set storage or partition.path elsewhere"),
        ) from error


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside ``target``, to be handed to :func:`publish`; else removed.

    Its name is ``.<target>.tmp-<pid>-<random>``. Those that killed processes of this host left
    are removed first. Where nothing comes of it, directories above that were made for it go, too.
    """
    made = [path for path in target.parents if not path.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target)
    name = f"{_prefix(target)}{os.getpid()}-{_host()}{secrets.token_hex(4)}"
    temporary = target.parent / name
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # something lies in it
            for path in made:
                path.rmdir()


def publish(temporary: Path, target: Path) -> bool:
    """Make a finished directory durable and visible as ``target``, in one step.

    The files in it must be on disk already. Returns False, and changes nothing, if a directory
    with something in it is there (another process was first).
    """
    for directory in (path for path in temporary.rglob("*") if path.is_dir()):
        sync(directory)
    sync(temporary)
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    sync(target.parent)
    return True


def sync(path: Path) -> None:
    """Make a file's contents, or a directory's list of files, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prefix(target: Path) -> str:
    return f".{target.name}.tmp-"


def _host() -> str:
    """Tells processes whose ids may be compared: the host and, in containers, the namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def remove_stale(target: Path) -> None:
    """Remove what processes of this host that were killed left of their work on ``target``."""
    name = re.compile(rf"{re.escape(_prefix(target))}(\d+)-{_host()}[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if (match := name.fullmatch(path.name)) and not _alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
