"""Layers whose messages read the edges' features, against public layers with the same weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.graph.dgl import dgl
from raygnn.models.attention_layers import HGTLayer
from raygnn.models.convolutions import GATConv, GINConv, SAGEConv
from raygnn.models.message_passing import NATIVE, SCATTER, Kernels, Reduce
from raygnn.models.network import TimeEncoding
from raygnn.models.rgcn import RGCNLayer
from raygnn.models.typed_layers import LayerSpec, key
from raygnn.sampling.batch import Adjacency, Block, EdgeType
from tests.models import test_graph_networks as whole
from tests.models import test_networks as sampled
from tests.support.whole_graphs import (
    BONDED,
    batch_of,
    on_kernels,
    permuted,
    random_sample,
    same_gradients,
)

IN, OUT, EDGE, RELATIONS = 6, 4, 3, 4
SIZES = {"a": 9, "b": 7}
ETYPES: list[EdgeType] = [("a", "to", "a"), ("b", "to", "a"), ("a", "of", "b")]
KERNELS = pytest.mark.parametrize("kernels", [NATIVE, SCATTER], ids=["native", "scatter"])


def random_adjacency(num_src: int, num_dst: int, seed: int = 3) -> Adjacency:
    """Build one with a node without edges and multi-edges, but without loops, which PyG would
    remove."""
    generator = torch.Generator().manual_seed(seed)
    degree = torch.randint(1, 6, (num_dst,), generator=generator)
    degree[-1] = 0
    dst = torch.repeat_interleave(degree)
    src = torch.randint(0, num_src - 1, (len(dst),), generator=generator)
    src += src >= dst
    src[1] = src[0]
    rows = torch.randn(len(dst), EDGE, generator=generator).requires_grad_()
    relation = torch.randint(0, RELATIONS - 1, (len(dst),), generator=generator)
    return Adjacency(F.pad(degree.cumsum(0), (1, 0)), src, relation, rows)


def ends(adj: Adjacency) -> Tensor:
    return torch.stack([adj.src, adj.dst])


def randomised(module: nn.Module) -> dict[str, Tensor]:
    """Set parameters to random numbers, none of them 0; return them by name."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    return dict(module.named_parameters())


@pytest.fixture
def h() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(SIZES["a"], IN, requires_grad=True)


def attention(
    *, dynamic: bool, kernels: Kernels, same_type: bool = True, out: int = OUT
) -> GATConv:
    conv = GATConv(
        IN,
        IN,
        out,
        heads=2,
        mean_heads=False,
        attn_dropout=0.0,
        dynamic=dynamic,
        same_type=same_type,
        edges=EDGE,
    )
    return on_kernels(kernels, conv)


@KERNELS
@pytest.mark.parametrize("loops", [True, False])
def test_gatv2_is_pygs(kernels: Kernels, loops: bool, h: Tensor) -> None:
    from torch_geometric.nn import GATv2Conv

    conv = attention(dynamic=True, kernels=kernels, same_type=loops)
    leaves = randomised(conv)
    theirs = GATv2Conv(IN, OUT, heads=2, edge_dim=EDGE, add_self_loops=loops, fill_value="mean")
    theirs.lin_l, theirs.lin_r, theirs.lin_edge = conv.src, conv.dst, conv.edge
    del theirs.att, theirs.bias
    theirs.att, theirs.bias = conv.attn_src.unsqueeze(0), conv.bias
    adj = random_adjacency(len(h), len(h))
    expected = theirs(h, ends(adj), adj.rows)
    same_gradients(conv(adj, h, h), expected, {"h": h, "rows": adj.rows, **leaves})


