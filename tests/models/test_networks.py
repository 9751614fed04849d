"""Whole networks: in every precision, from combined inputs, with categories."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raygnn.config.model import read_model
from raygnn.errors import ConfigError
from raygnn.models import linear as linear_module
from raygnn.models.convolutions import GCNConv, GINConv, SAGEConv
from raygnn.models.linear import Dropout
from raygnn.models.message_passing import NATIVE, SCATTER
from raygnn.models.network import Network, Schema
from raygnn.models.norm import norm
from raygnn.models.registry import build_model
from raygnn.sampling.batch import Adjacency, Block, EdgeType
from tests.support.whole_graphs import on_kernels

# node types are named so that they would clash with attributes of torch's containers
ITEM, USER, TAG = "items", "pop.ular", "type"
TYPED: list[EdgeType] = [
    (ITEM, "also", ITEM),
    (USER, "buys", ITEM),
    (ITEM, "bought_by", USER),
    (ITEM, "has", TAG),  # leads nowhere: no item depends on a tag
]
WIDTHS = {ITEM: 6, USER: 3, TAG: 2}
HOMOGENEOUS = Schema({"_N": 6}, [("_N", "_E", "_N")], 4, target="_N")
HETEROGENEOUS = Schema(WIDTHS, TYPED, 4, target=ITEM)

FAMILIES = [
    {"kind": "gcn"},
    {"kind": "gcn", "hidden": 3, "residual": True},
    {"kind": "sage"},
    {"kind": "sage", "aggregator": "sum", "norm": "layer"},
    {"kind": "sage", "aggregator": "max", "residual": True, "hidden": 6},
    {"kind": "gat", "heads": 2},
    {"kind": "gatv2", "heads": 2, "norm": "batch"},
    {"kind": "gin", "hidden": 3},
    {"kind": "gin", "norm": "batch", "residual": True, "hidden": 6},
    {"kind": "gin", "norm": "layer", "activation": "elu"},
    {"kind": "rgcn", "bases": 3},
    {"kind": "rgcn", "regularizer": "block", "bases": 3, "norm": "layer", "residual": True},
    {"kind": "rgcn", "regularizer": "none", "mean_over": "all"},
    {"kind": "hgt", "heads": 2},
    {"kind": "hgt", "heads": 4, "norm": "batch", "residual": True},
    {"kind": "han", "heads": 2},
    {"kind": "sage", "columns": "learned", "residual": True},
]
LINEAR = [f for f in FAMILIES[:-1] if f["kind"] in ("gcn", "sage", "gin")]
names = {"ids": lambda f: "-".join(map(str, f.values()))}


def random_blocks(schema: Schema, layers: int, fewest: int = 0) -> list[Block]:
    """Build blocks with isolated destinations (unless ``fewest`` is 1), self-loops, multi-edges and
    an empty edge type."""
    torch.manual_seed(5)
    sizes = {t: 7 if t == schema.target else 0 for t in schema.in_features}
    blocks: list[Block] = []
    for _ in range(layers):
        wider = {t: n + 9 for t, n in sizes.items()}
        adj = {}
        for number, etype in enumerate(schema.etypes):
            degree = torch.randint(0, 5, (sizes[etype[2]],))
            degree[:2] = 0 if number == 0 else 5
            degree.clamp_(min=fewest)
            if number == 3:
                degree[:] = 0
            indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
            adj[etype] = Adjacency(indptr, torch.randint(0, wider[etype[0]], (int(indptr[-1]),)))
        blocks.insert(0, Block(adj, wider, sizes))
        sizes = wider
    return blocks


def random_inputs(schema: Schema, blocks: list[Block]) -> tuple[dict, dict]:
    """Return ``(x, degree)`` in fp64."""
    counts = blocks[0].num_src
    x = {t: torch.randn(counts[t], w, dtype=torch.float64) for t, w in schema.in_features.items()}
    degree = {e: torch.randint(5, 40, (counts[e[2]],), dtype=torch.int32) for e in schema.etypes}
    return x, degree


def network(family: dict, schema: Schema, **other) -> Network:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    settings = {"hidden": 8, "layers": 2, "dropout": 0.0, **family, **other}
    model = build_model(read_model(**settings), schema)
    assert isinstance(model, Network)
    return model


def outcome(model: nn.Module, *inputs) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Return the output and every parameter's gradient, none of which may be missing."""
    out = model(*inputs)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape, dtype=torch.float64).to(out.dtype))
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
    return {"outputs": out.detach(), **gradients}


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value.double(),
            other[name].double(),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(params=[HOMOGENEOUS, HETEROGENEOUS], ids=["one type", "typed"])
