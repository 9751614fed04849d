"""Datasets of PyG, DGL, OGB or the user: a class that the driver constructs and reads once.

``dataset[i]`` is a graph of PyG or DGL, or a pair of graph and labels, as in DGL and OGB. Splits
are masks, ``get_idx_split()`` (OGB) or an attribute ``splits``.
"""

from __future__ import annotations

import copy
import errno
import functools
import importlib
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from raygnn.config.graph import DatasetGraph
from raygnn.config.values import find_user_modules
from raygnn.errors import ConfigError, DataError, RaygnnError, error_text
from raygnn.graph import dgl
from raygnn.graph.arrays import Array, dtype_name
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    SPLITS,
    EdgeFrame,
    GraphData,
    NodeFrame,
)
from raygnn.graph.sources.input_files import check_frames, sha256, to_ids, to_targets
from raygnn.graph.sources.library_graphs import GraphSet, graph_data, is_graph

VERSION = 1

# names of splits in OGB and other libraries
_OTHER_NAMES = {"valid": "val", "validation": "val", "testing": "test", "training": "train"}
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_KEY = "graph.dataset"
# OGB's splits of links: keys of the ends, which vary, and of further arrays
_LINKS = ({"edge"}, {"source_node", "target_node"}, {"head", "tail"})
_ENDS = ({"source_node", "head"}, {"target_node", "tail"})
_OF_LINKS = ("relation", "weight", "year")


@dataclass(frozen=True)
class OpenDataset:
    """A constructed dataset of the class ``spec``, its raw files, if it names them as PyG does, and
    size and time of each at construction."""

    spec: str
    dataset: Any
    raw_files: tuple[Path, ...]
    stamps: list[tuple[int, int]]

    def __len__(self) -> int:
        with their_errors(f"len() of {self.spec} failed", _KEY, "correct the class", DataError):
            return len(self.dataset)

    def item(self, number: int) -> tuple[GraphData, Any, Any]:
        """Read ``dataset[number]``: the graph with NumPy arrays, the labels paired with it, and
        PyG's graph-level ``y``."""
        where = f"{self.spec}[{number}]"
        with their_errors(f"{where} failed", _KEY, "correct the class", DataError):
            item = self.dataset[number]
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        graph, labels = item if pair else (item, None)
        y = getattr(graph, "y", None) if hasattr(graph, "edge_stores") else None
        if isinstance(graph, Mapping) and {"edge_index", "edge_index_dict"} & graph.keys():
            data = _ogb_graph(graph)
        else:
            data = graph_data(graph, where)
        data.name = where
        frames: list[Any] = [*data.nodes.values(), *data.edges.values()]
        for frame in frames:
            frame.data = {name: _plain(array) for name, array in frame.data.items()}
        for edges in data.edges.values():
            edges.src, edges.dst = _plain(edges.src), _plain(edges.dst)
        check_frames(data.nodes, data.edges, where)
        return data, labels, y


_kept: dict[str, OpenDataset] = {}  # at most one, from the hash of its files to the reading


def open_dataset(graph: DatasetGraph) -> OpenDataset:
    """Construct a dataset; reuse the last one if its raw files have not changed."""
    key = json.dumps([graph.dataset, graph.args], sort_keys=True)
    kept = _kept.get(key)
    if kept is None or kept.stamps != _stamps(kept.raw_files):
        _kept.clear()
        try:
            made = construct(graph.dataset, graph.args)
        except ConfigError as error:
            raise _explained(error, graph) from error.__cause__
        files = tuple(file for path in _raw_paths(made) for file in _files_in(path))
        dataset = [made] if is_graph(made) else made
        _kept[key] = kept = OpenDataset(graph.dataset, dataset, files, _stamps(files))
    return kept


def files(graph: DatasetGraph) -> list[Path]:
    """Return the raw files that the dataset names, as PyG's do in ``raw_paths``."""
    return list(open_dataset(graph).raw_files)


def identity(graph: DatasetGraph) -> dict[str, Any]:
    """Return the digest's values for the class: its source, and its arguments; without ``root`` if
    raw files are known, which are hashed instead."""
    args = dict(graph.args)
    if open_dataset(graph).raw_files:
        args.pop("root", None)
    module, _, name = graph.dataset.partition(":")
    made = getattr(importlib.import_module(module), name)
    return {"args": args, "source": _source(inspect.getmodule(made) or made)}


