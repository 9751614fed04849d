"""Metrics per source equal those of plain Python over all targets at once, however spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional import retrieval

from raygnn.config.model import read_model
from raygnn.graph.data import EdgeFrame, EdgeSplit, EdgeType, GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.models.decoders import make_decoder
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.seeds import OwnedEdges
from raygnn.tasks import top
from raygnn.tasks.ranking import Ranking, metrics_of_lists
from raygnn.tasks.top import list_metrics, top_names
from tests.support.graphs import ITEM, USER, partitioned, random_graph, shard_of, typed_graph
from tests.support.ranks import run_ranks
from tests.support.top_lists import by_hand, rank_of

PLAIN: EdgeType = ("_N", "_E", "_N")
BUYS: EdgeType = (USER, "buys", ITEM)
SPLITS = ("train", "val", "test")
RELATIONS, WIDTH, TOPS = 2, 4, (1, 5, 20)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 30)), max_size=20))
def test_metrics_of_ranks(pairs: list[tuple[int, int]]) -> None:
    """Ranks are halves, where targets are equal; sources have any number of them."""
    ranks: dict[int, list[float]] = {}
    for query, twice in pairs:
        ranks.setdefault(query, []).append(twice / 2)
    given = [np.array(column) for column in zip(*pairs)] or [np.empty(0, np.int64)] * 2
    found = list_metrics(given[0], given[1] / 2, TOPS)
    assert found.shape == (15, len(ranks))
    for column, query in enumerate(sorted(ranks)):
        wanted = [value for k in TOPS for value in by_hand(ranks[query], k).values()]
        assert found[:, column] == pytest.approx(wanted, abs=1e-12)


@given(st.data())
def test_metrics_are_those_of_torchmetrics(data: st.DataObject) -> None:
    """For different scores above 0; torchmetrics divides average precision by the hits alone."""
    num = data.draw(st.integers(1, 30))
    true = data.draw(st.sets(st.integers(0, num - 1), min_size=1))
    scores = 1 + torch.tensor(data.draw(st.permutations(range(num)))).float()
    ranks = np.array([rank_of(scores.numpy(), target, set()) for target in true])
    target = torch.zeros(num, dtype=torch.int64)
    target[list(true)] = 1
    found = dict(zip(top_names(TOPS), list_metrics(np.zeros(len(true), int), ranks, TOPS)[:, 0]))
    for k in TOPS:
        hits = int((ranks <= k).sum())
        precise = float(retrieval.retrieval_average_precision(scores, target, top_k=k))
        wanted = {
            f"recall@{k}": retrieval.retrieval_recall(scores, target, top_k=k),
            f"ndcg@{k}": retrieval.retrieval_normalized_dcg(scores, target, top_k=k),
            f"map@{k}": precise * hits / min(k, len(true)),
            f"precision@{k}": retrieval.retrieval_precision(scores, target, top_k=k),
            f"hit_rate@{k}": retrieval.retrieval_hit_rate(scores, target, top_k=k),
        }
        for name, value in wanted.items():
            assert found[name] == pytest.approx(float(value), abs=1e-6), name


def graph(typed: bool, related: bool) -> tuple[GraphData, EdgeType]:
    """Build a graph with parallel edges, in several splits too, and with edges in none."""
    data = typed_graph() if typed else random_graph(nodes=40, degree=12)
    etype = BUYS if typed else PLAIN
    edges, rng = data.edges[etype], np.random.default_rng(1)
    src, dst = (np.append(ends, ends[:60]) for ends in (edges.src, edges.dst))
    kind = rng.choice(4, len(src), p=[0.4, 0.2, 0.3, 0.1])
    masks = {f"{name}_mask": kind == i for i, name in enumerate(SPLITS)}
    if related:
        masks["relation"] = rng.integers(0, RELATIONS, len(src))
    data.edges[etype] = EdgeFrame(src, dst, masks)
    return data, etype


def rows_of(num: int, seed: int) -> torch.Tensor:
    """Return rows of whole numbers, whose scores are exact and often equal."""
    return torch.randint(-2, 3, (num, WIDTH), generator=torch.Generator().manual_seed(seed)).float()


def decoder_of(related: bool) -> Any:
    torch.manual_seed(0)
    kind = "distmult" if related else "dot"
    decoder = make_decoder(read_model(kind="sage"), kind, WIDTH, RELATIONS, 1)
    if related:
        decoder.relation.data = torch.randint(1, 4, decoder.relation.shape).float()
    return decoder


def by_numpy(data: GraphData, etype: EdgeType, related: bool, split: str) -> dict[str, float]:
    """Compute the metrics source by source."""
    edges, decoder = data.edges[etype], decoder_of(related)
    source = rows_of(data.nodes[etype[0]].num, 1)
    target = rows_of(data.nodes[etype[2]].num, 2 if etype[0] != etype[2] else 1)
    kinds = edges.data.get("relation", np.zeros(edges.num, np.int64))
    later = SPLITS[SPLITS.index(split) :]
    hidden = np.any([edges.data[f"{name}_mask"] for name in later], axis=0)
    true: dict[tuple[int, int], set[int]] = {}
    earlier: dict[tuple[int, int], set[int]] = {}
    for i in range(edges.num):
        key = int(edges.src[i]), int(kinds[i])
        if edges.data[f"{split}_mask"][i]:
            true.setdefault(key, set()).add(int(edges.dst[i]))
        if not hidden[i]:
            earlier.setdefault(key, set()).add(int(edges.dst[i]))
    found: list[dict[str, float]] = []
    for (s, r), targets in true.items():
        with torch.no_grad():
            table = decoder.against(source[s : s + 1], target, torch.tensor([r]), "target")
        known = earlier.get((s, r), set())
        ranks = [rank_of(table[0].numpy(), t, known) for t in targets - known]
        if ranks:
            each = [by_hand(ranks, k) for k in TOPS]
            found.append({name: value for one in each for name, value in one.items()})
    assert any(known & true.get(key, set()) for key, known in earlier.items())
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def per_source(
    exchange: Exchange, meta: PartitionMeta, etype: EdgeType, related: bool, split: str, spoil: str
) -> Mapping[str, float]:
    relation = "relation" if related else None
    arrays = ["relation"] if related else []
    shard = shard_of(exchange, meta, replicated=False, split=EdgeSplit(etype), edge_arrays=arrays)
    edges, decoder = OwnedEdges(shard, exchange, etype), decoder_of(related)
    rows = {
        end: rows_of(shard.num_nodes(ntype), seed)[shard.original[ntype].astype(int)]
        for end, ntype, seed in (
            ("source", etype[0], 1),
            ("target", etype[2], 2 if etype[0] != etype[2] else 1),
        )
    }
    if spoil == "row" and len(rows["source"]):
        rows["source"][0, 0] = math.nan
    if spoil == "relation":
        decoder.relation.data[1] = math.nan
    bounds = {"source": shard.bounds[etype[0]], "target": shard.bounds[etype[2]]}
    ranker = Ranking(edges, bounds, relation, RELATIONS if related else 1)
    code, device = SPLITS.index(split), torch.device("cpu")
    return ranker.metrics_per_source(decoder, code, rows, device, TOPS)


@pytest.mark.parametrize(
    ("split", "typed", "related", "small"),
    [("test", False, False, False), ("test", True, False, False), ("test", True, True, True),
     ("val", False, True, False), ("val", True, False, True)],
)  # fmt: skip
def test_metrics_per_source_equal_those_of_numpy(
    split: str,
    typed: bool,
    related: bool,
    small: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Known edges of earlier splits are no candidates, other true ones are; with blocks and rounds
    of any size."""
    if small:
        monkeypatch.setattr(top, "ROWS", 1)
        monkeypatch.setattr(top, "_BLOCK", 7)
        monkeypatch.setattr(top, "_AT_ONCE", 6)
    data, etype = graph(typed, related)
    wanted = by_numpy(data, etype, related, split)
    assert 0 < wanted["recall@5"] < wanted["recall@20"] < 1
    for workers, parts in ((1, 1), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        for found in run_ranks(workers, per_source, meta, etype, related, split, ""):
            assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("spoil", ["row", "relation"])
def test_rows_or_scores_that_are_not_finite(spoil: str, tmp_path: Path) -> None:
    data, etype = graph(True, True)
    meta = partitioned(data, tmp_path, 2)
    for found in run_ranks(2, per_source, meta, etype, True, "test", spoil):
        assert list(found) == top_names(TOPS)
        assert all(math.isnan(value) for value in found.values())


def _lists(exchange: Exchange, rows: np.ndarray, ranks: np.ndarray) -> dict[str, float]:
    own = slice(exchange.world.rank, None, exchange.world.size)
    given = torch.from_numpy(rows[own]), torch.from_numpy(ranks[own])
    return metrics_of_lists(*given, TOPS, exchange)


@pytest.mark.parametrize("size", [1, 3])
def test_lists_of_a_time_equal_those_of_all_its_scores(size: int) -> None:
    """Ranks are among what is not true; edges that occur twice count once."""
    random, wanted, rows, ranks = np.random.default_rng(0), [], [], []
    for query in range(30):
        scores, true = random.integers(0, 12, 40), random.choice(40, random.integers(1, 6), False)
        scores[true] = 20 * scores[true] + np.arange(len(true))  # true ones differ
        whole = [rank_of(scores, target, set()) for target in true]
        wanted.append([v for k in TOPS for v in by_hand(whole, k).values()])
        for target in true:
            rank = rank_of(scores, target, {*true.tolist()} - {target})
            repeats = 1 + (target % 3 == 0)
            rows += repeats * [(query % 5, query % 2, query, target)]
            ranks += repeats * [rank]
    for found in run_ranks(size, _lists, np.array(rows), np.array(ranks)):
        assert list(found) == top_names(TOPS)
        assert list(found.values()) == pytest.approx(np.mean(wanted, 0), abs=1e-12)
    ranks[0] = math.nan
    assert all(
        map(math.isnan, run_ranks(size, _lists, np.array(rows), np.array(ranks))[0].values())
    )
