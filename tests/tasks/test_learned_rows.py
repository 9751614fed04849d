"""The rows that one rank owns: how they begin, and how a step moves them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raygnn.config.model import EmbeddingConfig
from raygnn.sampling.batch import Batch
from raygnn.sampling.exchange import Exchange, World, route_rows
from raygnn.tasks.embeddings import Embeddings, first_rows
from tests.support.ranks import run_ranks

NODES = 30
DIM = 3


def config(**more: Any) -> EmbeddingConfig:
    return EmbeddingConfig(dim=DIM, **more)


def embeddings(exchange: Exchange, optimizer: str = "adam") -> tuple[Embeddings, np.ndarray]:
    """Build a rank's embedding tables and the bounds; ranks own about equally many nodes."""
    size, rank = exchange.world.size, exchange.world.rank
    bounds = np.arange(size + 1) * NODES // size
    ids = np.arange(bounds[rank], bounds[rank + 1])
    table = torch.zeros(NODES, DIM)
    first_rows(config(), 0, "a", ids, table[: len(ids)])
    made = Embeddings(
        {"a": table},
        {"a": ids},
        exchange,
        config(optimizer=optimizer),
        dtype=torch.float32,
        rate=1.0,
    )
    return made, bounds


def batch(ids: list[int], bounds: np.ndarray, exchange: Exchange) -> Batch:
    return Batch(
        seeds=torch.tensor(ids),
        y=torch.zeros(len(ids)),
        weight=torch.ones(len(ids)),
        total=len(ids),
        window=len(ids),
        epoch=0,
        step=0,
        blocks=[],
        x={},
        combined={},
        degree={},
        categories={},
        routes=route_rows({"a": np.array(ids, np.int64)}, {"a": bounds}, exchange),
    )


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=50, unique=True),
    st.integers(0, 2**32 - 1),
    st.randoms(use_true_random=False),
)
def test_first_rows_are_of_the_node_alone(ids: list[int], seed: int, random: Any) -> None:
    """Initial rows do not depend on the other nodes of a rank, or on their order."""
    some = random.sample(ids, k=random.randint(1, len(ids)))
    whole, part = torch.empty(len(ids), DIM), torch.empty(len(some), DIM)
    first_rows(config(), seed, "a", np.array(ids), whole)
    first_rows(config(), seed, "a", np.array(some), part)
    assert torch.equal(part, whole[[ids.index(i) for i in some]])
    assert whole.abs().max() <= config().bound == 1.0
    other = torch.empty_like(whole)
    for name, another in (("b", seed), ("a", seed + 1)):
        first_rows(config(), another, name, np.array(ids), other)
        assert not (whole == other).all()


def test_first_rows_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.tasks.embeddings._AT_ONCE", 1000)  # in many pieces
    rows = torch.empty(50_000, DIM)
    first_rows(config(init=0.5), 1, "a", np.arange(50_000, dtype=np.int32), rows)
    assert abs(float(rows.mean())) < 3e-3
    assert float(rows.var()) == pytest.approx(0.25 / 3, rel=0.02)
    assert np.abs(np.corrcoef(rows.numpy().T) - np.eye(DIM)).max() < 0.02
    ordered = np.sort(rows.numpy().ravel())
    assert np.abs(ordered - np.linspace(-0.5, 0.5, len(ordered))).max() < 5e-3


IDS = ([29, 3, 20], [20, 1])  # that each rank reads, in two batches that accumulate


def _weights(rank: int, part: int) -> torch.Tensor:
    """Return the weights of the rows of ``part`` in the loss of ``rank``."""
    return (torch.tensor(IDS[part]) + rank + 1.0).unsqueeze(1)


def _sums(exchange: Exchange, optimizer: str) -> list[list[float]]:
    rows, bounds = embeddings(exchange, optimizer)
    size, rank = exchange.world.size, exchange.world.rank
    weight = nn.Parameter(torch.ones(DIM))
    for number in range(3):
        weight.grad = None
        for part, ids in enumerate(IDS):
            x = rows.join(batch(ids, bounds, exchange), torch.device("cpu")).x["a"]
            if not number:
                expected = torch.empty(len(ids), DIM)
                first_rows(config(), 0, "a", np.array(ids), expected)
                assert torch.equal(x, expected)
            (x * weight * _weights(rank, part) * size).sum().backward()
            rows.send_back([weight])
        rows.update([weight], None, 0.1, None)
    assert rows.steps == 3
    return [array.flatten().tolist() for array in rows.arrays("a").values()]


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_the_gradient_of_a_row_is_the_mean_over_ranks_of_all_that_read_it(optimizer: str) -> None:
    kinds = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}
    for size in (1, 2, 3):
        found = zip(*run_ranks(size, _sums, optimizer))
        table = torch.empty(NODES, DIM)
        first_rows(config(), 0, "a", np.arange(NODES), table)
        expected = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        learn = kinds[optimizer](list(expected.parameters()), lr=0.1)
        for _ in range(3):
            learn.zero_grad()
            for rank, part in itertools.product(range(size), range(2)):
                (expected(torch.tensor(IDS[part])) * _weights(rank, part)).sum().backward()
            learn.step()
        state = learn.state[expected.weight]
        names = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}[optimizer]
        wanted = [expected.weight.detach(), *(state[name] for name in names)]
        for each, values in zip(found, wanted):
            assert np.allclose(list(itertools.chain(*each)), values.flatten(), rtol=1e-5), size