def schema(request: pytest.FixtureRequest) -> Schema:
    return request.param


@pytest.mark.parametrize("kind", ["gcn", "typed gcn", "sage", "sage with edges", "gin"])
@pytest.mark.parametrize("projected", [False, True])
def test_a_sum_over_sampled_neighbours_has_the_full_one_as_its_mean(
    kind: str, projected: bool
) -> None:
    """The mean is over all samples of two of a node's five neighbours, and of three of another's
    three."""
    torch.manual_seed(0)
    conv = {
        "gcn": lambda: GCNConv(4, 3, same_type=True),
        "typed gcn": lambda: GCNConv(4, 3, same_type=False),
        "sage": lambda: SAGEConv(4, 3, reduce="sum"),
        "sage with edges": lambda: SAGEConv(4, 3, edges=2, reduce="sum"),
        "gin": lambda: GINConv(4, 3, same_type=True),
    }[kind]().double()
    x, degree = torch.randn(10, 4).double(), torch.tensor([5, 3, *range(1, 9)])
    edges = torch.randn(8, 2).double() if "edges" in kind else None

    def output(drawn: Sequence[int]) -> Tensor:
        chosen = torch.tensor([*drawn, 5, 6, 7])
        indptr = torch.tensor([0, len(drawn), len(drawn) + 3])
        adj = Adjacency(indptr, chosen + 2, None, None if edges is None else edges[chosen])
        if projected:
            return conv.of_projected(adj, conv.project(x), degree)
        return conv.finish(conv.combine(adj, x, degree), adj, x[:2], degree) @ conv.weight.T

    draws = [output(drawn) for drawn in itertools.combinations(range(5), 2)]
    torch.testing.assert_close(torch.stack(draws).mean(0), output(range(5)))


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin", "rgcn", "hgt", "han"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_bias_that_batch_norm_subtracts_is_left_out(
    schema: Schema, kind: str, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training without the bias is the same."""
    options: dict = {"norm": "batch", "residual": residual, "layers": 3}
    with monkeypatch.context() as patched:
        for module in ("network", "typed_layers"):
            patched.setattr(f"raygnn.models.{module}.drop_biases", lambda *_: None)
        old = network({"kind": kind}, schema, **options).double()
    for value in (*old.parameters(), *old.buffers()):
        if value.is_floating_point():
            nn.init.uniform_(value, 0.5, 1.5)
    model = network({"kind": kind}, schema, **options).double()
    kept = model.state_dict().keys()
    model.load_state_dict({k: value for k, value in old.state_dict().items() if k in kept})
    removed = old.state_dict().keys() - kept
    weighted = kind == "han" and schema is HETEROGENEOUS  # node by node, so that none cancels
    assert weighted or any("layers.0" in name for name in removed)
    assert all("bias" in name for name in removed)
    if kind == "hgt" and schema is HOMOGENEOUS:
        assert {"layers.0.values.:_N.bias", "layers.1.values.:_N.bias"} < removed
    assert not any(name.startswith("layers.2.values") for name in removed)
    assert "layers.2.rest.:_N.second.bias" not in removed  # of outputs, which nothing normalises
    blocks = random_blocks(schema, 3, fewest=kind == "hgt")  # nodes without edges have no values
    inputs = blocks, *random_inputs(schema, blocks)
    torch.testing.assert_close(model(*inputs), old(*inputs), atol=1e-9, rtol=1e-9)
    old(*inputs).square().sum().backward()
    for name, parameter in old.named_parameters():
        if name in removed:  # only rounding errors remain
            assert parameter.grad is not None
            assert parameter.grad.abs().max() < 1e-6, name


@pytest.mark.parametrize("family", FAMILIES, **names)
def test_kernels_give_the_same_network(schema: Schema, family: dict) -> None:
    blocks = random_blocks(schema, 2)
    inputs = random_inputs(schema, blocks)
    one, other = (
        outcome(on_kernels(kernels, network(family, schema).double()), blocks, *inputs)
        for kernels in (NATIVE, SCATTER)
    )
    same(one, other, 1e-10)


@pytest.mark.parametrize("family", FAMILIES, **names)
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(schema: Schema, family: dict, autocast: bool) -> None:
    """bf16-mixed and bf16 weights: near fp64, in the outputs' own size."""
    blocks = random_blocks(schema, 2)
    x, degree = random_inputs(schema, blocks)
    exact = network(family, schema).double()(blocks, x, degree)
    dtype = torch.float32 if autocast else torch.bfloat16
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    model = network(family, schema).to(dtype)
    with context:
        found = outcome(model, blocks, {t: v.to(dtype) for t, v in x.items()}, degree)
    error = (found["outputs"].double() - exact).abs().max() / exact.abs().max()
    assert error < 0.04
    assert {g.dtype for g in found.values()} <= {dtype, torch.bfloat16}


