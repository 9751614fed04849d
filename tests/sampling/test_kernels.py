from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raygnn.sampling import kernels
from raygnn.sampling.kernels import (
    draw_rows,
    hash_slots,
    locate,
    relabel,
    sample_rows,
    scale_rows,
    take_lists,
)
from raygnn.util.hashing import mix_int


def csc(degrees: list[int]) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, np.arange(indptr[-1], dtype=np.int64) * 7  # distinct sources


UNASKED = np.empty(0, np.int64)


def number(src: np.ndarray) -> np.ndarray:
    """A number of each edge that tells which it is."""
    return src * 3 + 1


def draw(degrees: list[int], fanout: int, replace: bool = False, key: int = 1) -> list[list[int]]:
    indptr, src = csc(degrees)
    rows = np.arange(len(degrees))
    given = (rows, rows, fanout, replace, np.uint64(key))
    out, neighbors, numbers = sample_rows(indptr, src, number(src), *given)
    assert out[-1] == len(neighbors)
    assert np.array_equal(numbers, number(neighbors))
    _, same, nothing = sample_rows(indptr, src, UNASKED, *given)
    assert np.array_equal(same, neighbors)
    assert not len(nothing)
    return [neighbors[a:b].tolist() for a, b in pairwise(out)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(-1, 12),
    st.booleans(),
    st.integers(0, 2**63),
)
def test_samples_come_from_the_row(
    degrees: list[int], fanout: int, replace: bool, key: int
) -> None:
    indptr, src = csc(degrees)
    for row, drawn in enumerate(draw(degrees, fanout, replace, key)):
        own = src[indptr[row] : indptr[row + 1]].tolist()
        assert set(drawn) <= set(own)
        if fanout == -1:
            assert drawn == own
        elif replace:
            assert len(drawn) == (fanout if own else 0)
        else:
            assert len(drawn) == len(set(drawn)) == min(fanout, len(own))


def test_a_row_draws_the_same_whoever_else_is_asked_for() -> None:
    indptr, src = csc([20] * 50)
    rows = np.arange(50)
    _, together, _ = sample_rows(indptr, src, UNASKED, rows, rows, 5, False, np.uint64(9))
    for row in rows:
        _, alone, _ = sample_rows(
            indptr, src, UNASKED, rows[row : row + 1], rows[row : row + 1], 5, False, np.uint64(9)
        )
        assert np.array_equal(alone, together[5 * row : 5 * row + 5])


@pytest.mark.parametrize("replace", [False, True])
def test_every_neighbor_is_equally_likely(replace: bool) -> None:
    """Chi-squared over the draws of 20,000 nodes with 10 neighbours each, fanout 3."""
    count, degree, fanout = 20_000, 10, 3
    indptr = np.array([0, degree])
    src = np.arange(degree)
    rows, keys = np.zeros(count, np.int64), np.arange(count)
    _, drawn, _ = sample_rows(indptr, src, UNASKED, rows, keys, fanout, replace, np.uint64(5))
    seen = np.bincount(drawn, minlength=degree)
    expected = count * fanout / degree
    assert ((seen - expected) ** 2 / expected).sum() < 27.9  # p = 0.001 at 9 degrees of freedom


def test_rows_without_edges() -> None:
    assert draw([0, 3, 0], 2)[0] == []
    indptr, src = csc([3])
    given = (np.array([-1]), np.array([0]), 2, False, np.uint64(1))
    out, neighbors, _ = sample_rows(indptr, src, UNASKED, *given)
    assert out.tolist() == [0, 0]
    assert len(neighbors) == 0


@given(
    st.lists(st.integers(0, 2**62), max_size=50, unique=True),
    st.lists(st.integers(0, 2**62), max_size=50),
    st.lists(st.integers(0, 60), max_size=50),
)
def test_relabel(known: list[int], fresh: list[int], again: list[int]) -> None:
    ids = np.array(fresh + [known[i] for i in again if i < len(known)], dtype=np.int64)
    nodes, local = relabel(np.array(known, dtype=np.int64), ids)
    assert nodes[: len(known)].tolist() == known
    assert len(set(nodes.tolist())) == len(nodes) == len(set(known) | set(ids.tolist()))
    assert np.array_equal(nodes[local], ids)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.data())
def test_take_lists(degrees: list[int], data: st.DataObject) -> None:
    indptr, values = csc(degrees)
    order = data.draw(st.lists(st.integers(0, len(degrees) - 1), max_size=20))
    out, taken = take_lists(indptr, values, np.array(order, np.int64))
    lists = [values[a:b].tolist() for a, b in pairwise(indptr)]
    assert [taken[a:b].tolist() for a, b in pairwise(out)] == [lists[i] for i in order]


NONE = np.empty(0, np.float32)


def draw_from(
    degrees: list[int],
    fanout: int,
    *,
    weight: np.ndarray = NONE,
    banned: list[list[int]] | None = None,
    replace: bool = False,
    key: int = 1,
) -> list[list[int]]:
    indptr, src = csc(degrees)
    rows = np.arange(len(degrees))
    lists = banned or [[] for _ in degrees]
    ban_indptr = np.concatenate([[0], np.cumsum([len(b) for b in lists])]).astype(np.int64)
    ban = np.array([v for b in lists for v in b], np.int64)
    given = (weight, rows, rows, fanout, replace, np.uint64(key), ban_indptr, ban)
    out, neighbors, numbers = draw_rows(indptr, src, number(src), *given)
    assert np.array_equal(numbers, number(neighbors))
    assert np.array_equal(draw_rows(indptr, src, UNASKED, *given)[1], neighbors)
    return [neighbors[a:b].tolist() for a, b in pairwise(out)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(-1, 12),
    st.booleans(),
    st.integers(0, 2**63),
)
def test_without_weights_and_bans_it_is_the_same_draw(
    degrees: list[int], fanout: int, replace: bool, key: int
) -> None:
    plain = draw(degrees, fanout, replace, key)
    assert draw_from(degrees, fanout, replace=replace, key=key) == plain


