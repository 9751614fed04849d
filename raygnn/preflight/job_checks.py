"""Checks that the cluster can run the job: resources, devices, storage, memory and disks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from raygnn.config.model import NO_LAYERS
from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.findings import Finding, JobFacts, error, info, some, warn

SHARE, CACHE, WEIGHTS, ROWS = (
    "its share of the partition",
    "the cache",
    "weights, gradients and optimizer state",
    "embedding tables",
)
# use of memory → remedy if it is too much
REMEDIES = {
    SHARE: "add nodes (cluster.workers), or use nodes with more memory",
    CACHE: "lower sampling.cache, or use nodes with more memory",
    WEIGHTS: "lower model.hidden or model.layers, or set comm.shard",
    ROWS: "lower model.embedding.dim, or add nodes (cluster.workers)",
}

_BF16 = (8, 0)  # compute capability
_DISK_LOW = 2**30
_DISK_NONE = 64 * 2**20


def resources_fit(job: JobFacts) -> Iterator[Finding]:
    """Ray has free resources for all workers."""
    cluster, ray = job.config.cluster, job.resources
    cpus, gpus = cluster.cpus_per_worker, cluster.gpus_per_worker
    worker = f"{cpus} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    has = f"{ray.cpus:g} CPUs and {ray.gpus:g} GPUs"
    fit = ray.workers(cpus, gpus)
    if job.workers > fit and ray.growing:
        yield info(
            f"{job.workers} × {worker} do not fit yet: Ray has {has}; the job requests more and "
            f"waits up to {cluster.wait}",
            "check that the cluster may grow that much; future nodes are not checked",
        )
        return
    if job.workers > fit:
        scarce = "gpus" if job.workers * gpus > ray.gpus else "cpus"
        local = len(ray.nodes) == 1 and scarce == "cpus"
        yield error(
            f"{job.workers} × {worker} do not fit: Ray has {has} on "
            f"{some(len(ray.nodes), 'node')}, enough for {some(fit, 'worker')}",
            f"lower cluster.workers or cluster.{scarce}_per_worker"
            + ", or let more workers share the CPUs with cluster.num_cpus" * local,
        )
        return
    if fit < job.most:
        yield info(
            f"the job starts with {some(fit, 'worker')} of up to {job.most}: Ray has {has}",
            "add nodes, which the job then uses",
        )
    if not job.silent and (  # the resources of a node that has just died are not free either
        job.fewest * cpus > ray.free_cpus or job.fewest * gpus > ray.free_gpus
    ):
        yield warn(
            f"{job.fewest} × {worker} have to wait: other jobs leave {ray.free_cpus:g} CPUs and "
            f"{ray.free_gpus:g} GPUs of {has}",
            "wait for them, or lower cluster.workers",
        )


def devices_suit(job: JobFacts) -> Iterator[Finding]:
    """The builds of torch and DGL support the available CPUs or GPUs."""
    config, gpus = job.config, job.config.cluster.gpus_per_worker
    without_cuda = [n.node for n in job.holding if (n.versions.get("torch") or "").endswith("+cpu")]
    if gpus and without_cuda:
        what = f"cluster.gpus_per_worker is {gpus}, but torch is a build without CUDA"
        yield error(what, "install a CUDA build of torch there", without_cuda)
    if not config.model.takes_dgl:
        return
    if without := [node.node for node in job.holding if not node.versions.get("dgl")]:
        yield error(
            f"{config.model.kind} reads DGL's graphs, and DGL is not installed",
            "pip install dgl there, with Python 3.12 or older, or set model.interface to pyg, or "
            "choose a built-in model.kind",
            without,
        )
        return
    on_cpus = [n.node for n in job.holding if "+cu" not in (n.versions.get("dgl") or "")]
    if gpus and on_cpus:
        what = f"DGL is a build for CPUs: if {config.model.kind} uses dgl.nn, it cannot run on GPUs"
        remedy = "build it from raygnn.models or plain torch, or set cluster.gpus_per_worker to 0"
        yield warn(what, remedy, on_cpus)


def bf16_is_there(job: JobFacts) -> Iterator[Finding]:
    """The GPUs support bf16 if `precision` needs it."""
    if not (job.config.arithmetic.bf16 and job.config.cluster.gpus_per_worker):
        return
    for node in job.holding:
        old = sorted({gpu.model for gpu in node.gpus if gpu.capability and gpu.capability < _BF16})
        if old:
            what = f"{', '.join(old)} cannot compute in bf16 (compute capability below 8.0)"
            yield warn(what, "set precision to fp16-mixed or fp32", [node.node])


def gpus_are_there(job: JobFacts) -> Iterator[Finding]:
    """Ray was started with the existing GPUs, each of them once."""
    if not job.config.cluster.gpus_per_worker:
        return
    gpus = {node.node: len(node.gpus) for node in job.nodes}
    for node in job.resources.nodes:
        if node.gpus > gpus.get(node.node, node.gpus):
            yield error(
                f"Ray was started with {node.gpus:g} GPUs, but the machine has {gpus[node.node]}: "
                "ranks would share one",
                "start Ray there without --num-gpus, or with the actual number",
                [node.node],
            )
    nodes_of: dict[str, list[str]] = defaultdict(list)
    for holder in job.holding:
        for gpu in holder.gpus:
            if gpu.uuid:
                nodes_of[gpu.uuid].append(holder.node)
    for uuid, nodes in nodes_of.items():
        if len(nodes) > 1:
            what = f"GPU {uuid} belongs to several Ray nodes: two ranks would share it"
            remedy = "start one Ray node per machine, or give each its own CUDA_VISIBLE_DEVICES"
            yield error(what, remedy, nodes)


def gpus_are_free(job: JobFacts) -> Iterator[Finding]:
    """No other process uses the GPUs."""
    for node in job.holding if job.config.cluster.gpus_per_worker else ():
        processes = sorted({pid for gpu in node.gpus for pid in gpu.processes})
        if processes:
            what = f"other processes use its GPUs: {', '.join(map(str, processes[:5]))}"
            yield warn(what, "stop them, or expect less memory and speed", [node.node])


def model_runs(job: JobFacts) -> Iterator[Finding]:
    """Your own model runs one batch forward and backward on the CPU of the command's machine, on a
    small random graph with the types and arrays of your graph."""
    if job.dry_run is not None:
        yield job.dry_run


def storage_visible(job: JobFacts) -> Iterator[Finding]:
    """`storage` is one directory for all nodes, or an object store that each can read and write."""
    # state → problem of a directory, and of an object store
    texts = {
        "missing": ("does not exist there", "cannot be reached there"),
        "other": ("is another directory there than here", "is another store there than here"),
        "readonly": ("cannot be created or written there", "cannot be written there"),
    }
    for state, (text, of_store) in texts.items():
        nodes = [node for node in job.nodes if node.storage == state]
        remedy = "set storage to a directory that every node mounts and may write"
        if nodes and job.config.store is not None:
            why, remedy = nodes[0].storage_error or ("", "check the node's credentials")
            text = of_store + f": {why}" * bool(why)
        if nodes:
            named = [node.node for node in nodes]
            yield error(f"storage {job.config.storage} {text}", remedy, named)


def memory_fits(job: JobFacts) -> Iterator[Finding]:
    """Each node has memory for its parts of the graph, the cache (one for all workers of a node),
    and weights, gradients and optimizer state."""
    if not job.holding:
        return
    yield from _gpu_memory_fits(job)
    uses = memory_plan(job)
    need = sum(uses.values())
    # the partition is mapped: unused pages are evicted
    held = need - uses[SHARE]
    listed = " and ".join(f"{use} ({size(count)})" for use, count in uses.items() if count)
    remedy = REMEDIES[max(uses.keys() - {SHARE}, key=lambda use: uses[use])]
    # a graph that is not partitioned yet is in memory now, and freed before training
    freed = 0 if job.partition.directory else job.partition.bytes
    for node in job.holding:
        if node.memory is None or node.memory_available is None:
            continue
        available = min(node.memory, node.memory_available + freed)
        if held > available:
            yield error(
                f"{listed} take {size(need)}, but {size(available)} of the node's "
                f"{size(node.memory)} of memory are available",
                remedy,
                [node.node],
            )
        elif need > 0.8 * node.memory_available:
            yield warn(
                f"{listed} take {size(need)}, but only {size(available)} of memory are free: parts "
                "of the partition that do not fit are read from the disk repeatedly",
                "stop other programs there, or add nodes",
                [node.node],
            )


def _gpu_memory_fits(job: JobFacts) -> Iterator[Finding]:
    need = weight_bytes(job, job.workers) if job.config.cluster.gpus_per_worker else 0
    for node in job.holding:
        smallest = min((gpu.memory for gpu in node.gpus if gpu.memory), default=None)
        if smallest is not None and need > smallest:
            what = f"{WEIGHTS} take {size(need)}, but a GPU has {size(smallest)} of memory"
            yield error(what, REMEDIES[WEIGHTS], [node.node])


def disk_space(job: JobFacts) -> Iterator[Finding]:
    """`storage`, or `staging.path` for an object store, has free space for checkpoints."""
    config, in_store = job.config, job.config.store is not None
    key, place, low = "storage", f"storage {config.storage}", float(_DISK_LOW)
    if in_store:  # kept checkpoints, one that is being written, and one that is being uploaded
        key = place = "staging.path"
        low = max(low, (config.fault.keep + 2) * weight_bytes(job, 1))
    for node in job.nodes:
        if node.storage != "ok":
            continue  # `storage_visible` reports it
        free = node.cache_free if in_store else node.disk_free
        if free is not None and free < low:
            finding = error if free < _DISK_NONE else warn
            yield finding(
                f"{place} has {size(free)} free for checkpoints; it should have {size(low)}",
                f"free space there, or change {key}",
                [node.node],
            )


def cache_usable(job: JobFacts) -> Iterator[Finding]:
    """Each node can write to `staging.path`, the directory of its copy of the partition."""
    if job.config.task.of_graphs:
        return  # graphs are not copied
    place = job.config.staging.path or "the temporary directory (staging.path is null)"
    for node in job.holding:
        if node.cache is not None:
            what = f"copies of the partition cannot be stored in {place}: {node.cache}"
            remedy = "set staging.path to a directory that you may write or create"
            yield error(what, remedy, [node.node])


def cache_space(job: JobFacts) -> Iterator[Finding]:
    """Each node has free space for its copy of its parts of the graph."""
    if job.config.task.of_graphs:
        return  # graphs are not copied
    share = job.partition.bytes / max(1, min(len(job.holding), job.fewest))
    for node in job.holding:
        if node.cache is None and node.cache_free is not None and node.cache_free < share:
            yield warn(
                f"its copy of the partition takes up to {size(share)}, but staging.path has "
                f"{size(node.cache_free)} free",
                "free space there, or set staging.path to another disk",
                [node.node],
            )


def memory_plan(job: JobFacts) -> dict[str, float]:
    """Estimate the bytes on a node, by use, without batches and activations. With GPUs the weights
    are in GPU memory."""
    config, facts = job.config, job.partition
    here = max(1, job.workers // max(1, len(job.holding)))  # workers per node
    part = min(1.0, here / max(1, job.workers))
    share, cache = facts.bytes * part, config.sampling.cache
    return {
        SHARE: share,
        # rows of other nodes, shared by all workers of this one
        CACHE: 0.0 if cache == "auto" else cache * (facts.bytes - share),
        WEIGHTS: 0.0 if config.cluster.gpus_per_worker else weight_bytes(job, job.workers) * here,
        ROWS: _row_bytes(config, facts) * part,
    }


def weight_bytes(job: JobFacts, workers: int) -> float:
    """Return the bytes of a worker's weights, and in training also of gradients and optimizer
    state; see docs/performance.md."""
    config, train = job.config, job.config.train
    weights = parameters(config, job.partition) * config.arithmetic.itemsize
    if not config.trains:
        return weights
    # numbers that the optimizer keeps for each weight
    state = int(train.momentum > 0) if train.optimizer == "sgd" else 2
    copies = {"none": 2 + state, "optimizer": 2 + state / workers}
    return weights * copies[config.comm.shard]


def parameters(config: Config, facts: PartitionFacts) -> int:
    """Estimate the number of weights: a matrix for each layer and edge type, and column
    encoders; 0 for a user-defined class or dataset."""
    model, task = config.model, config.task
    if ":" in model.kind or model.kind in (NO_LAYERS, "lightgcn"):
        return 0
    widths, encoders = _widths(config, facts), 0
    if model.columns == "learned":
        encoders = sum((width + 2 * model.hidden) * model.hidden for width in widths.values())
        widths = dict.fromkeys(widths, model.hidden)
    into = [widths[etype[0]] for etype in facts.edges] or list(widths.values())
    # the number of classes is not known yet; decoders and readouts get a hidden layer's output
    last = model.hidden if config.tasks or task.of_edges or task.of_graphs else 1
    inputs = [sum(into), *[len(into) * model.hidden] * (model.depth - 1)]
    outputs = [*[model.hidden] * (model.depth - 1), last]
    return encoders + sum(width * out for width, out in zip(inputs, outputs, strict=True))


def _widths(config: Config, facts: PartitionFacts) -> dict[str, int]:
    model, widths = config.model, {}
    for ntype in facts.nodes:
        columns = facts.columns.get(ntype, {})
        named = [columns[name][0] for name in model.feature_names if columns.get(name)]
        width = sum(math.prod(column.shape) for column in named)
        width += sum(
            size for name, size in {**model.categories, **model.ages}.items() if name in columns
        )
        if model.embedding is not None and model.embedding.covers(ntype, bool(width)):
            width += model.embedding.dim
        widths[ntype] = width
    return widths


def _row_bytes(config: Config, facts: PartitionFacts) -> float:
    embedding = config.model.embedding
    if embedding is None:
        return 0.0
    inputs = {*config.model.node_arrays}
    rows = sum(
        number
        for ntype, number in facts.nodes.items()
        if embedding.covers(ntype, not inputs.isdisjoint(facts.columns.get(ntype, {})))
    )
    state = (2 if embedding.optimizer == "adam" else 1) if config.trains else 0
    return 4.0 * rows * embedding.dim * (1 + state)
