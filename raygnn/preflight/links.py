"""Connections between nodes: whether messages of any size pass over TCP."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

_MESSAGES = {"small": 64, "large": 2**18}  # bytes of each, sent there and back
_LIMIT = 5.0  # seconds for each step


@dataclass(frozen=True)
class Link:
    """Connection from one node to another; ``problem``: the step that failed, and how."""

    source: str  # name of the node that connects
    target: str  # name of the node that listens
    problem: str | None = None
    only_small: bool = False  # small messages pass, and large ones do not


def listen(address: str) -> int:
    """Answer one connection to this address in the background; returns the port. Raises OSError if
    this machine does not have that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port: int = listener.getsockname()[1]
    threading.Thread(target=_answer, args=(listener,), name="link", daemon=True).start()
    return port


def _answer(listener: socket.socket) -> None:
    listener.settimeout(2 * _LIMIT)
    with listener, suppress(OSError):  # the other side reports it
        peer, _ = listener.accept()
        peer.settimeout(_LIMIT)
        with peer, peer.makefile("rb") as received:
            for count in _MESSAGES.values():
                if len(received.read(count)) == count:
                    peer.sendall(bytes(count))


def reach(source: str, target: str, address: str, port: int, bind: str) -> Link:
    """Connect from this node's address ``bind`` to a node that listens. Network trouble is a
    result, too."""
    peer, passed = f"{address}:{port}", 0
    step = f"connecting to {peer} from {bind}"
    try:
        with (
            socket.create_connection((address, port), _LIMIT, (bind, 0)) as connection,
            connection.makefile("rb") as received,
        ):
            for kind, count in _MESSAGES.items():
                step = f"exchanging {kind} messages with {peer}"
                connection.sendall(bytes(count))
                if len(received.read(count)) < count:
                    raise OSError("cut off")
                passed += 1
    except OSError as error:
        problem = f"{error.strerror or error} while {step}"
        return Link(source, target, problem, only_small=passed > 0)
    return Link(source, target)
