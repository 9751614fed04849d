"""The files that `ray up` carries."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.clusters.facts import Cluster, Remark
from raygnn.config.units import size

CARRIED = 100 << 20  # bytes


def missing(cluster: Cluster) -> Iterator[Remark]:
    """What is not there."""
    for file in cluster.files:
        if not file.exists:
            what = f"there is no {file.local} here, and ray up fails of it"
            remedy = "run this where `ray up` will be run, which relative paths go from"
            if file.remote.endswith("auth_token"):
                remedy = "make it: ray get-auth-token --generate"
            yield Remark("file_mounts", "error", file.key, what, remedy)


def heavy(cluster: Cluster) -> Iterator[Remark]:
    """What is large, or carries a repository with it."""
    for file in cluster.files:
        if file.size > CARRIED:
            what = f"{file.local} has more than {size(CARRIED)}, copied to every node"
            remedy = "keep data on the shared storage; leave out what is not needed: rsync_exclude"
            yield Remark("file_mounts", "warn", file.key, what, remedy)
        if file.git:
            what = f"{file.local} carries its .git to every node"
            yield Remark("file_mounts", "warn", file.key, what, "add .git to rsync_exclude")


def readable_token(cluster: Cluster) -> Iterator[Remark]:
    """A token that other users of this machine can read, and so on every node."""
    for file in cluster.files:
        if file.exists and file.remote.endswith("auth_token") and file.mode & 0o077:
            what = f"{file.local} has mode {file.mode:o}: others can read the token"
            yield Remark("token", "warn", file.key, what, f"chmod 600 {file.local}")
