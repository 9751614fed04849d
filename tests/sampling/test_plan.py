"""The sampling plan: the order of seeds, the number of neighbours, and the keys of both."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raygnn.errors import ConfigError
from raygnn.sampling.plan import SeedPlan, permute, rank_share, resolve_fanouts
from raygnn.sampling.seeds import known, owned_nodes
from raygnn.util.hashing import derive_key
from tests.support.graphs import TYPED

SIZES = st.integers(1, 5000)
KEYS = st.integers(0, 2**64 - 1)


@given(SIZES, KEYS)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(st.integers(2, 10**15), KEYS, st.data())
def test_permute_one_position_at_a_time(size: int, key: int, data: st.DataObject) -> None:
    """A position's image does not depend on the other requested positions."""
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = permute(np.array(positions), size, key)
    alone = [int(permute(np.array([p]), size, key)[0]) for p in positions]
    assert together.tolist() == alone
    assert together.min() >= 0
    assert together.max() < size


def chi_square(counts: np.ndarray) -> float:
    """Return the χ² statistic of equally likely cells in standard deviations above its mean."""
    freedom = counts.size - 1
    statistic = ((counts - counts.mean()) ** 2).sum() / counts.mean()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 30])
def test_permutations_of_few_are_equally_likely(size: int) -> None:
    """All permutations, images of an element and images of a pair are uniform; fixed keys exclude a
    failure by chance."""
    drawn = np.array([permute(np.arange(size), size, key) for key in range(20_000)])
    assert np.array_equal(np.sort(drawn, 1), np.tile(np.arange(size), (len(drawn), 1)))
    at = np.zeros((size, size), np.int64)
    pairs = np.zeros((size, size), np.int64)
    for position in range(size):
        at[position] = np.bincount(drawn[:, position], minlength=size)
        after = drawn[:, (position + 1) % size]
        np.add.at(pairs, (drawn[:, position], after), 1)
    assert chi_square(at) < 5
    assert chi_square(pairs[~np.eye(size, dtype=bool)]) < 5
    if size <= 5:
        which = np.unique(drawn, axis=0, return_counts=True)[1]
        assert len(which) == math.factorial(size)
        assert chi_square(which) < 5


