"""Packs the graphs of a source, one at a time, into the files of a collection.

Arrays grow row by row in ``.npy`` files, whose dtype is widened when rows need it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from raygnn.config.graph import DatasetGraph, ManyGraphs
from raygnn.errors import DataError
from raygnn.graph.arrays import Array, as_matrix, dtype_name, element_bytes, stored_dtype
from raygnn.graph.collection import (
    INSTEAD,
    MANIFEST,
    VERSION,
    CollectionMeta,
    GraphColumn,
    MissingCollection,
    PackedArray,
    graph_files,
    read_collection,
)
from raygnn.graph.data import SPLITS, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.partition.manifest import file_facts
from raygnn.graph.sources import datasets, library_graphs, normalize
from raygnn.graph.sources.input_files import out_of_memory
from raygnn.graph.sources.library_graphs import GraphSet
from raygnn.storage.replica import share_directory
from raygnn.util.files import new_directory, publish, storage_errors, sync

_BUFFER_BYTES = 4 << 20
_BUFFER_ARRAYS = 10_000


def make_collection(
    missing: MissingCollection, progress: Callable[[str], object] | None = None
) -> CollectionMeta:
    """Pack a collection; ``progress`` is called with ``"pack"``."""
    place = missing.place.absolute()
    if progress is not None:
        progress("pack")
    with storage_errors(place, DataError, INSTEAD), new_directory(place) as directory:
        try:
            packed = _pack(missing, directory)
        except MemoryError as error:
            raise out_of_memory(str(missing.source["path"]), error) from None
        file = directory / MANIFEST
        file.write_text(packed.model_dump_json(indent=1, by_alias=True))
        sync(file)
        publish(directory, place)  # if another process was first, its result is the same
    existing = read_collection(place)
    if existing.digest != missing.digest:
        message = "another collection exists here already"
        remedy = "name another directory, or delete this one"
        raise DataError(message, where=str(place), remedy=remedy)
    if missing.shared is not None:
        share_directory(place, missing.shared, MANIFEST)
    return existing


def _sources(graph: ManyGraphs | DatasetGraph) -> Iterator[AbstractContextManager[GraphSet]]:
    if isinstance(graph, DatasetGraph):
        yield datasets.read_all(graph)
        return
    for file in graph_files(graph.path):
        if file.suffix == ".txt":
            message = "text is not a file that dgl.save_graphs wrote"
            remedy = "read GIN's text with a dataset class, as examples/gin_text.py does"
            raise DataError(message, where=str(file), remedy=remedy)
        yield library_graphs.read_all(file)


def _pack(missing: MissingCollection, directory: Path) -> CollectionMeta:
    """Write all graphs durably to an empty directory: all files but the manifest.

    Memory: one graph and a few megabytes of each array; with ``graph.normalize``, which scales the
    array ``feat`` over all graphs, each type's features twice.
    """
    started = time.perf_counter()
    packer = _Packer(directory)
    for source_file in _sources(missing.graph):
        with source_file as graphs:
            packer.add_all(graphs)
    if not packer.num:
        where = str(missing.source["path"])
        raise DataError("there are no graphs", where=where, remedy="check graph.path")
    contents = packer.finish(missing.graph.normalize or "none")
    files = {}
    for path in sorted(directory.iterdir()):
        sync(path)
        files[path.name] = file_facts(path)
    made: dict[str, Any] = {"digest": missing.digest, "source": missing.source, "files": files}
    made |= {"directory": directory, "version": VERSION, "seconds": time.perf_counter() - started}
    return CollectionMeta.model_validate({**contents, **made})


class _Packer:
    def __init__(self, directory: Path):
        self.directory = directory
        self.num = 0
        self.nodes: dict[str, _FrameWriter] = {}
        self.edges: dict[EdgeType, _FrameWriter] = {}
        self.labels: dict[str, ColumnWriter] = {}
        self.splits: Mapping[str, Array] | None = None

    def add_all(self, graphs: GraphSet) -> None:
        if not graphs.num:
            return
        first = not self.num
        self.splits = graphs.splits
        for data in graphs.graphs:
            self._add(data)
        if first:
            for number, name in enumerate(sorted(graphs.labels)):
                self.labels[name] = ColumnWriter(self.directory / f"graph-{number}.npy")
        _check_same("labels", graphs.labels, self.labels, str(graphs.file))
        for name, column in self.labels.items():
            column.add(graphs.labels[name], f"{graphs.file}: labels {name!r}")

    def _add(self, data: GraphData) -> None:
        where = data.name
        if not self.num:
            for number, ntype in enumerate(data.nodes):
                self.nodes[ntype] = _FrameWriter(self.directory, f"node-{number}")
            for number, etype in enumerate(data.edges):
                self.edges[etype] = _FrameWriter(self.directory, f"edge-{number}", ends=True)
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

    def finish(self, method: str) -> dict[str, Any]:
        """Return the fields of `CollectionMeta` that describe the arrays."""
        nodes = {ntype: frames.finish() for ntype, frames in self.nodes.items()}
        if method != "none":
            _normalize(nodes, self.directory, method)
        splits = None
        if self.splits is not None:
            split_of = np.full(self.num, -1, np.int8)
            for number, split in enumerate(SPLITS):
                split_of[self.splits[split]] = number
            splits = _written(self.directory / "splits.npy", split_of)
        return {
            "num_graphs": self.num,
            "nodes": nodes,
            "edges": [{"etype": e, **frames.finish()} for e, frames in self.edges.items()],
            "graphs": {name: _graph_column(writer) for name, writer in self.labels.items()},
            "splits": splits,
        }


class _FrameWriter:
    """Writer of the nodes or edges of one type.

    The first graph that has any decides which arrays there are; graphs without nodes or edges of
    the type may have any arrays.
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
            if name == "feat" and tuple(rows.shape[1:]) == (0,):
                message = f"its shape is {(num, 0)}: no features"
                remedy = "give at least one feature"
                raise DataError(message, where=f"{where}/{name}", remedy=remedy)
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
        """Return the fields of `PackedNodes` or `PackedEdges`."""
        if self.columns is None:
            self.columns = self._new_columns(self.empty)
            for name, column in self.columns.items():
                column.add(self.empty[name], name)
        offsets = np.frombuffer(self.offsets, np.int64)
        return {
            "num": self.offsets[-1],
            "largest": self.largest,
            "offsets": _written(self.directory / f"{self.name}.offsets.npy", offsets),
            "data": {name: column.finish() for name, column in self.columns.items()},
        } | {side: column.finish() for side, column in zip(("src", "dst"), self.ends)}

    def _new_columns(self, data: Mapping[str, Any]) -> dict[str, ColumnWriter]:
        return {
            # matrices are features, which must be finite; a single column may be anything
            name: ColumnWriter(
                self.directory / f"{self.name}.{number}.npy",
                finite=data[name].ndim > 1 or name == "feat",
            )
            for number, name in enumerate(sorted(data))
        }


