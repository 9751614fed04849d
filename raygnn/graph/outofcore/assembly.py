"""The parts of a graph whose edges were shuffled on disk, as the writer of files wants them.

Memory: that of `Numbering`, mapped; 5 to 9 bytes for each node of the graph, 25 to 30 for each of
the part and its halo, and a bucket of edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.arrays import Array, IntArray, OnDemand, Rows, index_type
from raygnn.graph.data import EdgeType, GraphData, etype_str
from raygnn.graph.outofcore.edge_shuffle import Numbering, Shuffled, SortedEdges, homogeneous
from raygnn.graph.partition.edge_kernels import IndexArray

_INT64 = np.dtype(np.int64)
_PIECE = 1 << 20  # edges


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


class Assembly:
    """A graph renumbered for its parts, with the contents of each part's files.

    Args:
        data: the graph; of its edges only the arrays' names, dtypes and shapes are used.

    Attributes:
        node_map, edge_map: type → int64 ``[parts, 2]`` homogeneous id ranges, as in DGL's json.
    """

    def __init__(self, data: GraphData, numbering: Numbering, shuffled: Shuffled):
        self.data, self.numbering = data, numbering
        self.typed = len(data.nodes) > 1 or len(data.edges) > 1
        self.node_map = numbering.node_map
        self.edge_map: dict[EdgeType, IntArray] = homogeneous(shuffled.edge_starts)
        self.parts = len(numbering.bounds) - 1
        self._node_starts, self._edge_starts = numbering.starts, shuffled.edge_starts
        self._sorted = shuffled.edges

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

    def original_edges(self, part: int) -> dict[str, OnDemand]:
        """``"src:rel:dst"`` → int64, original ids of the part's own edges."""
        return {
            etype_str(etype): OnDemand(_INT64, (num,), partial(self._numbers, part, etype))
            for etype, num in self.num_edges(part).items()
        }

    def edge_data(self, part: int) -> dict[str, OnDemand]:
        """``"src:rel:dst/<name>"`` → rows of the part's own edges."""
        return {
            f"{etype_str(etype)}/{name}": OnDemand(
                figures.dtype, (num, *figures.shape[1:]), partial(self._rows, part, etype, name)
            )
            for etype, num in self.num_edges(part).items()
            for name, figures in self.data.edges[etype].data.items()
        }

    def _numbers(self, part: int, etype: EdgeType) -> Iterator[Array]:
        for edges in self._own(part, etype):
            yield edges.arrays["numbers"].map().astype(np.int64)

    def _rows(self, part: int, etype: EdgeType, name: str) -> Iterator[Array | Tensor]:
        for edges in self._own(part, etype):
            array = edges.arrays[f"data/{name}"]
            yield array.as_declared(array.read(0, len(array)))

    def _nodes(self, ntype: str, part: int) -> IntArray:
        first, last = self._node_starts[ntype][part : part + 2]
        return self.numbering.order[ntype].read(first, last).astype(np.int64)

    def _own(self, part: int, etype: EdgeType | None = None) -> list[SortedEdges]:
        """The buckets of a part's own edges, in the order of their ids."""
        of_part = [edges for edges in self._sorted if edges.bucket.part == part]
        return [edges for edges in of_part if etype in (None, edges.bucket.etype)]

    def part(self, part: int) -> PartGraph:
        """One part's graph. What it holds of its edges is read while it is written."""
        first, last = (int(bound) for bound in self.numbering.bounds[part : part + 2])
        far = np.zeros(int(self.numbering.bounds[-1]), np.bool_)
        own, cut = self._own(part), 0
        for edges in own:
            src = edges.arrays["src"].map()
            outside = src[(src < first) | (src >= last)]
            far[outside] = True
            cut += len(outside)
        halo = int(np.count_nonzero(far))
        outer = [edges for edges in self._sorted if edges.bucket.part != part]
        for leaving in outer:
            far[leaving.leaving_from(part, "dst")] = True
        nodes = np.concatenate([np.arange(first, last), np.flatnonzero(far)])
        local = np.empty(len(far), dtype=index_type(len(far)))
        local[nodes] = np.arange(len(nodes), dtype=local.dtype)
        del far

        inside = sum(edges.bucket.edges for edges in own)
        counts = [int(np.diff(edges.leaving)[part]) for edges in outer]
        total = inside + sum(counts)
        types = {etype: number for number, etype in enumerate(self.data.edges)}
        start = min(int(self.edge_map[etype][part, 0]) for etype in self.data.edges)

        def sources() -> Iterator[Array]:
            yield from (local[edges.arrays["src"].map()].astype(np.int64) for edges in own)
            yield from (local[edges.leaving_from(part, "src")].astype(np.int64) for edges in outer)

        def destinations() -> Iterator[Array]:
            for edges in own:
                at = edges.bucket.first_row - first
                yield np.repeat(
                    np.arange(at, at + edges.bucket.rows), edges.arrays["degrees"].map()
                )
            yield from (local[edges.leaving_from(part, "dst")].astype(np.int64) for edges in outer)

        def ids() -> Iterator[Array]:
            yield from _counted(start, inside)
            yield from (edges.bucket.first_edge + edges.leaving_from(part, "at") for edges in outer)

        def is_inner() -> Iterator[Array]:
            yield from (np.ones(edges.bucket.edges, np.uint8) for edges in own)
            yield from (np.zeros(num, np.uint8) for num in counts)

        def kinds() -> Iterator[Array]:
            for edges, num in zip((*own, *outer), (*(e.bucket.edges for e in own), *counts)):
                yield np.full(num, types[edges.bucket.etype], np.int32)

        node_type, node_part = self.numbering.describe(nodes)
        ndata = {
            "_ID": nodes,
            "part_id": node_part,
            "inner_node": (np.arange(len(nodes)) < last - first).astype(np.uint8),
        }
        edata = {
            "_ID": OnDemand(_INT64, (total,), ids),
            "inner_edge": OnDemand(np.dtype(np.uint8), (total,), is_inner),
        }
        if self.typed:
            ndata["_TYPE"] = node_type
            edata["_TYPE"] = OnDemand(np.dtype(np.int32), (total,), kinds)
        return PartGraph(
            num_nodes=len(nodes),
            src=OnDemand(_INT64, (total,), sources),
            dst=OnDemand(_INT64, (total,), destinations),
            ndata=ndata,
            edata=edata,
            halo=halo,
            cut=cut,
        )


def _counted(start: int, num: int) -> Iterator[Array]:
    for at in range(start, start + num, _PIECE):
        yield np.arange(at, min(at + _PIECE, start + num))