def combine(how: str, block: Block, x: dict, degree: dict) -> dict[EdgeType, Tensor]:
    """Compute the aggregates that the data plane provides, edge by edge from the definition."""
    out = {}
    for (source, name, target), adj in block.adj.items():
        rows = torch.zeros(len(adj.degree), x[source].shape[1], dtype=x[source].dtype)
        weight = torch.ones(len(x[source]), dtype=x[source].dtype)
        if how == "gcn" and source == target:
            weight = 1 / (degree[source, name, target].to(weight.dtype) + 1).sqrt()
        for d in range(len(rows)):
            src = adj.src[adj.indptr[d] : adj.indptr[d + 1]]
            if len(src):
                messages = x[source][src] * weight[src].unsqueeze(1)
                reduce = {"mean": torch.mean, "max": torch.amax}.get(how, torch.sum)
                rows[d] = reduce(messages, 0)
        out[source, name, target] = rows
    return out


@pytest.mark.parametrize("family", LINEAR, **names)
@pytest.mark.parametrize("layers", [1, 2])
def test_combined_inputs_give_the_same(schema: Schema, family: dict, layers: int) -> None:
    blocks = random_blocks(schema, layers)
    x, degree = random_inputs(schema, blocks)
    model = network(family, schema, layers=layers).double()
    exact = outcome(model, blocks, x, degree)
    model.zero_grad()
    assert model.first_combine is not None
    first = blocks[0]
    combined = combine(model.first_combine, first, x, degree)
    bare = {e: Adjacency(a.indptr, a.src[:0]) for e, a in first.adj.items()}
    found = outcome(
        model,
        [Block(bare, first.num_dst, first.num_dst), *blocks[1:]],
        {t: v[: first.num_dst[t]] for t, v in x.items()},
        {e: v[: first.num_dst[e[2]]] for e, v in degree.items()},
        combined,
    )
    same(exact, found, 1e-10)


def test_first_combine() -> None:
    def of(**other) -> str | None:  # type: ignore[no-untyped-def]
        return network(other, HOMOGENEOUS).first_combine

    assert of(kind="gcn") == "gcn"
    assert [of(kind="sage", aggregator=a) for a in ("mean", "sum", "max")] == ["mean", "sum", "max"]
    assert of(kind="gin") == "sum"
    assert of(kind="gat", heads=2) is None
    assert of(kind="gatv2", heads=2) is None
    assert of(kind="sage", columns="learned") is None
    # what is dropped of a source is another share for each of its edges' batches
    assert of(kind="sage", dropout=0.5) is None
    assert of(kind="sage", input_dropout=0.1) is None
    assert of(kind="sage", dropout=0.5, input_dropout=0.0) == "mean"
    model = network({"kind": "sage"}, HOMOGENEOUS, dropout=0.5)
    assert model.eval().first_combine == "mean"


def test_dropout_of_inputs_and_of_hidden_layers_differ() -> None:
    blocks = random_blocks(HOMOGENEOUS, 2)
    x, degree = random_inputs(HOMOGENEOUS, blocks)

    def varies(**dropout: float) -> bool:
        model = network({"kind": "sage"}, HOMOGENEOUS, layers=1, **dropout).double()
        first, second = (model(blocks[:1], x, degree) for _ in range(2))
        return not torch.equal(first, second)

    assert not varies(dropout=0.5, input_dropout=0.0)  # one layer: nothing hidden
    assert varies(dropout=0.0, input_dropout=0.5)
    assert varies(dropout=0.5)


