"""A graph on disk: arrays in files without headers, which can be appended to and memory-mapped, and
edges as runs of rows in such files."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, dtype_name, element_bytes, index_type
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, NodeFrame

if TYPE_CHECKING:
    from torch import Tensor

RUN = 1 << 23  # edges in a task's memory at once
LEAVE = "start again, and leave the input unchanged until the partition is built"


@dataclass(frozen=True)
class DiskArray:
    """An array in a file, from byte ``offset`` on. ``dtype``: name of the dtype, also ``bfloat16``;
    ``row_shape``: shape of a row; ``rows``: None = up to the end of the file."""

    path: Path
    dtype: str
    row_shape: tuple[int, ...] = ()
    offset: int = 0
    rows: int | None = None

    def __len__(self) -> int:
        if self.rows is not None:
            return self.rows
        return (self.path.stat().st_size - self.offset) // self.row_bytes

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.stored.itemsize

    @property
    def stored(self) -> np.dtype[Any]:
        """NumPy dtype of the file: int16 for bfloat16, which NumPy lacks."""
        return np.dtype(np.int16 if self.dtype == "bfloat16" else self.dtype)

    def map(self, *, writable: bool = False) -> Array:
        """Memory-map the array, ``[rows, …]`` as stored."""
        shape = (len(self), *self.row_shape)
        if not math.prod(shape):  # an empty file cannot be mapped
            return np.empty(shape, self.stored)
        mode: Any = "r+" if writable else "r"
        return np.memmap(self.path, self.stored, mode, self.offset, shape)

    def read(self, start: int, stop: int) -> Array:
        """Read some rows into memory, as stored."""
        count = (stop - start) * math.prod(self.row_shape)
        offset = self.offset + start * self.row_bytes
        values = np.fromfile(self.path, self.stored, count, offset=offset)
        assert len(values) == count, f"{self.path} is cut short"
        return values.reshape(stop - start, *self.row_shape)

    def write(self, rows: Array) -> None:
        """Write all rows, converted to the dtype of the file."""
        with self.path.open("wb") as file:
            file.write(element_bytes(rows.astype(self.stored, copy=False)))

    def as_declared(self, array: Array) -> Array | Tensor:
        """Convert rows as stored to the declared dtype."""
        if self.dtype != "bfloat16":
            return array
        import torch

        with warnings.catch_warnings():  # torch warns that the array is read-only
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array).view(torch.bfloat16)


class Appended:
    """Writer of a new array, a context manager. ``num``: rows written so far; ``array``: the array,
    with dtype and row shape of the first rows if they are not passed."""

    def __init__(self, path: Path, dtype: str = "", row_shape: tuple[int, ...] = ()):
        self.array, self.num = DiskArray(path, dtype, row_shape), 0
        self._file = path.open("wb")

    def __enter__(self) -> Appended:
        return self

    def add(self, rows: Array | Tensor) -> None:
        if not self.array.dtype:
            self.array = DiskArray(self.array.path, dtype_name(rows), tuple(rows.shape[1:]))
        if rows.nbytes:
            self._file.write(element_bytes(rows))
        self.num += len(rows)

    def close(self) -> DiskArray:
        """Close the file and return the array."""
        self._file.close()
        return self.array

    def __exit__(self, *_: object) -> None:
        self.close()


def store(path: Path, array: Array | Tensor) -> DiskArray:
    """Write an array to a file."""
    with Appended(path) as file:
        file.add(array)
    return file.array


@dataclass(frozen=True)
class EdgeRun:
    """Consecutive edges of one type, as rows of files.

    Attributes:
        src, dst: arrays of node ids by type.
        start, stop: range of rows in all arrays.
        first, num: number of the first edge within its type, and number of edges.
        data: array name → edge array.
        no_loops: True if self-loops are skipped, in the reverse direction of undirected edges.
        interleaved: True if each row stands for an edge, followed by its reverse edge.
    """

    src: DiskArray
    dst: DiskArray
    start: int
    stop: int
    first: int
    num: int
    data: dict[str, DiskArray] = field(default_factory=dict)
    no_loops: bool = False
    interleaved: bool = False

    def ends(self) -> tuple[Array, Array]:
        """Read sources and destinations."""
        src, dst = self.src.read(self.start, self.stop), self.dst.read(self.start, self.stop)
        if self.interleaved:
            both = np.stack([src, dst], axis=1)
            return both.reshape(-1), both[:, ::-1].reshape(-1)
        keep = src != dst if self.no_loops else slice(None)
        return src[keep], dst[keep]

    def rows(self, name: str) -> Array:
        rows = self.data[name].read(self.start, self.stop)
        if self.interleaved:
            return np.repeat(rows, 2, axis=0)
        if self.no_loops:
            loops = replace(self, no_loops=False).ends()
            rows = rows[loops[0] != loops[1]]
        return rows


@dataclass(frozen=True)
class DiskGraph:
    """A graph on disk, in a few kilobytes that can be sent to tasks.

    Attributes:
        num_nodes, node_arrays: by node type.
        runs: edge type → its edges in order; one empty run if there are none.
        others: other attributes of its `GraphData`.
    """

    num_nodes: dict[str, int]
    node_arrays: dict[str, dict[str, DiskArray]]
    runs: dict[EdgeType, list[EdgeRun]]
    others: dict[str, Any]

    @property
    def num_edges(self) -> dict[EdgeType, int]:
        return {etype: runs[-1].first + runs[-1].num for etype, runs in self.runs.items()}

    def data(self) -> GraphData:
        """Return the graph with memory-mapped node arrays; edges and edge arrays have only
        shapes."""
        nodes = dict[str, NodeFrame]()
        for ntype, num in self.num_nodes.items():
            arrays = self.node_arrays[ntype].items()
            nodes[ntype] = NodeFrame(num, {n: a.as_declared(a.map()) for n, a in arrays})
        edges = {e: _without_content(n, self.runs[e][0].data) for e, n in self.num_edges.items()}
        return GraphData(**{"name": "", **self.others, "nodes": nodes, "edges": edges})

    def in_one_space(self) -> Iterator[tuple[Array, Array]]:
        """Yield sources and destinations of all edges, run by run. Ids are offset by type, in
        order, so that all types share one id space.

        Raises DataError for an id out of range, which is in the input if it has changed since it
        was checked. Compiled code relies on it.
        """
        ends = np.cumsum([0, *self.num_nodes.values()])
        first = dict(zip(self.num_nodes, ends.tolist(), strict=False))
        index = index_type(int(ends[-1]))
        for (source, _, target), runs in self.runs.items():
            for run in runs:
                src, dst = run.ends()
                for ids, ntype, file in ((src, source, run.src.path), (dst, target, run.dst.path)):
                    num = self.num_nodes[ntype]
                    if len(ids) and (ids.min() < 0 or ids.max() >= num):
                        bad = ids[np.argmax((ids < 0) | (ids >= num))]
                        message = f"an edge has node {bad}, and there are {num:,} {ntype!r} nodes"
                        raise DataError(message, where=str(file), remedy=LEAVE)
                yield src.astype(index) + first[source], dst.astype(index) + first[target]


def _without_content(num: int, arrays: dict[str, DiskArray]) -> EdgeFrame:
    ends = np.broadcast_to(np.int64(0), num)
    frame = EdgeFrame(ends, ends)
    for name, array in arrays.items():
        one = array.as_declared(np.zeros((1, *array.row_shape), array.stored))
        shape = (num, *array.row_shape)
        frame.data[name] = (
            np.broadcast_to(one, shape) if isinstance(one, np.ndarray) else one.expand(shape)
        )
    return frame


def runs_of(
    src: DiskArray,
    dst: DiskArray,
    data: dict[str, DiskArray],
    first: int,
    *,
    no_loops: bool = False,
    interleaved: bool = False,
) -> list[EdgeRun]:
    """Return all rows of edge files as runs; see `EdgeRun`. ``first``: number of the first edge."""
    runs, count, times = [], len(src), 2 if interleaved else 1
    for start in range(0, max(count, 1), RUN // times):
        stop = min(start + RUN // times, count)
        num = (stop - start) * times
        if no_loops:
            num = int(np.count_nonzero(src.read(start, stop) != dst.read(start, stop)))
        runs.append(EdgeRun(src, dst, start, stop, first, num, data, no_loops, interleaved))
        first += num
    return runs


def reversed_runs(runs: Sequence[EdgeRun]) -> list[EdgeRun]:
    """Return the runs of the reverse edges, with the same arrays."""
    return [replace(run, src=run.dst, dst=run.src) for run in runs]


def spill(data: GraphData, directory: Path, *, only_edges: bool = False) -> DiskGraph:
    """Write a graph to disk; with ``only_edges`` without node arrays."""
    count = itertools.count()

    def put(arrays: dict[str, Any]) -> dict[str, DiskArray]:
        return {n: store(directory / f"array-{next(count)}", a) for n, a in arrays.items()}

    node_arrays = {t: put({} if only_edges else frame.data) for t, frame in data.nodes.items()}
    edge_arrays = {etype: put(frame.data) for etype, frame in data.edges.items()}
    runs: dict[EdgeType, list[EdgeRun]] = {}
    for etype, frame in data.edges.items():
        src, dst = (
            store(directory / f"array-{next(count)}", ids.astype(index_type(data.nodes[t].num)))
            for ids, t in ((frame.src, etype[0]), (frame.dst, etype[2]))
        )
        runs[etype] = runs_of(src, dst, edge_arrays[etype], 0)
    num_nodes = {ntype: frame.num for ntype, frame in data.nodes.items()}
    names = ("name", "origin", "ids", "names", "reverses")
    return DiskGraph(num_nodes, node_arrays, runs, {name: getattr(data, name) for name in names})
