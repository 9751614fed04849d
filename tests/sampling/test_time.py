"""Draws before a time: against brute force, and the same whoever draws."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.graph.data import EdgeType, GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.parts import alias_tables
from raygnn.graph.staging.shard import EdgeReads
from raygnn.sampling.drawing import DrawBias, RowLists, draw_rows, spans, spans_before
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler, Timing
from tests.support.builders import stored
from tests.support.graphs import ITEM, everyones, partitioned, random_graph, shard_of, typed_graph
from tests.support.ranks import run_each, run_ranks

GRAPHS = {"homogeneous": (random_graph, "_N"), "typed": (typed_graph, ITEM)}
READS = EdgeReads(("amount",), weight="w", time="at", elapsed=True)
SEEDS, TIMES = [3, 4, 4, 50, 99, 3], [1005, 1020, 1033, 1012, 999, 1500]
TIMINGS = Timing(), Timing(latest=True), Timing(window=12)
CASES = [*product(TIMINGS, ([2, 3], [-1, -1]), (False, True))]  # fanouts, and if weighted


@given(
    st.lists(st.lists(st.integers(-5, 20), max_size=12), min_size=1, max_size=6),
    st.integers(-6, 22),
    st.one_of(st.just(-1), st.integers(0, 12)),
)
def test_spans_before(lists: list[list[int]], bound: int, window: int) -> None:
    times = np.array([t for one in lists for t in sorted(one)], np.int32)
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    rows = np.arange(len(lists))
    known = stored(indptr, np.int64), stored(times, np.int64)
    start, degree = spans_before(*known, rows, np.full(len(rows), bound), window)
    for one, low, count in zip(lists, start, degree):
        permitted = [t for t in sorted(one) if t < bound and (window < 0 or t >= bound - window)]
        assert times[low : low + count].tolist() == permitted


@given(st.data())
def test_a_part_of_a_weighted_list(data: st.DataObject) -> None:
    """Only entries of the part are sampled, however small its weight."""
    weight = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 1e4]), min_size=1)), np.float32)
    low = data.draw(st.integers(0, len(weight) - 1))
    high = data.draw(st.integers(low, len(weight)))
    fanout, replace = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    indptr, one = stored([0, len(weight)], np.int64), np.zeros(1, np.int64)
    weight = stored(weight, np.float32)
    part = np.array([low]), np.array([high - low])
    src = stored(range(len(weight)), np.int32)
    lists = RowLists(*part, src, one.astype(np.int32))
    weights = weight, stored(alias_tables(indptr, weight, src), np.uint64)
    bias = DrawBias(*spans(indptr, one), *weights, np.zeros(2, np.int64), np.empty(0, np.int64))
    how = fanout, replace, np.uint64(data.draw(st.integers(0, 2**60))), False
    _, drawn, _ = draw_rows(lists, bias, *how)
    allowed = [j for j in range(low, high) if weight[j]]
    assert set(drawn.tolist()) <= set(allowed)
    if replace:
        assert len(drawn) == (fanout if allowed else 0)
    else:
        assert len(drawn) == len(set(drawn.tolist())) == min(fanout, len(allowed))


def timed(data: GraphData) -> GraphData:
    """Add times to all edge types but the last; many edges share one."""
    rng = np.random.default_rng(3)
    for etype, edges in data.edges.items():
        edges.data["amount"] = np.arange(edges.num, dtype=np.float32)  # tells which edge it is
        if etype != list(data.edges)[-1] or len(data.edges) == 1:
            edges.data["at"] = rng.integers(1000, 1040, edges.num)
            edges.data["w"] = rng.choice([0.5, 1.0, 3.0], edges.num).astype(np.float32)
    return data


def draw(exchange: Exchange, meta: PartitionMeta, replicated: bool, ntype: str) -> list[set[Any]]:
    """Return the sampled edges of each case: hop, edge type, position in the user's graph, source,
    destination and the destination's time."""
    shard = shard_of(exchange, meta, replicated=replicated, reads=READS)
    original = {t: everyones(exchange, shard.original[t]) for t in shard.ntypes}
    seeds, until = {ntype: np.argsort(original[ntype])[SEEDS]}, np.array(TIMES)
    found: list[set[Any]] = []
    for timing, fanouts, weighted in CASES:
        sampler = NeighborSampler(shard, exchange, seed=5, weighted=weighted, timing=timing)
        hops = resolve_fanouts(fanouts, shard.etypes)
        blocks, nodes = sampler.sample(seeds, hops, epoch=2, step=3, times={ntype: until})
        # backwards from the seeds: a source has the time of the node that sampled it
        bounds = {t: until if t == ntype else until[:0] for t in nodes}
        found.append(set())
        for hop, block in enumerate(reversed(blocks)):
            reached = {
                t: [*bounds[t], *[None] * (n - len(bounds[t]))] for t, n in block.num_src.items()
            }
            for etype, adj in block.adj.items():
                source, target = (original[t][nodes[t]].tolist() for t in (etype[0], etype[2]))
                elapsed = [None] * len(adj.src) if adj.elapsed is None else adj.elapsed.tolist()
                ends = zip(adj.src.tolist(), adj.dst.tolist(), adj.rows[:, 0].tolist(), elapsed)
                for src, dst, place, ago in ends:
                    bound = int(bounds[etype[2]][dst])
                    assert reached[etype[0]][src] in (None, bound)
                    reached[etype[0]][src] = bound
                    found[-1].add((hop, etype, int(place), source[src], target[dst], bound, ago))
            bounds = reached
    return found


