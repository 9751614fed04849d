"""From the graphs of a source, one at a time, to the files of a collection."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.collection.columns import ColumnWriter, finite_rows
from raygnn.graph.collection.data import (
    VERSION,
    Column,
    Edges,
    File,
    GraphColumn,
    Manifest,
    Nodes,
    sha256,
)
from raygnn.graph.data import EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.sources.many import GraphSet
from raygnn.graph.sources.normalize import normalize
from raygnn.util.files import sync

_ALIKE = "save all graphs with the same types and arrays"


def pack(
    sources: Iterable[AbstractContextManager[GraphSet]],
    directory: Path,
    *,
    method: str,
    digest: str,
    source: dict[str, Any],
) -> Manifest:
    """Write all graphs into an empty directory, durably, all files but the manifest.

    One graph is in memory at a time, and a few megabytes of each array; with ``method``, each
    type's features twice.

    Args:
        method: of scaling the array ``feat``, over all graphs.
        digest, source: for the manifest; ``source["path"]`` is where the graphs are from.

    Raises:
        ConfigError: there are no features to be scaled.
        DataError: no graphs, or some that are damaged or unlike each other; the graph and the
            array are named.
    """
    started = time.perf_counter()
    packer = _Packer(directory)
    for each in sources:
        with each as graphs:
            packer.add_all(graphs)
    if not packer.num:
        raise DataError("there are no graphs", where=str(source["path"]), remedy="check graph.path")
    nodes, edges, graph_columns = packer.finish(method)
    files = {}
    for path in sorted(directory.iterdir()):
        sync(path)
        files[path.name] = File(bytes=path.stat().st_size, sha256=sha256(path))
    return Manifest(
        version=VERSION,
        digest=digest,
        source=source,
        num_graphs=packer.num,
        nodes=nodes,
        edges=edges,
        graphs=graph_columns,
        values=packer.values,
        files=files,
        seconds=time.perf_counter() - started,
    )


class _Packer:
    """Graphs that were packed so far."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.num = 0
        self.nodes: dict[str, _Frames] = {}
        self.edges: dict[EdgeType, _Frames] = {}
        self.labels: dict[str, ColumnWriter] = {}
        self.values: dict[str, list[int]] = {}

    def add_all(self, graphs: GraphSet) -> None:
        if not graphs.num:
            return
        first = not self.num
        self.values |= {name: list(values) for name, values in graphs.values.items()}
        for data in _reading(graphs):
            self._add(data)
        if first:
            self.labels = {
                name: ColumnWriter(self.directory / f"graph-{number}.npy")
                for number, name in enumerate(sorted(graphs.labels))
            }
        _check_same("labels", graphs.labels, self.labels, str(graphs.file))
        for name, column in self.labels.items():
            column.add(graphs.labels[name], f"{graphs.file}: labels {name!r}")

    def _add(self, data: GraphData) -> None:
        where = data.name
        if not self.num:
            self.nodes = {
                ntype: _Frames(self.directory, f"node-{number}")
                for number, ntype in enumerate(data.nodes)
            }
            self.edges = {
                etype: _Frames(self.directory, f"edge-{number}", ends=True)
                for number, etype in enumerate(data.edges)
            }
        _check_same("node types", data.nodes, self.nodes, where)
        _check_same("edge types", data.edges, self.edges, where)
        for ntype, frames in self.nodes.items():
            frame = data.nodes[ntype]
            frames.add(frame.num, frame.data, f"{where}: {ntype}")
        for etype, frames in self.edges.items():
            edges = data.edges[etype]
            ends = []
            for side, ids in ((0, edges.src), (2, edges.dst)):
                small = data.nodes[etype[side]].num < 2**31
                ends.append(ids.astype(np.int32 if small else np.int64, copy=False))
            frames.add(edges.num, edges.data, f"{where}: {etype_str(etype)}", ends)
        self.num += 1

    def finish(self, method: str) -> tuple[dict[str, Nodes], list[Edges], dict[str, GraphColumn]]:
        nodes = {ntype: frames.finish() for ntype, frames in self.nodes.items()}
        if method != "none":
            _normalize(nodes, self.directory, method)
        edges = [frames.finish() for frames in self.edges.values()]
        return (
            {ntype: Nodes.model_validate(facts) for ntype, facts in nodes.items()},
            [
                Edges.model_validate({"etype": etype, **facts})
                for etype, facts in zip(self.edges, edges)
            ],
            {name: _graph_column(writer) for name, writer in self.labels.items()},
        )


