"""Checks of input files and of their arrays; errors name the file, the row and the value."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from raygnn.config.places import size
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.available_memory import memory
from raygnn.graph.data import MASKS, EdgeFrame, EdgeType, NodeFrame, etype_str
from raygnn.storage.remote import AnyPath, RemotePath
from raygnn.util.hashing import digest

_MORE_MEMORY = "if the file is not damaged, free memory, or use a machine with more of it"
_A_MASK = "a mask is one bool (or 0 or 1) for each node or edge, not a list of ids"


def check_file(path: AnyPath) -> int:
    """Return the size in bytes of ``path``, a regular, readable file that is not empty."""
    where = os.fsencode(str(path)).decode(errors="backslashreplace")

    def refused(message: str, remedy: str) -> DataError:
        return DataError(message, where=where, remedy=remedy)

    if where != str(path):
        raise refused("the path is not UTF-8", "rename the file")
    if isinstance(path, RemotePath):
        if not path.is_file():
            raise refused("there is no such file", "check the URI")
        if not (size := path.stat().st_size):
            raise refused("the file is empty", "get or write the file again")
        return size
    try:
        status = path.stat()
    except FileNotFoundError:
        remedy = "check the path; in a config file it is relative to the file's directory"
        raise refused("the file does not exist", remedy) from None
    except (OSError, ValueError) as error:
        remedy, reason = "check the path and the rights", getattr(error, "strerror", error)
        raise refused(f"the file can not be read: {reason}", remedy) from None
    if stat.S_ISDIR(status.st_mode):
        raise refused("it is a directory, not a file", "name the file itself")
    if not stat.S_ISREG(status.st_mode):
        remedy = "name a file on disk; pipes and devices can not be read twice"
        raise refused("it is not a regular file", remedy)
    if not os.access(path, os.R_OK):
        remedy = "give this user the right to read it"
        raise refused("the file can not be read: permission denied", remedy)
    if status.st_size == 0:
        raise refused("the file is empty", "get or write the file again")
    return status.st_size


@contextmanager
def opened(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file for reading; raises DataError as :func:`check_file`, and if reading fails."""
    check_file(path)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        message = f"the file can not be read: {error.strerror or error}"
        remedy = "check the path, the rights and the disk"
        raise DataError(message, where=str(path), remedy=remedy) from None


def unpacked_size(path: AnyPath) -> int:
    """Return the size in bytes of a file's content. The end of a ``.gz`` gives it modulo 4 GiB, and
    for its last member alone; a file that a URI names counts as packed. Raises DataError as
    :func:`opened` does."""
    packed = check_file(path)
    if path.suffix != ".gz" or packed < 4 or isinstance(path, RemotePath):
        return packed
    with opened(path) as file:
        file.seek(-4, os.SEEK_END)
        return max(packed, int.from_bytes(file.read(4), "little"))


def sha256(path: AnyPath) -> str:
    """Return the SHA-256 of a file in hex; raises DataError as :func:`opened` does."""
    with opened(path) as file:
        return digest(file)


def check_fits_memory(num_bytes: int, array: str, where: str) -> None:
    """Refuse an array that, by its header, does not fit into the available memory. A damaged header
    may claim terabytes, whose allocation can succeed and get the process killed later."""
    _, available = memory()
    if num_bytes > available:
        message = f"{array} would take {size(num_bytes)}, and {size(available)} of memory are free"
        raise DataError(message, where=where, remedy=_MORE_MEMORY)


def out_of_memory(where: str, error: Exception) -> DataError:
    """Return the error for input that needs more memory than is available."""
    detail = " ".join(str(error).split())[:200]
    message = "there is not enough memory to read it" + (f": {detail}" if detail else "")
    return DataError(message, where=where, remedy=_MORE_MEMORY)


def require_rows(array: Any, num: int, origin: str, of: str) -> None:
    """Raise DataError unless an array has ``num`` rows, one for each of the ``of``."""
    shape = tuple(array.shape)
    if not shape or shape[0] != num:
        message = f"its shape is {shape}, but there are {num} {of}"
        raise DataError(message, where=origin, remedy=f"give one row for each of the {of}")


