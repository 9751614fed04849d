"""Build partitions, from a graph in memory or out of core.

Out of core, files of the stages are written to a hidden directory beside the partition, which is
renamed into place when it is complete. An attempt that fails or is killed leaves its stages, and
the next one resumes after the last finished task.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from raygnn.config.graph import GraphConfig
from raygnn.errors import DataError
from raygnn.graph.arrays import IntArray
from raygnn.graph.data import GraphData
from raygnn.graph.outofcore.disk_graph import DiskArray, DiskGraph, spill
from raygnn.graph.outofcore.graph_stages import read_graph
from raygnn.graph.outofcore.workspace import Pool, Workspace, on_threads
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.make import Missing, same_partition
from raygnn.graph.partition.stream import assign
from raygnn.graph.partition.write import check_storable, write_partition
from raygnn.util.files import is_vacant, new_directory, publish, storage_errors
from raygnn.util.locks import Lock

_INSTEAD = "set storage or partition.path elsewhere"


def make_partition(
    missing: Missing, data: GraphData, progress: Callable[[str], object] | None = None
) -> PartitionMeta:
    """Build a partition from the loaded graph, in DGL's distributed layout.

    Args:
        missing: the partition to build. If its ``draft`` has a partition of the same digest, this
            is returned. With more parts than nodes, some parts are empty.
        data: result of :func:`raygnn.graph.sources.load_graph`, with ids in range.
        progress: called with the method, passes such as ``"stream, pass 3 of at most 12"``, and the
            progress of stages; see `Workspace`.
    """
    place, method, notify = (
        missing.draft.absolute(),
        missing.method,
        progress or (lambda text: None),
    )
    if not is_vacant(place):
        return same_partition(place, missing.digest)
    check_storable(data)
    with storage_errors(place, DataError, _INSTEAD), new_directory(place) as directory:
        (directory / "stages").mkdir()
        work = Workspace(directory / "stages", on_threads, notify)
        graph = spill(data, work.directory("edges"), only_edges=True)
        notify(method)
        started = time.perf_counter()
        how = graph.in_one_space, missing.parts, method, missing.seed, work.directory("lists")
        assigned = assign(data, *how, lambda done: notify(f"{method}, {done}"))
        work.seconds[method] = time.perf_counter() - started
        write_partition(graph, data, assigned, missing, work, directory)
        shutil.rmtree(work.path)
        if not publish(directory, place):
            return same_partition(place, missing.digest)
    return missing.upload(read_meta(place), progress)


def partition_out_of_core(
    missing: Missing,
    config: GraphConfig,
    pool: Pool,
    notify: Callable[[str], object],
    needs_masks: bool = True,
    trains: bool = True,
) -> PartitionMeta:
    """Read a graph and build its partition, with edges and features on disk.

    Args:
        pool: runs the tasks; all its machines see the partition's directory and the input.
        notify: called with the progress; see `Workspace`.
        needs_masks, trains: see `raygnn.graph.sources.check`.
    """
    place, stages = missing.draft.absolute(), missing.stages
    if not is_vacant(place):
        shutil.rmtree(stages, ignore_errors=True)  # of an attempt killed after it published
        return same_partition(place, missing.digest)
    with storage_errors(place, DataError, _INSTEAD):
        stages.mkdir(parents=True, exist_ok=True)
        lock = Lock(stages / "lock", "makes this partition")
        lock.acquire()
        try:
            work = Workspace(stages, pool, notify)
            graph = read_graph(config, work, needs_masks=needs_masks, trains=trains)
            directory = work.directory("partition")
            check_storable(graph.data())
            assigned = _assigned(missing, graph, work)
            write_partition(graph, None, assigned, missing, work, directory)
            published = publish(directory, place)
            shutil.rmtree(work.path, ignore_errors=True)
        finally:
            lock.release()
    return read_meta(place) if published else same_partition(place, missing.digest)


def _assigned(missing: Missing, graph: DiskGraph, work: Workspace) -> dict[str, IntArray]:
    """Return the part of every node, by type; kept on disk, so that a resumed attempt reuses it."""
    path = work.directory("assign")
    num = graph.num_nodes
    arrays = {
        t: DiskArray(path / str(at), "int32", rows=n) for at, (t, n) in enumerate(num.items())
    }
    how = missing.parts, missing.method, missing.seed, path
    task = (replace(graph, others={}), list(arrays.values()), *how)
    work.run("assign", _assign, [task], [sum(num.values())])
    return {ntype: array.map() for ntype, array in arrays.items()}


def _assign(
    graph: DiskGraph,
    arrays: Sequence[DiskArray],
    parts: int,
    method: str,
    seed: int,
    scratch: Path,
) -> None:
    parted = assign(graph.data(), graph.in_one_space, parts, method, seed, scratch)
    for array, part in zip(arrays, parted.values(), strict=True):
        array.write(part)
