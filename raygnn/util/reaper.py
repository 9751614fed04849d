"""Program beside a command that ends its embedded Ray if the command is killed.

Ray's core processes end with the command, but their agents notice that only after a minute or more.
It imports the standard library alone, since it stays in memory as long as the command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

_INTERVAL = 0.5  # seconds between polls of the parent
_PATIENCE = 10.0  # seconds for which processes are searched
_END = b"/"  # of the directory in the pipe: a parent killed while it writes leaves it out


def start(directory: str) -> subprocess.Popen[bytes]:
    """Start the program for the Ray whose files are in ``directory``."""
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is for the command
    )
    assert program.stdin is not None
    with program.stdin as pipe:  # not as an argument, by which `RayCluster` finds Ray's processes
        pipe.write(os.fsencode(os.path.realpath(directory)) + _END)
    return program


def main(directory: str, parent: int) -> None:
    """Wait for the parent's end, then kill its Ray's processes and remove the directory."""
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    deadline = time.monotonic() + _PATIENCE
    while (left := running(directory)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def running(directory: str) -> list[int]:
    """Return Ray's processes that have a file of the directory open for writing.

    Ray's are those that name the directory on their command line, and workers and agents, which
    replace it by a title (``ray::…``) and have their logs open. What the command itself started may
    have inherited an open file, but has neither.
    """
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry)
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            if not (command.startswith(b"ray::") or os.fsencode(directory) in command):
                continue
            if any(map(partial(_writes, directory, pid), os.listdir(f"/proc/{pid}/fd"))):
                found.append(pid)
    return found


def _writes(directory: str, pid: int, number: str) -> bool:
    with contextlib.suppress(OSError):  # it was closed
        if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"{directory}/"):
            with open(f"/proc/{pid}/fdinfo/{number}") as file:
                flags = next(line.split()[1] for line in file if line.startswith("flags:"))
            return bool(int(flags, 8) & (os.O_WRONLY | os.O_RDWR))
    return False


def received(given: bytes) -> str | None:
    """Return the directory that the parent wrote; None if it was killed before it was done."""
    return os.fsdecode(given[: -len(_END)]) if given.endswith(_END) else None


if __name__ == "__main__":
    if name := received(sys.stdin.buffer.read()):
        main(name, int(sys.argv[1]))
