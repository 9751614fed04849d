"""Partitions by streaming: limits that hold whatever the graph, and one result for one input."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from raygnn.errors import DataError
from raygnn.graph.partition import edge_kernels, metis, stream
from raygnn.graph.partition.stream import (
    NeighbourLists,
    Passes,
    assign_by_streaming,
    balance_groups,
)

# small graphs are handled as large ones: clusters, a sample of the edges, several blocks and ranges
SMALL = {
    "_COARSE_NODES": 1,
    "_CLUSTERS": 1,
    "_CLUSTERS_OF_A_PART": 2,
    "_COARSE_EDGES": 16,
    "_EDGES_OF_A_NODE": 1,
    "_RANGE": 8,
}


def chunks(src: np.ndarray, dst: np.ndarray, size: int, dtype: str = "int64") -> Passes:
    def passes() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(src), size):
            ends = slice(start, start + size)
            yield src[ends].astype(dtype), dst[ends].astype(dtype)

    return passes


@contextlib.contextmanager
def neighbour_lists(num: int, edges: Passes, scratch: Path) -> Iterator[NeighbourLists]:
    yield NeighbourLists(num, edges, scratch, itertools.repeat(None))
    (scratch / "neighbours").unlink()


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    """Draw edges with loops, repetitions and isolated nodes, and often hubs with nearly all
    edges."""
    num = draw(st.integers(1, 80))
    count = draw(st.integers(0, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = rng.integers(0, num, (2, count))
    for end in ends:
        hubs = draw(st.sampled_from([0, 0, 1, 2]))
        if hubs:
            end[:] = rng.integers(0, min(hubs, num), count)
    return num, ends[0], ends[1]


def check_balance(part: np.ndarray, groups: np.ndarray, dst: np.ndarray, parts: int) -> None:
    assert len(part) == len(groups)
    assert part.max(initial=0) < parts
    for group in np.unique(groups):
        sizes = np.bincount(part[groups == group], minlength=parts)
        assert sizes.max() <= max(1.05 * sizes.mean(), np.ceil(sizes.mean()))
    loads = np.bincount(part[dst], minlength=parts)
    degrees = np.bincount(dst, minlength=1)
    assert loads.max() <= max(1.05 * loads.mean(), loads.mean() + degrees.max())


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("lists")
    yield path
    assert not list(path.iterdir())


@given(edge_lists(), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_limits_hold_and_chunks_make_no_difference(
    scratch: Path,
    graph: tuple[int, np.ndarray, np.ndarray],
    parts: int,
    kinds: int,
    small: bool,
    seed: int,
) -> None:
    num, src, dst = graph
    assume(1 < parts < num)
    groups = np.random.default_rng(seed).integers(0, kinds, num).astype(np.uint8)
    found = []
    for size, dtype, chunk in ((1000, "int64", 1 << 20), (7, "int32", 11)):
        with patch.multiple(stream, **(SMALL if small else {}), _CHUNK=chunk):
            edges = chunks(src, dst, size, dtype)
            found.append(assign_by_streaming(num, edges, parts, scratch, groups=groups))
    part = found[0]
    assert part.dtype == np.uint8
    assert np.array_equal(*found)
    check_balance(part, groups, dst, parts)


@given(edge_lists(), st.sampled_from([1, 3, 1 << 16]), st.sampled_from([1, 20, 1 << 20]))
def test_lists_have_the_neighbours(
    scratch: Path, graph: tuple[int, np.ndarray, np.ndarray], most: int, chunk: int
) -> None:
    """A list that is too long has neighbours from its whole length."""
    num, src, dst = graph
    wanted: list[list[int]] = [[] for _ in range(num)]
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        if a != b:
            wanted[a].append(b)
            wanted[b].append(a)
    with (
        patch.multiple(stream, _NEIGHBOURS=most, _CHUNK=chunk, _RANGE=8),
        neighbour_lists(num, chunks(src, dst, 50), scratch) as lists,
    ):
        assert lists.degrees.tolist() == [len(some) for some in wanted]
        assert lists.in_degrees.tolist() == np.bincount(dst, minlength=num).tolist()
        for _ in range(2):
            found = []
            for first, lengths, ids in lists.blocks():
                assert first == len(found)
                found += [some.tolist() for some in np.split(ids, np.cumsum(lengths)[:-1])]
            assert len(found) == num
            for some, all_of_them in zip(found, wanted, strict=True):
                assert len(some) == min(len(all_of_them), most)
                if len(all_of_them) <= most:
                    assert some == all_of_them
                step = len(all_of_them) / max(len(some), 1)
                for at, neighbour in enumerate(some):
                    assert neighbour in all_of_them[int(at * step) : int((at + 1) * step) + 1]


def test_lists_that_are_cut_short_are_not_used(scratch: Path) -> None:
    edges = chunks(np.arange(50), np.arange(50) + 1, 50)
    with neighbour_lists(51, edges, scratch) as lists:
        os.truncate(scratch / "neighbours", 200)
        with pytest.raises(OSError, match="only 50 of 100 ids can be read back"):
            list(lists.blocks())


def communities(sizes: list[int], degree: int, across: float) -> tuple[int, np.ndarray, np.ndarray]:
    """An undirected graph, its edges in random order, a share of them between communities."""
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.cumsum([0, *sizes])
    num = len(label)
    src = np.repeat(np.arange(num), degree // 2)
    within = starts[label[src]] + (rng.random(len(src)) * np.array(sizes)[label[src]]).astype(int)
    dst = np.where(rng.random(len(src)) < across, rng.integers(0, num, len(src)), within)
    order = rng.permutation(2 * len(src))
    return num, np.concatenate([src, dst])[order], np.concatenate([dst, src])[order]


def test_communities_stay_together(scratch: Path) -> None:
    num, src, dst = communities([300] * 40, 20, 0.1)
    seen: list[str] = []
    with patch.multiple(stream, _COARSE_NODES=8000):
        part = assign_by_streaming(num, chunks(src, dst, 1 << 14), 4, scratch, progress=seen.append)
    assert len(seen) < 12  # nodes stop moving when all communities are together
    check_balance(part, np.zeros(num, int), dst, 4)
    assert np.mean(part[src] != part[dst]) < 0.1  # 0.073 are between communities


def test_hubs_and_their_leaves(scratch: Path) -> None:
    """Leaves of ten stars have no other neighbour when their hub's cluster is full."""
    num, hubs = 20_000, 10
    dst = np.arange(hubs, num)
    src = dst % hubs
    with patch.multiple(stream, _COARSE_NODES=8000):
        part = assign_by_streaming(num, chunks(src, dst, 999), 2, scratch)
    check_balance(part, np.zeros(num, int), dst, 2)
    assert np.mean(part[src] != part[dst]) < 0.1


