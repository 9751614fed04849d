"""Dtypes, bytes and CSR row pointers of arrays in DGL's files.

Arrays are numpy's, so that a file can be refused without importing torch, which takes seconds;
torch tensors stand in only for bfloat16, which numpy lacks, or where the caller has them anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

# DLPack's type codes and bits: 0 signed, 1 unsigned, 2 float, 4 bfloat
DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
}
CODES = {dtype: code for code, dtype in DTYPES.items()} | {"bool": (1, 8)}

_PIECE = 1 << 22  # bytes gathered at a time


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of elements of a dtype; int16 for bfloat16, which numpy lacks."""
    return np.dtype("int16" if name == "bfloat16" else name)


def index_type(limit: int) -> type[np.int32 | np.int64]:
    """Return the narrowest integer type for ids and positions below ``limit``."""
    return np.int32 if limit < 2**31 else np.int64


@dataclass(frozen=True)
class OnDemand:
    """Array that is computed while it is written: ``pieces`` yields its rows in order."""

    dtype: Any
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array | Tensor]]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def take(array: Array | Tensor, ids: Array) -> Array | Tensor:
    """Copy rows of an array ``[N, …]``, by their numbers, int64 ``[n]``."""
    if isinstance(array, np.ndarray):
        # np.take would copy the complete array if it is a mapped file that is not aligned
        taken: Array = np.take(array, ids, axis=0) if array.flags.aligned else array[ids]
        return taken
    import torch

    return array.index_select(0, torch.from_numpy(ids))


def rows_of(array: Array | Tensor, ids: Array) -> OnDemand:
    """Select rows of an array, copied a few megabytes at a time while they are written."""
    step = max(_PIECE // max(math.prod(array.shape[1:]) * int(array.itemsize), 1), 1)

    def pieces() -> Iterator[Array | Tensor]:
        for start in range(0, len(ids), step):
            yield take(array, ids[start : start + step])

    return OnDemand(array.dtype, (len(ids), *array.shape[1:]), pieces)


AnyArray: TypeAlias = "Array | Tensor | OnDemand"


def dtype_name(of: AnyArray | torch.dtype) -> str:
    """Name an array's dtype, or torch's: ``"float32"``, ``"bfloat16"``, …, as numpy does."""
    return str(getattr(of, "dtype", of)).removeprefix("torch.")


def storable(array: AnyArray) -> bool:
    """Return True if DGL's files can hold the array (bool comes back as uint8)."""
    return dtype_name(array) in CODES


def element_bytes(array: Array | Tensor) -> memoryview:
    """Return the elements in C order, without a copy if they are stored so."""
    if not isinstance(array, np.ndarray):
        import torch

        array = (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    return np.ascontiguousarray(array.reshape(-1)).view(np.uint8).data


def as_matrix(rows: Tensor) -> Tensor:
    """Flatten the rows of a tensor ``[N, …]``: ``[N, F]``."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


def ranges(starts: Array, counts: Array) -> Array:
    """Return ``start, start + 1, …`` of each range, one after the other."""
    return np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def both_directions(a: Array, b: Array, num: int) -> tuple[Array, Array]:
    """Turn each pair ``(a[i], b[i])`` of ids below ``num``, itself below 2^31, into two directed
    edges, every edge once, also of pairs that repeat. Return sources and destinations, int64
    ``[E]``, in order of destination, then source. A self-loop is one edge."""
    a, b = a.astype(np.int64, copy=False), b.astype(np.int64, copy=False)
    keys = np.concatenate((a * num + b, b * num + a))
    keys.sort()
    fresh = np.empty(len(keys), dtype=bool)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    keys = keys[fresh]
    target = keys // num
    keys -= target * num
    return keys, target


def csr_rows(indptr: Array, num: int, error: Callable[[str], Exception]) -> Array:
    """Convert row pointers, checked, to the row of each entry, int64 ``[num]``."""
    check_row_pointers(indptr, num, error)
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def check_row_pointers(indptr: Array, num: int, error: Callable[[str], Exception]) -> None:
    """Raise ``error(reason)`` unless CSR row pointers rise from 0 to ``num``."""
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != num:
        raise error(f"holds row pointers that do not run from 0 to {num}")
    # comparison, because differences may overflow and look right
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        raise error(f"holds row pointers that fall at row {int(np.argmax(falls))}")
