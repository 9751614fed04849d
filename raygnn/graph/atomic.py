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


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside ``target``, to be handed to :func:`publish`; else removed.

    Its name is ``.<target>.tmp-<pid>-<random>``. Those that killed processes of this host left
    are removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target)
    name = f"{_prefix(target)}{os.getpid()}-{_host()}{secrets.token_hex(4)}"
    temporary = target.parent / name
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, target: Path) -> bool:
    """Make a finished directory durable and visible as ``target``, in one step.

    The files in it must be on disk already. Returns False, and changes nothing, if a directory
    with something in it is there (another process was first).
    """
    for directory in (path for path in temporary.rglob("*") if path.is_dir()):
        _sync(directory)
    _sync(temporary)
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    _sync(target.parent)
    return True


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
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
