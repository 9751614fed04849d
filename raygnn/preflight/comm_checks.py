"""Checks of what communication needs: names, interfaces, clocks, links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raygnn.preflight.facts import Interface
from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job
from raygnn.preflight.network_checks import network_findings

_CLOCK = 5.0  # seconds
_FILES = 4096


def host_name_resolves(job: Job) -> Iterator[Finding]:
    """A node's own name does not lead to loopback, where no other node reaches it."""
    addresses = {node.network.address for node in job.holding}
    if len(addresses) < 2:
        return
    for node in job.holding:
        if "GLOO_SOCKET_IFNAME" in {**node.environment, **job.config.comm.env}:
            continue  # the name does not matter then
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
    """Every interface that `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` names is there and can
    be used, and Ray's address belongs to one."""
    several = len({node.network.address for node in job.holding}) > 1
    gpus = job.config.cluster.gpus_per_worker
    for node in job.holding:
        names = {each.name: each for each in node.network.interfaces}
        if not names:
            continue
        if several and node.network.interface is None:
            yield Finding(
                "interfaces_there",
                "warn",
                f"no interface has Ray's address {node.network.address}: communication may choose "
                "a wrong one",
                "start Ray there with --node-ip-address of the interface to train over",
                nodes=(node.node,),
            )
        for variable in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if gpus else [])):
            given = {**node.environment, **job.config.comm.env}.get(variable)
            gloo = variable == "GLOO_SOCKET_IFNAME"
            if given is None:
                continue
            problem = _gloo_problem(given, names, several) if gloo else _nccl_problem(given, names)
            if problem:
                whose = "comm.env" if variable in job.config.comm.env else "that node's environment"
                yield Finding(
                    "interfaces_there",
                    "error",
                    f"{variable} is {given!r}: {problem}",
                    f"remove it from {whose}: raygnn finds the interface of each node itself",
                    nodes=(node.node,),
                    values={variable: given, "interfaces": sorted(names)},
                )


def _gloo_problem(given: str, names: Mapping[str, Interface], several: bool) -> str | None:
    """Gloo opens a device on each of the names, and takes them as they are."""
    for name in given.split(","):
        if name not in names:
            return f"there is no interface {name!r}; there are: {', '.join(sorted(names))}"
        if not names[name].up:
            return f"{name} is down"
        if not names[name].addresses:
            return f"{name} has no IPv4 address"
        if several and names[name].loopback:
            return f"{name} reaches nothing but the node itself"
    return None


def _nccl_problem(given: str, names: Mapping[str, Interface]) -> str | None:
    """NCCL takes prefixes, ``=`` for whole names, ``^`` for all but those; any that is there."""
    wanted = [name for name in given.lstrip("=").split(",") if name]
    if given.startswith("^") or not wanted:
        return None
    whole = given.startswith("=")
    if any(name == each if whole else name.startswith(each) for name in names for each in wanted):
        return None
    return f"there is no such interface; there are: {', '.join(sorted(names))}"


def debug_level_safe(job: Job) -> Iterator[Finding]:
    """`TORCH_DISTRIBUTED_DEBUG` is a level that torch knows, and not the one that DDP dies of."""
    name = "TORCH_DISTRIBUTED_DEBUG"
    own = job.config.comm.env.get(name)
    found: dict[str, list[str]] = {}
    for node in job.holding:
        level = (own if own is not None else node.environment.get(name, "OFF")).upper()
        found.setdefault(level, []).append(node.node)  # as torch reads it
    for level, nodes in found.items():
        if level in ("OFF", "INFO"):
            continue
        # torch wraps the default process group then, and DDP's logger dies on what it wraps
        fatal = "DistributedDataParallel dies of a segmentation fault with it"
        yield Finding(
            "debug_level_safe",
            "error",
            f"{name} is {level or 'empty'}: "
            + (fatal if level == "DETAIL" else "torch knows OFF, INFO and DETAIL"),
            "unset it, and set comm.debug to true: collectives are compared then, too",
            nodes=() if own is not None else tuple(nodes),
        )


def clocks_agree(job: Job) -> Iterator[Finding]:
    """Nodes' clocks are within 5 s of this machine's."""
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
    """Enough files may be open on a node: Ray and the process groups hold a socket per peer."""
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
    """The links between the nodes; what is found is named ``network_reach``, ``…_latency`` or
    ``…_bandwidth``."""
    config = job.config
    yield from network_findings(
        job.links,
        compression=config.comm.compression,
        accumulate=config.train.accumulate,
        bucket_cap_mb=config.comm.bucket_cap_mb,
        gradient_bytes=None,
    )
