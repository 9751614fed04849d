"""Ids of a partition's nodes and edges.

As in DGL, homogeneous ids run part by part and type by type, a part owns the in-edges of its
nodes, and its graph holds every edge that touches one of its nodes, hence also out-edges to other
parts (one hop of halo). Within a part, nodes of a type keep their original order, and edges are
numbered by type, destination and original id, so that in-edge lists are in original order for any
partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raygnn.graph.arrays import IntArray, index_type
from raygnn.graph.partition import edge_kernels
from raygnn.graph.partition.edge_kernels import IndexArray


@dataclass(frozen=True)
class Numbering:
    """Nodes of each part and their ids there, by node type.

    Attributes:
        starts: int64 ``[parts + 1]``, start of each part's nodes in ``order``.
        order: input ids, part by part.
        new_id: homogeneous ids, by input id.
        node_map: int64 ``[parts, 2]``, homogeneous id ranges, as in DGL's json.
    """

    starts: dict[str, IntArray]
    order: dict[str, IndexArray]
    new_id: dict[str, IndexArray]
    node_map: dict[str, IntArray]

    @classmethod
    def from_assignment(cls, assignment: Mapping[str, IndexArray], parts: int) -> Numbering:
        """Number the nodes of each part; ``assignment``: node type → part of each node."""
        groups = {t: edge_kernels.group(part, parts) for t, part in assignment.items()}
        starts = {ntype: group[0] for ntype, group in groups.items()}
        order = {ntype: group[1] for ntype, group in groups.items()}
        node_map = homogeneous(starts)
        index = index_type(sum(map(len, order.values())))
        new_id: dict[str, IndexArray] = {}
        for ntype, ids in order.items():
            shift = (node_map[ntype][:, 0] - starts[ntype][:-1]).astype(index)
            new_id[ntype] = np.empty(len(ids), dtype=index)
            new_id[ntype][ids] = np.repeat(shift, np.diff(starts[ntype])) + np.arange(len(ids))
        return cls(starts, order, new_id, node_map)

    @property
    def bounds(self) -> IntArray:
        """Start of the homogeneous ids of each part, int64 ``[parts + 1]``."""
        return np.concatenate([[0], np.max([m[:, 1] for m in self.node_map.values()], 0)])

    def describe(self, nodes: IntArray) -> tuple[IndexArray, IntArray]:
        """Return type number (int32) and part (int64) of homogeneous node ids."""
        starts = np.stack([m[:, 0] for m in self.node_map.values()], axis=1).reshape(-1)
        at = np.searchsorted(starts, nodes, side="right") - 1
        return (at % len(self.node_map)).astype(np.int32), at // len(self.node_map)


def homogeneous(starts: dict[Any, IntArray]) -> dict[Any, IntArray]:
    """Convert starts of each type's parts, type-wise ``[parts+1]``, to homogeneous ranges
    ``[parts, 2]``."""
    sizes = np.stack([np.diff(each) for each in starts.values()], axis=1)  # [parts, types]
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    return {
        kind: np.stack([ends[:, i] - sizes[:, i], ends[:, i]], axis=1)
        for i, kind in enumerate(starts)
    }
