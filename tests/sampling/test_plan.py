from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raygnn.sampling.plan import SeedPlan, permute, rank_share

SIZES = st.integers(1, 5000)
KEYS = st.integers(0, 2**64 - 1)


@given(SIZES, KEYS)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(st.integers(2, 10**15), KEYS, st.data())
def test_permute_one_position_at_a_time(size: int, key: int, data: st.DataObject) -> None:
    """A position's image does not depend on which other positions are asked for."""
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = permute(np.array(positions), size, key)
    alone = [int(permute(np.array([p]), size, key)[0]) for p in positions]
    assert together.tolist() == alone
    assert together.min() >= 0
    assert together.max() < size


def test_permute_depends_on_the_key_and_looks_random() -> None:
    size = 10_000
    one, other = (permute(np.arange(size), size, key) for key in (1, 2))
    assert np.mean(one == other) < 0.01
    assert abs(np.corrcoef(np.arange(size), one)[0, 1]) < 0.05
    # neighbours in the order are no neighbours in the image
    assert np.mean(np.abs(np.diff(one)) < size // 100) < 0.05


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
    assert np.array_equal(SeedPlan(10, 4, shuffle=False).batch(5, 2), [8, 9])


@given(st.lists(st.integers(0, 10**9), max_size=300, unique=True), st.integers(1, 9))
def test_rank_shares_are_even_and_complete(ids: list[int], world: int) -> None:
    array = np.array(ids, dtype=np.int64)
    shares = [rank_share(array, rank, world) for rank in range(world)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    joined = np.concatenate(shares)
    assert np.array_equal(array[joined], np.sort(array))  # in order of id, each once
