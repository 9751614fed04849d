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
class Rows:
    """Selected rows of an array ``[N, …]``, gathered piece by piece, so that a partition is written
    without a copy of it. ``ids``: int64 ``[n]``, the row numbers."""

    array: Array | Tensor
    ids: Array

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.ids), *self.array.shape[1:])

    @property
    def ndim(self) -> int:
        return int(self.array.ndim)

    @property
    def nbytes(self) -> int:
        return len(self.ids) * self._width

    def pieces(self) -> Iterator[Array | Tensor]:
        """Yield the rows in order, a few megabytes at a time."""
        step = max(_PIECE // max(self._width, 1), 1)
        for start in range(0, len(self.ids), step):
            yield self._take(self.ids[start : start + step])

    def whole(self) -> Array | Tensor:
        return self._take(self.ids)

    @property
    def _width(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.array.shape[1:]) * int(self.array.itemsize)

    def _take(self, ids: Array) -> Array | Tensor:
        if isinstance(self.array, np.ndarray):
            # np.take would copy the complete array if it is a mapped file that is not aligned
            aligned = self.array.flags.aligned
            taken: Array = np.take(self.array, ids, axis=0) if aligned else self.array[ids]
            return taken
        import torch

        return self.array.index_select(0, torch.from_numpy(ids))


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


AnyArray: TypeAlias = "Array | Tensor | Rows | OnDemand"


def dtype_name(array: AnyArray) -> str:
    """Return ``"float32"``, ``"bfloat16"``, …: the same for numpy and torch."""
    return str(array.dtype).removeprefix("torch.")


def storable(array: AnyArray) -> bool:
    """Return True if DGL's files can hold the array (bool comes back as uint8)."""
    return dtype_name(array) in CODES


def element_bytes(array: Array | Tensor) -> memoryview:
    """Return the elements in C order, without a copy if they are stored so."""
    if not isinstance(array, np.ndarray):
        import torch

        array = (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    return np.ascontiguousarray(array.reshape(-1)).view(np.uint8).data


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
