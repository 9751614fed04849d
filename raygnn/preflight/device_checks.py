"""Checks of the devices, and of the model on one: that they can do what is asked."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job
from raygnn.preflight.node_checks import supported

# torch that fully shards: on CPUs, whose mean of gradients it once took for a sum, and on GPUs
OLDEST_ON_CPU, OLDEST_ON_GPU = "2.9", "2.6"

_BF16 = (8, 0)  # compute capability


def devices_suit(job: Job) -> Iterator[Finding]:
    """Precision, backend, sharding and torch's build suit the CPUs or GPUs that there are."""
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
        nodes = [n.node for n in job.holding if (n.versions.get("torch") or "").endswith("+cpu")]
        if nodes:
            yield Finding(
                "devices_suit",
                "error",
                f"cluster.gpus_per_worker is {gpus}, but torch is a build without CUDA",
                "install a CUDA build of torch there",
                nodes=tuple(nodes),
            )
    yield from _sharding_suits(job)
    yield from _dgl_suits(job)


def _sharding_suits(job: Job) -> Iterator[Finding]:
    if job.config.comm.shard != "full" or job.workers == 1:
        return
    gpus = job.config.cluster.gpus_per_worker
    oldest = OLDEST_ON_GPU if gpus else OLDEST_ON_CPU
    found = {n.node: n.versions.get("torch") for n in job.holding}
    old = {node: version for node, version in found.items() if not supported(version, oldest, None)}
    if old:
        yield Finding(
            "devices_suit",
            "error",
            f"comm.shard full needs torch >= {oldest} on {'GPUs' if gpus else 'CPUs'}, and there "
            f"is {', '.join(sorted({version or 'none' for version in old.values()}))}",
            "install a newer torch there, or set comm.shard to optimizer",
            nodes=tuple(old),
        )


def _dgl_suits(job: Job) -> Iterator[Finding]:
    """A class of the user's may be built of dgl.nn, which goes only where DGL's kernels go."""
    config, own = job.config, ":" in job.config.model.kind
    builds = {n.node: n.versions.get("dgl") or "" for n in job.holding}
    without = tuple(node for node, version in builds.items() if "+cu" not in version)
    if own and config.cluster.gpus_per_worker and without:
        yield Finding(
            "devices_suit",
            "warn",
            f"DGL is a build for CPUs: if {config.model.kind} uses dgl.nn, it cannot run on GPUs",
            "build it of raygnn.models or plain torch, or set cluster.gpus_per_worker to 0",
            nodes=without,
        )
    if own and config.precision == "bf16-mixed" and not config.cluster.gpus_per_worker:
        yield Finding(
            "devices_suit",
            "warn",
            f"precision bf16-mixed on CPUs: if {config.model.kind} uses attention layers of dgl.nn "
            "(GATConv), they meet bf16 and fp32 at once and fail",
            "set precision to bf16 or fp32",
        )


def bf16_is_there(job: Job) -> Iterator[Finding]:
    """The processors or GPUs can compute in bf16, where `precision` says so."""
    if job.config.precision not in ("bf16", "bf16-mixed"):
        return
    if not job.config.cluster.gpus_per_worker:
        slow = tuple(
            n.node for n in job.holding if not {"avx512_bf16", "amx_bf16"} & {*n.cpu_flags}
        )
        if slow:
            yield Finding(
                "bf16_is_there",
                "info",
                "the processor has no bf16 instructions: products are computed in fp32, so that "
                "bf16 saves memory and bytes, and little time",
                nodes=slow,
            )
        return
    for node in job.holding:
        old = sorted({gpu.model for gpu in node.gpus if gpu.capability and gpu.capability < _BF16})
        if old:
            yield Finding(
                "bf16_is_there",
                "warn",
                f"{', '.join(old)} cannot compute in bf16 (compute capability below 8.0)",
                "set precision to fp16-mixed or fp32",
                nodes=(node.node,),
            )


def gpus_are_there(job: Job) -> Iterator[Finding]:
    """There are as many GPUs as Ray was told of, and none twice: two ranks on one hang in NCCL."""
    if not job.config.cluster.gpus_per_worker:
        return
    facts = {node.node: node for node in job.nodes}
    for resources in job.resources.nodes:
        there = len(facts[resources.node].gpus) if resources.node in facts else None
        if there is not None and resources.gpus > there:
            yield Finding(
                "gpus_are_there",
                "error",
                f"Ray was told of {resources.gpus:g} GPUs, the machine has {there}: ranks would "
                "share one",
                "start Ray there without --num-gpus, or with the real number",
                nodes=(resources.node,),
            )
    owners: dict[str, list[str]] = {}
    for node in job.holding:
        for gpu in node.gpus:
            if gpu.uuid:
                owners.setdefault(gpu.uuid, []).append(node.node)
    for uuid, nodes in owners.items():
        if len(nodes) > 1:
            yield Finding(
                "gpus_are_there",
                "error",
                f"GPU {uuid} is given away more than once: two ranks would be on one GPU",
                "start one Ray node per machine, or give each its own CUDA_VISIBLE_DEVICES",
                nodes=tuple(nodes),
            )


def gpus_are_free(job: Job) -> Iterator[Finding]:
    """No other process uses the GPUs."""
    if not job.config.cluster.gpus_per_worker:
        return
    for node in job.holding:
        busy = {pid for gpu in node.gpus for pid in gpu.processes}
        if busy:
            yield Finding(
                "gpus_are_free",
                "warn",
                f"other processes use its GPUs: {', '.join(map(str, sorted(busy)[:5]))}",
                "end them, or expect less memory and speed",
                nodes=(node.node,),
            )


def model_runs(job: Job) -> Iterator[Finding]:
    """A model of your own takes one batch forward and backward, on the CPU of the machine where
    the command runs: blocks, features and seeds of a small random graph that is like yours."""
    if job.dry_run is not None and job.dry_run.severity is not None:
        yield Finding("model_runs", job.dry_run.severity, job.dry_run.what, job.dry_run.remedy)
