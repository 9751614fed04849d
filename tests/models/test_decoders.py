"""Decoders: one formula for an edge, the same number by all ways that compute it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raygnn.config.model import read_model
from raygnn.models import decoders
from raygnn.models.decoders import Decoder, make_decoder
from raygnn.models.heads import LinkModel

KINDS = ("dot", "cosine", "distmult", "complex", "rotate", "transe", "mlp")
RELATIONS, WIDTH = 3, 6
NO_FEATURES: dict[str, Any] = {"pair_features": None, "instead_features": {}}


def made(kind: str, out: int = 1) -> Decoder:
    torch.manual_seed(1)
    config = read_model(kind="sage", hidden=5, dropout=0.0)
    decoder = make_decoder(config, kind, WIDTH, RELATIONS, out).double()
    for parameter in decoder.parameters():  # none is 0, where a mistake would not show
        torch.nn.init.uniform_(parameter, -1, 1)
    return decoder


def by_the_paper(kind: str, decoder: Any, s: Tensor, r: int, t: Tensor) -> float:
    """Compute the score of one edge from the formula of the papers."""
    if kind == "dot":
        return float(s @ t)
    if kind == "cosine":
        return float(s @ t / (s.norm() * t.norm()))
    row = decoder.relation[r].detach()
    if kind == "distmult":
        return float((s * row * t).sum())
    if kind == "transe":
        return -float((s + row - t).abs().sum())
    if kind == "mlp":
        hidden = decoder.source(s) + decoder.target(t) + row
        return float(decoder.out(torch.relu(hidden)))
    half = WIDTH // 2
    head, tail = torch.complex(s[:half], s[half:]), torch.complex(t[:half], t[half:])
    if kind == "complex":
        return float((head * torch.complex(row[:half], row[half:]) * tail.conj()).sum().real)
    turn = torch.polar(torch.ones_like(row), row)
    return -float((head * turn - tail).abs().sum())


def test_features_of_edges_are_part_of_the_first_layer() -> None:
    torch.manual_seed(1)
    config = read_model(kind="sage", hidden=5, dropout=0.0)
    decoder: Any = make_decoder(config, "mlp", WIDTH, 1, 2, 3)
    source, target, features = torch.randn(4, WIDTH), torch.randn(4, WIDTH), torch.randn(4, 3)
    first = torch.cat([decoder.source.weight, decoder.target.weight, decoder.features.weight], 1)
    hidden = torch.cat([source, target, features], 1) @ first.T + decoder.source.bias
    expected = decoder.out(torch.relu(hidden))
    torch.testing.assert_close(decoder(source, target, None, features), expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 5), nodes=st.integers(1, 7), seed=st.integers(0, 99))
def test_every_way_gives_the_papers_score(kind: str, batch: int, nodes: int, seed: int) -> None:
    decoder = made(kind)
    draw = torch.Generator().manual_seed(seed)
    source, target, others = (
        torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in (batch, batch, nodes)
    )
    relation = torch.randint(0, RELATIONS, (batch,), generator=draw)
    given_rows = list(zip(source, relation.tolist(), target))
    with torch.no_grad():
        scores = decoder(source, target, relation)
        wanted = [[by_the_paper(kind, decoder, s, r, t)] for s, r, t in given_rows]
        torch.testing.assert_close(scores, torch.tensor(wanted, dtype=torch.float64))
        targets = decoder.against(source, others, relation, "target")
        wanted = [[by_the_paper(kind, decoder, s, r, o) for o in others] for s, r, _ in given_rows]
        torch.testing.assert_close(targets, torch.tensor(wanted, dtype=torch.float64))
        sources = decoder.against(target, others, relation, "source")
        wanted = [[by_the_paper(kind, decoder, o, r, t) for o in others] for _, r, t in given_rows]
        torch.testing.assert_close(sources, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_and_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends may be equal, and few edges may be expanded at a time."""
    decoder = made(kind)
    source = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    relation = torch.tensor([0, 1, 2, 0])
    table = decoder.against(source, source, relation, "target")
    edges = decoder(source, source, relation).flatten()
    torch.testing.assert_close(table.diagonal(), edges)
    (one,) = torch.autograd.grad(table.diagonal().sum(), source, retain_graph=True)
    (other,) = torch.autograd.grad(edges.sum(), source)
    assert one.isfinite().all()
    torch.testing.assert_close(one, other)
    monkeypatch.setattr(decoders, "_AT_ONCE", 1)
    with torch.no_grad():
        torch.testing.assert_close(decoder.against(source, source, relation, "target"), table)


