"""Arrays in files of ``torch.save`` that are not trusted, as OGB's splits of links are.

Python's unpickler reads them, with two limits. A name in the pickle is looked up in one short
table (:data:`_NAMES`), whose entries are stand-ins: nothing that a file names is imported or
called, and an array is made only when it is asked for, after its shape has been compared with its
bytes. And the instructions are listed beforehand, because the unpickler itself would allocate
gigabytes for one memo index and overflow the stack on a key that is a deeply nested tuple.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.sources.input_files import check_file, check_fits_memory

_MAX_SIDE = 2**48  # of an array; also keeps the size of error messages within bounds
_MAX_TUPLES = 1000  # arrays need a few each; a deeper tuple could not be hashed or freed
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
_LEGACY = 0x1950A86A20F9469CFC6C  # the first pickle of files from before torch 1.6
_REMEDY = "the file is damaged, or not of this dataset: get it again"


class _Forbidden(Exception):
    """The pickle names something outside the table; the message is the name."""


class _Unexpected(Exception):
    """The pickle holds something else than it should; the message says what."""


class _StandIn:
    """Stand-in for a class or function of a pickle: its arguments and state, nothing more."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Ndarray(_StandIn):
    """``ndarray``, which is also what ``_reconstruct`` makes."""


class _Dtype(_StandIn):
    """``dtype``."""


class _Encoded(_StandIn):
    """``codecs.encode(text, "latin1")``, how Python 3 spells bytes in protocol 2. Encoded when it
    is asked for: one text may be there many times."""


class _Empty(_StandIn):
    """``bytes()``."""


_NAMES: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Ndarray,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Ndarray,
    ("numpy._core.multiarray", "_reconstruct"): _Ndarray,
    ("_codecs", "encode"): _Encoded,
    ("__builtin__", "bytes"): _Empty,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise _Forbidden(f"{_shorten(module)}.{_shorten(name)}") from None


