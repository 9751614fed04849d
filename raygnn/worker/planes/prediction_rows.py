"""Requested ids, and rows of predictions, as Parquet in chunks.

Columns: ``node``, ``edge``, ``graph`` or ``row``, the original id, int64; for rows of a training
table also ``node`` and ``time``; for edges also ``source``, ``target``, ``relation`` and ``time``,
if they have any; ``prediction``, ``split``, ``label``.
Classification adds ``probability`` and, if requested, ``scores``. Link prediction has ``score`` and
``split`` alone. Multi-label classification has ``probability_0`` and ``label_0``, and so on, in
place of ``prediction`` and ``label``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from raygnn.errors import InputError
from raygnn.graph.partition.read import read_ids
from raygnn.graph.staging.shard import Shard
from raygnn.tasks.calibration import Calibration
from raygnn.util.files import replacing, storage_errors
from raygnn.worker.job import SPLITS, Job, Request

NO_SPLIT = -1

_NAMES = 1 << 20  # names that are searched at once
_REMEDY = "provide ids of the graph: numbers from 0, or the names of the nodes in tables"


def read_wanted(file: Path, key: str) -> Any:
    """Read the ids in a file to a pyarrow array: one per line, or a column of a Parquet file.
    ``key``: name of the column, if there are several: ``node`` or ``graph``, as in the files of
    `raygnn.predict`. Raises InputError if the file cannot be read, or has no ids."""
    with storage_errors(file, InputError, "check that it exists and is readable"):
        if not file.is_file():
            raise InputError("there is no such file", where=str(file), remedy="name a file of ids")
        values = _column(file, key) if file.suffix == ".parquet" else _lines(file)
    if not len(values):
        raise InputError("the file contains no ids", where=str(file), remedy=_REMEDY)
    return values


def numbers_of(wanted: Any, names: Any, count: int, option: str = "--ids") -> np.ndarray:
    """Return the unique numbers of the wanted nodes or graphs, int64, ascending.

    Args:
        wanted: from `read_wanted`.
        names: pyarrow array ``[count]`` of the user's names; None = they are numbers.
        count: number of nodes or graphs.
        option: that names the list.

    Raises:
        InputError: one does not exist; it is named with its position in the list.
    """
    if names is None:
        found = pc.cast(_as(wanted, pa.int64(), option), pa.int64())
        there = pc.and_(pc.greater_equal(found, 0), pc.less(found, count))
        found = pc.if_else(there, found, None)
    else:
        wanted = _as(wanted, names.type, option)
        # scan all names, since an index of them would take far more memory
        starts = range(0, count, _NAMES)
        there = (pc.is_in(names.slice(start, _NAMES), value_set=wanted) for start in starts)
        places = [np.flatnonzero(mask) + start for mask, start in zip(there, starts)]
        numbers = pa.array(np.concatenate([np.empty(0, np.int64), *places]))
        found = numbers.take(pc.index_in(wanted, value_set=names.take(numbers)))
    if found.null_count:
        at = int(np.argmax(found.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(
            f"there is no {wanted[at].as_py()!r} among the {count:,} of this graph; it is number "
            f"{at + 1} of the list",
            where=option,
            remedy=_REMEDY,
        )
    return np.unique(found.to_numpy(zero_copy_only=False).astype(np.int64))


def relation_of(asked: str | None, array: str | None, words: Sequence[Any], count: int) -> int:
    """Return the number of the relation that lists are requested for.

    Args:
        asked: see `TopLists`.
        array: edge array of relations; None = the edges have none.
        words: names of relations; empty = they are numbers.
        count: number of relations.

    Raises:
        InputError: there is no such relation, or none of several is named.
    """
    known = [str(word) for word in words or range(count)]
    if array is not None and asked in known:
        return known.index(asked)
    if asked is None and count == 1:
        return 0
    what, where = f"there is no relation {asked!r}", f"--relation {asked}"
    remedy = f"choose one of {', '.join(known[:20])}"
    if array is None:
        what, remedy = "the edges have no relations", "leave --relation out"
    elif asked is None:
        what, where = "the edges have several relations", "--relation"
    raise InputError(what, where=where, remedy=remedy)


def check_array(name: str, ntype: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise InputError unless the array of candidates has one number per node."""
    there = [array for array, shape in shapes.items() if np.prod(shape) == 1]
    if name not in there:
        message = f"node type {ntype!r} has no array {name!r} of a number for each node"
        remedy = f"name a file of ids, or one of the arrays: {', '.join(there) or 'none'}"
        raise InputError(message, where="--candidates", remedy=remedy)


def _column(file: Path, key: str) -> Any:
    try:
        with pq.ParquetFile(file) as source:
            names = source.schema_arrow.names
            name = names[0] if len(names) == 1 else key
            if name not in names:
                message = f"there is no column {key!r}; there are: {', '.join(names)}"
                remedy = f"call it {key}, or leave only one column"
                raise InputError(message, where=str(file), remedy=remedy)
            values = source.read([name]).column(name).combine_chunks()
            if values.null_count:
                row = pc.index(values.is_null(), True).as_py() + 1
                where = f"{file}, column {name!r}, row {row}"
                raise InputError("the id is empty", where=where, remedy="remove the row")
            return values
    except pa.ArrowException as error:
        raise InputError(
            f"the file is not Parquet: {error}", where=str(file), remedy="write it again"
        ) from None


