"""Program that ends a command's embedded Ray if the command is killed.

Ray's core processes end with the command, but their agents notice that only after a minute or more.
The program imports only the standard library, since it stays in memory as long as the command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

_INTERVAL = 0.5  # seconds between polls of the parent
_PATIENCE = 10.0  # seconds for which processes are searched
_DIRECTORY = "RAYGNN_RAY_DIRECTORY"  # no argument, by which `RayCluster` finds Ray's processes


def start(directory: str) -> subprocess.Popen[bytes]:
    """Start the program for the Ray whose files are in ``directory``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        env={**os.environ, _DIRECTORY: os.path.realpath(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is for the command
    )


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
    """Return the ids of Ray's processes that have a file of the directory open for writing.

    Ray's processes name the directory on their command line; workers and agents have the title
    ``ray::…`` instead, and their logs open. Other children of the command may have inherited an
    open file, but have neither.
    """
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry)
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            if not (command.startswith(b"ray::") or os.fsencode(directory) in command):
                continue
            if any(_writes(directory, pid, number) for number in os.listdir(f"/proc/{pid}/fd")):
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
    main(os.environ[_DIRECTORY], int(sys.argv[1]))
