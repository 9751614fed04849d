"""Checks of the nodes: what is installed, what they have, what they see of the storage."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.config.places import size
from raygnn.preflight.findings import Finding, some
from raygnn.preflight.job import Job
from raygnn.preflight.memory_plan import REMEDIES, SHARE, WEIGHTS, memory_plan, weight_bytes

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
_SHM_NONE = 64 * 2**20
_DISK_LOW = 2**30
_DISK_NONE = 64 * 2**20


def nodes_answer(job: Job) -> Iterator[Finding]:
    """Every living node says what it has, within `cluster.probe_timeout`."""
    problems = {node.problem for node in job.silent}
    if not job.nodes and len(problems) == 1:  # the fault is hardly each one's own
        yield Finding(
            "nodes_answer",
            "error",
            f"none of {some(len(job.silent), 'node')} gave facts: {problems.pop()}",
            "raise cluster.probe_timeout if the machines are busy or start Python slowly; else "
            "look whether Ray can run anything there",
            nodes=tuple(node.node for node in job.silent[:20]),
        )
        return
    for node in job.silent:
        yield Finding(
            "nodes_answer",
            "error",
            f"the node gave no facts: {node.problem}",
            "look after that node, take it out of the cluster, or raise cluster.probe_timeout",
            nodes=(node.node,),
        )


def versions_supported(job: Job) -> Iterator[Finding]:
    """Python and the packages are of versions that raygnn works with."""
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


def resources_fit(job: Job) -> Iterator[Finding]:
    """Ray has room for all workers; with less it would wait without end."""
    cluster, ray = job.config.cluster, job.resources
    cpus, gpus = cluster.cpus_per_worker, cluster.gpus_per_worker
    each = f"{cpus} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    asked = f"{job.workers} × {each}"
    has = f"{ray.cpus:g} CPUs and {ray.gpus:g} GPUs"
    fit = ray.workers(cpus, gpus)
    values = {"workers": job.workers, "fit": fit, "cpus": ray.cpus, "gpus": ray.gpus}
    if job.workers > fit:
        scarce = "gpus" if job.workers * gpus > ray.gpus else "cpus"
        local = len(ray.nodes) == 1 and scarce == "cpus"
        yield Finding(
            "resources_fit",
            "error",
            f"{asked} do not fit: Ray has {has} on {some(len(ray.nodes), 'node')}, room for "
            f"{some(fit, 'such worker')}",
            f"lower cluster.workers or cluster.{scarce}_per_worker"
            + (", or let more workers share the CPUs with cluster.num_cpus" if local else ""),
            values=values,
        )
        return
    if fit < job.most:
        yield Finding(
            "resources_fit",
            "info",
            f"the job starts with {some(fit, 'worker')} of up to {job.most}: Ray has {has}",
            "add nodes, of which it makes use at once",
            values=values,
        )
    if not job.silent and (  # what a node that has just died had is not free either
        job.fewest * cpus > ray.free_cpus or job.fewest * gpus > ray.free_gpus
    ):
        yield Finding(
            "resources_fit",
            "warn",
            f"{job.fewest} × {each} have to wait: other jobs leave {ray.free_cpus:g} CPUs and "
            f"{ray.free_gpus:g} GPUs of {has}",
            "wait for them, or lower cluster.workers",
            values=values,
        )


def cpus_are_there(job: Job) -> Iterator[Finding]:
    """Ray was told of no more CPUs than a node has."""
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


def storage_visible(job: Job) -> Iterator[Finding]:
    """`storage` is one directory for all nodes, and can be written on each."""
    said = {
        "missing": "does not exist there",
        "other": "is another directory there than here",
        "readonly": "cannot be made or written there",
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
    """A node has memory for its share of the partition, the cached rows of others, and weights
    with their gradients and the optimizer's state."""
    if not job.holding:
        return
    yield from _gpu_memory_fits(job)
    uses, fewer = memory_plan(job, job.workers), sum(memory_plan(job, job.fewest).values())
    need = sum(uses.values())
    # the partition is mapped: what is not used for long makes room
    held = need - uses[SHARE]
    told = " and ".join(f"{use} ({size(count)})" for use, count in uses.items() if count)
    remedy = REMEDIES[max(uses, key=lambda use: uses[use])]
    # a graph that is yet to be partitioned is in memory now, and goes before training begins
    freed = 0 if job.partition.directory else job.partition.bytes
    for node in job.holding:
        if node.memory is None or node.memory_available is None:
            continue
        available = min(node.memory, node.memory_available + freed)
        if fewer > node.memory >= need:
            yield Finding(
                "memory_fits",
                "warn",
                f"with {some(job.fewest, 'worker')} (cluster.workers) {size(fewer)} would be "
                f"needed, the node has {size(node.memory)} of memory",
                "raise the fewest workers in cluster.workers to what the memory is enough for",
                nodes=(node.node,),
                values={"need": fewer, "memory": node.memory},
            )
        values = {"need": need, "memory": node.memory, "available": available}
        if need > node.memory or held > available:
            yield Finding(
                "memory_fits",
                "error",
                f"{told} take {size(need)}, the node has {size(node.memory)} of memory, of which "
                f"{size(available)} are available",
                remedy,
                nodes=(node.node,),
                values=values,
            )
        elif need > 0.8 * node.memory_available:
            yield Finding(
                "memory_fits",
                "warn",
                f"{told} take {size(need)}, only {size(available)} of memory are free",
                "stop other programs there, or add nodes",
                nodes=(node.node,),
                values=values,
            )


