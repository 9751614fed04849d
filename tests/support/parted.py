"""Random typed graphs, and how to put a partition together again, for tests of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from raygnn.graph.data import MASKS, EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.partition.dgl_format import read_tensors
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.read import (
    read_edge_data,
    read_ids,
    read_in_edges,
    read_node_data,
    read_original_edges,
    read_original_nodes,
)

DTYPES = ["float32", "float64", "float16", "int64", "int32", "uint8", "bool", "bfloat16"]


def array(rng: np.random.Generator, rows: int, tail: tuple[int, ...], dtype: str) -> Any:
    values = rng.integers(0, 100, (rows, *tail))
    if dtype == "bfloat16":
        return torch.from_numpy(values).bfloat16()
    return (values % 2 == 0) if dtype == "bool" else values.astype(dtype)


def in_one_space(data: GraphData) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield sources and destinations of each edge type, numbered over all node types."""
    firsts = dict(zip(data.nodes, np.cumsum([0, *(f.num for f in data.nodes.values())])))
    for (src_type, _, dst_type), edges in data.edges.items():
        yield edges.src + firsts[src_type], edges.dst + firsts[dst_type]


@st.composite
def graphs(draw: st.DrawFn) -> GraphData:
    """Draw graphs of 1 to 3 node types and 1 to 4 edge types, some of them empty, with loops and
    multi-edges."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = draw(st.permutations(["a", "a/b", "c"]))[: draw(st.integers(1, 3))]
    sizes = {name: draw(st.integers(0, 9)) for name in names}
    sizes[names[0]] += 1
    nodes = {name: NodeFrame(size) for name, size in sizes.items()}
    edges: dict[EdgeType, EdgeFrame] = {}
    for i in range(draw(st.integers(1, 4))):
        ends = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        count = draw(st.integers(0, 25)) if sizes[ends[0]] and sizes[ends[1]] else 0
        src, dst = (rng.integers(0, max(1, sizes[end]), count) for end in ends)
        edges[ends[0], f"r{i}", ends[1]] = EdgeFrame(src, dst)
    for frame in (*nodes.values(), *edges.values()):
        for i in range(draw(st.integers(0, 2))):
            tail = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
            frame.data[f"x{i}"] = array(rng, frame.num, tail, draw(st.sampled_from(DTYPES)))
    for name in draw(st.lists(st.sampled_from(MASKS), unique=True)):
        ntype = draw(st.sampled_from(names))
        nodes[ntype].data[name] = rng.random(sizes[ntype]) < 0.5
    return GraphData(draw(st.sampled_from(["some", "raygnn"])), nodes, edges)


@dataclass(frozen=True)
class CSC:
    """In-edges of a part's owned nodes of the destination type, int64.

    Attributes:
        indptr: ``[n_inner + 1]``; row i is the i-th own node, in id order.
        src: ``[E]`` type-wise ids of the source nodes, over all parts.
        eid: ``[E]`` type-wise edge ids, increasing within a row.
    """

    indptr: torch.Tensor
    src: torch.Tensor
    eid: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Edge type → in-edges, and type → name → rows, of nodes and of edges, in the order of ids."""

    part: int
    csc: dict[EdgeType, CSC]
    node_data: dict[str, dict[str, torch.Tensor]]
    edge_data: dict[EdgeType, dict[str, torch.Tensor]]


def load_part(meta: PartitionMeta, part: int) -> Part:
    csc = {}
    for etype, edges in read_in_edges(meta, part).items():
        order = np.arange(len(edges.src)) if edges.order is None else edges.order
        ids = order + meta.edge_ranges[etype][part, 0]
        arrays = edges.indptr, edges.src.astype(np.int64), ids
        csc[etype] = CSC(*map(torch.from_numpy, arrays))
    return Part(part, csc, read_node_data(meta, part), read_edge_data(meta, part))


def load_all(meta: PartitionMeta) -> list[Part]:
    return [load_part(meta, part) for part in range(meta.num_parts)]


