"""From numbers as they are stored to numbers as they are computed with, whatever holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def to_compute(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it as ``dtype``; all others as they are.

    Whole numbers, masks and ids are never converted. Nothing is changed in place.

    Args:
        value: a tensor, or tensors in any nesting of mappings, lists, tuples, dataclasses and
            DGL graphs (known by their ``ndata`` and ``edata``).
        dtype: a floating-point type.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: to_compute(inner, dtype) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_compute(inner, dtype) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_compute(inner, dtype) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: to_compute(inner, dtype) for name, inner in named.items()})
    if hasattr(value, "ndata") and hasattr(value, "local_var"):
        return _graph(value, dtype)
    return value


def _graph(graph: Any, dtype: torch.dtype) -> Any:
    graph = graph.local_var()
    for ntype in graph.ntypes:
        frame = graph.nodes[ntype].data
        frame.update({name: to_compute(rows, dtype) for name, rows in frame.items()})
    for etype in graph.canonical_etypes:
        frame = graph.edges[etype].data
        frame.update({name: to_compute(rows, dtype) for name, rows in frame.items()})
    return graph
