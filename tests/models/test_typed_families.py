"""R-GCN, HGT and attention over edge types against DGL's layers with the same weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from raygnn.graph.dgl import dgl
from raygnn.models.attention_layers import HANLayer, HGTLayer, SemanticAttention
from raygnn.models.convolutions import GATConv
from raygnn.models.rgcn import RGCNLayer
from raygnn.models.typed_layers import LayerSpec, key
from raygnn.sampling.batch import Adjacency, Block, EdgeType
from tests.support.whole_graphs import same_gradients

WIDTH, OUT, RELATIONS = 8, 6, 5
SIZES = {"a": 11, "b": 7}
ETYPES: list[EdgeType] = [("a", "to", "a"), ("b", "to", "a"), ("b", "of", "a"), ("a", "to", "b")]
PLAIN: list[EdgeType] = [("_N", "_E", "_N")]


def random_block(etypes: list[EdgeType], sizes: dict[str, int], relations: int) -> Block:
    """Build a graph's block with isolated nodes, multi-edges and relations without edges."""
    torch.manual_seed(3)
    adj = {}
    for etype in etypes:
        degree = torch.randint(0, 7, (sizes[etype[2]],))
        degree[-1] = 0
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
        num = int(indptr[-1])
        src = torch.randint(0, sizes[etype[0]], (num,))
        src[1] = src[0]
        relation = torch.randint(0, relations - 1, (num,)) if relations else None
        adj[etype] = Adjacency(indptr, src, relation)
    return Block(adj, sizes, sizes)


def features(sizes: dict[str, int], width: int = WIDTH) -> dict[str, Tensor]:
    torch.manual_seed(4)
    return {t: torch.randn(n, width, requires_grad=True) for t, n in sizes.items()}


def joined(block: Block, h: dict[str, Tensor]) -> tuple[object, Tensor, Tensor, Tensor]:
    """Return the block as DGL's homogeneous graph: ``(graph, features, node types, edge types)``.

    An edge's type is its relation, numbered on from those of the edge types before it.
    """
    first = {t: sum(list(block.num_src.values())[:i]) for i, t in enumerate(block.num_src)}
    src, dst, kinds, start = [], [], [], 0
    for etype, adj in block.adj.items():
        src.append(adj.src + first[etype[0]])
        dst.append(adj.dst + first[etype[2]])
        kinds.append(torch.zeros_like(adj.src) if adj.relation is None else adj.relation)
        kinds[-1] = kinds[-1] + start
        start += 1 if adj.relation is None else RELATIONS
    graph = dgl().graph((torch.cat(src), torch.cat(dst)), num_nodes=sum(block.num_src.values()))
    ntypes = torch.repeat_interleave(torch.tensor(list(block.num_src.values())))
    return graph, torch.cat(list(h.values())), ntypes, torch.cat(kinds)


def share(block: Block, mean_over: str) -> Tensor:
    """Return ``1 / c`` of each edge by counting."""
    found = []
    for adj in block.adj.values():
        relation = torch.zeros_like(adj.src) if adj.relation is None else adj.relation
        same = adj.dst[:, None] == adj.dst
        if mean_over == "relation":
            same &= relation[:, None] == relation
        found.append(1 / same.sum(1))
    return torch.cat(found)


def same(ours: dict[str, Tensor], theirs: Tensor, leaves: dict[str, Tensor]) -> None:
    assert float(theirs.detach().abs().max()) > 0.1
    same_gradients(torch.cat(list(ours.values())), theirs, leaves)


