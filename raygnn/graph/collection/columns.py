"""Arrays that grow row by row into ``.npy`` files, of whatever dtype holds all that came."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, dtype_name, element_bytes
from raygnn.graph.collection.data import Column

# Enough for the header of an array of 16 dimensions.
_HEADER_BYTES = 512
_BUFFER_BYTES = 4 << 20
_BUFFER_ARRAYS = 10_000
_PIECE_BYTES = 4 << 20

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_INTEGERS = ("int8", "uint8", "int16", "int32", "int64")


def common_dtype(first: str, second: str) -> str | None:
    """The smallest dtype that holds the values of both; None if one is no widening of the other's
    kind (a float is none of an integer, however wide)."""
    if first == second:
        return first
    if first in _FLOATS and second in _FLOATS:
        wider = max(first, second, key=_FLOATS.index)
        return "float32" if wider == "float16" else wider  # neither 16-bit type holds the other
    if first in _INTEGERS and second in _INTEGERS:
        return str(np.promote_types(first, second))
    return None


def plain(array: Any) -> tuple[Array, str]:
    """An array as ``.npy`` can hold it, and the dtype that it stands for (bfloat16: int16)."""
    name = dtype_name(array)
    if isinstance(array, np.ndarray):
        return array, name
    if name == "bfloat16":
        return np.frombuffer(element_bytes(array), np.int16).reshape(tuple(array.shape)), name
    return array.numpy(), name


def convert(array: Array, old: str, new: str) -> Array:
    """Elements of the dtype ``old``, as `plain` gives them, as those of ``new``."""
    if old == new:
        return array
    if old == "bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(new, copy=False)


def finite_rows(array: Array, dtype: str) -> Array:
    """Which rows hold finite numbers only, bool ``[N]``; elements as `plain` gives them."""
    if dtype == "bfloat16":
        finite = (array & 0x7F80) != 0x7F80
    elif dtype in _FLOATS:
        finite = np.isfinite(array)
    else:
        return np.ones(len(array), np.bool_)
    return finite.reshape(len(array), -1).all(axis=1)


@dataclass
class ColumnWriter:
    """One array of all graphs, being written.

    Attributes:
        finite: whether infinities and NaN are refused.
        dtype, shape: of what came so far; None before anything did.
    """

    path: Path
    finite: bool = False
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    rows: int = 0
    _waiting: list[tuple[Array, str]] = field(default_factory=list)
    _size: int = 0

    def declare(self, dtype: str, shape: tuple[int, ...]) -> None:
        """What the array is like if nothing is ever added."""
        self.dtype, self.shape = dtype, shape

    def add(self, array: Any, where: str) -> None:
        """Append rows.

        Args:
            array: ``[n, …]``, NumPy or torch; not written to before :meth:`finish`.
            where: which graph and array, for errors.

        Raises:
            DataError: rows of another shape or of a dtype that does not fit, or not finite.
        """
        rows, dtype = plain(array)
        shape = rows.shape[1:]
        if self.shape is None or self.dtype is None:
            self.declare(dtype, shape)
        assert self.dtype is not None
        if shape != self.shape:
            raise DataError(
                f"its rows have shape {list(shape)}, those of the graphs before "
                f"{list(self.shape or ())}",
                where=where,
                remedy="give this array the same shape in all graphs, but for the first number",
            )
        common = common_dtype(self.dtype, dtype)
        if common is None:
            raise DataError(
                f"it is {dtype}, in the graphs before {self.dtype}",
                where=where,
                remedy="save this array as numbers of one kind in all graphs",
            )
        if self.finite and not (good := finite_rows(rows, dtype)).all():
            raise DataError(
                "features are infinite or not a number",
                where=f"{where}, row {int(np.argmin(good))}",
                remedy="features must be finite: replace them, or leave the graph out",
            )
        if common != self.dtype:
            self._flush()
            self._widen(common)
        self.rows += len(rows)
        self._waiting.append((rows, dtype))
        self._size += rows.nbytes
        if self._size > _BUFFER_BYTES or len(self._waiting) > _BUFFER_ARRAYS:
            self._flush()

    def finish(self) -> Column:
        """Write what is left, and the header; the file is not durable yet."""
        assert self.dtype is not None
        assert self.shape is not None
        self._flush()
        facts = {"file": self.path.name, "dtype": self.dtype, "shape": self.shape}
        column = Column.model_validate(facts)
        with self.path.open("r+b") as file:
            file.write(_header(column.stored, (self.rows, *self.shape)))
        return column

    def _flush(self) -> None:
        assert self.dtype is not None
        if not self.path.exists():
            self.path.write_bytes(bytes(_HEADER_BYTES))
        with self.path.open("ab") as file:
            for rows, dtype in self._waiting:
                file.write(element_bytes(convert(rows, dtype, self.dtype)))
        self._waiting.clear()
        self._size = 0

    def _widen(self, dtype: str) -> None:
        """Give what is in the file another dtype."""
        old = self.dtype
        assert old is not None
        self.dtype = dtype
        wider = self.path.with_suffix(".wider")
        with self.path.open("rb") as source, wider.open("wb") as target:
            target.write(source.read(_HEADER_BYTES))
            stored = np.dtype("int16" if old == "bfloat16" else old)
            while data := source.read(_PIECE_BYTES):
                target.write(element_bytes(convert(np.frombuffer(data, stored), old, dtype)))
        wider.replace(self.path)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """A ``.npy`` header of the format's version 1.0, padded to a fixed length."""
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    text = repr(fields).encode()
    magic = np.lib.format.magic(1, 0)
    size = _HEADER_BYTES - len(magic) - 2
    return magic + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"
