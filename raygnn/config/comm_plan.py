"""Communication plan: environment variables of each rank before its process group exists.

A pure function of the configuration and the nodes' networks. It sets as few variables as possible,
since a wrong value breaks a cluster that works without it; each variable has a reason. Preflight
shows the plan; `raygnn.worker.comm.backend` applies it in every attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raygnn.config.places import HIDDEN, is_secret
from raygnn.config.schema import Config

_BRIDGES = ("docker", "virbr")  # of containers and virtual machines; NCCL skips them
_RECORDED = 2000  # collectives that NCCL's flight recorder keeps
_RECORDED_DEBUG = 20_000


@dataclass(frozen=True)
class Interface:
    """Network interface with its IPv4 addresses."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    loopback: bool = False


@dataclass(frozen=True)
class NodeNetwork:
    """Network connection of a node."""

    address: str | None = None  # Ray's address of the node; None on an embedded Ray
    interface: str | None = None  # name of the interface with that address, if any
    interfaces: tuple[Interface, ...] = ()
    # IPv4 addresses that the node's host name resolves to on the node
    resolves_to: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()  # InfiniBand and RoCE devices, e.g. ``("mlx5_0",)``


@dataclass(frozen=True)
class Variable:
    """Environment variable of a rank."""

    name: str
    value: str
    reason: str

    def shown(self) -> Variable:
        """Return the variable with a secret hidden."""
        return replace(self, value=HIDDEN) if is_secret(self.name, self.value) else self


@dataclass(frozen=True)
class CommPlan:
    """Communication plan of the ranks."""

    backend: str  # ``"gloo"`` or ``"nccl"``; ``why`` is the reason
    why: str
    timeout: int  # of a collective, seconds
    single: bool  # all ranks are on one node, with an embedded Ray
    # every node has InfiniBand or RoCE (True), none has (False), or some have (None)
    rdma: bool | None
    common: tuple[Variable, ...]  # variables of all ranks, without ``env``
    env: Mapping[str, str]  # the user's variables (``comm.env``), which override all others
    # Ray's id of a node (empty on an embedded Ray) → all variables of its ranks
    nodes: Mapping[str, tuple[Variable, ...]] = field(default_factory=dict)

    def variables(self, network: NodeNetwork, present: Mapping[str, str]) -> tuple[Variable, ...]:
        """Return all variables of the ranks on a node, sorted by name. Of the variables ``present``
        there, only ``env`` replaces those of the network."""
        planned: dict[str, Variable] = {}
        for variable in self.common:
            before = present.get(variable.name, variable.value)
            instead = "" if before == variable.value else f", instead of {before}"
            planned[variable.name] = replace(variable, reason=variable.reason + instead)
        for variable in self._of_network(network):
            if variable.name in present:
                value, reason = present[variable.name], "it is already set on the node"
                variable = Variable(variable.name, value, reason)
            planned[variable.name] = variable
        for name, value in self.env.items():
            before = planned[name].value if name in planned else value
            hidden = before == value or is_secret(name, value)
            instead = "" if hidden else f", instead of {before}"
            planned[name] = Variable(name, value, f"comm.env{instead}")
        return tuple(planned[name] for name in sorted(planned))

    def everywhere(self) -> dict[str, str]:
        """Return the variables that do not depend on the node. Secrets are omitted, since Ray shows
        the environment of workers, as are values that Ray would expand (``$NAME``)."""
        values = {variable.name: variable.value for variable in self.common} | dict(self.env)
        return {n: v for n, v in values.items() if not is_secret(n, v) and "$" not in v}

    def rows(self, names: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
        """Return rows of node, name, value and reason; common variables once, for node "all"."""
        nodes = {node: [v.shown() for v in variables] for node, variables in self.nodes.items()}
        everywhere = set.intersection(*map(set, nodes.values())) if nodes else set()
        by_place = [("all", sorted(everywhere, key=lambda variable: variable.name))]
        by_place += [
            ((names or {}).get(node, node), [v for v in variables if v not in everywhere])
            for node, variables in nodes.items()
        ]
        return [(place, v.name, v.value, v.reason) for place, listed in by_place for v in listed]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "backend": self.backend,
            "why": self.why,
            "timeout": self.timeout,
            "nodes": {n: [asdict(v.shown()) for v in listed] for n, listed in self.nodes.items()},
        }

    def _of_network(self, network: NodeNetwork) -> Iterator[Variable]:
        # ids, features and control messages use gloo, even if gradients use NCCL
        if self.single:
            loopback = [i.name for i in network.interfaces if i.loopback]
            if loopback:
                yield Variable("GLOO_SOCKET_IFNAME", loopback[0], "all ranks are on one node")
            return
        if network.interface and network.resolves_to != (network.address,):
            resolved = ", ".join(network.resolves_to) or "nothing"
            yield Variable(
                "GLOO_SOCKET_IFNAME",
                network.interface,
                f"gloo uses the address that the host name resolves to, which is {resolved} here; "
                f"Ray's is {network.address}",
            )
        if self.backend != "nccl":
            return
        if self.rdma is None:
            yield Variable("NCCL_IB_DISABLE", "1", "only some of the nodes have RDMA devices")
        candidates = [
            interface.name
            for interface in network.interfaces
            if interface.up and interface.addresses and not interface.loopback
            if not interface.name.startswith(_BRIDGES)
        ]
        # with RDMA, NCCL's own choice between ports and interfaces is better than ours
        if self.rdma is not True and network.interface and candidates[:1] != [network.interface]:
            others = ", ".join(name for name in candidates if name != network.interface)
            yield Variable(
                "NCCL_SOCKET_IFNAME",
                f"={network.interface}",
                f"it has Ray's address, but NCCL would use another one ({others})",
            )