def permitted(data: GraphData, timing: Timing, etype: EdgeType, node: int, bound: int) -> list[int]:
    """Return the positions of the edges that a node may sample at a time, the latest last."""
    edges = data.edges[etype]
    places = np.flatnonzero(edges.dst == node)
    if "at" not in edges.data:
        return list(places)
    at = edges.data["at"][places]
    keep = at < bound
    if timing.window is not None:
        keep &= at >= bound - timing.window
    return list(places[keep][np.argsort(at[keep], kind="stable")])


@pytest.mark.long
@pytest.mark.parametrize("kind", GRAPHS)
def test_only_edges_before_the_seeds(kind: str, tmp_path: Path) -> None:
    make, ntype = GRAPHS[kind]
    data = timed(make())
    (draws,) = run_ranks(1, draw, partitioned(data, tmp_path, 1), True, ntype)
    for (timing, fanouts, _), drawn in zip(CASES, draws, strict=True):
        _check(data, ntype, timing, fanouts, drawn)
    for parts, workers in ((2, 2), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        for ranks in run_each(workers, draw, [(meta, True, ntype), (meta, False, ntype)]):
            assert ranks == [draws] * workers


def _check(data: GraphData, ntype: str, timing: Timing, fanouts: list[int], drawn: Any) -> None:
    rows: dict[Any, list[int]] = {}
    for hop, etype, place, src, dst, bound, ago in drawn:
        edges = data.edges[etype]
        assert (edges.src[place], edges.dst[place]) == (src, dst)
        if "at" in edges.data:
            assert ago == bound - edges.data["at"][place] > 0
        rows.setdefault((hop, etype, dst, bound), []).append(place)
    for (hop, etype, dst, bound), places in rows.items():
        may = permitted(data, timing, etype, dst, bound)
        most = len(may) if fanouts[hop] < 0 else fanouts[hop]
        assert set(places) <= set(may)
        assert len(places) == len(set(places)) == min(most, len(may))
        if timing.latest and "at" in data.edges[etype].data:
            assert set(places) == set(may[-most:])
    if fanouts[0] < 0:  # no row is left out
        first = {(etype, seed, bound) for hop, etype, seed, bound in rows if not hop}
        for etype in data.edges:
            for seed, bound in zip(SEEDS, TIMES) if etype[2] == ntype else ():
                assert ((etype, seed, bound) in first) == bool(
                    permitted(data, timing, etype, seed, bound)
                )


def test_lists_ascend_by_time(tmp_path: Path) -> None:
    """Every list ascends with all its arrays, even with more edges than are sorted at a time."""
    from raygnn.graph.staging import parts

    data = timed(GRAPHS["homogeneous"][0]())
    meta = partitioned(data, tmp_path, 2)

    def ascend(exchange: Exchange) -> int:
        parts._ROWS = 7
        shard = shard_of(exchange, meta, replicated=True, reads=READS)
        original = everyones(exchange, shard.original["_N"])
        ((etype, rows),) = shard.topology.items()
        edges = data.edges[etype]
        for row, (low, high) in enumerate(pairwise(rows.indptr)):
            at = slice(low, high)
            places = rows.data["amount"][at].astype(int)
            assert (np.diff(rows.times[at]) >= 0).all()
            assert rows.times[at].tolist() == edges.data["at"][places].tolist()
            assert original[rows.src[at]].tolist() == edges.src[places].tolist()
            assert (edges.dst[places] == original[row]).all()
        return len(rows.src)

    assert run_ranks(1, ascend) == [data.edges["_N", "_E", "_N"].num]
