"""NumPy archives as of Platonov et al. (2023): one graph with several fixed splits.

Arrays: ``node_features [N, F]``, ``node_labels [N]``, ``edges [E, 2]`` and
``{train,val,test}_masks [S, N]`` (or ``[N]``, one split).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raygnn.config.graph import NpzGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    EdgeFrame,
    GraphData,
    NodeFrame,
)
from raygnn.graph.sources import input_files
from raygnn.graph.sources.input_files import check_fits_memory
from raygnn.graph.sources.npz_members import Member, members
from raygnn.graph.sources.transforms import both_directions

VERSION = 1
DEFAULT_NORMALIZE = "none"

_BOTH, _ONE = 80, 32  # bytes of a listed pair while edges are made of it
_STORED_MASKS = {mask: f"{mask}s" for mask in MASKS}
_ARRAYS = ("node_features", "node_labels", "edges", *_STORED_MASKS.values())
_REMEDY = f"save the archive with the arrays {', '.join(_ARRAYS)}"


def files(graph: NpzGraph) -> list[Path]:
    """The archive."""
    return [Path(graph.path)]


def reading_bytes(graph: NpzGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`: the arrays, and the edges once more in both
    directions."""
    arrays = _members(graph)
    total = sum(array.nbytes for array in arrays.values())
    for name, dtype in (("node_features", np.float32), ("node_labels", np.int64)):
        if arrays[name].dtype != dtype:  # another copy
            total += arrays[name].outline().size * np.dtype(dtype).itemsize
    return total + arrays["edges"].shape[0] * (_BOTH if graph.undirected else _ONE)


def read(graph: NpzGraph) -> GraphData:
    """The graph with the masks of one split.

    ``feat`` float32 ``[N, F]``, ``label`` int64 ``[N]``, masks bool ``[N]``. With
    ``undirected``, each listed pair becomes two edges and duplicates go.

    Raises:
        DataError: the archive is missing, damaged, lacks an array, holds Python objects, or its
            arrays disagree; the first bad row is named.
    """
    file = Path(graph.path)
    origin = {name: f"{file}: {name}" for name in _ARRAYS}
    # nothing is expanded before all of them agree
    arrays = {name: member.read() for name, member in _members(graph).items()}

    feat = input_files.to_features(arrays["node_features"], origin["node_features"])
    label = input_files.to_labels(arrays["node_labels"], origin["node_labels"])
    data = {"feat": feat, "label": label}
    for mask, name in _STORED_MASKS.items():
        rows = _split(arrays[name], graph.split, origin[name])
        data[mask] = input_files.to_mask(rows, origin[name])
    num, pairs = len(feat), arrays["edges"]
    source = input_files.to_ids(pairs[:, 0], num, origin["edges"], "source")
    target = input_files.to_ids(pairs[:, 1], num, origin["edges"], "destination")
    if graph.undirected:
        source, target = both_directions(source, target, num)
    edges = EdgeFrame(np.ascontiguousarray(source), np.ascontiguousarray(target))
    stored = {"feat": "node_features", "label": "node_labels", **_STORED_MASKS}
    return GraphData(
        name=file.stem,
        nodes={DEFAULT_NTYPE: NodeFrame(num, data)},
        edges={DEFAULT_ETYPE: edges},
        origin={"": str(file)}
        | {f"{DEFAULT_NTYPE}/{name}": origin[array] for name, array in stored.items()},
    )


def _members(graph: NpzGraph) -> dict[str, Member]:
    """What the headers of the arrays claim.

    Raises:
        DataError: one is missing or cannot be, or they do not fit each other.
    """
    stored = members(Path(graph.path), _ARRAYS, _REMEDY)
    for member in stored.values():
        check_fits_memory(member.nbytes, f"the array of shape {member.shape}", member.origin)
    arrays = {name: member.outline() for name, member in stored.items()}
    origin = {name: member.origin for name, member in stored.items()}
    input_files.require_features(arrays["node_features"], origin["node_features"])
    num = len(arrays["node_features"])
    input_files.require_rows(arrays["node_labels"], num, origin["node_labels"], "nodes")
    for name in _STORED_MASKS.values():
        mask = _split(arrays[name], graph.split, origin[name])
        input_files.require_rows(mask, num, origin[name], "nodes")
    shape = arrays["edges"].shape
    if len(shape) != 2 or shape[1] != 2:
        remedy = "edges are pairs of node ids: an array of shape [E, 2]"
        raise DataError(f"its shape is {shape}", where=origin["edges"], remedy=remedy)
    return stored


def _split(masks: Array, split: int, origin: str) -> Array:
    if masks.ndim == 1 and split == 0:
        return masks
    count = 1 if masks.ndim == 1 else len(masks) if masks.ndim == 2 else 0
    if split >= count:
        raise DataError(
            f"graph.split is {split}, but it has shape {masks.shape}: {count} splits",
            where=origin,
            remedy=f"choose graph.split from 0 to {count - 1}" if count else "masks are [S, N]",
        )
    row: Array = masks[split]
    return row
