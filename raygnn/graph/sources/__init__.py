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
import re
from types import ModuleType

import numpy as np

from raygnn.config.graph import GraphConfig, GraphSplit, ReversibleGraph
from raygnn.errors import ConfigError
from raygnn.graph import validate
from raygnn.graph.arrays import Array
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, etype_str
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


def load_graph(graph: GraphConfig, *, needs_masks: bool = True, trains: bool = True) -> GraphData:
    """Read, check (see `validate.check`) and normalise the graph that a config names, with its
    arrays: see `raygnn.graph.data.NodeFrame`."""
    try:
        data: GraphData = _module(graph.format).read(graph)
        data.name = re.sub(r"[^\w.-]", "_", data.name)  # it becomes part of file names
        validate.check(data, needs_masks=needs_masks, trains=trains)
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
