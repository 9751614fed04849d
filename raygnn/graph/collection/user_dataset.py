"""A dataset of the user's own: ``dataset[i]`` is a DGL graph and its label."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.config.graph import ManyGraphs
from raygnn.errors import ConfigError, DataError, RaygnnError, error_text
from raygnn.graph.collection.splits import no_splits, split_graphs
from raygnn.graph.data import SPLITS
from raygnn.graph.dgl import dgl
from raygnn.graph.graph_sample import Sample

# what OGB and others call our splits
_OTHER_NAMES = {"valid": "val", "validation": "val", "testing": "test", "training": "train"}


class UserSamples:
    """All graphs of a user's dataset. See `raygnn.graph.graph_sample.Samples`.

    The dataset has ``__len__`` and ``__getitem__``. Its splits are those of ``get_idx_split()``,
    as OGB's datasets have it, or of its attribute ``splits``; else the graphs are divided as the
    config says, evenly by class if it has whole numbers as ``labels``. Its arrays keep their
    dtypes, which may differ from one graph to the next.

    Attributes:
        num_classes: the dataset's own ``num_classes``, if it has such a number.
    """

    def __init__(
        self, spec: str, args: Mapping[str, Any], graph: ManyGraphs | None, target: str = "label"
    ):
        """Import the class, make the dataset, and ask for its size and its splits.

        Args:
            spec: ``"package.module:Class"``; the working directory is on the path.
            args: its keyword arguments.
            graph: how to split the graphs, where the dataset does not say. None = graphs need
                neither targets nor splits: ``dataset[i]`` may have None as label, or be a graph
                alone.
            target: which of a graph's labels, where they are a dictionary.

        Raises:
            ConfigError: it cannot be imported or made.
            DataError: it has no graphs, or splits that cannot be.
        """
        self._name = spec
        self._target = target
        self._graph_class = dgl().DGLGraph  # also lets the user's module import DGL
        self._dataset = _make(spec, args)
        self.num = self._length()
        given: Any = getattr(self._dataset, "num_classes", None)
        whole = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
        self.num_classes: int | None = int(given) if whole and given > 0 else None
        self._whole = graph is not None
        splits = self._own_splits()
        if splits is None:
            splits = no_splits() if graph is None else self._divided(graph)
        self.splits: Mapping[str, np.ndarray] = splits

    def __getitem__(self, number: int) -> Sample:
        item = self._dataset[number]
        if not self._whole and isinstance(item, self._graph_class):
            item = item, None
        if (
            not isinstance(item, (tuple, list))
            or len(item) != 2
            or not isinstance(item[0], self._graph_class)
        ):
            found = type(item).__name__
            if isinstance(item, (tuple, list)):
                found += f" of ({', '.join(type(part).__name__ for part in item)})"
            raise self._bad(
                f"is a {found}, expected (DGL graph, label)",
                number,
                "return a graph and its label from __getitem__",
            )
        graph, label = item
        etypes = graph.canonical_etypes
        return Sample(
            {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes},
            {
                etype: tuple(
                    end.cpu().long() for end in graph.edges(form="uv", order="eid", etype=etype)
                )
                for etype in etypes
            },
            {ntype: _on_cpu(graph.nodes[ntype].data) for ntype in graph.ntypes},
            {etype: _on_cpu(graph.edges[etype].data) for etype in etypes},
            self._label(label, number),
        )

    def _label(self, label: Any, number: int) -> Tensor | None:
        if isinstance(label, Mapping):
            if self._target not in label and not self._whole:
                return None
            if self._target not in label:
                there = ", ".join(map(repr, label)) or "none"
                raise self._bad(
                    f"has no label {self._target!r}; there are {there}",
                    number,
                    "set task.target to one of them",
                )
            label = label[self._target]
        if label is None and not self._whole:
            return None
        tensor = _to_tensor(label)
        if tensor is None:
            raise self._bad(
                f"has a {type(label).__name__} as label, expected numbers",
                number,
                "return a number, a tensor or a NumPy array as label",
            )
        if tensor.dim() > 1:
            raise self._bad(
                f"has a label of shape {list(tensor.shape)}, expected one number or one row",
                number,
                "return one row of numbers as label",
            )
        return tensor.reshape(()) if tensor.numel() == 1 else tensor

    def _bad(self, what: str, number: int, remedy: str) -> DataError:
        return DataError(f"{self._name}[{number}] {what}", where=self._where, remedy=remedy)

    @property
    def _where(self) -> str:
        return f"graph.dataset {self._name}"

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """What the user's code raises, with the question that it was asked."""
        try:
            yield
        except RaygnnError:
            raise
        except Exception as error:
            raise DataError(
                f"{what} failed: {error_text(error)}",
                where=self._where,
                remedy="correct the dataset's class",
            ) from error

    def _length(self) -> int:
        for method in ("__len__", "__getitem__"):
            if not hasattr(type(self._dataset), method):
                raise DataError(
                    f"{type(self._dataset).__name__} has no {method}",
                    where=self._where,
                    remedy=f"define {method}: a dataset has a length and is indexed from 0",
                )
        with self._asking("len(dataset)"):
            num = len(self._dataset)
        if not num:
            raise DataError(
                "the dataset is empty: its length is 0",
                where=self._where,
                remedy="check graph.args, and that its files are there on every node",
            )
        return num

    def _own_splits(self) -> dict[str, np.ndarray] | None:
        """Those that the dataset has itself; None if it has none."""
        if hasattr(self._dataset, "get_idx_split"):
            source = "get_idx_split()"
            with self._asking(source):
                given = self._dataset.get_idx_split()
        else:
            source, given = "splits", getattr(self._dataset, "splits", None)
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise self._bad_splits(source, f"is a {type(given).__name__}, not a dictionary")
        named = {_OTHER_NAMES.get(name, name): numbers for name, numbers in given.items()}
        if ("train" not in named and self._whole) or not named.keys() <= set(SPLITS):
            raise self._bad_splits(source, f"has the splits {', '.join(map(repr, given))}")
        splits, owner = {}, np.full(self.num, -1)
        for at, split in enumerate(SPLITS):
            tensor = _to_tensor(named.get(split, ()))
            if tensor is None or tensor.dim() != 1 or not _of_integers(tensor):
                raise self._bad_splits(source, f"holds no numbers of graphs for {split}")
            numbers = np.sort(tensor.numpy().astype(np.int64))
            outside = numbers[(numbers < 0) | (numbers >= self.num)]
            if len(outside):
                raise self._bad_splits(
                    source, f"has graph {outside[0]} in {split}, but there are {self.num}"
                )
            taken = numbers[owner[numbers] >= 0]
            if len(taken):
                other = SPLITS[owner[taken[0]]]
                raise self._bad_splits(source, f"has graph {taken[0]} in {other} and in {split}")
            if (twice := numbers[1:][numbers[1:] == numbers[:-1]]).size:
                raise self._bad_splits(source, f"has graph {twice[0]} twice in {split}")
            owner[numbers] = at
            splits[split] = numbers
        return splits

    def _divided(self, graph: ManyGraphs) -> dict[str, np.ndarray]:
        """As the config says."""
        return split_graphs(self.num, self._classes(), graph)

    def _bad_splits(self, source: str, what: str) -> DataError:
        return DataError(
            f"{source} {what}",
            where=self._where,
            remedy="give a dictionary of train, val and test, each with numbers of graphs from 0, "
            "each graph in one of them at most",
        )

    def _classes(self) -> np.ndarray | None:
        """The dataset's ``labels``, where they are one whole number for each graph."""
        with self._asking("labels"):
            given = getattr(self._dataset, "labels", None)
        if isinstance(given, Mapping):
            given = given.get(self._target)
        labels = None if given is None else _to_tensor(given)
        if labels is None or not _of_integers(labels) or labels.numel() != self.num:
            return None
        return labels.reshape(-1).numpy()