def make_comm_plan(
    config: Config, nodes: Mapping[str, tuple[NodeNetwork, Mapping[str, str]]]
) -> CommPlan:
    """Return the plan for ranks on the nodes that can run workers.

    Args:
        nodes: Ray's id of a node → its network, and the variables that are already set on it.
    """
    comm, gpus = config.comm, config.cluster.gpus_per_worker
    if comm.backend != "auto":
        backend, why = comm.backend, "comm.backend"
    elif gpus:
        backend, why = "nccl", "every worker has a GPU"
    else:
        backend, why = "gloo", "the workers have no GPUs"
    have_rdma = [bool(network.rdma) for network, _ in nodes.values()]
    plan = CommPlan(
        backend=backend,
        why=why,
        timeout=max(1, int(comm.timeout.seconds)),
        single=bool(nodes) and not any(nodes),
        rdma=True if nodes and all(have_rdma) else None if any(have_rdma) else False,
        common=tuple(_common(config, backend)),
        env=dict(comm.env),
    )
    return replace(plan, nodes={node: plan.variables(*facts) for node, facts in nodes.items()})


def _common(config: Config, backend: str) -> Iterator[Variable]:
    threads, logs = config.cluster.cpus_per_worker, config.run_dir / "logs"
    yield Variable("OMP_NUM_THREADS", str(threads), "cluster.cpus_per_worker")
    nccl, debug = backend == "nccl", config.comm.debug
    if nccl:
        reason = "the last collectives of each rank, for analysis after a timeout"
        recorded = _RECORDED_DEBUG if debug else _RECORDED
        yield Variable("TORCH_FR_BUFFER_SIZE", str(recorded), reason)
        yield Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason)
        traces = logs / "nccl-trace-rank-"
        yield Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(traces), reason)
    if debug:
        yield Variable("TORCH_SHOW_CPP_STACKTRACES", "1", "comm.debug")
    if debug and nccl:
        yield Variable("NCCL_DEBUG", "INFO", "comm.debug")
        log = logs / "nccl-%h-%p.log"  # %h: host, %p: process, so one file per rank
        yield Variable("NCCL_DEBUG_FILE", str(log), "comm.debug")
    if debug and config.cluster.gpus_per_worker:
        yield Variable("CUDA_LAUNCH_BLOCKING", "1", "comm.debug")
