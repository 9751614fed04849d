"""Networks for whole graphs: as a loop over single graphs, as dense algebra, for odd batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.model import read_model
from raygnn.config.rules import contradictions
from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from raygnn.graph.collection.mapped_collection import Sample
from raygnn.graph.dgl import dgl
from raygnn.models.message_passing import NATIVE, SCATTER
from raygnn.models.network import GraphNetwork, GraphSchema, members, pool
from raygnn.models.registry import build_graph_model
from raygnn.sampling.batch import GraphBatch
from tests.support.whole_graphs import (
    ATOM,
    CATEGORICAL,
    PLAIN,
    RING,
    TYPED,
    as_dgl,
    batch_of,
    on_kernels,
    permuted,
    random_sample,
)

FAMILIES: list[dict[str, Any]] = [
    {"kind": "gcn", "residual": True, "norm": "layer"},
    {"kind": "sage", "norm": "batch"},
    {"kind": "sage", "aggregator": "max", "readout": "sum"},
    {"kind": "gat", "heads": 2, "readout": "max"},
    {"kind": "gatv2", "heads": 2, "residual": True},
    {"kind": "gin"},
    {"kind": "gin", "norm": "batch", "readout": "max"},
    {"kind": "gin", "columns": "learned"},
]
names = {"ids": lambda f: "-".join(map(str, f.values()))}
DTYPES = [torch.float32, torch.bfloat16]


def network(family: dict[str, Any], schema: GraphSchema, **other: Any) -> GraphNetwork:
    torch.manual_seed(1)
    settings = {"hidden": 8, "layers": 2, "dropout": 0.0, **family, **other}
    model = build_graph_model(read_model(**settings), schema)
    assert isinstance(model, GraphNetwork)
    return model


def samples_of(schema: GraphSchema) -> list[Sample]:
    """Return samples of several sizes, some without edges or nodes; the last one has no nodes."""
    shapes = [(6, None), (0, None), (1, 0), (9, 30), (1, 2), (4, 0), (0, None)]
    return [random_sample(schema, i, n, edges) for i, (n, edges) in enumerate(shapes)]


def same(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=[PLAIN, TYPED, CATEGORICAL], ids=["one type", "typed", "categories"])
def schema(request: pytest.FixtureRequest) -> GraphSchema:
    return request.param


class TestBatching:
    @pytest.mark.parametrize("family", FAMILIES, **names)
    def test_a_batch_is_its_graphs_one_by_one(
        self, schema: GraphSchema, family: dict[str, Any]
    ) -> None:
        model = network(family, schema, layers=3).eval()
        samples = samples_of(schema)
        together = model(batch_of(schema, samples))
        assert together.shape == (len(samples), 3)
        same(together, torch.cat([model(batch_of(schema, [sample])) for sample in samples]))

    @pytest.mark.parametrize("family", FAMILIES, **names)
    def test_gradients_add_up(self, schema: GraphSchema, family: dict[str, Any]) -> None:
        model = network(family, schema).double().eval()
        samples = samples_of(schema)
        model(batch_of(schema, samples, torch.float64)).square().sum().backward()
        together = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        for sample in samples:
            model(batch_of(schema, [sample], torch.float64)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            same(parameter.grad, together[name], 1e-10)

    @pytest.mark.parametrize("family", FAMILIES, **names)
    def test_the_order_of_nodes_and_edges_does_not_matter(
        self, schema: GraphSchema, family: dict[str, Any]
    ) -> None:
        model = network(family, schema).train()  # batch normalisation over the same rows, too
        samples = samples_of(schema)
        others = [permuted(sample, number) for number, sample in enumerate(samples)]
        same(model(batch_of(schema, samples)), model(batch_of(schema, others)))

    def test_the_order_of_graphs_is_kept(self, schema: GraphSchema) -> None:
        model = network({"kind": "gin"}, schema)
        samples = samples_of(schema)
        same(model(batch_of(schema, samples)).flip(0), model(batch_of(schema, samples[::-1])))

    @pytest.mark.parametrize("family", FAMILIES, **names)
    def test_kernels_give_the_same(self, schema: GraphSchema, family: dict[str, Any]) -> None:
        batch = batch_of(schema, samples_of(schema), torch.float64)
        found = []
        for kernels in (NATIVE, SCATTER):
            model = on_kernels(kernels, network(family, schema).double())
            out = model(batch)
            out.square().sum().backward()
            found.append([out.detach(), *(p.grad for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            same(one, other, 1e-10)


def dense_layer(family: dict[str, Any], layer: nn.Module, a: Tensor, h: Tensor) -> Tensor:
    """Compute a layer from its definition; ``a [N, N]`` counts the edges to a row from a column."""
    (conv,) = layer.convs.values()
    (bias,) = list(layer.bias.values()) or [torch.zeros(())]
    degree, eye = a.sum(1), torch.eye(len(a))
    if family["kind"] == "gcn":
        root = torch.diag((degree + 1).rsqrt())
        return root @ (a + eye) @ root @ h @ conv.weight.T + bias
    if family["kind"] == "sage":
        (own,) = layer.own.values()
        mean = a / degree.clamp(min=1)[:, None]
        return h @ own.weight.T + mean @ h @ conv.weight.T + bias
    if family["kind"] == "gin":
        (rest,) = layer.rest.values()
        inner = ((1 + conv.eps) * h + a @ h) @ conv.weight.T + bias
        return rest.second(F.relu(inner))
    heads = []
    src = conv.src(h).view(len(h), conv.heads, -1)
    dst = src if conv.dst is None else conv.dst(h).view(len(h), conv.heads, -1)
    for head in range(conv.heads):
        if conv.dynamic:
            joint = F.leaky_relu(dst[:, None, head] + src[None, :, head], 0.2)
            score = joint @ conv.attn_src[head]
        else:
            own, other = dst[:, head] @ conv.attn_dst[head], src[:, head] @ conv.attn_src[head]
            score = F.leaky_relu(own[:, None] + other[None, :], 0.2)
        weight = (a + eye) * score.exp()
        heads.append(weight / weight.sum(1, keepdim=True) @ src[:, head])
    return torch.cat(heads, 1) + conv.bias


class TestDense:
    @pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
    @pytest.mark.parametrize("readout", ["sum", "mean", "max", None])
    def test_one_graph(self, kind: str, readout: str | None) -> None:
        sample = random_sample(PLAIN, 3, 7, 15)
        heads = {"heads": 2} if kind.startswith("gat") else {}
        model = network({"kind": kind}, PLAIN, **heads, readout=readout)
        with torch.no_grad():  # parameters of 0 would hide a missing term
            for name, parameter in model.named_parameters():
                if "bias" in name or "eps" in name:
                    parameter.copy_(torch.randn(parameter.shape))
        batch = batch_of(PLAIN, [sample])
        batch.x["_N"].requires_grad_()
        src, dst = sample.edges["_N", "_E", "_N"]
        a = torch.zeros(7, 7).index_put((dst, src), torch.ones(15), accumulate=True)
        act = F.elu if kind in ("gat", "gatv2") else F.relu
        by = readout or ("sum" if kind == "gin" else "mean")
        reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[by]
        h = batch.x["_N"]
        rows = [reduce(h, 0)]
        for layer in model.layers:
            h = act(dense_layer({"kind": kind}, layer, a, h))
            rows.append(reduce(h, 0))
        # Linear_k of each pooled layer, added up
        columns = model.readout.weight.split([5, 8, 8], dim=1)
        expected = sum(w @ row for w, row in zip(columns, rows, strict=True)) + model.readout.bias
        found = model(batch)[0]
        same(found, expected)
        leaves = [batch.x["_N"], *model.parameters()]
        mine = torch.autograd.grad(found.square().sum(), leaves, retain_graph=True)
        dense = torch.autograd.grad(expected.square().sum(), leaves)
        for one, other in zip(mine, dense, strict=True):
            same(one, other, 1e-4)

    def test_each_node_type_has_rows_of_its_own(self) -> None:
        model = network({"kind": "sage"}, TYPED, layers=1, readout="sum")
        batch = batch_of(TYPED, [random_sample(TYPED, 0, {ATOM: 4, RING: 3})])
        degree = {e: a.degree for e, a in batch.block.adj.items()}
        h = model.layer(0, batch.block, batch.x, degree)
        rows = [batch.x[ATOM], batch.x[RING], h[ATOM], h[RING]]
        same(model(batch), model.readout(torch.cat([r.sum(0) for r in rows])[None]))


# what may be in a batch: node and edge numbers of its graphs
ODD = {
    "no nodes at all": [(0, None), (0, None)],
    "one graph, no nodes": [(0, None)],
    "one node": [(1, 0)],
    "one node each": [(1, 0), (1, 3), (0, None)],
    "no edges": [(4, 0), (2, 0)],
    "a usual one": [(6, None), (3, None)],
}


class TestOddBatches:
    @pytest.mark.parametrize("family", FAMILIES, **names)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_parameter_gets_a_gradient(
        self, schema: GraphSchema, family: dict[str, Any], dtype: torch.dtype
    ) -> None:
        model = network(family, schema, dropout=0.5).to(dtype).train()
        for what, shapes in ODD.items():
            samples = [random_sample(schema, i, n, edges) for i, (n, edges) in enumerate(shapes)]
            check(model, batch_of(schema, samples, dtype), what)

    @pytest.mark.parametrize("family", FAMILIES, **names)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_node_type_without_nodes(self, family: dict[str, Any], dtype: torch.dtype) -> None:
        model = network(family, TYPED, dropout=0.5).to(dtype).train()
        for missing in (ATOM, RING):
            counts = {ATOM: 5, RING: 3, missing: 0}
            samples = [random_sample(TYPED, i, counts) for i in range(2)]
            check(model, batch_of(TYPED, samples, dtype), f"no {missing}")

    @pytest.mark.parametrize("norm", ["none", "batch", "layer"])
    def test_it_trains_on_after_an_empty_batch(self, norm: str) -> None:
        model = network({"kind": "gin", "norm": norm}, PLAIN).train()
        model(batch_of(PLAIN, [random_sample(PLAIN, 0, 0)]))
        model(batch_of(PLAIN, [random_sample(PLAIN, 0, 1)]))
        assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
        out = model.eval()(batch_of(PLAIN, [random_sample(PLAIN, 0, 4)]))
        assert torch.isfinite(out).all()


def check(model: nn.Module, batch: GraphBatch, what: str) -> None:
    model.zero_grad(set_to_none=True)
    out = model(batch)
    assert out.dtype == next(model.parameters()).dtype, what
    assert torch.isfinite(out).all(), what
    out.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, (what, name)
        assert torch.isfinite(parameter.grad).all(), (what, name)


class TestPool:
    @pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
    @pytest.mark.parametrize("kernels", [NATIVE, SCATTER])
    @pytest.mark.parametrize("sizes", [[3, 0, 1, 7, 0], [0], [0, 0], [1], [5]])
    def test_is_a_loop_over_graphs(self, sizes: list[int], kernels: Any, reduce: Any) -> None:
        torch.manual_seed(0)
        h = torch.randn(sum(sizes), 4, requires_grad=True)
        how = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[reduce]
        parts = [how(p, 0) if len(p) else 0 * p.sum(0) for p in h.split(sizes)]
        expected, found = (
            torch.stack(parts),
            pool(members(torch.tensor(sizes), len(h)), h, reduce, kernels),
        )
        same(found, expected)
        upstream = torch.randn(expected.shape)
        (mine,) = torch.autograd.grad(found, h, upstream)
        (other,) = torch.autograd.grad(expected, h, upstream)
        same(mine, other)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_added_up_in_full(self, dtype: torch.dtype) -> None:
        h = torch.full((100_001, 3), 1.5, dtype=dtype, requires_grad=True)
        graphs = members(torch.tensor([100_000, 1]), 100_001)
        total = pool(graphs, h, "sum")
        assert total.dtype == torch.float32
        assert total[:, 0].tolist() == [150_000, 1.5]
        assert pool(graphs, h, "mean")[0].tolist() == [1.5] * 3
        total.sum().backward()
        assert h.grad is not None
        assert h.grad.dtype == dtype
        assert (h.grad == 1).all()

    def test_the_readout_of_a_large_graph_stays_in_full(self) -> None:
        """Mixed precision does not round the fp32 sums of pooling."""
        model = network({"kind": "gin"}, PLAIN).eval()
        batch = batch_of(PLAIN, [random_sample(PLAIN, 0, 2000, 0)])
        batch.x["_N"] = batch.x["_N"] * 0 + 1.0
        with torch.no_grad():
            model.readout.weight.zero_()
            model.readout.weight[:, :5] = 1.0
            model.readout.bias.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch)
            out.sum().backward()
        assert out.dtype == torch.float32
        assert out[0].tolist() == [10_000.0] * 3


class TestSettings:
    def test_pooling_follows_the_kind(self) -> None:
        def of(**other: Any) -> str:
            return network(other, PLAIN).pooling

        assert [of(kind=k) for k in ("gcn", "sage", "gat", "gatv2", "gin")] == [
            *["mean"] * 4,
            "sum",
        ]
        assert of(kind="gin", readout="mean") == "mean"
        assert of(kind="gcn", readout="max") == "max"

    def test_dropout(self) -> None:
        batch = batch_of(PLAIN, samples_of(PLAIN))

        def varies(**dropout: float) -> bool:
            model = network({"kind": "gin"}, PLAIN, layers=1, **dropout).train()
            return not torch.equal(model(batch), model(batch))

        def varies_in_hidden(**dropout: float) -> bool:
            model = network({"kind": "gin"}, PLAIN, layers=1, **dropout).train()
            degree = {e: a.degree for e, a in batch.block.adj.items()}
            first, second = (model.layer(0, batch.block, batch.x, degree)["_N"] for _ in range(2))
            return not torch.equal(first, second)

        assert not varies(dropout=0.0)
        assert varies(dropout=0.5, input_dropout=0.0)  # of the pooled rows
        assert not varies_in_hidden(dropout=0.5, input_dropout=0.0)
        assert varies(dropout=0.0, input_dropout=0.5)
        assert varies_in_hidden(dropout=0.0, input_dropout=0.5)

    def test_every_layer_is_a_hidden_one(self) -> None:
        model = network({"kind": "gat", "heads": 4, "norm": "layer"}, TYPED, layers=3)
        assert len(model.norms) == 3
        widths = {layer.width for layer in model.layers}
        assert widths == {8}
        assert {conv.heads for layer in model.layers for conv in layer.convs.values()} == {4}
        assert model.readout.in_features == 5 + 2 + 3 * (8 + 8)

    @pytest.mark.parametrize(
        ("model", "task", "key"),
        [
            ({"kind": "gin", "readout": "max"}, "graph_classification", None),
            ({"kind": "gcn", "readout": "mean"}, "graph_regression", None),
            ({"kind": "gin", "readout": "max"}, "node_classification", "readout"),
            ({"kind": "gin"}, "node_classification", None),
            ({"kind": "gat", "out_heads": 2}, "graph_classification", "out_heads"),
            ({"kind": "gat", "out_heads": 2}, "node_classification", None),
            (
                {
                    "kind": "gin",
                    "hidden": 5,
                    "dropout": 0.1,
                    "input_dropout": 0.2,
                    "categories": {"kind": 3},
                    "residual": True,
                    "norm": "batch",
                    "activation": "elu",
                },
                "node_classification",
                None,
            ),
        ],
    )
    def test_keys_that_would_be_ignored(
        self, model: dict[str, Any], task: str, key: str | None
    ) -> None:
        job = {
            "name": "a",
            "graph": {"format": "graphs", "path": "a.bin"},
            "model": model,
            "task": {"kind": task},
        }
        problems = contradictions(Config.model_validate(job))
        found = [problem.key for problem in problems if problem.key[0] == "model"]
        assert found == ([] if key is None else [("model", key)])


def graph_of(schema: GraphSchema) -> Any:
    return dgl().batch([as_dgl(sample) for sample in samples_of(schema)])


class TestDGL:
    @pytest.mark.dgl
    @pytest.mark.parametrize("schema", [PLAIN, TYPED], ids=["one type", "typed"])
    def test_a_batch_is_dgls(self, schema: GraphSchema) -> None:
        samples = samples_of(schema)
        found, expected = batch_of(schema, samples).to_dgl(), graph_of(schema)
        assert found.batch_size == expected.batch_size == len(samples)
        assert found.ntypes == expected.ntypes
        assert sorted(found.canonical_etypes) == sorted(expected.canonical_etypes)
        assert found.idtype == expected.idtype
        for ntype in expected.ntypes:
            assert torch.equal(found.batch_num_nodes(ntype), expected.batch_num_nodes(ntype))
            assert found.nodes[ntype].data.keys() == expected.nodes[ntype].data.keys() == {"x"}
            assert torch.equal(found.nodes[ntype].data["x"], expected.nodes[ntype].data["x"])
        for etype in expected.canonical_etypes:
            assert torch.equal(found.batch_num_edges(etype), expected.batch_num_edges(etype))
            for one, other in zip(found.edges(etype=etype), expected.edges(etype=etype)):
                assert torch.equal(one, other)
            assert found.edges[etype].data.keys() == expected.edges[etype].data.keys() == {"w"}
            assert torch.equal(found.edges[etype].data["w"], expected.edges[etype].data["w"])
        assert len(dgl().unbatch(found)) == len(samples)


class Molecules(nn.Module):
    """A user's model with dgl.nn layers, edge data and a readout by the batch's sizes."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8):
        super().__init__()
        self.conv = dgl().nn.GINConv(nn.Linear(in_features, hidden), "sum", learn_eps=True)
        self.pool = dgl().nn.SumPooling()
        self.out = nn.Linear(hidden, out_features)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        assert torch.equal(graph.ndata["x"], x)
        return self.out(self.pool(graph, self.conv(graph, x, edge_weight=graph.edata["w"])))


