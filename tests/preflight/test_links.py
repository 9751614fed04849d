"""Connections between nodes: tried on loopback, and what their failures mean."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from raygnn.config.load import load_config
from raygnn.preflight import connections
from raygnn.preflight.connections import Link, listen, reach
from raygnn.preflight.findings import Finding
from tests.support.facts import check, make_config, make_job

HERE = "127.0.0.1"


def try_link(port: int, bind: str = HERE) -> Link:
    return reach("a", "b", HERE, port, bind)


@contextmanager
def program(answer: bytes, *, silent: bool) -> Iterator[int]:
    """Start another listening program, which answers this, then nothing or with its end."""

    def serve() -> None:
        with suppress(OSError):
            peer, _ = server.accept()
            with peer:
                peer.sendall(answer)
                while peer.recv(2**16) and silent:
                    pass

    with socket.create_server((HERE, 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
    thread.join(10)


def test_a_link() -> None:
    assert try_link(listen(HERE)) == Link("a", "b")
    port = listen("127.0.0.2")  # which is the only address that it listens on
    problem = f"Connection refused while connecting to {HERE}:{port} from {HERE}"
    assert try_link(port) == Link("a", "b", problem)


def test_a_local_address_that_does_not_exist() -> None:
    link = try_link(listen(HERE), bind="192.0.2.1")
    assert link.problem
    assert link.problem.startswith("Cannot assign requested address")
    with pytest.raises(OSError, match="Cannot assign"):
        listen("192.0.2.1")


@pytest.mark.parametrize(
    ("answer", "silent", "problem"),
    [
        (b"", False, "cut off while exchanging small"),
        (b"", True, "timed out while exchanging small"),
        (bytes(64), True, "timed out while exchanging large"),
    ],
)
def test_what_does_not_pass(
    answer: bytes, silent: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LIMIT", 0.5)
    with program(answer, silent=silent) as port:
        link = try_link(port)
    assert link == Link("a", "b", f"{problem} messages with {HERE}:{port}", bool(answer))


def findings(*found: Link) -> list[Finding]:
    job = make_job(make_config(), links=found)
    return [f for f in check(job) if f.check == "network_reach"]


def test_nodes_that_do_not_reach_each_other() -> None:
    found = [
        Link("a", "b"),
        Link("b", "c", "timed out while exchanging large messages with 10.0.0.3:47", True),
        Link("c", "d", "Connection refused while connecting to 10.0.0.4:4711"),
    ]
    assert findings(found[0]) == []
    (finding,) = findings(*found)
    assert finding.severity == "error"
    assert "from c to d fails: Connection refused while connecting to 10.0.0.4" in finding.what
    assert "2 of 3 links" in finding.what
    assert "firewall" in finding.remedy
    assert "MTU" not in finding.remedy
    assert finding.nodes == ("c", "d", "b")
    (finding,) = findings(*found[:2])
    assert "MTU" in finding.remedy
    assert "links" not in finding.what
    overrides = re.findall(r"--set (\S+=[^\s,)]+)", finding.remedy)
    graph = {"format": "planted", "nodes": 1000}
    load_config({"name": "a", "graph": graph, "model": {"kind": "gcn"}}, overrides)
    assert overrides == ["comm.env.GLOO_SOCKET_IFNAME=NAME"]