@pytest.mark.dgl
@KERNELS
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("out", [EDGE - 1, EDGE + 1])  # features are transformed first, and last
def test_gat_is_dgls(kernels: Kernels, loops: bool, out: int, h: Tensor) -> None:
    conv = attention(dynamic=False, kernels=kernels, same_type=loops, out=out)
    leaves = randomised(conv)
    adj = random_adjacency(len(h), len(h))
    (src, dst), rows = ends(adj), adj.rows
    if loops:  # which have the mean of the destination's edges
        own = torch.arange(len(h))
        mean = torch.stack([rows[adj.dst == d].mean(0) if d < 8 else rows[0] * 0 for d in own])
        src, dst, rows = torch.cat([src, own]), torch.cat([dst, own]), torch.cat([rows, mean])
    graph = dgl().create_block((src, dst), len(h), len(h))
    theirs = dgl().nn.EdgeGATConv((IN, IN), EDGE, out, 2, residual=False, allow_zero_in_degree=True)
    theirs.fc_src, theirs.fc_dst, theirs.fc_edge = conv.src, conv.dst or conv.src, conv.edge
    for name, ours in (("l", conv.attn_src), ("r", conv.attn_dst), ("edge", conv.attn_edge)):
        delattr(theirs, f"attn_{name}")
        setattr(theirs, f"attn_{name}", ours.unsqueeze(0))
    del theirs.bias
    theirs.bias = conv.bias
    expected = theirs(graph, (h, h), rows).flatten(1)
    same_gradients(conv(adj, h, h), expected, {"h": h, "rows": adj.rows, **leaves})


@KERNELS
def test_gin_is_pygs_gine(kernels: Kernels, h: Tensor) -> None:
    from torch_geometric.nn import GINEConv

    conv = on_kernels(kernels, GINConv(IN, OUT, same_type=True, edges=EDGE))
    leaves = randomised(conv)
    theirs = GINEConv(lambda x: F.linear(x, conv.weight), train_eps=True, edge_dim=None)
    theirs.lin = conv.edge
    del theirs.eps
    theirs.eps = conv.eps
    adj = random_adjacency(len(h), len(h))
    same_gradients(
        conv(adj, h, h), theirs(h, ends(adj), adj.rows), {"h": h, "rows": adj.rows, **leaves}
    )


@KERNELS
@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("width", [2, 40])  # the weight is applied after, and before, the sum
def test_sage_combines_the_neighbour_and_the_edge(
    kernels: Kernels, reduce: Reduce, width: int
) -> None:
    torch.manual_seed(4)
    h = torch.randn(SIZES["a"], width, requires_grad=True)
    conv = on_kernels(kernels, SAGEConv(width, OUT, edges=EDGE, reduce=reduce))
    leaves = randomised(conv)
    adj = random_adjacency(len(h), len(h))
    assert conv.weight_first(adj, h) == (width == 40 and reduce != "max" and kernels is NATIVE)
    messages = torch.cat([h[adj.src], adj.rows], 1)
    how = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[reduce]
    nothing = messages[0] * 0
    rows = [how(messages[adj.dst == d], 0) if d < 8 else nothing for d in range(len(h))]
    expected = torch.stack(rows) @ conv.weight.T
    same_gradients(conv(adj, h, h), expected, {"h": h, "rows": adj.rows, **leaves})
    if reduce == "max":
        return
    # in bf16, whose products have kernels of their own
    conv.to(torch.bfloat16)
    narrow = adj.with_rows(adj.rows.detach().bfloat16())
    out = conv(narrow, h.detach().bfloat16(), h.detach().bfloat16())
    torch.testing.assert_close(out.float(), expected, atol=0.2, rtol=0.1)


def typed_block(relations: bool) -> tuple[Block, dict[str, Tensor]]:
    torch.manual_seed(4)
    adj = {}
    for seed, (source, name, target) in enumerate(ETYPES):
        one = random_adjacency(SIZES[source], SIZES[target], seed)
        one = one if relations else replace(one, relation=None)
        adj[source, name, target] = replace(one, rows=None) if seed == 1 else one
    h = {t: torch.randn(n, IN, requires_grad=True) for t, n in SIZES.items()}
    return Block(adj, SIZES, SIZES), h


def typed_spec(relations: int) -> LayerSpec:
    widths = {ETYPES[0]: EDGE, ETYPES[2]: EDGE}  # the one between them has none
    return LayerSpec(dict.fromkeys(SIZES, IN), OUT, False, dict.fromkeys(ETYPES, relations), widths)