@pytest.mark.parametrize("size", [999, 1000, 1001])
def test_permutations_on_both_sides_of_the_border(size: int) -> None:
    positions = np.array([0, 1, size // 2, size - 1])
    whole = permute(np.arange(size), size, 5)
    assert np.array_equal(np.sort(whole), np.arange(size))
    assert np.array_equal(permute(positions, size, 5), whole[positions])
    drawn = np.array([permute(positions, size, key) for key in range(5000)])
    for column in drawn.T:
        assert chi_square(np.bincount(column * 20 // size, minlength=20)) < 5
    gap = (drawn[:, 0] - drawn[:, 1]) % size
    assert chi_square(np.bincount(gap * 20 // size, minlength=20)) < 5


@pytest.mark.parametrize("size", [31, 64, 500, 1024, 1040, 5000])
def test_gaps_between_positions_are_equally_likely(size: int) -> None:
    """The gap between any two of the first, middle and last positions is uniform."""
    positions = np.array([0, 1, 2, size // 2, size // 2 + 1, size - 2, size - 1])
    drawn = np.array([permute(positions, size, key) for key in range(20_000)])
    for one, other in itertools.combinations(drawn.T, 2):
        assert chi_square(np.bincount((one - other) % size, minlength=size)[1:]) < 5


@pytest.mark.parametrize(
    ("size", "first"),
    [
        (2, [1, 0]),
        (31, [26, 29, 19, 24, 13]),
        (1000, [575, 991, 241, 193, 792]),
        (1001, [847, 180, 921, 956, 725]),
        (1_000_000, [282367, 737787, 373116, 607184, 610416]),
    ],
)
def test_the_order_of_a_key_stays(size: int, first: list[int]) -> None:
    """A later version may resume a run within an epoch."""
    assert permute(np.arange(len(first)), size, 7).tolist() == first


@given(SIZES, st.integers(1, 700), st.integers(0, 2**32 - 1), st.integers(0, 100))
def test_an_epoch_has_every_seed_once(num: int, batch: int, seed: int, epoch: int) -> None:
    plan = SeedPlan(num, batch, seed)
    batches = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
    assert all(len(b) == batch for b in batches[:-1])
    assert 0 < len(batches[-1]) <= batch
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(num))


def test_epochs_differ_and_repeat() -> None:
    plan = SeedPlan(1000, 100, seed=3)
    assert not np.array_equal(plan.batch(0, 0), plan.batch(1, 0))
    assert np.array_equal(plan.batch(7, 4), SeedPlan(1000, 100, seed=3).batch(7, 4))
    assert not np.array_equal(plan.batch(0, 0), SeedPlan(1000, 100, seed=4).batch(0, 0))


@given(st.lists(st.integers(0, 10**9), max_size=300, unique=True), st.integers(1, 9))
def test_rank_shares_are_even_and_complete(ids: list[int], world: int) -> None:
    array = np.array(ids, dtype=np.int64)
    shares = [rank_share(array, rank, world) for rank in range(world)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    joined = np.concatenate(shares)
    assert np.array_equal(array[joined], np.sort(array))  # in order of id, each once


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5, unique=True), st.data())
def test_a_key_depends_on_every_part_and_on_their_order(
    parts: list[int], data: st.DataObject
) -> None:
    key = derive_key(*parts)
    place = data.draw(st.integers(0, len(parts) - 1))
    assert derive_key(*parts[:place], parts[place] ^ 1, *parts[place + 1 :]) != key
    assert derive_key(*parts[:place], *parts[place + 1 :]) != key
    other = data.draw(st.permutations(parts))
    assert (derive_key(*other) == key) == (other == parts)


def test_lower_ranks_receive_seeds_first() -> None:
    """Rank 0 has a seed in a batch with fewer seeds than ranks."""
    assert [len(rank_share(np.array([7]), rank, 3)) for rank in range(3)] == [1, 0, 0]
    assert len(rank_share(np.array([7, 8]), 0, 5)) == 1


def test_seeds_are_of_their_split_and_have_a_target() -> None:
    shard: Any = SimpleNamespace(node_data={"_N": {"train_mask": torch.tensor([1, 1, 0, 1, 0])}})
    classes = torch.tensor([0, -1, 3, 2, -100])
    assert owned_nodes(shard, "_N", "train", classes).tolist() == [0, 3]
    assert owned_nodes(shard, "_N", "test", classes).tolist() == []
    nan = float("nan")
    assert known(classes).tolist() == [True, False, True, True, False]
    assert known(torch.tensor([0.0, nan, -2.0])).tolist() == [True, False, True]
    assert known(torch.tensor([[0.0, nan], [-2.0, 1.0]])).tolist() == [False, True]


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 5), st.integers(1, 30))
def test_batches_until_so_many_steps(num: int, batch: int, accumulate: int, steps: int) -> None:
    """The count ends with the last step's accumulation window, which may be short."""
    plan = SeedPlan(num, batch, accumulate=accumulate)
    batches = made = 0
    while made < steps:
        step = batches % plan.steps_per_epoch
        batches += 1
        made += step == plan.window(step)[-1]
    assert plan.batches_until(steps) == batches


ALSO, BUYS, BOUGHT_BY, HAS = TYPED


def test_one_number_is_for_all() -> None:
    assert resolve_fanouts([3, -1], TYPED) == [dict.fromkeys(TYPED, 3), dict.fromkeys(TYPED, -1)]


def test_names() -> None:
    (found,) = resolve_fanouts([{"*": 1, "also": 2, "user:buys:item": 0}], TYPED)
    assert found == {ALSO: 2, BUYS: 0, BOUGHT_BY: 1, HAS: 1}


def test_a_full_edge_type_overrides_a_relation() -> None:
    twice = [("a", "r", "b"), ("b", "r", "a")]
    for hop in ({"r": 5, "b:r:a": 2}, {"b:r:a": 2, "r": 5}):
        assert resolve_fanouts([hop], twice) == [{("a", "r", "b"): 5, ("b", "r", "a"): 2}]


@pytest.mark.parametrize(
    ("hop", "words"), [({"*": 1, "bys": 2}, "'bys' is no edge type"), ({"also": 2}, "no number")]
)
def test_fanouts_of_unknown_types(hop: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_fanouts([4, hop], TYPED)
    assert "sampling.fanout[1]" in str(caught.value)
