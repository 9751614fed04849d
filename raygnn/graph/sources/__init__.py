"""Sources of graphs: one module for each format, imported on first use.

A format's module has ``files(graph)`` (input files, in a fixed order), ``read(graph)`` (the
:class:`~raygnn.graph.data.GraphData`) and ``VERSION``, which rises when the same input yields
another graph. ``reading_bytes(graph)`` estimates the memory if it differs from the size of the
files; ``identity(graph)`` returns what else determines the graph, beside files and options.

Readers raise DataError for input that is missing, damaged or inconsistent, with the file and, if
possible, the row; and ConfigError for a wrong key of the configuration.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from raygnn.config.graph import GraphConfig, GraphSplit, ReversibleGraph
from raygnn.errors import ConfigError, DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import MASKS, EdgeFrame, EdgeType, GraphData, etype_str
from raygnn.graph.sources.input_files import out_of_memory, sha256, unpacked_size

# format → its module in `raygnn.graph`
_MODULES = {
    "planted": "sources.planted",
    "ogb": "sources.ogb",
    "triples": "sources.triples",
    "dgl": "sources.library_graphs",
    "dataset": "sources.datasets",
    "tables": "tables.table_stages",
}
_ROWS = 1 << 14  # scaled at a time
_PIECE = 1 << 20  # elements checked at a time
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = "give a graph with nodes and edges"


def load_graph(graph: GraphConfig, *, needs_masks: bool = True, trains: bool = True) -> GraphData:
    """Read, check (see `check`) and normalise the graph that a config names, with its
    arrays: see `raygnn.graph.data.NodeFrame`."""
    try:
        data: GraphData = _module(graph.format).read(graph)
        data.name = re.sub(r"[^\w.-]", "_", data.name)  # it becomes part of file names
        check(data, needs_masks=needs_masks, trains=trains)
        normalize(data, graph.normalize or "none")
        if has_reverses(graph):
            add_reverses(data)
    except MemoryError as error:
        raise out_of_memory(str(getattr(graph, "path", graph.format)), error) from None
    return data


def digest(graph: GraphConfig) -> str:
    """Return the SHA-256, in hex, of all that determines the graph: the contents of the input
    files, wherever they are stored, and the options. Raises DataError for an unreadable file."""
    module = _module(graph.format)
    others = {"path", "vocabulary"}
    if isinstance(graph, GraphSplit):
        others |= GraphSplit.model_fields.keys()
    options = graph.model_dump(mode="json", exclude=others)
    options["normalize"] = graph.normalize or "none"
    options["version"] = module.VERSION
    if hasattr(module, "identity"):
        options |= module.identity(graph)
    if not has_reverses(graph):  # digests from before there was the key stay the same
        options.pop("reverse", None)
    total = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in module.files(graph):
        total.update(bytes.fromhex(sha256(file)))
    return total.hexdigest()


def reading_bytes(graph: GraphConfig) -> int:
    """Estimate the memory that :func:`load_graph` takes at most, in bytes, without reading the
    graph: from its options, or from the sizes and headers of its files."""
    module = _module(graph.format)
    if hasattr(module, "reading_bytes"):
        return int(module.reading_bytes(graph))
    return sum(map(unpacked_size, module.files(graph)))


def has_reverses(graph: GraphConfig) -> bool:
    """Return True if each edge type gets a second one with its edges reversed."""
    return isinstance(graph, ReversibleGraph) and graph.reverse


def _module(graph_format: str) -> ModuleType:
    return importlib.import_module(f"raygnn.graph.{_MODULES[graph_format]}")


def normalize(data: GraphData, method: str) -> None:
    """Scale the array ``feat`` of every node type, keeping its floating dtype.

    Args:
        data: its arrays are replaced, or scaled in place if they are float32.
        method: ``none``; ``row``, each row divided by its sum unless that is 0 (Kipf & Welling
            2017); ``standard``, each column to mean 0 and deviation 1 over the nodes of a type
            (a constant column becomes 0).
    """
    if method == "none":
        return
    frames = [frame for frame in data.nodes.values() if "feat" in frame.data]
    if not frames:
        message = f"{method} scales the array 'feat', and no node type has one"
        remedy = "set graph.normalize to none, or store the features as 'feat'"
        raise ConfigError(message, where="graph.normalize", remedy=remedy)
    scale = {"row": _scale_rows, "standard": _standardize}[method]
    for frame in frames:
        feat = frame.data["feat"]
        if isinstance(feat, np.ndarray):
            kind = feat.dtype if feat.dtype.kind == "f" else np.dtype(np.float32)
            scaled = feat.astype(np.promote_types(kind, np.float32), copy=False)
            scale(scaled)
            frame.data["feat"] = scaled.astype(kind, copy=False)
        else:
            wide = feat.float()
            scale(wide.numpy())
            frame.data["feat"] = wide.to(feat.dtype)


def _scale_rows(feat: Array) -> None:
    for start in range(0, len(feat), _ROWS):
        chunk = feat[start : start + _ROWS]
        total = chunk.sum(axis=1, keepdims=True, dtype=np.float64)
        total[total == 0] = 1
        chunk /= total.astype(chunk.dtype)


def _standardize(feat: Array) -> None:
    mean = _column_mean(feat, np.zeros(feat.shape[1]), power=1)
    deviation = np.sqrt(_column_mean(feat, mean, power=2))
    deviation[deviation == 0] = 1
    for start in range(0, len(feat), _ROWS):
        chunk = feat[start : start + _ROWS]
        chunk -= mean.astype(chunk.dtype)
        chunk /= deviation.astype(chunk.dtype)


def _column_mean(feat: Array, center: Array, power: int) -> Array:
    """Return the mean over the rows of ``(feat - center) ** power``, in float64."""
    total = np.zeros(feat.shape[1])
    for start in range(0, len(feat), _ROWS):
        total += ((feat[start : start + _ROWS] - center) ** power).sum(axis=0)
    return total / max(len(feat), 1)


def add_reverses(data: GraphData) -> None:
    """Give every edge type ``("a", "likes", "b")`` a second one, ``("b", "rev_likes", "a")``.

    Its edge i reverses edge i, with the same arrays: relation, weights, masks. Nothing is copied.
    ``data.reverses`` maps each type to its reverse.
    """
    for etype, edges in list(data.edges.items()):
        other: EdgeType = (etype[2], f"rev_{etype[1]}", etype[0])
        if other in data.edges:
            message = f"there is an edge type {etype_str(other)} already"
            remedy = "set graph.reverse to false, or give the edge type another name"
            raise ConfigError(message, where="graph.reverse", remedy=remedy)
        data.edges[other] = EdgeFrame(edges.dst, edges.src, dict(edges.data))
        data.reverses[etype] = other
        for name in edges.data:
            key, other_key = f"{etype_str(etype)}/{name}", f"{etype_str(other)}/{name}"
            if key in data.names:
                data.names[other_key] = data.names[key]


def check(data: GraphData, *, needs_masks: bool = True, trains: bool = True) -> None:
    """Raise DataError if the graph cannot be trained on.

    The arrays are read in pieces of a few megabytes, so that a graph of a hundred gigabytes is
    checked without a copy. Checks that feature matrices are finite and not empty; labels run from
    -1 (unknown) to below the number of nodes, or are finite or NaN (unknown); masks are disjoint,
    and their nodes have labels; there are nodes, edges and training nodes (or, if no node type has
    masks, training edges). The sources check the rest: one row per node or edge, ends in range,
    labels int64 or float32, masks bool. The error names the file (``data.origin``), the first bad
    row and its value.

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
