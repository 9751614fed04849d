"""Contents of DGL's partition files, from a graph and the part of each node.

As in DGL, homogeneous ids run part by part and type by type, a part owns the in-edges of its
nodes, and its graph holds every edge that touches one of its nodes, hence also out-edges to other
parts (one hop of halo). Within a part, nodes of a type keep their original order, and edges are
numbered by type, destination and original id, so that in-edge lists are in original order for any
partition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.arrays import IntArray, OnDemand, Rows, index_type
from raygnn.graph.data import EdgeType, GraphData, etype_str
from raygnn.graph.partition import edge_kernels
from raygnn.graph.partition.edge_kernels import IndexArray


@dataclass(frozen=True)
class PartGraph:
    """Content of a part's ``graph.dgl``, and its numbers in the manifest.

    Attributes:
        src, dst: int64 ``[E_local]`` local ids; owned nodes come first, then the halo.
        ndata, edata: DGL's reserved fields.
        halo: number of nodes of other parts that are sources of owned in-edges.
        cut: number of owned in-edges from other parts.
    """

    num_nodes: int
    src: IntArray | OnDemand
    dst: IntArray | OnDemand
    ndata: Mapping[str, IndexArray]
    edata: Mapping[str, IndexArray | OnDemand]
    halo: int
    cut: int


@dataclass(frozen=True)
class _RenumberedEdges:
    """Edges of one type: in-edge lists of the input (see `edge_kernels`), and their renumbering.

    Attributes:
        indptr, order, src: the lists in input ids; ``src`` in input order.
        new_indptr: int64 ``[n_dst + 1]``, starts of the lists after renumbering the rows.
        leaving: ``[parts + 1]``, starts of the edges that leave each part, in ``heads`` (type-wise
            ids of the destinations) and ``places`` (type-wise ids of the edges).
    """

    indptr: IntArray
    order: IndexArray
    src: IntArray
    new_indptr: IntArray
    leaving: IntArray
    heads: IndexArray
    places: IndexArray


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


class PartedGraph(ABC):
    """A graph renumbered for its parts, with the contents of each part's files.

    Args:
        edge_starts: edge type → int64 ``[parts + 1]``, start of each part's edges.

    Attributes:
        node_map, edge_map: type → int64 ``[parts, 2]`` homogeneous id ranges, as in DGL's json.
    """

    def __init__(
        self, data: GraphData, numbering: Numbering, edge_starts: dict[EdgeType, IntArray]
    ):
        self.data, self.numbering = data, numbering
        self.typed = len(data.nodes) > 1 or len(data.edges) > 1
        self._node_starts, self._edge_starts = numbering.starts, edge_starts
        self.node_map = numbering.node_map
        self.edge_map: dict[EdgeType, IntArray] = homogeneous(edge_starts)
        self.parts = len(numbering.bounds) - 1

    def num_nodes(self, part: int) -> dict[str, int]:
        """Return the numbers of owned nodes of one part, by type."""
        return {t: int(starts[part + 1] - starts[part]) for t, starts in self._node_starts.items()}

    def num_edges(self, part: int) -> dict[EdgeType, int]:
        """Return the numbers of owned edges of one part, by type."""
        return {t: int(starts[part + 1] - starts[part]) for t, starts in self._edge_starts.items()}

    def original_nodes(self, part: int) -> dict[str, Tensor]:
        """Return node type → original ids of the part's owned nodes, int64."""
        return {ntype: torch.from_numpy(self._nodes(ntype, part)) for ntype in self.data.nodes}

    def node_data(self, part: int) -> dict[str, Rows]:
        """Return ``"<type>/<name>"`` → rows of the part's owned nodes."""
        own = {t: self._nodes(t, part) for t, frame in self.data.nodes.items() if frame.data}
        return {
            f"{ntype}/{name}": Rows(array, ids)
            for ntype, ids in own.items()
            for name, array in self.data.nodes[ntype].data.items()
        }

    @abstractmethod
    def original_edges(self, part: int) -> Mapping[str, Tensor | OnDemand]:
        """Return ``"src:rel:dst"`` → original ids of the part's owned edges, int64."""

    @abstractmethod
    def edge_data(self, part: int) -> Mapping[str, Rows | OnDemand]:
        """Return ``"src:rel:dst/<name>"`` → rows of the part's owned edges."""

    @abstractmethod
    def part(self, part: int) -> PartGraph:
        """Build one part's graph."""

    def _nodes(self, ntype: str, part: int) -> IntArray:
        first, last = self._node_starts[ntype][part : part + 2]
        return self.numbering.order[ntype][first:last].astype(np.int64)


