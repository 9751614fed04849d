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
from raygnn.sampling.negatives import Negatives, make_negatives
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
    weights: Any = dict.fromkeys(ntypes, np.ones(1000, np.int64))
    given: Any = {"weights": weights, "ids": {"_N": np.arange(1000)}, "own": {"_N": (50, 900)}}

    def drawn(seed: int, epoch: int, step: int) -> dict[str, np.ndarray]:
        nobody = dict.fromkeys(ntypes, np.empty(0, np.int64))
        return Negatives(ntypes, config, seed, **given).draw(epoch, step, nobody)

    draws = [drawn(3, 0, 1), drawn(4, 0, 1), drawn(3, 2, 1), drawn(3, 0, 2), drawn(3, 1, 0)]
    assert len({ids.tobytes() for one in draws for ids in one.values()}) == 10
    assert all(np.array_equal(ids, draws[0][end]) for end, ids in drawn(3, 0, 1).items())
