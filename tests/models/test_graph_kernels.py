"""The two implementations of the graph operations agree: forward, backward, every dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from raygnn.models import message_passing
from raygnn.models.message_passing import NATIVE, SCATTER, Kernels, by_source
from raygnn.sampling.batch import Adjacency

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}
DTYPES = list(TOLERANCE)
EITHER = pytest.mark.parametrize("ops", [NATIVE, SCATTER])


def adjacency(num_dst: int, edges: list[tuple[int, int]]) -> Adjacency:
    """Build an adjacency from edges ``(destination, source)``."""
    edges = sorted(edges, key=lambda edge: edge[0])
    counts = np.bincount([dst for dst, _ in edges], minlength=num_dst).astype(np.int64)
    indptr = torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int64))
    return Adjacency(indptr, torch.tensor([src for _, src in edges], dtype=torch.int64))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Adjacency, int]:
    """Draw ``(edges, sources)`` with few nodes, so that loops, multi-edges and isolated nodes
    abound."""
    num_dst, num_src = draw(st.integers(0, 6)), draw(st.integers(0, 9))
    edge = st.tuples(st.integers(0, max(num_dst - 1, 0)), st.integers(0, max(num_src - 1, 0)))
    most = 25 if num_dst and num_src else 0
    return adjacency(num_dst, draw(st.lists(edge, max_size=most))), num_src


SPECIAL = [
    (adjacency(3, []), 5),
    (adjacency(3, []), 0),
    (adjacency(0, []), 4),
    (adjacency(2, [(0, 0), (0, 0), (0, 0)]), 1),
    (adjacency(4, [(3, 6)]), 7),
]


def with_specials(test):  # type: ignore[no-untyped-def]
    for block in SPECIAL:
        test = example(block)(test)
    return settings(max_examples=40, deadline=None)(given(blocks())(test))


def outcome(out: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the output and the gradients, which must exist even without any edge."""
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def compare(call, leaves: list[Tensor], dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Check that ``call(kernels)`` is the same for both kernels."""
    ours, theirs = call(NATIVE), call(SCATTER)
    assert ours.dtype == theirs.dtype == dtype
    upstream = torch.randn(ours.shape, dtype=torch.float64)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for mine, other in zip(outcome(ours, leaves, upstream), outcome(theirs, leaves, upstream)):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "weighted"])
def test_aggregate(dtype: torch.dtype, reduce: str) -> None:
    @with_specials
    def check(block: tuple[Adjacency, int]) -> None:
        adj, num_src = block
        torch.manual_seed(0)
        leaves = [torch.randn(num_src, 5, dtype=dtype, requires_grad=True)]
        if reduce == "weighted":
            leaves.append(torch.rand(len(adj.src), dtype=dtype, requires_grad=True))

        def call(ops: Kernels) -> Tensor:
            fresh = Adjacency(adj.indptr, adj.src)
            return ops.aggregate(fresh, leaves[0], reduce.replace("weighted", "sum"), *leaves[1:])

        compare(call, leaves, dtype)
        assert not call(NATIVE)[adj.degree == 0].any()

    check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype) -> None:
    @with_specials
    def check(block: tuple[Adjacency, int]) -> None:
        adj, num_src = block
        torch.manual_seed(0)
        x = torch.randn(num_src, 3, 4, dtype=dtype, requires_grad=True)
        score = (5 * torch.randn(len(adj.src), 3, dtype=dtype)).requires_grad_()
        compare(lambda ops: ops.edge_softmax(adj, score), [score], dtype)
        compare(lambda ops: ops.attend(adj, x, ops.edge_softmax(adj, score)), [x, score], dtype)

    check()


@EITHER
def test_sums_by_hand(ops: Kernels) -> None:
    """Both equal the definition, so that they cannot be wrong together."""
    adj = adjacency(3, [(0, 1), (0, 3), (2, 3), (2, 3), (2, 0)])
    x = torch.tensor([[1.0, -1.0], [2.0, 5.0], [0.0, 0.0], [4.0, -3.0]], requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    out = ops.aggregate(adj, x, "sum", weight)
    assert out.tolist() == [[10, -1], [0, 0], [33, -26]]
    out[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[5, 0], [1, 0], [0, 0], [9, 0]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 4, 4, 4, 1]
    torch.testing.assert_close(
        ops.aggregate(adj, x, "mean"), torch.tensor([[3.0, 1.0], [0.0, 0.0], [3.0, -7 / 3]])
    )
    assert ops.aggregate(adj, x, "max").tolist() == [[4, 5], [0, 0], [4, -1]]


@EITHER
def test_softmax_survives_large_scores(ops: Kernels) -> None:
    adj = adjacency(2, [(0, 0), (0, 1), (0, 2), (1, 0)])
    soft = ops.edge_softmax(adj, torch.full((4, 2), 1e4))
    torch.testing.assert_close(soft, torch.tensor([[1 / 3] * 2] * 3 + [[1.0] * 2]))


def test_gradients_by_differences() -> None:
    """Hand-written backward passes agree with finite differences."""
    adj = adjacency(3, [(0, 1), (0, 3), (2, 3), (2, 3), (2, 0)])
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: NATIVE.aggregate(adj, x, "mean"), [x])
    assert torch.autograd.gradcheck(lambda x, w: NATIVE.aggregate(adj, x, "sum", w), [x, weight])
    wide = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    heads = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: NATIVE.attend(adj, x, w), [wide, heads])


@pytest.mark.parametrize("group", [by_source, message_passing._sorted_by_source])
def test_edges_by_source(group) -> None:  # type: ignore[no-untyped-def]
    """The CPU's grouping of edges by source equals the one for other devices."""
    adj = adjacency(3, [(0, 1), (0, 3), (2, 3), (2, 3), (2, 0)])
    start, dst, edge = group(adj, 5)
    assert start.tolist() == [0, 1, 2, 2, 5, 5]
    assert dst.tolist() == [2, 0, 0, 2, 2]
    assert edge.tolist() == [4, 0, 1, 2, 3]
    empty = group(adjacency(2, []), 3)
    assert [(v.tolist(), v.dtype) for v in empty] == [
        ([0] * 4, torch.int64),
        ([], torch.int64),
        ([], torch.int64),
    ]
