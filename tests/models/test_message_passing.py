"""Our message passing against dgl.nn with the same weights: forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raygnn.graph.dgl import dgl
from raygnn.models.layers import (
    GATConv,
    GCNConv,
    SAGEConv,
    aggregate,
    attend,
    edge_softmax,
    with_self_loops,
)
from raygnn.sampling.batch import Adjacency, Block

SRC, DST, WIDTH = 30, 12, 8


@pytest.fixture
def adj() -> Adjacency:
    """Random, with isolated destinations (one of them the last) and a multi-edge."""
    torch.manual_seed(1)
    degree = torch.randint(1, 6, (DST,))
    degree[3] = degree[-1] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    src = torch.randint(0, SRC, (int(indptr[-1]),))
    src[1] = src[0]
    return Adjacency(indptr, src)


def block(adj: Adjacency) -> Block:
    return Block({("_N", "_E", "_N"): adj}, {"_N": SRC}, {"_N": DST})


def same(ours: Tensor, theirs: Tensor, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal outputs, and equal gradients of their sums of squares."""
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype != torch.bfloat16 else {"atol": 0.1, "rtol": 0.1}
    )
    assert torch.allclose(ours, theirs, **tolerance)
    (mine,) = torch.autograd.grad(ours.square().sum(), x, retain_graph=True)
    (other,) = torch.autograd.grad(theirs.square().sum(), x, retain_graph=True)
    assert torch.allclose(mine, other, **tolerance)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_aggregate(adj: Adjacency, reduce: str, dtype: torch.dtype) -> None:
    x = torch.randn(SRC, WIDTH, dtype=dtype, requires_grad=True)
    kernel = getattr(dgl().ops, f"copy_u_{reduce}")
    theirs = kernel(block(adj).to_dgl(), x)
    theirs = torch.where(adj.degree.unsqueeze(1) > 0, theirs, 0)
    same(aggregate(adj, x, reduce), theirs, x, dtype)


def test_weighted_sum(adj: Adjacency) -> None:
    x = torch.randn(SRC, WIDTH, requires_grad=True)
    weight = torch.rand(len(adj.src), requires_grad=True)
    theirs = dgl().ops.u_mul_e_sum(block(adj).to_dgl(), x, weight.unsqueeze(1))
    ours = aggregate(adj, x, "sum", weight)
    same(ours, theirs, x)
    same(ours, theirs, weight)


def test_attention_kernels(adj: Adjacency) -> None:
    graph = block(adj).to_dgl()
    x = torch.randn(SRC, 3, 4, requires_grad=True)
    score = torch.randn(len(adj.src), 3, requires_grad=True)
    soft = edge_softmax(adj, score)
    theirs = dgl().ops.edge_softmax(graph, score)
    same(soft, theirs, score)
    same(attend(adj, x, soft), dgl().ops.u_mul_e_sum(graph, x, theirs.unsqueeze(2)), x)


def test_edge_softmax_survives_large_scores(adj: Adjacency) -> None:
    soft = edge_softmax(adj, torch.full((len(adj.src), 2), 1e4))
    assert torch.isfinite(soft).all()
    assert torch.allclose(soft[adj.dst == 0].sum(0), torch.ones(2))


