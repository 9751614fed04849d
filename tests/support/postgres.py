"""A PostgreSQL server of its own, in a temporary directory and on loopback.

with postgres() as server: ...   # server.uri, server.run("create table …")
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

PASSWORD = "hunter2:/p%w@rd"  # all that a URL has to escape
_DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
_START = 60  # seconds
# nothing has to survive the machine's end
_SETTINGS = {"fsync": "off", "listen_addresses": "127.0.0.1", "max_connections": "20"}


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        uri: with the password of its owner.
    """

    uri: str
    bin: Path

    def run(self, sql: str) -> None:
        """Run statements with psql."""
        command = [self.bin / "psql", self.uri, "-v", "ON_ERROR_STOP=1", "-q"]
        done = subprocess.run(command, input=sql, capture_output=True, text=True, timeout=_START)
        assert done.returncode == 0, done.stderr


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def postgres() -> Iterator[Server]:
    """Start a server, and stop it at the end. Skips where none is installed."""
    found = shutil.which("initdb")
    if not _DEBIAN and found is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    programs = _DEBIAN[-1] if _DEBIAN else Path(str(found)).parent
    place = Path(tempfile.mkdtemp(prefix="pg-"))
    user = {} if os.getuid() else {"user": "postgres", "group": "postgres", "extra_groups": []}
    if user:  # PostgreSQL refuses to run as root
        shutil.chown(place, "postgres", "postgres")
    (place / "password").write_text(PASSWORD)
    (place / "password").chmod(0o644)
    port, data = free_port(), place / "data"
    settings = {**_SETTINGS, "port": str(port), "unix_socket_directories": str(place)}
    options = " ".join(f"-c {key}={value}" for key, value in settings.items())
    make = ["--no-sync", "-A", "scram-sha-256", "-U", "owner", f"--pwfile={place / 'password'}"]
    control = [programs / "pg_ctl", "-D", data, "-w"]

    def run(*command: object) -> None:
        with (place / "log").open("ab") as log:
            argv = [str(part) for part in command]
            subprocess.run(
                argv, stdout=log, stderr=log, cwd=place, timeout=_START, check=True, **user
            )

    try:
        run(programs / "initdb", "-D", data, "-E", "UTF8", "--locale=C", *make)
        run(*control, "-o", options, "start")
        secret = quote(PASSWORD, safe="")
        yield Server(f"postgresql://owner:{secret}@127.0.0.1:{port}/postgres", programs)
    finally:
        if (data / "postmaster.pid").exists():
            run(*control, "-m", "immediate", "stop")
        shutil.rmtree(place)