def _lines(file: Path) -> Any:
    try:
        text = file.read_text("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError:
        raise InputError(
            "the file is not UTF-8 text", where=str(file), remedy="write one id per line"
        ) from None
    return pa.array([line.strip() for line in text.split("\n") if line.strip()], pa.string())


def _as(values: Any, kind: Any, option: str) -> Any:
    if values.type == kind:
        return values
    if pa.types.is_string(values.type) and pa.types.is_integer(kind):
        whole = pc.match_substring_regex(values, r"^-?\d{1,18}$")
        return pc.cast(pc.if_else(whole, values, None), kind)
    try:
        return values.cast(kind)
    except pa.ArrowException:
        message = f"the ids are {values.type}, but the graph's ids are {kind}"
        raise InputError(message, where=option, remedy=_REMEDY) from None


_VALUES = 2**22  # outputs in a chunk: 16 MiB
_MOST, _FEWEST = 2**16, 2**10  # rows of a chunk


@dataclass(frozen=True)
class Predictions:
    """Outputs of a model for some nodes, edges or graphs, on the CPU.

    Attributes:
        ids: original ids, int64 ``[n]``, ascending.
        outputs: float32 ``[n, K]``: K classes before the softmax, or K numbers.
        targets: classes int64 ``[n]``, below 0 if unknown; or numbers ``[n]`` or ``[n, K]``, NaN
            if unknown; None for links.
        splits: int8 ``[n]``, positions in `SPLITS`; -1 = in none.
        beside: columns after the ids, int64 ``[n]``, nodes by their original ids; None = the
            column is omitted.
    """

    ids: np.ndarray
    outputs: Tensor
    targets: Tensor | None
    splits: np.ndarray
    beside: Mapping[str, np.ndarray | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Embedded:
    """Embeddings of some nodes or graphs, on the CPU. ``ids``, ``splits``: see `Predictions`;
    ``rows``: float32 ``[n, D]``."""

    ids: np.ndarray
    rows: Tensor
    splits: np.ndarray

    def table(self, key: str) -> pa.Table:
        """Return the columns ``key``, ``split`` and ``embedding``."""
        columns = {key: pa.array(self.ids, pa.int64()), "split": _splits(self.splits)}
        return pa.table({**columns, "embedding": _lists(self.rows)})


@dataclass(frozen=True)
class Recommended:
    """Lists of the best targets of some sources.

    Attributes:
        ids: original ids of the sources, int64 ``[n]``, ascending.
        targets: original ids, int64 ``[n, k]``, the best first; -1 where a list has no more.
        scores: float32 ``[n, k]``.
    """

    ids: np.ndarray
    targets: np.ndarray
    scores: np.ndarray

    def table(self) -> pa.Table:
        """Return the columns ``source``, ``rank`` from 1, ``target`` and ``score``."""
        source, place = np.nonzero(self.targets >= 0)
        found = {"target": self.targets[source, place], "score": self.scores[source, place]}
        return pa.table({"source": self.ids[source], "rank": place + 1, **found})


def node_splits(shard: Shard, ntype: str) -> np.ndarray:
    """Return the splits of the owned nodes: see `Predictions`."""
    codes = np.full(shard.owned(ntype), NO_SPLIT, np.int8)
    for number, split in enumerate(SPLITS):
        mask = shard.node_data[ntype].get(f"{split}_mask")
        if mask is not None:
            codes[mask.bool().numpy()] = number
    return codes


def chosen_nodes(job: Job, request: Request, shard: Shard, ntype: str) -> np.ndarray:
    """Return the positions of the requested owned nodes, ascending by their original ids. Raises
    InputError if a requested node does not exist."""
    own = np.arange(shard.owned(ntype))
    if request.split != "all":
        own = own[node_splits(shard, ntype) == SPLITS.index(request.split)]
    return listed_nodes(job, request.wanted, shard, ntype, own)


def listed_nodes(
    job: Job, wanted: Any, shard: Shard, ntype: str, own: np.ndarray, option: str = "--ids"
) -> np.ndarray:
    """Return which positions ``own [n]`` are of wanted nodes, ascending by their original ids.
    ``wanted``, ``option``: see `numbers_of`; None = all are."""
    original = shard.original[ntype]
    if wanted is not None:
        names = job.read(lambda: read_ids(job.meta, ntype))
        numbers = numbers_of(wanted, names, shard.num_nodes(ntype), option)
        own = own[np.isin(original[own], numbers)]
    return own[np.argsort(original[own])]


def embedded_nodes(
    job: Job, request: Request, shard: Shard, ntype: str, rows_of: Callable[[np.ndarray], Tensor]
) -> Iterator[Embedded]:
    """Yield the embeddings of the requested owned nodes, in chunks. ``rows_of``: global ids ``[n]``
    → embeddings ``[n, D]``."""
    chosen = chosen_nodes(job, request, shard, ntype)
    rows = rows_of(chosen + shard.first(ntype))
    splits, size = node_splits(shard, ntype), chunk_rows(rows.shape[1])
    for start in range(0, len(chosen), size):
        some = chosen[start : start + size]
        ids = shard.original[ntype][some].astype(np.int64)
        yield Embedded(ids, rows[start : start + size], splits[some])


def pick_ntype(ntype: str | None, there: Sequence[str]) -> str:
    """Return the node type of the requested embeddings. ``there``: node types with embeddings.
    Raises InputError if the type has none, or none of several is named."""
    if ntype is None and len(there) > 1:
        message = f"the model has embeddings of several node types: {', '.join(there)}"
        raise InputError(message, where="--ntype", remedy="choose one with --ntype")
    ntype = ntype or there[0]
    if ntype not in there:
        message = f"the model has no embeddings of node type {ntype!r}, but of {', '.join(there)}"
        raise InputError(message, where=f"--ntype {ntype}", remedy="choose one of these")
    return ntype


def chunk_rows(width: int) -> int:
    """Return the number of rows of a chunk, for ``width`` outputs per row."""
    return min(_MOST, max(_FEWEST, _VALUES // max(1, width)))


@dataclass(frozen=True)
class Format:
    """Format of prediction rows.

    Attributes:
        key: name of the first column, ``node``, ``edge``, ``graph``, or ``row`` of a training
            table.
        classifies: the outputs are of classes.
        scores: include each class's probability.
        labels: the outputs are of several labels.
        calibration: scale and bias of a `Calibration`; None = the model's own probabilities.
    """

    key: str
    classifies: bool
    scores: bool = False
    labels: bool = False
    calibration: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def table(self, found: Predictions) -> pa.Table:
        """Return the rows of some predictions."""
        columns = {
            name: pa.array(values, pa.int64())
            for name, values in {self.key: found.ids, **found.beside}.items()
            if values is not None
        }
        split = {"split": _splits(found.splits)}
        if found.targets is None:
            return pa.table({**columns, "score": _numbers(found.outputs), **split})
        shown, targets = self.columns(found.outputs), found.targets
        if self.classifies:
            scores = {"scores": shown.pop("scores")} if self.scores else {}
            return pa.table({**columns, **shown, **split, "label": _classes(targets), **scores})
        targets = targets.reshape(found.outputs.shape)
        if self.labels:
            columns |= split
            for k, (name, chances) in enumerate(shown.items()):
                columns |= {name: chances, f"label_{k}": _classes(targets[:, k])}
            return pa.table(columns)
        labels = _values(targets)
        unknown = pa.array(targets.isnan().any(1).numpy())
        label = pc.if_else(unknown, pa.scalar(None, labels.type), labels)
        return pa.table({**columns, **shown, **split, "label": label})

    def columns(self, outputs: Tensor) -> dict[str, pa.Array]:
        """Return the columns of outputs ``[n, K]``: see the module."""
        if self.calibration is not None:
            outputs = Calibration(*self.calibration).apply(outputs)
        if self.labels:
            chances = outputs.sigmoid().T
            return {f"probability_{k}": _numbers(some) for k, some in enumerate(chances)}
        if not self.classifies:
            return {"prediction": _values(outputs)}
        shares, best = outputs.softmax(1), outputs.argmax(1)
        columns = {
            "prediction": pa.array(best.numpy(), pa.int64()),
            "probability": _numbers(shares.gather(1, best.unsqueeze(1)).flatten()),
        }
        return {**columns, "scores": _lists(shares)} if self.scores else columns


def write_rows(path: Path, tables: Iterable[pa.Table]) -> int:
    """Write tables to a Parquet file, a row group each, and return the number of rows. No file is
    written without tables. Raises OSError if the file cannot be written; nothing is left of it."""
    tables = iter(tables)
    first = next(tables, None)
    if first is None:
        return 0
    rows = 0
    with replacing(path) as file, pq.ParquetWriter(file, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
            rows += table.num_rows
    return rows


def _classes(targets: Tensor) -> pa.Array:
    return pa.array(targets.numpy(), pa.int64(), mask=(targets < 0).numpy())


def _numbers(values: Tensor) -> pa.Array:
    return pa.array(values.flatten().to(torch.float32).numpy(), pa.float32())


def _lists(values: Tensor) -> pa.Array:
    count, width = values.shape
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, _numbers(values.contiguous()))


def _values(outputs: Tensor) -> pa.Array:
    return _numbers(outputs) if outputs.shape[1] == 1 else _lists(outputs)


def _splits(codes: np.ndarray) -> pa.Array:
    names = np.array([*SPLITS, None], dtype=object)  # -1 is the last one
    return pa.array(names[codes], pa.string())