def inputs_of(block: Block, h: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = {str(e): a.rows for e, a in block.adj.items() if a.rows is not None}
    return {**h, **rows}


@KERNELS
@pytest.mark.parametrize("regularizer", ["basis", "block", "none"])
@pytest.mark.parametrize("mean_over", ["relation", "all"])
@pytest.mark.parametrize("relations", [1, RELATIONS])
def test_rgcn_from_its_definition(
    kernels: Kernels, regularizer: Any, mean_over: Any, relations: int
) -> None:
    block, h = typed_block(relations > 1)
    layer = RGCNLayer(
        ETYPES,
        typed_spec(relations),
        sorted(SIZES),
        regularizer=regularizer,
        bases=2,
        mean_over=mean_over,
    )
    on_kernels(kernels, layer)
    leaves = randomised(layer)
    expected = []
    for ntype, num in SIZES.items():
        rows = h[ntype] @ layer.own[key(ntype)].weight.T + layer.bias[key(ntype)]
        for etype in layer.into(ntype):
            adj, name = block.adj[etype], key(*etype)
            if regularizer == "basis":
                width = IN + (0 if adj.rows is None else EDGE)
                bases, coefficients = layer.bases[str(width)], layer.coefficients[name]
                weights = torch.einsum("rb,bio->rio", coefficients, bases)
            else:
                weights = torch.stack([torch.block_diag(*blocks) for blocks in layer.blocks[name]])
            messages = h[etype[0]][adj.src]
            if adj.rows is not None:
                messages = torch.cat([messages, adj.rows], 1)
            relation = torch.zeros_like(adj.src) if adj.relation is None else adj.relation
            messages = F.pad(messages, (0, weights.shape[1] - messages.shape[1]))
            messages = torch.einsum("ei,eio->eo", messages, weights[relation])[:, :OUT]
            alike = adj.dst[:, None] == adj.dst
            if mean_over == "relation":
                alike = alike & (relation[:, None] == relation)
            share = 1 / alike.sum(1, keepdim=True)
            rows = rows + torch.zeros(num, OUT).index_add(0, adj.dst, messages * share)
        expected.append(rows)
    found = layer(block, h, {})
    same_gradients(
        torch.cat([found[t] for t in SIZES]), torch.cat(expected), {**inputs_of(block, h), **leaves}
    )


@KERNELS
def test_hgt_is_pygs_transformer_with_edges(kernels: Kernels, h: Tensor) -> None:
    """HGT equals `TransformerConv` if its edge transforms are the identity and it has no residual
    share."""
    from torch_geometric.nn import TransformerConv

    etype = ("a", "to", "a")
    spec = LayerSpec({"a": IN}, 8, False, {}, {etype: EDGE})
    layer = HGTLayer([etype], spec, ["a"], hidden=8, heads=2)
    on_kernels(kernels, layer)
    leaves = randomised(layer)
    adj = random_adjacency(len(h), len(h))
    with torch.no_grad():
        layer.attention[key(*etype)].copy_(torch.eye(4).expand(2, 4, 4))
        layer.message[key(*etype)].copy_(torch.eye(4).expand(2, 4, 4))
        layer.priority[key(*etype)].fill_(1.0)
    theirs = TransformerConv(IN, 4, heads=2, edge_dim=EDGE, root_weight=False)
    name = key("a")
    theirs.lin_key, theirs.lin_query = layer.keys[name], layer.queries[name]
    theirs.lin_value, theirs.lin_edge = layer.values[name], layer.edge[key(*etype)]
    share = torch.sigmoid(layer.skip[name])
    own = h @ layer.own[name].weight.T
    made = layer.out[name](theirs(h, ends(adj), adj.rows))
    found = layer(Block({etype: adj}, {"a": len(h)}, {"a": len(h)}), {"a": h}, {})["a"]
    kept = {n: p for n, p in leaves.items() if not n.startswith(("attention", "message", "pri"))}
    same_gradients(found, made * share + own * (1 - share), {"h": h, "rows": adj.rows, **kept})


@KERNELS
def test_hgt_has_one_attention_over_edges_with_and_without_features(kernels: Kernels) -> None:
    block, h = typed_block(relations=False)
    layer = HGTLayer(ETYPES, typed_spec(1), sorted(SIZES), hidden=8, heads=2)
    on_kernels(kernels, layer)
    leaves = randomised(layer)
    expected = []
    for ntype, num in SIZES.items():
        query = layer.queries[key(ntype)](h[ntype]).view(-1, 2, 4)
        rows = []
        for node in range(num):  # one after the other, from the definition
            scores, values = [], [torch.zeros(0, 2, 4)]
            for etype in layer.into(ntype):
                adj, name = block.adj[etype], key(*etype)
                chosen = adj.dst == node
                sources = h[etype[0]][adj.src[chosen]]
                k, v = (
                    torch.einsum("nhi,hio->nho", linears[key(etype[0])](sources).view(-1, 2, 4), w)
                    for linears, w in (
                        (layer.keys, layer.attention[name]),
                        (layer.values, layer.message[name]),
                    )
                )
                if adj.rows is not None:
                    added = layer.edge[name](adj.rows[chosen]).view(-1, 2, 4)
                    k, v = k + added, v + added
                scores.append((k * query[node]).sum(-1) * layer.priority[name] / math.sqrt(4))
                values.append(v)
            share = torch.softmax(torch.cat(scores), 0)
            rows.append((share.unsqueeze(2) * torch.cat(values)).sum(0).flatten())
        made = layer.out[key(ntype)](torch.stack(rows))
        own = h[ntype] @ layer.own[key(ntype)].weight.T
        share = torch.sigmoid(layer.skip[key(ntype)])
        expected.append(made * share + own * (1 - share))
    found = layer(block, h, {})
    same_gradients(
        torch.cat([found[t] for t in SIZES]), torch.cat(expected), {**inputs_of(block, h), **leaves}
    )


@KERNELS
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degrees", [[3, 0, 1, 7, 0], [0, 0], []])
def test_rows_of_edges_are_combined_by_destination(
    kernels: Kernels, reduce: Reduce, dtype: torch.dtype, degrees: list[int]
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(degrees), 5, dtype=dtype, requires_grad=True)
    counts = torch.tensor(degrees, dtype=torch.int64)
    adj = Adjacency(F.pad(counts.cumsum(0), (1, 0)), torch.zeros(len(rows), dtype=torch.int64))
    how = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[reduce]
    parts = [how(some, 0) if len(some) else 0 * some.sum(0) for some in rows.split(degrees)]
    expected = torch.stack(parts) if parts else rows
    found = kernels.combine_edges(adj, rows, reduce)
    tolerance = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **tolerance)
    upstream = torch.randn(expected.shape, dtype=dtype)
    (mine,) = torch.autograd.grad(found, rows, upstream)
    (other,) = torch.autograd.grad(expected, rows, upstream, allow_unused=True)
    torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


