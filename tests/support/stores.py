"""A real S3-speaking server, moto's, and a network to it that is slow.

with served(hosts[2]) as uri: ...      # on a virtual host
with local_store(tmp_path) as uri: ... # on this machine
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.hosts import Host

CHECKOUT = Path(__file__).resolve().parents[2]
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "word",
    "AWS_EC2_METADATA_DISABLED": "1",
}
_PORT, _SLOW_PORT = 5000, 5001
_START = 60.0  # seconds for the server to answer
_PIECE = 1 << 16

_BUCKET = """
import sys
from pyarrow.fs import S3FileSystem
S3FileSystem(endpoint_override=sys.argv[1], scheme="http", region="us-east-1",
             allow_bucket_creation=True).create_dir("bucket")
"""


def uri_of(endpoint: str, path: str = "runs") -> str:
    """Return the URI of a path in the server's bucket."""
    return f"s3://bucket/{path}?endpoint_override={endpoint}&scheme=http&region=us-east-1"


@contextmanager
def served(host: Host, *, delay: float = 0.0) -> Iterator[str]:
    """Start a server on a virtual host; yield the storage for runs.

    Args:
        delay: seconds from a request, or a part of one, to its answer that the network takes.
    """
    address, env = host.address, {**KEYS, "PYTHONPATH": str(CHECKOUT), "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(_PORT)]
    null = {"stdout": -3, "stderr": -3}
    processes = [host.popen(argv, cwd="/", env=env, **null)]
    if delay:
        argv = [sys.executable, "-m", "tests.support.stores", str(delay)]
        processes.append(host.popen(argv, cwd=CHECKOUT, env=env, **null))
    deadline = time.monotonic() + _START
    make = [sys.executable, "-c", _BUCKET, f"{address}:{_PORT}"]
    while host.run(make, cwd="/", env=env, timeout=_START, check=False).returncode:
        assert time.monotonic() < deadline, "the server does not answer"
    yield uri_of(f"{address}:{_SLOW_PORT if delay else _PORT}")
    for process in processes:
        process.kill()


class LocalStore:
    """An S3 server in this process, on loopback.

    Attributes:
        uri: of the place for runs.
        port: of the server.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.port = 0
        self.start()
        reset = f"http://127.0.0.1:{self.port}/moto-api/reset"  # objects of earlier tests
        urlopen(Request(reset, method="POST"), timeout=_START).close()
        from pyarrow.fs import S3FileSystem

        options = {"scheme": "http", "region": "us-east-1", "allow_bucket_creation": True}
        S3FileSystem(endpoint_override=f"127.0.0.1:{self.port}", **options).create_dir("bucket")
        self.uri = uri_of(f"127.0.0.1:{self.port}")

    def start(self) -> None:
        """Serve, with the earlier contents."""
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._server.stop()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    store = LocalStore(monkeypatch)
    yield store
    store.stop()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Pass on what comes, each piece so many seconds later."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            at, piece = await queue.get()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            if not piece:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()

    task = asyncio.create_task(deliver())
    try:
        while piece := await reader.read(_PIECE):
            queue.put_nowait((time.monotonic() + delay, piece))
    finally:
        queue.put_nowait((time.monotonic() + delay, b""))
        await task


async def _delay(seconds: float) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, out = await asyncio.open_connection("127.0.0.1", _PORT)
        ways = (_pump(reader, out, seconds / 2), _pump(inner, writer, seconds / 2))
        await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(connect, "0.0.0.0", _SLOW_PORT)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_delay(float(sys.argv[1])))