def alone() -> tuple[Embeddings, np.ndarray, Exchange]:
    exchange = Exchange(World(0, 1))
    return *embeddings(exchange), exchange


def read(
    rows: Embeddings, bounds: np.ndarray, exchange: Exchange, scale: float = 1.0
) -> nn.Parameter:
    """A weight whose gradient, like that of two rows, is scaled."""
    weight = nn.Parameter(torch.ones(DIM))
    joined = rows.join(batch([5, 6], bounds, exchange), torch.device("cpu"))
    ((joined.x["a"] * weight).sum() * scale).backward()
    rows.send_back([weight])
    return weight


def test_the_norm_is_of_weights_and_rows_together() -> None:
    found = []
    for scale, clip in ((None, 0.5), (512.0, 0.5)):
        rows, bounds, exchange = alone()
        read(rows, bounds, exchange)
        rows.begin(torch.device("cpu"))  # again, before a step was made of it
        weight = read(rows, bounds, exchange, scale or 1.0)
        assert weight.grad is not None
        if scale is not None:
            weight.grad.div_(scale)  # as a gradient scaler does before
        before = weight.grad.clone()
        of_rows = float(torch.ones(2, DIM).norm())
        rows.update([weight], clip, 0.1, scale)
        share = clip / (float(before.norm()) ** 2 + of_rows**2) ** 0.5
        assert torch.allclose(weight.grad, before * share, rtol=1e-4)
        moment = rows.optimizer.state[rows.rows["a"]]["exp_avg"]
        assert torch.allclose(moment[5], torch.full((DIM,), 0.1 * share), rtol=1e-4)
        assert rows.rows["a"].grad is None
        found.append(rows.rows["a"].detach().clone())
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("how", ["taken away", "overflow"])
def test_a_step_that_is_left_out_moves_no_row(how: str) -> None:
    """The skipped step's gradients are removed from the weights, or, with a gradient scaler, stay
    non-finite."""
    rows, bounds, exchange = alone()
    before = rows.rows["a"].detach().clone()
    weight = read(rows, bounds, exchange)
    assert weight.grad is not None
    if how == "overflow":
        weight.grad[0] = torch.inf
        rows.update([weight], None, 0.1, 2.0)
    else:
        weight.grad = None
        rows.update([weight], None, 0.1, None)
    assert torch.equal(rows.rows["a"], before)
    assert rows.steps == 0
    rows.update([read(rows, bounds, exchange)], None, 0.1, None)
    assert rows.steps == 1
    moved = (rows.rows["a"] != before).any(dim=1)
    assert torch.nonzero(moved).flatten().tolist() == [5, 6]
    moment = rows.optimizer.state[rows.rows["a"]]["exp_avg"]
    assert torch.allclose(moment[5], torch.full((DIM,), 0.1))  # from the second step only


def _not_finite(exchange: Exchange) -> list[bool]:
    rows, bounds = embeddings(exchange)
    joined = rows.join(batch([7, 8], bounds, exchange), torch.device("cpu"))
    weight = nn.Parameter(torch.ones(DIM))
    bad = float("nan") if exchange.world.rank == exchange.world.size - 1 else 1.0
    (joined.x["a"] * bad).sum().backward()
    weight.grad = torch.ones(DIM)
    rows.send_back([weight])
    return torch.isnan(weight.grad).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_not_finite_is_so_on_all_ranks(size: int) -> None:
    assert run_ranks(size, _not_finite) == [[True] * DIM] * size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_are_trained_on_the_gpu_or_for_it(on_gpu: bool) -> None:
    device, found = torch.device("cuda"), []
    for place in (torch.device("cpu"), device):
        rows, bounds, exchange = alone()
        if on_gpu:
            rows.begin(place)
        weight = nn.Parameter(torch.ones(DIM, device=place))
        for _ in range(2):
            joined = rows.join(batch([5, 6], bounds, exchange), place)
            assert joined.x["a"].device.type == place.type
            (joined.x["a"] * weight).sum().backward()
            rows.send_back([weight])
            rows.update([weight], 0.5, 0.1, None)
            rows.publish()
        assert rows.rows["a"].device.type == (place.type if on_gpu else "cpu")
        assert torch.equal(rows.rows["a"].detach().cpu(), rows.tables["a"][: len(rows.rows["a"])])
        found.append(rows.tables["a"].clone())
    assert torch.allclose(*found, atol=1e-6)
