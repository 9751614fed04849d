"""Ends the embedded Ray of a command that was killed; a program that the command starts beside it.

Ray's core processes end with the command, but their agents notice that only after a minute or more.
Of the standard library alone, since it stays in memory for as long as the command does.
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

_INTERVAL = 0.5  # seconds between looks at the parent
_PATIENCE = 10.0  # seconds for which processes are looked for


def start(directory: str) -> subprocess.Popen[bytes]:
    """Start the program; after this process it ends, too, once nothing of its Ray runs."""
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is the command's
    )
    assert program.stdin is not None
    with program.stdin as pipe:  # not as an argument, by which `RayCluster` finds Ray's processes
        pipe.write(os.fsencode(os.path.realpath(directory)))
    return program


def main(directory: str, parent: int) -> None:
    """Wait for the parent's end, then kill all that its Ray started, and remove the directory."""
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
    """Return the processes that have a file of the directory open for writing, as all of Ray's do
    with their logs; agents overwrite their command lines and environments."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry)
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


if __name__ == "__main__":
    main(os.fsdecode(sys.stdin.buffer.read()), int(sys.argv[1]))
