"""The parts of a graph whose edges were shuffled on disk, as the writer of files wants them.

Memory: that of `Numbering`, mapped; 5 to 9 bytes for each node of the graph, 25 to 30 for each of
the part and its halo, and a bucket of edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from raygnn.graph.arrays import Array, IntArray, OnDemand, index_type
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
            yield edges.numbers.map().astype(np.int64)

    def _rows(self, part: int, etype: EdgeType, name: str) -> Iterator[Array | Tensor]:
        for edges in self._own(part, etype):
            array = edges.data[name]
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
            src = edges.src.map()
            outside = src[(src < first) | (src >= last)]
            far[outside] = True
            cut += len(outside)
        halo = int(np.count_nonzero(far))
        outer = [_Outer(edges, part) for edges in self._sorted if edges.bucket.part != part]
        for leaving in outer:
            far[leaving.read("dst")] = True
        nodes = np.concatenate([np.arange(first, last), np.flatnonzero(far)])
        local = np.empty(len(far), dtype=index_type(len(far)))
        local[nodes] = np.arange(len(nodes), dtype=local.dtype)
        del far

        inside = sum(edges.bucket.edges for edges in own)
        total = inside + sum(edges.num for edges in outer)
        types = {etype: number for number, etype in enumerate(self.data.edges)}
        start = min(int(self.edge_map[etype][part, 0]) for etype in self.data.edges)

        def sources() -> Iterator[Array]:
            yield from (local[edges.src.map()].astype(np.int64) for edges in own)
            yield from (local[edges.read("src")].astype(np.int64) for edges in outer)

        def destinations() -> Iterator[Array]:
            for edges in own:
                at = edges.bucket.first_row - first
                yield np.repeat(np.arange(at, at + edges.bucket.rows), edges.degrees.map())
            yield from (local[edges.read("dst")].astype(np.int64) for edges in outer)

        def ids() -> Iterator[Array]:
            yield from _counted(start, inside)
            yield from (edges.bucket.first_edge + edges.read("at") for edges in outer)

        def is_inner() -> Iterator[Array]:
            yield from (np.ones(edges.bucket.edges, np.uint8) for edges in own)
            yield from (np.zeros(edges.num, np.uint8) for edges in outer)

        def kinds() -> Iterator[Array]:
            yield from (_full(types[e.bucket.etype], e.bucket.edges) for e in own)
            yield from (_full(types[e.bucket.etype], e.num) for e in outer)

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


class _Outer:
    """The edges of another part's bucket that leave this part."""

    def __init__(self, edges: SortedEdges, part: int):
        self.bucket = edges.bucket
        self._files = {"src": edges.out_src, "dst": edges.out_dst, "at": edges.out_at}
        self._start, self._stop = edges.leaving[part : part + 2]
        self.num = self._stop - self._start

    def read(self, name: str) -> IntArray:
        return self._files[name].read(self._start, self._stop).astype(np.int64)


def _counted(start: int, num: int) -> Iterator[Array]:
    for at in range(start, start + num, _PIECE):
        yield np.arange(at, min(at + _PIECE, start + num))


def _full(value: int, num: int) -> Array:
    return np.full(num, value, np.int32)
