"""Filtered ranks equal those of plain NumPy over all nodes at once, however spread."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.model import read_model
from raygnn.graph.data import EdgeFrame, EdgeSplit, EdgeType, GraphData, NodeFrame
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.shard import NUMBER
from raygnn.models.decoders import make_decoder
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.seeds import OwnedEdges
from raygnn.tasks import ranking
from raygnn.tasks.ranking import Candidates, Ranking, ranked_among_drawn
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

pytestmark = pytest.mark.long

PLAIN: EdgeType = ("_N", "_E", "_N")
BUYS: EdgeType = (USER, "buys", ITEM)
RELATIONS, WIDTH = 3, 4


def graph(typed: bool, related: bool) -> tuple[GraphData, EdgeType]:
    data = typed_graph() if typed else random_graph(nodes=50, degree=12)
    etype = BUYS if typed else PLAIN
    edges = data.edges[etype]
    kind = np.arange(edges.num) % 3
    edges.data |= {f"{name}_mask": kind == i for i, name in enumerate(("train", "val", "test"))}
    if related:
        edges.data["relation"] = np.random.default_rng(3).integers(0, RELATIONS, edges.num)
    return data, etype


def decoder_of(kind: str) -> Any:
    torch.manual_seed(0)
    decoder = make_decoder(read_model(kind="sage"), kind, WIDTH, RELATIONS, 1)
    if kind == "distmult":  # whole numbers make scores exact, and many of them equal
        decoder.relation.data = torch.randint(-1, 2, decoder.relation.shape).float()
    return decoder


def rows_of(num: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, (num, WIDTH), generator=torch.Generator().manual_seed(seed)).float()


def drawn(number: np.ndarray, end: str, num: int) -> np.ndarray:
    """Return five nodes for each edge, some twice, and some that form a known edge."""
    keys = (number[:, None] * 7 + np.arange(5) * 3 + len(end)) ** 2
    return keys % 11 % num


def by_numpy(
    data: GraphData, etype: EdgeType, decoder: Any, split: str, among: bool | None = None
) -> dict[str, float]:
    """Compute metrics over all nodes, or over those of `drawn` with ``among``, with known edges or
    without."""
    edges = data.edges[etype]
    source = rows_of(data.nodes[etype[0]].num, 1)
    target = rows_of(data.nodes[etype[2]].num, 2 if etype[0] != etype[2] else 1)
    kinds = edges.data.get("relation", np.zeros(edges.num, np.int64))
    known = set(zip(edges.src.tolist(), kinds.tolist(), edges.dst.tolist()))
    ranks = []
    for i in np.flatnonzero(edges.data[f"{split}_mask"]):
        s, r, t = int(edges.src[i]), int(kinds[i]), int(edges.dst[i])
        relation = torch.tensor([r])
        with torch.no_grad():
            targets = decoder.against(source[s : s + 1], target, relation, "target")[0].numpy()
            sources = decoder.against(target[t : t + 1], source, relation, "source")[0].numpy()
        both = {"target": range(len(target)), "source": range(len(source))}
        if among is not None:
            both = {e: drawn(np.array([i]), e, len(o))[0].tolist() for e, o in both.items()}
        left = known if among is not False else {(s, r, t)}
        for scores, right, keep in (
            (targets, t, [o for o in both["target"] if (s, r, o) not in left]),
            (sources, s, [o for o in both["source"] if (o, r, t) not in left]),
        ):
            best = 1 + (scores[keep] > scores[right]).sum()
            worst = best + (scores[keep] == scores[right]).sum()
            ranks.append((best + worst) / 2)
    every = np.array(ranks)
    hits = {f"hits@{n}": float((every <= n).mean()) for n in (1, 3, 10, 20, 50, 100)}
    return {"mrr": float((1 / every).mean()), **hits}


def ranked(
    exchange: Exchange,
    meta: PartitionMeta,
    etype: EdgeType,
    kind: str,
    related: bool,
    spoil: bool,
    among: bool | None = None,
    pairs: Any = None,
) -> dict[str, float]:
    relation = "relation" if related else None
    arrays = ["relation"] if related else []
    shard = shard_of(exchange, meta, replicated=False, split=EdgeSplit(etype), edge_arrays=arrays)
    edges = OwnedEdges(shard, exchange, etype)
    rows = {
        "source": rows_of(shard.num_nodes(etype[0]), 1)[shard.original[etype[0]].astype(int)],
        "target": rows_of(shard.num_nodes(etype[2]), 2 if etype[0] != etype[2] else 1)[
            shard.original[etype[2]].astype(int)
        ],
    }
    if spoil and kind == "dot" and len(rows["source"]):
        rows["source"][0, 0] = math.nan
    original = everyones(exchange, shard.original[etype[0]])
    everyone = rows_of(shard.num_nodes(etype[0]), 1)

    def sources(own: np.ndarray) -> torch.Tensor:
        return everyone[original[edges.src[own]]]

    decoder = decoder_of(kind)
    if spoil and kind == "distmult":
        decoder.relation.data[1] = math.nan
    bounds = {"source": shard.bounds[etype[0]], "target": shard.bounds[etype[2]]}
    ranker = Ranking(edges, bounds, relation, RELATIONS if related else 1)
    own, candidates = edges.chosen(2), None
    globals_of = {
        end: np.argsort(everyones(exchange, shard.original[ntype]))
        for end, ntype in zip(("source", "target"), (etype[0], etype[2]))
    }
    if pairs is not None:
        pairs = np.stack([ids[some] for ids, some in zip(globals_of.values(), pairs)])
        return ranker.metrics_among(decoder, own, pairs, rows, torch.device("cpu"))
    if among is not None:

        def nodes(number: np.ndarray, _: np.ndarray) -> dict[str, np.ndarray]:
            return {end: ids[drawn(number, end, len(ids))] for end, ids in globals_of.items()}

        candidates = Candidates(edges.column(NUMBER)[own].astype(np.int64), nodes, 5, among)
    return ranker.metrics(decoder, own, sources, rows, torch.device("cpu"), candidates)


@pytest.mark.parametrize(
    ("at_once", "kind", "typed"),
    [
        (1, "dot", False),
        (1, "distmult", True),
        (1 << 24, "dot", True),
        (1 << 24, "distmult", False),
    ],
)
def test_ranks_equal_those_of_numpy(
    at_once: int, kind: str, typed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "_SCORES", at_once * 500)
    monkeypatch.setattr(ranking, "_NODES", 7 if at_once == 1 else 1 << 18)
    related = kind == "distmult"
    data, etype = graph(typed, related)
    wanted = by_numpy(data, etype, decoder_of(kind), "test")
    assert 0 < wanted["mrr"] < wanted["hits@10"] < 1
    for workers, parts in ((1, 1), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        for found in run_ranks(workers, ranked, meta, etype, kind, related, False):
            assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("at_once", "typed", "filtered"),
    [(1, False, True), (1, True, False), (1 << 24, True, True), (1 << 24, False, False)],
)
def test_ranks_among_some_nodes_equal_those_of_numpy(
    at_once: int, typed: bool, filtered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Link-prediction metrics equal numpy's to 1e-12 for any number of ranks."""
    monkeypatch.setattr(ranking, "_SCORES", at_once * 70)
    monkeypatch.setattr(ranking, "_PAIRS", 3 if at_once == 1 else 1 << 16)
    data, etype = graph(typed, True)
    every = by_numpy(data, etype, decoder_of("distmult"), "test")
    wanted = by_numpy(data, etype, decoder_of("distmult"), "test", filtered)
    assert every["mrr"] < wanted["mrr"] < 1
    for workers, parts in ((1, 1), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        for found in run_ranks(workers, ranked, meta, etype, "distmult", True, False, filtered):
            assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("count", [15, 400])
@pytest.mark.parametrize("typed", [False, True])
def test_hits_above_a_list_are_those_of_ogb(count: int, typed: bool, tmp_path: Path) -> None:
    """Equal scores are no hits; a list shorter than k makes all edges hits."""
    data, etype = graph(typed, False)
    edges, decoder, rng = data.edges[etype], decoder_of("dot"), np.random.default_rng(1)
    source = rows_of(data.nodes[etype[0]].num, 1)
    target = rows_of(data.nodes[etype[2]].num, 2 if typed else 1)
    pairs = np.stack([rng.integers(0, len(rows), count) for rows in (source, target)])
    test = edges.data["test_mask"]
    positive = decoder(source[edges.src[test]], target[edges.dst[test]], None).flatten()
    negative = decoder(source[pairs[0]], target[pairs[1]], None).flatten()
    assert torch.isin(positive, negative).any()
    wanted = {}
    for k in (1, 3, 10, 20, 50, 100):
        if len(negative) < k:
            wanted[f"hits@{k}"] = 1.0
        else:
            kth = torch.topk(negative, k)[0][-1]
            wanted[f"hits@{k}"] = float(torch.sum(positive > kth)) / len(positive)
    above, reached = ((negative[:, None] > positive).sum(0), (negative[:, None] >= positive).sum(0))
    mrr = float((1 / (1 + (above + reached).double() / 2)).mean())
    for workers, parts in ((1, 1), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        for found in run_ranks(workers, ranked, meta, etype, "dot", False, False, None, pairs):
            assert found.pop("mrr") == pytest.approx(mrr, abs=1e-12)
            assert found == wanted


def ring(nodes: int) -> GraphData:
    """Return edges from each node to the next three, all for test."""
    src = np.repeat(np.arange(nodes), 3)
    dst = (src + np.tile([1, 2, 3], nodes)) % nodes
    masks = {f"{name}_mask": np.full(len(src), name == "test") for name in ("train", "val", "test")}
    frame = NodeFrame(nodes, {"feat": np.zeros((nodes, 1), np.float32)})
    return GraphData("ring", {PLAIN[0]: frame}, {PLAIN: EdgeFrame(src, dst, masks)})


def of_equal_rows(exchange: Exchange, meta: PartitionMeta) -> dict[tuple[str, int, str], float]:
    """Return mean reciprocal ranks by decoder, number of queries and candidates."""
    shard = shard_of(exchange, meta, replicated=False, split=EdgeSplit(PLAIN))
    edges = OwnedEdges(shard, exchange, PLAIN)
    bounds = dict.fromkeys(("source", "target"), shard.bounds[PLAIN[0]])
    ranker = Ranking(edges, bounds, None, 1)
    every = np.arange(bounds["target"][-1])

    def everyone(keys: np.ndarray, _: np.ndarray) -> dict[str, np.ndarray]:
        return dict.fromkeys(("source", "target"), np.tile(every, (len(keys), 1)))

    torch.manual_seed(3)
    row = torch.randn(50)
    rows = dict.fromkeys(bounds, row.repeat(shard.owned(PLAIN[0]), 1))

    def sources(own: np.ndarray) -> torch.Tensor:
        return row.repeat(len(own), 1)

    found = {}
    for kind in ("dot", "distmult", "complex", "mlp"):
        decoder = make_decoder(read_model(kind="sage"), kind, 50, 1, 1).eval()
        for num in range(1, 6):
            own = edges.chosen(2)[: num if exchange.world.rank == 0 else 0]
            for among in ("all", "filtered", "unfiltered"):
                candidates = Candidates(own, everyone, len(every), among == "filtered")
                found[kind, num, among] = ranker.metrics(
                    decoder,
                    own,
                    sources,
                    rows,
                    torch.device("cpu"),
                    None if among == "all" else candidates,
                )["mrr"]
    return found


@pytest.mark.parametrize(("nodes", "workers"), [(7, 1), (1037, 1), (13, 2), (300, 2)])
def test_equal_rows_tie_in_products_of_any_shape(nodes: int, workers: int, tmp_path: Path) -> None:
    """The true node has the mean rank of all nodes, or of those that form no known edge with the
    other end."""
    meta = partitioned(ring(nodes), tmp_path, workers)
    for found in run_ranks(workers, of_equal_rows, meta):
        for (_, _, among), reciprocal in found.items():
            compared = nodes if among == "unfiltered" else nodes - 2
            assert reciprocal == pytest.approx(2 / (compared + 1)), found


def test_rows_that_are_not_finite(tmp_path: Path) -> None:
    data, etype = graph(False, False)
    for found in run_ranks(2, ranked, partitioned(data, tmp_path, 2), etype, "dot", False, True):
        assert all(math.isnan(value) for value in found.values())


def test_scores_that_are_not_numbers_are_not_the_best(tmp_path: Path) -> None:
    """No score is above NaN, so a decoder that diverged would have ranked first."""
    data, etype = graph(False, True)
    meta = partitioned(data, tmp_path, 2)
    for among in (None, True):
        for found in run_ranks(2, ranked, meta, etype, "distmult", True, True, among):
            assert all(math.isnan(value) for value in found.values())


def among_drawn(
    exchange: Exchange, there: torch.Tensor, absent: torch.Tensor, counted: torch.Tensor
) -> dict[str, float]:
    mine = slice(exchange.world.rank, None, exchange.world.size)
    return ranked_among_drawn(there[mine], [absent[mine]], [counted[mine]], exchange)


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_ranked_among_drawn_nodes(scale: float) -> None:
    """Metrics equal a direct computation for any number of ranks, also for scores far from 0."""
    rng = np.random.default_rng(0)
    there = torch.from_numpy(rng.normal(0.5, 1, 40) * scale)
    absent = torch.from_numpy(rng.normal(0, 1, (40, 3)) * scale)
    absent[:5] = there[:5, None]  # ties
    counted = torch.from_numpy(rng.random((40, 3)) < 0.8)
    ranks = 1 + ((absent > there[:, None]) & counted).sum(1)
    ranks = ranks + ((absent == there[:, None]) & counted).sum(1) / 2
    scores = torch.cat([there, absent[counted]]).float()
    order = np.argsort(-scores.numpy(), kind="stable")
    precision, hits = 0.0, 0
    for value in dict.fromkeys(scores.numpy()[order].tolist()):  # equal scores together
        chosen = scores >= value
        new = int(chosen[:40].sum()) - hits
        hits += new
        precision += new / 40 * hits / int(chosen.sum())
    for workers in (1, 3):
        for found in run_ranks(workers, among_drawn, there, absent, counted):
            assert found["mrr"] == pytest.approx(float((1 / ranks).mean()))
            assert found["hits@1"] == pytest.approx(float((ranks <= 1).double().mean()))
            assert found["average_precision"] == pytest.approx(precision, abs=1e-6)
