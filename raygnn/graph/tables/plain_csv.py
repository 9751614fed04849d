"""CSV without a line of names: matrices of numbers, whose columns are called 1, 2, …."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables.columns import (
    INTEGER,
    Growing,
    cast,
    numbers_or_nan,
    refuse_nulls,
    to_numpy,
)
from raygnn.graph.tables.description import FeatureColumn
from raygnn.graph.tables.feature_columns import Features
from raygnn.graph.tables.reader import UNPACKING_ERRORS, Chunk, TableReader, unpacked

_REMEDY = "the file is damaged, or not of this dataset: get it again"


def read_rows(file: Path) -> list[list[str]]:
    """All lines of a short file, as text; raises DataError as all here do, for a file that is
    missing, damaged or empty, or names file, row and column."""
    reader = _reader(file)
    rows: list[list[str]] = []
    for chunk in reader.chunks():
        rows += map(list, zip(*(chunk.columns[name].to_pylist() for name in reader.columns)))
    return rows


def first_value(file: Path) -> str:
    """Return the first value of a file's first line, as text, without reading the file."""
    reader = _reader(file)
    return refuse_nulls(next(reader.chunks()), reader.columns[0], _REMEDY)[0].as_py()


def integers(file: Path, below: Sequence[int], noun: str) -> Array:
    """Whole numbers from 0, int64 ``[n, len(below)]``.

    Args:
        below: for each column, what its values are less than.
        noun: they are numbers of, for errors: ``node``.
    """
    reader = _reader(file, len(below))
    rows = Growing(np.int64, len(below))
    for chunk in reader.chunks():
        block = np.empty((chunk.num, len(below)), np.int64)
        for at, (column, num) in enumerate(zip(reader.columns, below, strict=True)):
            array = refuse_nulls(chunk, column, _REMEDY)
            remedy = f"numbers of {noun}s are whole numbers from 0 to {num - 1}"
            block[:, at] = cast(chunk, column, array, pa.int64(), remedy).to_numpy()
            bad = (block[:, at] < 0) | (block[:, at] >= num)
            if bad.any():
                row = int(np.argmax(bad))
                refused = f"{block[row, at]} is no {noun}: there are {num}"
                raise chunk.error(row, column, refused, remedy)
        rows.append(block)
    matrix: Array = rows.take()
    return matrix


def features(file: Path, num: int, of: str) -> Array:
    """Finite numbers, float32 ``[num, F]``; ``of`` says what a row is of, for errors."""
    reader = _reader(file)
    matrix = Features([FeatureColumn(column=name) for name in reader.columns], None)
    for chunk in _chunks(reader, num, of):
        matrix.add(chunk)
    return matrix.take()


def numbers(file: Path, num: int, of: str, *, nulls: bool = False) -> Array:
    """Numbers of any kind: int64 where all are whole, else float32; ``[num]``, or ``[num, W]``.

    Args:
        nulls: whether some may be missing; they are NaN.
    """
    reader = _reader(file)
    columns: list[list[Array]] = [[] for _ in reader.columns]
    for chunk in _chunks(reader, num, of):
        for name, blocks in zip(reader.columns, columns, strict=True):
            array = chunk.columns[name] if nulls else refuse_nulls(chunk, name, "fill it in")
            array = pc.if_else(pc.equal(array, "nan"), pa.scalar(None, array.type), array)
            if not array.null_count and pc.all(pc.match_substring_regex(array, INTEGER)).as_py():
                blocks.append(to_numpy(pc.cast(array, pa.int64())))
            else:
                blocks.append(numbers_or_nan(chunk, name, array))
    whole = [all(block.dtype == np.int64 for block in blocks) for blocks in columns]
    arrays = [
        np.concatenate([block.astype(np.int64 if is_whole else np.float32) for block in blocks])
        for blocks, is_whole in zip(columns, whole, strict=True)
    ]
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)


def _chunks(reader: TableReader, num: int, of: str) -> Iterator[Chunk]:
    """The chunks of a file that has ``num`` rows."""
    for chunk in reader.chunks():
        if reader.num > num:
            break
        yield chunk
    if reader.num != num:
        rows = f"more than {num}" if reader.num > num else str(reader.num)
        message = f"there are {rows} rows, and {num} {of}"
        raise DataError(message, where=str(reader.files[0]), remedy=_REMEDY)


def _reader(file: Path, width: int | None = None) -> TableReader:
    check_file(file)
    try:
        with unpacked(file) as stream:
            line = stream.readline(1 << 24).decode("utf-8", "replace")
    except UNPACKING_ERRORS as error:
        message = f"it cannot be unpacked: {error}"
        raise DataError(message, where=str(file), remedy=_REMEDY) from None
    columns = line.count(",") + 1 if line.strip() else 0
    if not columns or (width is not None and columns != width):
        message = (
            f"there are {columns} columns, expected {width}" if columns else "there are no rows"
        )
        raise DataError(message, where=f"{file}, row 1 (line 1)", remedy=_REMEDY)
    names = [str(at + 1) for at in range(columns)]
    return TableReader([file], names, ",", header=names)
