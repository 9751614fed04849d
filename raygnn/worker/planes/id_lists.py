"""Lists of nodes or graphs that somebody wants predictions for, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raygnn.errors import InputError
from raygnn.util.files import storage_errors

_REMEDY = "give ids that the graph has: numbers from 0, or of tables what they call the nodes"


def read_wanted(file: Path, key: str) -> Any:
    """The ids in a file, a pyarrow array: one in each line, or a column of a Parquet file.

    Args:
        key: name of the column, where there are several: ``node`` or ``graph``, as in what
            `raygnn.predict` writes.

    Raises:
        InputError: it cannot be read, or has no ids.
    """
    with storage_errors(file, InputError, "see that it is there and may be read"):
        if not file.is_file():
            raise InputError("there is no such file", where=str(file), remedy="name one of ids")
        values = _column(file, key) if file.suffix == ".parquet" else _lines(file)
    if not len(values):
        raise InputError("there are no ids in it", where=str(file), remedy=_REMEDY)
    return values


def numbers_of(wanted: Any, names: Any, count: int) -> np.ndarray:
    """What the wanted nodes or graphs are numbered, int64, each once, ascending.

    Args:
        wanted: from `read_wanted`.
        names: pyarrow array ``[count]``, what the user calls them; None = their numbers.
        count: how many there are.

    Raises:
        InputError: one is not there; it is named with its place in the list.
    """
    if names is None:
        found = pc.cast(_as(wanted, pa.int64()), pa.int64())
        there = pc.and_(pc.greater_equal(found, 0), pc.less(found, count))
        found = pc.if_else(there, found, None)
    else:
        found = pc.index_in(_as(wanted, names.type), value_set=names)
    if found.null_count:
        at = int(np.argmax(found.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(
            f"there is no {wanted[at].as_py()!r} among the {count:,} of this graph; it is number "
            f"{at + 1} of the list",
            where="--ids",
            remedy=_REMEDY,
        )
    return np.unique(found.to_numpy(zero_copy_only=False).astype(np.int64))


def _column(file: Path, key: str) -> Any:
    try:
        with pq.ParquetFile(file) as source:
            names = source.schema_arrow.names
            name = names[0] if len(names) == 1 else key
            if name not in names:
                raise InputError(
                    f"there is no column {key!r}; there are: {', '.join(names)}",
                    where=str(file),
                    remedy=f"call it {key}, or leave only one column",
                )
            return source.read([name]).column(name).combine_chunks()
    except pa.ArrowException as error:
        raise InputError(
            f"this is no Parquet file: {error}", where=str(file), remedy="write it again"
        ) from None


def _lines(file: Path) -> Any:
    try:
        text = file.read_text("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError:
        raise InputError(
            "this is no text in UTF-8", where=str(file), remedy="give an id in each line"
        ) from None
    return pa.array([line.strip() for line in text.split("\n") if line.strip()], pa.string())


def _as(values: Any, kind: Any) -> Any:
    """Values of another type; null where one is none of it."""
    if values.type == kind:
        return values
    if pa.types.is_string(values.type) and pa.types.is_integer(kind):
        whole = pc.match_substring_regex(values, r"^-?\d{1,18}$")
        return pc.cast(pc.if_else(whole, values, None), kind)
    try:
        return values.cast(kind)
    except pa.ArrowException:
        raise InputError(
            f"these ids are {values.type}, those of the graph are {kind}",
            where="--ids",
            remedy=_REMEDY,
        ) from None
