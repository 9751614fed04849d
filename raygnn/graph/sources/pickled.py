"""Arrays, matrices and dictionaries that trusted nobody's pickle holds: see
:mod:`raygnn.graph.sources.pickle_machine`, which reads them without running anything."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.sources.files import read_bytes
from raygnn.graph.sources.pickle_machine import (
    CSR,
    Forbidden,
    Malformed,
    Object,
    brief,
    run,
    to_array,
)

_MAX_SIZE = 2**48  # of a matrix's side


@dataclass(frozen=True)
class CsrMatrix:
    """A sparse matrix as read: its arrays are consistent with each other, its values unchecked.

    ``indptr`` int64 ``[rows + 1]``, ``indices`` int64 and ``data`` (any number) ``[nnz]``.
    """

    shape: tuple[int, int]
    indptr: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    data: np.ndarray[Any, Any]


def load_array(path: Path) -> np.ndarray[Any, Any]:
    """The numpy array (any shape, numbers only, read-only memory) that ``path`` holds.

    Raises:
        DataError: the file is missing or damaged, holds something else or refers to any class
            or function that an array of numbers does not need.
    """
    value = _load(path)
    try:
        return to_array(value)
    except (Malformed, ValueError) as error:
        raise _damaged(path, str(error)) from None


def load_csr(path: Path) -> CsrMatrix:
    """The scipy CSR matrix that ``path`` holds; raises as :func:`load_array` does."""
    value = _load(path)
    try:
        if not isinstance(value, Object) or value.cls is not CSR:
            raise Malformed(f"{brief(value)} where a scipy csr_matrix was due")
        state = value.state if isinstance(value.state, dict) else {}
        shape = state.get("_shape")
        indptr, indices, data = (
            to_array(state.get(part)) for part in ("indptr", "indices", "data")
        )
    except (Malformed, ValueError) as error:
        raise _damaged(path, str(error)) from None
    match shape:
        case (int(rows), int(cols)) if 0 <= rows <= _MAX_SIZE and 0 <= cols <= _MAX_SIZE:
            pass
        case _:
            raise _damaged(path, f"a csr_matrix with the shape {brief(shape)}")
    whole = indptr.dtype.kind in "iu" and indices.dtype.kind in "iu"
    flat = all(array.ndim == 1 for array in (indptr, indices, data))
    if not whole or not flat or len(indptr) != rows + 1:
        raise _damaged(path, f"a csr_matrix of {rows} rows with {indptr.size} row pointers")
    indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    if indptr[0] != 0 or indptr[-1] != len(indices) or len(data) != len(indices):
        raise _damaged(
            path,
            f"a csr_matrix whose row pointers run from {indptr[0]} to {indptr[-1]} "
            f"over {len(indices)} columns and {len(data)} values",
        )
    falling = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falling):
        raise _damaged(path, "a csr_matrix with falling row pointers", row=int(falling[0]))
    outside = np.flatnonzero((indices < 0) | (indices >= cols))
    if len(outside):
        at = int(outside[0])
        row = int(np.searchsorted(indptr, at, side="right")) - 1
        raise _damaged(path, f"a csr_matrix of {cols} columns with column {indices[at]}", row=row)
    return CsrMatrix((rows, cols), indptr, indices, data)


def load_adjacency(path: Path) -> dict[int, list[int]]:
    """The dict of node id → list of neighbour ids that ``path`` holds, ids as stored.

    Raises as :func:`load_array` does; the error names the first node with a bad list.
    """
    value = _load(path)
    if not isinstance(value, dict):
        raise _damaged(path, f"{brief(value)} where a dict of node → neighbours was due")
    lists = [neighbours for neighbours in value.values() if isinstance(neighbours, list)]
    if sum(map(len, lists)) > path.stat().st_size:
        # One long list under many keys: harmless here, and gigabytes as arrays.
        raise _damaged(path, "more neighbours than it has bytes")
    for row, (node, neighbours) in enumerate(value.items()):
        good = type(node) is int and isinstance(neighbours, list)
        if not good or not all(type(neighbour) is int for neighbour in neighbours):
            raise _damaged(
                path, f"an entry that is not node → list of nodes: {brief(node)}", row=row
            )
    return value


def _load(path: Path) -> Any:
    return interpret(read_bytes(path), path)


def interpret(code: bytes | BinaryIO, path: Path) -> Any:
    """What a pickle in ``path`` holds; see :func:`run`. Raises as :func:`load_array` does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in garbage that looks like text
            return run(code)
    except Forbidden as error:
        raise DataError(
            f"refused: the pickle refers to {error}, which is not needed to hold arrays",
            where=str(path),
            remedy="Nothing was run. Get the file from a source you trust.",
        ) from None
    except Malformed as error:
        raise _damaged(path, str(error)) from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # genops raises ValueError; an empty stack or an unset memo is an Index- or KeyError.
        detail = f": {brief(str(error))}" if isinstance(error, ValueError) else ""
        raise DataError(
            f"not a whole pickle of plain data{detail}",
            where=str(path),
            remedy="The file is truncated or damaged: get it again.",
        ) from None


def _damaged(path: Path, what: str, *, row: int | None = None) -> DataError:
    return DataError(
        f"it holds {what}",
        where=str(path) if row is None else f"{path}: row {row}",
        remedy="The file is damaged, or not of this dataset: get it again.",
    )
