"""Packs the graphs of a source, joined in memory, into the files of a collection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.config.graph import DatasetGraph, ManyGraphs
from raygnn.errors import DataError
from raygnn.graph.arrays import (
    Array,
    as_matrix,
    dtype_name,
    element_bytes,
    index_type,
    stored_dtype,
)
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

_TOGETHER = 10_000  # graphs whose rows are joined


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
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
                raise
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
    """Write all graphs durably to an empty directory: all files but the manifest."""
    started = time.perf_counter()
    packer = _Packer()
    for source_file in _sources(missing.graph):
        with source_file as graphs:
            packer.add_all(graphs)
    if not packer.num:
        where = str(missing.source["path"])
        raise DataError("there are no graphs", where=where, remedy="check graph.path")
    contents = packer.write(directory, missing.graph.normalize or "none")
    files = {}
    for path in sorted(directory.iterdir()):
        sync(path)
        files[path.name] = file_facts(path)
    made: dict[str, Any] = {"digest": missing.digest, "source": missing.source, "files": files}
    made |= {"directory": directory, "version": VERSION, "seconds": time.perf_counter() - started}
    return CollectionMeta.model_validate({**contents, **made})


class _Packer:
    def __init__(self) -> None:
        self.num = 0
        self.nodes: dict[str, _Frames] = {}
        self.edges: dict[EdgeType, _Frames] = {}
        self.labels: dict[str, _Rows] = {}
        self.splits: Mapping[str, Array] | None = None

    def add_all(self, graphs: GraphSet) -> None:
        if not graphs.num:
            return
        first = not self.num
        self.splits = graphs.splits
        for data in graphs.graphs:
            self._add(data)
        if first:
            self.labels = {name: _Rows() for name in sorted(graphs.labels)}
        _check_same("labels", graphs.labels, self.labels, str(graphs.file))
        for name, rows in self.labels.items():
            rows.add(graphs.labels[name], f"{graphs.file}: labels {name!r}")

    def _add(self, data: GraphData) -> None:
        where = data.name
        if not self.num:
            self.nodes = {ntype: _Frames() for ntype in data.nodes}
            self.edges = {etype: _Frames() for etype in data.edges}
        _check_same("node types", data.nodes, self.nodes, where)
        _check_same("edge types", data.edges, self.edges, where)
        for ntype, frames in self.nodes.items():
            frame = data.nodes[ntype]
            frames.add(frame.num, frame.data, f"{where}: {ntype}")
        for etype, frames in self.edges.items():
            edges = data.edges[etype]
            ends = {
                side: ids.astype(index_type(data.nodes[t].num), copy=False)
                for side, ids, t in zip(("src", "dst"), (edges.src, edges.dst), etype[::2])
            }
            frames.add(edges.num, edges.data, f"{where}: {etype_str(etype)}", ends)
        self.num += 1

    def write(self, directory: Path, method: str) -> dict[str, Any]:
        """Write all arrays. Returns the fields of `CollectionMeta` that describe them."""
        if method != "none":
            _normalize(self.nodes, method)
        splits = None
        if self.splits is not None:
            split_of = torch.full((self.num,), -1, dtype=torch.int8)
            for number, split in enumerate(SPLITS):
                split_of[self.splits[split]] = number
            splits = _written(directory / "splits.npy", split_of)
        nodes = {
            ntype: frames.write(directory / f"node-{number}")
            for number, (ntype, frames) in enumerate(self.nodes.items())
        }
        edges = [
            {"etype": etype, **frames.write(directory / f"edge-{number}")}
            for number, (etype, frames) in enumerate(self.edges.items())
        ]
        graphs = {
            name: _graph_column(directory / f"graph-{number}.npy", rows.joined())
            for number, (name, rows) in enumerate(self.labels.items())
        }
        contents = {"num_graphs": self.num, "nodes": nodes, "edges": edges}
        return {**contents, "graphs": graphs, "splits": splits}


class _Frames:
    """The nodes or edges of one type.

    The first graph that has any decides which arrays there are; graphs without nodes or edges of
    the type may have any arrays.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.arrays: dict[str, _Rows] | None = None
        self.empty: Mapping[str, Any] = {}
        self.ends: dict[str, _Rows] = {}

    def add(
        self, num: int, data: Mapping[str, Any], where: str, ends: Mapping[str, Any] = {}
    ) -> None:
        self.sizes.append(num)
        for name, rows in data.items():
            if name == "feat" and tuple(rows.shape[1:]) == (0,):
                message = f"its shape is {(num, 0)}: no features"
                remedy = "give at least one feature"
                raise DataError(message, where=f"{where}/{name}", remedy=remedy)
        for side, ids in ends.items():
            self.ends.setdefault(side, _Rows()).add(ids, where)
        if not num:
            self.empty = self.empty or data
            return
        if self.arrays is None:
            self.arrays = _new(data)
        _check_same("arrays", data, self.arrays, where)
        for name, array in self.arrays.items():
            array.add(data[name], f"{where}/{name}")

    def columns(self) -> dict[str, _Rows]:
        """Return the arrays of all graphs by name."""
        if self.arrays is None:
            self.arrays = _new(self.empty)
            for name, array in self.arrays.items():
                array.add(self.empty[name], name)
        return self.arrays

    def write(self, path: Path) -> dict[str, Any]:
        """Write files beginning with ``path``. Returns the fields of `PackedNodes` or
        `PackedEdges`."""
        offsets = torch.tensor([0, *self.sizes]).cumsum(0)
        return {
            "num": int(offsets[-1]),
            "largest": max(self.sizes),
            "offsets": _written(Path(f"{path}.offsets.npy"), offsets),
            "data": {
                name: _written(Path(f"{path}.{number}.npy"), rows.joined())
                for number, (name, rows) in enumerate(self.columns().items())
            },
        } | {
            side: _written(Path(f"{path}.{side}.npy"), ids.joined())
            for side, ids in self.ends.items()
        }


