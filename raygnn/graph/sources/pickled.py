"""Data out of Python pickles that are not trusted, without running anything in them.

A pickle is a program for a small stack machine, and even with its imports restricted Python's
own unpickler can be made to allocate gigabytes (a memo index, an array's shape) or to overflow
the stack (the hash of a deeply nested tuple). So the program is interpreted here instead, over
:func:`pickletools.genops`: only what plain data, numpy arrays and scipy CSR matrices need exists,
every name in it is looked up in one short table, and nothing that the file names is imported or
called. Each step makes at most one small object, so the result is no larger than the file.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.sources.files import read_bytes

_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_MAX_SIZE = 2**48  # of an array's side; also keeps the size of error messages within bounds


@dataclass(frozen=True)
class _Name:
    """A class or function that the pickle refers to; never more than its name."""

    name: str


_ARRAY, _DTYPE, _CSR = _Name("ndarray"), _Name("dtype"), _Name("csr_matrix")
_MAKE_ARRAY, _MAKE_OBJECT = _Name("_reconstruct"), _Name("_reconstructor")
_ENCODE, _OBJECT = _Name("encode"), _Name("object")
_LIST, _DEFAULTDICT, _BYTES = _Name("list"), _Name("defaultdict"), _Name("bytes")

_ALLOWED: dict[tuple[str, str], _Name] = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("numpy.core.multiarray", "_reconstruct"): _MAKE_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _MAKE_ARRAY,
    ("scipy.sparse.csr", "csr_matrix"): _CSR,
    ("scipy.sparse._csr", "csr_matrix"): _CSR,
    ("copy_reg", "_reconstructor"): _MAKE_OBJECT,
    ("copyreg", "_reconstructor"): _MAKE_OBJECT,
    ("_codecs", "encode"): _ENCODE,  # how Python 3 spells bytes in protocol 2 …
    ("__builtin__", "bytes"): _BYTES,  # … and no bytes
    ("__builtin__", "list"): _LIST,
    ("builtins", "list"): _LIST,
    ("__builtin__", "object"): _OBJECT,
    ("builtins", "object"): _OBJECT,
    ("collections", "defaultdict"): _DEFAULTDICT,
}


@dataclass(eq=False)
class _Object:
    """An instance of one of the three classes, with what the pickle says is its state.

    The state is looked at only by whoever wants the value: an array that the pickle makes a
    thousand times from one string would otherwise be decoded a thousand times.
    """

    cls: _Name
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class _Latin1:
    """Bytes that the pickle spells as a call of ``codecs.encode(text, "latin1")``."""

    text: str


@dataclass(frozen=True)
class CsrMatrix:
    """A sparse matrix as read: its arrays are consistent with each other, its values unchecked.

    ``indptr`` int64 ``[rows + 1]``, ``indices`` int64 and ``data`` (any number) ``[nnz]``.
    """

    shape: tuple[int, int]
    indptr: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    data: np.ndarray[Any, Any]


class _Malformed(Exception):
    """The pickle is not what it should be; the message says what it holds."""


class _Forbidden(Exception):
    """The pickle names something outside the table."""


def load_array(path: Path) -> np.ndarray[Any, Any]:
    """The numpy array (any shape, numbers only, read-only memory) that ``path`` holds.

    Raises:
        DataError: the file is missing or damaged, holds something else or refers to any class
            or function that an array of numbers does not need.
    """
    value = _load(path)
    try:
        return _array(value)
    except (_Malformed, ValueError) as error:
        raise _damaged(path, str(error)) from None


def load_csr(path: Path) -> CsrMatrix:
    """The scipy CSR matrix that ``path`` holds; raises as :func:`load_array` does."""
    value = _load(path)
    try:
        if not isinstance(value, _Object) or value.cls is not _CSR:
            raise _Malformed(f"{_brief(value)} where a scipy csr_matrix was due")
        state = value.state if isinstance(value.state, dict) else {}
        shape = state.get("_shape")
        indptr, indices, data = (_array(state.get(part)) for part in ("indptr", "indices", "data"))
    except (_Malformed, ValueError) as error:
        raise _damaged(path, str(error)) from None
    match shape:
        case (int(rows), int(cols)) if 0 <= rows <= _MAX_SIZE and 0 <= cols <= _MAX_SIZE:
            pass
        case _:
            raise _damaged(path, f"a csr_matrix with the shape {_brief(shape)}")
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
        raise _damaged(path, f"{_brief(value)} where a dict of node → neighbours was due")
    lists = [neighbours for neighbours in value.values() if isinstance(neighbours, list)]
    if sum(map(len, lists)) > path.stat().st_size:
        # One long list under many keys: harmless here, and gigabytes as arrays.
        raise _damaged(path, "more neighbours than it has bytes")
    for row, (node, neighbours) in enumerate(value.items()):
        good = type(node) is int and isinstance(neighbours, list)
        if not good or not all(type(neighbour) is int for neighbour in neighbours):
            raise _damaged(
                path, f"an entry that is not node → list of nodes: {_brief(node)}", row=row
            )
    return value


def _load(path: Path) -> Any:
    code = read_bytes(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in garbage that looks like text
            return _run(code)
    except _Forbidden as error:
        raise DataError(
            f"refused: the pickle refers to {error}, which is not needed to hold arrays",
            where=str(path),
            remedy="Nothing was run. Get the file from a source you trust.",
        ) from None
    except _Malformed as error:
        raise _damaged(path, str(error)) from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # genops raises ValueError; an empty stack or an unset memo is an Index- or KeyError.
        detail = f": {_brief(str(error))}" if isinstance(error, ValueError) else ""
        raise DataError(
            f"not a whole pickle of plain data{detail}",
            where=str(path),
            remedy="The file is truncated or damaged: get it again.",
        ) from None


def _run(code: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def top(kind: type) -> Any:
        if not isinstance(stack[-1], kind):
            raise _Malformed(f"{_brief(stack[-1])} where a {kind.__name__} was due")
        return stack[-1]

    argument: Any
    for opcode, argument, _ in pickletools.genops(code):
        match opcode.name:
            case literal if literal in _LITERALS:
                stack.append(argument)
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                if len(stack) != 1 or marks:
                    raise ValueError("it ends early")
                return stack[0]
            case "MARK":
                marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "LIST":
                stack.append(since_mark())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                if len(stack) < count:
                    raise IndexError
                stack[-count:] = [tuple(stack[-count:])]
            case "DICT":
                items = since_mark()
                stack.append({})
                _set_items(stack[-1], items)
            case "APPEND":
                item = stack.pop()
                top(list).append(item)
            case "APPENDS":
                items = since_mark()
                top(list).extend(items)
            case "SETITEM":
                items = [stack.pop(-2), stack.pop()]
                _set_items(top(dict), items)
            case "SETITEMS":
                items = since_mark()
                _set_items(top(dict), items)
            case "GLOBAL":
                stack.append(_find(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_find(module, name))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
            case "NEWOBJ":
                arguments, cls = stack.pop(), stack.pop()
                if arguments != ():
                    raise _Malformed(f"{_brief(cls)} made from {_brief(arguments)}")
                stack.append(_call(_MAKE_OBJECT, (cls, _OBJECT, None)))
            case "BUILD":
                state = stack.pop()
                top(_Object).state = state
            case other:
                raise ValueError(f"the instruction {other} is not for plain data")
    raise ValueError("it ends early")


def _find(module: Any, name: Any) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise _Malformed("a name that is not text")
    try:
        return _ALLOWED[module, name]
    except KeyError:
        raise _Forbidden(f"{_shorten(module)}.{_shorten(name)}") from None


def _call(function: Any, arguments: Any) -> Any:
    """What a call of one of the allowed names gives; nothing is called."""
    match (function, arguments):
        case (_Name("_reconstruct"), (_Name("ndarray"), *_)):
            return _Object(_ARRAY)
        case (_Name("dtype"), (str(), *_)):
            return _Object(_DTYPE, arguments)
        case (_Name("_reconstructor"), (_Name("csr_matrix"), _Name("object"), None)):
            return _Object(_CSR)
        case (_Name("encode"), (str(text), "latin1" | "latin-1")):
            return _Latin1(text)
        case (_Name("bytes"), ()):
            return b""
        case (_Name("defaultdict"), (_Name("list"),)):
            return {}
    raise _Malformed(f"a call of {_brief(function)} with {_brief(arguments)}")


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise IndexError
    for key, value in zip(items[::2], items[1::2], strict=True):
        # The hash of a deep tuple would overflow the stack; data needs no such keys.
        if type(key) not in (int, str):
            raise _Malformed(f"a dict with {_brief(key)} as a key")
        target[key] = value


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, _Object) or value.cls is not _ARRAY:
        raise _Malformed(f"{_brief(value)} where a numpy array was due")
    match value.state:
        case (int(), tuple(shape), _Object(cls=_Name("dtype")) as dtype, int(fortran), data):
            pass
        case state:
            raise _Malformed(f"a numpy array with {_brief(state)} as its state")
    if len(shape) > 8 or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise _Malformed(f"a numpy array of shape {_brief(shape)}")
    kind = _numpy_dtype(dtype)
    if isinstance(data, (str, _Latin1)):
        data = (data if isinstance(data, str) else data.text).encode("latin1")
    if not isinstance(data, bytes) or math.prod(shape) * kind.itemsize != len(data):
        size = len(data) if isinstance(data, bytes) else "no"
        raise _Malformed(f"a numpy array of shape {_brief(shape)} and dtype {kind} in {size} bytes")
    native = np.frombuffer(data, dtype=kind).astype(kind.newbyteorder("="), copy=False)
    return native.reshape(shape, order="F" if fortran else "C")


def _numpy_dtype(dtype: _Object) -> np.dtype[Any]:
    code = dtype.arguments[0]
    match dtype.state:
        case (int(), "<" | ">" | "|" as byteorder, *_):
            pass
        case state:
            raise _Malformed(f"a numpy dtype with {_brief(state)} as its state")
    if code[:1] not in tuple("biuf"):
        raise _Malformed(f"a numpy array of dtype {_brief(code)}, not of numbers")
    try:
        return np.dtype(code).newbyteorder(byteorder)
    except TypeError:
        raise _Malformed(f"a numpy array of dtype {_brief(code)}") from None


def _brief(value: Any) -> str:
    """A few words for a value that may be huge, deep or cyclic, so its repr is out of bounds."""
    match value:
        case _Name(name):
            return name
        case _Object(cls=_Name(name)):
            return f"a {name}"
        case None | bool() | float():
            return repr(value)
        case int():
            return repr(value) if value.bit_length() <= 64 else "an enormous integer"
        case str():
            return repr(_shorten(value))
        case tuple() if len(value) <= 8 and all(
            isinstance(item, (int, float, str, _Name)) for item in value
        ):
            return "(" + ", ".join(_brief(item) for item in value) + ")"
    return f"a {type(value).__name__}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"


def _damaged(path: Path, what: str, *, row: int | None = None) -> DataError:
    return DataError(
        f"it holds {what}",
        where=str(path) if row is None else f"{path}: row {row}",
        remedy="The file is damaged or not a Planetoid file: get it again.",
    )
