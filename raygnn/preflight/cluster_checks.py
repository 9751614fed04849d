"""Checks of the nodes for any job: each is fit, all are alike, and they reach each other.

Ranks with different versions, instructions or settings do not fail at once: they disagree about a
collective hours later, or train a different model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from raygnn import compat
from raygnn.config.comm_plan import Interface
from raygnn.config.places import size
from raygnn.preflight.facts import NodeFacts
from raygnn.preflight.findings import Finding, JobFacts, error, info, some, warn

# package → supported versions, as in pyproject.toml
SUPPORTED = {
    "python": ">= 3.11, < 3.14",
    "torch": ">= 2.8",
    "dgl": ">= 2.1, < 2.5",
    "ray": ">= 2.55",
    "lightning": ">= 2.5",
    "torchmetrics": ">= 1.4",
}
# Package → versions whose private names were compared, see `raygnn.compat`.
COMPARED = {"torch": "< 2.16", "ray": "< 2.61", "lightning": "< 2.7"}

# variables with a value for each node
_PER_NODE = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("NCCL_IB_HCA", "UCX_NET_DEVICES", "FI_PROVIDER_PATH"),
)
_SHM_SMALL = 256 * 2**20
_SHM_NONE = 64 * 2**20


def nodes_answer(job: JobFacts) -> Iterator[Finding]:
    """Every living node answers within `cluster.probe_timeout`."""
    problems = {node.problem for node in job.silent}
    if not job.nodes and len(problems) == 1:  # hardly a fault of each node
        yield error(
            f"none of {some(len(job.silent), 'node')} answered: {problems.pop()}",
            "raise cluster.probe_timeout if the machines are busy or start Python slowly; else "
            "check that Ray can run tasks on them",
            [node.node for node in job.silent[:20]],
        )
        return
    for node in job.silent:
        remedy = "repair the node, remove it from the cluster, or raise cluster.probe_timeout"
        yield error(f"the node did not answer: {node.problem}", remedy, [node.node])


def versions_supported(job: JobFacts) -> Iterator[Finding]:
    """Python and the packages have supported versions; reports what a newer version or
    `RAYGNN_PLAIN` costs."""
    for name, versions in SUPPORTED.items():
        unsupported: dict[str, list[str]] = defaultdict(list)
        for node in job.nodes:
            version = node.python if name == "python" else node.versions.get(name)
            optional = name == "dgl" and version is None
            if not optional and not supported(version, versions):
                unsupported[version or "missing"].append(node.node)
        for installed, nodes in unsupported.items():
            state = "not installed" if installed == "missing" else installed
            remedy = f"install {name} {versions} there"
            remedy += ", with Python 3.12 or older, or uninstall it" * (name == "dgl")
            yield error(f"{name} is {state}", remedy, nodes)
    newer = any(
        (version := node.versions.get(name)) and not supported(version, versions)
        for name, versions in COMPARED.items()
        for node in job.nodes
    )
    if not newer and not os.environ.get(compat.PLAIN):
        return
    lost: dict[str, list[str]] = defaultdict(list)
    for why, loses in compat.missing_comforts():
        lost[why].append(loses)
    for why, losses in lost.items():
        yield info(f"{why}, so public names are used: {'; '.join(losses)}")


def versions_uniform(job: JobFacts) -> Iterator[Finding]:
    """All nodes have the same versions of Python (minor), packages and NCCL."""
    names = sorted({name for node in job.holding for name in node.versions})
    for name in ("python", *names):
        versions = {node.node: node.versions.get(name) for node in job.holding}
        if name == "python":  # patch releases are compatible
            versions = {node.node: ".".join(node.python.split(".")[:2]) for node in job.holding}
        remedy = f"install the same {name} everywhere"
        yield from _differ(job, "versions_uniform", name, versions, remedy)


def code_uniform(job: JobFacts) -> Iterator[Finding]:
    """All nodes have the same source code of raygnn."""
    digests = {node.node: node.code and node.code[:12] for node in job.holding}
    remedy = "install the same raygnn everywhere"
    yield from _differ(job, "code_uniform", "raygnn's own code (digest)", digests, remedy)


def hardware_uniform(job: JobFacts) -> Iterator[Finding]:
    """All nodes have the same processor, instruction sets, GPU models, GPU driver and ECC mode."""
    aspects: dict[str, Callable[[NodeFacts], str | None]] = {
        "the processor": lambda node: node.cpu,
        "processor instructions": lambda node: " ".join(node.cpu_flags),
        "GPU models": lambda node: ", ".join(sorted({gpu.model for gpu in node.gpus})),
        "the GPU driver": lambda node: ", ".join(sorted({str(gpu.driver) for gpu in node.gpus})),
        "ECC of the GPUs": lambda node: ", ".join(sorted({str(gpu.ecc) for gpu in node.gpus})),
    }
    for aspect, value in aspects.items():
        values, remedy = {n.node: value(n) for n in job.holding}, "train on nodes of one kind"
        yield from _differ(job, "hardware_uniform", aspect, values, remedy, missing="none")


def environment_uniform(job: JobFacts) -> Iterator[Finding]:
    """All nodes have the same environment variables for communication and threads (`NCCL_*`,
    `OMP_*`, …), except those that name devices and those in `comm.env`."""
    names = {name for node in job.holding for name in node.environment}
    for name in sorted(names.difference(_PER_NODE, job.config.comm.env)):
        values = {node.node: node.environment.get(name) for node in job.holding}
        remedy = f"unset it there, or set it for all with comm.env.{name}"
        yield from _differ(job, "environment_uniform", name, values, remedy, missing="not set")


def _differ(
    job: JobFacts,
    check: str,
    aspect: str,
    values: Mapping[str, str | None],
    remedy: str,
    missing: str = "missing",
) -> Iterator[Finding]:
    """Yield a finding about the nodes with rare values if the nodes' ``values`` differ."""
    nodes_of: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        nodes_of[value or missing].append(node)
    uniform = job.config.cluster.uniform
    if len(nodes_of) < 2 or uniform == "off":
        return
    usual = max(nodes_of, key=lambda value: len(nodes_of[value]))
    odd = [node for value, nodes in nodes_of.items() if value != usual for node in nodes]
    listed = ", ".join(
        f"{value} on {', '.join(nodes[:3])}" + f" and {len(nodes) - 3} more" * (len(nodes) > 3)
        for value, nodes in nodes_of.items()
    )
    finding = error if uniform == "strict" else warn
    yield finding(
        f"nodes differ in {aspect}: {listed}",
        f"{remedy}, or accept it with cluster.allow: [{check}]",
        odd[:20],
    )


