"""The ways of learned rows, against a look-up in one whole table; and the ranks of tests."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.sampling.exchange import Exchange, ask_owners, name_to_owners, route_rows
from tests.support import ranks
from tests.support.ranks import run_ranks

COUNTS = {"a": 41, "b": 7}


def bounds_of(size: int, seed: int) -> dict[str, np.ndarray]:
    """Return ranges of ids; some ranks may own no node of a type."""
    rng = np.random.default_rng(seed)
    return {
        t: np.concatenate([[0], np.sort(rng.integers(0, n + 1, size - 1)), [n]])
        for t, n in COUNTS.items()
    }


def _everything(exchange: Exchange) -> None:
    size, rank = exchange.world.size, exchange.world.rank
    for seed in range(20):
        bounds = bounds_of(size, seed)
        rng = np.random.default_rng([seed, rank])
        # distinct, in any order; now and then none
        ids = {t: rng.permutation(n)[: rng.integers(0, n + 1)] for t, n in COUNTS.items()}
        sent = exchange.sent_bytes
        routes = route_rows(ids, bounds, exchange)
        assert routes.num == {t: len(each) for t, each in ids.items()}
        assert routes.receive.sum() == sum(map(len, ids.values())) == len(routes.order)
        owned = {t: np.arange(b[rank], b[rank + 1]) for t, b in bounds.items()}
        answer = torch.full((int(routes.send.sum()), 1), -1.0)
        for number, ntype in enumerate(COUNTS):
            given = owned[ntype][routes.given[ntype].numpy()]  # none is of another rank
            values = torch.from_numpy(given + 1000.0 * number).float().unsqueeze(1)
            answer[routes.places[ntype]] = values
        assert (answer >= 0).all()
        before = exchange.messages
        came = torch.empty(len(routes.order), 1)
        exchange.columns([answer], routes.send, routes.receive, [came])
        assert exchange.messages - before == (size > 1)
        named = torch.empty_like(came)
        named[routes.order] = came
        whole = [each + 1000.0 * number for number, each in enumerate(ids.values())]
        assert named.flatten().tolist() == np.concatenate(whole).tolist()
        assert size > 1 or exchange.sent_bytes == sent


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_row_comes_from_its_owner_to_where_it_was_named(size: int) -> None:
    run_ranks(size, _everything)


def _asked_and_named(exchange: Exchange) -> None:
    size, rank = exchange.world.size, exchange.world.rank
    for seed in range(20):
        bounds = bounds_of(size, seed)
        everyones = [
            {
                t: np.random.default_rng([seed, r]).integers(0, n, 30 * ((seed + r) % 4 > 0))
                for t, n in COUNTS.items()
            }
            for r in range(size)
        ]
        named = name_to_owners(everyones[rank], bounds, exchange)
        for t, own in named.items():
            low, high = bounds[t][rank : rank + 2]
            all_ids = np.unique(np.concatenate([ids[t] for ids in everyones]))
            assert np.unique(own).tolist() == all_ids[(all_ids >= low) & (all_ids < high)].tolist()

        def answer(ids: np.ndarray, own: np.ndarray = bounds["a"][rank : rank + 2]) -> list[Any]:
            assert ((ids >= own[0]) & (ids < own[1])).all()
            return [torch.from_numpy(ids * 2), torch.from_numpy(ids[:, None] / [1, 2])]

        ids = everyones[rank]["a"]  # in any order, some more than once
        doubled, parts = ask_owners(ids, bounds["a"], exchange, answer)
        assert doubled.tolist() == (2 * ids).tolist()
        assert parts.tolist() == (ids[:, None] / [1, 2]).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_owners_answer_requests(size: int) -> None:
    run_ranks(size, _asked_and_named)


def _process(exchange: Exchange) -> tuple[int, float]:
    return os.getpid(), exchange.max(ranks.TIMEOUT)


def test_processes_of_ranks_are_kept_and_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process for each call would double the tests' time."""
    before = run_ranks(2, _process)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "TIMEOUT", 59)
        assert run_ranks(2, _process) == [(process, 59) for process, _ in before]
    assert run_ranks(2, _process) == before == [(process, 60) for process, _ in before]