def read(graph: DatasetGraph) -> GraphData:
    """Read one graph of a dataset, with one of its splits."""
    opened = open_dataset(graph)
    if graph.index >= (num := len(opened)):
        message = f"there is no graph {graph.index}: {graph.dataset} holds {num}"
        remedy = f"choose graph.index from 0 to {num - 1}" if num else "check graph.args"
        raise ConfigError(message, where="graph.index", remedy=remedy)
    data, labels, _ = opened.item(graph.index)
    if hasattr(opened.dataset, "get_edge_split"):
        _take_links(data, opened.dataset)
    _add_labels(data, labels)
    if (given := named_splits(opened.dataset, graph.dataset)) is not None:
        _add_masks(data, given)
    _choose_split(data, graph.split)
    to_targets(data.nodes, data.edges, data.name)
    for frame in data.nodes.values() if graph.normalize else ():
        if "feat" in frame.data:  # is scaled in place, and the dataset may still hold it
            frame.data["feat"] = copy.deepcopy(frame.data["feat"])
    data.origin = {"": data.name}
    name = getattr(opened.dataset, "name", None)
    data.name = name.lower() if isinstance(name, str) and name else graph.dataset.partition(":")[2]
    _kept.clear()
    return data


@contextmanager
def read_all(graph: DatasetGraph) -> Iterator[GraphSet]:
    """Read all graphs of a dataset, for tasks on whole graphs."""
    opened = open_dataset(graph)
    num = len(opened)
    given = named_splits(opened.dataset, graph.dataset)
    splits = None if given is None else check_splits(given, num, graph.dataset)
    labels: dict[str, Any] = {}
    yield GraphSet(graph.dataset, num, labels, _graphs(opened, labels), splits)
    _kept.clear()


def _graphs(opened: OpenDataset, labels: dict[str, Any]) -> Iterator[GraphData]:
    """Yield the graphs; after the last one ``labels`` holds the labels by name."""
    rows: list[dict[str, Array]] = []
    known: dict[str, set[str]] = {}
    for number in range(len(opened)):
        data, label, y = opened.item(number)
        if label is None and y is not None:
            label = y
            for frame in data.nodes.values():  # with one node, ``y`` looks like an array of nodes
                frame.data = {n: a for n, a in frame.data.items() if n not in ("y", "label")}
        for ntype, frame in data.nodes.items():
            if frame.num == 1 and ntype in known:  # so do other graph-level arrays
                frame.data = {n: a for n, a in frame.data.items() if n in known[ntype]}
            elif frame.num > 1:
                known.setdefault(ntype, set(frame.data))
        named = label if isinstance(label, Mapping) else {"label": label}
        rows.append({n: _label(v, data.name) for n, v in named.items() if v is not None})
        yield data
    for name in {name: None for row in rows for name in row}:
        shapes = [f"shape {row[name].shape}" if name in row else "no value" for row in rows]
        if (odd := next((i for i, s in enumerate(shapes) if s != shapes[0]), None)) is not None:
            message = f"label {name!r} has {shapes[odd]}, in graph 0 {shapes[0]}"
            remedy = "return labels of one shape for all graphs; NaN is an unknown one"
            raise DataError(message, where=f"{opened.spec}[{odd}]", remedy=remedy)
        labels[name] = np.stack([row[name] for row in rows])


def _label(value: Any, where: str) -> Array:
    """Return a graph's label as a number, or as a row of several."""
    array = _numbers(value, f"{where}: label")
    return array.reshape(()) if array.size == 1 else np.squeeze(array)


def _numbers(value: Any, where: str) -> Array:
    if (array := _to_array(value)) is None:
        message = f"is a {type(value).__name__}, expected numbers"
        raise DataError(message, where=where, remedy="return a number, a tensor or an array")
    return array


# --- construction


def construct(spec: str, args: Mapping[str, Any]) -> Any:
    """Import ``"module:Class"``, with the working directory on the path, and call it."""
    module, _, name = spec.partition(":")
    find_user_modules()
    if not module.startswith("torch_geometric") and dgl.installed():
        dgl.dgl()  # so that "import dgl" in the module works
    remedy = "give package.module:Class, importable on every node"
    with their_errors(f"{spec} could not be imported", _KEY, remedy):
        made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not callable(made):
        message = f"{spec} is a {type(made).__name__}, not a class"
        raise ConfigError(message, where=_KEY, remedy="give package.module:Class of a dataset")
    remedy = f"correct graph.args: the class is called as {name}(**graph.args)"
    with their_errors(f"{spec} could not be constructed", "graph.args", remedy):
        return made(**args)


@contextmanager
def their_errors(
    problem: str, where: str, remedy: str, kind: type[RaygnnError] = ConfigError
) -> Iterator[None]:
    """Convert exceptions of a user's code to a RaygnnError, with the exception as its cause."""
    try:
        yield
    except RaygnnError:
        raise
    except Exception as error:
        raise kind(f"{problem}: {error_text(error)}", where=where, remedy=remedy) from error


