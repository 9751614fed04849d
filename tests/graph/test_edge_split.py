"""Edges to predict: split alike in every partition, and no message passes along those held out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.errors import DataError
from raygnn.graph.data import EdgeSplit, EdgeType, GraphData
from raygnn.graph.partition.edges import NONE, TEST, TRAIN, VAL, Splitter
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.staging.shard import NUMBER, SPLIT, Shard
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.seeds import OwnedEdges
from tests.graph.test_partition import dgl_partition
from tests.support.graphs import (
    ITEM,
    USER,
    everyones,
    partitioned,
    random_graph,
    shard_of,
    typed_graph,
)
from tests.support.ranks import run_ranks

PLAIN: EdgeType = ("_N", "_E", "_N")
BUYS: EdgeType = (USER, "buys", ITEM)
BOUGHT_BY: EdgeType = (ITEM, "bought_by", USER)


def graph(typed: bool) -> GraphData:
    """Build a graph with masks; some edges are in none, and some have a reverse."""
    data = typed_graph() if typed else random_graph(nodes=60, degree=6)
    etype = BUYS if typed else PLAIN
    edges = data.edges[etype]
    if typed:
        back = data.edges[BOUGHT_BY]
        half = back.num // 2
        back.src[:half], back.dst[:half] = edges.dst[:half].copy(), edges.src[:half].copy()
    else:
        half = edges.num // 2
        edges.src[half:] = np.where(np.arange(half) % 2, edges.dst[:half], edges.src[half:])
        edges.dst[half:] = np.where(np.arange(half) % 2, edges.src[:half], edges.dst[half:])
    kind = np.arange(edges.num) % 5
    edges.data |= {f"{name}_mask": kind == i for i, name in enumerate(("train", "val", "test"))}
    return data


def listed(shard: Shard, original: dict[str, np.ndarray], etype: EdgeType) -> list[Any]:
    """Return the edges that a shard holds, in original ids."""
    rows = shard.topology[etype]
    dst = np.repeat(np.arange(rows.num) + rows.first, np.diff(rows.indptr))
    src = rows.src[rows.indptr[0] : rows.indptr[-1]]
    pairs = zip(original[etype[0]][src].tolist(), original[etype[2]][dst].tolist())
    return sorted(pairs)


def held(
    exchange: Exchange, meta: PartitionMeta, split: EdgeSplit, replicated: bool
) -> tuple[dict[EdgeType, list[Any]], list[Any], list[Any], bool]:
    """Return what a rank holds: the message edges, the owned edges to predict (number, ends, split)
    and the degrees."""
    shard = shard_of(exchange, meta, replicated=replicated, hide=[split])
    whole = shard_of(exchange, meta, replicated=False, split=split)
    original = {t: everyones(exchange, shard.original[t]) for t in shard.ntypes}
    edges = OwnedEdges(whole, exchange, split.etype)
    ends = zip(original[split.etype[0]][edges.src], original[split.etype[2]][edges.dst])
    rows = zip(edges.column(NUMBER).tolist(), map(tuple, ends), edges.column(SPLIT).tolist())
    degrees = shard.in_degree(split.etype).numpy()
    return (
        {e: listed(shard, original, e) for e in shard.etypes},
        [(n, (int(s), int(d)), code) for n, (s, d), code in rows],
        degrees.tolist(),
        replicated,
    )


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("reverses", [False, True])
@pytest.mark.parametrize("replicated", [False, True])
def test_held_out_edges_are_hidden(
    typed: bool, reverses: bool, replicated: bool, tmp_path: Path
) -> None:
    data = graph(typed)
    etype, back = (BUYS, BOUGHT_BY) if typed else (PLAIN, PLAIN)
    edges = data.edges[etype]
    pairs = list(zip(edges.src.tolist(), edges.dst.tolist()))
    kept_out = edges.data["val_mask"] | edges.data["test_mask"]
    hidden = {pair for pair, out in zip(pairs, kept_out) if out} if reverses else set()
    expected = {
        e: sorted(
            (s, d)
            for i, (s, d) in enumerate(zip(frame.src.tolist(), frame.dst.tolist()))
            if not (e == etype and kept_out[i]) and not (e == back and (d, s) in hidden)
        )
        for e, frame in data.edges.items()
    }
    assert len(expected[back]) < data.edges[back].num - (0 if typed else kept_out.sum()) or (
        not reverses
    )
    split = EdgeSplit(etype, back if reverses else None)
    codes = np.select([edges.data[f"{n}_mask"] for n in ("train", "val", "test")], [0, 1, 2], -1)
    for workers, parts in ((1, 1), (2, 2), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        ranks = run_ranks(workers, held, meta, split, replicated)
        for e, wanted in expected.items():
            found = [pair for lists, *_ in ranks for pair in lists[e]]
            assert sorted(found) == sorted(wanted * (workers if replicated else 1))
        assert sum(sum(degrees) for _, _, degrees, _ in ranks) == len(expected[etype])
        rows = sorted(row for _, own, _, _ in ranks for row in own)
        assert rows == [(i, pair, int(code)) for i, (pair, code) in enumerate(zip(pairs, codes))]


@pytest.mark.parametrize("typed", [False, True])
def test_shares_are_of_the_users_graph(typed: bool, tmp_path: Path) -> None:
    data = graph(typed)
    etype = BUYS if typed else PLAIN
    split = EdgeSplit(etype, None, (0.3, 0.2), seed=4)
    found = []
    for workers, parts in ((1, 1), (2, 2), (2, 3)):
        ranks = run_ranks(workers, held, partitioned(data, tmp_path, parts), split, True)
        found.append(sorted(row for _, own, _, _ in ranks for row in own))
    assert found[0] == found[1] == found[2]
    rows = found[0]
    of_pair: dict[Any, set[int]] = {}
    for _, pair, code in rows:
        of_pair.setdefault(pair if typed else tuple(sorted(pair)), set()).add(code)
    assert all(len(codes) == 1 for codes in of_pair.values())
    shares = Counter(code for _, _, code in rows)
    assert NONE not in shares
    for code, share in ((TRAIN, 0.5), (VAL, 0.3), (TEST, 0.2)):
        assert abs(shares[code] / len(rows) - share) < 0.1
    other = EdgeSplit(etype, None, (0.3, 0.2), seed=5)
    ranks = run_ranks(1, held, partitioned(data, tmp_path, 1), other, True)
    assert sorted(ranks[0][1]) != rows


@pytest.mark.dgl
def test_a_partition_that_dgl_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL stores edges in another order; each keeps its mask, time and number."""
    data = graph(False)
    edges = data.edges[PLAIN]
    edges.data["at"] = np.random.default_rng(0).permutation(edges.num)
    masks = [edges.data[f"{name}_mask"] for name in ("train", "val", "test")]
    by_time = np.select([edges.data["at"] < 100, edges.data["at"] < 150], [0, 1], 2)
    _, nids, eids = dgl_partition(data, tmp_path, 2, monkeypatch)
    for split, codes in (
        (EdgeSplit(PLAIN), np.select(masks, [0, 1, 2], -1)),
        (EdgeSplit(PLAIN, shares=(100, 150), time="at"), by_time),
    ):
        splitter = Splitter(read_meta(tmp_path), split)
        for found in map(splitter.part, range(2)):
            numbers = eids[PLAIN][found.numbers]
            np.testing.assert_array_equal(nids["_N"][found.src], edges.src[numbers])
            np.testing.assert_array_equal(nids["_N"][found.dst], edges.dst[numbers])
            np.testing.assert_array_equal(found.codes, codes[numbers])


def test_masks_that_are_not_there(tmp_path: Path) -> None:
    meta = partitioned(random_graph(), tmp_path, 1)
    with pytest.raises(RuntimeError, match=f"{DataError.__name__}.*have no masks"):
        run_ranks(1, held, meta, EdgeSplit(PLAIN), True)
