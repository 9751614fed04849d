"""Which communication variables each rank gets before its process group exists, and why.

Pure: from the configuration and what the nodes said to variables per node. As little as possible
is set, since a forced value has broken more clusters than it has mended; each variable carries
its reason. `raygnn.worker.comm.backend` applies the plan on every start and restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raygnn.config.places import HIDDEN, is_secret
from raygnn.config.schema import Config
from raygnn.preflight.facts import Network, NodeFacts

# containers' and virtual machines' bridges, which NCCL leaves out on its own
_BRIDGES = ("docker", "virbr")
_THERE = "it is set there already"
_RECORDED = 2000  # collectives that NCCL's flight recorder keeps
_RECORDED_DEBUG = 20_000


@dataclass(frozen=True)
class Variable:
    """One environment variable of a rank."""

    name: str
    value: str
    reason: str

    def shown(self) -> Variable:
        """The same for people and files: a secret is not told."""
        return replace(self, value=HIDDEN) if is_secret(self.name, self.value) else self


@dataclass(frozen=True)
class CommPlan:
    """How the ranks will talk to each other.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``; ``why`` says why.
        timeout: of a collective, seconds.
        single: all ranks will be on one node, since Ray is started there for this job.
        rdma: every node has InfiniBand or RoCE (True), none has (False), or some (None).
        common: variables of every rank, whatever the node, without ``env``.
        env: the user's, which win over all others.
        nodes: Ray's id of a node (empty on a Ray that is yet to start) → its variables, all.
    """

    backend: str
    why: str
    timeout: int
    single: bool
    rdma: bool | None
    common: tuple[Variable, ...]
    env: Mapping[str, str]
    nodes: Mapping[str, tuple[Variable, ...]] = field(default_factory=dict)

    def variables(self, network: Network, there: Mapping[str, str]) -> tuple[Variable, ...]:
        """All variables of the ranks on a node, sorted by name.

        Args:
            network: the node's.
            there: what is set on the node already; of the network's, only ``env`` replaces it.
        """
        found: dict[str, Variable] = {}
        for variable in self.common:
            before = there.get(variable.name, variable.value)
            instead = "" if before == variable.value else f", instead of {before}"
            found[variable.name] = replace(variable, reason=variable.reason + instead)
        for variable in self._of_node(network):
            own = there.get(variable.name)
            kept = None if own is None else replace(variable, value=own, reason=_THERE)
            found[variable.name] = kept or variable
        for name, value in self.env.items():
            planned = found.get(name)
            hidden = planned is None or planned.value == value or is_secret(name, value)
            instead = "" if hidden or planned is None else f", instead of {planned.value}"
            found[name] = Variable(name, value, f"comm.env says so{instead}")
        return tuple(found[name] for name in sorted(found))

    def everywhere(self) -> dict[str, str]:
        """The variables that do not depend on the node, the user's last; without secrets, since
        Ray shows what it starts workers with, and without what Ray would expand (``$NAME``)."""
        found = {variable.name: variable.value for variable in self.common} | dict(self.env)
        return {n: v for n, v in found.items() if not is_secret(n, v) and "$" not in v}

    def rows(self, names: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
        """A row per variable: node, name, value, reason; those of all nodes once.

        Args:
            names: of the nodes, by Ray's ids.
        """
        rows: list[tuple[str, ...]] = []
        nodes = {node: [v.shown() for v in found] for node, found in self.nodes.items()}
        listed = list(nodes.values())
        everywhere = set(listed[0]).intersection(*listed[1:]) if listed else set()
        for variable in sorted(everywhere, key=lambda v: v.name):
            rows.append(("all", variable.name, variable.value, variable.reason))
        for node, variables in nodes.items():
            for variable in variables:
                if variable not in everywhere:
                    name = (names or {}).get(node, node)
                    rows.append((name, variable.name, variable.value, variable.reason))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "backend": self.backend,
            "why": self.why,
            "timeout": self.timeout,
            "nodes": {n: [asdict(v.shown()) for v in found] for n, found in self.nodes.items()},
        }

    def _of_node(self, network: Network) -> Iterator[Variable]:
        # ids, features and control messages go over gloo, also where gradients use NCCL
        yield from self._gloo(network)
        if self.backend == "nccl":
            yield from self._nccl(network)

    def _gloo(self, network: Network) -> Iterator[Variable]:
        if self.single:
            loopback = [each.name for each in network.interfaces if each.loopback]
            if loopback:
                reason = "all ranks are on one node"
                yield Variable("GLOO_SOCKET_IFNAME", loopback[0], reason)
        elif network.interface and network.resolves_to != (network.address,):
            resolved = ", ".join(network.resolves_to) or "nothing"
            yield Variable(
                "GLOO_SOCKET_IFNAME",
                network.interface,
                f"gloo takes the address that the host name resolves to, which is {resolved} here; "
                f"Ray's is {network.address}",
            )

    def _nccl(self, network: Network) -> Iterator[Variable]:
        if self.single:
            return
        if self.rdma is None:
            yield Variable("NCCL_IB_DISABLE", "1", "only some of the nodes have RDMA devices")
        own = [
            each.name
            for each in network.interfaces
            if each.up and each.addresses and not each.loopback
            if not each.name.startswith(_BRIDGES)
        ]
        # with RDMA, NCCL's own choice between ports and interfaces is better than ours
        if self.rdma is not True and network.interface and own[:1] != [network.interface]:
            others = ", ".join(name for name in own if name != network.interface)
            yield Variable(
                "NCCL_SOCKET_IFNAME",
                f"={network.interface}",
                f"it has Ray's address, and NCCL would take another one ({others})",
            )


def make_comm_plan(config: Config, nodes: Sequence[NodeFacts]) -> CommPlan:
    """The plan for ranks on these nodes.

    Args:
        nodes: those that may hold workers, and answered.
    """
    comm, gpus = config.comm, config.cluster.gpus_per_worker
    if comm.backend != "auto":
        backend, why = comm.backend, "comm.backend says so"
    elif gpus:
        backend, why = "nccl", "every worker has a GPU"
    else:
        backend, why = "gloo", "the workers have no GPUs"
    having = [bool(node.network.rdma) for node in nodes]
    plan = CommPlan(
        backend=backend,
        why=why,
        timeout=max(1, int(comm.timeout.seconds)),
        single=bool(nodes) and all(not node.id for node in nodes),
        rdma=True if having and all(having) else None if any(having) else False,
        common=tuple(_common(config, backend)),
        env=dict(comm.env),
    )
    variables = {node.id: plan.variables(node.network, node.environment) for node in nodes}
    return replace(plan, nodes=variables)


def _common(config: Config, backend: str) -> Iterator[Variable]:
    threads = config.cluster.cpus_per_worker
    yield Variable("OMP_NUM_THREADS", str(threads), "cluster.cpus_per_worker")
    debug = config.comm.debug
    if backend == "nccl":
        recorded = str(_RECORDED_DEBUG if debug else _RECORDED)
        reason = "the last collectives of each rank, for the search after a timeout"
        yield Variable("TORCH_FR_BUFFER_SIZE", recorded, reason)
        yield Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason)
        traces = config.run_dir / "logs" / "nccl-trace-rank-"
        yield Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(traces), reason)
    if debug:
        reason = "comm.debug"
        yield Variable("TORCH_SHOW_CPP_STACKTRACES", "1", reason)
    if debug and backend == "nccl":
        yield Variable("NCCL_DEBUG", "INFO", reason)
        log = config.run_dir / "logs" / "nccl-%h-%p.log"  # of host and process: one per rank
        yield Variable("NCCL_DEBUG_FILE", str(log), reason)
    if debug and config.cluster.gpus_per_worker:
        yield Variable("CUDA_LAUNCH_BLOCKING", "1", reason)
