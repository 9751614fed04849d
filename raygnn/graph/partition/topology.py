"""One part's files → plain arrays: in-edge lists in type-wise ids, and node and edge data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, csr_rows
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeType, etype_str
from raygnn.graph.partition.dgl_file import Readable, StoredGraph, read_graphs, read_tensors
from raygnn.graph.partition.dgl_json import IntArray
from raygnn.graph.partition.layout import CSC, Part, PartitionMeta, typewise

_COMPILE = {"cache": True, "nogil": True, "boundscheck": False}

# dgl.NID and dgl.EID: the homogeneous ids of a part graph's nodes and edges
_ID = "_ID"


@dataclass(frozen=True)
class InEdges:
    """In-edges of a part's own nodes of one destination type.

    Attributes:
        indptr: int64 ``[n_inner + 1]``.
        src: int32 or int64 ``[E]``, type-wise ids; in the order of edge ids within a row.
        order: int64 ``[E]``, where each edge lies among the part's own edges of its type, in the
            order of ids; None: 0 … E-1.
    """

    indptr: IntArray
    src: Array
    order: IntArray | None


def read_part(meta: PartitionMeta, part: int) -> Part:
    """See :func:`raygnn.graph.partition.layout.load_part`."""
    files = meta.files[part]
    edges = read_in_edges(meta, part, files.graph)
    starts = {etype: int(meta.edge_ranges[etype][part, 0]) for etype in meta.etypes}
    return Part(
        part=part,
        csc={etype: _csc(edges[etype], starts[etype]) for etype in meta.etypes},
        node_data=read_node_data(meta, part, files.node_feats),
        edge_data=read_edge_data(meta, part, files.edge_feats),
        orig_nids=None if files.orig_nids is None else read_original(meta, part, files.orig_nids),
    )


def _csc(edges: InEdges, start: int) -> CSC:
    order = np.arange(len(edges.src)) if edges.order is None else edges.order
    arrays = (edges.indptr, edges.src.astype(np.int64), order + start)
    return CSC(*(torch.from_numpy(array) for array in arrays))


def read_in_edges(meta: PartitionMeta, part: int, path: Readable) -> dict[EdgeType, InEdges]:
    """The in-edge lists of one part, from its graph file.

    Edges that other parts own (those of the halo) are left out. Memory: the file's, and 8 to 16
    bytes for each edge.

    Raises:
        DataError: naming the file, when it is damaged or contradicts the partition's json.
    """
    stored = read_graphs(path)
    if len(stored) != 1 or len(stored[0].relations) != 1 or len(stored[0].num_nodes) != 1:
        raise _inconsistent(path, "does not hold one homogeneous graph")
    (graph,) = stored
    nodes, edges = (_ids(path, frames[0].get(_ID)) for frames in (graph.ndata, graph.edata))
    src, dst, order = _ends(path, graph)
    if len(nodes) != graph.num_nodes[0]:
        raise _inconsistent(path, "does not hold one id for each of its nodes")
    if len(edges) != len(src):
        raise _inconsistent(path, "does not hold one id for each of its edges")
    node_type, node_id = _typewise(path, nodes, list(meta.node_map.values()))

    # a part's own edges have one range of homogeneous ids, type by type
    starts = np.array([meta.edge_map[t][part, 0] for t in meta.etypes], np.int64)
    bounds = np.append(starts, meta.edge_map[meta.etypes[-1]][part, 1])
    rows = np.array([meta.node_ranges[t[2]][part] for t in meta.etypes], np.int64)
    ends = np.array([[meta.ntypes.index(t[0]), meta.ntypes.index(t[2])] for t in meta.etypes])
    own = int(bounds[-1] - bounds[0])
    row = np.full(own, -1, _index(int((rows[:, 1] - rows[:, 0]).max())))
    far = np.empty(own, node_id.dtype)
    total = int(meta.edge_map[meta.etypes[-1]][-1, 1])
    fault, at, found = _place_edges(
        src, dst, order, edges, total, node_type, node_id, bounds, ends, rows, row, far
    )
    if fault:
        raise _inconsistent(path, _FAULTS[fault].format(etype_str(meta.etypes[at])))
    if found != own:
        raise _inconsistent(path, f"holds {found} of the {own} edges that it owns")
    del src, dst, order, edges, graph, stored
    return {
        etype: _lists(row[low:high], far[low:high], int(last - first))
        for etype, low, high, (first, last) in zip(
            meta.etypes, bounds[:-1] - bounds[0], bounds[1:] - bounds[0], rows
        )
    }


def read_node_data(meta: PartitionMeta, part: int, path: Readable) -> dict[str, dict[str, Tensor]]:
    """Node type → name → ``[n_inner, …]``; masks are bool."""
    rows = {t: _length(meta.node_ranges[t][part]) for t in meta.ntypes}
    return _frames(path, rows, DEFAULT_NTYPE, _features(meta))


def read_edge_data(
    meta: PartitionMeta, part: int, path: Readable
) -> dict[EdgeType, dict[str, Tensor]]:
    """Edge type → name → ``[E, …]``, rows in the order of edge ids; masks are bool."""
    rows = {etype_str(t): _length(meta.edge_ranges[t][part]) for t in meta.etypes}
    frames = _frames(path, rows, etype_str(DEFAULT_ETYPE), _features(meta))
    return {etype: frames[etype_str(etype)] for etype in meta.etypes}


def read_original(meta: PartitionMeta, part: int, path: Readable) -> dict[str, Tensor]:
    """Node type → int64 ``[n_inner]``, ids in the graph that was partitioned."""
    ids = {ntype: _tensor(array) for ntype, array in read_tensors(path).items()}
    shapes = {ntype: tuple(each.shape) for ntype, each in ids.items()}
    if shapes != {t: (_length(meta.node_ranges[t][part]),) for t in meta.ntypes}:
        raise _inconsistent(path, "does not hold one id for each node of the part")
    return ids


def read_original_edges(meta: PartitionMeta, part: int, path: Readable) -> dict[str, Tensor]:
    """``"src:rel:dst"`` → int64 ``[E]``, numbers in the graph that was partitioned, in the order of
    edge ids."""
    ids = {etype: _tensor(array) for etype, array in read_tensors(path).items()}
    shapes = {etype: tuple(each.shape) for etype, each in ids.items()}
    wanted = {etype_str(t): (_length(meta.edge_ranges[t][part]),) for t in meta.etypes}
    if shapes != wanted:
        raise _inconsistent(path, "does not hold one number for each edge of the part")
    return ids


_UNKNOWN, _TWICE, _TYPES, _OUTSIDE = 1, 2, 3, 4
_FAULTS = {
    _UNKNOWN: "holds edges whose ends or ids are out of range",
    _TWICE: "holds {!r} edges twice, not those it owns",
    _TYPES: "{!r} edges join other node types",
    _OUTSIDE: "owns {!r} edges into other parts",
}


@njit(**_COMPILE)
def _place_edges(  # type: ignore[no-untyped-def]
    src, dst, order, edges, total, node_type, node_id, bounds, ends, rows, row, far
):
    """Put each own edge where its id says.

    Args:
        src, dst: ``[E]`` local ids of the nodes; order: ``[E]`` local ids of the edges, or empty.
        edges: ``[E]`` homogeneous ids, by local id; below ``total``.
        node_type, node_id: ``[N]``, by local id.
        bounds: ``[T+1]`` homogeneous ids of the part's own edges, type by type.
        ends: ``[T, 2]`` node types of source and destination; rows: ``[T, 2]`` own destinations.
        row, far: ``[own]``, to be filled: row within the part (-1 before), source id.

    Returns:
        ``(fault or 0, edge type of it, edges placed)``.
    """
    nodes, numbered, kind, placed = len(node_id), len(order) > 0, 0, 0
    for e in range(len(src)):
        s, d, k = src[e], dst[e], order[e] if numbered else e
        if s < 0 or s >= nodes or d < 0 or d >= nodes or k < 0 or k >= len(edges):
            return _UNKNOWN, kind, placed
        edge = edges[k]
        if edge < 0 or edge >= total:
            return _UNKNOWN, kind, placed
        if edge < bounds[0] or edge >= bounds[-1]:
            continue
        while edge < bounds[kind]:
            kind -= 1
        while edge >= bounds[kind + 1]:
            kind += 1
        at = edge - bounds[0]
        if row[at] >= 0:
            return _TWICE, kind, placed
        if node_type[s] != ends[kind, 0] or node_type[d] != ends[kind, 1]:
            return _TYPES, kind, placed
        if node_id[d] < rows[kind, 0] or node_id[d] >= rows[kind, 1]:
            return _OUTSIDE, kind, placed
        row[at] = node_id[d] - rows[kind, 0]
        far[at] = node_id[s]
        placed += 1
    return 0, kind, placed


def _lists(row: Array, src: Array, num_rows: int) -> InEdges:
    """Edges in the order of their ids → in-edge lists."""
    indptr = np.zeros(num_rows + 1, np.int64)
    # ours lie in this order already; DGL's are in the order of ids only
    if _count_rows(row, indptr):
        return InEdges(indptr, src, None)
    order = np.empty(len(row), np.int64)
    _sort_rows(row, indptr.copy(), order)
    return InEdges(indptr, src[order], order)


@njit(**_COMPILE)
def _count_rows(row, indptr):  # type: ignore[no-untyped-def]
    """Fill ``indptr``; returns whether the rows never fall."""
    rising, last = True, 0
    for e in range(len(row)):
        r = row[e]
        rising &= r >= last
        last = r
        indptr[r + 1] += 1
    for r in range(len(indptr) - 1):
        indptr[r + 1] += indptr[r]
    return rising


@njit(**_COMPILE)
def _sort_rows(row, place, order):  # type: ignore[no-untyped-def]
    """Where the edges of each row are, row after row; ``place`` is where the next one goes."""
    for e in range(len(row)):
        order[place[row[e]]] = e
        place[row[e]] += 1


def _ends(path: Readable, stored: StoredGraph) -> tuple[Array, Array, Array]:
    """Local ends of each edge, and the edges' local ids (empty: 0 … E-1)."""
    name, (first, second, order) = next(iter(stored.relations[0].formats.items()))
    if name != "coo":
        first = csr_rows(first, len(second), partial(_inconsistent, path))
    src, dst = (second, first) if name == "csc" else (first, second)
    if len(src) != len(dst) or len(order) not in (0, len(src)):
        raise _inconsistent(path, "holds edges with one end")
    return src, dst, order