@given(st.data(), st.integers(-1, 6), st.booleans(), st.booleans(), st.integers(0, 2**63))
def test_banned_and_weightless_entries_are_never_drawn(
    data: st.DataObject, fanout: int, replace: bool, weighted: bool, key: int
) -> None:
    degrees = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=8))
    indptr, src = csc(degrees)
    weight = NONE
    if weighted:
        drawn = data.draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=1, max_size=9))
        weight = np.resize(np.array(drawn, np.float32), len(src))
    banned = [
        data.draw(st.lists(st.sampled_from(src[a:b].tolist()), max_size=4)) if b > a else []
        for a, b in pairwise(indptr)
    ]
    found = draw_from(degrees, fanout, weight=weight, banned=banned, replace=replace, key=key)
    for row, (a, b) in enumerate(pairwise(indptr)):
        allowed = [
            v
            for j, v in zip(range(a, b), src[a:b].tolist())
            if v not in banned[row] and (not weighted or weight[j] > 0)
        ]
        assert set(found[row]) <= set(allowed)
        if fanout == -1:
            assert found[row] == allowed
        elif replace:
            assert len(found[row]) == (fanout if allowed else 0)
        else:
            assert len(found[row]) == len(set(found[row])) == min(fanout, len(allowed))


def test_weights_are_probabilities() -> None:
    """With replacement a neighbour is drawn in proportion to its weight; without, first draws
    are. Chi-squared over 20,000 nodes with 5 neighbours each."""
    count, weight = 20_000, np.array([1, 2, 3, 4, 0], np.float64)
    indptr, src = np.array([0, 5]), np.arange(5)
    rows, keys = np.zeros(count, np.int64), np.arange(count)
    none, nobody = np.zeros(count + 1, np.int64), np.empty(0, np.int64)
    for fanout, replace in ((3, True), (1, False)):
        _, drawn, _ = draw_rows(
            indptr, src, UNASKED, weight, rows, keys, fanout, replace, np.uint64(5), none, nobody
        )
        seen = np.bincount(drawn, minlength=5)
        expected = count * fanout * weight / weight.sum()
        assert seen[4] == 0
        assert ((seen - expected)[:4] ** 2 / expected[:4]).sum() < 16.3  # p = 0.001 at 3


def test_weighted_draws_without_replacement_follow_successive_draws() -> None:
    """Two of three entries with weights 1, 2, 3: the pairs' chances by hand."""
    count, weight = 30_000, np.array([1.0, 2.0, 3.0])
    indptr, src = np.array([0, 3]), np.arange(3)
    rows, keys = np.zeros(count, np.int64), np.arange(count)
    none, nobody = np.zeros(count + 1, np.int64), np.empty(0, np.int64)
    _, drawn, _ = draw_rows(
        indptr, src, UNASKED, weight, rows, keys, 2, False, np.uint64(3), none, nobody
    )
    missing = np.bincount(3 - drawn.reshape(-1, 2).sum(1), minlength=3)
    total = weight.sum()
    chance = [
        sum(
            weight[i] / total * weight[j] / (total - weight[i])
            for i in range(3)
            for j in range(3)
            if i != j and left not in (i, j)
        )
        for left in range(3)
    ]
    expected = count * np.array(chance)
    assert ((missing - expected) ** 2 / expected).sum() < 13.8  # p = 0.001 at 2


@given(st.data())
def test_locate(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(bounds[-1])
    rank = data.draw(st.integers(0, len(sizes) - 1))
    first, last = int(bounds[rank]), int(bounds[rank + 1])
    remote = [i for i in range(total) if not first <= i < last]
    cached = data.draw(st.lists(st.sampled_from(remote), unique=True)) if remote else []
    base = last - first + len(cached)
    ids = data.draw(st.lists(st.integers(0, total - 1), max_size=60)) if total else []
    table_ids, table_slots = hash_slots(np.array(cached, np.int64), last - first)
    slots, wanted, counts, away, hits = locate(
        np.array(ids, np.int64), bounds, rank, table_ids, table_slots, base
    )
    content = [*range(first, last), *cached, *wanted.tolist()]
    assert [content[slot] for slot in slots] == ids
    distinct = {i for i in ids if i in set(remote)}
    assert sorted(wanted.tolist()) == sorted(distinct - set(cached))
    assert (away, hits) == (len(distinct), len(distinct & set(cached)))
    owners = np.searchsorted(bounds, wanted, side="right") - 1
    assert (np.diff(owners) >= 0).all()
    assert np.array_equal(counts, np.bincount(owners, minlength=len(sizes)))


@given(st.integers(0, 2**64 - 1))
def test_mix_is_one_function(value: int) -> None:
    assert mix_int(value) == int(kernels.mix(np.uint64(value)))


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40), st.integers(1, 300))
def test_bf16_rows_are_scaled_as_torch_scales_them(bits: list[int], count: int) -> None:
    given = np.array(bits, np.uint16).reshape(1, -1)
    values = torch.from_numpy(given.view(np.int16).copy()).view(torch.bfloat16)
    by = torch.tensor([1 / count])
    scale_rows(given, by.numpy())
    scaled = torch.from_numpy(given.view(np.int16)).view(torch.bfloat16)
    expected = (values.float() * by.unsqueeze(1)).to(torch.bfloat16)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)