@pytest.mark.dgl
@pytest.mark.parametrize("etypes", [[("_N", "_E", "_N")], ETYPES])
def test_arrays_of_edges_in_dgls_blocks(etypes: list[EdgeType]) -> None:
    """Each edge has its own arrays, with their shapes and dtypes."""
    sizes = {t: SIZES.get(t, 9) for e in etypes for t in (e[0], e[2])}
    adj, arrays = {}, {}
    for source, name, target in etypes:
        one = random_adjacency(sizes[source], sizes[target])
        square = torch.stack([one.src, one.dst, one.src * one.dst, one.dst], 1).float()
        arrays[source, name, target] = {"square": square.view(-1, 2, 2), "kind": one.src * 3}
        rows = torch.cat([square, one.dst[:, None].float()], 1)
        adj[source, name, target] = replace(one, rows=rows, categories={"kind": one.src * 3})
    block = Block(adj, sizes, sizes)
    graph = block.to_dgl({e: {"square": (2, 2), "number": ()} for e in etypes})
    for etype, named in arrays.items():
        frame = graph.edata if len(etypes) == 1 else graph.edges[etype].data
        src, dst = graph.edges(etype=None if len(etypes) == 1 else etype, order="eid")
        assert {name: rows.shape[1:] for name, rows in frame.items()} == {
            "square": (2, 2),
            "number": (),
            "kind": (),
        }
        torch.testing.assert_close(frame["kind"], src * 3)
        torch.testing.assert_close(frame["number"], dst.float())
        torch.testing.assert_close(frame["square"][:, 1, 0], (src * dst).float())
        torch.testing.assert_close(frame["square"], named["square"])


