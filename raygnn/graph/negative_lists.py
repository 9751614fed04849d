"""Files of a task: negative edges, as nodes that replace the ends of each edge or as pairs of nodes
for all edges; and the rows of a training table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.config.schema import Config
from raygnn.config.task import LinkPrediction
from raygnn.errors import DataError
from raygnn.graph.arrays import index_type
from raygnn.graph.data import (
    SPLITS,
    TABLE,
    TRAINING,
    EdgeTarget,
    EdgeType,
    GraphData,
    NegativeLists,
    TrainingRows,
    etype_str,
    table_key,
)
from raygnn.graph.sources.input_files import check_fits_memory, sha256
from raygnn.graph.sources.npz_members import members
from raygnn.graph.tables.columns import first, refuse_nulls, to_numpy
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.reader import Chunk, TableReader, resolve, widened
from raygnn.graph.tables.training_rows import read_training_rows

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import PartitionMeta

_ENDS = ("source", "target")
_LISTS = {f"{end}_neg": end for end in _ENDS}
_REMEDY = "give source and target of each edge, and source_neg or target_neg: see docs/models.md"
_IDS = "use ids of nodes and relations in the graph"
_MOST_RELATIONS = 1 << 20


def lists_of(
    config: Config, target: EdgeTarget, counts: tuple[int, int], held: GraphData | PartitionMeta
) -> dict[str, NegativeLists]:
    """Read the negatives that a task's files list, for `TRAINING` and for each split. ``counts``:
    numbers of source and target nodes; ``held``: the graph or partition with the user's ids."""
    from raygnn.graph.partition.read import read_ids

    task, etype, found = config.task, target.etype, dict[str, NegativeLists]()
    if not isinstance(task, LinkPrediction):
        return found
    to_train = task.negatives.file if config.trains else None
    for uses, file in ((SPLITS, task.ranking.file), ((TRAINING,), to_train)):
        if file is not None:
            of: Any = held.ids.get if isinstance(held, GraphData) else partial(read_ids, held)
            ids = {ntype: of(ntype) for ntype in etype[::2]}
            words = held.names.get(f"{etype_str(etype)}/{target.relation}", [])
            lists = read_lists(file, etype, counts, ids, words if target.relation else None)
            found |= dict.fromkeys(uses, lists)
    return found


def rows_of(config: Config, name: str, ids: Any, count: int) -> dict[str, TrainingRows]:
    """Read the training table of a task ``name``, see `read_training_rows`; no rows if the job does
    not need them."""
    words = config.words.get(table_key(name))
    if not config.reads_rows(name):
        none = np.zeros(0, np.int64), None, np.zeros(0, np.int8), None
        return {TABLE: TrainingRows(*none, list(words or ()), False, "")}
    key = f"tasks.{name}.table" if name else "task.table"
    return {TABLE: read_training_rows(config, ids, count, words, key)}


