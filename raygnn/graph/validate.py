"""Checks of a graph, whatever its format. Each reads the arrays in pieces of a few megabytes, so
that a graph of a hundred gigabytes is checked without a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import MASKS, EdgeType, GraphData, etype_str

_PIECE = 1 << 20  # elements checked at a time
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = "give a graph with nodes and edges"


def check(data: GraphData, *, needs_masks: bool = True, trains: bool = True) -> None:
    """Raise DataError if the graph cannot be trained on.

    Checks that feature matrices are finite and not empty; labels run from -1 (unknown) to below
    the number of nodes, or are finite or NaN (unknown); masks are bool and disjoint, and their
    nodes have labels; there are nodes, edges and training nodes (or, if no node type has masks,
    training edges). The sources check the rest: one row per node or edge, ends in range, labels
    int64 or float32. The error names the file (``data.origin``), the first bad row and its value.

    Args:
        needs_masks: require training nodes or edges even if there are no masks.
        trains: the graph is trained on; otherwise masks may be empty.
    """
    if not data.num_nodes:
        raise _error(data, "nodes", "the graph has no nodes", _NOTHING)
    if not data.num_edges:
        raise _error(data, "edges", "the graph has no edges", _NOTHING)
    for kind, arrays in data.arrays.items():
        for name, array in arrays.items():
            _check_finite(data, f"{kind}/{name}", array)
    for ntype, frame in data.nodes.items():
        _check_labels(data, ntype)
        _check_masks(data, ntype, frame.data, "node")
    if trains:
        _check_training(data, needs_masks)


def _check_training(data: GraphData, needs_masks: bool) -> None:
    """Check that there are nodes to train on, or edges if no nodes have masks."""
    of, frames = "nodes", {t: f.data for t, f in data.nodes.items() if "train_mask" in f.data}
    if not frames:
        edges = {etype_str(e): f.data for e, f in data.edges.items() if "train_mask" in f.data}
        for key, arrays in edges.items():
            _check_masks(data, key, arrays, "edge")
        of, frames = ("edges", edges) if edges else (of, frames)
    masks = {kind: arrays["train_mask"] for kind, arrays in frames.items()}
    if (masks or needs_masks) and not any(mask.any() for mask in masks.values()):
        why = "train_mask is nowhere true" if masks else "no node type has a train_mask"
        remedy = f"give an array train_mask that is true for the {of} to train on"
        key = f"{next(iter(masks or data.nodes))}/train_mask"
        raise _error(data, key, f"there are no training {of}: {why}", remedy)


def _check_finite(data: GraphData, key: str, array: Any) -> None:
    """Check matrices of floats, which are features unless they are labels; a single column other
    than ``feat`` may be anything."""
    if (array.ndim < 2 and not key.endswith("/feat")) or key.endswith("/label"):
        return
    if key.endswith("/feat") and tuple(array.shape[1:]) == (0,):
        message = f"its shape is {tuple(array.shape)}: no features"
        raise _error(data, key, message, "give at least one feature")
    is_numpy = isinstance(array, np.ndarray)
    if (array.dtype.kind not in "fc") if is_numpy else (not array.is_floating_point()):
        return
    for start, piece in _pieces(array):
        finite = np.isfinite(piece) if is_numpy else piece.isfinite().numpy()
        if is_numpy and piece.dtype == np.float64:  # batches are float32 at most
            finite &= np.abs(piece) <= _LARGEST
        if finite.all():
            continue
        at = np.unravel_index(int(np.argmin(finite)), finite.shape)
        value = float(piece[at])
        column = f" in column {', '.join(str(i) for i in at[1:])}" if len(at) > 1 else ""
        remedy = "features must be finite, and fit float32: replace or drop such rows"
        message = f"the value{column} is {value}"
        raise _error(data, key, message, remedy, row=start + int(at[0]))


def _check_labels(data: GraphData, ntype: str) -> None:
    frame = data.nodes[ntype]
    label = frame.data.get("label")
    if label is None:
        return
    key = f"{ntype}/label"
    rows = label.reshape(len(label), -1)
    if label.dtype == np.float32:
        infinite = _first(np.isinf(rows).any(1))
        if infinite is not None:
            message = f"the label is {label[infinite]}"
            raise _error(data, key, message, "labels are finite; NaN means unknown", row=infinite)
        return
    # a vocabulary from other tables may have more categories than there are nodes here
    classes = max(frame.num, len(data.names.get(key, ())), 1)
    bad = _first(((rows < -1) | (rows >= classes)).any(1))
    if bad is not None:
        remedy = "labels run from 0 to the number of classes - 1; -1 means unknown"
        raise _error(data, key, f"the label is {label[bad]}", remedy, row=bad)


def _check_masks(data: GraphData, kind: str, arrays: Mapping[str, Any], of: str) -> None:
    """Check the masks of a node or edge type ``kind``; ``of`` is ``"node"`` or ``"edge"``."""
    label = arrays.get("label") if of == "node" else None
    seen: list[str] = []
    for name in MASKS:
        mask = arrays.get(name)
        if mask is None:
            continue
        key = f"{kind}/{name}"
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.ndim != 1:
            message = f"it has shape {tuple(mask.shape)} and dtype {mask.dtype}"
            raise _error(data, key, message, f"A mask is one bool for each {of}.")
        for other in seen:
            both = _first(mask & arrays[other])
            if both is not None:
                message = f"the {of} is in {other} and in {name}"
                remedy = f"each {of} belongs to one of train, val and test at most"
                raise _error(data, key, message, remedy, row=both)
        seen.append(name)
        unlabelled = None if label is None else _first(mask & _unknown(label))
        if unlabelled is not None:
            remedy = f"give it a label or take it out of {name}"
            message = f"the node is in {name} and has no label"
            raise _error(data, key, message, remedy, row=unlabelled)


def _unknown(label: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows = label.reshape(len(label), -1)  # one known label of several is enough
    return np.asarray((np.isnan(rows) if label.dtype.kind == "f" else rows < 0).all(1))


def _first(bad: np.ndarray[Any, Any]) -> int | None:
    at = int(np.argmax(bad)) if len(bad) else 0
    return at if len(bad) and bad[at] else None


def _pieces(array: Any) -> Iterator[tuple[int, Any]]:
    """Yield ``(first row, rows)`` in pieces of about `_PIECE` elements."""
    width = max(int(np.prod(array.shape[1:], dtype=np.int64)), 1)
    rows = max(_PIECE // width, 1)
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def _error(
    data: GraphData, key: str, message: str, remedy: str, *, row: int | None = None
) -> DataError:
    where = data.where(key)
    return DataError(message, where=where if row is None else f"{where}, row {row}", remedy=remedy)


def check_weights(name: str, etype: EdgeType, weight: Any) -> None:
    """Raise DataError unless weights (array or tensor) are one finite number from 0 per edge."""
    which = f"array {name!r} of edge type {etype_str(etype)}"
    if math.prod(weight.shape[1:]) != 1:
        message = f"{which} has rows of {list(weight.shape[1:])}, expected one weight for each edge"
        raise DataError(message, remedy="give each edge one weight, or remove sampling.edge_weight")
    if len(weight) and not (weight.min() >= 0 and weight.max() < math.inf):
        message = f"{which} holds weights that are negative or not finite"
        raise DataError(message, remedy="make them numbers from 0, or remove sampling.edge_weight")
