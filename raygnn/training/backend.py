"""How Ray Train sets up the process group: our timeout and environment, before it exists.

The training function runs after the group was made, which is too late for communication
variables; a backend's ``on_start`` runs before, on every start and restart.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

_SIOCGIFADDR = 0x8915


@dataclass
class CommConfig(TorchConfig):
    """A TorchConfig with variables for every worker.

    Attributes:
        env: set before the process group is made; wins over what raygnn would choose.
    """

    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _CommBackend


class _CommBackend(_TorchBackend):
    def on_start(self, worker_group, backend_config: CommConfig) -> None:  # type: ignore[no-untyped-def]
        worker_group.execute(_set_environment, dict(backend_config.env))
        super().on_start(worker_group, backend_config)


def _set_environment(env: dict[str, str]) -> None:
    if interface := interface_of(ray.util.get_node_ip_address()):
        # Without it gloo takes whatever the host name resolves to, often 127.0.0.1, and hosts
        # can not reach each other. Names differ from host to host, so each finds its own.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.update(env)


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None when none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