def read_lists(
    file: Path,
    etype: EdgeType,
    counts: tuple[int, int],
    ids: Mapping[str, Any],
    relations: Sequence[Any] | None,
) -> NegativeLists:
    """Read the lists in an .npz, Parquet or CSV file.

    It has arrays or columns ``source``, ``target`` and, if edges have one, ``relation``; and
    ``source_neg`` or ``target_neg`` or both, with a node or a list of nodes per row. Rows of one
    edge form one list. Without either, the rows are ``pairs``.

    Args:
        ids: node type → pyarrow array of the user's ids; None = numbers.
        relations: names of the relations, empty = numbers; None = edges have none.
    """
    known = {
        end: Ids(ntype, ids.get(ntype), _IDS, count)
        for end, ntype, count in zip(_ENDS, etype[::2], counts)
    }
    if relations is not None:
        words = widened(pa.array(relations)) if relations else None
        known["relation"] = Ids("relation", words, _IDS, _MOST_RELATIONS)
    keys = list(known)
    known |= {name: known[end] for name, end in _LISTS.items()}
    found: dict[str, list[np.ndarray]] = {name: [np.empty(0, np.int64)] for name in keys}
    places: dict[str, list[np.ndarray]] = {}
    for chunk in _chunks(file, keys):
        for name in chunk.columns:
            flat = _flat(chunk, name) if name in _LISTS else chunk
            if isinstance(flat, _Flat):
                places.setdefault(name, []).append(flat.rows + chunk.first)
            if flat.num:
                nodes = known[name].lookup(flat, name, known[name].ends(flat, name))
                found.setdefault(name, []).append(nodes)
    columns = {name: np.concatenate(parts) for name, parts in found.items()}
    rows, digest = np.stack([columns[name] for name in keys], axis=1), sha256(file)
    if not len(rows):
        raise DataError("the file has no rows", where=str(file), remedy=_REMEDY)
    if not places:
        pairs = np.ascontiguousarray(rows[:, :2].T)
        return NegativeLists(str(file), None, None, {}, pairs, np.arange(len(rows)), digest)
    edges, firsts, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    ends, others = np.ascontiguousarray(edges[:, :2].T), dict[str, np.ndarray]()
    relation = edges[:, 2] if relations is not None else None
    lists = NegativeLists(str(file), ends, relation, others, None, firsts, digest)
    for name, parts in places.items():
        at, nodes = number.reshape(-1)[np.concatenate(parts)], columns.get(name, rows[:0, 0])
        own = ends[_ENDS.index(_LISTS[name])]
        if (same := nodes == own[at]).any():
            row = int(at[first(same)])
            raise lists.error(f"{name} has the edge itself", "leave it out", row)
        others[_LISTS[name]] = _padded(own, at, nodes, str(file))
    return lists


def _padded(own: np.ndarray, at: np.ndarray, nodes: np.ndarray, where: str) -> np.ndarray:
    """Build ``[P, K]``: nodes of each of P lists (``at``: their lists), padded with ``own``."""
    counts = np.bincount(at, minlength=len(own))
    width, dtype = int(counts.max()), index_type(int(max(own.max(), nodes.max(initial=0))))
    check_fits_memory(len(own) * width * dtype().itemsize, f"{len(own)} lists of {width}", where)
    table = np.repeat(own.astype(dtype)[:, None], width, axis=1)
    table[np.arange(width) < counts[:, None]] = nodes[np.argsort(at, kind="stable")]
    return table


@dataclass(frozen=True)
class _Flat(Chunk):
    """Concatenated lists of a column, and the row of each element."""

    rows: np.ndarray

    def error(self, row: int, column: str, message: str, remedy: str) -> DataError:
        return super().error(int(self.rows[row]), column, message, remedy)


def _flat(chunk: Chunk, name: str) -> _Flat:
    values = refuse_nulls(chunk, name, "give each edge a list, which may be empty")
    lengths = np.ones(len(values), np.int64)
    if hasattr(values.type, "value_type"):
        lengths, values = to_numpy(pc.list_value_length(values)), widened(values.flatten())
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return _Flat(chunk.reader, {name: values}, chunk.first, chunk.csv, rows)


def _chunks(file: Path, keys: list[str]) -> Iterator[Chunk]:
    """Yield the columns ``keys``, and the existing columns of lists."""
    if file.suffix != ".npz":
        files = resolve(file.parent, [file.name])
        there = TableReader(files, []).names(files[0])
        yield from TableReader(files, [*keys, *(n for n in _LISTS if n in there)]).chunks()
        return
    columns: dict[str, pa.Array] = {}
    for name, member in members(file, keys, _REMEDY, tuple(_LISTS)).items():
        array = member.read()
        rows = len(next(iter(columns.values()), array))
        if array.ndim not in (1, 2) or not array.size or len(array) != rows:
            raise DataError(f"its shape is {array.shape}", where=member.origin, remedy=_REMEDY)
        flat = pa.array(array.reshape(-1))
        if array.ndim == 2:
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, array.shape[1])
        else:
            columns[name] = widened(flat)
    reader = TableReader([file], keys)
    reader.starts.append(0)
    yield Chunk(reader, columns, 0, False)
