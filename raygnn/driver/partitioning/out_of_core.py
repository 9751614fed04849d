"""Out-of-core partitioning on Ray: the decision for it, and the check that it fits."""

from __future__ import annotations

import shutil
from pathlib import Path

from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.driver.partitioning.ray_tasks import RayTasks
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import PreflightError
from raygnn.graph.available_memory import check_available, memory
from raygnn.graph.outofcore.estimate import Needs, needs, size_of
from raygnn.graph.outofcore.workspace import stages_of
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.preflight import machine
from raygnn.runs.display import Display

SHARE = 0.7  # of the available memory, for partitioning in memory with engine: auto


def is_out_of_core(config: Config, missing: Missing) -> bool:
    """Return True to build the partition out of core: as configured, or with ``auto`` if the graph
    is tables or archives that do not fit into a share of this machine's memory. Raises ConfigError,
    DataError if the description of the tables is wrong, or a file is missing."""
    if (engine := config.partition.engine) != "auto":
        return engine == "ray"
    if "memory_fits" in config.cluster.allow or (size := size_of(missing.graph)) is None:
        return False
    return size.in_memory > SHARE * memory()[1]


def make_out_of_core(
    config: Config, missing: Missing, cluster: RayCluster, show: Display, *, only_look: bool = False
) -> PartitionMeta | None:
    """Build the partition on Ray, as a stage; by ``stream`` in place of METIS, which needs the
    complete graph in memory.

    Args:
        only_look: only check that it would fit.

    Returns:
        The partition; None if there is none with ``only_look``.

    Raises:
        InputError: the graph is bad, or cannot be written.
        PreflightError: memory or disk are too small, or there is no Ray.
    """
    if missing.method == "metis":
        partition = config.partition.model_copy(update={"method": "stream"})
        config = config.model_copy(update={"partition": partition})
        found = find_partition(config, missing.parts)
        if isinstance(found, PartitionMeta):
            return found
        show.note("METIS holds the whole graph in memory; partition.method: stream does not")
        missing = found
    tasks = config.cluster.num_cpus or machine.cpus() if cluster.local else 1
    if (graph_size := size_of(missing.graph)) is not None:
        expected = needs(graph_size, missing.parts, tasks, missing.method)
        _check(config, missing, expected)
        show.note(
            f"partitioning out of core: about {size(expected.memory)} of memory on each node, "
            f"{size(expected.disk)} of disk at {missing.draft.parent}, "
            f"{expected.seconds // 60 + 1} min"
        )
    if config.store is not None and not cluster.local:
        raise PreflightError(
            "out of core the nodes of a cluster make a partition in a directory that all see, and "
            "storage is none",
            where=str(missing.place),
            remedy="make it on one machine, which brings it there: raygnn partition CONFIG "
            "--set cluster.address=local",
        )
    if only_look:
        return None
    with show.stage("Ray"):
        cluster.wait()
    # imported late: it loads torch, which reports of bad input need not wait for
    from raygnn.graph.outofcore.divide import partition_out_of_core

    with show.stage("partition") as tell:
        masks, trains = config.needs_masks, config.trains
        try:
            made = partition_out_of_core(
                missing, RayTasks(cluster), tell, needs_masks=masks, trains=trains
            )
        except BaseException:
            if (stages := stages_of(missing)).exists():
                show.note(
                    f"what was done so far is kept in {stages}, and the next attempt resumes "
                    "from it; delete it if there will be none, or if the input or partition changes"
                )
            raise
        return missing.upload(made, tell)


def _check(config: Config, missing: Missing, expected: Needs) -> None:
    """Raise PreflightError unless memory and disk suffice."""
    check_available(config, "partitioning the graph out of core", expected.memory)
    place = next(path for path in missing.draft.absolute().parents if path.exists())
    free = shutil.disk_usage(place).free + _held(stages_of(missing))
    if free < expected.disk and "disk_space" not in config.cluster.allow:
        raise PreflightError(
            f"partitioning the graph out of core takes about {size(expected.disk)} of disk, and "
            f"{size(free)} are free there [disk_space]",
            where=str(place),
            remedy="free space, or set storage or partition.path to a larger disk; "
            "cluster.allow: [disk_space] tries it all the same",
        )


def _held(stages: Path) -> int:
    """Return the bytes that the stages of an earlier attempt have written."""
    return sum(path.stat().st_size for path in stages.rglob("*") if path.is_file())
