"""Input of METIS: a symmetric graph, and balanced edges where they are needed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.partition import edge_kernels, metis, stream
from tests.support.graphs import random_graph
from tests.support.parted import graphs, in_one_space


def plain(src: np.ndarray, dst: np.ndarray, nodes: int) -> GraphData:
    ends = (np.asarray(end, dtype=np.int64) for end in (src, dst))
    return GraphData("g", {DEFAULT_NTYPE: NodeFrame(nodes)}, {DEFAULT_ETYPE: EdgeFrame(*ends)})


def both_ways(data: GraphData) -> sp.csr_array:
    """Return the undirected graph as scipy computes it."""
    starts = dict(zip(data.nodes, np.cumsum([0, *(f.num for f in data.nodes.values())])))
    num = data.num_nodes
    total = sp.csr_array((num, num), dtype=bool)
    for (src_type, _, dst_type), edges in data.edges.items():
        ends = edges.dst + starts[dst_type], edges.src + starts[src_type]
        one = sp.coo_array((np.ones(edges.num, bool), ends), shape=(num, num)).tocsr()
        total = total + one + one.T
    total = total.tolil()
    total.setdiag(False)
    total = total.tocsr()
    total.eliminate_zeros()
    total.sort_indices()
    return total


def undirected(data: GraphData) -> tuple[np.ndarray, np.ndarray]:
    return metis.undirected(partial(in_one_space, data), data.num_nodes)


def check(data: GraphData) -> None:
    expected = both_ways(data)
    indptr, ids = undirected(data)
    assert indptr.tolist() == expected.indptr.tolist()
    assert ids.tolist() == expected.indices.tolist()


@given(graphs())
def test_every_edge_counts_once_in_each_direction(data: GraphData) -> None:
    check(data)


@given(st.lists(st.integers(0, 9), max_size=50), st.booleans())
def test_groups_are_stable(keys: list[int], presorted: bool) -> None:
    values = np.array(sorted(keys) if presorted else keys, dtype=np.int64)
    starts, order = edge_kernels.group(values, 10)
    assert starts.tolist() == np.searchsorted(np.sort(values), np.arange(11)).tolist()
    assert order.tolist() == np.argsort(values, kind="stable").tolist()
    indptr, listed = edge_kernels.in_lists(values, 10)
    assert indptr.tolist() == starts.tolist()
    assert listed.tolist() == ([] if (np.diff(values) >= 0).all() else order.tolist())


def test_a_dense_and_a_sparse_half_are_not_cut_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    half = 2000
    dense, sparse = rng.integers(0, half, (2, 30 * half)), rng.integers(0, half, (2, 3 * half))
    bridge = rng.integers(0, half, (2, 20))
    bridge[1] += half
    data = plain(*np.concatenate([dense, sparse + half, bridge], axis=1), 2 * half)
    edges = np.bincount(data.edges[DEFAULT_ETYPE].dst, minlength=2 * half)
    indptr, ids = undirected(data)
    without = metis.metis(indptr, ids, 2, metis.constraints(data, 2))
    assert np.bincount(without, weights=edges).max() > 1.6 * edges.sum() / 2
    passes = partial(in_one_space, data)
    found = stream.assign(data, passes, 2, "metis", 0, tmp_path)[DEFAULT_NTYPE]
    assert np.bincount(found, weights=edges).max() < 1.1 * edges.sum() / 2
    assert np.bincount(found).max() < 1.1 * half


def test_training_nodes_of_each_type_are_shared_out() -> None:
    rng = np.random.default_rng(0)
    masks = [rng.random(num) < 0.5 for num in (80, 120)]
    nodes = {f"n{at}": NodeFrame(len(m), {"train_mask": m}) for at, m in enumerate(masks)}
    is_second = np.repeat([False, True], [80, 120])
    trains = np.concatenate(masks)
    expected = [~is_second, ~is_second & trains, is_second, is_second & trains]
    found = metis.constraints(GraphData("g", nodes, {}), 2)
    np.testing.assert_array_equal(found.T, expected)


def test_graphs_without_edges(tmp_path: Path) -> None:
    """A graph may have no edge types, or edge types without edges."""
    nodes = {DEFAULT_NTYPE: NodeFrame(20)}
    none = np.empty(0, np.int64)
    for edges in ({}, {DEFAULT_ETYPE: EdgeFrame(none, none)}):
        data = GraphData("g", nodes, edges)
        assert [len(array) for array in undirected(data)] == [21, 0]
        found = stream.assign(data, partial(in_one_space, data), 2, "metis", 0, tmp_path)
        assert np.bincount(found[DEFAULT_NTYPE]).tolist() == [10, 10]


@given(graphs())
def test_edges_of_all_types_weigh(data: GraphData) -> None:
    expected = {ntype: np.zeros(frame.num, int) for ntype, frame in data.nodes.items()}
    for etype, edges in data.edges.items():
        np.add.at(expected[etype[2]], edges.dst, 1)
    np.testing.assert_array_equal(
        metis.in_degrees(partial(in_one_space, data), data.num_nodes),
        np.concatenate([*expected.values()]),
    )


def test_several_things_are_shared_out() -> None:
    data = random_graph(2000)
    indptr, ids = undirected(data)
    weights = np.ones((2000, 2), np.int64)
    weights[:1500, 1] = 0  # only the last quarter counts
    for parts in (4, 12):  # bisection, k-way
        found = metis.metis(indptr, ids, parts, weights)
        assert found.dtype == np.int64
        for share in weights.T:
            held = np.bincount(found, share, parts)
            assert held.max() <= 1.1 * held.mean()


@pytest.mark.parametrize("parts", [2, 16])  # bisection, k-way
def test_a_grid_is_divided_evenly_and_quietly(
    parts: int, capfd: pytest.CaptureFixture[str]
) -> None:
    side = 40
    ids = np.arange(side * side).reshape(side, side)
    src = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    dst = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])
    both = sp.coo_array((np.ones(len(src)), (src, dst)), shape=(ids.size, ids.size))
    grid = (both + both.T).tocsr()
    weights = np.ones((ids.size, 1), dtype=np.int64)
    ends = grid.indptr.astype(np.int64), grid.indices.astype(np.int64)
    found = metis.metis(*ends, parts, weights)
    assert found.dtype == np.int64
    sizes = np.bincount(found, minlength=parts)
    assert len(sizes) == parts
    assert sizes.max() <= 1.1 * ids.size / parts
    # squares would cut about 2 * side * (sqrt(parts) - 1); chance cuts 1 - 1/parts of the edges
    cut = np.count_nonzero(found[src] != found[dst])
    assert cut < 0.15 * len(src)
    assert capfd.readouterr() == ("", "")
