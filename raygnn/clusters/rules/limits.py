"""What the system lets a Ray have: shared memory, open files; and an old Ray in its way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.clusters.facts import Cluster, Remark, section
from raygnn.config.units import size

SHM = 1 << 30  # bytes; of less, Ray puts its objects on a disk
_OPEN_FILES = re.compile(r"\bulimit\s+(-\S{1,20}\s+){0,9}-[SH]*n\b|--nofile\b|\bnofile=")
# Ray runs each command in a shell within the one that $$ is: its limits stay as they are
_OF_ANOTHER = re.compile(r"\bprlimit\b[^;&|]{0,80}\$\$[^;&|]*")


def shared_memory(cluster: Cluster) -> Iterator[Remark]:
    """A container whose /dev/shm is too small for Ray's objects."""
    docker = section(cluster.value.get("docker"))
    for group in cluster.groups:
        if not group.container:
            continue
        key = ("docker",) if cluster.kind == "ray up" else group.key
        by_hand = cluster.kind == "ray up" and docker.get("disable_shm_size_detection") is True
        asked = "--shm-size in docker.run_options"
        if cluster.kind != "ray up":
            asked = "an emptyDir of medium Memory, with a sizeLimit, on /dev/shm"
        if group.shm is None and by_hand:
            what = f"/dev/shm of {group.name} has docker's 64 MiB"
            yield Remark("shm", "error", key, what, f"ask for a third of the memory: {asked}")
        elif group.shm is None:
            what = f"/dev/shm of {group.name} is left to Ray's launcher"
            yield Remark("shm", "info", key, what, f"to say its size: {asked}")
        elif group.shm < SHM:
            what = f"/dev/shm of {group.name} is {size(group.shm)}: Ray's objects go to a disk"
            yield Remark("shm", "warn", key, what, f"ask for a third of the memory: {asked}")


def open_files(cluster: Cluster) -> Iterator[Remark]:
    """A Ray with the 1,024 open files that many systems begin with; KubeRay raises them itself."""
    if cluster.kind != "ray up":
        return
    options = " ".join(
        str(each) for each in section(cluster.value.get("docker")).get("run_options") or ()
    )
    for group in cluster.groups:
        if group.starts and not any(
            _OPEN_FILES.search(f"{_OF_ANOTHER.sub('', t.text)} {options}") for t in group.starts
        ):
            what = f"Ray of {group.name} may open as few files as the system begins with"
            remedy = "put `ulimit -n 65536;` before ray start"
            yield Remark("ulimit", "warn", group.starts[0].key, what, remedy)


def stopped_first(cluster: Cluster) -> Iterator[Remark]:
    """A start that finds the Ray of the last one."""
    if cluster.kind != "ray up":
        return
    for group in cluster.groups:
        stops = [i for i, t in enumerate(group.start) if re.search(r"\bray\s+stop\b", t.text)]
        starts = [i for i, t in enumerate(group.start) if t in group.starts]
        if starts and not (stops and stops[0] <= starts[0]):
            what = f"Ray of {group.name} is not stopped first: a second ray up fails"
            remedy = "make `ray stop` the first of the start commands"
            yield Remark("ray_stop", "warn", group.start[starts[0]].key, what, remedy)