def _new(data: Mapping[str, Any]) -> dict[str, _Rows]:
    # matrices are features, which must be finite; a single column may be anything
    return {name: _Rows(finite=data[name].ndim > 1 or name == "feat") for name in sorted(data)}


def _check_same(kind: str, names: Mapping[Any, Any], before: Mapping[Any, Any], where: str) -> None:
    if names.keys() == before.keys():
        return
    here, others = (
        ", ".join(sorted(n if isinstance(n, str) else etype_str(n) for n in keys)) or "none"
        for keys in (names, before)
    )
    message = f"the {kind} are {here}, in the graphs before {others}"
    raise DataError(message, where=where, remedy="save all graphs with the same types and arrays")


class _Rows:
    """Rows of one array of all graphs; ``finite``: refuse infinities and NaN."""

    def __init__(self, *, finite: bool = False):
        self._finite = finite
        self._pieces: list[Tensor] = []  # of many graphs each
        self._last: list[Tensor] = []  # of one graph each

    def add(self, array: Any, where: str) -> None:
        """Append rows ``[n, …]`` of NumPy or torch, which must not change until `joined`."""
        rows = torch.as_tensor(array)
        first = next(iter([*self._pieces[:1], *self._last[:1]]), rows)
        shape, before = list(rows.shape[1:]), list(first.shape[1:])
        if shape != before:
            message = f"its rows have shape {shape}, in the graphs before {before}"
            remedy = "give this array rows of one shape in all graphs"
            raise DataError(message, where=where, remedy=remedy)
        if _kind(rows.dtype) != _kind(first.dtype):
            message = f"it is {dtype_name(rows)}, in the graphs before {dtype_name(first)}"
            remedy = "save this array as numbers of one kind in all graphs"
            raise DataError(message, where=where, remedy=remedy)
        if self._finite and not (good := finite_rows(rows)).all():
            where = f"{where}, row {int(good.int().argmin())}"
            remedy = "features must be finite: replace them, or leave the graph out"
            raise DataError("features are infinite or not a number", where=where, remedy=remedy)
        self._last.append(rows)
        if len(self._last) == _TOGETHER:  # a tensor for each graph would need more memory
            self._pieces, self._last = [*self._pieces, torch.cat(self._last)], []

    def joined(self) -> Tensor:
        """Copy all rows to one array, in the smallest dtype that holds them."""
        return torch.cat([*self._pieces, *self._last])

    def replace(self, rows: Tensor) -> None:
        self._pieces, self._last = [rows], []


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Distinguish integers, floats and truth values."""
    return dtype.is_floating_point, dtype == torch.bool


def finite_rows(rows: Tensor) -> Tensor:
    """Return which rows are finite, bool ``[N]``."""
    return as_matrix(rows.isfinite()).all(1)


def _normalize(nodes: Mapping[str, _Frames], method: str) -> None:
    """Scale the features of all graphs together."""
    data = GraphData("", {}, {})
    for ntype, frames in nodes.items():
        if (rows := frames.columns().get("feat")) is None:
            continue
        feat = rows.joined()
        if feat.dim() != 2:
            shape = list(feat.shape[1:])
            message = f"it has rows of shape {shape}, and only matrices can be scaled"
            raise DataError(message, where=f"{ntype}/feat", remedy="set graph.normalize to none")
        wide: Any = feat if feat.dtype == torch.bfloat16 else feat.numpy()
        data.nodes[ntype] = NodeFrame(len(feat), {"feat": wide})
    normalize(data, method)
    for ntype, frame in data.nodes.items():
        nodes[ntype].columns()["feat"].replace(torch.as_tensor(frame.data["feat"]))


def _graph_column(path: Path, values: Tensor) -> GraphColumn:
    low = high = nonfinite = None
    if values.is_floating_point():
        finite = finite_rows(values)
        nonfinite = None if finite.all() else int(finite.int().argmin())
    elif values.dtype != torch.bool and values.numel():
        low, high = int(values.min()), int(values.max())
    column = dict(_written(path, values))
    return GraphColumn(**column, low=low, high=high, nonfinite=nonfinite)


def _written(path: Path, rows: Tensor) -> PackedArray:
    """Write an array as ``.npy``; the file is not durable yet."""
    dtype, shape = dtype_name(rows), tuple(rows.shape)
    header = {"descr": stored_dtype(dtype).str, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(element_bytes(rows))  # an error of `np.save` would not say that the disk is full
    return PackedArray(file=path.name, dtype=dtype, shape=shape[1:])
