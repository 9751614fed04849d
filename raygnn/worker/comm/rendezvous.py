"""Where the store that ranks meet at listens: on its node's own address, and nowhere else.

torch has it listen on every interface, with no question asked: whoever reaches the port could
read, and write, what ranks tell each other to find each other.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

from torch.distributed import TCPStore


def listen_on_own_address() -> None:
    """Have the process groups of this process, made from now on, do so."""
    # torch.distributed.rendezvous is the function of that name
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    if hasattr(module, "TCPStore"):  # not a public name
        module.TCPStore = _store


def _store(host_name: str, port: int, **options: Any) -> TCPStore:
    """A TCPStore; as the master, with a socket that is bound to ``host_name``."""
    if options.get("is_master") and (listener := _bound(host_name, port)) is not None:
        options["master_listen_fd"] = listener.detach()  # the store's from here on
    return TCPStore(host_name, port, **options)


def _bound(host: str, port: int) -> socket.socket | None:
    """A listening socket; None where the address is not this machine's as it sees itself (behind
    a translation of addresses), or is in use, which torch then says in its own way."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        return listener
    except OSError:
        if listener is not None:
            listener.close()
        return None