class TestDropout:
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
    def test_keeps_the_mean(self, p: float) -> None:
        torch.manual_seed(0)
        layer = Dropout(p)
        out = layer(torch.ones(1001, 999))
        kept = out != 0
        assert kept.double().mean() == pytest.approx(1 - p, abs=3e-3)
        assert out[kept].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-2)
        # neither neighbours nor the four lanes of a random word are alike
        together = (kept[:, 1:] & kept[:, :-1]).double().mean()
        assert together == pytest.approx((1 - p) ** 2, abs=3e-3)
        lanes = kept.flatten()[: 4 * 10**5].view(-1, 4).double().mean(0)
        assert lanes.tolist() == pytest.approx([1 - p] * 4, abs=5e-3)

    def test_gradient_goes_where_the_value_went(self) -> None:
        x = torch.randn(13, 7, requires_grad=True)
        out = Dropout(0.5)(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, torch.where(out == 0, 0.0, 2.0))

    def test_follows_the_seed(self) -> None:
        x = torch.ones(50)
        torch.manual_seed(1)
        first, second = Dropout(0.5)(x), Dropout(0.5)(x)
        torch.manual_seed(1)
        assert torch.equal(Dropout(0.5)(x), first)
        assert not torch.equal(first, second)

    def test_idle(self) -> None:
        x = torch.ones(3, 0)
        assert Dropout(0.5)(x).shape == (3, 0)
        assert Dropout(0.0)(x) is x
        assert Dropout(0.5).eval()(x) is x


CATEGORICAL = Schema(
    {ITEM: 6, USER: 0, TAG: 2},
    TYPED,
    4,
    {ITEM: {"brand": (5, 3)}, USER: {"keys": (4, 2), "a.b": (3, 2)}, TAG: {"n": (2, 2)}},
    target=ITEM,
)


class TestCategories:
    def numbers(self, counts: dict[str, int]) -> dict[str, dict[str, Tensor]]:
        torch.manual_seed(7)
        return {
            t: {
                n: torch.randint(0, count, (counts[t],))
                for n, (count, _) in reversed(named.items())
            }
            for t, named in CATEGORICAL.categories.items()
        }

    @pytest.mark.parametrize("family", FAMILIES, **names)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_every_table_learns(self, family: dict, dtype: torch.dtype) -> None:
        blocks = random_blocks(CATEGORICAL, 2)
        x, degree = random_inputs(CATEGORICAL, blocks)
        x = {t: v.to(dtype) for t, v in x.items() if t != USER}  # users have categories alone
        model = network(family, CATEGORICAL).to(dtype)
        assert model.first_combine is None
        out = outcome(model, blocks, x, degree, None, self.numbers(blocks[0].num_src))
        tables = {n: g for n, g in out.items() if n.startswith("embeddings")}
        assert len(tables) == 3  # no item depends on a tag, so there is none for it
        assert all(g.any() for g in tables.values())

    def test_they_are_joined_in_the_schemas_order(self) -> None:
        model = network({"kind": "sage"}, CATEGORICAL)
        counts = {ITEM: 2, USER: 3, TAG: 1}
        x = {ITEM: torch.ones(2, 6), TAG: torch.ones(1, 2)}
        numbers = self.numbers(counts)
        h = model.inputs(x, numbers)
        assert {t: tuple(v.shape) for t, v in h.items()} == {
            ITEM: (2, 9),
            USER: (3, 4),
            TAG: (1, 2),
        }
        keys, dotted = (t.weight for n, t in model.embeddings.items() if "ular" in n)
        expected = torch.cat([keys[numbers[USER]["keys"]], dotted[numbers[USER]["a.b"]]], 1)
        assert torch.equal(h[USER], expected)
        assert torch.equal(h[ITEM][:, :6], x[ITEM])

    def test_an_untrained_bucket_is_zero(self) -> None:
        schema = replace(CATEGORICAL, buckets=((USER, "a.b"), (TAG, "n")))
        model, plain = network({"kind": "sage"}, schema), network({"kind": "sage"}, CATEGORICAL)
        keys, dotted = (t.weight for n, t in model.embeddings.items() if "ular" in n)
        assert not dotted[0].any()
        assert dotted[1:].all()
        assert keys.all()
        dotted.data[0] = [t.weight for n, t in plain.embeddings.items() if "ular" in n][1][0]
        assert all(map(torch.equal, model.parameters(), plain.parameters()))

    def test_layer_by_layer_is_the_same(self) -> None:
        blocks = random_blocks(CATEGORICAL, 2)
        x, degree = random_inputs(CATEGORICAL, blocks)
        numbers = self.numbers(blocks[0].num_src)
        model = network({"kind": "gcn"}, CATEGORICAL).double()
        h = model.inputs({t: v for t, v in x.items() if t != USER}, numbers)
        for number, block in enumerate(blocks):
            h = model.layer(number, block, h, degree)
        x.pop(USER)
        assert torch.equal(h[ITEM], model(blocks, x, degree, None, numbers))

    def test_columns_are_encoded(self) -> None:
        """A linear layer of each type's columns, and a residual block."""
        model = network({"kind": "sage", "columns": "learned"}, CATEGORICAL)
        assert not any("type" in name for name in model.encoders)  # no item depends on a tag
        x, numbers = {ITEM: torch.randn(2, 6)}, self.numbers({ITEM: 2, USER: 3, TAG: 1})
        plain = network({"kind": "sage"}, CATEGORICAL)
        plain.embeddings.load_state_dict(model.embeddings.state_dict())
        joined, encoded = plain.inputs(x, numbers), model.inputs(x, numbers)
        assert encoded.keys() == joined.keys() == {ITEM, USER}
        for ntype, rows in joined.items():
            (encoder,) = (e for n, e in model.encoders.items() if ntype[-3:] in n)
            values = encoder.state_dict()
            h = rows @ values["first.weight"].T + values["first.bias"]
            inner = h @ values["block.0.weight"].T + values["block.0.bias"]
            inner = (inner - inner.mean(1, keepdim=True)) / inner.std(1, False, keepdim=True)
            out = h + inner.clamp(min=0) @ values["block.3.weight"].T + values["block.3.bias"]
            torch.testing.assert_close(encoded[ntype], out, atol=1e-3, rtol=1e-3)
            assert out.shape[1] == 8

    def test_a_users_class_is_not_given_them(self) -> None:
        config = read_model(kind="torch.nn:Linear")
        with pytest.raises(ConfigError, match="categories") as caught:
            build_model(config, CATEGORICAL)
        assert caught.value.where == "model.categories"