def test_no_edges_and_no_nodes() -> None:
    empty = Adjacency(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    for rows in (0, 5):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        for reduce in ("sum", "mean", "max"):
            out = aggregate(empty, x, reduce)
            assert out.shape == (3, WIDTH)
            out.sum().backward()  # every parameter gets a gradient, or ranks would differ
    assert attend(empty, torch.randn(5, 2, 4), torch.empty(0, 2)).shape == (3, 2, 4)


def test_self_loops_come_last(adj: Adjacency) -> None:
    looped = with_self_loops(adj)
    for node in range(DST):
        own = looped.src[looped.indptr[node] : looped.indptr[node + 1]].tolist()
        assert own == [*adj.src[adj.indptr[node] : adj.indptr[node + 1]].tolist(), node]


def test_sage_is_dgls(adj: Adjacency) -> None:
    x = torch.randn(SRC, WIDTH, requires_grad=True)
    ours, own = SAGEConv(WIDTH, 5, reduce="mean"), nn.Linear(WIDTH, 5)
    theirs = dgl().nn.SAGEConv(WIDTH, 5, "mean")
    theirs.fc_neigh.weight, theirs.fc_self.weight = ours.linear.weight, own.weight
    theirs.fc_self.bias = own.bias
    mine = ours(adj, x, x[:DST], None) + own(x[:DST])
    same(mine, theirs(block(adj).to_dgl(), (x, x[:DST])), x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mean_heads", [False, True])
def test_gat_is_dgls(adj: Adjacency, dynamic: bool, mean_heads: bool) -> None:
    x = torch.randn(SRC, WIDTH, requires_grad=True)
    ours = GATConv(
        WIDTH,
        WIDTH,
        5,
        heads=3,
        mean_heads=mean_heads,
        attn_dropout=0.0,
        dynamic=dynamic,
        same_type=True,
    )
    graph = block(with_self_loops(adj)).to_dgl()
    if dynamic:
        theirs = dgl().nn.GATv2Conv(WIDTH, 5, 3)
        theirs.fc_src, theirs.fc_dst = ours.src, ours.dst
        theirs.attn = nn.Parameter(ours.attn_src.detach()[None])
    else:
        theirs = dgl().nn.GATConv(WIDTH, 5, 3)
        theirs.fc = ours.src
        theirs.attn_l = nn.Parameter(ours.attn_src.detach()[None])
        theirs.attn_r = nn.Parameter(ours.attn_dst.detach()[None])
    out = theirs(graph, (x, x[:DST]) if dynamic else x)
    same(ours(adj, x, x[:DST], None), out.mean(1) if mean_heads else out.flatten(1), x)


def test_gcn_is_dgls_on_a_whole_graph() -> None:
    """On a block that is the whole undirected graph, with self loops added for DGL."""
    torch.manual_seed(0)
    nodes = 20
    half = torch.randint(0, nodes, (2, 40))
    half = half[:, half[0] != half[1]]
    src, dst = torch.cat([half[0], half[1]]), torch.cat([half[1], half[0]])
    order = torch.argsort(dst, stable=True)
    indptr = torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.bincount(dst, minlength=nodes).cumsum(0)]
    )
    adj = Adjacency(indptr, src[order])
    x = torch.randn(nodes, WIDTH, requires_grad=True)
    ours = GCNConv(WIDTH, 5, same_type=True)
    theirs = dgl().nn.GraphConv(WIDTH, 5)
    theirs.weight = nn.Parameter(ours.linear.weight.detach().T.clone())
    graph = dgl().add_self_loop(dgl().graph((src, dst), num_nodes=nodes))
    same(ours(adj, x, x, adj.degree), theirs(graph, x), x)


def test_gcn_of_a_sample_is_right_on_average() -> None:
    """Sampled neighbourhoods are scaled up, so that their mean is the full layer."""
    torch.manual_seed(0)
    degree, width = 12, 6
    src = torch.arange(1, degree + 1)
    full = torch.full((degree + 1,), 3)
    full[0] = degree
    h = torch.randn(degree + 1, WIDTH)
    conv = GCNConv(WIDTH, width, same_type=True)
    exact = conv(Adjacency(torch.tensor([0, degree]), src), h, h[:1], full)
    total = torch.zeros_like(exact)
    for start in range(degree):  # every cyclic sample of 4: each neighbour equally often
        drawn = src[(torch.arange(4) + start) % degree]
        total += conv(Adjacency(torch.tensor([0, 4]), drawn), h, h[:1], full)
    assert torch.allclose(total / degree, exact, atol=1e-5)


@pytest.mark.parametrize("conv", ["gcn", "sage", "gat", "gatv2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(adj: Adjacency, conv: str, dtype: torch.dtype) -> None:
    gat = {"heads": 2, "mean_heads": False, "attn_dropout": 0.0, "same_type": True}
    layer = {
        "gcn": lambda: GCNConv(WIDTH, 4, same_type=True),
        "sage": lambda: SAGEConv(WIDTH, 4, reduce="mean"),
        "gat": lambda: GATConv(WIDTH, WIDTH, 4, dynamic=False, **gat),
        "gatv2": lambda: GATConv(WIDTH, WIDTH, 4, dynamic=True, **gat),
    }[conv]()
    x = torch.randn(SRC, WIDTH)
    degree = torch.randint(0, 9, (SRC,))
    exact = layer(adj, x, x[:DST], degree)
    out = layer.to(dtype)(adj, x.to(dtype), x[:DST].to(dtype), degree)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), exact, atol=0.1, rtol=0.1)
    out.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