def _check_same(kind: str, names: Mapping[Any, Any], before: Mapping[Any, Any], where: str) -> None:
    if names.keys() == before.keys():
        return
    here, others = (
        ", ".join(sorted(n if isinstance(n, str) else etype_str(n) for n in keys)) or "none"
        for keys in (names, before)
    )
    message = f"the {kind} are {here}, in the graphs before {others}"
    raise DataError(message, where=where, remedy="save all graphs with the same types and arrays")


def _normalize(nodes: dict[str, dict[str, Any]], directory: Path, method: str) -> None:
    """Scale the features of all graphs together, and rewrite them."""
    data = GraphData("", {}, {})
    for ntype, facts in nodes.items():
        column: PackedArray | None = facts["data"].get("feat")
        if column is None:
            continue
        if len(column.shape) != 1:
            message = f"it has rows of shape {list(column.shape)}, and only matrices can be scaled"
            raise DataError(message, where=f"{ntype}/feat", remedy="set graph.normalize to none")
        feat: Any = np.load(directory / column.file)
        if column.dtype == "bfloat16":
            feat = torch.from_numpy(feat).view(torch.bfloat16)
        data.nodes[ntype] = NodeFrame(len(feat), {"feat": feat})
    normalize(data, method)
    for ntype, frame in data.nodes.items():
        path = directory / nodes[ntype]["data"]["feat"].file
        path.unlink()
        nodes[ntype]["data"]["feat"] = _written(path, frame.data["feat"])


def _written(path: Path, rows: Any) -> PackedArray:
    """Write a complete array."""
    writer = ColumnWriter(path)
    writer.add(rows, path.name)
    return writer.finish()


