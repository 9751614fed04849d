"""From a graph and the part of each node to the contents of DGL's partition files.

The convention is DGL's: homogeneous ids run part by part and type by type, a part owns the
in-edges of its nodes, and its graph holds every edge that touches one of its nodes, so the
out-edges to other parts too (one hop of halo). Within a part, nodes of a type keep their
original order, and edges are numbered by type, destination and original id: in-edge lists are
in original order however the graph is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.assign import group
from raygnn.graph.data import EdgeType, GraphData, etype_str
from raygnn.graph.partjson import IntArray

IndexArray = np.ndarray[Any, Any]  # int32 where that is wide enough, int64 elsewhere


@dataclass(frozen=True)
class PartGraph:
    """The content of a part's ``graph.dgl``, and what the manifest says of it.

    Attributes:
        src, dst: int64 ``[E_local]`` local ids; own nodes come first, then the halo.
        ndata, edata: DGL's reserved fields.
        halo: nodes of other parts that own in-edges come from.
        cut: own in-edges that come from other parts.
    """

    num_nodes: int
    src: Tensor
    dst: Tensor
    ndata: dict[str, Tensor]
    edata: dict[str, Tensor]
    halo: int
    cut: int


@dataclass(frozen=True)
class _Edges:
    """Edges of one type, renumbered.

    ``indptr`` ``[n_dst + 1]`` and ``src`` ``[E]`` are the whole graph's in-edge lists in new
    type-wise ids, ``order`` ``[E]`` the original ids, ``outer[p]`` the edges from part p to others.
    """

    indptr: IndexArray
    src: IndexArray
    order: IndexArray
    outer: list[IndexArray]


class Assembly:
    """A graph renumbered for its parts; gives what each part's files hold.

    Attributes:
        node_map: node type → int64 ``[parts, 2]`` homogeneous id ranges, as DGL's json has them.
        edge_map: edge type → the same.
    """

    def __init__(self, data: GraphData, assignment: dict[str, IntArray], parts: int):
        self.data, self.parts = data, parts
        self.typed = len(data.nodes) > 1 or len(data.edges) > 1
        self._node_starts: dict[str, IntArray] = {}
        self._node_order: dict[str, IndexArray] = {}
        new_ids: dict[str, IndexArray] = {}
        for ntype, frame in data.nodes.items():
            starts, order = group(assignment[ntype], parts)
            self._node_starts[ntype], self._node_order[ntype] = starts.astype(np.int64), order
            new_ids[ntype] = np.empty(frame.num, dtype=order.dtype)
            new_ids[ntype][order] = np.arange(frame.num, dtype=order.dtype)
        self._part_of = {
            ntype: np.repeat(np.arange(parts, dtype=np.int32), np.diff(starts))
            for ntype, starts in self._node_starts.items()
        }
        self._edges = {etype: self._renumber(etype, new_ids) for etype in data.edges}
        self._edge_starts = {
            etype: edges.indptr[self._node_starts[etype[2]]].astype(np.int64)
            for etype, edges in self._edges.items()
        }
        self.node_map = _homogeneous(self._node_starts)
        self.edge_map = _homogeneous(self._edge_starts)
        # type-wise id + shift[part] = homogeneous id
        index = np.int32 if data.num_nodes < 2**31 else np.int64
        self._node_shift = {
            ntype: (self.node_map[ntype][:, 0] - starts[:-1]).astype(index)
            for ntype, starts in self._node_starts.items()
        }
        self._edge_shift = {
            etype: self.edge_map[etype][:, 0] - starts[:-1]
            for etype, starts in self._edge_starts.items()
        }
        self._bounds = np.concatenate([[0], np.max([m[:, 1] for m in self.node_map.values()], 0)])

    def _renumber(self, etype: EdgeType, new_ids: dict[str, IndexArray]) -> _Edges:
        frame = self.data.edges[etype]
        indptr, order = group(new_ids[etype[2]][frame.dst], self.data.nodes[etype[2]].num)
        src = new_ids[etype[0]][frame.src[order]]
        from_part = self._part_of[etype[0]][src]
        to_part = np.repeat(self._part_of[etype[2]], np.diff(indptr))
        cut = np.flatnonzero(from_part != to_part).astype(order.dtype)
        starts, by_part = group(from_part[cut], self.parts)
        return _Edges(indptr, src, order, np.split(cut[by_part], starts[1:-1]))

    def num_nodes(self, part: int) -> dict[str, int]:
        """Own nodes of one part, by type."""
        return {t: int(starts[part + 1] - starts[part]) for t, starts in self._node_starts.items()}

    def num_edges(self, part: int) -> dict[EdgeType, int]:
        """Own edges of one part, by type."""
        return {t: int(starts[part + 1] - starts[part]) for t, starts in self._edge_starts.items()}

    def original_nodes(self, part: int) -> dict[str, Tensor]:
        """Node type → int64, original ids of the part's own nodes."""
        return {ntype: torch.from_numpy(self._nodes(ntype, part)) for ntype in self.data.nodes}

    def original_edges(self, part: int) -> dict[str, Tensor]:
        """``"src:rel:dst"`` → int64, original ids of the part's own edges."""
        return {etype_str(t): torch.from_numpy(self._own(t, part)) for t in self.data.edges}

    def node_data(self, part: int) -> dict[str, Tensor]:
        """``"<type>/<name>"`` → rows of the part's own nodes."""
        return {
            f"{ntype}/{name}": _rows(array, self._nodes(ntype, part))
            for ntype, frame in self.data.nodes.items()
            for name, array in frame.data.items()
        }

    def edge_data(self, part: int) -> dict[str, Tensor]:
        """``"src:rel:dst/<name>"`` → rows of the part's own edges."""
        return {
            f"{etype_str(etype)}/{name}": _rows(array, self._own(etype, part))
            for etype, frame in self.data.edges.items()
            for name, array in frame.data.items()
        }

    def _nodes(self, ntype: str, part: int) -> IntArray:
        first, last = self._node_starts[ntype][part : part + 2]
        return self._node_order[ntype][first:last].astype(np.int64)

    def _own(self, etype: EdgeType, part: int) -> IntArray:
        first, last = self._edge_starts[etype][part : part + 2]
        return self._edges[etype].order[first:last].astype(np.int64)

    def part(self, part: int) -> PartGraph:
        """One part's graph."""
        first, last = self._bounds[part], self._bounds[part + 1]
        inner = [self._inner_edges(etype, part) for etype in self.data.edges]
        outer = [self._outer_edges(etype, part) for etype in self.data.edges]
        own_src, own_dst = map(np.concatenate, zip(*inner, strict=True))
        out_src, out_dst, out_ids = map(np.concatenate, zip(*outer, strict=True))
        own, by_id = len(own_src), np.argsort(out_ids)
        types = np.arange(len(inner), dtype=np.int32)
        own_types = np.repeat(types, [len(src) for src, _ in inner])
        out_types = np.repeat(types, [len(ids) for *_, ids in outer])[by_id]
        del inner, outer

        far = np.zeros(self._bounds[-1], dtype=np.bool_)
        far[own_src] = True
        far[first:last] = False
        halo = int(np.count_nonzero(far))
        far[out_dst] = True
        nodes = np.concatenate([np.arange(first, last), np.flatnonzero(far)])
        local = np.empty(self._bounds[-1], dtype=np.int64)
        local[nodes] = np.arange(len(nodes))
        cut = int(np.count_nonzero((own_src < first) | (own_src >= last)))

        # The part's own edges have one range of ids; the others follow in the order of theirs.
        start = min(self.edge_map[etype][part, 0] for etype in self.data.edges)
        src = local[np.concatenate([own_src, out_src[by_id]])]
        dst = local[np.concatenate([own_dst, out_dst[by_id]])]
        node_type, node_part = self._describe(nodes)
        ndata = {
            "_ID": nodes,
            "part_id": node_part,
            "inner_node": (np.arange(len(nodes)) < last - first).astype(np.uint8),
        }
        edata = {
            "_ID": np.concatenate([np.arange(start, start + own), out_ids[by_id]]),
            "inner_edge": (np.arange(len(src)) < own).astype(np.uint8),
        }
        if self.typed:
            ndata["_TYPE"] = node_type
            edata["_TYPE"] = np.concatenate([own_types, out_types])
        return PartGraph(
            num_nodes=len(nodes),
            src=torch.from_numpy(src),
            dst=torch.from_numpy(dst),
            ndata={name: torch.from_numpy(array) for name, array in ndata.items()},
            edata={name: torch.from_numpy(array) for name, array in edata.items()},
            halo=halo,
            cut=cut,
        )

    def _inner_edges(self, etype: EdgeType, part: int) -> tuple[IndexArray, IndexArray]:
        """Homogeneous ids of both ends of the part's own edges."""
        edges = self._edges[etype]
        first, last = self._edge_starts[etype][part : part + 2]
        src = edges.src[first:last]
        src_ids = src + self._node_shift[etype[0]][self._part_of[etype[0]][src]]
        head, tail = self._node_starts[etype[2]][part : part + 2]
        shift = self._node_shift[etype[2]]
        rows = np.arange(head, tail, dtype=shift.dtype) + shift[part]
        return src_ids, np.repeat(rows, np.diff(edges.indptr[head : tail + 1]))

    def _outer_edges(self, etype: EdgeType, part: int) -> tuple[IndexArray, IndexArray, IntArray]:
        """Homogeneous ids of both ends, and of the edges, that leave the part."""
        edges = self._edges[etype]
        chosen = edges.outer[part]
        dst = np.searchsorted(edges.indptr, chosen, side="right").astype(edges.src.dtype) - 1
        dst_part = self._part_of[etype[2]][dst]
        return (
            edges.src[chosen] + self._node_shift[etype[0]][part],
            dst + self._node_shift[etype[2]][dst_part],
            chosen + self._edge_shift[etype][dst_part],
        )

    def _describe(self, nodes: IntArray) -> tuple[IndexArray, IntArray]:
        """Type number (int32) and part (int64) of homogeneous node ids."""
        starts = np.stack([m[:, 0] for m in self.node_map.values()], axis=1).reshape(-1)
        at = np.searchsorted(starts, nodes, side="right") - 1
        return (at % len(self.node_map)).astype(np.int32), at // len(self.node_map)


def _homogeneous(starts: dict[Any, IntArray]) -> dict[Any, IntArray]:
    """Where each type's parts start, type-wise ``[parts+1]`` → homogeneous ``[parts, 2]``."""
    sizes = np.stack([np.diff(each) for each in starts.values()], axis=1)  # [parts, types]
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    return {
        kind: np.stack([ends[:, i] - sizes[:, i], ends[:, i]], axis=1)
        for i, kind in enumerate(starts)
    }


def _rows(array: Any, ids: IntArray) -> Tensor:
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.take(array, ids, axis=0))
    return array.index_select(0, torch.from_numpy(ids))
