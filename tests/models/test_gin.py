"""The graph isomorphism network: as DGL's, as dense algebra, on sampled and on empty blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.model import read_model
from raygnn.graph.dgl import dgl
from raygnn.models.network import Network, Schema
from raygnn.models.registry import build_model
from raygnn.models.typed_layers import TypedLayer
from raygnn.sampling.batch import Adjacency, Block, EdgeType

SRC, DST, WIDTH, HIDDEN, OUT = 30, 12, 8, 6, 4
ETYPE: EdgeType = ("_N", "_E", "_N")
ONE = Schema({"_N": WIDTH}, [ETYPE], OUT, target="_N")


def adjacency(num_src: int = SRC, num_dst: int = DST, edges: int = 40) -> Adjacency:
    """Build a random one; the first two and the last destination have no edges, the third has a
    multi-edge."""
    torch.manual_seed(1)
    dst = torch.randint(3, num_dst - 1, (edges - 2,)) if edges else torch.empty(0).long()
    dst = torch.cat([torch.full((min(edges, 2),), 2), dst]).sort()[0]
    src = torch.randint(0, max(1, num_src), (edges,))
    src[1:2] = src[:1]
    counts = torch.bincount(dst, minlength=num_dst)
    return Adjacency(F.pad(counts.cumsum(0), (1, 0)), src)


def block(adj: Adjacency, num_src: int = SRC) -> Block:
    return Block({ETYPE: adj}, {"_N": num_src}, {"_N": len(adj.degree)})


def network(schema: Schema = ONE, **settings: Any) -> Network:
    """Build a network of one layer in float64, with an eps other than 0, so that a comparison is of
    formulas and not of rounding."""
    torch.manual_seed(2)
    settings = {"hidden": HIDDEN, "layers": 1, "dropout": 0.0, **settings}
    model = build_model(read_model(kind="gin", **settings), schema).double()
    assert isinstance(model, Network)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("eps"):
                assert parameter.item() == 0  # until it has learnt
                parameter.fill_(0.3)
            if "bias" in name:
                parameter.copy_(torch.randn(parameter.shape))
    return model


def parts(model: Network) -> tuple[Any, Any, Any]:
    """Return the convolution, the bias of the MLP's first linear layer if any, and the layers that
    follow."""
    (layer,) = model.layers
    assert isinstance(layer, TypedLayer)
    (conv,), (rest,) = layer.convs.values(), layer.rest.values()
    return conv, next(iter(layer.bias.values()), None), rest


def same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    """Check for equal outputs, and equal gradients of their sums of squares."""
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    mine = torch.autograd.grad(ours.square().sum(), leaves, retain_graph=True)
    other = torch.autograd.grad(theirs.square().sum(), leaves, retain_graph=True)
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, atol=1e-11, rtol=1e-11)


class _MLP(nn.Module):
    """The same MLP of complete linear layers, as the authors write it."""

    def __init__(self, model: Network):
        super().__init__()
        conv, bias, rest = parts(model)
        self.first = lambda x: F.linear(x, conv.weight, bias)
        self.then = nn.Sequential(rest.norm, nn.ReLU(), rest.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x))


@pytest.mark.dgl
@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("hidden", [HIDDEN, 11])  # narrower and wider than the input
def test_is_dgls(norm: str, hidden: int) -> None:
    adj = adjacency()
    model = network(norm=norm, hidden=hidden)
    x = torch.randn(SRC, WIDTH, dtype=torch.float64, requires_grad=True)
    conv, _, _ = parts(model)
    theirs = dgl().nn.GINConv(_MLP(model), "sum", learn_eps=True)
    theirs.eps = conv.eps
    blocks = block(adj)
    expected = theirs(blocks.to_dgl(), (x, x[:DST]))
    same(model([blocks], {"_N": x}, {}), expected, [x, *model.parameters()])


def test_is_its_definition() -> None:
    adj = adjacency()
    model = network()
    conv, bias, rest = parts(model)
    assert isinstance(rest.norm, nn.Identity)  # "none", as configured
    x = torch.randn(SRC, WIDTH, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(len(adj.src), dtype=x.dtype)
    dense = x.new_zeros(DST, SRC).index_put((adj.dst, adj.src), ones, accumulate=True)
    h = (1 + conv.eps) * x[:DST] + dense @ x
    expected = F.relu(h @ conv.weight.T + bias) @ rest.second.weight.T + rest.second.bias
    same(model([block(adj)], {"_N": x}, {}), expected, [x, *model.parameters()])


def test_hidden_layers_are_normalised_and_activated_again() -> None:
    """The norm and activation are inside the MLP and after it, as in the paper's experiments."""
    torch.manual_seed(0)
    model = network(layers=2, norm="batch")
    whole, h = block(adjacency(SRC, SRC)), {"_N": torch.randn(SRC, WIDTH).double()}
    raw = model.layers[0](whole, h, {})["_N"]
    (norm,) = model.norms[0].values()
    expected = F.relu(F.batch_norm(raw, None, None, norm.weight, norm.bias, training=True))
    torch.testing.assert_close(model.layer(0, whole, h, {})["_N"], expected)
    assert len(model.norms) == 1
    last = model.layers[1](whole, {"_N": expected}, {})["_N"]
    torch.testing.assert_close(model.layer(1, whole, {"_N": expected}, {})["_N"], last)


