"""Scaling of the features, once, over all nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from raygnn.errors import ConfigError
from raygnn.graph.data import GraphData

_ROWS = 1 << 14


def normalize(data: GraphData, method: str) -> None:
    """Scale the array ``feat`` of every node type, keeping its floating dtype.

    Args:
        data: its arrays are replaced, or scaled in place where they are float32.
        method: ``none``; ``row``, each row divided by its sum unless that is 0 (Kipf & Welling
            2017); ``standard``, each column to mean 0 and deviation 1 over the nodes of a type
            (a constant column becomes 0).

    Raises:
        ConfigError: no node type has ``feat``.
    """
    if method == "none":
        return
    frames = [frame for frame in data.nodes.values() if "feat" in frame.data]
    if not frames:
        raise ConfigError(
            f"{method} scales the array 'feat', and no node type has one",
            where="graph.normalize",
            remedy="Set graph.normalize to none, or store the features as 'feat'.",
        )
    scale = {"row": _row, "standard": _standard}[method]
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


def _row(feat: np.ndarray[Any, Any]) -> None:
    for start in range(0, len(feat), _ROWS):
        chunk = feat[start : start + _ROWS]
        total = chunk.sum(axis=1, keepdims=True, dtype=np.float64)
        total[total == 0] = 1
        chunk /= total.astype(chunk.dtype)


def _standard(feat: np.ndarray[Any, Any]) -> None:
    mean = _column_mean(feat, np.zeros(feat.shape[1]), power=1)
    deviation = np.sqrt(_column_mean(feat, mean, power=2))
    deviation[deviation == 0] = 1
    for start in range(0, len(feat), _ROWS):
        chunk = feat[start : start + _ROWS]
        chunk -= mean.astype(chunk.dtype)
        chunk /= deviation.astype(chunk.dtype)


def _column_mean(
    feat: np.ndarray[Any, Any], center: np.ndarray[Any, Any], power: int
) -> np.ndarray[Any, Any]:
    """Mean over the rows of ``(feat - center) ** power``, in float64."""
    total = np.zeros(feat.shape[1])
    for start in range(0, len(feat), _ROWS):
        total += ((feat[start : start + _ROWS] - center) ** power).sum(axis=0)
    return total / max(len(feat), 1)