def test_uneven_halves_share_their_edges(scratch: Path) -> None:
    rng = np.random.default_rng(0)
    half = 2000
    dense, sparse = rng.integers(0, half, (2, 30 * half)), rng.integers(0, half, (2, 3 * half))
    src, dst = np.concatenate([dense, sparse + half], axis=1)
    part = assign_by_streaming(2 * half, chunks(src, dst, 10_000), 2, scratch)
    check_balance(part, np.zeros(2 * half, int), dst, 2)


def test_metis_does_not_depend_on_uninitialised_memory() -> None:
    """DGL's METIS with several constraints reads memory that it has not written."""
    rng = np.random.default_rng(0)
    num = 3000
    src, dst = (num * rng.random((2, 20 * num)) ** 3).astype(np.int64)
    graph = metis.undirected(lambda: [(src, dst)], num)
    weights = np.stack([np.ones(num, np.int64), np.bincount(dst, minlength=num)], axis=1)
    results = set()
    for _ in range(10):
        junk = [rng.bytes(int(size)) for size in rng.integers(1, 100_000, 1000)]
        del junk[::2]
        results.add(metis.metis(*graph, 4, weights).tobytes())
    assert len(results) == 1


def test_metis_cuts_light_edges(scratch: Path) -> None:
    """Pairs that many edges join stay together; the graph of clusters counts parallel edges."""
    pairs = np.arange(0, 400, 2)
    src = np.concatenate([np.repeat(pairs, 9), pairs + 1])
    dst = np.concatenate([np.repeat(pairs + 1, 9), (pairs + 2) % 400])
    edges = chunks(src, dst, 100)
    with (
        patch.object(stream, "_COARSE_EDGES", len(src)),
        neighbour_lists(400, edges, scratch) as lists,
    ):
        coarse = stream._coarse_graph(lists, np.arange(400), 400)
    assert coarse[0, 1] == coarse[1, 0] == 9
    assert coarse[1, 2] == 1
    ones = np.ones((400, 1), np.int64)
    for parts in (4, 5, 8, 10):
        part = metis.metis(coarse.indptr, coarse.indices, parts, ones, coarse.data)
        assert (part[pairs] == part[pairs + 1]).all()


