"""The stages of a partition that is made out of core, one after the other.

They lie in a hidden directory beside the partition's place, and only a partition that is whole is
renamed into that place. A try that fails or is ended leaves its stages there, and the next one
goes on after the last task that was finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import IntArray
from raygnn.graph.outofcore.disk_arrays import DiskArray, store
from raygnn.graph.outofcore.disk_assembly import DiskAssembly
from raygnn.graph.outofcore.disk_graph import DiskGraph, Figures
from raygnn.graph.outofcore.edge_shuffle import Shuffled, StoredNumbering, shuffle
from raygnn.graph.outofcore.graph_stages import read_graph
from raygnn.graph.outofcore.workspace import Pool, Workspace, stages_of
from raygnn.graph.partition.assemble import Numbering
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.make import Missing, finish, same_partition
from raygnn.graph.partition.metis import assign
from raygnn.graph.partition.write import (
    WrittenPart,
    check_storable,
    write_description,
    write_part,
)
from raygnn.util.files import is_vacant, publish, storage_errors
from raygnn.util.locks import Lock


def partition_out_of_core(
    missing: Missing,
    pool: Pool,
    tell: Callable[[str], object],
    *,
    needs_masks: bool = True,
    trains: bool = True,
) -> PartitionMeta:
    """Make a partition, with what grows with the edges on disk.

    Args:
        pool: runs the tasks; every machine that it has sees the partition's place and the input.
        tell: called with what is done; see `Workspace`.
        needs_masks, trains: as of :func:`raygnn.graph.sources.load_graph`.

    Raises:
        ConfigError, DataError: as reading the graph and :func:`partition_graph` raise them. What
            is finished stays in `stages_of`, and is not done again.
    """
    place = missing.draft.absolute()
    if not is_vacant(place):
        shutil.rmtree(stages_of(missing), ignore_errors=True)  # of a try that ended at its end
        return same_partition(place, missing.digest)
    with storage_errors(place, DataError, "set storage or partition.path elsewhere"):
        stages = stages_of(missing)
        stages.mkdir(parents=True, exist_ok=True)
        lock = Lock(stages / "lock", "makes this partition")
        lock.acquire()
        try:
            work = Workspace(stages, pool, tell)
            return _partition(missing, work, needs_masks=needs_masks, trains=trains)
        finally:
            lock.release()


def _partition(
    missing: Missing, work: Workspace, *, needs_masks: bool, trains: bool
) -> PartitionMeta:
    graph = read_graph(missing.graph, work, needs_masks=needs_masks, trains=trains)
    data = graph.data()
    check_storable(data)
    numbering = Numbering.from_assignment(_assigned(missing, graph, work), missing.parts)
    stored = StoredNumbering.from_numbering(numbering, work.directory("numbering"))
    shuffled = shuffle(graph, numbering, stored, work)
    directory = work.directory("partition")
    tasks = [(graph.figures, stored, shuffled, part, directory) for part in range(missing.parts)]
    sizes = [sum(e.bucket.edges for e in shuffled.edges if e.bucket.part == t[3]) for t in tasks]
    results = work.run("write", _write, tasks, sizes)
    assembly = DiskAssembly(data, numbering, shuffled)
    written = [WrittenPart.model_validate(result) for result in results]
    manifest = write_description(data, assembly, directory, missing.method, written)
    finish(manifest, directory, missing.digest, missing.source, work.seconds)
    place = missing.draft.absolute()
    published = publish(directory, place)
    shutil.rmtree(work.path, ignore_errors=True)
    return read_meta(place) if published else same_partition(place, missing.digest)


def _assigned(missing: Missing, graph: DiskGraph, work: Workspace) -> dict[str, IntArray]:
    """Part of every node, by node type; kept, so that the stages after it go on with the same."""
    path = work.directory("assign")
    num = graph.figures.num_nodes
    arrays = {
        t: DiskArray(path / str(at), "int32", rows=n) for at, (t, n) in enumerate(num.items())
    }
    where = missing.parts, missing.method, missing.seed
    task = (replace(graph, others={}), *where, list(arrays.values()))
    work.run("assign", _assign, [task], [sum(num.values())])
    return {ntype: array.map() for ntype, array in arrays.items()}


def _assign(
    graph: DiskGraph, parts: int, method: str, seed: int, arrays: Sequence[DiskArray]
) -> None:
    parted = assign(graph.data(), parts, method, seed, passes=graph.in_one_space)
    for array, part in zip(arrays, parted.values(), strict=True):
        store(array.path, part.astype(np.int32))


def _write(
    figures: Figures, stored: StoredNumbering, shuffled: Shuffled, part: int, directory: Path
) -> dict[str, Any]:
    assembly = DiskAssembly(figures.data(), stored.mapped(), shuffled)
    return write_part(assembly, part, directory).model_dump()