def require_features(array: Any, origin: str) -> None:
    """Raise DataError unless an array is a matrix of numbers."""
    if array.dtype.kind not in "biuf" or len(array.shape) != 2:
        raise _unlike(array, origin, "features are a matrix of numbers, one row for each node")


def to_labels(array: Any, origin: str) -> Array:
    """Convert labels ``[N]`` or ``[N, 1]`` to int64 ``[N]``; a float NaN becomes -1, unknown."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.ndim != 1:
        raise _unlike(array, origin, "labels are one integer for each node, -1 where unknown")
    if array.dtype.kind == "f":
        classes = np.where(np.isnan(array), -1, array)
        bad = np.flatnonzero((classes != np.trunc(classes)) | (np.abs(classes) >= 2**53))
        if len(bad):
            message = f"the label {array[bad[0]]} is not an integer"
            remedy = "labels are integers from 0 to the number of classes - 1, -1 where unknown"
            raise DataError(message, where=f"{origin}, row {bad[0]}", remedy=remedy)
        array = classes
    return array.astype(np.int64, copy=False)


def to_mask(array: Any, origin: str) -> Array:
    """Convert a mask of bool, or of integers that are 0 or 1, to bool ``[N]``."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biu" or array.ndim != 1:
        raise _unlike(array, origin, _A_MASK)
    bad = np.flatnonzero((array != 0) & (array != 1))
    if len(bad):
        message = f"the value {array[bad[0]]} is neither 0 nor 1"
        raise DataError(message, where=f"{origin}, row {bad[0]}", remedy=_A_MASK)
    return array.astype(np.bool_, copy=False)


def to_ids(array: Array, num: int, origin: str, column: str, first: int = 0) -> Array:
    """Convert node ids to int64 ``[E]``; DataError names the first outside ``0 … num-1``. ``first``
    is the number of the first row."""
    if array.dtype.kind not in "iu" or array.ndim != 1:
        message = f"{column} has shape {array.shape} and dtype {array.dtype}"
        raise DataError(message, where=origin, remedy="edges are pairs of integer node ids")
    if len(array) and (array.min() < 0 or array.max() >= num):
        row = int(np.argmax((array < 0) | (array >= num)))
        message = f"{column} {array[row]} is not a node: there are {num}"
        remedy = f"node ids run from 0 to {num - 1}"
        raise DataError(message, where=f"{origin}, row {first + row}", remedy=remedy)
    return array.astype(np.int64, copy=False)


def check_frames(
    nodes: Mapping[str, NodeFrame], edges: Mapping[EdgeType, EdgeFrame], origin: str
) -> None:
    """Refuse arrays without one row for each node or edge; convert ends of edges to int64 ids."""
    for ntype, frame in nodes.items():
        for name, array in frame.data.items():
            require_rows(array, frame.num, f"{origin}: {ntype}/{name}", "nodes")
    for etype, found in edges.items():
        place = f"{origin}: {etype_str(etype)}"
        found.src = to_ids(found.src, nodes[etype[0]].num, place, "source")
        found.dst = to_ids(found.dst, nodes[etype[2]].num, place, "destination")
        for name, array in found.data.items():
            require_rows(array, found.num, f"{place}/{name}", "edges")


def to_targets(
    nodes: Mapping[str, NodeFrame], edges: Mapping[EdgeType, EdgeFrame], origin: str
) -> None:
    """Convert ``label`` of nodes to int64 ``[N]``, and masks of nodes and edges to bool ``[N]``;
    raises DataError otherwise."""
    frames: dict[str, NodeFrame | EdgeFrame] = {**nodes}
    frames |= {etype_str(etype): frame for etype, frame in edges.items()}
    for kind, frame in frames.items():
        for name in frame.data.keys() & {*MASKS, *["label"] * (kind in nodes)}:
            convert = to_labels if name == "label" else to_mask
            frame.data[name] = convert(frame.data[name], f"{origin}: {kind}/{name}")


def _unlike(array: Any, origin: str, remedy: str) -> DataError:
    message = f"it has shape {tuple(array.shape)} and dtype {array.dtype}"
    return DataError(message, where=origin, remedy=remedy)
