"""One graph of a dataset of graphs: small, complete, in memory, typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType


@dataclass(frozen=True)
class Sample:
    """One graph with its data and target.

    Attributes:
        num_nodes: node type → number of nodes, from 0.
        edges: edge type → sources and destinations, int64 ``[E]`` each, in edge order.
        node_data: node type → name → ``[N, …]``, any dtype, as stored.
        edge_data: edge type → name → ``[E, …]``.
        y: target ``[]`` or ``[K]``, as stored; None if unknown.
    """

    num_nodes: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Tensor, Tensor]]
    node_data: Mapping[str, Mapping[str, Tensor]]
    edge_data: Mapping[EdgeType, Mapping[str, Tensor]] = field(default_factory=dict)
    y: Tensor | None = None

    def describe(self) -> dict[str, Any]:
        """Return the graph's schema as JSON: types, arrays and target, which all graphs share."""
        return {
            "nodes": {t: _described(self.node_data.get(t, {})) for t in self.num_nodes},
            "edges": [[list(e), _described(self.edge_data.get(e, {}))] for e in self.edges],
            "target": None if self.y is None else _described({"y": self.y}, 0)["y"],
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> Sample:
        """Build a graph of that schema without nodes and edges.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: ``described`` is damaged.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        edges = {_etype(ends): arrays for ends, arrays in described["edges"]}
        target = described["target"]
        return cls(
            num_nodes=dict.fromkeys(described["nodes"], 0),
            edges=dict.fromkeys(edges, (nothing, nothing)),
            node_data={t: _empty(arrays) for t, arrays in described["nodes"].items()},
            edge_data={e: _empty(arrays) for e, arrays in edges.items()},
            y=None if target is None else _empty({"y": target})["y"].new_zeros(_shape(target)),
        )


class Samples(Protocol):
    """Dataset of ``num`` graphs, the same on every rank.

    Attributes:
        num_classes: number of classes of the targets; None if only reading all graphs would tell.
        splits: "train", "val", "test" → graph numbers, int64, ascending and disjoint; empty for
            graphs to predict that have no splits.
    """

    num: int
    num_classes: int | None
    splits: Mapping[str, np.ndarray]

    def __getitem__(self, number: int) -> Sample:
        """Return graph ``number``, from 0. Raises whatever its dataset raises."""
        ...


def _described(arrays: Mapping[str, Tensor], row: int = 1) -> dict[str, Any]:
    """Return name → dtype and shape, without the first ``row`` dimensions."""
    return {
        name: [str(array.dtype).removeprefix("torch."), list(array.shape[row:])]
        for name, array in arrays.items()
    }


def _empty(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    empty = {}
    for name, about in arrays.items():
        dtype = getattr(torch, about[0])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"no dtype: {about[0]}")
        empty[name] = torch.empty((0, *_shape(about)), dtype=dtype)
    return empty


def _shape(about: Any) -> tuple[int, ...]:
    _, shape = about
    if not all(type(number) is int and 0 <= number < 2**31 for number in shape):
        raise ValueError(f"no shape: {shape}")
    return tuple(shape)


def _etype(names: Any) -> EdgeType:
    source, name, target = names
    if not all(isinstance(each, str) for each in names):
        raise TypeError(f"not an edge type (three strings): {names}")
    return source, name, target
