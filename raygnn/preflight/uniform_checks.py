"""Checks that the nodes which hold workers are alike: software, hardware, variables.

Ranks that compute with other versions, instructions or settings do not fail at once: they
disagree about a collective hours later, or train another model than one would think.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raygnn.preflight.facts import NodeFacts
from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job

# of these every node has its own
_OWN = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("NCCL_IB_HCA", "UCX_NET_DEVICES", "FI_PROVIDER_PATH"),
)


def versions_uniform(job: Job) -> Iterator[Finding]:
    """Nodes have the same versions of Python (minor) and of packages and native libraries."""
    names = ["python", *sorted({name for node in job.holding for name in node.versions})]
    for name in names:
        # Python's patch releases understand each other; everything else has to be the same.
        yield from _differ(
            job,
            "versions_uniform",
            name,
            lambda node: _minor(node.python) if name == "python" else node.versions.get(name),  # noqa: B023
            f"install the same {name} everywhere",
        )


def code_uniform(job: Job) -> Iterator[Finding]:
    """Nodes have the same source of raygnn: one version may still be another checkout."""
    yield from _differ(
        job,
        "code_uniform",
        "raygnn's own code (digest)",
        lambda node: node.code and node.code[:12],
        "install the same raygnn everywhere",
    )


def hardware_uniform(job: Job) -> Iterator[Finding]:
    """Nodes have the same processor and instructions, GPU models, GPU driver and ECC."""
    aspects: tuple[tuple[str, Callable[[NodeFacts], str | None]], ...] = (
        ("the processor", lambda node: node.cpu),
        ("processor instructions", lambda node: " ".join(node.cpu_flags)),
        ("GPU models", lambda node: _set(gpu.model for gpu in node.gpus)),
        ("the GPU driver", lambda node: _set(str(gpu.driver) for gpu in node.gpus)),
        ("ECC of the GPUs", lambda node: _set(str(gpu.ecc) for gpu in node.gpus)),
    )
    for what, value in aspects:
        yield from _differ(
            job, "hardware_uniform", what, value, "train on nodes of one kind", missing="none"
        )


def environment_uniform(job: Job) -> Iterator[Finding]:
    """Nodes have the same variables of communication and threads set already (`NCCL_*`, `OMP_*`,
    …), but for those that name a node's own devices and those in `comm.env`."""
    names = {name for node in job.holding for name in node.environment}
    for name in sorted(names.difference(_OWN, job.config.comm.env)):
        yield from _differ(
            job,
            "environment_uniform",
            name,
            lambda node: node.environment.get(name),  # noqa: B023
            f"unset it there, or set it for all with comm.env.{name}",
            missing="not set",
        )


def _differ(
    job: Job,
    check: str,
    what: str,
    value: Callable[[NodeFacts], str | None],
    remedy: str,
    missing: str = "missing",
) -> Iterator[Finding]:
    """A finding if the nodes' values are not all the same; it is about those of the fewest."""
    uniform = job.config.cluster.uniform
    if uniform == "off":
        return
    found: dict[str, list[str]] = {}
    for node in job.holding:
        found.setdefault(value(node) or missing, []).append(node.node)
    if len(found) < 2:
        return
    usual = max(found, key=lambda text: len(found[text]))
    odd = tuple(node for text, nodes in found.items() if text != usual for node in nodes)
    yield Finding(
        check,
        "error" if uniform == "strict" else "warn",
        f"nodes differ in {what}: " + ", ".join(f"{t} on {_some(on)}" for t, on in found.items()),
        f"{remedy}, or accept it with cluster.allow: [{check}]",
        nodes=odd[:20],
        values={what: found},
    )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _set(values: Iterator[str]) -> str:
    return ", ".join(sorted(set(values)))


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