@pytest.mark.dgl
@pytest.mark.parametrize("regularizer", ["basis", "block", "none"])
@pytest.mark.parametrize("mean_over", ["relation", "all"])
@pytest.mark.parametrize("relations", [0, RELATIONS], ids=["types alone", "relations"])
@pytest.mark.parametrize("etypes", [PLAIN, ETYPES], ids=["one type", "typed"])
def test_rgcn_is_dgls(
    regularizer: str, mean_over: str, relations: int, etypes: list[EdgeType]
) -> None:
    sizes = SIZES if etypes is ETYPES else {"_N": 13}
    block, h = random_block(etypes, sizes, relations), features(sizes)
    spec = LayerSpec(dict.fromkeys(sizes, WIDTH), OUT, False, dict.fromkeys(etypes, relations or 1))
    make = partial(RGCNLayer, regularizer=regularizer, bases=2, mean_over=mean_over)
    ours = make(etypes, spec, sorted(sizes))
    graph, x, _, kinds = joined(block, h)
    total = len(etypes) * (relations or 1)
    names = {"basis": "basis", "block": "bdd", "none": None}
    bases = {"basis": min(2, total), "block": 2, "none": None}[regularizer]
    theirs = dgl().nn.RelGraphConv(
        WIDTH, OUT, total, names[regularizer], bases, bias=False, self_loop=False
    )
    leaves = {**h}
    if regularizer == "basis":
        matrices = ours.bases[str(WIDTH)]
        leaves["bases"], leaves["coefficients"] = matrices, ours.coefficients[key(*etypes[0])]
        coefficients = torch.cat([ours.coefficients[key(*e)] for e in etypes])
        weight = torch.einsum("rb,bio->rio", coefficients, matrices)
    else:
        blocks = torch.cat([ours.blocks[key(*e)] for e in etypes])
        leaves["blocks"] = ours.blocks[key(*etypes[0])]
        weight = blocks.flatten(1) if regularizer == "block" else blocks.squeeze(1)
    theirs.linear_r.get_weight = lambda: weight
    expected = theirs(graph, x, kinds, share(block, mean_over).unsqueeze(1))
    own = [(t, ours.own[key(t)].weight, ours.bias[key(t)]) for t in sizes]
    expected = expected + torch.cat([h[t] @ w.T + b for t, w, b in own])
    found = ours(block, h, {})
    same({t: found[t] for t in sizes}, expected, leaves)


def test_a_relations_weights_are_shared_and_few() -> None:
    spec = LayerSpec({"a": WIDTH, "b": WIDTH}, OUT, False, dict.fromkeys(ETYPES, 100))
    layer = RGCNLayer(ETYPES, spec, [], regularizer="basis", bases=4, mean_over="relation")
    assert [tuple(b.shape) for b in layer.bases.values()] == [(4, WIDTH, OUT)]
    assert all(c.shape == (100, 4) for c in layer.coefficients.values())