class TypedMolecules(nn.Module):
    def __init__(self, in_features: dict[str, int], out_features: int):
        super().__init__()
        make = dgl().nn.GraphConv
        self.first = dgl().nn.HeteroGraphConv(
            {
                name: make(in_features[source], 8, allow_zero_in_degree=True)
                for source, name, _ in TYPED.etypes
            }
        )
        self.out = nn.Linear(8, out_features)

    def forward(self, graph: Any, x: dict[str, Tensor]) -> Tensor:
        with graph.local_scope():
            graph.nodes[ATOM].data["h"] = self.first(graph, x)[ATOM]
            return self.out(dgl().sum_nodes(graph, "h", ntype=ATOM))


class TestUsersClass:
    @pytest.mark.dgl
    @pytest.mark.parametrize("name", ["Molecules", "TypedMolecules"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_is_given_the_batched_graph(self, name: str, dtype: torch.dtype) -> None:
        schema = PLAIN if name == "Molecules" else TYPED
        config = read_model(kind=f"{__name__}:{name}")
        model = build_graph_model(config, schema).to(dtype)
        samples = samples_of(schema)
        out = model(batch_of(schema, samples, dtype))
        assert out.dtype == dtype
        rows = []
        for sample in samples:
            graph = as_dgl(sample, dtype)
            x = (
                graph.ndata["x"]
                if schema is PLAIN
                else {t: graph.nodes[t].data["x"] for t in (ATOM, RING)}
            )
            rows.append(model.module(graph, x))
        same(out, torch.cat(rows))
        out.sum().backward()  # atoms do not depend on the rings' inputs
        assert all(p.grad is not None for n, p in model.named_parameters() if ".in." not in n)

    @pytest.mark.dgl
    def test_arguments(self) -> None:
        config = read_model(kind=f"{__name__}:Molecules", args={"hidden": 3})
        model = build_graph_model(config, PLAIN)
        assert model.module.out.in_features == 3

    @pytest.mark.parametrize(
        ("kind", "args", "schema", "where", "text"),
        [
            ("Molecules", {"depth": 3}, PLAIN, "model.args", "in_features, out_features"),
            ("Molecule", {}, PLAIN, "model.kind", "importable on every node"),
            ("as_dgl", {}, PLAIN, "model.kind", "torch.nn.Module"),
            ("TypedMolecules", {}, CATEGORICAL, "model.categories", "gin"),
        ],
    )
    def test_models_that_cannot_be_built(
        self, kind: str, args: dict[str, Any], schema: GraphSchema, where: str, text: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            build_graph_model(read_model(kind=f"{__name__}:{kind}", args=args), schema)
        assert caught.value.where == where
        assert text in str(caught.value)
