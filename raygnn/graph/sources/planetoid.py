"""Planetoid files: Cora, CiteSeer and PubMed with the public split of Yang et al. (2016).

``allx``/``ally`` hold the features and one-hot labels of the nodes ``0 … A-1``, of which the
first, repeated in ``x``/``y``, are the training nodes and the next 500 the validation nodes.
Row ``i`` of ``tx``/``ty`` belongs to the test node on line ``i`` of ``test.index``. Ids between
``A`` and the largest test id that are not listed (CiteSeer has 15) are isolated nodes without
features or label. ``graph`` is a dict of node → neighbours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import PlanetoidGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    EdgeFrame,
    GraphData,
    NodeFrame,
)
from raygnn.graph.sources.input_files import check_file, check_fits_memory, read_bytes
from raygnn.graph.sources.pickles import load_adjacency, load_array, load_csr
from raygnn.graph.sources.transforms import both_directions

VERSION = 1
DEFAULT_NORMALIZE = "row"
VAL_NODES = 500

_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


def files(graph: PlanetoidGraph) -> list[Path]:
    """The eight files ``ind.<name>.*``, in a fixed order."""
    return [_file(graph, part) for part in _PARTS]


def read(graph: PlanetoidGraph) -> GraphData:
    """The graph as ``feat`` float32 ``[N, F]``, ``label`` int64 ``[N]`` and the three masks.

    Every edge is there in both directions, once; a self-loop stays one edge.

    Raises:
        DataError: a file is missing, damaged, hostile or disagrees with another one.
    """
    for file in files(graph):
        check_file(file)
    x, allx, tx = (_features(_file(graph, part)) for part in ("x", "allx", "tx"))
    y, ally, ty = (_one_hot(_file(graph, part)) for part in ("y", "ally", "ty"))
    name = f"ind.{graph.name}"
    for part, count, noun, other, expected in (
        ("y", len(y), "rows", "x", x.shape[0]),
        ("ally", len(ally), "rows", "allx", allx.shape[0]),
        ("ty", len(ty), "rows", "tx", tx.shape[0]),
        ("x", x.shape[1], "columns", "allx", allx.shape[1]),
        ("tx", tx.shape[1], "columns", "allx", allx.shape[1]),
        ("y", y.shape[1], "classes", "ally", ally.shape[1]),
        ("ty", ty.shape[1], "classes", "ally", ally.shape[1]),
    ):
        if count != expected:
            raise _damaged(
                _file(graph, part), f"{count} {noun}, but {name}.{other} holds {expected}"
            )
    if len(y) > len(ally):
        raise _damaged(_file(graph, "y"), f"{len(y)} rows, more than the {len(ally)} of ally")
    adjacency = load_adjacency(_file(graph, "graph"))
    num_listed = max(len(adjacency), len(ally) + len(ty))
    test = _test_index(_file(graph, "test.index"), len(ty), len(ally), num_listed)
    num = max(len(ally), int(test.max(initial=-1)) + 1)

    check_fits_memory(4 * num * allx.shape[1], "the feature matrix", str(_file(graph, "allx")))
    feat = np.zeros((num, allx.shape[1]), dtype=np.float32)
    _fill(feat, np.arange(len(ally)), allx)
    _fill(feat, test, tx)
    label = np.full(num, -1, dtype=np.int64)
    label[: len(ally)] = _classes(ally, _file(graph, "ally"))
    label[test] = _classes(ty, _file(graph, "ty"))
    masks = {f"{split}_mask": np.zeros(num, dtype=bool) for split in ("train", "val", "test")}
    masks["train_mask"][: len(y)] = True
    masks["val_mask"][len(y) : min(len(y) + VAL_NODES, len(ally))] = True
    masks["test_mask"][test] = True
    source, target = _edges(adjacency, num, _file(graph, "graph"))

    origin = {"": str(graph.path)}
    origin |= {f"{DEFAULT_NTYPE}/{name}": str(_file(graph, "allx")) for name in ("feat", "label")}
    origin |= {f"{DEFAULT_NTYPE}/{name}": str(_file(graph, "test.index")) for name in masks}
    return GraphData(
        name=graph.name,
        nodes={DEFAULT_NTYPE: NodeFrame(num, {"feat": feat, "label": label, **masks})},
        edges={DEFAULT_ETYPE: EdgeFrame(source, target)},
        origin=origin,
    )


def _file(graph: PlanetoidGraph, part: str) -> Path:
    return Path(graph.path) / f"ind.{graph.name}.{part}"


def _features(file: Path) -> Any:
    matrix = load_csr(file)
    bad = np.flatnonzero(~np.isfinite(matrix.data))
    if len(bad):
        row = int(np.searchsorted(matrix.indptr, bad[0], side="right")) - 1
        raise DataError(
            f"the feature in column {matrix.indices[bad[0]]} is {matrix.data[bad[0]]}",
            where=f"{file}: row {row}",
            remedy="features must be finite numbers",
        )
    return matrix


def _one_hot(file: Path) -> Array:
    array = load_array(file)
    if array.ndim != 2 or array.shape[1] == 0:
        raise _damaged(file, f"an array of shape {array.shape}, not one-hot labels")
    return array


def _classes(one_hot: Array, file: Path) -> Array:
    """One-hot rows → class ids; a row of zeros is a node without a label."""
    filled = (one_hot != 0).sum(axis=1)
    bad = np.flatnonzero((filled > 1) | ~np.isin(one_hot, (0, 1)).all(axis=1))
    if len(bad):
        raise _damaged(file, f"{one_hot[bad[0]].tolist()}, not a one-hot label", row=int(bad[0]))
    return np.where(filled == 1, one_hot.argmax(axis=1), -1)


def _test_index(file: Path, rows: int, first: int, num: int) -> Array:
    """Node ids of the test rows: ``[rows]``, distinct, in ``first … num-1``."""
    lines = read_bytes(file).split()
    if len(lines) != rows:
        raise _damaged(file, f"{len(lines)} node ids for the {rows} rows of tx")
    ids = np.zeros(rows, dtype=np.int64)
    seen: set[int] = set()
    for row, line in enumerate(lines):
        node = int(line) if line.isdigit() and len(line) < 16 else -1
        if not first <= node < num or node in seen:
            shown = line[:40].decode("latin1")
            raise DataError(
                f"the test node {shown!r} is "
                + ("listed twice" if node in seen else f"not an id from {first} to {num - 1}"),
                where=f"{file}: line {row + 1}",
                remedy="get the file again; it must belong to the same graph as the others",
            )
        seen.add(node)
        ids[row] = node
    return ids


def _fill(feat: Array, nodes: Array, matrix: Any) -> None:
    rows = np.repeat(nodes, np.diff(matrix.indptr))
    feat[rows, matrix.indices] = matrix.data


def _edges(adjacency: dict[int, list[int]], num: int, file: Path) -> tuple[Array, Array]:
    for row, (node, neighbours) in enumerate(adjacency.items()):
        for end in (node, *neighbours):
            if not 0 <= end < num:
                message = f"node {node}" if end == node else f"an edge from {node} to {end}"
                raise DataError(
                    f"it holds {message}",
                    where=f"{file}: row {row}",
                    remedy=f"the other files describe {num} nodes, 0 to {num - 1}",
                )
    degrees = [len(neighbours) for neighbours in adjacency.values()]
    flat = (node for neighbours in adjacency.values() for node in neighbours)
    target = np.fromiter(flat, dtype=np.int64, count=sum(degrees))
    source = np.repeat(np.fromiter(adjacency, dtype=np.int64, count=len(adjacency)), degrees)
    return both_directions(source, target, num)


def _damaged(file: Path, message: str, *, row: int | None = None) -> DataError:
    return DataError(
        f"it holds {message}",
        where=str(file) if row is None else f"{file}: row {row}",
        remedy="get the files again; all eight must belong to the same graph",
    )
