"""Graphs of a collection, each read from the mapped files on access."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, Field
from torch import Tensor

from raygnn.config.graph import GraphSplit
from raygnn.config.schema import Config
from raygnn.graph.arrays import Array, check_row_pointers, dtype_name
from raygnn.graph.collection import (
    REMEDY,
    CollectionMeta,
    PackedArray,
    PackedEdges,
    PackedNodes,
    damaged,
    dtype_of_array,
    read_collection,
    split_graphs,
)
from raygnn.graph.data import SPLITS, EdgeType
from raygnn.graph.partition.manifest import check_size
from raygnn.storage.remote import AnyPath


@dataclass(frozen=True)
class Sample:
    """One graph with its data and target.

    Attributes:
        num_nodes: node type → number of nodes, from 0.
        edges: edge type → sources and destinations, int64 ``[E]`` each, in edge order.
        node_data: node type → name → ``[N, …]``, any dtype, as stored.
        edge_data: edge type → name → ``[E, …]``.
        y: target ``[]`` or ``[K]``, as stored; None if unknown.
    """

    num_nodes: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Tensor, Tensor]]
    node_data: Mapping[str, Mapping[str, Tensor]]
    edge_data: Mapping[EdgeType, Mapping[str, Tensor]] = field(default_factory=dict)
    y: Tensor | None = None

    def describe(self) -> dict[str, Any]:
        """Return the graph's schema as JSON: types, arrays and target, which all graphs share."""
        return {
            "nodes": {t: _described(self.node_data.get(t, {})) for t in self.num_nodes},
            "edges": [[list(e), _described(self.edge_data.get(e, {}))] for e in self.edges],
            "target": None if self.y is None else _described({"y": self.y}, 0)["y"],
        }

    @classmethod
    def from_description(cls, described: Any) -> Sample:
        """Build a graph of that schema, without nodes and edges. Raises ValueError if damaged."""
        schema = _GraphKinds.model_validate(described)
        nothing, edges = torch.empty(0, dtype=torch.int64), dict(schema.edges)
        y = None
        if schema.target is not None:
            y = torch.zeros(schema.target[1], dtype=getattr(torch, schema.target[0]))
        return cls(
            num_nodes=dict.fromkeys(schema.nodes, 0),
            edges=dict.fromkeys(edges, (nothing, nothing)),
            node_data={t: _empty(arrays) for t, arrays in schema.nodes.items()},
            edge_data={e: _empty(arrays) for e, arrays in edges.items()},
            y=y,
        )


_ArrayKind: TypeAlias = tuple[
    Annotated[str, AfterValidator(dtype_of_array)],
    tuple[Annotated[int, Field(ge=0, lt=2**31, strict=True)], ...],
]


class _GraphKinds(BaseModel):
    nodes: dict[str, dict[str, _ArrayKind]]
    edges: list[tuple[EdgeType, dict[str, _ArrayKind]]]
    target: _ArrayKind | None


def _described(arrays: Mapping[str, Tensor], row: int = 1) -> dict[str, Any]:
    """Return name → dtype and shape, without the first ``row`` dimensions."""
    return {name: [dtype_name(array), list(array.shape[row:])] for name, array in arrays.items()}


def _empty(arrays: Mapping[str, _ArrayKind]) -> dict[str, Tensor]:
    return {
        name: torch.empty((0, *shape), dtype=getattr(torch, dtype))
        for name, (dtype, shape) in arrays.items()
    }


