from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.sampling.kernels import relabel, sample_rows, ungroup_rows
from raygnn.sampling.keys import mix, mix_array


def csc(degrees: list[int]) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, np.arange(indptr[-1], dtype=np.int64) * 7  # distinct sources


def draw(degrees: list[int], fanout: int, replace: bool = False, key: int = 1) -> list[list[int]]:
    indptr, src = csc(degrees)
    rows = np.arange(len(degrees))
    out, neighbors = sample_rows(indptr, src, rows, rows, fanout, replace, np.uint64(key))
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


def test_a_row_draws_the_same_whoever_else_is_asked_for() -> None:
    indptr, src = csc([20] * 50)
    rows = np.arange(50)
    _, together = sample_rows(indptr, src, rows, rows, 5, False, np.uint64(9))
    for row in rows:
        _, alone = sample_rows(
            indptr, src, rows[row : row + 1], rows[row : row + 1], 5, False, np.uint64(9)
        )
        assert np.array_equal(alone, together[5 * row : 5 * row + 5])


@pytest.mark.parametrize("replace", [False, True])
def test_every_neighbor_is_equally_likely(replace: bool) -> None:
    """Chi-squared over the draws of 20,000 nodes with 10 neighbours each, fanout 3."""
    count, degree, fanout = 20_000, 10, 3
    indptr = np.array([0, degree])
    src = np.arange(degree)
    rows, keys = np.zeros(count, np.int64), np.arange(count)
    _, drawn = sample_rows(indptr, src, rows, keys, fanout, replace, np.uint64(5))
    seen = np.bincount(drawn, minlength=degree)
    expected = count * fanout / degree
    assert ((seen - expected) ** 2 / expected).sum() < 27.9  # p = 0.001 at 9 degrees of freedom


def test_rows_without_edges() -> None:
    assert draw([0, 3, 0], 2)[0] == []
    indptr, src = csc([3])
    out, neighbors = sample_rows(indptr, src, np.array([-1]), np.array([0]), 2, False, np.uint64(1))
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


@given(st.lists(st.integers(0, 6), max_size=30), st.randoms(use_true_random=False))
def test_ungroup_rows(degrees: list[int], random) -> None:  # type: ignore[no-untyped-def]
    lists = [list(range(10 * i, 10 * i + d)) for i, d in enumerate(degrees)]
    order = list(range(len(lists)))
    random.shuffle(order)
    arrived = [lists[i] for i in order]
    indptr, values = ungroup_rows(
        np.array(order, np.int64),
        np.array([len(a) for a in arrived], np.int64),
        np.array([v for a in arrived for v in a], np.int64),
    )
    assert [values[a:b].tolist() for a, b in pairwise(indptr)] == lists


@given(st.integers(0, 2**64 - 1))
def test_mix_is_one_function(value: int) -> None:
    assert mix(value) == int(mix_array(np.array([value], np.uint64))[0])
