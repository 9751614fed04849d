"""Advisory locks on files, which the kernel drops with the process that holds them.

A `Lock` also works between hosts. Its file holds who has it (host, pid, start of that process), or
nothing. ``flock`` makes taking it atomic; the content tells other hosts and readers, and keeps the
lock where a filesystem has no ``flock``, or one that other hosts do not see.

What can be had of ``flock`` does not tell which of these it is. So the holder also moves the file's
time every few seconds, and the claim of another host is stale when that has stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from raygnn.errors import InputError

LOCK = ".lock"  # in a directory that one command at a time writes into

_BEAT = 3.0  # seconds between signs of life
_SILENCE = 30.0  # seconds without one, by the clock of whoever waits, after which a claim is stale
_LOOK = 1.0  # seconds between looks for one

_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def is_alive(pid: int) -> bool:
    """Whether a process of this host has that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def try_flock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; whether that could be had at once.

    Args:
        shared: lock it for as many as want it in the same way.

    Raises:
        OSError: its filesystem has no such locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock(path: Path) -> int | None:
    """Lock a file of this host for this process, whose id is written into it; made if missing.

    Returns:
        A descriptor that keeps the lock until it is closed; None where another process has it.

    Raises:
        OSError: the file cannot be made, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    # without a link, it was removed by the process that held it
    if try_flock(descriptor) and os.fstat(descriptor).st_nlink:
        with contextlib.suppress(OSError):  # a full disk: what comes next will say so
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        return descriptor
    os.close(descriptor)
    return None


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock; ``started`` tells it from a later one with the same pid."""

    host: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()))

    @property
    def local(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Whether the process runs. One on another host cannot be asked and counts as alive."""
        if not self.local:
            return True
        return is_alive(self.pid) and _started(self.pid) == self.started


def holder(path: Path) -> Holder | None:
    """Who holds the lock file; None when it is free, its holder is dead, or there is no file."""
    try:
        process = parse_holder(path.read_bytes())
    except OSError:
        return None
    return process if process and process.alive() else None


class Lock:
    """A lock that is held from :meth:`acquire` until :meth:`release` or the process's end.

    Args:
        does: what its holder does, for the error that others get: "is writing into …".

    Attributes:
        stale: the process of another host whose claim gave way, if one did.
    """

    def __init__(self, path: Path, does: str = "is using this directory"):
        self.path = path
        self._does = does
        self.stale: Holder | None = None
        self._descriptor: int | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock, over from a dead process too; one of another host is waited for, half a
        minute, for a sign of life.

        Raises:
            InputError: another live process holds it.
            OSError: the file cannot be written.
        """
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                taken = not _flock(descriptor)
                last = parse_holder(os.pread(descriptor, 4096, 0))
                if taken or (last and last.alive() and (last.local or self._beats())):
                    raise self._busy(last)
                if not _same_file(descriptor, self.path):
                    os.close(descriptor)  # removed with its directory meanwhile: look again
                    continue
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(Holder.here())).encode(), 0)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            self.stale = last if last and not last.local else None
            self._released.clear()
            threading.Thread(target=self._beat, name="raygnn-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back; the file stays, empty, unless another host took the claim over.
        Harmless when not held."""
        self._released.set()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # another host removed the file, or storage is away
                if parse_holder(os.pread(self._descriptor, 4096, 0)) == Holder.here():
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _beat(self) -> None:
        """Move the file's time until the lock is given back."""
        while not self._released.wait(_BEAT):
            with contextlib.suppress(OSError):  # storage that is away for a while
                os.utime(self.path)

    def _beats(self) -> bool:
        """Whether a holder on another host gives a sign of life, in time."""
        before, deadline = _changed(self.path), time.monotonic() + _SILENCE
        while time.monotonic() < deadline:
            time.sleep(_LOOK)
            if _changed(self.path) != before:
                return True
        return False

    def _busy(self, other: Holder | None) -> InputError:
        who, remedy = "another process", "wait for it, or choose another name"
        if other is not None:
            elsewhere = "" if other.local else f" on {other.host}"
            who = f"process {other.pid}{elsewhere}"
            stop = "stop it there" if elsewhere else "stop it"
            remedy = f"wait for it, {stop}, or choose another name"
        return InputError(f"{who} {self._does}", where=str(self.path.parent), remedy=remedy)


def _flock(descriptor: int) -> bool:
    """Whether the lock could be had; a filesystem without ``flock`` always gives it."""
    try:
        return try_flock(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    return True


def _changed(path: Path) -> int:
    """The file's time; it is opened, so that a network file system looks at it anew."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def parse_holder(content: bytes) -> Holder | None:
    """Who has left this, if it is what a holder leaves."""
    try:
        value = json.loads(content)
        return Holder(str(value["host"]), int(value["pid"]), int(value["started"]))
    except (ValueError, KeyError, TypeError):
        return None


def _started(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 where there is no ``/proc``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The second field, the program's name in parentheses, may itself hold spaces.
    fields = stat.rpartition(b")")[2].split()
    return -1 if fields[0] == b"Z" else int(fields[19])
