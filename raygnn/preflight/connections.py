"""Checks of connections: nodes exchange messages of any size over TCP, and the head node of a Ray
cluster accepts this process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from raygnn import compat
from raygnn.errors import PreflightError, wrong_token

_MESSAGES = {"small": 64, "large": 2**18}  # bytes in each direction
_LIMIT = 5.0  # seconds for each step
_ADMIT = 30.0  # seconds for a process to import Ray and to be accepted
_REFUSED = re.compile(r"AuthenticationError|InvalidAuthToken|authentication_token_loader")


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
    """Connect from this node's address ``bind`` to a listening node. A network error is returned
    as the link's problem."""
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


class Knock:
    """Background check that the head node at ``HOST:PORT`` accepts this process, because Ray's own
    connection takes long to fail and then ends the process. Other forms of address, which Ray
    resolves, are not checked. Raises PreflightError if nothing listens at the address."""

    def __init__(self, address: str):
        self._address = address
        self._process: subprocess.Popen[str] | None = None
        if "://" in address:
            raise self._error("this is a Ray Client address", "set it to the head node's HOST:PORT")
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit()):
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LIMIT).close()
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
            remedy = "check the address, and that Ray is running there"
            raise self._error(f"no connection to Ray: {reason}", remedy) from None
        self._process = subprocess.Popen(
            [sys.executable, "-c", compat.KNOCK, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C does not reach it
        )

    def wait(self) -> None:
        """Wait until this process is accepted. Raises PreflightError if it is refused, or the head
        node does not answer."""
        if self._process is None:
            return
        try:
            output, _ = self._process.communicate(timeout=_ADMIT)
        except subprocess.TimeoutExpired:
            raise self._error(
                f"no answer from a head node of Ray within {_ADMIT:g} s",
                "use the address that `ray start --head` printed, with port 6379 by default; if it "
                "is correct, check the head node's load, and gcs_server.out in its logs "
                "(/tmp/ray/session_latest/logs)",
            ) from None
        finally:
            self.close()
        if _REFUSED.search(output):
            where = f"cluster.address: {self._address}"
            sent = any(os.environ.get(f"RAY_AUTH_TOKEN{suffix}") for suffix in ("", "_PATH"))
            raise wrong_token("the cluster refused us", where, sent=sent)
        # other errors, such as a name that this version of Ray lacks, are left to Ray's connection
        *_, last = output.strip().splitlines() or [""]
        if self._process.returncode and "RpcError" in last:
            raise self._error(last.strip(), "check that the head node runs")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _error(self, what: str, remedy: str) -> PreflightError:
        return PreflightError(what, where=f"cluster.address: {self._address}", remedy=remedy)
