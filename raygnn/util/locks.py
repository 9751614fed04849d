"""Advisory locks on files, which the kernel drops with the process that holds them.

A `Lock` also works between hosts. Its file names its holder (host, pid, start of the process), or
is empty. ``flock`` makes acquiring atomic; the content is for other hosts and readers, and for file
systems without ``flock``, or whose ``flock`` is limited to one host. These cannot be distinguished,
so the holder also touches the file every few seconds; a lock of another host without this heartbeat
is stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from raygnn.errors import InputError

LOCK = ".lock"  # in a directory that one command at a time writes into

_BEAT = 3.0  # seconds between heartbeats
_SILENCE = 30.0  # seconds without one, by the waiting process's clock, after which it is stale
_POLL = 1.0  # seconds
_LARGEST = 4096  # bytes of a lock file that are read
_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def is_alive(pid: int) -> bool:
    """True if a process of this host has that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def try_flock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, exclusively or ``shared``, without waiting; returns True on success.
    Raises OSError if its file system has no such locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock(path: Path) -> int | None:
    """Lock a file of this host and write this process's id into it.

    Returns:
        A descriptor that keeps the lock until it is closed; None if another process has it.

    Raises:
        OSError: the file cannot be created, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    # without a link, the file was removed by the process that held it
    if try_flock(descriptor) and os.fstat(descriptor).st_nlink:
        with contextlib.suppress(OSError):  # a full disk: the next write reports it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        return descriptor
    os.close(descriptor)
    return None


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock; ``started`` distinguishes it from a later one with its pid."""

    host: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()))

    @property
    def local(self) -> bool:
        """True if it runs on this host."""
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """True if the process runs, or is on another host."""
        if not self.local:
            return True
        return is_alive(self.pid) and _started(self.pid) == self.started


def holder(path: Path) -> Holder | None:
    """Return the live holder of a lock file, if any."""
    process = None
    with contextlib.suppress(OSError), open(_open(path, os.O_RDONLY), "rb") as file:
        process = parse_holder(file.read(_LARGEST))
    return process if process and process.alive() else None


def is_held_by(pid: int, path: Path) -> bool:
    """True if a process of this user on this host really holds the lock file: the file is locked,
    and the process has it open. The content is no proof, since any user can have written it."""
    with contextlib.suppress(OSError), open(_open(path, os.O_RDONLY), "rb") as file:
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and not _is_free(file.fileno()):
            return any(_same_file(file.fileno(), fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


class Lock:
    """Lock that is held from `acquire` until `release` or the end of the process.

    Args:
        does: predicate of the error in other processes, such as "is writing into …".
    """

    def __init__(self, path: Path, does: str = "is using this directory"):
        self.path = path
        self._does = does
        # process of another host whose stale lock was taken over, if any
        self.stale: Holder | None = None
        self._descriptor: int | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        """Acquire the lock, also from a dead process; waits up to 30 s for a heartbeat of a holder
        on another host. Raises InputError if another live process holds it, and OSError if the file
        cannot be written."""
        while self._descriptor is None:
            descriptor = _open(self.path, os.O_RDWR | os.O_CREAT)
            try:
                taken = not _flock(descriptor)
                last = parse_holder(os.pread(descriptor, _LARGEST, 0))
                if taken or (last and last.alive() and (last.local or self._beats())):
                    raise self._busy(last)
                if not _same_file(descriptor, self.path):
                    os.close(descriptor)  # removed with its directory meanwhile: try again
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
        """Release the lock, if it is held; empties the file unless another host took it over."""
        self._released.set()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # another host removed it, or storage is unreachable
                if parse_holder(os.pread(self._descriptor, _LARGEST, 0)) == Holder.here():
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _beat(self) -> None:
        while not self._released.wait(_BEAT):
            with contextlib.suppress(OSError):  # storage is unreachable for a while
                os.utime(self.path)

    def _beats(self) -> bool:
        """True if a holder on another host touches the file within 30 s."""
        before, deadline = _changed(self.path), time.monotonic() + _SILENCE
        while time.monotonic() < deadline:
            time.sleep(_POLL)
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
    """Call `try_flock`; True on a file system without such locks."""
    try:
        return try_flock(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    return True


def _is_free(descriptor: int) -> bool:
    """True if no process has locked the file; False on a file system without such locks."""
    try:
        return try_flock(descriptor, shared=True)
    except OSError:
        return False


def _open(path: Path, flags: int) -> int:
    """Open a lock file, which may be in another user's directory. Raises OSError if it cannot be
    opened, or is a link, which could lead to any file of this user, or a FIFO or device, which
    could block forever."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _changed(path: Path) -> int:
    """Return the file's time; opening the file makes a network file system refresh it."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def parse_holder(content: bytes) -> Holder | None:
    """Parse the content of a lock file; None if it has no holder."""
    try:
        value = json.loads(content)
        return Holder(str(value["host"]), int(value["pid"]), int(value["started"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _started(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; 0 if it is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # the second field, the program's name in parentheses, may contain spaces
    fields = stat.rpartition(b")")[2].split()
    return -1 if fields[0] == b"Z" else int(fields[19])
