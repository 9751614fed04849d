"""Links between nodes: measured on loopback and between virtual hosts, and what they mean."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.load import load_config
from raygnn.preflight.findings import Finding
from raygnn.preflight.links import _FRAME, _RESULT, _STREAM, Link, Responder, measure, pairs
from tests.support.facts import check, make_config, make_job
from tests.support.hosts import Host, hosts, needs_hosts

CHECKOUT = Path(__file__).resolve().parents[2]
LIMIT = 30.0
HERE = "127.0.0.1"
TOKEN = secrets.token_bytes(32)


def _measure(port: int, token: bytes = TOKEN, **options: Any) -> Link:
    return measure("a", "b", HERE, port, token, **{"seconds": 0.1, "deadline": LIMIT} | options)


def _until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def _sockets() -> set[str]:
    """Return the sockets that this process holds."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{handle}"))
    return {name for name in found if name.startswith("socket:")}


def _connect(port: int, said: bytes) -> socket.socket:
    peer = socket.create_connection((HERE, port), timeout=LIMIT)
    peer.sendall(said)
    return peer


def _is_cut_off(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


def _drain(peer: socket.socket) -> None:
    while peer.recv(2**16):
        pass


def _responders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "responder"]


@contextlib.contextmanager
def _program(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Start another listening program; yield its port."""

    def serve(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer, contextlib.suppress(ConnectionError):
            answer(peer)

    with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor() as pool:
        done = pool.submit(serve, server)
        yield server.getsockname()[1]
        done.result(LIMIT)


# ------------------------------------------------------------------------------------- the ring


@given(st.integers(0, 65))
def test_ring(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    rounds = pairs(nodes)
    for each in rounds:
        busy = [node for pair in each for node in pair]
        assert len(busy) == len(set(busy)), "a node is in two measurements at once"
    links = [pair for each in rounds for pair in each]
    everyone = nodes if count > 1 else []
    assert sorted(source for source, _ in links) == sorted(everyone)
    assert sorted(target for _, target in links) == sorted(everyone)
    assert len(rounds) == (0 if count < 2 else 2 + count % 2)
    following = dict(links)
    seen = [node := "n0"] + [node := following[node] for _ in links[1:]] if links else []
    assert len(set(seen)) == len(links), "more than one ring"


# ----------------------------------------------------------------------------- on this machine


@pytest.mark.parametrize("bind", [None, HERE])
def test_a_link(bind: str | None) -> None:
    with closing(Responder(HERE, TOKEN)) as responder:
        for _ in range(3):  # one after the other
            link = _measure(responder.port, bind=bind)
            assert (link.source, link.target, link.problem) == ("a", "b", None)
            assert link.local
            assert (link.latency_ms or 0) > 0
            assert (link.mbits or 0) > 0


def test_a_link_over_ipv6() -> None:
    try:
        responder = Responder("::1", TOKEN)
    except OSError:
        pytest.skip("no IPv6 here")
    with closing(responder):
        link = measure("a", "b", "::1", responder.port, TOKEN, seconds=0.1, deadline=LIMIT)
    assert link.problem is None
    assert link.mbits


def test_only_the_given_address_is_listened_on() -> None:
    with closing(Responder("127.0.0.2", TOKEN)) as responder, pytest.raises(ConnectionRefusedError):
        _connect(responder.port, b"")


@pytest.mark.parametrize(
    "said",
    [bytes(32), TOKEN[:-1] + bytes([TOKEN[-1] ^ 1]), b"GET / HTTP/1.1\r\n".ljust(32)],
    ids=["zeros", "one bit", "http"],
)
def test_a_wrong_token_is_cut_off(said: bytes) -> None:
    with closing(Responder(HERE, TOKEN)) as responder:
        with _connect(responder.port, said) as peer:
            assert _is_cut_off(peer)
        link = _measure(responder.port, said)
        assert link.problem == f"cut off while presenting the token to {HERE}:{responder.port}"
        assert (link.latency_ms, link.mbits) == (None, None)
        assert _measure(responder.port).problem is None, "and the right one is still served"


def test_a_token_in_pieces() -> None:
    with closing(Responder(HERE, TOKEN)) as responder, _connect(responder.port, TOKEN[:5]) as peer:
        time.sleep(0.05)
        peer.sendall(TOKEN[5:])
        assert len(peer.recv(_FRAME.size)) == _FRAME.size


def test_a_silent_connection_is_dropped() -> None:
    with (
        closing(Responder(HERE, TOKEN)) as responder,
        _connect(responder.port, TOKEN[:5]) as silent,
    ):
        assert _measure(responder.port).problem is None
        assert _is_cut_off(silent)


def test_one_peer_at_a_time() -> None:
    with closing(Responder(HERE, TOKEN)) as responder:
        with _connect(responder.port, TOKEN) as peer:
            assert peer.recv(1)
            link = _measure(responder.port, deadline=0.3)
            assert link.problem
            assert link.problem.startswith("timed out after 0.3 s while presenting the token")
        assert _measure(responder.port).problem is None


def test_nonsense_is_cut_off() -> None:
    with closing(Responder(HERE, TOKEN)) as responder:
        with _connect(responder.port, TOKEN + b"\xff" * _FRAME.size) as peer:
            assert len(peer.recv(_FRAME.size)) == _FRAME.size
            assert _is_cut_off(peer)
        assert _measure(responder.port).problem is None


def test_the_end_of_its_lifetime() -> None:
    responder = Responder(HERE, TOKEN, lifetime=0.1)
    assert _until(lambda: not _responders()), "though nobody ever came"
    responder.close()


def test_the_end_of_its_lifetime_in_the_middle_of_a_measurement() -> None:
    sockets = _sockets()
    responder = Responder(HERE, TOKEN, lifetime=0.5)
    with _connect(responder.port, TOKEN) as peer:
        peer.sendall(_FRAME.pack(_STREAM, 0, 2**60))
        time.sleep(0.6)
        peer.sendall(b"more")
        assert _until(lambda: not _responders())
        assert len(peer.recv(_FRAME.size)) == _FRAME.size
        assert _is_cut_off(peer)
    assert _until(lambda: _sockets() <= sockets)
    link = _measure(responder.port)
    assert link.problem == f"refused while connecting to {HERE}:{responder.port}"
    responder.close()


def test_close_in_the_middle_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets, busy = _sockets(), threading.Event()
    original = Responder._steady

    def steady(*arguments: Any) -> tuple[int, int]:
        busy.set()
        return original(*arguments)

    monkeypatch.setattr(Responder, "_steady", steady)
    with ThreadPoolExecutor() as pool:
        with closing(Responder(HERE, TOKEN)) as responder:
            answer = pool.submit(_measure, responder.port, seconds=2 * LIMIT)
            assert busy.wait(LIMIT)
        link = answer.result(LIMIT)
    assert link.problem == f"cut off while streaming to {HERE}:{responder.port}"
    assert link.latency_ms, "what was measured before is kept"
    assert link.mbits is None
    assert _until(lambda: _sockets() <= sockets)
    assert not _responders()
    responder.close()


def test_a_local_address_that_does_not_exist() -> None:
    with closing(Responder(HERE, TOKEN)) as responder:
        link = _measure(responder.port, bind="192.0.2.1")
    assert link.problem == "Cannot assign requested address while binding to 192.0.2.1"


def _talk(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    _drain(peer)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda peer: peer.recv(1), "cut off"),
        (_talk, "answered by another program"),
        (_drain, "timed out after 0.5 s"),
    ],
    ids=["closes", "talks", "silent"],
)
def test_another_program(answer: Callable[[socket.socket], object], problem: str) -> None:
    with _program(answer) as port:
        link = _measure(port, deadline=0.5)
    assert link.problem == f"{problem} while presenting the token to {HERE}:{port}"


def _until_stream(peer: socket.socket) -> None:
    """Answer as a responder up to the beginning of the stream."""
    peer.recv(32)
    peer.sendall(_FRAME.pack(0, 0, 0))
    while (kind := _FRAME.unpack(peer.recv(_FRAME.size))[0]) != _STREAM:
        peer.sendall(_FRAME.pack(kind, 0, 0))


def test_an_endless_stream() -> None:
    def answer(peer: socket.socket) -> None:
        _until_stream(peer)
        with pytest.raises(ConnectionResetError):  # closed before all is sent, which is slow
            _drain(peer)

    with _program(answer) as port:
        link = _measure(port, deadline=0.5)
    assert link.problem == f"timed out after 0.5 s while streaming to {HERE}:{port}"


def test_a_figure_is_always_finite() -> None:
    """The answer comes from another machine, and must not cause a division by zero here."""

    def answer(peer: socket.socket) -> None:
        _until_stream(peer)
        peer.sendall(_FRAME.pack(_RESULT, 10**6, 0))
        _drain(peer)

    with _program(answer) as port:
        assert _measure(port).mbits == 8e9


# -------------------------------------------------------------------------- between virtual hosts

_SERVE = """
import sys
from contextlib import closing
from raygnn.preflight.links import Responder
with closing(Responder(sys.argv[1], bytes.fromhex(sys.argv[2]))) as responder:
    print(responder.port, flush=True)
    sys.stdin.read()
"""
_ASK = """
import json, sys
from dataclasses import asdict
from raygnn.preflight.links import measure
address, port, token, bind, options = sys.argv[1:]
token = bytes.fromhex(token)
link = measure("a", "b", address, int(port), token, bind=bind, **json.loads(options))
print(json.dumps(asdict(link)))
"""


@contextlib.contextmanager
def _responder(host: Host) -> Iterator[int]:
    command = [sys.executable, "-c", _SERVE, host.address, TOKEN.hex()]
    pipe = subprocess.PIPE
    with host.popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        yield int(process.stdout.readline())
        process.kill()


def _ask(here: Host, there: Host, port: int, **options: float) -> Link:
    where = [there.address, str(port), TOKEN.hex(), here.address]
    command = [sys.executable, "-c", _ASK, *where, json.dumps(options)]
    done = here.run(command, timeout=2 * LIMIT, cwd=CHECKOUT)
    return Link(**json.loads(done.stdout))


@pytest.mark.alone
@needs_hosts()
@pytest.mark.parametrize("rate", [10, 100])
def test_a_slow_network(rate: int) -> None:
    with hosts(2, rate=f"{rate}mbit", share=[CHECKOUT]) as (first, second):
        links = []
        for source, target in [(first, second), (second, first)]:
            with _responder(target) as port:
                links.append(_ask(source, target, port))
    for link in links:
        assert link.problem is None
        assert link.mbits == pytest.approx(rate, rel=0.25)
        assert not link.local
    (finding,) = _findings(*links)
    assert finding.check == "network_bandwidth"


@needs_hosts()
def test_a_pulled_cable() -> None:
    with hosts(2, rate="100mbit", share=[CHECKOUT]) as (first, second), _responder(second) as port:

        def received() -> int:
            text = second.run(["cat", "/proc/net/dev"], timeout=LIMIT).stdout
            found = re.search(rf"{second.interface}: *(\d+)", text)
            return int(found[1]) if found else 0

        with ThreadPoolExecutor() as pool:
            answer = pool.submit(_ask, first, second, port, seconds=4.0, deadline=5.0)
            assert _until(lambda: received() > 10**6)
            second.down()
            link = answer.result(2 * LIMIT)
        assert link.problem == f"timed out after 5 s while streaming to {second.address}:{port}"
        assert link.latency_ms
        assert link.mbits is None

        link = _ask(first, second, port, deadline=2.0)  # it is still pulled
        assert link.problem
        assert link.problem.startswith(("timed out", "unreachable"))
        assert link.problem.endswith(
            f"while connecting to {second.address}:{port} from {first.address}"
        )


# ---------------------------------------------------------------------------- what it means


def _findings(*links: Link, **config: Any) -> list[Finding]:
    job = make_job(make_config(**config), links=links)
    return [f for f in check(job) if f.check.startswith("network_")]


def _advice(finding: Finding) -> list[str]:
    """Return the recommended overrides, which must be keys of the config."""
    found = re.findall(r"--set (\S+=[^\s,)]+)", finding.remedy)
    graph = {"format": "planted", "nodes": 1000}
    load_config({"name": "a", "graph": graph, "model": {"kind": "gcn"}}, found)
    return found


@pytest.mark.parametrize(
    "links",
    [
        [],
        [Link("a", "b", 0.05, 24_000.0), Link("b", "a", 5.0, 10_000.0)],
        [Link("a", "b", 9.0, 100.0, local=True), Link("b", "a", 9.0, 100.0, local=True)],
    ],
    ids=["one node", "fast", "one host"],
)
def test_nothing_to_say(links: list[Link]) -> None:
    assert _findings(*links) == []


def test_nodes_that_do_not_reach_each_other() -> None:
    links = [
        Link("a", "b", 0.1, 20_000.0),
        Link("b", "c", 0.1, None, "timed out after 5 s while streaming to 10.0.0.3:4711"),
        Link("c", "d", None, None, "refused while connecting to 10.0.0.4:4711"),
    ]
    (finding,) = _findings(*links)
    assert (finding.check, finding.severity) == ("network_reach", "error")
    assert "from c to d does not work: refused while connecting to 10.0.0.4" in finding.what
    assert "2 of 3 links" in finding.what
    assert "firewall" in finding.remedy
    assert "MTU" not in finding.remedy
    assert _advice(finding) == ["comm.env.GLOO_SOCKET_IFNAME=NAME"]
    assert finding.nodes == ("c", "d", "b")
    (finding,) = _findings(*links[:2])
    assert "MTU" in finding.remedy
    assert "links" not in finding.what


def test_little_bandwidth() -> None:
    links = [Link("a", "b", 0.1, 8_900.0), Link("b", "c", 0.1, 94.0), Link("c", "a", 0.1, 9_400.0)]
    (finding,) = _findings(*links)
    assert (finding.check, finding.severity) == ("network_bandwidth", "warn")
    assert "from b to c carries 94 Mbit/s, less than 9 Gbit/s" in finding.what
    assert "2 of 3 links" in finding.what
    assert finding.nodes == ("b", "c", "a")
    assert _advice(finding) == ["comm.compression=bf16", "train.accumulate=2"]
    (finding,) = _findings(*links, comm__compression="bf16")
    assert _advice(finding) == ["train.accumulate=2"]


def test_all_problems_of_a_network_are_reported() -> None:
    links = [Link("a", "b", 50.0, 10.0), Link("b", "a", None, None, "refused while connecting")]
    checks = [finding.check for finding in _findings(*links)]
    assert checks == ["network_reach", "network_bandwidth"]
