"""NumPy archives as of Platonov et al. (2023): one graph with several fixed splits.

Arrays: ``node_features [N, F]``, ``node_labels [N]``, ``edges [E, 2]`` and
``{train,val,test}_masks [S, N]`` (or ``[N]``, one split).
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from raygnn.config.graph import NpzGraph
from raygnn.errors import DataError
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    EdgeFrame,
    GraphData,
    NodeFrame,
)
from raygnn.graph.sources import input_files
from raygnn.graph.sources.input_files import Array, check_fits_memory
from raygnn.graph.sources.transforms import both_directions

VERSION = 1
DEFAULT_NORMALIZE = "none"

_BOTH, _ONE = 80, 32  # bytes of a listed pair while edges are made of it
_STORED_MASKS = {mask: f"{mask}s" for mask in MASKS}
_ARRAYS = ("node_features", "node_labels", "edges", *_STORED_MASKS.values())
_REMEDY = "The file is truncated or not an .npz: get it or save it again."


def files(graph: NpzGraph) -> list[Path]:
    """The archive."""
    return [Path(graph.path)]


def reading_bytes(graph: NpzGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`: the arrays, and the edges once more in both
    directions."""
    with _opened(Path(graph.path)) as archive:
        arrays = _headers(archive, graph)
    total = sum(array.nbytes for array in arrays.values())
    for name, dtype in (("node_features", np.float32), ("node_labels", np.int64)):
        if arrays[name].dtype != dtype:  # another copy
            total += arrays[name].size * np.dtype(dtype).itemsize
    return total + len(arrays["edges"]) * (_BOTH if graph.undirected else _ONE)


def read(graph: NpzGraph) -> GraphData:
    """The graph with the masks of one split.

    ``feat`` float32 ``[N, F]``, ``label`` int64 ``[N]``, masks bool ``[N]``. With
    ``undirected``, each listed pair becomes two edges and duplicates go.

    Raises:
        DataError: the archive is missing, damaged, lacks an array, holds Python objects, or its
            arrays disagree; the first bad row is named.
    """
    file = Path(graph.path)
    origin = {name: f"{file}: {name}" for name in _ARRAYS}
    with _opened(file) as archive:
        _headers(archive, graph)  # nothing is expanded before all of them agree
        arrays = {name: _array(archive, name, origin[name]) for name in _ARRAYS}

    feat = input_files.to_features(arrays["node_features"], origin["node_features"])
    label = input_files.to_labels(arrays["node_labels"], origin["node_labels"])
    data = {"feat": feat, "label": label}
    for mask, name in _STORED_MASKS.items():
        rows = _split(arrays[name], graph.split, origin[name])
        data[mask] = input_files.to_mask(rows, origin[name])
    num, pairs = len(feat), arrays["edges"]
    source = input_files.to_ids(pairs[:, 0], num, origin["edges"], "source")
    target = input_files.to_ids(pairs[:, 1], num, origin["edges"], "destination")
    if graph.undirected:
        source, target = both_directions(source, target, num)
    edges = EdgeFrame(np.ascontiguousarray(source), np.ascontiguousarray(target))
    stored = {"feat": "node_features", "label": "node_labels", **_STORED_MASKS}
    return GraphData(
        name=file.stem,
        nodes={DEFAULT_NTYPE: NodeFrame(num, data)},
        edges={DEFAULT_ETYPE: edges},
        origin={"": str(file)}
        | {f"{DEFAULT_NTYPE}/{name}": origin[array] for name, array in stored.items()},
    )


def _headers(archive: zipfile.ZipFile, graph: NpzGraph) -> dict[str, Array]:
    """Each array as its header describes it: of its dtype and shape, without content or memory.

    Raises:
        DataError: one is missing or cannot be, or they do not fit each other.
    """
    stored = [info.filename.removesuffix(".npy") for info in archive.infolist()]
    missing = [name for name in _ARRAYS if name not in stored]
    if missing:
        raise DataError(
            f"it holds no array {missing[0]}, only {', '.join(stored[:20])[:200] or 'nothing'}",
            where=str(graph.path),
            remedy=f"Save the archive with the arrays {', '.join(_ARRAYS)}.",
        )
    origin = {name: f"{graph.path}: {name}" for name in _ARRAYS}
    arrays = {name: _header(archive, name, origin[name]) for name in _ARRAYS}
    input_files.require_features(arrays["node_features"], origin["node_features"])
    num = len(arrays["node_features"])
    input_files.require_rows(arrays["node_labels"], num, origin["node_labels"], "nodes")
    for name in _STORED_MASKS.values():
        mask = _split(arrays[name], graph.split, origin[name])
        input_files.require_rows(mask, num, origin[name], "nodes")
    shape = arrays["edges"].shape
    if len(shape) != 2 or shape[1] != 2:
        remedy = "Edges are pairs of node ids: an array of shape [E, 2]."
        raise DataError(f"its shape is {shape}", where=origin["edges"], remedy=remedy)
    return arrays


def _split(masks: Array, split: int, origin: str) -> Array:
    if masks.ndim == 1 and split == 0:
        return masks
    count = 1 if masks.ndim == 1 else len(masks) if masks.ndim == 2 else 0
    if split >= count:
        raise DataError(
            f"graph.split is {split}, but it has shape {masks.shape}: {count} splits",
            where=origin,
            remedy=f"Choose graph.split from 0 to {count - 1}." if count else "Masks are [S, N].",
        )
    row: Array = masks[split]
    return row


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with input_files.opened(file) as stream, zipfile.ZipFile(stream) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: an encrypted member. NotImplementedError: an unknown compression.
        message = f"not a complete NumPy archive: {error}"
        raise DataError(message, where=str(file), remedy=_REMEDY) from None


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """The last one of this name, with or without ``.npy``."""
    return next(i for i in archive.infolist()[::-1] if i.filename.removesuffix(".npy") == name)


def _header(archive: zipfile.ZipFile, name: str, origin: str) -> Array:
    """One array without its content, after its header's claim has been held against the size of
    the member, and that against the available memory."""
    info = _member(archive, name)
    with archive.open(info) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read_header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read_header(stream)
        except ValueError as error:
            raise _damaged(origin, f"not a NumPy array: {error}") from None
        left = info.file_size - stream.tell()
    if dtype.hasobject:
        message = "refused: it holds Python objects, which are pickles that could run anything"
        raise DataError(message, where=origin, remedy="Save it as an array of numbers.")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != left:
        raise _damaged(origin, f"an array of shape {shape} and dtype {dtype} in {left} bytes")
    check_fits_memory(left, f"the array of shape {shape}", origin)
    try:
        return np.broadcast_to(np.zeros((), dtype), shape)
    except ValueError as error:  # more dimensions than an array can have
        raise _damaged(origin, f"not a NumPy array: {error}") from None


def _array(archive: zipfile.ZipFile, name: str, origin: str) -> Array:
    with archive.open(_member(archive, name)) as stream:
        try:
            array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        except ValueError as error:
            raise _damaged(origin, f"not a NumPy array: {error}") from None
    return array


def _damaged(origin: str, message: str) -> DataError:
    text = " ".join(message.split())
    text = text if len(text) <= 200 else text[:200] + "…"
    return DataError(text, where=origin, remedy="The file is damaged: get it or save it again.")