@pytest.mark.parametrize("emulated", [True, False])
def test_linear_is_torchs_on_any_processor(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_emulated", lambda: emulated)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape) for shape in ((9, 5), (3, 5), (3,)))
    exact = nn.functional.linear(x, weight, bias)
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [v.detach().clone().to(dtype).requires_grad_() for v in (x, weight, bias)]
        out = linear_module.linear(*leaves)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.05)
        out.sum().backward()
        assert [v.grad.dtype for v in leaves if v.grad is not None] == [dtype] * 3
        torch.testing.assert_close(
            linear_module.linear(*leaves[:2]), out - leaves[2], atol=0.05, rtol=0.05
        )


class Products(TorchDispatchMode):
    """Records the longest side of every bf16 matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__ or "linear" in func.__name__:
            left = args[0] if "linear" in func.__name__ else args[-2]
            if left.dtype == torch.bfloat16:
                self.rows.add(max(left.shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize(
    ("rows", "even"), [(0, 16), (1, 16), (100, 128), (512, 512), (513, 1024), (1500, 1536)]
)
def test_bf16_products_have_few_shapes(
    rows: int, even: int, fuses: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fuses and not linear_module._fuses():
        pytest.skip("this processor or this torch can not")
    monkeypatch.setattr(linear_module, "_fuses", lambda: fuses)
    monkeypatch.setattr(linear_module, "_emulated", lambda: False)
    torch.manual_seed(0)
    exact = [torch.randn(s, requires_grad=True) for s in ((rows, 5), (3, 5), (3,))]
    grad = torch.randn(rows, 3)
    nn.functional.linear(*exact).backward(grad)
    kind = torch.float32 if autocast else torch.bfloat16
    leaves = [v.detach().to(kind).requires_grad_() for v in exact]
    with Products() as products, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear_module.linear(*leaves)
        out.backward(grad.to(out.dtype))
    assert out.dtype == torch.bfloat16
    assert products.rows == {even}
    close = {"atol": 0.02 * max(1, rows) ** 0.5, "rtol": 0.02}
    torch.testing.assert_close(out.float(), nn.functional.linear(*exact), atol=0.05, rtol=0.02)
    for leaf, reference in zip(leaves, exact):
        assert leaf.grad is not None
        assert reference.grad is not None
        assert leaf.grad.dtype == kind
        torch.testing.assert_close(leaf.grad.float(), reference.grad, **close)


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_normalisation_takes_a_single_row_or_none(rows: int) -> None:
    module = norm("batch", 4).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = torch.randn(rows, 4, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in module.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    many = torch.randn(9, 4)
    assert torch.equal(module(many), torch.nn.BatchNorm1d(4)(many))