def _ids(path: Readable, ids: Array | Tensor | None) -> IntArray:
    """Global ids of nodes or edges as the file has them, int64."""
    if ids is None:
        raise _inconsistent(path, "does not hold the global ids of its nodes and edges")
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _inconsistent(path, "holds global ids that are no ids")
    return ids.astype(np.int64, copy=False)


def _typewise(path: Readable, ids: IntArray, maps: list[IntArray]) -> tuple[Array, Array]:
    """Homogeneous node ids → type number and type-wise id, in the narrowest dtype that does."""
    ranges = np.stack(maps, axis=1).reshape(-1, 2)  # by part, then type: increasing
    shift = np.stack([typewise(each) - each for each in maps], axis=1).reshape(-1, 2)[:, 0]
    if len(ids) and not (ids.min() >= 0 and ids.max() < ranges[-1, 1]):
        raise _inconsistent(path, "holds global ids that are out of range")
    # The last range that starts at or before an id: empty ranges start where the next does.
    at = np.searchsorted(ranges[:, 0], ids, side="right") - 1
    index = _index(max(int(typewise(each)[-1, 1]) for each in maps))
    kind = np.int8 if len(maps) < 2**7 else np.int32
    return (at % len(maps)).astype(kind), (ids + shift[at]).astype(index)


