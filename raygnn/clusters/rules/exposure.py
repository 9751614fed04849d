"""Ports of Ray that others than the cluster can reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.clusters.facts import Cluster, Remark, listed, section
from raygnn.config.problems import show
from raygnn.config.yaml_text import KeyPath

PORTS = {
    6379: "Ray's control store",
    8265: "the dashboard, which takes jobs",
    10001: "Ray's client",
}
_EVERYWHERE = ("0.0.0.0/0", "::/0")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TUNNEL = "reach it by `ray dashboard` or `kubectl port-forward`"


def dashboard(cluster: Cluster) -> Iterator[Remark]:
    """A dashboard on more than loopback."""
    for head in cluster.heads:
        default = "127.0.0.1" if cluster.kind == "ray up" else "0.0.0.0"
        host = head.params.get("dashboard-host", default)
        if host in _LOOPBACK:
            continue
        key = head.starts[0].key if head.starts else (*head.key, "rayStartParams")
        if not cluster.with_token:
            what = f"the dashboard listens on {host} and takes jobs from everybody"
            remedy = f"turn authentication on, and set dashboard-host to 127.0.0.1: {_TUNNEL}"
            yield Remark("dashboard", "error", key, what, remedy)
        elif cluster.kind == "ray up":
            what = f"the dashboard listens on {host}, where tokens travel unencrypted"
            yield Remark("dashboard", "warn", key, what, f"--dashboard-host=127.0.0.1: {_TUNNEL}")


def firewall(cluster: Cluster) -> Iterator[Remark]:
    """A security group that lets all the world to Ray's ports."""
    group = section(section(cluster.value.get("provider")).get("security_group"))
    for i, rule in enumerate(map(section, listed(group.get("IpPermissions")))):
        key = ("provider", "security_group", "IpPermissions", i)
        ranges = listed(rule.get("IpRanges")) + listed(rule.get("Ipv6Ranges"))
        sources = {str(v) for each in ranges for v in section(each).values()}
        if sources & set(_EVERYWHERE) and (reached := _reached(rule)):
            what = f"all the world reaches {reached}"
            remedy = f"open port 22 alone, {_TUNNEL}"
            yield Remark("firewall", "error", key, what, remedy)


def services(cluster: Cluster) -> Iterator[Remark]:
    """A Kubernetes service or an ingress that brings Ray's ports out of the cluster."""
    for key, value in _services(cluster):
        kind = value.get("type", value.get("serviceType"))
        if kind in ("LoadBalancer", "NodePort"):
            at = (*key, "type" if "type" in value else "serviceType")
            what = f"a service of type {kind} opens ports of Ray beyond the cluster"
            yield Remark("service", "error", at, what, f"make it ClusterIP, and {_TUNNEL}")
    for head in cluster.heads:
        if section(cluster.spec.get("headGroupSpec")).get("enableIngress") is True:
            what = "an ingress brings the dashboard, which takes jobs, out of the cluster"
            yield Remark("service", "error", (*head.key, "enableIngress"), what, _TUNNEL)
    yield from _of_the_node(cluster)
    own = "NetworkPolicy" in cluster.beside or "networkPolicy" in cluster.spec
    if cluster.base and cluster.groups and not own:
        what = "no NetworkPolicy is beside it: every pod of Kubernetes reaches Ray's ports"
        remedy = "add one that lets in the pods of this Ray, and the operator to port 8265"
        yield Remark("network_policy", "warn", cluster.base, what, remedy)


def _of_the_node(cluster: Cluster) -> Iterator[Remark]:
    """Pods with the network of their node, where no policy counts."""
    specs = [section(cluster.spec.get("headGroupSpec"))]
    specs += map(section, listed(cluster.spec.get("workerGroupSpecs")))
    for group, spec in zip(cluster.groups if cluster.base else (), specs):
        pod = section(section(spec.get("template")).get("spec"))
        if pod.get("hostNetwork") is True:
            key = (*group.key, "template", "spec", "hostNetwork")
            what = f"{group.name} opens Ray's ports on its node, where no NetworkPolicy counts"
            remedy = "leave it out, or keep others off the nodes' network with a firewall"
            yield Remark("service", "warn", key, what, remedy)


def _services(cluster: Cluster) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Where a service is described whose ports are Ray's."""
    if cluster.kind == "Service":
        spec = section(cluster.value.get("spec"))
        given = map(section, listed(spec.get("ports")))
        ports = {str(each.get(name)) for each in given for name in ("port", "targetPort")}
        of_ray = any(str(label).startswith("ray.io/") for label in section(spec.get("selector")))
        if of_ray or ports & set(map(str, PORTS)):
            yield ("spec",), spec
    elif cluster.base:
        head, key = section(cluster.spec.get("headGroupSpec")), (*cluster.base, "headGroupSpec")
        yield key, {k: v for k, v in head.items() if k == "serviceType"}
        yield (*key, "headService", "spec"), section(section(head.get("headService")).get("spec"))


def _reached(rule: Mapping[str, Any]) -> str:
    first, last = rule.get("FromPort"), rule.get("ToPort")
    if str(rule.get("IpProtocol")) == "-1" or first in (-1, None):
        return "every port"
    if not isinstance(first, int) or not isinstance(last, int):
        return f"ports {show(first)} to {show(last)}"
    named = [f"port {port} ({what})" for port, what in PORTS.items() if first <= port <= last]
    return ", ".join(named)
