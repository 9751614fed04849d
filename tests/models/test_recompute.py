"""``model.recompute``: less is kept for the backward pass, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raygnn.config.model import read_model
from raygnn.models.registry import build_graph_model
from tests.models.test_networks import (
    FAMILIES,
    HETEROGENEOUS,
    HOMOGENEOUS,
    names,
    network,
    random_blocks,
    random_inputs,
)
from tests.support.whole_graphs import CATEGORICAL, batch_of, random_sample


def trained(model: nn.Module, forward: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """Return the output, gradients, buffers and the generator's state after a backward pass, and
    the bytes kept for it."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward(model)
    out.square().sum().backward()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {"out": out, "random": torch.get_rng_state()}
    found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {n: b.clone() for n, b in model.named_buffers()}
    return {**found, "bytes": sum(size for place, size in kept.items() if place not in own)}


def check(model: nn.Module, forward: Callable[[nn.Module], Tensor]) -> None:
    other = copy.deepcopy(model)
    other.recompute = True
    plain, again = trained(model, forward), trained(other, forward)
    assert again.pop("bytes") < 0.7 * plain.pop("bytes")
    assert plain.keys() == again.keys()
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name  # to the bit


@pytest.mark.parametrize("schema", [HOMOGENEOUS, HETEROGENEOUS], ids=["plain", "typed"])
@pytest.mark.parametrize("family", FAMILIES, **names)
def test_gradients_are_the_same(family: dict, schema: Any) -> None:
    """Dropout masks and running statistics are the same, too."""
    model = network(family, schema, dropout=0.4, layers=3)
    blocks = random_blocks(schema, 3)
    x, degree = random_inputs(schema, blocks)
    x = {t: v.float() for t, v in x.items()}
    check(model, lambda m: m(blocks, x, degree))


@pytest.mark.parametrize("kind", ["gin", "gcn"])
def test_of_whole_graphs(kind: str) -> None:
    torch.manual_seed(1)
    config = read_model(kind=kind, hidden=8, layers=4, dropout=0.3, norm="batch")
    model = build_graph_model(config, CATEGORICAL)
    batch = batch_of(CATEGORICAL, [random_sample(CATEGORICAL, n, 6) for n in range(4)])
    check(model, lambda m: m(batch))


def test_under_autocast() -> None:
    model = network({"kind": "gatv2", "heads": 2}, HOMOGENEOUS, dropout=0.4, layers=3)
    blocks = random_blocks(HOMOGENEOUS, 3)
    x, degree = random_inputs(HOMOGENEOUS, blocks)
    x = {t: v.float() for t, v in x.items()}

    def forward(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = m(blocks, x, degree)
        return out.float()

    check(model, forward)


def test_an_evaluation_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.models.network.checkpoint", None)
    model = network({"kind": "sage"}, HOMOGENEOUS, recompute=True).eval()
    blocks = random_blocks(HOMOGENEOUS, 2)
    x, degree = random_inputs(HOMOGENEOUS, blocks)
    x = {t: v.float() for t, v in x.items()}
    assert model(blocks, x, degree).shape == (7, 4)
    with torch.no_grad():
        model.train()(blocks, x, degree)
    with pytest.raises(TypeError, match="not callable"):
        model(blocks, x, degree)