class Collection:
    """All graphs of a collection, mapped read-only.

    Attributes:
        num_classes: number of classes of the targets; None if they are not integers.
        splits: "train", "val", "test" → graph numbers, int64, ascending and disjoint; empty for
            graphs to predict that have no splits.
    """

    def __init__(self, meta: CollectionMeta, target: str, graph: GraphSplit | None):
        """Map the files.

        Args:
            target: name of the labels that become ``y``; one number per graph is ``[]``, whether it
                was saved as ``[G]`` or as ``[G, 1]``.
            graph: how to split graphs that came without splits, stratified by integer labels.
                None = the graphs have no other splits and need no labels.
        """
        self.meta = meta
        self.num = meta.num_graphs
        labels: Array | None = None
        self.num_classes: int | None = None
        if graph is not None or target in meta.graphs:
            column = meta.target(target)
            labels = _map(meta, column, self.num)
            if column.shape == (1,):
                labels = labels[:, 0]
            self._dtype = column.dtype
            self.num_classes = meta.classes(target)
        self._labels = labels
        self._nodes = {ntype: _MappedFrames(meta, nodes) for ntype, nodes in meta.nodes.items()}
        self._edges = {etype: _MappedFrames(meta, edges) for etype, edges in meta.edges.items()}
        nothing = {name: np.zeros(0, np.int64) for name in SPLITS}
        self.splits: Mapping[str, Array] = meta.given_splits() or nothing
        if graph is not None and meta.splits is None:
            whole = self.num_classes is not None and labels is not None and labels.ndim == 1
            self.splits = split_graphs(self.num, labels if whole else None, graph)

    def targets(self) -> Tensor:
        """Return the targets of all graphs, ``[G]`` or ``[G, K]``, as stored."""
        assert self._labels is not None
        return _copied(self._labels, self._dtype)

    def column(self, kind: str | EdgeType, name: str) -> tuple[Array, str] | None:
        """Return an array of a node or edge type over all graphs, mapped, and its dtype; None if
        no graph has nodes or edges of the type, and thus the array."""
        frames = self._nodes[kind] if isinstance(kind, str) else self._edges[kind]
        return frames.columns.get(name)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < self.num:
            raise IndexError(f"graph {number} of {self.num}")
        y = None
        if self._labels is not None:
            y = _copied(self._labels[number : number + 1], self._dtype)[0]
        return Sample(
            {t: int(f.offsets[number + 1] - f.offsets[number]) for t, f in self._nodes.items()},
            {e: frames.edges(number) for e, frames in self._edges.items()},
            {t: frames.data(number) for t, frames in self._nodes.items()},
            {e: frames.data(number) for e, frames in self._edges.items()},
            y,
        )


def open_collection(config: Config, directory: AnyPath, *, others: bool = False) -> Collection:
    """Open a job's graphs; ``others`` than the training's need no targets, and have no splits but
    the dataset's own."""
    assert isinstance(directory, Path)  # see `find_collection`
    graph = config.graph if isinstance(config.graph, GraphSplit) else GraphSplit()
    meta = read_collection(directory)
    meta.check_target(config.task, known=not others)
    return Collection(meta, config.task.target, None if others else graph)


class _MappedFrames:
    def __init__(self, meta: CollectionMeta, kind: PackedNodes):
        self.offsets = _map(meta, kind.offsets, meta.num_graphs + 1)
        file = meta.directory / kind.offsets.file
        check_row_pointers(self.offsets, kind.num, lambda reason: damaged(file, reason))
        ends = (kind.src, kind.dst) if isinstance(kind, PackedEdges) else ()
        self.ends = [_map(meta, column, kind.num) for column in ends]
        self.columns = {
            name: (_map(meta, column, kind.num), column.dtype) for name, column in kind.data.items()
        }

    def rows(self, number: int) -> slice:
        """Return the rows of a graph."""
        return slice(*self.offsets[number : number + 2].tolist())

    def edges(self, number: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(number)
        src, dst = (torch.from_numpy(end[rows].astype(np.int64)) for end in self.ends)
        return src, dst

    def data(self, number: int) -> dict[str, Tensor]:
        rows = self.rows(number)
        return {name: _copied(array[rows], dtype) for name, (array, dtype) in self.columns.items()}


def _copied(rows: Array, dtype: str) -> Tensor:
    """Copy rows to a tensor, so that writing to it changes no file."""
    tensor = torch.from_numpy(rows.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _map(meta: CollectionMeta, column: PackedArray, rows: int) -> Array:
    path = meta.directory / column.file
    file = meta.files.get(column.file)
    if file is None:
        raise damaged(path, "the manifest does not list this file")
    check_size(path, file.bytes, REMEDY)
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise damaged(path, f"is not a .npy file: {error}") from error
    expected = (rows, *column.shape)
    if mapped.shape != expected or mapped.dtype != column.stored:
        wanted = f"{column.dtype} of shape {list(expected)}"
        message = f"holds {mapped.dtype} of shape {list(mapped.shape)}, expected {wanted}"
        raise damaged(path, message)
    # a plain array, since slicing a memmap costs many times as much
    return np.asarray(mapped)