def _frames(
    path: Readable, rows: Mapping[str, int], default: str, features: dict[str, Any] | None
) -> dict[str, dict[str, Tensor]]:
    """The arrays ``"<type>/<name>"`` by type; names without a type are the default type's."""
    frames: dict[str, dict[str, Tensor]] = {kind: {} for kind in rows}
    for key, array in read_tensors(path).items():
        full = key if "/" in key else f"{default}/{key}"
        kind = max((k for k in rows if full.startswith(f"{k}/")), key=len, default=None)
        if kind is None:
            raise _inconsistent(path, f"holds {key!r}, which is of no type of this graph")
        if array.ndim == 0 or len(array) != rows[kind]:
            raise _inconsistent(path, f"{key!r} does not have {rows[kind]} rows")
        tensor = _tensor(array)
        # DGL's files have no bool: it comes back as uint8.
        if tensor.dtype == torch.uint8 and (
            features[full]["dtype"] == "bool" if features else full.endswith("_mask")
        ):
            tensor = tensor.bool()
        frames[kind][full[len(kind) + 1 :]] = tensor
    return frames


def _features(meta: PartitionMeta) -> dict[str, Any] | None:
    return meta.manifest["features"] if meta.manifest else None


def _tensor(array: Array | Tensor) -> Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _index(limit: int) -> type[np.int32 | np.int64]:
    """What holds the ids ``0 … limit-1``."""
    return np.int32 if limit < 2**31 else np.int64


def _length(bounds: IntArray) -> int:
    return int(bounds[1] - bounds[0])


def _inconsistent(path: Readable, what: str) -> DataError:
    return DataError(what, where=str(path), remedy="the file is damaged: make the partition again")
