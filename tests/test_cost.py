"""benchmarks/cost.py against the engine: what a batch touches, what is sent and kept."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.config.graph import PlantedGraph
from raygnn.config.model import read_model
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.sources import planted
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import Shard, load_shard
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.sampling.cache import choose, inclusion
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import FEATURES, FeatureStore
from raygnn.sampling.plan import SeedPlan, rank_share
from raygnn.sampling.sampler import NeighborSampler
from tests.support.graphs import out_degrees, partitioned, random_graph, shard_of, with_room
from tests.support.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from cost import (
    Degrees,
    Graph,
    Hop,
    Job,
    Reach,
    main,
    node_memory,
    parameters,
    reach,
    sent_bytes,
    staged_topology,
    statistics,
)

N = DEFAULT_NTYPE
BATCH, FANOUTS, RANKS = 64, (6, 4), 2


def graph(
    nodes: int = 100_000, degree: float = 20, cut: float = 0.2, kind: Degrees | None = None
) -> Graph:
    kind = kind or Degrees.power_law(2.2, degree, 2000)
    return Graph(nodes, round(nodes * degree), 32, nodes // 10, cut, kind)


def job(**changes: object) -> Job:
    return replace(Job(BATCH, FANOUTS, hidden=16, classes=5, cache=0.0), **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ counted


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> PartitionMeta:
    options = PlantedGraph(
        format="planted", nodes=20_000, degree=20, features=4, classes=8, train=0.3
    )
    directory = tmp_path_factory.mktemp("cost")
    return partitioned(planted.read(options), directory, RANKS, "metis")


def shards(meta: PartitionMeta) -> list[Shard]:
    stage = Stage(meta.directory.parent / "stage")
    return [load_shard(meta, r, RANKS, replicated=True, stage=stage) for r in range(RANKS)]


@pytest.mark.parametrize("fanouts", [(6, 4), (4, 3, 2), (5, -1)])
def test_frontiers_and_hits_are_as_counted(parts: PartitionMeta, fanouts: tuple[int, ...]) -> None:
    found = shards(parts)
    bounds = found[0].bounds
    train = np.concatenate(
        [np.flatnonzero(s.node_data[N]["train_mask"].numpy()) + s.first(N) for s in found]
    )
    per_hop = [{DEFAULT_ETYPE: fanout} for fanout in fanouts]
    plan = SeedPlan(num_seeds=len(train), global_batch=BATCH * RANKS)
    counted: dict[str, list[float]] = {}
    for rank, shard in enumerate(found):
        first, last = bounds[N][rank : rank + 2]
        mine = {N: train[(train >= first) & (train < last)]}
        scores = {
            "vip": inclusion(shard, mine, BATCH, per_hop, replace=False),
            "degree": out_degrees(shard),
        }
        kept = {p: choose(score, bounds, [rank], 0.1)[N] for p, score in scores.items()}
        sampler = NeighborSampler(shard, Exchange(World(0, 1)))
        for step in range(20):
            batch = train[plan.batch(0, step)]
            seeds = batch[rank_share(batch, rank, RANKS)]
            blocks, inputs = sampler.sample({N: seeds}, per_hop, epoch=0, step=step)
            away = inputs[N][(inputs[N] < first) | (inputs[N] >= last)]
            hit = {p: len(np.intersect1d(away, ids)) for p, ids in kept.items()}
            figures = {"inputs": len(inputs[N]), "remote": len(away), **hit}
            for number, block in enumerate(reversed(blocks)):
                figures[f"nodes {number}"] = block.num_dst[N]
                figures[f"draws {number}"] = len(block.adj[DEFAULT_ETYPE].src)
            for name, value in figures.items():
                counted.setdefault(name, []).append(value)
    told = statistics(parts.directory)
    assert told.training == len(train)
    expected = {}
    for policy in ("vip", "degree"):
        touched = reach(told, job(fanouts=fanouts, cache=0.1, policy=policy), RANKS)
        expected[policy] = touched.hits
    expected |= {"inputs": touched.inputs, "remote": touched.remote}
    for number, hop in enumerate(touched.hops):
        expected |= {f"nodes {number}": hop.nodes, f"draws {number}": hop.draws}
    for name, value in expected.items():
        assert value == pytest.approx(float(np.mean(counted[name])), rel=0.08), name


def _sends(exchange: Exchange, meta: PartitionMeta, replicated: bool) -> tuple[int, Reach]:
    """Return the bytes that a rank sends for a batch, and what that batch reaches."""
    shard = shard_of(exchange, meta, replicated=replicated)
    bounds, rank = shard.bounds[N], exchange.world.rank
    table = {FEATURES: with_room(torch.zeros(shard.owned(N), 32), shard.num_nodes(N))}
    sampler = NeighborSampler(shard, exchange)
    store = FeatureStore(shard.bounds, exchange, {N: table})
    seeds = {N: np.arange(bounds[rank], bounds[rank] + 20)}
    fanouts = [{DEFAULT_ETYPE: fanout} for fanout in FANOUTS]
    blocks, inputs = sampler.sample(seeds, fanouts, epoch=0, step=0)
    store.gather(inputs)

    hops, frontier = [], seeds[N]
    for block in reversed(blocks):
        away = (frontier < bounds[rank]) | (frontier >= bounds[rank + 1])
        lengths = np.diff(block.adj[DEFAULT_ETYPE].indptr.numpy())
        asked, drawn = int(away.sum()), int(lengths[away].sum())
        hops.append(Hop(len(frontier), asked, int(lengths.sum()), drawn))
        frontier = inputs[N][: block.num_src[N]]
    touched = Reach(tuple(hops), len(inputs[N]), float(store.remote), 0.0, 0.0)
    return exchange.sent_bytes, touched


@pytest.mark.parametrize("replicated", [True, False])
def test_bytes_are_those_of_the_exchange(tmp_path: Path, replicated: bool) -> None:
    meta = partitioned(random_graph(300), tmp_path, 3)
    found = run_ranks(3, _sends, meta, replicated)
    told = replace(graph(nodes=300), edges=2400)
    expected = [sent_bytes(told, job(replicated=replicated), 3, touched) for _, touched in found]
    # one rank's request is another's answer, so the sums over all ranks agree
    assert sum(data for data, _ in expected) == sum(sent for sent, _ in found)


def test_topology_takes_what_the_staged_files_take(tmp_path: Path) -> None:
    meta = partitioned(random_graph(), tmp_path, 2)
    stage = Stage(tmp_path / "stage")
    load_shard(meta, 0, 2, replicated=True, stage=stage)
    files = next(stage.root.glob("topology-0-2-*")).glob("*.bin")
    told = Graph(meta.num_nodes(N), meta.num_edges(DEFAULT_ETYPE), 1, 1, 0.5)
    assert staged_topology(told) == sum(file.stat().st_size for file in files)


def test_parameters_are_those_of_the_model() -> None:
    model = read_model(kind="sage", hidden=16, layers=2)
    schema = Schema({N: 32}, [DEFAULT_ETYPE], 5, target=N)
    built = sum(p.numel() for p in build_model(model, schema).parameters())
    assert parameters(graph(), job()) == built


# ------------------------------------------------------------------------------------- limits


def test_all_neighbours_draw_every_edge_of_the_frontier() -> None:
    even = graph(kind=Degrees())
    hops = reach(even, job(fanouts=(-1, -1)), 1).hops
    assert [hop.draws for hop in hops] == pytest.approx([20 * hop.nodes for hop in hops])
    everything = reach(even, job(fanouts=(-1,) * 8), 1)
    assert everything.inputs == pytest.approx(100_000, rel=1e-6)
    assert everything.hops[-1].draws == pytest.approx(2_000_000, rel=1e-6)


def test_one_worker_sends_nothing() -> None:
    touched = reach(graph(), job(cache=0.1), 1)
    assert touched.remote == 0
    assert sent_bytes(graph(), job(cache=0.1), 1, touched) == (0, 0)


def test_without_a_cut_only_foreign_seeds_lead_away() -> None:
    remote = [reach(graph(cut=cut), job(), 4).remote for cut in (0.0, 0.1, 0.5)]
    assert 0 < remote[0] < 0.35 * math.sqrt(4 * BATCH) * (1 + 6 + 24)
    assert remote == sorted(remote)


def test_a_random_partition_asks_for_what_is_elsewhere() -> None:
    touched = reach(graph(cut=7 / 8), job(), 8)
    assert touched.remote / touched.inputs == pytest.approx(7 / 8, rel=0.05)


@pytest.mark.parametrize("world", [2, 8])
def test_gradients_take_a_ring(world: int) -> None:
    told = graph()
    _, gradients = sent_bytes(told, job(), world, reach(told, job(), world))
    assert gradients == pytest.approx(2 * (world - 1) / world * 4 * parameters(told, job()))


@settings(deadline=None, max_examples=40)
@given(
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
    power=st.floats(1.5, 3.5),
    cut=st.floats(0.01, 0.9),
    world=st.integers(2, 16),
    fanouts=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
)
def test_a_larger_cache_never_costs_more_bytes(
    shares: list[float], power: float, cut: float, world: int, fanouts: tuple[int, ...]
) -> None:
    told = graph(cut=cut, kind=Degrees.power_law(power, 20, 2000))
    for policy in ("vip", "degree"):
        jobs = [job(cache=share, policy=policy, fanouts=fanouts) for share in shares]
        small, large = (reach(told, chosen, world) for chosen in jobs)
        assert small.hits <= large.hits + 1e-6
        assert large.hits <= large.remote * (1 + 1e-9)
        sent = [sent_bytes(told, *args)[0] for args in zip(jobs, [world] * 2, (small, large))]
        assert sent[0] >= sent[1] - 1e-3
    by_degree = reach(told, job(cache=shares[1], policy="degree", fanouts=fanouts), world)
    by_chance = reach(told, job(cache=shares[1], fanouts=fanouts), world)
    assert by_chance.hits >= by_degree.hits - 1e-6


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=300).filter(any))
def test_degree_classes_keep_nodes_and_edges(degree: list[int]) -> None:
    kind = Degrees.of(np.array(degree))
    assert sum(kind.share) == pytest.approx(1)
    assert np.dot(kind.share, kind.weight) == pytest.approx(1)


def test_a_power_law_has_the_mean_it_is_asked_for() -> None:
    kind = Degrees.power_law(2.2, 30, 1e5)
    assert sum(kind.share) == pytest.approx(1)
    assert np.dot(kind.share, kind.weight) == pytest.approx(1)
    assert max(kind.weight) * 30 <= 1e5


def test_memory_follows_topology_precision_and_nodes() -> None:
    told = graph()

    def memory(nodes: int, **changes: object) -> tuple[float, float]:
        chosen = job(**changes)
        found = node_memory(told, chosen, nodes, 1, reach(told, chosen, nodes))
        return found.topology, found.features

    whole, features = memory(1)
    assert features == 100_000 * 32 * 4
    assert memory(4) == (whole, features / 4)
    assert memory(4, replicated=False)[0] == pytest.approx(whole / 4, rel=1e-3)
    assert memory(4, precision="bf16")[1] == features / 8


def test_the_command(
    parts: PartitionMeta, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ("--nodes", "2", "--batch", "64", "--fanout", "6", "4")
    for source in (["--graph", "20000", "400000", "4", "6000", "--cut", "0.1"], [parts.directory]):
        monkeypatch.setattr(sys, "argv", ["cost.py", *map(str, source), *shape])
        assert main() == 0
        header, _, replicated, partitioned = capsys.readouterr().out.splitlines()
        assert header.count("|") == replicated.count("|") == partitioned.count("|")
        assert replicated.startswith("| 2 × 1, replicated |")