def _explained(error: ConfigError, graph: DatasetGraph) -> RaygnnError:
    """Return a more specific error if a raw file is missing, or files cannot be written."""
    cause = error.__cause__
    frames = traceback.walk_tb(cause.__traceback__) if cause else ()
    for frame, _ in frames:
        paths = _raw_paths(frame.f_locals.get("self"))
        if missing := [path for path in paths if not path.exists()]:
            assert cause is not None
            names, why = ", ".join(path.name for path in missing[:10]), error_text(cause)
            message = f"the raw file is missing, and {graph.dataset} could not download it: {why}"
            remedy = f"put into {missing[0].parent}, from a machine with a network: {names}"
            return DataError(message, where=str(missing[0]), remedy=remedy)
    if isinstance(cause, OSError) and cause.errno in _READ_ONLY:
        message = f"{graph.dataset} cannot write what it makes of its raw files: {cause.strerror}"
        remedy = "set graph.args.root to a writable directory with the raw files or links to them"
        where = str(cause.filename or graph.args.get("root"))
        return DataError(message, where=where, remedy=remedy)
    return error


def _raw_paths(dataset: Any) -> list[Path]:
    """Return the raw files that an object names as PyG's datasets do; none if it names none."""
    try:
        paths = dataset.raw_paths
    except Exception:  # PyG raises NotImplementedError
        return []
    return [Path(path) for path in paths] if isinstance(paths, (list, tuple)) else []


def _files_in(path: Path) -> list[Path]:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file()]


def _stamps(files: tuple[Path, ...]) -> list[tuple[int, int]]:
    stats = [file.stat() for file in files if file.exists()]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