def verify(meta: PartitionMeta, parts: Iterable[int] | None = None) -> None:
    """Read all files, or those of some parts, which checks them."""
    for part in range(meta.num_parts) if parts is None else parts:
        load_part(meta, part)
        read_original_nodes(meta, part)
        read_original_edges(meta, part)
    for ntype in meta.ntypes if parts is None else ():
        read_ids(meta, ntype)


def original_ids(meta: PartitionMeta) -> tuple[dict[str, Any], dict[EdgeType, Any]]:
    """Return the original id of each type-wise id, by type, of nodes and of edges."""
    node_files = [read_tensors(files.orig_nids) for files in meta.files if files.orig_nids]
    edge_files = [read_tensors(files.orig_eids) for files in meta.files if files.orig_eids]
    return (
        {t: np.concatenate([each[t] for each in node_files]) for t in meta.ntypes},
        {t: np.concatenate([each[etype_str(t)] for each in edge_files]) for t in meta.etypes},
    )


def reassemble(
    meta: PartitionMeta, nids: dict[str, Any], eids: dict[EdgeType, Any]
) -> tuple[GraphData, dict[EdgeType, list[list[int]]]]:
    """The graph in original ids, and for each edge type the original edges into each node, in
    the order of the in-edge lists."""
    parts = load_all(meta)
    nodes = {
        ntype: NodeFrame(
            meta.num_nodes(ntype),
            {
                name: put(nids[ntype], [part.node_data[ntype][name] for part in parts])
                for name in parts[0].node_data[ntype]
            },
        )
        for ntype in meta.ntypes
    }
    edges, lists = {}, {}
    for etype in meta.etypes:
        rows = [
            np.repeat(
                np.arange(*meta.node_ranges[etype[2]][part.part]), part.csc[etype].indptr.diff()
            )
            for part in parts
        ]
        ids = eids[etype][np.concatenate([part.csc[etype].eid for part in parts])]
        dst = nids[etype[2]][np.concatenate(rows)]
        src = nids[etype[0]][np.concatenate([part.csc[etype].src for part in parts])]
        order = np.argsort(ids)
        assert np.array_equal(ids[order], np.arange(meta.num_edges(etype)))
        data = {
            name: put(eids[etype], [part.edge_data[etype][name] for part in parts])
            for name in parts[0].edge_data[etype]
        }
        edges[etype] = EdgeFrame(src[order], dst[order], data)
        lists[etype] = [ids[dst == node].tolist() for node in range(meta.num_nodes(etype[2]))]
    return GraphData(meta.graph_name, nodes, edges), lists


def put(ids: Any, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return rows reordered from type-wise ids to original ids."""
    rows = torch.cat(list(pieces))
    result = torch.empty_like(rows)
    result[torch.from_numpy(ids)] = rows
    return result


def in_edges(data: GraphData) -> dict[EdgeType, list[list[int]]]:
    """Return the edges into each node in their order, by edge type."""
    return {
        etype: [np.flatnonzero(e.dst == v).tolist() for v in range(data.nodes[etype[2]].num)]
        for etype, e in data.edges.items()
    }


def assert_same(found: GraphData, expected: GraphData) -> None:
    """Check for equal types, ends and arrays, dtypes included."""
    assert found.nodes.keys() == expected.nodes.keys()
    assert found.edges.keys() == expected.edges.keys()
    for ntype, frame in expected.nodes.items():
        assert found.nodes[ntype].num == frame.num
        assert_same_data(found.nodes[ntype].data, frame.data)
    for etype, edges in expected.edges.items():
        assert np.array_equal(found.edges[etype].src, edges.src)
        assert np.array_equal(found.edges[etype].dst, edges.dst)
        assert_same_data(found.edges[etype].data, edges.data)


def assert_same_data(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        rows, wanted = torch.as_tensor(found[name]), torch.as_tensor(values)
        assert rows.dtype == wanted.dtype, name
        assert torch.equal(rows, wanted), name
