"""Checks of what communication needs: names, interfaces, clocks, links."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job
from raygnn.preflight.network_checks import network_findings

_CLOCK = 5.0  # seconds
_FILES = 4096


def host_name_resolves(job: Job) -> Iterator[Finding]:
    """A name that leads to the node itself makes every rank there unreachable for the others."""
    addresses = {node.network.address for node in job.holding}
    if len(addresses) < 2 or "GLOO_SOCKET_IFNAME" in job.config.comm.env:
        return
    for node in job.holding:
        loopback = [a for a in node.network.resolves_to if a.startswith("127.")]
        if loopback:
            address = node.network.address
            yield Finding(
                "host_name_resolves",
                "error",
                f"the host name resolves to {loopback[0]} there, its address is {address}",
                f"let it resolve to {address} (/etc/hosts), or accept it with cluster.allow: "
                "[host_name_resolves]; gloo is told the interface then",
                nodes=(node.node,),
                values={"resolves_to": list(node.network.resolves_to), "address": address},
            )


def interfaces_there(job: Job) -> Iterator[Finding]:
    """Every interface that a variable names exists, and Ray's address belongs to one."""
    if len(job.holding) < 2:
        return
    for node in job.holding:
        names = {each.name for each in node.network.interfaces}
        if names and node.network.interface is None:
            yield Finding(
                "interfaces_there",
                "warn",
                f"no interface has Ray's address {node.network.address}: communication may choose "
                "a wrong one",
                "start Ray there with --node-ip-address of the interface to train over",
                nodes=(node.node,),
            )
        gpus = job.config.cluster.gpus_per_worker
        for variable in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if gpus else [])):
            value = job.config.comm.env.get(variable, node.environment.get(variable, ""))
            wanted = [name for name in value.split(",") if name]
            if names and wanted and not any(_matches(variable, name, names) for name in wanted):
                yield Finding(
                    "interfaces_there",
                    "error",
                    f"{variable} is {value}, and the node has {', '.join(sorted(names))}",
                    "remove it: raygnn finds the interface of each node itself",
                    nodes=(node.node,),
                    values={variable: value, "interfaces": sorted(names)},
                )


def _matches(variable: str, wanted: str, names: set[str]) -> bool:
    """As gloo and NCCL read it: NCCL takes prefixes, ``=`` for the whole name, ``^`` for not."""
    if variable == "GLOO_SOCKET_IFNAME":
        return wanted in names
    if wanted.startswith("^"):
        return True
    if wanted.startswith("="):
        return wanted[1:] in names
    return any(name.startswith(wanted) for name in names)


def debug_level_safe(job: Job) -> Iterator[Finding]:
    """torch wraps the default process group then, and DDP's logger dies on what it wraps."""
    name = "TORCH_DISTRIBUTED_DEBUG"
    there = tuple(n.node for n in job.holding if n.environment.get(name, "").upper() == "DETAIL")
    own = job.config.comm.env.get(name)
    own = own and own.upper()  # as torch does
    if own == "DETAIL" or (there and own is None):
        yield Finding(
            "debug_level_safe",
            "error",
            f"{name} is DETAIL: DistributedDataParallel dies of a segmentation fault with it",
            "unset it, and set comm.debug to true: collectives are compared then, too",
            nodes=() if own else there,
        )


def clocks_agree(job: Job) -> Iterator[Finding]:
    for node in job.nodes:
        if node.clock is not None and abs(node.clock) > _CLOCK:
            ahead = "ahead of" if node.clock > 0 else "behind"
            yield Finding(
                "clocks_agree",
                "warn",
                f"its clock is {abs(node.clock):.1f} s {ahead} this machine's: logs will mislead",
                "let chrony or ntpd run there",
                nodes=(node.node,),
            )


def open_files(job: Job) -> Iterator[Finding]:
    """Ray and the process groups hold a socket per peer."""
    if len(job.holding) < 2:
        return
    for node in job.holding:
        limit = node.limits.get("nofile", -1)
        if 0 <= limit < _FILES:
            yield Finding(
                "open_files",
                "warn",
                f"at most {limit} files may be open there",
                "start Ray after ulimit -n 65536",
                nodes=(node.node,),
            )


def network_links(job: Job) -> Iterator[Finding]:
    config = job.config
    yield from network_findings(
        job.links,
        compression=config.comm.compression,
        accumulate=config.train.accumulate,
        bucket_cap_mb=config.comm.bucket_cap_mb,
        gradient_bytes=None,
    )
