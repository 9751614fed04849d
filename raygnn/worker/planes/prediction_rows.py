"""Predictions as rows of a table: a chunk of them at a time, in Parquet.

Columns: ``node``, ``edge`` or ``graph``, int64, as the user numbers them; of edges also ``source``,
``target`` and, where they have some, ``relation``; ``prediction``, ``split``, ``label``. Of classes
also ``probability`` and, if asked for, ``scores``; of links ``score`` and ``split`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from raygnn.util.files import replacing
from raygnn.worker.job import SPLITS

_VALUES = 2**22  # of outputs in a chunk: 16 MiB
_MOST, _FEWEST = 2**16, 2**10  # rows of a chunk


@dataclass(frozen=True)
class Predictions:
    """Outputs of a model for some nodes, edges or graphs, on the CPU.

    Attributes:
        ids: int64 ``[n]``, ascending, as the user numbers them.
        outputs: float32 ``[n, K]``: of K classes before the softmax, or K numbers.
        targets: classes int64 ``[n]``, below 0 where unknown; or numbers ``[n]`` or ``[n, K]``, NaN
            where unknown; None of links.
        splits: int8 ``[n]``, positions in `SPLITS`; -1 = in none.
    """

    ids: np.ndarray
    outputs: Tensor
    targets: Tensor | None
    splits: np.ndarray


@dataclass(frozen=True)
class EdgePredictions(Predictions):
    """Of edges.

    Attributes:
        sources, ends: int64 ``[n]``, as the user numbers the nodes.
        relations: int64 ``[n]``; None where edges have none.
    """

    sources: np.ndarray
    ends: np.ndarray
    relations: np.ndarray | None


@dataclass(frozen=True)
class Embedded:
    """Rows that a model makes of some nodes or graphs, on the CPU.

    Attributes:
        ids, splits: see `Predictions`.
        rows: float32 ``[n, D]``.
    """

    ids: np.ndarray
    rows: Tensor
    splits: np.ndarray

    def table(self, key: str) -> pa.Table:
        """Columns: ``key``, ``split``, ``embedding``."""
        return pa.table(
            {
                key: pa.array(self.ids, pa.int64()),
                "split": _splits(self.splits),
                "embedding": _lists(self.rows),
            }
        )


def chunk_rows(width: int) -> int:
    """How many rows with so many outputs each are worked on at a time."""
    return min(_MOST, max(_FEWEST, _VALUES // max(1, width)))


@dataclass(frozen=True)
class Format:
    """What the rows of a prediction look like.

    Attributes:
        key: name of the first column, ``node``, ``edge`` or ``graph``.
        classifies: whether the outputs are of classes.
        scores: whether each class's probability is wanted.
    """

    key: str
    classifies: bool
    scores: bool = False

    def table(self, found: Predictions) -> pa.Table:
        """The rows of some predictions."""
        columns = {self.key: pa.array(found.ids, pa.int64())}
        if isinstance(found, EdgePredictions):
            columns["source"] = pa.array(found.sources, pa.int64())
            columns["target"] = pa.array(found.ends, pa.int64())
            if found.relations is not None:
                columns["relation"] = pa.array(found.relations, pa.int64())
        if found.targets is None:
            columns["score"] = _numbers(found.outputs)
            columns["split"] = _splits(found.splits)
            return pa.table(columns)
        if self.classifies:
            shares = found.outputs.softmax(1)
            best = found.outputs.argmax(1)
            labels = found.targets.numpy()
            columns["prediction"] = pa.array(best.numpy(), pa.int64())
            columns["probability"] = _numbers(shares.gather(1, best.unsqueeze(1)).flatten())
            columns["split"] = _splits(found.splits)
            columns["label"] = pa.array(labels, pa.int64(), mask=labels < 0)
            if self.scores:
                columns["scores"] = _lists(shares)
            return pa.table(columns)
        one = found.outputs.shape[1] == 1
        values = _numbers if one else _lists
        columns["prediction"] = values(found.outputs)
        columns["split"] = _splits(found.splits)
        targets = found.targets.reshape(found.outputs.shape)
        unknown = pa.array(targets.isnan().any(1).numpy())
        labels = values(targets)
        columns["label"] = pc.if_else(unknown, pa.scalar(None, labels.type), labels)
        return pa.table(columns)


def write_rows(path: Path, tables: Iterable[pa.Table]) -> int:
    """Write all tables to a Parquet file, a row group each; returns the number of rows.

    Nothing is written where there is none.

    Raises:
        OSError: it cannot be written; nothing is left of it then.
    """
    tables = iter(tables)
    first = next(tables, None)
    if first is None:
        return 0
    rows = 0
    with replacing(path) as file, pq.ParquetWriter(file, first.schema) as writer:
        table: pa.Table | None = first
        while table is not None:
            writer.write_table(table)
            rows += table.num_rows
            table = next(tables, None)
    return rows


def _numbers(values: Tensor) -> pa.Array:
    return pa.array(values.flatten().to(torch.float32).numpy(), pa.float32())


def _lists(values: Tensor) -> pa.Array:
    count, width = values.shape
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, _numbers(values.contiguous()))


def _splits(codes: np.ndarray) -> pa.Array:
    names = np.array([*SPLITS, None], dtype=object)  # -1 is the last one
    return pa.array(names[codes], pa.string())
