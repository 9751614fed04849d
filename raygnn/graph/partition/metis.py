"""METIS (Karypis & Kumar 1998), as pymetis has it: deterministic, and with several constraints."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable
from ctypes import c_void_p
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from raygnn.errors import CapabilityError, DataError
from raygnn.graph.arrays import Array, IntArray, both_directions
from raygnn.graph.data import GraphData
from raygnn.graph.partition import edge_kernels

# Yields the edges as chunks of (source ids, destination ids), the same ones at each call.
Passes: TypeAlias = Callable[[], Iterable[tuple[Array, Array]]]

# Largest number of parts for which METIS's authors advise recursive bisection.
_BISECTED = 8
# Edges of the largest part over the mean from which on METIS runs again with a constraint on
# edges. The constraint is not free: on planted graphs of 100,000 nodes and 5,000,000 edges, plain
# and typed, it cut up to 12 % more edges (plain, 8 parts: 22.4 instead of 20.0 %). Without it, the
# largest part had 1 to 6 % more edges than the mean, or 6 to 9 % if half of the communities were 9
# times as dense. But METIS cuts apart two halves of unequal density as they are.
_EDGE_IMBALANCE = 1.2
_OK = 1
_FAILURES = {-2: "invalid input", -3: "out of memory"}
# With fewer training nodes per part, METIS gives up the balance of all nodes (it left a part
# empty) for a balance of training nodes that hardly matters.
_TRAINING_NODES_TO_BALANCE = 8


def undirected(passes: Passes, num: int) -> tuple[IntArray, IntArray]:
    """Build the graph for METIS: every edge once in each direction, without loops. Returns row
    pointers ``[num + 1]`` and neighbours, sorted in each list. ``num``: nodes, below 2³¹."""
    none = np.empty(0, np.int32)  # a graph may have no edge types, and thus no chunks
    src, dst = (np.concatenate(ends) for ends in zip((none, none), *passes(), strict=True))
    others = src != dst
    src, dst = both_directions(src[others], dst[others], num)
    return edge_kernels.starts_of(dst, num), src


def in_degrees(passes: Passes, num: int) -> IntArray:
    """Count the in-edges of each node, over all types, which its part stores."""
    degrees = np.zeros(num + 1, dtype=np.int64)
    for _, dst in passes():
        edge_kernels.add_counts(dst, degrees)
    return degrees[1:]


def constraints(data: GraphData, parts: int) -> IntArray:
    """Return ``[nodes, constraints]``, whose columns are balanced: the nodes of each type, and the
    training nodes of each type."""
    columns = []
    start = 0
    for frame in data.nodes.values():
        column = np.zeros(data.num_nodes, dtype=np.int64)
        column[start : start + frame.num] = 1
        train = np.flatnonzero(frame.data.get("train_mask", ()))
        if frame.num >= parts:
            columns.append(column)
        if _TRAINING_NODES_TO_BALANCE * parts <= len(train) < frame.num:
            column = np.zeros_like(column)
            column[start + train] = 1
            columns.append(column)
        start += frame.num
    return np.stack(columns, axis=1) if columns else np.ones((data.num_nodes, 1), dtype=np.int64)


def divide(
    graph: tuple[IntArray, IntArray],
    parts: int,
    weights: IntArray,
    loads: IntArray | None,
    what: str,
    edge_weights: IntArray | None = None,
) -> IntArray:
    """Partition with `metis`, again with a constraint on in-edges (``loads``, int64 ``[nodes]``) if
    a part has too many; None = ``weights`` constrain them already."""
    try:
        assigned = metis(*graph, parts, weights, edge_weights)
        if loads is not None:
            held = np.bincount(assigned, loads, parts)
            if held.max() > _EDGE_IMBALANCE * held.mean():
                weights = np.concatenate([weights, loads[:, None]], axis=1)
                assigned = metis(*graph, parts, weights, edge_weights)
    except RuntimeError as error:
        message = f"METIS could not divide {what} into {parts} parts: {error}"
        raise DataError(message, remedy="use fewer parts, or partition.method: random") from error
    return assigned


def metis(
    indptr: IntArray,
    indices: IntArray,
    parts: int,
    weights: IntArray,
    edge_weights: IntArray | None = None,
) -> IntArray:
    """Partition with METIS, minimising the edge cut. The same input yields the same parts.

    pymetis's Python function accepts one weight per node, METIS's several, so this calls METIS in
    pymetis's library (2025.2 to 2025.2.2).

    Args:
        indptr, indices: integers, a symmetric graph without self-loops and duplicate edges; the
            neighbours of node v are ``indices[indptr[v]:indptr[v+1]]``.
        parts: fewer than there are nodes.
        weights: int64 ``[nodes, constraints]``; each column is balanced.
        edge_weights: int64, for each of ``indices``; None = all are 1.

    Returns each node's part, int64 ``[nodes]``. Raises RuntimeError if METIS failed.
    """
    library, index = _library()
    function = library.METIS_PartGraphKway
    if parts <= _BISECTED:
        function = library.METIS_PartGraphRecursive
    num_nodes, constraints = weights.shape
    number = np.ctypeslib.as_ctypes_type(index)
    assigned, cut = np.empty(num_nodes, index), number()
    xadj, adjncy, vwgt, adjwgt = (  # pointers that keep their arrays
        None if array is None else np.ascontiguousarray(array, index).ctypes.data_as(c_void_p)
        for array in (indptr, indices, weights, edge_weights)
    )
    sizes = [ctypes.byref(number(value)) for value in (num_nodes, constraints, parts)]
    # None: sizes of nodes, shares of the parts, tolerances, options
    status = function(
        *sizes[:2], xadj, adjncy, vwgt, None, adjwgt, sizes[2], None, None, None, ctypes.byref(cut),
        assigned.ctypes.data_as(c_void_p),
    )  # fmt: skip
    if status != _OK:
        raise RuntimeError(_FAILURES.get(status, f"status {status}"))
    return assigned.astype(np.int64, copy=False)


@cache
def _library() -> tuple[Any, np.dtype[Any]]:
    """Load pymetis's library; returns it and its integer dtype."""
    try:
        pymetis = importlib.import_module("pymetis")
        library = ctypes.CDLL(importlib.import_module("pymetis._internal").__file__)
        _ = library.METIS_PartGraphRecursive, library.METIS_PartGraphKway
        return library, pymetis.zero_copy_dtype()
    except (ImportError, AttributeError, OSError) as error:
        raise CapabilityError(
            f"METIS is not available here: {error}",
            remedy="pip install pymetis==2025.2.2 (which needs a C++ compiler if there is no wheel "
            "for the processor), or set partition.method to random",
        ) from error
