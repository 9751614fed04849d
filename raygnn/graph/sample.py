"""One graph of many, as a dataset gives it: small, whole, in memory, typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from raygnn.graph.data import EdgeType


@dataclass(frozen=True)
class Sample:
    """One graph and what is known of it.

    Attributes:
        num_nodes: node type → how many there are; may be 0.
        edges: edge type → sources and destinations, int64 ``[E]`` each, in the order of the
            edges' numbers.
        node_data: node type → name → ``[N, …]``, any dtype, as stored.
        edge_data: edge type → name → ``[E, …]``.
        y: the target, ``[]`` or ``[K]``, as stored.
    """

    num_nodes: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Tensor, Tensor]]
    node_data: Mapping[str, Mapping[str, Tensor]]
    edge_data: Mapping[EdgeType, Mapping[str, Tensor]] = field(default_factory=dict)
    y: Tensor | None = None


class Samples(Protocol):
    """A dataset of graphs, the same on every rank.

    Attributes:
        num: how many there are.
        num_classes: how many classes the targets have, where that is known without a look at
            all graphs.
        splits: "train", "val", "test" → numbers of graphs, int64, ascending and disjoint.
    """

    num: int
    num_classes: int | None
    splits: Mapping[str, np.ndarray]

    def __getitem__(self, number: int) -> Sample:
        """Graph ``number``, from 0. Raises whatever its dataset raises."""
        ...
