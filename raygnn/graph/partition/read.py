"""Reads a partition's files into plain arrays in type-wise ids.

Each file is checked while it is read. Readers raise DataError with the file's name if it is
damaged, has another hash than in the manifest, or contradicts the partition's json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numba import njit
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray, index_type
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.partition.dgl_format import read_graphs, read_tensors
from raygnn.graph.partition.edge_kernels import in_lists
from raygnn.graph.partition.layout import PartitionMeta, typewise
from raygnn.graph.partition.manifest import PartFacts, compare, file_facts, split_counts
from raygnn.storage.remote import AnyPath

ID_COLUMN = "id"
_ID = "_ID"  # dgl.NID and dgl.EID: the homogeneous ids of a part graph's nodes and edges


@dataclass(frozen=True)
class InEdges:
    """In-edges of a part's owned nodes of one destination type.

    Attributes:
        indptr: int64 ``[n_inner + 1]``.
        src: int32 or int64 ``[E]``, type-wise ids; in the order of edge ids within a row.
        order: ``[E]``, position of each edge among the part's owned edges of its type, by id;
            None: 0 … E-1.
    """

    indptr: IntArray
    src: Array
    order: Array | None


def read_in_edges(meta: PartitionMeta, part: int) -> dict[EdgeType, InEdges]:
    """Read the in-edge lists of one part, without edges that other parts own (into the halo).

    Memory: the file's size, and 8 to 16 bytes per edge.
    """
    path = meta.files[part].graph
    stored = read_graphs(path, meta.expected(path))
    if len(stored) != 1 or len(stored[0].relations) != 1 or len(stored[0].num_nodes) != 1:
        raise _inconsistent(path, "does not hold one homogeneous graph")
    (graph,) = stored
    nodes, edges = (_ids(path, frames[0].get(_ID)) for frames in (graph.ndata, graph.edata))
    (edge_list,) = graph.relations
    src, dst, order = edge_list.src, edge_list.dst, edge_list.ids
    if len(nodes) != graph.num_nodes[0]:
        raise _inconsistent(path, "does not hold one id for each of its nodes")
    if len(edges) != len(src):
        raise _inconsistent(path, "does not hold one id for each of its edges")
    node_type, node_id = _typewise(path, nodes, list(meta.node_map.values()))

    # owned edges have one range of homogeneous ids, type by type
    starts = np.array([meta.edge_map[t][part, 0] for t in meta.etypes], np.int64)
    bounds = np.append(starts, meta.edge_map[meta.etypes[-1]][part, 1])
    rows = np.array([meta.node_ranges[t[2]][part] for t in meta.etypes], np.int64)
    ends = np.array([[meta.ntypes.index(t[0]), meta.ntypes.index(t[2])] for t in meta.etypes])
    own = int(bounds[-1] - bounds[0])
    row = np.full(own, -1, index_type(int((rows[:, 1] - rows[:, 0]).max())))
    far = np.empty(own, node_id.dtype)
    total = int(meta.edge_map[meta.etypes[-1]][-1, 1])
    placed, at = _place_edges(
        src, dst, order, edges, total, node_type, node_id, bounds, ends, rows, row, far
    )
    if placed < 0:
        name = etype_str(meta.etypes[at])
        raise _inconsistent(path, f"holds {name!r} edges twice, out of range or of other nodes")
    if placed != own:
        raise _inconsistent(path, f"holds {placed} of the {own} edges that it owns")
    del src, dst, order, edges, edge_list, graph, stored
    return {
        etype: _lists(row[low:high], far[low:high], int(last - first))
        for etype, low, high, (first, last) in zip(
            meta.etypes, bounds[:-1] - bounds[0], bounds[1:] - bounds[0], rows
        )
    }


def read_node_data(meta: PartitionMeta, part: int) -> dict[str, dict[str, Tensor]]:
    """Read node type → name → ``[n_inner, …]``; masks are bool."""
    rows = {ntype: int(np.diff(meta.node_ranges[ntype][part])[0]) for ntype in meta.ntypes}
    return _frames(meta, meta.files[part].node_feats, rows)


def read_edge_data(meta: PartitionMeta, part: int) -> dict[EdgeType, dict[str, Tensor]]:
    """Read edge type → name → ``[E, …]``, in the order of edge ids; masks are bool."""
    rows = {etype_str(t): int(np.diff(meta.edge_ranges[t][part])[0]) for t in meta.etypes}
    frames = _frames(meta, meta.files[part].edge_feats, rows)
    return {etype: frames[etype_str(etype)] for etype in meta.etypes}


def read_original_nodes(meta: PartitionMeta, part: int) -> dict[str, Array]:
    """Read node type → original node ids, int64 ``[n_inner]``; type-wise ids if the writer did not
    keep them."""
    return _originals(meta, meta.files[part].orig_nids, {t: t for t in meta.ntypes}, part)


def read_original_edges(meta: PartitionMeta, part: int) -> dict[EdgeType, Array]:
    """Read edge type → original edge ids, int64 ``[E]``, in the order of edge ids; type-wise ids if
    the writer did not keep them."""
    names = {etype: etype_str(etype) for etype in meta.etypes}
    return _originals(meta, meta.files[part].orig_eids, names, part)


def _originals(
    meta: PartitionMeta, path: AnyPath | None, names: Mapping[Any, str], part: int
) -> dict[Any, Array]:
    ranges: Mapping[Any, IntArray] = {**meta.node_ranges, **meta.edge_ranges}
    if path is None:
        return {kind: np.arange(*ranges[kind][part]) for kind in names}
    ids = read_tensors(path, meta.expected(path))
    shapes = {name: (int(np.diff(ranges[kind][part])[0]),) for kind, name in names.items()}
    if {name: tuple(array.shape) for name, array in ids.items()} != shapes:
        raise _inconsistent(path, "does not hold one original id for each node or edge of the part")
    return {kind: _ids(path, ids[name]) for kind, name in names.items()}


def read_ids(meta: PartitionMeta, ntype: str) -> Any:
    """Read the user's node ids of a type: a pyarrow array ``[N]`` of int64 or large_string by
    original id, mapped if it is on a disk; None if there are only numbers."""
    if meta.manifest is None or ntype not in meta.manifest.ids:
        return None
    path = meta.directory / "ids" / f"{ntype}.arrow"
    expected = meta.expected(path)
    assert expected is not None  # checked when the json was read
    try:
        read = file_facts(path)
        compare(path, expected, read.bytes, read.sha256)
        source = pa.memory_map(str(path)) if isinstance(path, Path) else path.read_bytes()
        ids = pa.ipc.open_file(source).get_batch(0).column(ID_COLUMN)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise _inconsistent(path, f"does not hold ids: {error}") from None
    if len(ids) != meta.num_nodes(ntype):
        raise _inconsistent(path, f"holds {len(ids)} ids, expected {meta.num_nodes(ntype)}")
    return ids


def part_facts(meta: PartitionMeta) -> list[PartFacts]:
    """Return the size of each part, from the manifest or else by reading the parts."""
    if meta.manifest is not None:
        return meta.manifest.parts
    facts = []
    for number in range(meta.num_parts):
        edges, node_data = read_in_edges(meta, number), read_node_data(meta, number)
        read_edge_data(meta, number)  # report a damaged file here, not in a prediction
        read_original_nodes(meta, number)
        read_original_edges(meta, number)
        cut, halo = 0, 0
        for ntype in meta.ntypes:
            first, last = meta.node_ranges[ntype][number]
            far = np.zeros(meta.num_nodes(ntype), np.bool_)
            for etype, lists in edges.items():
                if etype[0] == ntype:
                    far[lists.src] = True
                    cut += int(((lists.src < first) | (lists.src >= last)).sum())
            far[first:last] = False
            halo += int(far.sum())
        masks = {f"{t}/{name}": rows for t, f in node_data.items() for name, rows in f.items()}
        facts.append(
            PartFacts(
                nodes={t: int(np.diff(rows[number])[0]) for t, rows in meta.node_ranges.items()},
                edges={etype_str(etype): len(lists.src) for etype, lists in edges.items()},
                halo=halo,
                cut=cut,
                splits=split_counts(masks),
                bytes=sum(path.stat().st_size for path in meta.files[number].all()),
            )
        )
    return facts


def table(meta: PartitionMeta) -> list[dict[str, Any]]:
    """Return one row per part and one for the total, all counts over all types.

    Keys: ``part`` (number, or ``"total"``), ``nodes``, ``edges`` (in-edges of the part's nodes),
    ``halo`` (sources in other parts), ``cut`` (edges from other parts), ``training_nodes``,
    ``bytes``, ``seconds`` (of the total; None if unknown).
    """
    rows = [part.row for part in part_facts(meta)]
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    seconds = meta.manifest.seconds if meta.manifest else {}
    return [
        *({"part": number, **row, "seconds": None} for number, row in enumerate(rows)),
        {"part": "total", **total, "seconds": sum(seconds.values()) if seconds else None},
    ]


@njit(cache=True, nogil=True, boundscheck=False)
def _place_edges(  # type: ignore[no-untyped-def]
    src, dst, order, edges, total, node_type, node_id, bounds, ends, rows, row, far
):
    """Store each owned edge at the position of its id. Return the number of these, or -1 and the
    edge type near which the edges contradict the ranges of ids or each other.

    Args:
        src, dst: ``[E]`` local ids of the nodes; order: ``[E]`` local ids of the edges, or empty.
        edges: ``[E]`` homogeneous ids, by local id; below ``total``.
        node_type, node_id: ``[N]``, by local id.
        bounds: ``[T+1]`` homogeneous ids of the owned edges, type by type.
        ends: ``[T, 2]`` node types of source and destination; rows: ``[T, 2]`` owned destinations.
        row, far: ``[own]``, to be filled: row within the part (-1 before), source id.
    """
    nodes, numbered, kind, placed = len(node_id), len(order) > 0, 0, 0
    for e in range(len(src)):
        s, d, k = src[e], dst[e], order[e] if numbered else e
        if s < 0 or s >= nodes or d < 0 or d >= nodes or k < 0 or k >= len(edges):
            return -1, kind
        edge = edges[k]
        if edge < 0 or edge >= total:
            return -1, kind
        if edge < bounds[0] or edge >= bounds[-1]:
            continue
        while edge < bounds[kind]:
            kind -= 1
        while edge >= bounds[kind + 1]:
            kind += 1
        at = edge - bounds[0]
        typed = node_type[s] == ends[kind, 0] and node_type[d] == ends[kind, 1]
        if row[at] >= 0 or not typed or not rows[kind, 0] <= node_id[d] < rows[kind, 1]:
            return -1, kind
        row[at] = node_id[d] - rows[kind, 0]
        far[at] = node_id[s]
        placed += 1
    return placed, kind


def _lists(row: Array, src: Array, num_rows: int) -> InEdges:
    # our edge ids ascend by destination already; DGL's do not
    indptr, order = in_lists(row, num_rows)
    return InEdges(indptr, src[order], order) if len(order) else InEdges(indptr, src, None)


def _ids(path: AnyPath, ids: Array | Tensor | None) -> IntArray:
    """Check ids of nodes or edges from a file, and convert them to int64."""
    if ids is None:
        raise _inconsistent(path, "does not hold the global ids of its nodes and edges")
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _inconsistent(path, "holds global ids that are no ids")
    return ids.astype(np.int64, copy=False)


def _typewise(path: AnyPath, ids: IntArray, maps: list[IntArray]) -> tuple[Array, Array]:
    """Convert homogeneous node ids to type number and type-wise id, in the narrowest dtypes."""
    ranges = np.stack(maps, axis=1).reshape(-1, 2)  # by part, then type: increasing
    shift = np.stack([typewise(rows) - rows for rows in maps], axis=1).reshape(-1, 2)[:, 0]
    if len(ids) and not (ids.min() >= 0 and ids.max() < ranges[-1, 1]):
        raise _inconsistent(path, "holds global ids that are out of range")
    # the last range that starts at or before an id, since empty ranges start where the next does
    at = np.searchsorted(ranges[:, 0], ids, side="right") - 1
    index = index_type(max(int(typewise(rows)[-1, 1]) for rows in maps))
    kind = np.int8 if len(maps) < 2**7 else np.int32
    return (at % len(maps)).astype(kind), (ids + shift[at]).astype(index)


def _frames(
    meta: PartitionMeta, path: AnyPath, rows: Mapping[str, int]
) -> dict[str, dict[str, Tensor]]:
    frames: dict[str, dict[str, Tensor]] = {kind: {} for kind in rows}
    for key, array in read_tensors(path, meta.expected(path)).items():
        kind = max((k for k in rows if key.startswith(f"{k}/")), key=len, default=None)
        if kind is None:
            raise _inconsistent(path, f"holds {key!r}, which is of no type of this graph")
        if array.ndim == 0 or len(array) != rows[kind]:
            raise _inconsistent(path, f"{key!r} does not have {rows[kind]} rows")
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        # DGL's files have no bool: it is read as uint8
        feature = meta.manifest.features.get(key) if meta.manifest else None
        is_mask = feature.dtype == "bool" if feature else key.endswith("_mask")
        if tensor.dtype == torch.uint8 and is_mask:
            tensor = tensor.bool()
        frames[kind][key[len(kind) + 1 :]] = tensor
    return frames


def _inconsistent(path: AnyPath, problem: str) -> DataError:
    remedy = "the file is damaged: partition the graph again"
    return DataError(problem, where=str(path), remedy=remedy)
