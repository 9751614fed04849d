"""Checks of the nodes: what is installed, what they have, what they see of the storage."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.preflight.findings import Finding, size
from raygnn.preflight.job import Job

# package → (oldest, first that is too new); the ranges of pyproject.toml
SUPPORTED: dict[str, tuple[str, str | None]] = {
    "python": ("3.10", "3.13"),
    "torch": ("2.4", None),
    "dgl": ("2.1", "2.2"),
    "ray": ("2.51", "3"),
    "lightning": ("2.4", "3"),
    "torchmetrics": ("1.4", "2"),
}

_SHM_SMALL = 256 * 2**20
_DISK_LOW = 2**30
_DISK_NONE = 64 * 2**20


def nodes_answer(job: Job) -> Iterator[Finding]:
    for node in job.silent:
        yield Finding(
            "nodes_answer",
            "error",
            f"the node gave no facts: {node.problem}",
            "look after that node, or take it out of the cluster",
            nodes=(node.node,),
        )


def versions_supported(job: Job) -> Iterator[Finding]:
    for name, (oldest, limit) in SUPPORTED.items():
        bad: dict[str, list[str]] = {}
        for node in job.nodes:
            version = node.python if name == "python" else node.versions.get(name)
            if not supported(version, oldest, limit):
                bad.setdefault(version or "missing", []).append(node.node)
        for found, nodes in bad.items():
            wanted = f"{name} >= {oldest}" + (f", < {limit}" if limit else "")
            yield Finding(
                "versions_supported",
                "error",
                f"{name} is {found}" if found != "missing" else f"{name} is not installed",
                f"install {wanted} there",
                nodes=tuple(nodes),
                values={"found": found, "wanted": wanted},
            )


def versions_uniform(job: Job) -> Iterator[Finding]:
    uniform = job.config.cluster.uniform
    if uniform == "off":
        return
    names = ["python", *sorted({name for node in job.nodes for name in node.versions})]
    for name in names:
        found: dict[str, list[str]] = {}
        for node in job.nodes:
            # Python's patch releases understand each other; everything else has to be the same.
            version = node.versions.get(name) if name != "python" else _minor(node.python)
            found.setdefault(version or "missing", []).append(node.node)
        if len(found) > 1:
            listed = ", ".join(f"{version} on {', '.join(on)}" for version, on in found.items())
            yield Finding(
                "versions_uniform",
                "error" if uniform == "strict" else "warn",
                f"nodes differ in {name}: {listed}",
                f"install the same {name} everywhere, or set cluster.uniform to warn",
                values={name: found},
            )


def resources_fit(job: Job) -> Iterator[Finding]:
    cluster, ray = job.config.cluster, job.resources
    cpus, gpus = cluster.cpus_per_worker, cluster.gpus_per_worker
    asked = f"{job.workers} × {cpus} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    has = f"{ray.cpus:g} CPUs and {ray.gpus:g} GPUs"
    fit = ray.workers(cpus, gpus)
    values = {"workers": job.workers, "fit": fit, "cpus": ray.cpus, "gpus": ray.gpus}
    if job.workers > fit:
        scarce = "gpus" if job.workers * gpus > ray.gpus else "cpus"
        local = len(ray.nodes) == 1 and scarce == "cpus"
        yield Finding(
            "resources_fit",
            "error",
            f"{asked} do not fit: Ray has {has} on {len(ray.nodes)} node(s), room for {fit} "
            "such workers",
            f"lower cluster.workers or cluster.{scarce}_per_worker"
            + (", or let more workers share the CPUs with cluster.num_cpus" if local else ""),
            values=values,
        )
    elif job.workers * cpus > ray.free_cpus or job.workers * gpus > ray.free_gpus:
        yield Finding(
            "resources_fit",
            "warn",
            f"{asked} have to wait: other jobs leave {ray.free_cpus:g} CPUs and "
            f"{ray.free_gpus:g} GPUs of {has}",
            "wait for them, or lower cluster.workers",
            values=values,
        )


def cpus_are_there(job: Job) -> Iterator[Finding]:
    told = {node.node: node.cpus for node in job.nodes}
    for node in job.resources.nodes:
        real = told.get(node.node, 0)
        if real and node.cpus > real:
            yield Finding(
                "cpus_are_there",
                "warn",
                f"Ray was told of {node.cpus:g} CPUs, the machine has {real}: workers will share "
                "them and be slower",
                "lower cluster.num_cpus, or ignore this if speed does not matter",
                nodes=(node.node,),
            )


def devices_suit(job: Job) -> Iterator[Finding]:
    """Precision, backend and torch's build against the GPUs that there are."""
    config, gpus = job.config, job.config.cluster.gpus_per_worker
    if config.precision == "fp16-mixed" and not (gpus and job.resources.gpus):
        yield Finding(
            "devices_suit",
            "error",
            "precision fp16-mixed needs GPUs, and the workers have none",
            "set precision to bf16-mixed or fp32, or give each worker a GPU",
        )
    if config.comm.backend == "nccl" and not (gpus and job.resources.gpus):
        yield Finding(
            "devices_suit",
            "error",
            "comm.backend nccl works between GPUs, and the workers have none",
            "set comm.backend to auto, or give each worker a GPU",
        )
    if gpus:
        nodes = [n.node for n in job.nodes if (n.versions.get("torch") or "").endswith("+cpu")]
        if nodes:
            yield Finding(
                "devices_suit",
                "error",
                f"cluster.gpus_per_worker is {gpus}, but torch is a build without CUDA",
                "install a CUDA build of torch there",
                nodes=tuple(nodes),
            )


