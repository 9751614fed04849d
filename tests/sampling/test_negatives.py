"""Nodes in place of ends: the same whoever draws them, and as often as they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.task import NegativesConfig
from raygnn.graph.data import EdgeSplit, EdgeType
from raygnn.graph.partition.edges import TRAIN
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.negatives import ENDS, Negatives, gather_known, make_negatives
from raygnn.sampling.seeds import OwnedEdges
from tests.support.graphs import ITEM, USER, everyones, partitioned, shard_of, typed_graph
from tests.support.ranks import run_ranks

BUYS: EdgeType = (USER, "buys", ITEM)


def draws(exchange: Exchange, meta: PartitionMeta, config: NegativesConfig, steps: int) -> Any:
    """Return the sampled nodes of each step in original ids, and the owned nodes."""
    shard = shard_of(exchange, meta, replicated=False, split=EdgeSplit(BUYS, None, (0.2, 0.2)))
    edges = OwnedEdges(shard, exchange, BUYS)
    own = edges.chosen(TRAIN)
    ends: Any = {"source": edges.src[own], "target": edges.dst[own]}
    types: Any = {"source": USER, "target": ITEM}
    negatives = make_negatives(config, shard, exchange, types, 3, ends)
    original = {t: everyones(exchange, shard.original[t]) for t in (USER, ITEM)}
    found = []
    for step in range(steps):
        nodes = negatives.draw(1, step, {"source": edges.src[:3], "target": edges.dst[:3]})
        found.append({end: original[types[end]][ids].tolist() for end, ids in nodes.items()})
    mine = {t: shard.original[t].tolist() for t in (USER, ITEM)}
    counted = {
        end: np.bincount(original[types[end]][ids], minlength=len(original[types[end]]))
        for end, ids in ends.items()
    }
    return found, mine, counted


@pytest.mark.parametrize("kind", ["uniform", "degree"])
def test_the_same_for_any_ranks_and_parts(kind: Any, tmp_path: Path) -> None:
    config, found = NegativesConfig(kind=kind, number=50), []
    for workers, parts in ((1, 1), (2, 2), (3, 2)):
        meta = partitioned(typed_graph(), tmp_path, parts)
        ranks = run_ranks(workers, draws, meta, config, 3)
        assert all(drawn == ranks[0][0] for drawn, *_ in ranks)
        found.append(ranks[0][0])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]
    assert set(found[0][0]) == {"source", "target"}


@pytest.mark.parametrize("kind", ["uniform", "degree"])
def test_how_often_nodes_are_drawn(kind: Any, tmp_path: Path) -> None:
    config = NegativesConfig(kind=kind, number=20_000, ends="target")
    ((drawn, _, counted),) = run_ranks(1, draws, partitioned(typed_graph(), tmp_path, 1), config, 2)
    assert list(drawn[0]) == ["target"]
    found = np.bincount(drawn[0]["target"] + drawn[1]["target"], minlength=120) / 40_000
    weight = counted["target"] ** 0.75 if kind == "degree" else np.ones(120)
    wanted = weight / weight.sum()
    assert np.abs(found - wanted).max() < 6 * np.sqrt(wanted.max() / 40_000)
    assert (found[wanted == 0] == 0).all()


def facts(exchange: Exchange, meta: PartitionMeta, config: NegativesConfig) -> Any:
    """Return, of this rank's training edges, by original ids: whether each sampled node makes a
    training edge in place of either end, and the logarithms of probabilities by node."""
    shard = shard_of(exchange, meta, replicated=False, split=EdgeSplit(BUYS, None, (0.2, 0.2)))
    edges = OwnedEdges(shard, exchange, BUYS)
    own = edges.chosen(TRAIN)
    ends: Any = {"source": edges.src[own], "target": edges.dst[own]}
    types: Any = {"source": USER, "target": ITEM}
    original = {t: everyones(exchange, shard.original[t]) for t in (USER, ITEM)}
    named = {end: original[types[end]] for end in ENDS}
    relation = (named["source"][ends["source"]] % 2).astype(np.int64)
    known = gather_known(ends, relation, 2, exchange)
    given = config, shard, exchange, types, 3, ends, None, known, 2
    negatives = make_negatives(*given)
    drawn = negatives.draw(0, 0, {end: ends[end][:30] for end in ENDS})
    found = negatives.facts(drawn, np.stack(list(ends.values())), relation)
    marked, q = [], {}
    for end in ENDS:
        rows, columns = np.nonzero(found["known"][end].numpy())
        others = named[end][drawn[end]]
        kept = "source" if end == "target" else "target"
        nodes = named[kept][ends[kept]][rows], others[columns], relation[rows]
        marked += [(end, *map(int, each)) for each in zip(*nodes)]
        if end in found["log_q"]:
            values = found["log_q"][end].exp().tolist()
            q[end] = dict(zip([*named[end][ends[end]].tolist(), *others.tolist()], values))
    pairs = [tuple(map(int, pair)) for pair in zip(*(named[end][ends[end]] for end in ENDS))]
    picked = {end: set(named[end][drawn[end]].tolist()) for end in ENDS}
    return pairs, marked, picked, q


@pytest.mark.parametrize("kind", ["uniform", "degree", "in_batch"])
def test_nodes_that_form_a_training_edge_and_how_probable_nodes_are(
    kind: Any, tmp_path: Path
) -> None:
    """Edges of one relation are known, on whichever rank they are; here the relation is that of the
    source. Probabilities are shares of the training edges, to the power of the draw."""
    number = {} if kind == "in_batch" else {"number": 60}
    config = NegativesConfig(kind=kind, correct=kind != "uniform", **number)
    ranks = run_ranks(2, facts, partitioned(typed_graph(), tmp_path, 2), config)
    pairs = [pair for own, *_ in ranks for pair in own]
    for own, marked, picked, q in ranks:
        wanted = set()
        for source, target in own:
            for u, v in pairs:
                if u == source and v in picked["target"]:
                    wanted.add(("target", source, v, source % 2))
                if v == target and u in picked["source"] and u % 2 == source % 2:
                    wanted.add(("source", target, u, source % 2))
        assert set(marked) == wanted
        assert len(wanted) > 50
        for number, end in enumerate(ENDS if kind != "uniform" else ()):
            count = np.bincount([pair[number] for pair in pairs]).astype(float)
            weight = count ** (0.75 if kind == "degree" else 1)
            share = weight / weight.sum()
            assert q[end] == pytest.approx({node: share[node] for node in q[end]}, rel=1e-4)


def test_local_negatives_are_owned_nodes(tmp_path: Path) -> None:
    config = NegativesConfig(kind="local", number=500)
    for drawn, mine, _ in run_ranks(2, draws, partitioned(typed_graph(), tmp_path, 2), config, 1):
        assert set(drawn[0]["target"]) <= set(mine[ITEM])
        assert set(drawn[0]["source"]) <= set(mine[USER])
        assert len(set(drawn[0]["target"])) > len(mine[ITEM]) / 2


@pytest.mark.parametrize("kind", ["uniform", "degree", "local"])
def test_draws_depend_on_seed_epoch_step_and_end(kind: Any) -> None:
    """Samples of both ends differ even if the ends are of one type."""
    config = NegativesConfig(kind=kind, number=30)
    ntypes: Any = {"source": "_N", "target": "_N"}
    sums: Any = dict.fromkeys(ntypes, np.arange(1.0, 1001))
    given: Any = {"sums": sums, "ids": {"_N": np.arange(1000)}, "own": {"_N": (50, 900)}}

    def drawn(seed: int, epoch: int, step: int) -> dict[str, np.ndarray]:
        nobody = dict.fromkeys(ntypes, np.empty(0, np.int64))
        return Negatives(ntypes, config, seed, **given).draw(epoch, step, nobody)

    draws = [drawn(3, 0, 1), drawn(4, 0, 1), drawn(3, 2, 1), drawn(3, 0, 2), drawn(3, 1, 0)]
    assert len({ids.tobytes() for one in draws for ids in one.values()}) == 10
    assert all(np.array_equal(ids, draws[0][end]) for end, ids in drawn(3, 0, 1).items())
