"""Batch normalisation over ranks: one `torch.nn.BatchNorm1d` of all their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from raygnn.models.norm import BatchNorm, merged, moments, repeated
from raygnn.sampling.exchange import Exchange, count_nodes_once
from tests.support.ranks import run_ranks

WIDTH = 3
EXACT = {"atol": 1e-10, "rtol": 1e-10}

GROUPS = st.lists(
    st.integers(0, 9).flatmap(
        lambda n: arrays.arrays(np.float64, (n, WIDTH), elements=st.floats(-1e3, 1e3))
    ),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_moments_of_groups_make_those_of_all_rows(groups: list[np.ndarray]) -> None:
    parts = torch.stack([moments(torch.from_numpy(rows)) for rows in groups])
    rows = np.concatenate(groups)
    count, mean, deviations = (t.numpy() for t in merged(parts).split([1, WIDTH, WIDTH]))
    assert count == len(rows)
    if len(rows):
        # some hundred roundings of numbers up to 1e3, and of their squares
        assert np.allclose(mean, rows.mean(0), rtol=0, atol=1e3 * 1e-13)
        assert np.allclose(
            deviations, rows.var(0) * len(rows), rtol=0, atol=1e6 * len(rows) * 1e-13
        )
    else:
        assert not mean.any()
        assert not deviations.any()


def module() -> BatchNorm:
    torch.manual_seed(1)
    found = BatchNorm(WIDTH).double().train()
    nn.init.normal_(found.weight)
    nn.init.normal_(found.bias)
    return found


def case(number: int, world: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Draw rows of distinct nodes, gradients of output rows, and the nodes that each rank has and
    counts: uneven shares, some empty, some nodes on several ranks."""
    random = np.random.default_rng(number)
    num = (40, 7, 2, 1, 0)[number % 5]
    x = torch.from_numpy(random.normal(3.0, 2.0, (num, WIDTH)))
    owner = random.integers(0, world, num)
    owner[owner == number % world] = 0  # one rank has no rows that count
    has = [(owner == r) | (random.random(num) < 0.3 * (number % 2)) for r in range(world)]
    ids = [torch.from_numpy(np.flatnonzero(rows)) for rows in has]
    counted = [torch.from_numpy(owner)[rows] == r for r, rows in enumerate(ids)]
    grads = torch.from_numpy(random.normal(size=(sum(map(len, ids)), WIDTH)))
    return x, grads, ids, counted


def normalised(exchange: Exchange, again: bool) -> list[dict[str, Tensor]]:
    norm, found = module(), []
    world = exchange.world
    norm.join(world.rank, world.size, lambda values, _: exchange.sum(values))
    for number in range(10):
        x, grads, ids, counted = case(number, world.size)
        rows = x[ids[world.rank]].requires_grad_()
        plain = world.size == 1 and number < 5  # as torch computes it
        out = norm(rows, None if plain else counted[world.rank])
        if again:
            with repeated():  # as a layer does that is recomputed: no collective, no tracking
                out = norm(rows, None if plain else counted[world.rank])
        grad = grads.split([len(i) for i in ids])[world.rank]
        norm.zero_grad()
        out.backward(grad)
        assert rows.grad is not None
        found.append({"out": out.detach(), "x": rows.grad})
        found[-1] |= {n: p.grad.clone() for n, p in norm.named_parameters() if p.grad is not None}
        found[-1] |= {n: b.clone() for n, b in norm.named_buffers()}
    return found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_is_one_batch_norm_of_all_rows(world: int, again: bool) -> None:
    results = run_ranks(world, normalised, again)
    single = module()
    reference = nn.BatchNorm1d(WIDTH).double()
    reference.load_state_dict(single.state_dict())
    for number in range(10):
        x, grads, ids, _ = case(number, world)
        all_ids = torch.cat(ids)
        leaf = x.clone().requires_grad_()
        reference.train(len(x) > 1)  # one row or none: by running statistics
        out = reference(leaf)[all_ids]
        reference.zero_grad()
        out.backward(grads)
        ranks = [result[number] for result in results]
        torch.testing.assert_close(torch.cat([r["out"] for r in ranks]), out.detach(), **EXACT)
        # the gradient of a node is the sum of those of its rows
        d_x = torch.zeros_like(x).index_add(0, all_ids, torch.cat([r["x"] for r in ranks]))
        torch.testing.assert_close(d_x, leaf.grad, **EXACT)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(sum(r[name] for r in ranks), parameter.grad, **EXACT)
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(ranks[0][name], buffer, **EXACT)
            assert all(torch.equal(r[name], ranks[0][name]) for r in ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rows_are_normalised_in_float32(dtype: torch.dtype) -> None:
    """Results differ by a few units of the dtype, to which rows and results are rounded."""
    norm, reference = (BatchNorm(WIDTH).to(dtype).train() for _ in range(2))
    x = torch.randn(50, WIDTH).to(dtype)
    rows, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    grad = torch.randn(50, WIDTH).to(dtype)
    out = norm(rows, torch.ones(50, dtype=torch.bool))
    out.backward(grad)
    expected = reference.double()(exact)
    expected.backward(grad.double())
    assert out.dtype == dtype
    assert rows.grad is not None
    assert exact.grad is not None
    unit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=unit, rtol=unit)
    torch.testing.assert_close(rows.grad.double(), exact.grad, atol=4 * unit, rtol=unit)


def frontiers(rank: int, bounds: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Draw random nodes in an order, and how many of them each of three hops reaches."""
    random = np.random.default_rng(rank)
    ids, hops = {}, {}
    for ntype, bound in bounds.items():
        num = 0 if rank == 1 else int(random.integers(1, bound[-1]))
        ids[ntype] = random.permutation(bound[-1])[:num]
        hops[ntype] = sorted([*random.integers(0, num + 1, 2).tolist(), num])
    return ids, hops


def counts(exchange: Exchange, bounds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ids, hops = frontiers(exchange.world.rank, bounds)
    return {t: c.numpy() for t, c in count_nodes_once(ids, hops, bounds, exchange).items()}


@pytest.mark.parametrize("world", [1, 3])
def test_each_node_counts_on_one_rank_at_every_hop(world: int) -> None:
    bounds = {
        "a": np.linspace(0, 60, world + 1).astype(int),
        "b": np.linspace(0, 9, world + 1).astype(int),
    }
    results = run_ranks(world, counts, bounds)
    given_ranks = [frontiers(rank, bounds) for rank in range(world)]
    for ntype in bounds:
        for hop in range(3):
            reached, counted = [], []
            for (ids, hops), result in zip(given_ranks, results):
                some = ids[ntype][: hops[ntype][hop]]
                reached.append(some)
                counted.append(some[result[ntype][: len(some)]])
            every, once = np.concatenate(reached), np.concatenate(counted)
            assert np.array_equal(np.sort(once), np.unique(every))
