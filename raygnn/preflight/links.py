"""Latency and bandwidth between two nodes, over plain TCP.

One node listens (`Responder`), another measures (`measure`), and `pairs` schedules them. The
measuring side sends a token, then small messages that come back, then a stream. The receiver times
the stream and stops it, so that no megabytes are left in transit on a slow line.

Frames have one size: kind, and two whole numbers.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 32

_FRAME = struct.Struct("!BQQ")
_HELLO, _PING, _STREAM, _RESULT = range(4)

_PINGS = 20
_BLOCK = 2**18  # large enough that Python's share of the time is small, small enough for caches
_SILENCE = 5.0  # seconds after which a silent peer is dropped
_GREETING = 1.0  # seconds for a connection to send its token
_SLOW_START = 12  # round trips in which TCP gets from 10 packets to any window
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


@dataclass(frozen=True)
class Link:
    """Measured link between two nodes, in one direction."""

    source: str  # name of the node that sends
    target: str  # name of the node that receives
    latency_ms: float | None  # median round trip of a small message; None if none came back
    # Mbit/s of payload that the target received over one connection at a steady rate; None if the
    # stream failed
    mbits: float | None
    problem: str | None = None  # the step that failed, and how; None if none did
    local: bool = False  # both are on one machine, so that no network was measured


def pairs(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return a ring over the nodes in rounds of (source, target), with no node twice in a round:
    none for one node, 3 for an odd number of nodes, else 2."""
    if len(nodes) < 2:
        return []
    ring = list(zip(nodes, [*nodes[1:], nodes[0]]))
    rounds = [ring[0::2], ring[1::2]]
    if len(nodes) % 2:
        rounds.append([rounds[0].pop()])  # the last node and the first, which is in round 0
    return rounds