FAMILIES: list[dict[str, Any]] = [
    {"kind": "sage", "norm": "batch"},
    {"kind": "sage", "aggregator": "max"},
    {"kind": "gat", "heads": 2},
    {"kind": "gatv2", "heads": 2, "residual": True},
    {"kind": "gin", "norm": "batch"},
    {"kind": "rgcn", "bases": 3},
    {"kind": "rgcn", "regularizer": "block", "bases": 3},
    {"kind": "hgt", "heads": 2},
    {"kind": "han", "heads": 2},
]
EDGES: dict[str, Any] = {"edge_features": "w", "edge_categories": {"sort": 3, "age": 1}}
EVERY = pytest.mark.parametrize("family", FAMILIES, **whole.names)


class TestWholeGraphs:
    """Graph-level networks that read features and categories of some edge types."""

    @EVERY
    def test_a_batch_is_its_graphs_one_by_one(self, family: dict[str, Any]) -> None:
        model = whole.network({**family, **EDGES}, BONDED, layers=3).eval()
        samples = whole.samples_of(BONDED)
        together = model(batch_of(BONDED, samples))
        alone = torch.cat([model(batch_of(BONDED, [sample])) for sample in samples])
        whole.same(together, alone)
        others = [permuted(sample, number) for number, sample in enumerate(samples)]
        whole.same(together, model(batch_of(BONDED, others)))

    @EVERY
    @pytest.mark.parametrize(
        ("recompute", "dtype"), [(True, torch.bfloat16), (False, torch.float32)]
    )
    def test_every_parameter_gets_a_gradient(
        self, family: dict[str, Any], recompute: bool, dtype: torch.dtype
    ) -> None:
        settings = {**family, **EDGES, "recompute": recompute}
        model = whole.network(settings, BONDED, dropout=0.5).to(dtype).train()
        assert any("edge_embeddings" in name for name, _ in model.named_parameters())
        for what, shapes in whole.ODD.items():
            samples = [random_sample(BONDED, i, n, edges) for i, (n, edges) in enumerate(shapes)]
            whole.check(model, batch_of(BONDED, samples, dtype), what)

    @EVERY
    def test_each_array_counts(self, family: dict[str, Any]) -> None:
        """Every feature and every category of every edge type that has it changes the output."""
        model = whole.network({**family, **EDGES}, BONDED).eval()
        batch = batch_of(BONDED, [random_sample(BONDED, 3, 9, 30)])
        before = model(batch)
        for etype, rows in batch.edge_x.items():
            changed = replace(batch, edge_x={**batch.edge_x, etype: rows.flip(0)})
            assert not torch.allclose(model(changed), before), etype
        for etype, named in batch.edge_categories.items():
            for name, numbers in named.items():
                next_one = (numbers + 1) % BONDED.edge_categories[etype][name][0]
                other = {**batch.edge_categories, etype: {**named, name: next_one}}
                changed = replace(batch, edge_categories=other)
                assert not torch.allclose(model(changed), before), (etype, name)


SCHEMA = replace(
    sampled.HETEROGENEOUS,
    edge_features=dict.fromkeys(sampled.TYPED[:2], EDGE),
    edge_categories={e: {"sort": (4, 2)} for e in sampled.TYPED[1:]},
)


def with_edges(block: Block) -> Block:
    """Return the block with random edge features and categories, fp64."""
    adj = dict(block.adj)
    for etype, one in block.adj.items():
        rows = torch.randn(len(one.src), EDGE, dtype=torch.float64)
        sort = {"sort": torch.randint(0, 4, (len(one.src),))}
        adj[etype] = replace(
            one,
            rows=rows if etype in SCHEMA.edge_features else None,
            categories=sort if etype in SCHEMA.edge_categories else {},
        )
    return replace(block, adj=adj)


