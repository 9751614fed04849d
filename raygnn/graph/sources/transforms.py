"""Transforms of a graph that was read: feature scaling, reverse edges, both directions."""

from __future__ import annotations

import numpy as np

from raygnn.errors import ConfigError
from raygnn.graph.arrays import Array
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, etype_str

REVERSE_PREFIX = "rev_"
_ROWS = 1 << 14


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
        other: EdgeType = (etype[2], REVERSE_PREFIX + etype[1], etype[0])
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


def both_directions(a: Array, b: Array, num: int) -> tuple[Array, Array]:
    """Turn each pair ``(a[i], b[i])`` of ids below ``num``, itself below 2^31, into two directed
    edges, every edge once, also of pairs that repeat. Return sources and destinations, int64
    ``[E]``, in order of destination, then source. A self-loop is one edge."""
    keys = np.concatenate((a * num + b, b * num + a))
    keys.sort()
    fresh = np.empty(len(keys), dtype=bool)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    keys = keys[fresh]
    target = keys // num
    keys -= target * num
    return keys, target
