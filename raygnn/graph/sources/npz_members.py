"""Arrays in NumPy archives: headers, elements, and their position in the file."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as formats

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.sources import input_files
from raygnn.graph.sources.input_files import check_fits_memory

_REMEDY = "the file is truncated or not an .npz: get it or save it again"
# header of a zip member: the lengths of its name and extra fields, which follow
_BEFORE_MEMBER = struct.Struct("<26x2H")


@dataclass(frozen=True)
class Member:
    """Array as its header describes it, checked against the size of the member.

    Attributes:
        shape: the header's, or another with as many elements.
        fortran: True if the elements are in Fortran order.
        start: size of the header in bytes.
        place: position of the elements in the file; None = they are compressed.
    """

    file: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int
    place: int | None

    @property
    def origin(self) -> str:
        """Location for errors."""
        return f"{self.file}: {self.name}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Array:
        """Read all of it, in C order and native byte order."""
        check_fits_memory(self.nbytes, f"the array of shape {self.shape}", self.origin)
        with _stream(self.file, self.name) as stream, _numpy_errors(self.origin):
            array: Array = formats.read_array(stream, allow_pickle=False)
        array = array.astype(self.dtype.newbyteorder("="), order="C", copy=False)
        return array.reshape(self.shape)

    def blocks(self, size: int) -> Iterator[Array]:
        """Yield its elements in stored order, about ``size`` bytes at a time, in native byte order.
        Raises DataError as `read`."""
        with _stream(self.file, self.name) as stream:
            stream.read(self.start)
            while block := stream.read(size - size % self.dtype.itemsize):
                elements: Array = np.frombuffer(block, self.dtype)
                yield elements.astype(self.dtype.newbyteorder("="), copy=False)


def members(
    file: Path, names: Sequence[str], remedy: str, others: tuple[str, ...] = ()
) -> dict[str, Member]:
    """Return the arrays ``names``, and those whose names begin with one of ``others``, without
    reading their elements. Raises DataError if one is missing."""
    with _opened(file) as archive:
        stored = [info.filename.removesuffix(".npy") for info in archive.infolist()]
        missing = [name for name in names if name not in stored]
        if missing:
            listed = ", ".join(stored[:20])[:200] or "nothing"
            message = f"it holds no array {missing[0]}, only {listed}"
            raise DataError(message, where=str(file), remedy=remedy)
        chosen = dict.fromkeys([*names, *(name for name in stored if name.startswith(others))])
        return {name: _member(archive, file, name) for name in chosen}


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with input_files.opened(file) as stream, zipfile.ZipFile(stream) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: an encrypted member. NotImplementedError: an unknown compression.
        message = f"not a complete NumPy archive: {error}"
        raise DataError(message, where=str(file), remedy=_REMEDY) from None


@contextmanager
def _stream(file: Path, name: str) -> Iterator[IO[bytes]]:
    with _opened(file) as archive, archive.open(_info(archive, name)) as stream:
        yield stream


@contextmanager
def _numpy_errors(origin: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _damaged(origin, f"not a NumPy array: {error}") from None


def _info(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Return the last member of this name, with or without ``.npy``."""
    return next(i for i in archive.infolist()[::-1] if i.filename.removesuffix(".npy") == name)


def _member(archive: zipfile.ZipFile, file: Path, name: str) -> Member:
    info, origin = _info(archive, name), f"{file}: {name}"
    with archive.open(info) as stream, _numpy_errors(origin):
        version = formats.read_magic(stream)
        read = formats.read_array_header_2_0
        if version == (1, 0):
            read = formats.read_array_header_1_0
        shape, fortran, dtype = read(stream)
        start = stream.tell()
    left = info.file_size - start
    if dtype.hasobject:
        message = "refused: it holds Python objects, which are pickles that could run anything"
        raise DataError(message, where=origin, remedy="save it as an array of numbers")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != left:
        raise _damaged(origin, f"an array of shape {shape} and dtype {dtype} in {left} bytes")
    place = None
    if info.compress_type == zipfile.ZIP_STORED:
        with input_files.opened(file) as whole:
            whole.seek(info.header_offset)
            lengths = _BEFORE_MEMBER.unpack(whole.read(_BEFORE_MEMBER.size))
        place = info.header_offset + _BEFORE_MEMBER.size + sum(lengths) + start
        if place + left > file.stat().st_size:
            raise _damaged(origin, f"{left} bytes at {place} are more than the file has")
    return Member(file, name, dtype, shape, fortran, start, place)


def _damaged(origin: str, message: str) -> DataError:
    text = " ".join(message.split())
    text = text if len(text) <= 200 else text[:200] + "…"
    return DataError(text, where=origin, remedy="the file is damaged: get it or save it again")