def test_edges_without_relations_are_of_the_first() -> None:
    for kind in KINDS[1:-1]:
        decoder, rows = made(kind), torch.randn(3, WIDTH, dtype=torch.float64)
        first = torch.zeros(3, dtype=torch.int64)
        torch.testing.assert_close(decoder(rows, rows, None), decoder(rows, rows, first))


def test_classes() -> None:
    rows = torch.randn(3, WIDTH, dtype=torch.float64)
    assert made("mlp", 4)(rows, rows, torch.zeros(3, dtype=torch.int64)).shape == (3, 4)


def test_distances_in_fp16_have_gradients() -> None:
    """Squares of numbers in fp16 may underflow or overflow."""
    for number in (0.0, 1e-4, 300.0):
        nodes = torch.full((2, WIDTH), number, dtype=torch.float16, requires_grad=True)
        decoder = make_decoder(read_model(kind="sage"), "rotate", WIDTH, 1, 1).half()
        score = decoder.compare(torch.zeros(2, WIDTH, dtype=torch.float16), nodes)
        assert score.isfinite().all()
        score.sum().backward()
        assert nodes.grad is not None
        assert nodes.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_in_bf16(kind: str) -> None:
    """Both ways to score an edge agree, and gradients are finite."""
    decoder = made(kind).bfloat16()
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    rows = rows.bfloat16().requires_grad_()
    relation = torch.tensor([0, 1, 2, 0])
    table = decoder.against(rows, rows, relation, "target")
    alone = decoder(rows, rows, relation)[:, 0]
    torch.testing.assert_close(table.diagonal().float(), alone.float(), atol=0.1, rtol=0.1)
    (table.float().sum() + alone.float().sum()).backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_a_node_that_the_edge_ends_at_is_no_negative() -> None:
    model: Any = LinkModel(torch.nn.Identity(), made("dot"), ("a", "r", "a"))
    part: Any = SimpleNamespace(
        pairs=torch.tensor([[0, 1], [2, 3]]),
        instead={"target": torch.tensor([2, 4])},
        relation=None,
        known={},
        **NO_FEATURES,
    )
    scores = model.decode({"a": torch.rand(5, WIDTH)}, part)
    assert scores.counts[0].tolist() == [[False, True], [True, True]]
    part.known["target"] = torch.tensor([[False, False], [False, True]])
    scores = model.decode({"a": torch.rand(5, WIDTH)}, part)
    assert scores.counts[0].tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_tie_among_negatives_of_each_edge(kind: str) -> None:
    torch.manual_seed(3)
    decoder = make_decoder(read_model(kind="sage", hidden=256), kind, 50, 1, 1).eval()
    model: Any = LinkModel(torch.nn.Identity(), decoder, ("a", "r", "a"))
    for edges, negatives in ((1, 4), (3, 50), (300, 5)):
        numbers = torch.arange(edges * negatives)
        part = {"pairs": numbers[:edges].repeat(2, 1), "relation": None, "known": {}}
        part["instead"] = {"target": numbers.view(edges, negatives)}
        with torch.no_grad():
            scores = model.decode(
                {"a": torch.ones(len(numbers), 50) / 3}, SimpleNamespace(**part, **NO_FEATURES)
            )
        assert len({*scores.there.tolist(), *scores.absent[0].flatten().tolist()}) == 1
