"""Assignment of nodes to parts: by METIS, by streaming, or at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from raygnn.graph.arrays import Array, IntArray, index_type
from raygnn.graph.data import GraphData
from raygnn.graph.partition import edge_kernels, metis_library
from raygnn.graph.partition.stream import Passes, assign_by_streaming, balance_groups

# With fewer training nodes per part, METIS gives up the balance of all nodes (it left a part
# empty) for a balance of training nodes that hardly matters.
_TRAINING_NODES_TO_BALANCE = 8

_CHUNK = 1 << 18  # edges copied at a time


def assign(
    data: GraphData,
    parts: int,
    method: str,
    seed: int,
    progress: Callable[[str], object] | None = None,
    passes: Passes | None = None,
) -> dict[str, IntArray]:
    """Assign every node to a part: node type → int64 ``[num]``, ``0 … parts-1``.

    ``metis`` cuts few edges; each part gets an equal share of the nodes of every type and of the
    training nodes, and at most 1.2 times its share of the edges if METIS manages that. ``stream``
    cuts about as few with far less memory (`assign_by_streaming`); no part has more than 1.05 times
    its share. ``random`` deals a permutation sampled with ``seed``; parts differ by at most one
    node. With ``stream``, ``progress`` is called with ``"pass 3 of at most 11"``, and ``passes``
    yields the edges, in order, if those of ``data`` are not in memory.
    """
    num_nodes = data.num_nodes
    if parts == 1:
        flat = np.zeros(num_nodes, dtype=np.int64)
    elif method == "random":
        flat = np.empty(num_nodes, dtype=np.int64)
        flat[np.random.default_rng(seed).permutation(num_nodes)] = np.arange(num_nodes) % parts
    elif method == "stream":
        flat = _stream(data, parts, seed, progress, passes).astype(np.int64)
    elif parts >= num_nodes:  # METIS leaves some nodes without a valid part
        flat = np.arange(num_nodes)
    else:
        graph, weights, loads = undirected(data), constraints(data, parts), _in_degrees(data)
        flat = metis_library.divide(graph, parts, weights, loads, f"the graph {data.name}")
    sizes = [frame.num for frame in data.nodes.values()]
    return dict(zip(data.nodes, np.split(flat, np.cumsum(sizes)[:-1]), strict=True))


def in_one_space(data: GraphData) -> Iterator[tuple[Array, Array]]:
    """Yield sources and destinations of all edges in chunks. Ids are offset by type, in order."""
    offsets = _offsets(data)
    for (src_type, _, dst_type), edges in data.edges.items():
        for first in range(0, edges.num, _CHUNK):
            chunk = slice(first, first + _CHUNK)
            yield edges.src[chunk] + offsets[src_type], edges.dst[chunk] + offsets[dst_type]


def _stream(
    data: GraphData,
    parts: int,
    seed: int,
    progress: Callable[[str], object] | None,
    passes: Passes | None,
) -> Array:
    passes = passes or partial(in_one_space, data)
    masks = [(frame.num, frame.data.get("train_mask")) for frame in data.nodes.values()]
    types = [(num, None if mask is None else np.asarray(mask, bool)) for num, mask in masks]
    groups = balance_groups(types, parts)
    return assign_by_streaming(
        data.num_nodes, passes, parts, groups=groups, seed=seed, progress=progress
    )


def undirected(data: GraphData) -> tuple[IntArray, IntArray]:
    """Convert the graph for METIS: every edge once in each direction, all types in one id space, no
    loops (int64 row pointers ``[nodes+1]`` and neighbours, sorted in each list). A homogeneous
    graph that is stored so already, sorted by either end, is not copied."""
    offsets, num = _offsets(data), data.num_nodes
    relations = []
    for (src_type, _, dst_type), edges in data.edges.items():
        src, dst = np.ascontiguousarray(edges.src), np.ascontiguousarray(edges.dst)
        relations.append((src, dst, offsets[src_type], offsets[dst_type]))
    if len(relations) == 1 and len(data.nodes) == 1:
        src, dst = relations[0][:2]
        for rows, ids in ((dst, src), (src, dst)):
            if edge_kernels.rising(rows):
                indptr = edge_kernels.starts_of(rows, num)
                if edge_kernels.is_symmetric(indptr, ids):
                    return indptr, np.require(ids, np.int64, "W")
                break
    indptr = np.zeros(num + 1, dtype=np.int64)
    for relation in relations:
        edge_kernels.count_ends(*relation, indptr)
    np.cumsum(indptr, out=indptr)
    both, listed = (np.empty(indptr[-1], dtype=index_type(num)) for _ in range(2))
    cursor = indptr[:-1].copy()
    for relation in relations:
        edge_kernels.put_ends(*relation, cursor, both)
    edge_kernels.sort_lists(indptr, both, listed)
    del both
    edge_kernels.drop_repeats(indptr, listed)
    return indptr, listed[: indptr[-1]].astype(np.int64)


def _offsets(data: GraphData) -> dict[str, int]:
    ends = itertools.accumulate(frame.num for frame in data.nodes.values())
    return {t: end - data.nodes[t].num for t, end in zip(data.nodes, ends, strict=True)}


def _in_degrees(data: GraphData) -> IntArray:
    """Count the in-edges of each node, over all types, which its part stores."""
    offsets = _offsets(data)
    degrees = np.zeros(data.num_nodes, dtype=np.int64)
    for (_, _, ntype), edges in data.edges.items():
        num = data.nodes[ntype].num
        starts = edge_kernels.starts_of(np.ascontiguousarray(edges.dst), num)
        degrees[offsets[ntype] : offsets[ntype] + num] += np.diff(starts)
    return degrees


def constraints(data: GraphData, parts: int) -> IntArray:
    """Return ``[nodes, constraints]``, whose columns are balanced: the nodes of each type, and the
    training nodes of each type."""
    columns = []
    start = 0
    for frame in data.nodes.values():
        column = np.zeros(data.num_nodes, dtype=np.int64)
        column[start : start + frame.num] = 1
        train = np.flatnonzero(frame.data.get("train_mask", ()))
        if frame.num >= parts:
            columns.append(column)
        if _TRAINING_NODES_TO_BALANCE * parts <= len(train) < frame.num:
            column = np.zeros_like(column)
            column[start + train] = 1
            columns.append(column)
        start += frame.num
    return np.stack(columns, axis=1) if columns else np.ones((data.num_nodes, 1), dtype=np.int64)