def test_edges_of_clusters_count_once_whatever_the_degrees(scratch: Path) -> None:
    hub, leaves = np.zeros(9, np.int64), np.arange(1, 10)
    edges = chunks(hub, leaves, 4)
    with neighbour_lists(10, edges, scratch) as lists:
        coarse = stream._coarse_graph(lists, np.arange(10), 10)
    assert coarse.toarray()[0].tolist() == [0, *[1] * 9]
    assert coarse.sum() == 18


def test_many_parts(scratch: Path) -> None:
    num, src, dst = communities([10] * 60, 6, 0.1)
    part = assign_by_streaming(num, chunks(src, dst, 100), 300, scratch)
    assert part.dtype == np.uint16
    check_balance(part, np.zeros(num, int), dst, 300)


def test_parts_are_evened_whose_nodes_are_nearly_alike() -> None:
    """The first part exceeds its limit of in-edges, and has no node with few of them to
    exchange."""
    in_degrees = np.array([*[20] * 5, *[16, 16, 15, 15, 15] * 9], np.uint32)
    labels = np.repeat(np.arange(10, dtype=np.int32), 5)
    balance = stream.Balance(np.zeros(50, np.uint8), in_degrees, 10)
    balance.count(labels)
    assert balance.loads.max() == 100 > balance.mean_load + 20
    balance.enforce_limits(labels, in_degrees)
    assert np.bincount(labels).tolist() == [5] * 10
    assert np.bincount(labels, in_degrees).max() == 90


@given(edge_lists(), st.one_of(edge_lists(), st.integers(0, 5)), st.sampled_from([8, 1 << 20]))
@example(graph=(3, np.array([0]), np.array([1])), other=1, size=8)
def test_edges_that_change_between_the_passes_are_refused(
    graph: tuple[int, np.ndarray, np.ndarray],
    other: tuple[int, np.ndarray, np.ndarray] | int,
    size: int,
) -> None:
    """With other degrees; as many edges of other nodes are noticed before they are written, too."""
    num, src, dst = graph
    given = (src + other, dst + other) if isinstance(other, int) else other[1:]
    ends = given[0] % num, given[1] % num
    degrees = [
        np.bincount(np.concatenate([a[a != b], b[a != b]]), minlength=num)
        for a, b in ((src, dst), ends)
    ]
    calls = iter([[(src, dst)], [ends]])
    changed = not np.array_equal(*degrees)
    refused: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if changed:
        refused = pytest.raises(DataError, match="the edges have changed")
    with TemporaryDirectory() as place, patch.object(stream, "_RANGE", size), refused:
        NeighbourLists(num, lambda: next(calls), Path(place), itertools.repeat(None))


def test_passes_are_announced(scratch: Path) -> None:
    seen: list[str] = []
    with patch.multiple(stream, **SMALL):
        src, dst = np.arange(99), np.arange(99) + 1
        assign_by_streaming(100, chunks(src, dst, 50), 2, scratch, progress=seen.append)
    assert seen == [f"pass {i} of at most 12" for i in range(1, len(seen) + 1)]
    assert 7 <= len(seen) <= 12


def test_groups_are_types_and_training_nodes() -> None:
    train = np.arange(100) < 40
    types = [(100, train), (3, None), (100, train), (50, np.ones(50, bool))]
    assert balance_groups(types, 5).tolist() == [
        *(1 if t else 0 for t in train),
        *[2] * 3,
        *(4 if t else 3 for t in train),
        *[5] * 50,
    ]
    assert balance_groups(types, 6).tolist() == [*[0] * 100, *[1] * 3, *[2] * 100, *[3] * 50]
    assert balance_groups(types, 5).dtype == np.uint8


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.sampled_from([1, 64]),
    st.lists(st.integers(0, 60), min_size=1),
)
@example(0, 12, 1, [60, 1, 60])
def test_labels_are_counted(seed: int, kinds: int, step: int, lengths: list[int]) -> None:
    """The same table serves lists of any length, also if many labels have one hash."""
    rng = np.random.default_rng(seed)
    labels = (rng.zipf(1.5, 100).clip(1, kinds).astype(np.int32) - 1) * step
    slots = np.full(4 * max(*lengths, 1), -1, np.int32)
    names, counts = np.zeros(60, np.int32), np.zeros(60, np.int64)
    for length in lengths:
        seen = rng.integers(0, 100, length).astype(np.int32)
        num = edge_kernels._count_labels(seen, labels, slots, names, counts)
        assert dict(zip(names[:num].tolist(), counts[:num].tolist(), strict=True)) == dict(
            Counter(labels[seen].tolist())
        )
        assert (slots == -1).all()
