from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.graph.partition.layout import PartitionMeta
from raygnn.sampling import cache
from raygnn.sampling.cache import choose, inclusion
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from tests.support.graphs import ITEM, out_degrees, partitioned, random_graph, shard_of, typed_graph
from tests.support.ranks import run_ranks

FANOUT = [4, 2]


def frequencies(
    exchange: Exchange, meta: PartitionMeta, ntype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a node's predicted and counted fraction of batches, and its degree score."""
    shard = shard_of(exchange, meta, replicated=True)
    fanouts = resolve_fanouts(FANOUT, shard.etypes)
    seeds, size = np.arange(40), 5
    predicted = inclusion(shard, {ntype: seeds}, size, fanouts, replace=False)
    sampler = NeighborSampler(shard, exchange)
    counted = np.zeros(shard.num_nodes(ntype))
    rng = np.random.default_rng(0)
    rounds = 3000
    for step in range(rounds):
        batch = rng.choice(seeds, size, replace=False)
        _, inputs = sampler.sample({ntype: batch}, fanouts, epoch=0, step=step)
        counted[inputs[ntype]] += 1
    return predicted[ntype], counted / rounds, out_degrees(shard)[ntype]


@pytest.mark.parametrize("typed", [False, True])
def test_inclusion_is_what_batches_show(typed: bool, tmp_path: Path) -> None:
    data, ntype = (typed_graph(), ITEM) if typed else (random_graph(), "_N")
    meta = partitioned(data, tmp_path, 1)
    ((predicted, counted, degree),) = run_ranks(1, frequencies, meta, ntype)
    assert ((counted == 0) >= (predicted == 0)).all()  # a node predicted 0 is never sampled
    assert np.corrcoef(predicted, counted)[0, 1] > 0.97
    assert np.abs(predicted - counted).mean() < 0.03
    # it predicts requested nodes better than the baseline does
    count = len(counted) // 5
    best, by_degree = (counted[np.argsort(-score)[:count]].sum() for score in (predicted, degree))
    assert best > by_degree


def test_a_whole_cache_keeps_every_row_that_can_be_asked_for() -> None:
    """Rows with a tiny chance are kept; here each hop has a thousandth of the previous one's."""
    hops, degree = 13, 1000
    num = 1 + hops * degree
    # a node's neighbours are the next 1,000, the first of which has neighbours itself
    has = np.zeros(num, np.int64)
    has[np.r_[0, np.arange(1, num - degree, degree)]] = degree
    rows = SimpleNamespace(
        first=0, num=num, indptr=np.r_[0, np.cumsum(has)], src=np.arange(1, num, dtype=np.int64)
    )
    shard: Any = SimpleNamespace(
        ntypes=["_N"], num_nodes=lambda _: num, topology={("_N", "_E", "_N"): rows}
    )
    fanouts = resolve_fanouts([1] * hops, [("_N", "_E", "_N")])
    seeds = np.zeros(1, np.int64)
    scores = inclusion(shard, {"_N": seeds}, 1, fanouts, replace=False)
    assert (scores["_N"] > 0).all()
    kept = choose(scores, {"_N": np.array([0, 1, num])}, [0], 1.0)
    assert len(kept["_N"]) == num - 1


def test_choose() -> None:
    bounds = {"a": np.array([0, 4, 10])}
    scores = {"a": np.array([9, 9, 9, 9, 0, 2, 1, 0, 0, 3], np.float32)}
    assert choose(scores, bounds, [0], 0.34)["a"].tolist() == [5, 9]
    assert choose(scores, bounds, [0], 1.0)["a"].tolist() == [5, 6, 9]  # only those with a score
    assert choose(scores, bounds, [0], 0.0)["a"].tolist() == []
    assert choose(scores, bounds, [1], 0.5)["a"].size == 2
    close = {"a": np.array([1e30, 0.25, 0.2500001, 0.25], np.float32)}
    for share, best in ((0.5, [0, 2]), (0.8, [0, 1, 2])):
        assert choose(close, {"a": np.array([0, 4])}, [], share)["a"].tolist() == best


@given(st.data())
def test_choose_is_sorting_by_score(data: st.DataObject) -> None:
    """Among equal scores, of which there are many, the first nodes are chosen."""
    score = np.array(
        data.draw(st.lists(st.sampled_from([0, 1e-38, 0.25, 0.2500001, 1, 7, 1e30]), max_size=40)),
        np.float32,
    )
    cuts = data.draw(st.lists(st.integers(0, len(score)), min_size=2, max_size=2).map(sorted))
    bounds = np.array([0, *cuts, len(score)])
    ranks = data.draw(st.lists(st.sampled_from(range(3)), unique=True))
    share = data.draw(st.floats(0, 1))
    own = np.zeros(len(score), bool)
    for rank in ranks:
        own[bounds[rank] : bounds[rank + 1]] = True
    remote = np.flatnonzero(~own)
    best = remote[np.argsort(-score[remote], kind="stable")][: int(share * len(remote))]
    expected = np.sort(best[score[best] > 0])
    assert choose({"a": score}, {"a": bounds}, ranks, share)["a"].tolist() == expected.tolist()


def test_blocks_of_nodes_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = partitioned(typed_graph(), tmp_path, 1)
    shard = shard_of(Exchange(World(0, 1)), meta, replicated=True)
    fanouts = resolve_fanouts(FANOUT, shard.etypes)
    given = shard, {ITEM: np.arange(9)}, 3, fanouts
    whole = inclusion(*given, replace=False)
    monkeypatch.setattr(cache, "_BLOCK", 7)
    for ntype, pieces in inclusion(*given, replace=False).items():
        assert np.array_equal(pieces, whole[ntype])


def test_memory_of_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice needs four bytes for each node of the whole graph, whatever the rank owns."""
    monkeypatch.setattr(cache, "_BLOCK", 1 << 16)
    held, etype = 1000, ("_N", "_E", "_N")
    fanouts = resolve_fanouts([2, 2], [etype])
    peaks, sizes = [], (1_000_000, 9_000_000)
    for num in sizes:
        src = np.random.default_rng(0).integers(0, num, 10 * held)
        rows = SimpleNamespace(first=0, num=held, indptr=np.arange(0, 10 * held + 1, 10), src=src)
        shard: Any = SimpleNamespace(
            ntypes=["_N"],
            etypes=[etype],
            num_nodes=lambda _, num=num: num,
            topology={etype: rows},
            own_sources=lambda _, src=src: src,
        )
        bounds = {"_N": np.array([0, held, num])}
        for policy in ("vip", "degree"):
            tracemalloc.start()
            if policy == "vip":
                scores = inclusion(shard, {"_N": np.arange(held)}, 10, fanouts, replace=False)
            else:
                scores = out_degrees(shard)
            assert len(choose(scores, bounds, [0], 1.0)["_N"]) > 9 * held
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            del scores
    for one, other in zip(peaks[:2], peaks[2:]):
        assert other - one < 4.01 * (sizes[1] - sizes[0])