class TestBlocks:
    @EVERY
    def test_kernels_give_the_same_network(self, family: dict[str, Any]) -> None:
        blocks = [with_edges(block) for block in sampled.random_blocks(SCHEMA, 2)]
        x, degree = sampled.random_inputs(SCHEMA, blocks)
        one, other = (
            sampled.outcome(on_kernels(kernels, model.double()), blocks, x, degree)
            for kernels in (NATIVE, SCATTER)
            for model in [sampled.network({**family, **EDGES}, SCHEMA)]
        )
        sampled.same(one, other, 1e-10)

    @EVERY
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bfloat16(self, family: dict[str, Any], dtype: torch.dtype) -> None:
        """bf16-mixed and bf16 weights: near fp64, in the outputs' own size."""
        blocks = [with_edges(block) for block in sampled.random_blocks(SCHEMA, 2)]
        x, degree = sampled.random_inputs(SCHEMA, blocks)
        exact = sampled.network({**family, **EDGES}, SCHEMA).double()(blocks, x, degree)
        model = sampled.network({**family, **EDGES}, SCHEMA).to(dtype)
        for block in blocks:
            for etype, adj in block.adj.items():
                if adj.rows is not None:
                    block.adj[etype] = adj.with_rows(adj.rows.to(dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            narrow = {t: rows.to(dtype) for t, rows in x.items()}
            found = sampled.outcome(model, blocks, narrow, degree)
        assert (found["outputs"].double() - exact).abs().max() / exact.abs().max() < 0.04

    @pytest.mark.parametrize("aggregator", ["mean", "sum", "max"])
    @pytest.mark.parametrize("layers", [1, 2])
    def test_sources_may_be_combined_before(self, aggregator: Reduce, layers: int) -> None:
        first, *others = [with_edges(block) for block in sampled.random_blocks(SCHEMA, layers)]
        x, degree = sampled.random_inputs(SCHEMA, [first, *others])
        family = {"kind": "sage", "aggregator": aggregator, **EDGES}
        model = sampled.network(family, SCHEMA, layers=layers).double()
        exact = sampled.outcome(model, [first, *others], x, degree)
        model.zero_grad()
        assert model.first_combine == aggregator
        combined = sampled.combine(aggregator, first, x, degree)
        bare = {e: replace(a, src=a.src[:0]) for e, a in first.adj.items()}
        found = sampled.outcome(
            model,
            [Block(bare, first.num_dst, first.num_dst), *others],
            {t: v[: first.num_dst[t]] for t, v in x.items()},
            {e: v[: first.num_dst[e[2]]] for e, v in degree.items()},
            combined,
        )
        sampled.same(exact, found, 1e-10)

    def test_of_gin_sources_cannot_be_combined_before(self) -> None:
        assert sampled.network({"kind": "gin", **EDGES}, SCHEMA).first_combine is None

    @EVERY
    def test_without_them_nothing_is_there(self, family: dict[str, Any]) -> None:
        """No parameter and no effect exists, even if blocks carry features."""
        model = sampled.network(family, sampled.HETEROGENEOUS).double()
        assert not any("edge" in name for name in model.state_dict())
        blocks = sampled.random_blocks(SCHEMA, 2)
        x, degree = sampled.random_inputs(SCHEMA, blocks)
        exact = sampled.outcome(model, blocks, x, degree)
        model.zero_grad()
        carrying = sampled.outcome(model, [with_edges(b) for b in blocks], x, degree)
        sampled.same(exact, carrying, 0.0)


def test_time_is_encoded_alike_in_any_units() -> None:
    """Units shift the phase, and a training step changes the encoding only a little."""
    encoding = TimeEncoding(8)
    seconds = torch.logspace(3, 9, 50, dtype=torch.float64).long()
    with torch.no_grad():
        expected = encoding(seconds)
        assert expected.shape == (50, 8)
        assert expected.std(0).min() > 0.05  # each tells times apart
        encoding.rate += 0.001
        encoding.phase += 0.001
        assert (encoding(seconds) - expected).abs().max() < 0.03
        encoding.rate -= 0.001
        encoding.phase -= 0.001 + encoding.rate * math.log(1e6)
        torch.testing.assert_close(encoding(seconds * 10**6), expected, atol=0.01, rtol=0)