class Responder:
    """Server for `measure`, one connection after the other."""

    def __init__(self, address: str, token: bytes, *, lifetime: float = 60.0):
        """Listen.

        Args:
            address: numeric address of the interface to listen on.
            token: 32 random bytes that a peer must send first.
            lifetime: seconds after which it closes by itself.

        Raises:
            OSError: this machine does not have that address.
        """
        self._token = token
        self._end = time.monotonic() + lifetime
        self._closed = threading.Event()
        self._peer: socket.socket | None = None  # the one that is served
        self._listener = socket.create_server((address, 0), family=_family(address))
        self.port: int = self._listener.getsockname()[1]  # where it listens
        self._thread = threading.Thread(target=self._accept, name="responder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close now, also during a measurement. Can be called again."""
        self._closed.set()
        for sock in (self._listener, self._peer):
            if sock is not None:
                _hang_up(sock)
        self._thread.join(_SILENCE)

    def _accept(self) -> None:
        """Serve connections that send the token, until the end."""
        with self._listener:
            while not self._closed.is_set() and (left := self._end - time.monotonic()) > 0:
                self._listener.settimeout(left)
                try:
                    peer, _ = self._listener.accept()
                except OSError:  # the end, or no file descriptors are left for now
                    self._closed.wait(0.05)
                    continue
                self._peer = peer
                with peer, contextlib.suppress(OSError):
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    said = _read(peer, TOKEN_BYTES, time.monotonic() + _GREETING)
                    if hmac.compare_digest(said, self._token):
                        peer.settimeout(_SILENCE)
                        self._serve(peer)

    def _serve(self, peer: socket.socket) -> None:
        """Answer a peer's frames. Raises OSError if it has gone, is silent, or does not read its
        answers."""
        peer.sendall(_FRAME.pack(_HELLO, 0, 0))
        while True:
            kind, first, second = _FRAME.unpack(_read(peer, _FRAME.size))
            if kind == _PING:
                peer.sendall(_FRAME.pack(kind, first, second))
            elif kind == _STREAM:
                peer.sendall(_FRAME.pack(_RESULT, *self._steady(peer, first, second)))
                # closing with unread data could drop the answer: the peer closes first
                while peer.recv(_BLOCK):
                    pass
            else:
                return

    def _steady(self, peer: socket.socket, warm: int, span: int) -> tuple[int, int]:
        """Receive a stream; return the bytes of at least ``span`` ns, and those ns. The first
        ``warm`` ns do not count. Both ends of the time are arrivals, so that the wait for a packet
        on a slow line does not count."""
        buffer = bytearray(_BLOCK)
        start = mark = count = 0
        while True:
            size = peer.recv_into(buffer)
            if not size or time.monotonic() > self._end:
                raise ConnectionResetError
            now = time.monotonic_ns()
            start = start or now
            if mark:
                count += size
                if now >= mark + span:
                    return count, now - mark
            elif now >= start + warm:
                mark = now


def measure(
    source: str,
    target: str,
    address: str,
    port: int,
    token: bytes,
    *,
    bind: str | None = None,
    seconds: float = 0.4,
    deadline: float = 5.0,
) -> Link:
    """Measure from this machine to a `Responder`. Network trouble is a result, too.

    Args:
        source, target: names of this node and of the other one.
        address, port, token: the responder's; the address is numeric.
        bind: numeric address of the local interface to use; None = the system's choice.
        seconds: duration of the stream; longer if the round trip is long. A third of it does not
            count: TCP finds its rate, and traffic shapers let a burst through.
        deadline: seconds for the whole measurement.
    """
    end = time.monotonic() + deadline
    peer = f"{address}:{port}"
    latency = mbits = problem = None
    local = False
    step = f"binding to {bind}"
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as sock:
            # closing drops unsent data, so that it does not disturb the next measurement
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if bind:
                sock.bind((bind, 0))
            step = f"connecting to {peer}" + (f" from {bind}" if bind else "")
            _limit(sock, end)
            sock.connect((address, port))
            local = sock.getsockname()[0] == sock.getpeername()[0]
            step = f"presenting the token to {peer}"
            sock.sendall(token)
            _answer(sock, _HELLO, end)
            step = f"exchanging small messages with {peer}"
            latency = _round_trip(sock, end, end - deadline / 2)
            step = f"streaming to {peer}"
            warm = max(seconds / 3, _SLOW_START * latency / 1000)
            warm = min(warm, (end - time.monotonic()) / 4)
            mbits = _stream(sock, warm, seconds * 2 / 3, end)
    except OSError as error:
        problem = f"{_trouble(error, deadline)} while {step}"
    return Link(source, target, latency, mbits, problem, local)


def _round_trip(sock: socket.socket, end: float, enough: float) -> float:
    """Return the median round trip in ms; of fewer messages if the time is ``enough``."""
    times: list[float] = []
    for number in range(_PINGS + 1):
        start = time.monotonic()
        sock.sendall(_FRAME.pack(_PING, number, 0))
        _answer(sock, _PING, end)
        times.append(time.monotonic() - start)
        if time.monotonic() > enough:
            break
    return statistics.median(times[1:] or times) * 1000  # the first one wakes up both sides


def _stream(sock: socket.socket, warm: float, span: float, end: float) -> float:
    """Send until the receiver answers; returns its rate in Mbit/s. Times in seconds."""
    sock.sendall(_FRAME.pack(_STREAM, int(warm * 1e9), int(span * 1e9)))
    block = memoryview(os.urandom(_BLOCK))  # a tunnel that compresses must not look fast
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    sock.setblocking(False)
    while True:
        events = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        if not events or time.monotonic() >= end:
            raise TimeoutError
        if events[0][1] != select.POLLOUT:  # the answer, or the end of the connection
            break
        with contextlib.suppress(BlockingIOError):
            sock.send(block)
    count, nanoseconds = _answer(sock, _RESULT, end)
    return count * 8e3 / max(1, nanoseconds)


def _answer(sock: socket.socket, kind: int, end: float) -> tuple[int, int]:
    """Return the two numbers of the next frame, which must be of this kind."""
    answered, first, second = _FRAME.unpack(_read(sock, _FRAME.size, end))
    if answered != kind:
        raise OSError("answered by another program")
    return first, second


def _read(sock: socket.socket, size: int, end: float | None = None) -> bytes:
    """Read ``size`` bytes. Raises OSError if the peer has gone, or at ``end``."""
    content = b""
    while len(content) < size:
        if end is not None:
            _limit(sock, end)
        more = sock.recv(size - len(content))
        if not more:
            raise ConnectionResetError
        content += more
    return content


def _limit(sock: socket.socket, end: float) -> None:
    """Set the socket's timeout to ``end``."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _hang_up(sock: socket.socket) -> None:
    """Shut down a connection that another thread waits on and closes."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _trouble(error: OSError, deadline: float) -> str:
    """Describe an error, to be followed by "while connecting"."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError):
        return f"timed out after {deadline:g} s"
    if isinstance(error, ConnectionError):
        return "cut off"
    if error.errno in _UNREACHABLE:
        return f"unreachable ({error.strerror})"
    return error.strerror or str(error)