@functools.cache  # the source at import time
def _source(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return sha256(Path(file)) if file else module.__name__


# --- names in libraries


def _ogb_graph(graph: Mapping[str, Any]) -> GraphData:
    """Convert a graph of OGB's classes, a dictionary of arrays."""
    typed = "edge_index_dict" in graph

    def by_type(key: str, only: Any) -> Mapping[Any, Any]:
        return graph[f"{key}_dict"] if typed else {only: graph[key]}

    nodes = {t: NodeFrame(int(n)) for t, n in by_type("num_nodes", DEFAULT_NTYPE).items()}
    ends = by_type("edge_index", DEFAULT_ETYPE)
    edges = {etype: EdgeFrame(both[0], both[1]) for etype, both in ends.items()}
    for key, values in graph.items():
        kind, _, name = key.removesuffix("_dict").partition("_")
        frames: Any = {"node": nodes, "edge": edges}.get(kind)
        if frames is None or name == "index" or values is None:
            continue
        name = "relation" if name == "reltype" else name
        one = values if isinstance(values, Mapping) else {next(iter(frames)): values}
        for of, rows in one.items():
            column = rows.shape[1:] == (1,) and name != "feat"
            frames[of].data[name] = rows.reshape(-1) if column else rows
    return GraphData("graph", nodes, edges)


def _plain(array: Any) -> Any:
    """Convert to a NumPy array; a dtype that NumPy lacks stays a tensor."""
    is_plain = isinstance(array, np.ndarray) or dtype_name(array) == "bfloat16"
    return array if is_plain else array.numpy()


def _add_labels(data: GraphData, labels: Any) -> None:
    """Add labels that are paired with a graph, of its only node type or by node type."""
    if labels is None:
        return
    for ntype, rows in _by_node_type(data, labels, "labels").items():
        array = _numbers(rows, f"{data.name}: labels")
        several = array.ndim > 1 and array.shape[1] > 1
        data.nodes[ntype].data["labels" if several else "label"] = array
    check_frames(data.nodes, {}, data.name)


def _take_links(data: GraphData, dataset: Any) -> None:
    """Replace the edges by all splits' edges, with masks: OGB's graph lacks held-out edges."""
    where = f"{data.name}: get_edge_split()"
    with their_errors(f"{where} failed", _KEY, "correct the class", DataError):
        given = dataset.get_edge_split()
    parts = [given.get(split) for split in ("train", "valid", "test")]
    keys = next((keys for keys in _LINKS if all(keys <= set(part or ()) for part in parts)), None)
    if keys is None or len(data.nodes) > 1 or len(data.edges) > 1:
        listed = ", ".join(map(str, parts[0] or ())) or "none"
        message = f"its splits of links are not of one edge type: {listed}"
        remedy = "write a class of your own, whose edges have train_mask, val_mask and test_mask"
        raise DataError(message, where=where, remedy=remedy)
    more = [name for name in _OF_LINKS if all(name in part for part in parts)]
    rows = {
        name: np.concatenate([_numbers(part[name], f"{where}: {name}") for part in parts])
        for name in (*keys, *more)
    }
    split = np.repeat(np.arange(3), [len(part[next(iter(keys))]) for part in parts])
    if "edge" in rows:
        src, dst = rows.pop("edge").T
    else:
        src, dst = (rows.pop(next(iter(keys & ends))) for ends in _ENDS)
    masks = {mask: split == at for at, mask in enumerate(MASKS)}
    data.edges = {etype: EdgeFrame(src, dst, rows | masks) for etype in data.edges}
    check_frames(data.nodes, data.edges, data.name)


def _add_masks(data: GraphData, splits: Mapping[str, Any]) -> None:
    for split, given in splits.items():
        for ntype, ids in _by_node_type(data, given, f"split {split}").items():
            frame, place = data.nodes[ntype], f"{data.name}: split {split}"
            mask = np.zeros(frame.num, np.bool_)
            mask[to_ids(_numbers(ids, place), frame.num, place, "node")] = True
            frame.data[f"{split}_mask"] = mask


def _by_node_type(data: GraphData, given: Any, what: str) -> Mapping[str, Any]:
    by_type = given if isinstance(given, Mapping) else {next(iter(data.nodes)): given}
    if not by_type.keys() <= data.nodes.keys() or (by_type is not given and len(data.nodes) > 1):
        named = "by node type" if by_type is given else "of no node type"
        message = f"{what} are given {named}, and the node types are {', '.join(data.nodes)}"
        remedy = f"give a dictionary of node types for {what}"
        raise DataError(message, where=data.name, remedy=remedy)
    return by_type


def _choose_split(data: GraphData, split: int) -> None:
    """Replace each mask of several columns, one for each split, by the column ``split``."""
    frames: list[Any] = [*data.nodes.values(), *data.edges.values()]
    masks = [(frame.data, name) for frame in frames for name in MASKS if name in frame.data]
    several = [(arrays, name) for arrays, name in masks if arrays[name].ndim == 2]
    count = min((arrays[name].shape[1] for arrays, name in several), default=1)
    if split >= count:
        message = f"there is no split {split}: the masks of {data.name} have {count}"
        remedy = f"choose graph.split from 0 to {count - 1}" if count > 1 else "set it to 0"
        raise ConfigError(message, where="graph.split", remedy=remedy)
    for arrays, name in several:
        arrays[name] = np.ascontiguousarray(arrays[name][:, split])


# --- a dataset's splits


def named_splits(dataset: Any, spec: str) -> dict[str, Any] | None:
    """Return a dataset's ``get_idx_split()`` or ``splits`` by our names; None if it has neither."""
    has_method = hasattr(dataset, "get_idx_split")
    source = "get_idx_split()" if has_method else "splits"
    with their_errors(f"{source} failed", f"{_KEY} {spec}", "correct the class", DataError):
        given = dataset.get_idx_split() if has_method else getattr(dataset, "splits", None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _bad_split(spec, f"{source} is a {type(given).__name__}, not a dictionary")
    named = {_OTHER_NAMES.get(str(name), str(name)): ids for name, ids in given.items()}
    if not named.keys() <= set(SPLITS):
        raise _bad_split(spec, f"{source} has the splits {', '.join(map(repr, given)) or 'none'}")
    return named


def check_splits(named: Mapping[str, Any], num: int, spec: str) -> dict[str, Array]:
    """Return the numbers of the graphs of each split, ascending."""
    splits = {}
    for split in SPLITS:
        given = _to_array(named.get(split, ()))
        if given is None or given.ndim != 1 or given.dtype.kind not in "iu":
            raise _bad_split(spec, f"its splits hold no graph numbers for {split}")
        splits[split] = np.sort(given.astype(np.int64))
    numbers = np.concatenate(list(splits.values()))
    outside = numbers[(numbers < 0) | (numbers >= num)]
    if len(outside):
        raise _bad_split(spec, f"its splits hold graph {outside[0]}, but there are {num}")
    if (counts := np.bincount(numbers, minlength=1)).max() > 1:
        raise _bad_split(spec, f"its splits hold graph {counts.argmax()} more than once")
    return splits


def _bad_split(spec: str, message: str) -> DataError:
    remedy = "give a dictionary of train, val and test, with numbers from 0, each in one at most"
    return DataError(message, where=f"{_KEY} {spec}", remedy=remedy)


def _to_array(values: Any) -> Array | None:
    """Convert numbers to an array of their dtype (Python's floats: float32); None for others."""
    import torch

    numbers = np.ndarray, np.generic, int, float, list, tuple, range
    try:
        if isinstance(values, torch.Tensor):
            return np.asarray(values.detach().cpu())
        if not isinstance(values, numbers):
            return None
        dtype = torch.int64 if np.shape(values) == (0,) else None
        return np.asarray(torch.tensor(values, dtype=dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # numpy lacks bfloat16
        return None
