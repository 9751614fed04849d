from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from raygnn.graph.staging.parts import alias_tables
from raygnn.sampling import kernels
from raygnn.sampling.drawing import DrawBias, RowLists, count_banned, draw_rows, sample_rows, spans
from raygnn.sampling.kernels import hash_slots, locate, relabel, scale_rows, take_lists
from raygnn.util.hashing import mix_int
from tests.support.builders import stored


def csc(degrees: list[int]) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, np.arange(indptr[-1], dtype=np.int64) * 7  # distinct sources


NONE, NOBODY = np.empty(0, np.float32), np.empty(0, np.int64)


def sampled(
    indptr: np.ndarray,
    src: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray,
    fanout: int,
    replace: bool,
    key: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of each row's neighbours, and the neighbours; check their positions."""
    lists = stored(src, np.int32), keys.astype(np.int32)
    span = spans(stored(indptr, np.int64), rows)
    given = RowLists(*span, *lists), fanout, replace, np.uint64(key)
    out, neighbors, places = sample_rows(*given, True)
    assert np.array_equal(src[places], neighbors)
    _, same, nothing = sample_rows(*given, False)
    assert np.array_equal(same, neighbors)
    assert not len(nothing)
    return out, neighbors


def drawn(
    indptr: np.ndarray,
    src: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray,
    fanout: int,
    replace: bool,
    key: int,
    *,
    weight: np.ndarray = NONE,
    banned: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as `sampled` for lists with weights or banned entries."""
    whole, weight = stored(indptr, np.int64), stored(weight, np.float32)
    span = spans(whole, rows)
    kept = stored(src, np.int64 if src.max(initial=0) >= 2**31 else np.int32)
    alias = stored(alias_tables(whole, weight, kept) if len(weight) else [], np.uint64)
    bans = banned or (np.zeros(len(rows) + 1, np.int64), NOBODY)
    lists = RowLists(*span, kept, keys.astype(np.int32))
    bias = DrawBias(*span, weight, alias, *bans)
    given = lists, bias, fanout, replace, np.uint64(key)
    out, neighbors, places = draw_rows(*given, True)
    assert np.array_equal(src[places], neighbors)
    assert np.array_equal(draw_rows(*given, False)[1], neighbors)
    return out, neighbors


def draw(degrees: list[int], fanout: int, replace: bool = False, key: int = 1) -> list[list[int]]:
    indptr, src = csc(degrees)
    rows = np.arange(len(degrees))
    out, neighbors = sampled(indptr, src, rows, rows, fanout, replace, key)
    assert out[-1] == len(neighbors)
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


def test_a_rows_sample_does_not_depend_on_other_rows() -> None:
    indptr, src = csc([20] * 50)
    rows = np.arange(50)
    _, together = sampled(indptr, src, rows, rows, 5, False, 9)
    for row in rows:
        one = rows[row : row + 1]
        _, alone = sampled(indptr, src, one, one, 5, False, 9)
        assert np.array_equal(alone, together[5 * row : 5 * row + 5])


@pytest.mark.parametrize("replace", [False, True])
def test_every_neighbor_is_equally_likely(replace: bool) -> None:
    """The test is χ² over 20,000 nodes with 10 neighbours each and a fanout of 3."""
    count, degree, fanout = 20_000, 10, 3
    indptr = np.array([0, degree])
    src = np.arange(degree)
    rows, keys = np.zeros(count, np.int64), np.arange(count)
    _, neighbors = sampled(indptr, src, rows, keys, fanout, replace, 5)
    seen = np.bincount(neighbors, minlength=degree)
    expected = count * fanout / degree
    assert ((seen - expected) ** 2 / expected).sum() < 27.9  # p = 0.001 at 9 degrees of freedom


def test_rows_without_edges() -> None:
    assert draw([0, 3, 0], 2)[0] == []
    indptr, src = csc([3])
    out, neighbors = sampled(indptr, src, np.array([-1]), np.array([0]), 2, False, 1)
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
    bans = ban_indptr, np.array([v for b in lists for v in sorted(b)], np.int64)
    out, neighbors = drawn(
        indptr, src, rows, rows, fanout, replace, key, weight=weight, banned=bans
    )
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


def test_banned_entries_are_counted_as_often_as_they_occur() -> None:
    """Each parallel edge counts; banned entries that a list lacks do not."""
    indptr, src = np.array([0, 4, 6, 7]), np.array([5, 2, 5, 9, 5, 5, 2])
    rows = np.array([2, 0, 1, 0])
    banned = np.array([0, 1, 3, 3, 4]), np.array([3, 2, 5, 2])
    span = spans(stored(indptr, np.int64), rows)
    assert count_banned(*span, stored(src, np.int32), *banned).tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("weight", "fanout", "banned"),
    [
        (None, 3, [0]),
        (None, 3, [0, 1, 2, 3, 4]),  # little is left: the whole list is looked at
        ([1, 2, 3, 4, 0, 2, 1, 1], 3, []),
        ([1, 2, 3, 4, 0, 2, 1, 1], 2, [3, 5]),
        ([1e6, 1, 2, 3, 0, 4, 1e-3, 0], 3, []),
    ],
)
def test_chances_are_those_of_successive_draws(
    weight: list[float] | None, fanout: int, banned: list[int], replace: bool
) -> None:
    """The test is χ² over 30,000 nodes with the same 8 neighbours: the sampled sets (or, with
    replacement, neighbours) against all orders by hand."""
    count, degree = 30_000, 8
    weights = np.ones(degree) if weight is None else np.array(weight, np.float64)
    indptr, src = np.array([0, degree]), np.arange(degree)
    rows, keys = np.zeros(count, np.int64), np.arange(count)
    bans = np.arange(count + 1) * len(banned), np.tile(np.array(banned, np.int64), count)
    given = NONE if weight is None else weights
    out, neighbors = drawn(indptr, src, rows, keys, fanout, replace, 5, weight=given, banned=bans)
    chance = np.where(np.isin(src, banned), 0.0, weights)
    expected: dict[tuple[int, ...], float] = {}
    if replace:
        seen = Counter((node,) for node in neighbors.tolist())
        expected = {(node,): chance[node] / chance.sum() for node in src.tolist() if chance[node]}
    else:
        seen = Counter(tuple(sorted(neighbors[a:b].tolist())) for a, b in pairwise(out))
        for order in permutations(np.flatnonzero(chance).tolist(), fanout):
            left, likely = chance.sum(), 1.0
            for node in order:
                likely, left = likely * chance[node] / left, left - chance[node]
            expected[tuple(sorted(order))] = expected.get(tuple(sorted(order)), 0.0) + likely
    assert set(seen) <= set(expected)
    total = sum(seen.values())
    cells = [(seen[key], total * likely) for key, likely in expected.items()]
    many = [(number, mean) for number, mean in cells if mean >= 5]
    few = [(number, mean) for number, mean in cells if mean < 5]
    if few:
        many.append((sum(n for n, _ in few), sum(mean for _, mean in few) + 1e-9))
    score = sum((number - mean) ** 2 / max(mean, 1) for number, mean in many)
    assert score < chi2.ppf(1 - 1e-4, max(1, len(many) - 1))


def test_a_hub_costs_what_its_sample_costs() -> None:
    """Its list of a million entries is not read."""
    degree = 1_000_000
    indptr, weight = stored([0, degree], np.int64), np.ones(degree, np.float32)
    src = stored(range(degree), np.int32)
    alias = stored(alias_tables(indptr, stored(weight, np.float32), src), np.uint64)
    weight[5000:] = np.nan
    weight, span = stored(weight, np.float32), spans(indptr, np.zeros(1, np.int64))
    bias = DrawBias(*span, weight, alias, np.array([0, 1000]), np.arange(1000))
    lists = RowLists(*span, src, np.zeros(1, np.int32))
    _, neighbors, _ = draw_rows(lists, bias, 10, False, np.uint64(3), False)
    assert len(neighbors) == 10
    assert neighbors.min() > 5000


def shares(indptr: np.ndarray, weight: np.ndarray, src: np.ndarray) -> list[np.ndarray]:
    """Return each list's chances by its alias table; check the sources that it holds."""
    given = stored(indptr, np.int64), stored(weight, np.float32), stored(src, src.dtype)
    table, found = alias_tables(*given), []
    upper, lower = (table >> np.uint64(32)).astype(np.int64), (table & np.uint64(2**32 - 1))
    for low, high in pairwise(indptr.tolist()):
        degree, kept, other = high - low, upper[low:high], lower[low:high].astype(np.int64)
        if src.dtype == np.int32 and degree < 2**16:
            assert np.array_equal(other, src[low:high])
            other = kept % 2 ** degree.bit_length()
            kept = kept - other
        share = kept / 2**32 / max(degree, 1)
        if weight[low:high].any():
            np.add.at(share, other, 1 / degree - share)
        else:
            assert (other >= degree).all()
        found.append(share)
    return found


@given(
    st.lists(st.lists(st.floats(0, 1e6, width=32), max_size=9), min_size=1, max_size=6),
    st.sampled_from([np.int32, np.int64]),
)
def test_alias_tables_give_every_entry_its_share(lists: list[list[float]], dtype: type) -> None:
    weight = np.array([w for one in lists for w in one], np.float32)
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    src = np.arange(len(weight)).astype(dtype) * 7
    for (low, high), share in zip(pairwise(indptr), shares(indptr, weight, src)):
        total = weight[low:high].sum(dtype=np.float64)
        np.testing.assert_allclose(share, weight[low:high] / (total or 1), atol=1e-8)
        assert not share[weight[low:high] == 0].any() or high - low == 1


@pytest.mark.parametrize(
    ("degree", "first"), [(300, 0), (300, 2**40), (65_535, 2**31 - 65_535), (65_536, 0)]
)
def test_long_lists_and_ids_of_64_bits(degree: int, first: int) -> None:
    """Only short lists of 32-bit ids have sources in their alias tables."""
    weight = np.random.default_rng(0).exponential(size=degree).astype(np.float32)
    indptr, src = np.array([0, degree]), np.arange(degree) + first
    kept = src.astype(np.int32 if src[-1] < 2**31 else np.int64)
    (share,) = shares(indptr, weight, kept)
    exact = weight / weight.sum(dtype=np.float64)
    assert np.abs(share - exact).sum() < 2**-16
    rows, keys = np.zeros(5_000, np.int64), np.arange(5_000)
    _, neighbors = drawn(indptr, src, rows, keys, 10, True, 7, weight=weight)
    group = np.arange(degree) * 30 // degree
    seen, expected = np.bincount(group[neighbors - first]), 50_000 * np.bincount(group, exact)
    assert ((seen - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-4, 29)


@given(st.data())
def test_locate(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(bounds[-1])
    ranks = st.integers(0, len(sizes) - 1)
    here = data.draw(st.lists(ranks, min_size=1, unique=True))
    starts, content = np.full(len(sizes), -1), []
    for rank in here:  # in any order, with room between them
        content += [None] * data.draw(st.integers(0, 3))
        starts[rank] = len(content)
        content += range(bounds[rank], bounds[rank + 1])
    remote = [i for i in range(total) if i not in content]
    cached = data.draw(st.lists(st.sampled_from(remote), unique=True)) if remote else []
    table_ids, table_slots = hash_slots(np.array(cached, np.int64), len(content))
    content += [*cached, None]
    ids = data.draw(st.lists(st.integers(0, total - 1), max_size=60)) if total else []
    slots, wanted, counts, away, hits = locate(
        np.array(ids, np.int64), bounds, starts, table_ids, table_slots, len(content)
    )
    content += wanted.tolist()
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