@pytest.mark.dgl
def test_hgt_is_dgls() -> None:
    block, h = random_block(ETYPES, SIZES, 0), features(SIZES)
    spec = LayerSpec(dict.fromkeys(SIZES, WIDTH), WIDTH, False)
    ours = HGTLayer(ETYPES, spec, sorted(SIZES), hidden=WIDTH, heads=2)
    theirs = dgl().nn.HGTConv(WIDTH, WIDTH // 2, 2, len(SIZES), len(ETYPES), dropout=0.0)
    torch.manual_seed(8)
    for parameter in ours.parameters():
        if parameter.dim() < 2:
            nn.init.normal_(parameter)
    for linears in (ours.keys, ours.values, ours.queries, ours.out):
        for module in linears.values():
            nn.init.zeros_(module.bias)  # DGL's have none
    for name, linears in (
        ("linear_k", ours.keys),
        ("linear_q", ours.queries),
        ("linear_v", ours.values),
        ("linear_a", ours.out),
    ):
        weight = torch.stack([linears[key(t)].weight.T for t in SIZES])
        getattr(theirs, name).get_weight = lambda weight=weight: weight
    for name, table in (("relation_att", ours.attention), ("relation_msg", ours.message)):
        for head, module in enumerate(getattr(theirs, name)):
            weight = torch.stack([table[key(*e)][head] for e in ETYPES])
            module.get_weight = lambda weight=weight: weight
    del theirs.relation_pri, theirs.skip
    theirs.relation_pri = [
        torch.stack([ours.priority[key(*e)][head] for e in ETYPES]) for head in range(2)
    ]
    theirs.skip = torch.stack([ours.skip[key(t)] for t in SIZES])
    graph, x, ntypes, kinds = joined(block, h)
    found = ours(block, h, {})
    leaves = {**h, **{n: p for n, p in ours.named_parameters() if not n.endswith("bias")}}
    same({t: found[t] for t in SIZES}, theirs(graph, x, ntypes, kinds), leaves)


def test_hgt_between_widths() -> None:
    """The node itself is transformed if its width differs, or if it has no neighbours."""
    block = random_block(ETYPES, SIZES, 0)
    h = {"a": torch.randn(11, 3), "b": torch.randn(7, WIDTH)}
    spec = LayerSpec({"a": 3, "b": WIDTH}, WIDTH, False)
    layer = HGTLayer(ETYPES[:3], spec, ["a", "b"], hidden=4, heads=2)
    out = layer(block, h, {})
    torch.testing.assert_close(out["b"], h["b"] @ layer.own[key("b")].weight.T)
    assert out["a"].shape == (11, WIDTH)
    lonely = torch.sigmoid(layer.skip[key("a")])
    own = h["a"][-1] @ layer.own[key("a")].weight.T
    made = layer.out[key("a")].bias
    torch.testing.assert_close(out["a"][-1], made * lonely + own * (1 - lonely))


def gat(etype: EdgeType, spec: LayerSpec) -> GATConv:
    return GATConv(
        spec.in_features[etype[0]],
        spec.in_features[etype[2]],
        OUT // 2,
        heads=2,
        mean_heads=False,
        attn_dropout=0.0,
        dynamic=False,
        same_type=etype[0] == etype[2],
    )


@pytest.mark.dgl
def test_han_is_dgls_attention_of_each_type_weighted_for_each_node() -> None:
    torch.manual_seed(7)
    block, h = random_block(ETYPES, SIZES, 0), features(SIZES)
    spec = LayerSpec(dict.fromkeys(SIZES, WIDTH), OUT, False)
    layer = HANLayer(ETYPES, spec, ["b"], conv=gat, attention=9)
    found = layer(block, h, {})
    candidates: dict[str, list[tuple[Tensor, Tensor]]] = {"a": [], "b": []}
    for etype in ETYPES:
        conv, adj = layer.convs[key(*etype)], block.adj[etype]
        src, dst = adj.src, adj.dst
        if etype[0] == etype[2]:
            loop = torch.arange(SIZES["a"])
            src, dst = torch.cat([src, loop]), torch.cat([dst, loop])
        graph = dgl().create_block((src, dst), SIZES[etype[0]], SIZES[etype[2]])
        theirs = dgl().nn.GATConv((WIDTH, WIDTH), OUT // 2, 2, allow_zero_in_degree=True)
        theirs.fc_src, theirs.fc_dst = conv.src, conv.dst or conv.src
        theirs.attn_l = nn.Parameter(conv.attn_src.detach()[None])
        theirs.attn_r = nn.Parameter(conv.attn_dst.detach()[None])
        theirs.bias = nn.Parameter(conv.bias.detach())
        z = theirs(graph, (h[etype[0]], h[etype[2]])).flatten(1)
        candidates[etype[2]].append((z, torch.bincount(dst, minlength=SIZES[etype[2]]) > 0))
    everyone = torch.ones(SIZES["b"], dtype=torch.bool)
    own = layer.own[key("b")]
    candidates["b"].append((h["b"] @ own.weight.T + own.bias, everyone))
    expected = []
    for ntype, some in candidates.items():
        attention = layer.semantic[key(ntype)]
        rows = []
        for node in range(SIZES[ntype]):  # one node after the other, from the definition
            z = torch.stack([values[node] for values, there in some if there[node]])
            score = attention.project(z).tanh() @ attention.query
            rows.append(torch.softmax(score, 0) @ z)
        expected.append(torch.stack(rows))
    same({t: found[t] for t in SIZES}, torch.cat(expected), h)


def test_semantic_attention_of_a_single_type_is_not_made() -> None:
    spec = LayerSpec(dict.fromkeys(SIZES, WIDTH), OUT, False)
    layer = HANLayer(ETYPES[:2], spec, ["b"], conv=gat, attention=9)
    assert list(layer.semantic) == [key("a")]
    assert isinstance(layer.semantic[key("a")], SemanticAttention)
