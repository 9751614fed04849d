"""The command as a user runs it: a process of its own, and all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "RAYGNN_TEST_MARK"


class Command:
    """One command and everything that it starts, which inherits a mark in its environment."""

    def __init__(
        self, args: list[str], cwd: Path, *, program: list[str] | None = None, **variables: str
    ):
        self.mark = uuid.uuid4().hex
        self.temp = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets are in it
        env = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temp)}
        env |= {"PYTHONFAULTHANDLER": "1", **variables}
        env.pop("RAY_AUTH_MODE", None)  # as on a user's machine
        self.process = subprocess.Popen(
            [*(program or [sys.executable, "-m", "raygnn"]), *args],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as in a terminal
        )

    def finish(self, timeout: float = 120) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # it prints where its threads are
            out, err = self.process.communicate(timeout=30)
            raise AssertionError(f"not over after {timeout:g} s\n{out}\n{err}") from None
        return self.process.returncode, out, err

    def running(self) -> dict[int, str]:
        """Return the command's running processes: pid → command line."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = line
            except OSError:
                continue
        return {pid: line for pid, line in found.items() if line.strip()}

    def left_behind(self, seconds: float = 10) -> list[str]:
        """Return what still runs or exists of the command and its Ray after a grace period."""
        deadline = time.monotonic() + seconds
        while True:
            rays = set(self.temp.glob("raygnn-*")) - {self.temp / f"raygnn-{os.getuid()}"}  # staged
            places = [p for ray in rays for at, _, files in os.walk(ray) for p in (at, *files)]
            left = [*self.running().values(), *map(str, places)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)
