"""The user's dataset classes, whose ``dataset[i]`` is a DGL graph and its label."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor

from raygnn.config.graph import GraphSplit
from raygnn.errors import DataError
from raygnn.graph.collection.collection_manifest import no_splits, split_graphs
from raygnn.graph.collection.mapped_collection import Sample
from raygnn.graph.dgl import dgl
from raygnn.graph.sources.datasets import (
    check_splits,
    construct,
    is_integral,
    named_splits,
    their_errors,
    to_tensor,
)


class UserSamples:
    """All graphs of a user's dataset. See `raygnn.graph.collection.mapped_collection.Samples`.

    The dataset has ``__len__`` and ``__getitem__``. Its splits are those of ``get_idx_split()``,
    as in OGB, or of its attribute ``splits``; otherwise the config splits the graphs, stratified
    by integer ``labels`` if the dataset has them. Arrays keep their dtypes, which may differ
    between graphs. ``num_classes`` is the dataset's, if it has one.

    Args:
        spec: ``"package.module:Class"``; the working directory is on the path.
        args: its keyword arguments.
        graph: how to split the graphs if the dataset has no splits. None = graphs need neither
            targets nor splits: ``dataset[i]`` may have None as label, or be a graph alone.
        target: key of the label if labels are dictionaries.

    Raises:
        ConfigError: the class cannot be imported or constructed.
        DataError: the dataset has no graphs, or invalid splits.
    """

    def __init__(
        self, spec: str, args: Mapping[str, Any], graph: GraphSplit | None, target: str = "label"
    ):
        self._name = spec
        self._target = target
        self._graph_class = dgl().DGLGraph  # also lets the user's module import DGL
        self._dataset = construct(spec, args)
        self.num = self._length()
        given: Any = getattr(self._dataset, "num_classes", None)
        whole = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
        self.num_classes: int | None = int(given) if whole and given > 0 else None
        self._needs_labels = graph is not None
        splits = self._given_splits()
        if splits is None:
            splits = no_splits()
            if graph is not None:
                splits = split_graphs(self.num, self._classes(), graph)
        self.splits: Mapping[str, np.ndarray] = splits

    def __getitem__(self, number: int) -> Sample:
        item = self._dataset[number]
        if not self._needs_labels and isinstance(item, self._graph_class):
            item = item, None
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        if not pair or not isinstance(item[0], self._graph_class):
            kind = type(item).__name__
            if isinstance(item, (tuple, list)):
                kind += f" of ({', '.join(type(part).__name__ for part in item)})"
            message = f"is a {kind}, expected (DGL graph, label)"
            raise self._bad(number, message, "return a graph and its label from __getitem__")
        graph, label = item
        edges, edge_data = {}, {}
        for etype in graph.canonical_etypes:
            src, dst = graph.edges(form="uv", order="eid", etype=etype)
            edges[etype] = src.cpu().long(), dst.cpu().long()
            edge_data[etype] = {k: rows.cpu() for k, rows in graph.edges[etype].data.items()}
        num_nodes = {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
        node_data = {
            ntype: {name: rows.cpu() for name, rows in graph.nodes[ntype].data.items()}
            for ntype in graph.ntypes
        }
        return Sample(num_nodes, edges, node_data, edge_data, self._label(label, number))

    def _label(self, label: Any, number: int) -> Tensor | None:
        if isinstance(label, Mapping):
            if self._target not in label and self._needs_labels:
                names = ", ".join(map(repr, label)) or "none"
                message = f"has no label {self._target!r}; there are {names}"
                raise self._bad(number, message, "set task.target to one of them")
            label = label.get(self._target)
        if label is None and not self._needs_labels:
            return None
        tensor = to_tensor(label)
        if tensor is None:
            message = f"has a {type(label).__name__} as label, expected numbers"
            raise self._bad(number, message, "return a number, a tensor or a NumPy array as label")
        if tensor.dim() > 1:
            message = f"has a label of shape {list(tensor.shape)}, expected one number or one row"
            raise self._bad(number, message, "return one row of numbers as label")
        return tensor.reshape(()) if tensor.numel() == 1 else tensor

    def _bad(self, number: int, message: str, remedy: str) -> DataError:
        return self._error(f"{self._name}[{number}] {message}", remedy)

    def _error(self, message: str, remedy: str) -> DataError:
        return DataError(message, where=f"graph.dataset {self._name}", remedy=remedy)

    def _calling(self, method: str) -> AbstractContextManager[None]:
        remedy = "correct the dataset's class"
        return their_errors(f"{method} failed", f"graph.dataset {self._name}", remedy, DataError)

    def _length(self) -> int:
        for method in ("__len__", "__getitem__"):
            if not hasattr(type(self._dataset), method):
                message = f"{type(self._dataset).__name__} has no {method}"
                remedy = f"define {method}: a dataset has a length and is indexed from 0"
                raise self._error(message, remedy)
        with self._calling("len(dataset)"):
            num = len(self._dataset)
        if not num:
            remedy = "check graph.args, and that its files exist on every node"
            raise self._error("the dataset is empty: its length is 0", remedy)
        return num

    def _given_splits(self) -> dict[str, np.ndarray] | None:
        named = named_splits(self._dataset, self._name, needs_train=self._needs_labels)
        return None if named is None else check_splits(named, self.num, self._name)

    def _classes(self) -> np.ndarray | None:
        with self._calling("labels"):
            given = getattr(self._dataset, "labels", None)
        if isinstance(given, Mapping):
            given = given.get(self._target)
        labels = None if given is None else to_tensor(given)
        if labels is None or not is_integral(labels) or labels.numel() != self.num:
            return None
        return labels.reshape(-1).numpy()