class _Frames:
    """The nodes or edges of one type.

    The arrays are those of the first graph that has any; a graph without nodes or edges of the
    type is like all others, whatever arrays it was saved with.
    """

    def __init__(self, directory: Path, name: str, *, ends: bool = False):
        self.directory = directory
        self.name = name
        self.offsets = array("q", [0])
        self.largest = 0
        self.columns: dict[str, ColumnWriter] | None = None
        self.empty: Mapping[str, Any] = {}
        sides = ("src", "dst") if ends else ()
        self.ends = [ColumnWriter(directory / f"{name}.{side}.npy") for side in sides]

    def add(self, num: int, data: Mapping[str, Any], where: str, ends: Iterable[Any] = ()) -> None:
        self.offsets.append(self.offsets[-1] + num)
        self.largest = max(self.largest, num)
        for name, rows in data.items():
            _check_rows(name, rows, num, f"{where}/{name}")
        for column, rows in zip(self.ends, ends):
            column.add(rows, where)
        if not num:
            self.empty = self.empty or data
            return
        if self.columns is None:
            self.columns = self._new_columns(data)
        _check_same("arrays", data, self.columns, where)
        for name, column in self.columns.items():
            column.add(data[name], f"{where}/{name}")

    def finish(self) -> dict[str, Any]:
        """The fields of `Nodes` or `Edges`."""
        if self.columns is None:
            self.columns = self._new_columns(self.empty)
            for name, column in self.columns.items():
                column.add(self.empty[name], name)
        offsets = ColumnWriter(self.directory / f"{self.name}.offsets.npy")
        offsets.add(np.frombuffer(self.offsets, np.int64), self.name)
        return {
            "num": self.offsets[-1],
            "largest": self.largest,
            "offsets": offsets.finish(),
            "data": {name: column.finish() for name, column in self.columns.items()},
        } | {side: column.finish() for side, column in zip(("src", "dst"), self.ends)}

    def _new_columns(self, data: Mapping[str, Any]) -> dict[str, ColumnWriter]:
        return {
            # matrices are features; a single column may be anything
            name: ColumnWriter(
                self.directory / f"{self.name}.{number}.npy",
                finite=data[name].ndim > 1 or name == "feat",
            )
            for number, name in enumerate(sorted(data))
        }


def _reading(graphs: GraphSet) -> Iterator[GraphData]:
    try:
        yield from graphs.graphs
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}",
            where=str(graphs.file),
            remedy="check the disk, or copy the file again",
        ) from error


def _check_same(what: str, found: Mapping[Any, Any], wanted: Mapping[Any, Any], where: str) -> None:
    """Of names, or of edge types."""
    if found.keys() == wanted.keys():
        return
    own, others = (
        ", ".join(sorted(n if isinstance(n, str) else etype_str(n) for n in names)) or "none"
        for names in (found, wanted)
    )
    raise DataError(
        f"the {what} are {own}, in the graphs before {others}", where=where, remedy=_ALIKE
    )


def _check_rows(name: str, rows: Any, num: int, where: str) -> None:
    shape = tuple(rows.shape)
    if not shape or shape[0] != num:
        raise DataError(
            f"its shape is {shape}, but it should have {num} rows",
            where=where,
            remedy="give one row for each node or edge",
        )
    if name == "feat" and shape[1:] == (0,):
        raise DataError(
            f"its shape is {shape}: no features", where=where, remedy="give at least one feature"
        )


def _normalize(nodes: dict[str, dict[str, Any]], directory: Path, method: str) -> None:
    """Scale the features as one graph's would be, all graphs together, and write them again."""
    data = GraphData("", {}, {})
    for ntype, facts in nodes.items():
        column: Column | None = facts["data"].get("feat")
        if column is None:
            continue
        if len(column.shape) != 1:
            raise DataError(
                f"it has rows of shape {list(column.shape)}, and only matrices can be scaled",
                where=f"{ntype}/feat",
                remedy="set graph.normalize to none",
            )
        feat: Any = np.load(directory / column.file)
        if column.dtype == "bfloat16":
            import torch

            feat = torch.from_numpy(feat).view(torch.bfloat16)
        data.nodes[ntype] = NodeFrame(len(feat), {"feat": feat})
    normalize(data, method)
    for ntype, frame in data.nodes.items():
        path = directory / nodes[ntype]["data"]["feat"].file
        path.unlink()
        writer = ColumnWriter(path)
        writer.add(frame.data["feat"], ntype)
        nodes[ntype]["data"]["feat"] = writer.finish()


def _graph_column(writer: ColumnWriter) -> GraphColumn:
    column = writer.finish()
    values = np.load(writer.path, mmap_mode="r")
    low = high = nonfinite = None
    if np.dtype(values.dtype).kind in "iu" and column.dtype != "bfloat16":
        if values.size:
            low, high = int(values.min()), int(values.max())
    elif not (finite := finite_rows(values, column.dtype)).all():
        nonfinite = int(np.argmin(finite))
    return GraphColumn(**dict(column), low=low, high=high, nonfinite=nonfinite)
