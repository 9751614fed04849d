"""CSV without a line of names: matrices of numbers, whose columns are called 1, 2, …."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from raygnn.errors import DataError
from raygnn.graph.sources.files import check_file
from raygnn.graph.tables import csv_text
from raygnn.graph.tables.columns import Array, Features, cast, refuse_nulls
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.inferred import Inferred
from raygnn.graph.tables.reader import Reader

_REMEDY = "the file is damaged, or not of this dataset: get it again"


def read_rows(file: Path) -> list[list[str]]:
    """All lines of a short file, as text.

    Raises:
        DataError: it is missing, damaged or has nothing in it.
    """
    reader = _reader(file)
    rows: list[list[str]] = []
    for chunk in reader.chunks():
        rows += map(list, zip(*(chunk.columns[name].to_pylist() for name in reader.columns)))
    return rows


def first_value(file: Path) -> str:
    """What the first line begins with, as text, of a file that may be long.

    Raises:
        DataError: as `read_rows`.
    """
    reader = _reader(file)
    chunk = next(reader.chunks())
    return refuse_nulls(chunk, reader.columns[0], _REMEDY)[0].as_py()


def integers(file: Path, below: Sequence[int], what: str) -> Array:
    """Whole numbers from 0, int64 ``[n, len(below)]``.

    Args:
        below: for each column, what its values are less than.
        what: they are numbers of, for errors: ``node``.

    Raises:
        DataError: naming file, row and column.
    """
    reader = _reader(file, len(below))
    rows = Growing(np.int64, len(below))
    for chunk in reader.chunks():
        block = np.empty((chunk.num, len(below)), np.int64)
        for at, (column, most) in enumerate(zip(reader.columns, below, strict=True)):
            array = refuse_nulls(chunk, column, _REMEDY)
            remedy = f"numbers of {what}s are whole numbers from 0 to {most - 1}"
            found = cast(chunk, column, array, pa.int64(), remedy).to_numpy()
            bad = (found < 0) | (found >= most)
            if bad.any():
                row = int(np.argmax(bad))
                what_is = f"{found[row]} is no {what}: there are {most}"
                raise chunk.error(row, column, what_is, remedy)
            block[:, at] = found
        rows.append(block)
    taken: Array = rows.take()
    return taken


def features(file: Path, num: int, of: str) -> Array:
    """Finite numbers, float32 ``[num, F]``.

    Raises:
        DataError: naming file, row and column; or the number of rows.
    """
    reader = _reader(file)
    found = Features(tuple(reader.columns), None)
    for chunk in reader.chunks():
        found.add(chunk)
    return _rows(reader, found.take(), num, of)


def numbers(file: Path, num: int, of: str, *, nulls: bool = False) -> Array:
    """Numbers of any kind: int64 where all are whole, else float32; ``[num]``, or ``[num, W]``.

    Args:
        nulls: whether some may be missing; they are NaN.

    Raises:
        DataError: as `features` does.
    """
    reader = _reader(file)
    columns = [Inferred(name, nulls=nulls) for name in reader.columns]
    for chunk in reader.chunks():
        for column in columns:
            column.add(chunk)
    taken = [column.take() for column in columns]
    return _rows(reader, taken[0] if len(taken) == 1 else np.stack(taken, axis=1), num, of)


def _rows(reader: Reader, found: Array, num: int, of: str) -> Array:
    if len(found) != num:
        raise DataError(
            f"there are {len(found)} rows, and {num} {of}",
            where=str(reader.files[0]),
            remedy=_REMEDY,
        )
    return found


def _reader(file: Path, width: int | None = None) -> Reader:
    check_file(file)
    try:
        with csv_text.unpacked(file) as stream:
            line = stream.readline(1 << 24).decode("utf-8", "replace")
    except (csv.Error, *csv_text.FAILURES) as error:
        raise DataError(
            f"it cannot be unpacked: {error}", where=str(file), remedy=_REMEDY
        ) from None
    columns = line.count(",") + 1 if line.strip() else 0
    if not columns or (width is not None and columns != width):
        what = f"there are {columns} columns, expected {width}" if columns else "there are no rows"
        raise DataError(what, where=f"{file}, row 1 (line 1)", remedy=_REMEDY)
    names = [str(at + 1) for at in range(columns)]
    return Reader([file], names, ",", header=names)