def _make(spec: str, args: Mapping[str, Any]) -> Any:
    made = _load(spec)
    try:
        return made(**args)
    except RaygnnError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{spec} could not be constructed: {error_text(error)}",
            where="graph.args",
            remedy=f"it is called as {made.__name__}(**graph.args); its signature is "
            f"{_signature(made)}",
        ) from error


def _load(spec: str) -> Callable[..., Any]:
    module, _, name = spec.partition(":")
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        found = getattr(importlib.import_module(module), name)
    except RaygnnError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{spec} could not be imported: {error_text(error)}",
            where="graph.dataset",
            remedy="give package.module:Class, importable on every node",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{spec} is a {type(found).__name__}, not a class",
            where="graph.dataset",
            remedy="give package.module:Class of a dataset",
        )
    made: Callable[..., Any] = found
    return made


def _signature(made: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(made))
    except (TypeError, ValueError):
        return "not known"


def _on_cpu(data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in data.items()}


def _of_integers(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _to_tensor(values: Any) -> Tensor | None:
    """Numbers of any kind as a tensor of their own dtype (Python's floats: float32); None for
    what are no numbers."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        if isinstance(values, (np.ndarray, np.generic)):
            return torch.from_numpy(np.array(values))
        if isinstance(values, float):
            return torch.tensor(values, dtype=torch.float32)
        if isinstance(values, (list, tuple)) and not values:
            return torch.zeros(0, dtype=torch.int64)
        return torch.tensor(values) if isinstance(values, (int, list, tuple, range)) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
