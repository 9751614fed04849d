from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raygnn.graph.layout import PartitionMeta
from raygnn.graph.shard import load_shard, ownership
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.rows import FEATURES, BufferRing, build_stores, degree_column, hottest_remote
from tests.graphs import partitioned, random_graph
from tests.ranks import run_ranks

ETYPE = ("_N", "_E", "_N")


def gather(
    exchange: Exchange, meta: PartitionMeta, cache: float, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[np.ndarray], int, int]:
    """Three gathers of random ids, other ids on each rank, one of them empty."""
    rank = exchange.world.rank
    shard = load_shard(meta, rank, exchange.world.size, replicated=False)
    stores = build_stores(
        shard, exchange, features="feat", dtype=dtype, degree_etypes=[ETYPE], cache=cache, ring=4
    )
    original = exchange.gather_rows(torch.from_numpy(shard.original["_N"])).numpy()
    rng = np.random.default_rng(rank)
    wanted = [rng.integers(0, len(original), n) for n in (40, 0, 90)]
    rows = [stores["_N"].gather(ids) for ids in wanted]
    return (
        [r[FEATURES].clone() for r in rows],
        [r[degree_column(ETYPE)].clone() for r in rows],
        [original[ids] for ids in wanted],
        stores["_N"].asked,
        stores["_N"].hits,
    )


@pytest.mark.parametrize("cache", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_from_every_rank(cache: float, dtype: torch.dtype, tmp_path: Path) -> None:
    data = random_graph()
    feat = torch.from_numpy(data.nodes["_N"].data["feat"]).to(dtype)
    degree = torch.bincount(torch.from_numpy(data.edges[ETYPE].dst), minlength=200)
    meta = partitioned(data, tmp_path, 2)
    for features, degrees, originals, asked, hits in run_ranks(3, gather, meta, cache, dtype):
        for rows, numbers, ids in zip(features, degrees, originals):
            assert rows.dtype == dtype
            assert torch.equal(rows, feat[ids])
            assert torch.equal(numbers, degree[ids])
        assert 0 < asked < 130
        assert (hits > 0) == (cache > 0)
        # nodes without out-edges are never asked for while sampling, so they are not cached
        assert hits <= asked


def test_the_cache_holds_what_is_named_most() -> None:
    bounds = np.array([0, 4, 10])
    sources = np.array([0, 0, 0, 5, 5, 9, 9, 9, 6])
    assert hottest_remote(sources, bounds, 0, 0.34).tolist() in ([9, 5], [5, 9])
    assert hottest_remote(sources, bounds, 0, 1.0).size == 3  # only those that are named
    assert hottest_remote(sources, bounds, 0, 0.0).size == 0


def test_buffers_come_round() -> None:
    ring, like = BufferRing(2), torch.zeros(1, 3)
    first, second = ring.take("a", 10, like), ring.take("a", 10, like)
    assert first.data_ptr() != second.data_ptr()
    assert ring.take("a", 5, like).data_ptr() == first.data_ptr()
    assert ring.take("a", 100, like).shape == (100, 3)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_ownership_covers_all_ids(sizes: list[int], workers: int) -> None:
    ends = np.cumsum(sizes)
    ranges = np.stack([ends - sizes, ends], axis=1)
    bounds = ownership(ranges, workers)
    assert bounds[0] == 0
    assert bounds[-1] == ends[-1]
    assert (np.diff(bounds) >= 0).all()
    if workers == len(sizes):
        assert np.array_equal(bounds[1:], ends)