def load_pickle(code: bytes | BinaryIO, path: Path) -> Any:
    """Load a pickle of ``path``; from a stream the next one, leaving the stream behind it.

    Raises:
        DataError: it is damaged, or refers to any class or function that arrays do not need.
    """
    stream = io.BytesIO(code) if isinstance(code, bytes) else code
    start = stream.tell()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in garbage that looks like text
            _check_instructions(stream)
            stream.seek(start)
            return _Unpickler(stream, encoding="latin1").load()
    except _Forbidden as error:
        raise DataError(
            f"refused: the pickle refers to {error}, which is not needed to hold arrays",
            where=str(path),
            remedy="nothing was run. Get the file from a source you trust",
        ) from None
    except _Unexpected as error:
        raise _damaged(path, str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # of any type: the unpickler trusts what it reads
        raise DataError(
            f"not a whole pickle of plain data: {brief(' '.join(str(error).split()))}",
            where=str(path),
            remedy="the file is truncated or damaged: get it again",
        ) from None


def _check_instructions(stream: BinaryIO) -> None:
    """Refuse what the unpickler cannot stand: see the top of this module."""
    tuples = memo = 0
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in _TUPLES:
            tuples += 1
        elif opcode.name in _MEMO:
            memo += 1
            if isinstance(argument, int) and argument > 2 * memo + 1000:
                raise _Unexpected(f"the memo index {argument}, which no array needs")
        elif opcode.name in ("PERSID", "BINPERSID"):
            raise _Forbidden("data beside the pickle, such as tensors")
        if tuples > _MAX_TUPLES:
            raise _Unexpected(f"more than {_MAX_TUPLES} tuples, which no array needs")


def to_array(value: Any) -> Array:
    """Build the NumPy array (any shape, numbers only, read-only memory) that a pickle describes.

    Raises ``_Unexpected`` or ValueError.
    """
    if not isinstance(value, _Ndarray):
        raise _Unexpected(f"{brief(value)} where a numpy array was due")
    match value.state:
        case (int(), tuple(shape), _Dtype() as dtype, int(fortran), data):
            pass
        case state:
            raise _Unexpected(f"a numpy array with {brief(state)} as its state")
    if len(shape) > 8 or not all(type(side) is int and 0 <= side <= _MAX_SIDE for side in shape):
        raise _Unexpected(f"a numpy array of shape {brief(shape)}")
    kind = _numpy_dtype(dtype)
    if isinstance(data, _Encoded) and data.arguments[1:] in (("latin1",), ("latin-1",)):
        data = data.arguments[0]
    if isinstance(data, _Empty):
        data = b""
    content = data.encode("latin1") if isinstance(data, str) else data
    if not isinstance(content, bytes) or math.prod(shape) * kind.itemsize != len(content):
        size = len(content) if isinstance(content, bytes) else "no"
        raise _Unexpected(f"a numpy array of shape {brief(shape)} and dtype {kind} in {size} bytes")
    native = np.frombuffer(content, dtype=kind).astype(kind.newbyteorder("="), copy=False)
    return native.reshape(shape, order="F" if fortran else "C")


def _numpy_dtype(dtype: _Dtype) -> np.dtype[Any]:
    match dtype.arguments, dtype.state:
        case (str(code), *_), (int(), "<" | ">" | "|" as byteorder, *_):
            pass
        case _, state:
            raise _Unexpected(f"a numpy dtype with {brief(state)} as its state")
    if code[:1] not in tuple("biuf"):
        raise _Unexpected(f"a numpy array of dtype {brief(code)}, not of numbers")
    try:
        return np.dtype(code).newbyteorder(byteorder)
    except TypeError:
        raise _Unexpected(f"a numpy array of dtype {brief(code)}") from None


class SavedArrays:
    """Dictionary of NumPy arrays in a file of ``torch.save``, decoded on access.

    Such a file is a zip archive with a pickle in it, or, from before torch 1.6, four pickles one
    after the other: a number, a version, facts of the machine, and the value. Arrays lie within
    the pickle; tensors would lie beside it, and are refused.

    Raises:
        DataError: the file is missing or damaged, holds something else, or refers to any class or
            function that arrays do not need; nothing in it is run.
    """

    def __init__(self, path: Path):
        self.path = path
        check_file(path)
        try:
            with path.open("rb") as file:
                values = _zipped(path, file) if zipfile.is_zipfile(file) else _legacy(path, file)
        except (OSError, zipfile.BadZipFile, EOFError) as error:
            raise DataError(
                f"it cannot be read: {error}", where=str(path), remedy=_REMEDY
            ) from None
        if not isinstance(values, dict):
            raise _damaged(path, f"{brief(values)} where a dict of arrays was due")
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integers(self, key: str, below: int | None = None) -> Array:
        """Return an array of integers as int64, of any shape.

        Args:
            below: its values run from 0 to less than this.

        Raises:
            DataError: there is none, or the first value out of range is named with its row.
        """
        array = self.numbers(key)
        if array.dtype.kind not in "iu":
            raise self.error(key, f"it has dtype {array.dtype}, not integers")
        if below is not None and array.size and not 0 <= array.min() <= array.max() < below:
            row = int(np.argwhere((array < 0) | (array >= below))[0, 0])
            message = f"it holds {array[row].tolist()}; ids run from 0 to {below - 1}"
            raise self.error(key, message, row)
        return array.astype(np.int64, copy=False)

    def numbers(self, key: str) -> Array:
        """Return an array of numbers unchanged; raises DataError if there is none."""
        if key not in self._values:
            names = ", ".join(brief(name) for name in [*self._values][:20]) or "none"
            raise self.error(key, f"there is no array {key!r}; there are: {names}")
        try:
            return to_array(self._values[key])
        except (_Unexpected, ValueError) as error:
            raise self.error(key, f"it holds {error}") from None

    def error(self, key: str, message: str, row: int | None = None) -> DataError:
        """Return an error about an array, or about one of its rows."""
        place = f"{self.path}: {key!r}" + ("" if row is None else f", row {row + 1}")
        return DataError(message, where=place, remedy=_REMEDY)


def _zipped(path: Path, file: BinaryIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(members) != 1:
            raise zipfile.BadZipFile("torch.save wrote no such archive")
        # torch.save does not compress: a small archive that claims to be large is none of its own
        if members[0].compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("torch.save does not compress")
        check_fits_memory(members[0].file_size, "its pickle", str(path))
        return load_pickle(archive.read(members[0]), path)


def _legacy(path: Path, file: BinaryIO) -> Any:
    file.seek(0)
    if load_pickle(file, path) != _LEGACY:
        raise zipfile.BadZipFile("it is not a file of torch.save")
    return [load_pickle(file, path) for _ in range(3)][-1]


def brief(value: Any) -> str:
    """Describe a value that may be huge, deep or cyclic in a few words."""
    match value:
        case type():
            return value.__name__.strip("_").lower()
        case _StandIn():
            return f"a {brief(type(value))}"
        case None | bool() | float():
            return repr(value)
        case int():
            return repr(value) if value.bit_length() <= 64 else "an enormous integer"
        case str():
            return repr(_shorten(value))
        case tuple() if len(value) <= 8 and all(isinstance(i, (int, float, str)) for i in value):
            return "(" + ", ".join(map(brief, value)) + ")"
    return f"a {type(value).__name__}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"


def _damaged(path: Path, message: str, *, row: int | None = None) -> DataError:
    where = str(path) if row is None else f"{path}: row {row}"
    return DataError(f"it holds {message}", where=where, remedy=_REMEDY)
