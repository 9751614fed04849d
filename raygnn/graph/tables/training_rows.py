"""Training tables: each row is a seed, with an entity, a time and a target.

Source: Robinson et al., RelBench: A Benchmark for Deep Learning on Relational Databases, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raygnn.config.schema import Config
from raygnn.config.task import NodeTaskConfig, TrainingTable
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import SPLITS, TrainingRows
from raygnn.graph.sources.input_files import sha256
from raygnn.graph.tables.columns import Times, first, split_codes
from raygnn.graph.tables.databases import selected
from raygnn.graph.tables.description import LabelKind, Table
from raygnn.graph.tables.frames import FitTo, TableArrays, unknown
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.reader import TableReader, resolve, unchanged
from raygnn.graph.times import codes_since, since
from raygnn.storage.remote import AnyPath

_TARGET = "target"
_REMEDY = "use ids of nodes in the graph, or remove the row"


def read_training_rows(
    config: Config,
    ids: Any,
    count: int,
    vocabulary: Sequence[Any] | None = None,
    key: str = "task.table",
) -> TrainingRows:
    """Read the training table of a node task.

    Args:
        config: configuration with this task only.
        ids: pyarrow array of the node ids of ``task.ntype``; None = nodes are numbered.
        count: number of nodes of the type.
        vocabulary: classes 0, 1, …; None = the sorted classes of the table.
        key: the table's key in the configuration.

    Raises:
        DataError: with file, row and column, if the table is empty, has unknown nodes, or its split
            does not fit its times or targets.
    """
    table, graph = config.table, config.graph
    assert table is not None
    if table.sql is None:
        with unchanged(lambda: _files(table)[0]):
            return _read(config, table, ids, count, vocabulary)
    assert graph is not None
    with selected(graph, table.sql, table.url, key) as result:
        rows = table.model_copy(update={"files": result, "sql": None})
        return _read(config, rows, ids, count, vocabulary)


def _read(
    config: Config, table: TrainingTable, ids: Any, count: int, vocabulary: Sequence[Any] | None
) -> TrainingRows:
    task = config.task
    assert isinstance(task, NodeTaskConfig)
    ntype = str(task.ntype)
    files, firsts = _files(table)
    known = Ids(ntype, ids, _REMEDY, count)
    kind: LabelKind = "class" if task.classifies else "multi" if task.several_labels else "number"
    wanted = [table.target] if isinstance(table.target, str) else table.target
    label = {_TARGET: {"column": table.target, "kind": kind}}
    if not config.trains and not {*wanted} <= {*TableReader(files, []).names(files[0])}:
        label = {}
    described = Table.model_validate({"labels": label})
    arrays = TableArrays(described, {} if vocabulary is None else {_TARGET: vocabulary})
    arrays.fit(_TARGET, files, FitTo(), Path())
    times_of = Times(str(table.time))
    columns = [table.entity, table.time, table.split, *arrays.columns]
    reader = TableReader(files, [column for column in columns if column is not None])
    entities, times, splits, targets = list[Any](), list[Any](), list[Any](), list[Any]()
    for chunk in reader.chunks():
        entities.append(known.ends(chunk, table.entity))
        if table.time is not None:
            times.append(times_of.rows(chunk))
        if table.split is not None:
            splits.append(split_codes(chunk, table.split, None))
        targets += arrays.rows(chunk, chunk.first).values()
    if not reader.num:
        raise DataError("the table has no rows", where=str(files[0]), remedy="add rows")
    nodes = known.lookup(reader, table.entity, pa.chunked_array(entities))
    when = np.concatenate(times) if times else None
    target = np.concatenate(targets) if targets else None
    has_target = np.zeros(reader.num, bool) if target is None else ~unknown(kind, target)
    if firsts:
        starts = np.array([reader.starts[first] for first in firsts.values()])
        places = np.searchsorted(starts, np.arange(reader.num), side="right") - 1
        split = np.array([SPLITS.index(name) for name in firsts], np.int8)[places]
    elif splits:
        split = np.concatenate(splits)
    elif task.split is not None and when is not None:
        split = codes_since(when, since(when[has_target], task.split.val, task.split.test))
    else:
        split = np.full(reader.num, -1, np.int8)
    if config.trains:
        _check_splits(reader, split, when, has_target, table.time, wanted[0])
    digest, explicit = "".join(map(sha256, files)), times_of.in_microseconds
    words = arrays.names.get(_TARGET, list(vocabulary or ()))
    return TrainingRows(nodes, when, split, target, words, explicit, digest)


def _check_splits(
    reader: TableReader,
    split: Array,
    when: Array | None,
    has_target: Array,
    time: str | None,
    target: str,
) -> None:
    """Raise DataError unless there are training rows, all have a target, and none is later than a
    row of validation or test. ``time``, ``target``: their columns."""
    if not (split == 0).any():
        remedy, where = "assign rows to train", str(reader.files[0])
        raise DataError("there are no training rows", where=where, remedy=remedy)
    if (bad := (split == 0) & ~has_target).any():
        remedy = "add a target, or remove the row from train"
        raise reader.error(first(bad), target, "a training row has no target", remedy)
    if when is not None:
        latest = when[split == 0].max()
        if (bad := (split > 0) & (when < latest)).any():
            row = first(bad)
            message = f"the row is in {SPLITS[split[row]]}, and earlier than a training row"
            remedy = "split the rows by time; otherwise the model is tested on times it trained on"
            raise reader.error(row, str(time), message, remedy)


def _files(table: TrainingTable) -> tuple[list[AnyPath], dict[str, int]]:
    """Return the files, and for tables with files by split, split → index of its first file."""
    here, remedy = Path(), "correct files of the training table: relative to the job's file"
    if not isinstance(table.files, dict):
        return resolve(here, str(table.files), remedy), {}
    files: list[AnyPath] = []
    firsts: dict[str, int] = {}
    for split, pattern in table.files.items():
        firsts[split] = len(files)
        files += resolve(here, str(pattern), remedy)
    return files, firsts