def test_on_several_edge_types() -> None:
    """Each edge type has a sum, side by side; a node type without a loop adds itself as another."""
    item, user = "item", "user"
    loops: list[EdgeType] = [(item, "also", item), (item, "like", item)]
    across: list[EdgeType] = [(user, "buys", item), (item, "bought", user)]
    schema = Schema({item: WIDTH, user: 3}, [*loops, *across], OUT, target=item)
    model = network(schema, layers=2)
    torch.manual_seed(4)
    sizes = {item: 9, user: 5}
    dense, adj = {}, {}
    for source, name, target in schema.etypes:
        etype = (source, name, target)
        a = torch.randint(0, 3, (sizes[target], sizes[source]))
        dst, src = (torch.repeat_interleave(ends, a[a > 0]) for ends in torch.where(a > 0))
        counts = torch.bincount(dst, minlength=sizes[target])
        adj[etype], dense[etype] = Adjacency(F.pad(counts.cumsum(0), (1, 0)), src), a.double()
    whole = Block(adj, sizes, sizes)
    x = {t: torch.randn(sizes[t], w).double() for t, w in schema.in_features.items()}
    h = dict(x)
    for layer in model.layers:
        convs = dict(zip(layer.etypes, layer.convs.values(), strict=True))
        own = dict(zip(layer.self_types, layer.own.values(), strict=True))
        biases = dict(zip(sorted(layer.outputs()), layer.bias.values(), strict=True))
        rests = dict(zip(layer.outputs(), layer.rest.values(), strict=True))
        assert set(own) <= {user}
        new = {}
        for ntype in layer.outputs():
            total = biases[ntype] + (h[ntype] @ own[ntype].weight.T if ntype in own else 0)
            for etype, conv in convs.items():
                if etype[2] == ntype:
                    rows = dense[etype] @ h[etype[0]]
                    if etype in loops:
                        rows = rows + (1 + conv.eps) * h[ntype]
                    else:
                        assert conv.eps is None
                    total = total + rows @ conv.weight.T
            new[ntype] = rests[ntype].second(F.relu(total))
        last = layer is model.layers[-1]
        h = {t: v if last else F.relu(v) for t, v in new.items()}
    same(model([whole, whole], x, {}), h[item], list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_src", "num_dst", "edges"), [(9, 5, 0), (4, 0, 0), (0, 0, 0), (9, 6, 7)]
)
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_blocks_without_edges_or_nodes(
    dtype: torch.dtype, num_src: int, num_dst: int, edges: int, norm: str
) -> None:
    adj = adjacency(num_src, num_dst, edges)
    model = network(layers=2, norm=norm).to(dtype).train()
    whole = adjacency(num_src, num_src, edges)
    blocks = [block(whole, num_src), block(adj, num_src)]
    out = model(blocks, {"_N": torch.randn(num_src, WIDTH, dtype=dtype)}, {})
    assert (out.shape, out.dtype) == ((num_dst, OUT), dtype)
    out.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_sums_distinguish_what_means_and_maxima_do_not() -> None:
    """One node has one neighbour, the other two equal ones (figure 3 of the paper)."""
    adj = Adjacency(torch.tensor([0, 1, 3, 3]), torch.tensor([2, 2, 2]))
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    out = network()([block(adj, 3)], {"_N": x}, {})
    assert not torch.allclose(out[0], out[1])
