"""The parts of a graph whose edges were shuffled on disk, as the writer of files wants them.

Memory: that of `Numbering`, mapped; 5 to 9 bytes for each node of the graph, 25 to 30 for each of
the part and its halo, and a bucket of edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from raygnn.graph.arrays import Array, OnDemand, index_type
from raygnn.graph.data import EdgeType, GraphData, etype_str
from raygnn.graph.outofcore.edge_shuffle import Shuffled, SortedEdges
from raygnn.graph.partition.assemble import Numbering, PartedGraph, PartGraph

if TYPE_CHECKING:
    from torch import Tensor

_INT64 = np.dtype(np.int64)
_PIECE = 1 << 20  # edges


class DiskAssembly(PartedGraph):
    """A graph renumbered for its parts; see `raygnn.graph.partition.assemble`.

    Args:
        data: the graph, its edges without ends.
    """

    def __init__(self, data: GraphData, numbering: Numbering, shuffled: Shuffled):
        super().__init__(data, numbering, shuffled.edge_starts)
        self._sorted = shuffled.edges

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
                figures.dtype,
                (num, *figures.shape[1:]),
                partial(self._rows, part, etype, name),
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