def shared_memory(job: JobFacts) -> Iterator[Finding]:
    """`/dev/shm` is large enough for Ray and NCCL."""
    for node in job.holding:
        if node.shm_free is None or node.shm_free >= _SHM_SMALL:
            continue
        none = node.shm_free < _SHM_NONE
        effect = "Ray and NCCL crash with a bus error" if none else "Ray uses the disk instead"
        finding = error if none else warn
        yield finding(
            f"/dev/shm has {size(node.shm_free)} free: {effect}",
            "enlarge it (docker run --shm-size; on Kubernetes an emptyDir of medium Memory)",
            [node.node],
        )


def interfaces_there(job: JobFacts) -> Iterator[Finding]:
    """Every interface in `GLOO_SOCKET_IFNAME` exists and is up, and one interface has Ray's
    address."""
    several = len({node.network.address for node in job.holding}) > 1
    env = job.config.comm.env
    for node in job.holding:
        interfaces = {interface.name: interface for interface in node.network.interfaces}
        if not interfaces:
            continue
        if several and node.network.interface is None:
            yield warn(
                f"no interface has Ray's address {node.network.address}: communication may use a "
                "wrong interface",
                "start Ray there with --node-ip-address and the address of the right interface",
                [node.node],
            )
        given = {**node.environment, **env}.get("GLOO_SOCKET_IFNAME")
        if given is not None and (problem := _gloo_problem(given, interfaces, several)):
            whose = "comm.env" if "GLOO_SOCKET_IFNAME" in env else "the node's environment"
            remedy = f"remove it from {whose}: raygnn finds each node's interface itself"
            yield error(f"GLOO_SOCKET_IFNAME is {given!r}: {problem}", remedy, [node.node])


def _gloo_problem(given: str, interfaces: Mapping[str, Interface], several: bool) -> str | None:
    for name in given.split(","):
        if name not in interfaces:
            return f"there is no interface {name!r}; there are: {', '.join(sorted(interfaces))}"
        if not interfaces[name].up:
            return f"{name} is down"
        if not interfaces[name].addresses:
            return f"{name} has no IPv4 address"
        if several and interfaces[name].loopback:
            return f"{name} connects the node only to itself"
    return None


def debug_level_safe(job: JobFacts) -> Iterator[Finding]:
    """`TORCH_DISTRIBUTED_DEBUG` is a valid level, and not `DETAIL`, with which DDP crashes."""
    name = "TORCH_DISTRIBUTED_DEBUG"
    for_all = job.config.comm.env.get(name)
    nodes_of: dict[str, list[str]] = defaultdict(list)
    for node in job.holding:
        level = node.environment.get(name, "OFF") if for_all is None else for_all
        nodes_of[level.upper()].append(node.node)  # as torch reads it
    for level, nodes in nodes_of.items():
        if level in ("OFF", "INFO"):
            continue
        # torch then wraps the default process group, and DDP's logger crashes on it
        fatal = "DistributedDataParallel crashes with a segmentation fault"
        effect = fatal if level == "DETAIL" else "torch accepts OFF, INFO and DETAIL"
        what = f"{name} is {level or 'empty'}: {effect}"
        remedy = "unset it, and set comm.debug to true, which also compares collectives"
        yield error(what, remedy, nodes if for_all is None else ())


def network_reach(job: JobFacts) -> Iterator[Finding]:
    """Each node reaches the next one in a ring over TCP, with small and large messages."""
    # a link without any answer is worse than one that carries small messages
    bad = sorted((link for link in job.links if link.problem), key=lambda link: link.only_small)
    if not bad:
        return
    first = bad[0]
    remedy = (
        "let the nodes open TCP connections to each other on any port (firewall, security "
        "group); if they share another network, name its interface with "
        "--set comm.env.GLOO_SOCKET_IFNAME=NAME"
    )
    if first.only_small:
        remedy = (
            "small messages pass and large ones do not: give the interfaces of both nodes, and "
            f"all between them, the same MTU; else {remedy}"
        )
    also = f"; {len(bad)} of {len(job.links)} links fail" if len(bad) > 1 else ""
    yield error(
        f"the connection from {first.source} to {first.target} fails: {first.problem}{also}",
        remedy,
        list(dict.fromkeys(node for link in bad for node in (link.source, link.target))),
    )


def supported(version: str | None, versions: str) -> bool:
    """True if a version, without local and pre-release suffixes, is among the ``versions``, such as
    ``>= 3.11, < 3.14``."""
    try:
        return Version(version or "").base_version in SpecifierSet(versions)
    except InvalidVersion:
        return False
