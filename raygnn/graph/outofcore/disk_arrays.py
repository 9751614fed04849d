"""Arrays as files without a header, appended to while their length is unknown, and mapped."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raygnn.graph.arrays import Array, dtype_name, element_bytes

if TYPE_CHECKING:
    from torch import Tensor

Described = dict[str, Any]  # array name → [path, dtype, shape of a row], as JSON has them


@dataclass(frozen=True)
class DiskArray:
    """An array in a file.

    Attributes:
        dtype: its name, ``bfloat16`` among them.
        row_shape: shape without the rows.
        offset: where in the file it begins, in bytes.
        rows: how many there are; None = up to the end of the file.
    """

    path: Path
    dtype: str
    row_shape: tuple[int, ...] = ()
    offset: int = 0
    rows: int | None = None

    def __len__(self) -> int:
        if self.rows is not None:
            return self.rows
        return (self.path.stat().st_size - self.offset) // self.row_bytes

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.stored.itemsize

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype in memory: int16 for bfloat16, which numpy lacks."""
        return np.dtype(np.int16 if self.dtype == "bfloat16" else self.dtype)

    def map(self, *, writable: bool = False) -> Array:
        """``[rows, …]`` as stored; pages are read when they are looked at."""
        shape = (len(self), *self.row_shape)
        if not math.prod(shape):  # which cannot be mapped
            return np.empty(shape, self.stored)
        mode: Any = "r+" if writable else "r"
        return np.memmap(self.path, self.stored, mode, self.offset, shape)

    def whole(self) -> Array | Tensor:
        """``[rows, …]`` with its dtype, mapped."""
        return self.as_declared(self.map())

    def read(self, start: int, stop: int) -> Array:
        """Some rows, in memory."""
        count = (stop - start) * math.prod(self.row_shape)
        offset = self.offset + start * self.row_bytes
        values = np.fromfile(self.path, self.stored, count, offset=offset)
        assert len(values) == count, f"{self.path} is cut short"
        return values.reshape(stop - start, *self.row_shape)

    def as_declared(self, array: Array) -> Array | Tensor:
        """Rows as stored → with their dtype."""
        if self.dtype != "bfloat16":
            return array
        import torch

        with warnings.catch_warnings():  # that the pages are only to be read
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array).view(torch.bfloat16)


class Appended:
    """New file to which rows are appended; a context manager.

    Attributes:
        array: the file; of the dtype and row shape of the first rows, if they are not given.
        num: number of rows so far.
    """

    def __init__(self, path: Path, dtype: str = "", row_shape: tuple[int, ...] = ()):
        self.array, self.num = DiskArray(path, dtype, row_shape), 0
        self._file = path.open("wb")

    def __enter__(self) -> Appended:
        return self

    def add(self, rows: Array | Tensor) -> None:
        if not self.array.dtype:
            self.array = DiskArray(self.array.path, dtype_name(rows), tuple(rows.shape[1:]))
        if rows.nbytes:
            self._file.write(element_bytes(rows))
        self.num += len(rows)

    def pad(self, num: int, value: float) -> None:
        """Append equal rows up to a number of them."""
        if num > self.num:
            shape = (num - self.num, *self.array.row_shape)
            self.add(np.full(shape, value, self.array.stored))

    def close(self) -> DiskArray:
        """Return the array; no rows can be appended after that."""
        self._file.close()
        return self.array

    def __exit__(self, *_: object) -> None:
        self.close()


def store(path: Path, array: Array | Tensor) -> DiskArray:
    """Write an array that is in memory."""
    with Appended(path) as file:
        file.add(array)
    return file.array


def described(arrays: Mapping[str, DiskArray]) -> Described:
    """Return the files of arrays as JSON has them."""
    return {n: [str(a.path), a.dtype, list(a.row_shape)] for n, a in arrays.items()}


def opened(files: Described) -> dict[str, DiskArray]:
    """Return the arrays that were `described`."""
    return {n: DiskArray(Path(path), kind, tuple(row)) for n, (path, kind, row) in files.items()}
