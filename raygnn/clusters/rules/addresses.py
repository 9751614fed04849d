"""The machines of an on-premise cluster."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from raygnn.clusters.facts import Cluster, Remark, listed, section
from raygnn.config.problems import show
from raygnn.config.yaml_text import KeyPath

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9-]{1,63})*"
)


def malformed(cluster: Cluster) -> Iterator[Remark]:
    """Addresses that are none, and those that only a machine itself can use."""
    for key, address in _addresses(cluster):
        text = str(address)
        if isinstance(address, str) and _is_loopback(text):
            what = f"{show(address)} is each machine's own loopback"
            yield Remark(
                "address", "error", key, what, "give the address that the others reach it by"
            )
        elif not isinstance(address, str) or not _is_address(text):
            what = f"{show(address)} is neither an IP address nor a host name"
            yield Remark("address", "error", key, what, "give one, without a port or a user")


def repeated(cluster: Cluster) -> Iterator[Remark]:
    """A machine that is listed twice, or that is head and worker."""
    seen: dict[object, KeyPath] = {}
    for key, address in _addresses(cluster):
        first = seen.setdefault(str(address), key)
        if first == key:
            continue
        if first == ("provider", "head_ip"):
            what = f"{show(address)} is the head, and a worker too"
        else:
            what = f"{show(address)} is listed twice"
        remedy = "list each machine once; the head runs workers of a job, too"
        yield Remark("address", "error", key, what, remedy)


def _addresses(cluster: Cluster) -> Iterator[tuple[KeyPath, object]]:
    provider = section(cluster.value.get("provider"))
    if cluster.provider != "local":
        return
    if "head_ip" in provider:
        yield ("provider", "head_ip"), provider["head_ip"]
    for i, address in enumerate(listed(provider.get("worker_ips"))):
        yield ("provider", "worker_ips", i), address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        digits = re.fullmatch(r"[0-9.]+", text)  # an address with a number that is too large
        return digits is None and _HOST_NAME.fullmatch(text) is not None
    return True


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return text == "localhost"