def _gpu_memory_fits(job: Job) -> Iterator[Finding]:
    gpus_per_worker = job.config.cluster.gpus_per_worker
    need = weight_bytes(job, job.workers) if gpus_per_worker else 0
    for node in job.holding:
        smallest = min((gpu.memory for gpu in node.gpus if gpu.memory), default=None)
        if smallest is not None and need > smallest:
            yield Finding(
                "memory_fits",
                "error",
                f"{WEIGHTS} take {size(need)}, a GPU has {size(smallest)} of memory",
                REMEDIES[WEIGHTS],
                nodes=(node.node,),
                values={"need": need, "memory": smallest},
            )


def shared_memory(job: Job) -> Iterator[Finding]:
    """`/dev/shm` has room for Ray and NCCL."""
    for node in job.holding:
        if node.shm_free is None or node.shm_free >= _SHM_SMALL:
            continue
        none = node.shm_free < _SHM_NONE
        effect = "Ray and NCCL die there of a bus error" if none else "Ray will fall back to disk"
        yield Finding(
            "shared_memory",
            "error" if none else "warn",
            f"/dev/shm has {size(node.shm_free)} free: {effect}",
            "enlarge it (docker run --shm-size, or an emptyDir of medium Memory)",
            nodes=(node.node,),
            values={"free": node.shm_free, "total": node.shm_total},
        )


def disk_space(job: Job) -> Iterator[Finding]:
    """`storage` has room for checkpoints."""
    for node in job.nodes:
        if node.storage != "ok":
            continue  # /proc and others of its kind have no room either
        if node.disk_free is not None and node.disk_free < _DISK_LOW:
            yield Finding(
                "disk_space",
                "error" if node.disk_free < _DISK_NONE else "warn",
                f"storage {job.config.storage} has {size(node.disk_free)} free for checkpoints",
                "free space there, or change storage",
                nodes=(node.node,),
            )


def cache_usable(job: Job) -> Iterator[Finding]:
    """A node can write to the place of its own copy of the partition, `staging.path`."""
    if job.config.task.of_graphs:
        return  # which are read where they lie
    place = job.config.staging.path or "the temporary directory (staging.path is null)"
    for node in job.holding:
        if node.cache is not None:
            yield Finding(
                "cache_usable",
                "error",
                f"copies of the partition cannot be kept in {place}: {node.cache}",
                "set staging.path to a directory of your own, which need not exist",
                nodes=(node.node,),
            )


def cache_space(job: Job) -> Iterator[Finding]:
    """A node has room for its own copy of its share of the partition."""
    if job.config.task.of_graphs:
        return  # which are read where they lie
    for node in job.holding:
        share = job.partition.bytes / max(1, min(len(job.holding), job.fewest))
        if node.cache is None and node.cache_free is not None and node.cache_free < share:
            yield Finding(
                "cache_space",
                "warn",
                f"its copy of the partition takes up to {size(share)}, staging.path has "
                f"{size(node.cache_free)} free",
                "free space there, or set staging.path to another disk",
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
