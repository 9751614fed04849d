"""Check whether a Ray cluster at an address accepts this process, before Ray's own connection,
which takes long to fail and then ends the process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

from raygnn import compat
from raygnn.errors import PreflightError, wrong_token

_REACH = 5.0  # seconds for a head node to accept a connection
_ADMIT = 30.0  # seconds for a process to import Ray and to be accepted
_REFUSED = re.compile(r"AuthenticationError|InvalidAuthToken|authentication_token_loader")


class Knock:
    """Background check whether the head node at ``HOST:PORT`` accepts this process; addresses of
    other forms, which Ray resolves, are not checked. Raises PreflightError if the name does not
    resolve, or nothing listens there."""

    def __init__(self, address: str):
        self._address = address
        self._process: subprocess.Popen[str] | None = None
        if "://" in address:
            raise _unreachable(
                address, "this is an address of Ray's client", "give the head node's HOST:PORT"
            )
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit()):
            return
        _connect(address, host.strip("[]"), int(port))
        self._process = subprocess.Popen(
            [sys.executable, "-c", compat.KNOCK, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is not for it
        )

    def wait(self) -> None:
        """Wait until this process is accepted. Raises PreflightError if it is refused, or there is
        no answer."""
        if self._process is None:
            return
        try:
            said, _ = self._process.communicate(timeout=_ADMIT)
        except subprocess.TimeoutExpired:
            raise _unreachable(
                self._address,
                f"no answer from a head node of Ray within {_ADMIT:g} s",
                "give the address that `ray start --head` printed, whose port is 6379 by default; "
                "if it is this one, look at its load, and at gcs_server.out in its logs "
                "(/tmp/ray/session_latest/logs)",
            ) from None
        finally:
            self.close()
        if _REFUSED.search(said):
            token = any(os.environ.get(f"RAY_AUTH_TOKEN{suffix}") for suffix in ("", "_PATH"))
            raise wrong_token(
                "the cluster refused us", f"cluster.address: {self._address}", sent=token
            )
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        # other errors, such as a name that this Ray lacks, are left to its own connection
        if self._process.returncode and lines and "RpcError" in lines[-1]:
            raise _unreachable(self._address, lines[-1], "look after the head node")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _connect(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_REACH).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise _unreachable(
            address, f"no connection to Ray: {reason}", "check the address, and that Ray runs there"
        ) from None


def _unreachable(address: str, what: str, remedy: str) -> PreflightError:
    return PreflightError(what, where=f"cluster.address: {address}", remedy=remedy)
