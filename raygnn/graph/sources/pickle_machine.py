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
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

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


_ARRAY, _DTYPE, CSR = _Name("ndarray"), _Name("dtype"), _Name("csr_matrix")
_MAKE_ARRAY, _MAKE_OBJECT = _Name("_reconstruct"), _Name("_reconstructor")
_ENCODE, _OBJECT = _Name("encode"), _Name("object")
_LIST, _DEFAULTDICT, _BYTES = _Name("list"), _Name("defaultdict"), _Name("bytes")

_ALLOWED: dict[tuple[str, str], _Name] = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("numpy.core.multiarray", "_reconstruct"): _MAKE_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _MAKE_ARRAY,
    ("scipy.sparse.csr", "csr_matrix"): CSR,
    ("scipy.sparse._csr", "csr_matrix"): CSR,
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
class Object:
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


class Malformed(Exception):
    """The pickle is not what it should be; the message says what it holds."""


class Forbidden(Exception):
    """The pickle names something outside the table."""


def run(code: bytes | BinaryIO) -> Any:
    """What a pickle holds: plain values, and an :class:`Object` for each array or matrix.

    A stream is left behind the pickle's end.

    Raises:
        Malformed, ValueError, IndexError, KeyError, OverflowError: it is not whole.
        Forbidden: it names a class or function that plain data do not need.
    """
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
            raise Malformed(f"{brief(stack[-1])} where a {kind.__name__} was due")
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
                    raise Malformed(f"{brief(cls)} made from {brief(arguments)}")
                stack.append(_call(_MAKE_OBJECT, (cls, _OBJECT, None)))
            case "BUILD":
                state = stack.pop()
                top(Object).state = state
            case other:
                raise ValueError(f"the instruction {other} is not for plain data")
    raise ValueError("it ends early")


def _find(module: Any, name: Any) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise Malformed("a name that is not text")
    try:
        return _ALLOWED[module, name]
    except KeyError:
        raise Forbidden(f"{_shorten(module)}.{_shorten(name)}") from None


def _call(function: Any, arguments: Any) -> Any:
    """What a call of one of the allowed names gives; nothing is called."""
    match (function, arguments):
        case (_Name("_reconstruct"), (_Name("ndarray"), *_)):
            return Object(_ARRAY)
        case (_Name("dtype"), (str(), *_)):
            return Object(_DTYPE, arguments)
        case (_Name("_reconstructor"), (_Name("csr_matrix"), _Name("object"), None)):
            return Object(CSR)
        case (_Name("encode"), (str(text), "latin1" | "latin-1")):
            return _Latin1(text)
        case (_Name("bytes"), ()):
            return b""
        case (_Name("defaultdict"), (_Name("list"),)):
            return {}
    raise Malformed(f"a call of {brief(function)} with {brief(arguments)}")


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise IndexError
    for key, value in zip(items[::2], items[1::2], strict=True):
        # The hash of a deep tuple would overflow the stack; data needs no such keys.
        if type(key) not in (int, str):
            raise Malformed(f"a dict with {brief(key)} as a key")
        target[key] = value


def to_array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, Object) or value.cls is not _ARRAY:
        raise Malformed(f"{brief(value)} where a numpy array was due")
    match value.state:
        case (int(), tuple(shape), Object(cls=_Name("dtype")) as dtype, int(fortran), data):
            pass
        case state:
            raise Malformed(f"a numpy array with {brief(state)} as its state")
    if len(shape) > 8 or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise Malformed(f"a numpy array of shape {brief(shape)}")
    kind = _numpy_dtype(dtype)
    if isinstance(data, (str, _Latin1)):
        data = (data if isinstance(data, str) else data.text).encode("latin1")
    if not isinstance(data, bytes) or math.prod(shape) * kind.itemsize != len(data):
        size = len(data) if isinstance(data, bytes) else "no"
        raise Malformed(f"a numpy array of shape {brief(shape)} and dtype {kind} in {size} bytes")
    native = np.frombuffer(data, dtype=kind).astype(kind.newbyteorder("="), copy=False)
    return native.reshape(shape, order="F" if fortran else "C")


def _numpy_dtype(dtype: Object) -> np.dtype[Any]:
    code = dtype.arguments[0]
    match dtype.state:
        case (int(), "<" | ">" | "|" as byteorder, *_):
            pass
        case state:
            raise Malformed(f"a numpy dtype with {brief(state)} as its state")
    if code[:1] not in tuple("biuf"):
        raise Malformed(f"a numpy array of dtype {brief(code)}, not of numbers")
    try:
        return np.dtype(code).newbyteorder(byteorder)
    except TypeError:
        raise Malformed(f"a numpy array of dtype {brief(code)}") from None


def brief(value: Any) -> str:
    """A few words for a value that may be huge, deep or cyclic, so its repr is out of bounds."""
    match value:
        case _Name(name):
            return name
        case Object(cls=_Name(name)):
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
            return "(" + ", ".join(brief(item) for item in value) + ")"
    return f"a {type(value).__name__}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"
