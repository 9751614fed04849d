"""The storage that all nodes of a job have to see at one place."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.clusters.facts import Cluster, Remark


def same_place(cluster: Cluster) -> Iterator[Remark]:
    """Storage that is mounted on one group of nodes and not on another, or elsewhere."""
    heads, workers = cluster.heads, cluster.workers
    if not heads or not workers or cluster.provider == "local":
        return  # on machines of one's own it is mounted beforehand
    (head,) = heads[:1]
    if not any(group.mounts for group in cluster.groups):
        what = "no storage is mounted that all nodes share; runs need one"
        remedy = "mount NFS or a claim that many pods write at the same path, such as /mnt/raygnn"
        yield Remark("storage", "info", cluster.base, what, remedy)
        return
    for worker in workers:
        for path in sorted({*head.mounts, *worker.mounts}):
            here, there = head.mounts.get(path), worker.mounts.get(path)
            if here == there:
                continue
            if here is None or there is None:
                missing = head.name if here is None else worker.name
                other = worker.name if here is None else head.name
                what = f"{path} is mounted on {other} and not on {missing}"
            else:
                what = f"{path} is {here} on {head.name}, and {there} on {worker.name}"
            remedy = "mount the same storage at the same path on all nodes"
            yield Remark("storage", "error", worker.key, what, remedy)