def _graph_column(writer: ColumnWriter) -> GraphColumn:
    column = writer.finish()
    values = torch.from_numpy(np.load(writer.path))
    low = high = nonfinite = None
    if column.dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    if values.is_floating_point():
        finite = finite_rows(values)
        nonfinite = None if finite.all() else int(finite.int().argmin())
    elif column.dtype != "bool" and values.numel():
        low, high = int(values.min()), int(values.max())
    return GraphColumn(**dict(column), low=low, high=high, nonfinite=nonfinite)


# --- arrays that grow in files


def common_dtype(first: torch.dtype, second: torch.dtype) -> torch.dtype | None:
    """Return the smallest dtype that holds the values of both; None if they are of two kinds:
    integers, floats, or truth values."""
    kinds = {(dtype.is_floating_point, dtype == torch.bool) for dtype in (first, second)}
    return torch.promote_types(first, second) if len(kinds) == 1 else None


def finite_rows(rows: Tensor) -> Tensor:
    """Return which rows are finite, bool ``[N]``."""
    return as_matrix(rows.isfinite()).all(1)


@dataclass
class ColumnWriter:
    """Writer of one array of all graphs; ``finite``: refuse infinities and NaN."""

    path: Path
    finite: bool = False
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    rows: int = 0
    _waiting: list[Tensor] = field(default_factory=list)
    _size: int = 0

    def add(self, array: Any, where: str) -> None:
        """Append rows ``[n, …]`` of NumPy or torch, which must not change before :meth:`finish`."""
        rows = torch.as_tensor(array)
        shape = tuple(rows.shape[1:])
        if self.shape is None or self.dtype is None:
            self.dtype, self.shape = rows.dtype, shape
        if shape != self.shape:
            message = f"its rows have shape {list(shape)}, in the graphs before {list(self.shape)}"
            remedy = "give this array rows of one shape in all graphs"
            raise DataError(message, where=where, remedy=remedy)
        common = common_dtype(self.dtype, rows.dtype)
        if common is None:
            message = f"it is {dtype_name(rows)}, in the graphs before {dtype_name(self.dtype)}"
            remedy = "save this array as numbers of one kind in all graphs"
            raise DataError(message, where=where, remedy=remedy)
        if self.finite and not (good := finite_rows(rows)).all():
            where = f"{where}, row {int(good.int().argmin())}"
            remedy = "features must be finite: replace them, or leave the graph out"
            raise DataError("features are infinite or not a number", where=where, remedy=remedy)
        if common != self.dtype:
            self._flush()
            self._widen(common)
        self.rows += len(rows)
        self._waiting.append(rows)
        self._size += rows.nbytes
        if self._size > _BUFFER_BYTES or len(self._waiting) > _BUFFER_ARRAYS:
            self._flush()

    def finish(self) -> PackedArray:
        """Write the remaining rows and the header; the file is not durable yet."""
        self._flush()
        with self.path.open("r+b") as file:
            self._write_header(file)
        assert self.dtype is not None
        return PackedArray(
            file=self.path.name, dtype=dtype_name(self.dtype), shape=self.shape or ()
        )

    def _write_header(self, file: BinaryIO) -> None:
        """Write the header of the rows so far; NumPy keeps its length for any number of rows."""
        assert self.dtype is not None
        assert self.shape is not None
        shape = (self.rows, *self.shape)
        stored = stored_dtype(dtype_name(self.dtype))
        header = {"descr": stored.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)

    def _flush(self) -> None:
        assert self.dtype is not None
        with self.path.open("ab") as file:
            if not file.tell():
                self._write_header(file)
            for rows in self._waiting:
                file.write(element_bytes(rows.to(self.dtype)))
        self._waiting.clear()
        self._size = 0

    def _widen(self, dtype: torch.dtype) -> None:
        old, self.dtype = self.dtype, dtype
        assert old is not None
        wider = self.path.with_suffix(".wider")
        with self.path.open("rb") as source, wider.open("wb") as target:
            self._write_header(target)
            source.seek(target.tell())  # dtypes of one kind have names of one length
            while data := source.read(_BUFFER_BYTES):
                target.write(element_bytes(torch.frombuffer(bytearray(data), dtype=old).to(dtype)))
        wider.replace(self.path)