class Assembly(PartedGraph):
    """Renumbered graph whose edges are in memory. Its methods are thread-safe."""

    def __init__(self, data: GraphData, assignment: dict[str, IntArray], parts: int):
        numbering = Numbering.from_assignment(assignment, parts)
        self._node_order, self._new_id = numbering.order, numbering.new_id
        self._part_of = {
            ntype: np.repeat(np.arange(parts, dtype=np.int32), np.diff(starts))
            for ntype, starts in numbering.starts.items()
        }
        self.data, self.parts = data, parts
        input_part = {ntype: part.astype(np.int32) for ntype, part in assignment.items()}
        self._edges = {etype: self._lists(etype, input_part[etype[0]]) for etype in data.edges}
        edge_starts = {
            etype: edges.new_indptr[numbering.starts[etype[2]]]
            for etype, edges in self._edges.items()
        }
        super().__init__(data, numbering, edge_starts)
        # type-wise id + shift[part] = homogeneous id
        index = index_type(data.num_nodes)
        self._node_shift = {
            ntype: (self.node_map[ntype][:, 0] - starts[:-1]).astype(index)
            for ntype, starts in self._node_starts.items()
        }
        self._edge_shift = {
            etype: self.edge_map[etype][:, 0] - starts[:-1]
            for etype, starts in self._edge_starts.items()
        }
        self._bounds = numbering.bounds

    def _lists(self, etype: EdgeType, src_part: IndexArray) -> _RenumberedEdges:
        frame, rows = self.data.edges[etype], self._node_order[etype[2]]
        src, dst = np.ascontiguousarray(frame.src), np.ascontiguousarray(frame.dst)
        indptr, order = edge_kernels.in_lists(dst, len(rows))
        new_indptr = np.zeros(len(rows) + 1, dtype=np.int64)
        edge_kernels.degrees_in(indptr, rows, new_indptr)
        given = (indptr, order, src, rows, self._part_of[etype[2]], src_part)
        counts = np.zeros(self.parts, dtype=np.int64)
        edge_kernels.count_leaving(*given, counts)
        leaving = np.concatenate([[0], np.cumsum(counts)])
        heads = np.empty(leaving[-1], dtype=index_type(len(rows)))
        places = np.empty(leaving[-1], dtype=index_type(len(src)))
        edge_kernels.put_leaving(*given, new_indptr, leaving[:-1].copy(), heads, places)
        return _RenumberedEdges(indptr, order, src, new_indptr, leaving, heads, places)

    def original_edges(self, part: int) -> dict[str, Tensor]:
        return {etype_str(t): torch.from_numpy(self._own(t, part)) for t in self.data.edges}

    def edge_data(self, part: int) -> dict[str, Rows]:
        own = {t: self._own(t, part) for t, frame in self.data.edges.items() if frame.data}
        return {
            f"{etype_str(etype)}/{name}": Rows(array, ids)
            for etype, ids in own.items()
            for name, array in self.data.edges[etype].data.items()
        }

    def _own(self, etype: EdgeType, part: int) -> IntArray:
        edges = self._edges[etype]
        places = np.empty(self.num_edges(part)[etype], dtype=np.int64)
        edge_kernels.places_of(edges.indptr, edges.order, self._rows(etype, part), places)
        return places

    def _rows(self, etype: EdgeType, part: int) -> IndexArray:
        first, last = self._node_starts[etype[2]][part : part + 2]
        return self._node_order[etype[2]][first:last]

    def part(self, part: int) -> PartGraph:
        first, last = (int(bound) for bound in self._bounds[part : part + 2])
        outer = [self._outer_edges(etype, part) for etype in self.data.edges]
        out_src, out_dst, out_ids = map(np.concatenate, zip(*outer, strict=True))
        sizes = list(self.num_edges(part).values())
        own = sum(sizes)
        types = np.arange(len(outer), dtype=np.int32)
        out_types = np.repeat(types, [len(ids) for *_, ids in outer])
        if self.typed:  # sorted runs, one for each type and part, which a stable sort merges
            by_id = np.argsort(out_ids, kind="stable")
            out_src, out_dst, out_ids, out_types = (
                array[by_id] for array in (out_src, out_dst, out_ids, out_types)
            )
        del outer

        # Owned edges come first; they have one range of ids.
        src, dst = (np.empty(own + len(out_ids), dtype=np.int64) for _ in range(2))
        src[own:], dst[own:] = out_src, out_dst
        far = np.zeros(self._bounds[-1], dtype=np.bool_)
        cut, begin = 0, 0
        for etype, size in zip(self.data.edges, sizes, strict=True):
            edges, end = self._edges[etype], begin + size
            cut += edge_kernels.own_edges(
                edges.indptr,
                edges.order,
                edges.src,
                self._rows(etype, part),
                self._new_id[etype[0]],
                int(self.node_map[etype[2]][part, 0]),
                first,
                last,
                far,
                src[begin:end],
                dst[begin:end],
            )
            begin = end
        halo = int(np.count_nonzero(far))
        far[out_dst] = True
        nodes = np.concatenate([np.arange(first, last), np.flatnonzero(far)])
        local = np.empty(self._bounds[-1], dtype=index_type(len(far)))
        local[nodes] = np.arange(len(nodes), dtype=local.dtype)
        edge_kernels.make_local(src, first, last, local)
        edge_kernels.make_local(dst, first, last, local)

        start = min(self.edge_map[etype][part, 0] for etype in self.data.edges)
        ids = np.arange(start, start + len(src))
        ids[own:] = out_ids
        inner = np.zeros(len(src), dtype=np.uint8)
        inner[:own] = 1
        node_type, node_part = self.numbering.describe(nodes)
        ndata = {
            "_ID": nodes,
            "part_id": node_part,
            "inner_node": (np.arange(len(nodes)) < last - first).astype(np.uint8),
        }
        edata: dict[str, IndexArray] = {"_ID": ids, "inner_edge": inner}
        if self.typed:
            ndata["_TYPE"] = node_type
            edata["_TYPE"] = np.concatenate([np.repeat(types, sizes), out_types])
        return PartGraph(len(nodes), src, dst, ndata, edata, halo, int(cut))

    def _outer_edges(self, etype: EdgeType, part: int) -> tuple[IndexArray, IndexArray, IntArray]:
        """Return homogeneous ids of both ends, and of the edges, of edges that leave the part."""
        edges, ntype = self._edges[etype], etype[2]
        chosen = slice(*edges.leaving[part : part + 2])
        heads, places = edges.heads[chosen], edges.places[chosen]
        sources = np.empty(len(heads), dtype=edges.src.dtype)
        edge_kernels.sources_of(
            edges.indptr,
            edges.order,
            edges.src,
            self._node_order[ntype],
            edges.new_indptr,
            heads,
            places,
            sources,
        )
        dst_part = self._part_of[ntype][heads]
        return (
            self._new_id[etype[0]][sources],
            heads + self._node_shift[ntype][dst_part],
            places + self._edge_shift[etype][dst_part],
        )


def homogeneous(starts: dict[Any, IntArray]) -> dict[Any, IntArray]:
    """Convert starts of each type's parts, type-wise ``[parts+1]``, to homogeneous ranges
    ``[parts, 2]``."""
    sizes = np.stack([np.diff(each) for each in starts.values()], axis=1)  # [parts, types]
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    return {
        kind: np.stack([ends[:, i] - sizes[:, i], ends[:, i]], axis=1)
        for i, kind in enumerate(starts)
    }
