"""Our layers against dgl.nn's with the same weights: forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raygnn.graph.dgl import dgl
from raygnn.models.convolutions import GATConv, GCNConv, SAGEConv, with_self_loops
from raygnn.sampling.batch import Adjacency, Block
from tests.support.whole_graphs import same_gradients

SRC, DST, WIDTH = 30, 12, 8


@pytest.fixture
def adj() -> Adjacency:
    """A random adjacency with isolated destinations, one of them the last, and a multi-edge."""
    torch.manual_seed(1)
    degree = torch.randint(1, 6, (DST,))
    degree[3] = degree[-1] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    src = torch.randint(0, SRC, (int(indptr[-1]),))
    src[1] = src[0]
    return Adjacency(indptr, src)


def block(adj: Adjacency) -> Block:
    return Block({("_N", "_E", "_N"): adj}, {"_N": SRC}, {"_N": DST})


def test_self_loops_come_last(adj: Adjacency) -> None:
    looped = with_self_loops(adj)
    for node in range(DST):
        own = looped.src[looped.indptr[node] : looped.indptr[node + 1]].tolist()
        assert own == [*adj.src[adj.indptr[node] : adj.indptr[node + 1]].tolist(), node]


@pytest.mark.dgl
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("width", [5, 11])  # narrower and wider than the input
def test_sage_is_dgls(adj: Adjacency, reduce: str, width: int) -> None:
    x = torch.randn(SRC, WIDTH, requires_grad=True)
    ours = SAGEConv(WIDTH, width, reduce=reduce)
    own = nn.Linear(WIDTH, width)
    graph = block(adj).to_dgl()
    theirs = dgl().nn.SAGEConv(WIDTH, width, "mean")
    theirs.fc_neigh.weight, theirs.fc_self.weight = ours.weight, own.weight
    theirs.fc_self.bias = own.bias
    expected = theirs(graph, (x, x[:DST]))
    if reduce == "sum":  # DGL has no such layer, but a sum is a mean times the degree
        neighbours = expected - own(x[:DST])
        expected = neighbours * adj.degree.unsqueeze(1) + own(x[:DST])
    same_gradients(ours(adj, x, x[:DST]) + own(x[:DST]), expected, {"x": x})


@pytest.mark.dgl
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
    same_gradients(ours(adj, x, x[:DST]), out.mean(1) if mean_heads else out.flatten(1), {"x": x})


@pytest.mark.dgl
def test_gcn_is_dgls_on_a_whole_graph() -> None:
    """The block is the entire undirected graph, with self-loops added for DGL."""
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
    theirs.weight = nn.Parameter(ours.weight.detach().T.clone())
    graph = dgl().add_self_loop(dgl().graph((src, dst), num_nodes=nodes))
    same_gradients(ours(adj, x, x, adj.degree), theirs(graph, x), {"x": x})


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