def storage_visible(job: Job) -> Iterator[Finding]:
    said = {
        "missing": "does not exist there",
        "other": "is another directory there than here",
        "readonly": "cannot be written there",
    }
    for state, text in said.items():
        nodes = tuple(node.node for node in job.nodes if node.storage == state)
        if nodes:
            yield Finding(
                "storage_visible",
                "error",
                f"storage {job.config.storage} {text}",
                "set storage to a directory that every node mounts and may write",
                nodes=nodes,
            )


def memory_fits(job: Job) -> Iterator[Finding]:
    """Every worker reads its share of the partition; one node's workers share its memory."""
    need = job.partition.bytes
    totals = [node.memory for node in job.nodes]
    free = [node.memory_available for node in job.nodes]
    if None in totals or None in free or not job.nodes:
        return
    total, available = sum(n or 0 for n in totals), sum(n or 0 for n in free)
    values = {"partition": need, "memory": total, "available": available}
    if need > total:
        yield Finding(
            "memory_fits",
            "error",
            f"the partition is {size(need)}, all nodes together have {size(total)} of memory",
            "add nodes, or use nodes with more memory",
            values=values,
        )
    elif need > 0.8 * available:
        yield Finding(
            "memory_fits",
            "warn",
            f"the partition is {size(need)}, only {size(available)} of memory are free",
            "stop other programs, or add nodes",
            values=values,
        )


def shared_memory(job: Job) -> Iterator[Finding]:
    for node in job.nodes:
        if node.shm_free is not None and node.shm_free < _SHM_SMALL:
            yield Finding(
                "shared_memory",
                "warn",
                f"/dev/shm has {size(node.shm_free)} free: Ray will fall back to the disk",
                "enlarge it (docker run --shm-size, or an emptyDir of medium Memory)",
                nodes=(node.node,),
            )


def disk_space(job: Job) -> Iterator[Finding]:
    for node in job.nodes:
        if node.disk_free is not None and node.disk_free < _DISK_LOW:
            yield Finding(
                "disk_space",
                "error" if node.disk_free < _DISK_NONE else "warn",
                f"storage {job.config.storage} has {size(node.disk_free)} free for checkpoints",
                "free space there, or change storage",
                nodes=(node.node,),
            )


def supported(version: str | None, oldest: str, limit: str | None) -> bool:
    """Whether ``oldest <= version < limit``; local and pre-release suffixes do not count."""
    if version is None or not _numbers(version):
        return False
    numbers = _numbers(version)
    return numbers >= _numbers(oldest) and (limit is None or numbers < _numbers(limit))


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()  # 3.10.0 is 3.10
    return tuple(numbers) if numbers else (0,) if match else ()


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
