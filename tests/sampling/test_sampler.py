"""The sampler against brute force, and that it draws the same whoever samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.graph.data import DEFAULT_NTYPE, EdgeFrame, EdgeType, GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.shard import EdgeReads
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import Banned, NeighborSampler
from tests.support.graphs import (
    ITEM,
    TYPED,
    everyones,
    partitioned,
    random_graph,
    shard_of,
    typed_graph,
)
from tests.support.ranks import run_each, run_ranks

Drawn = dict[EdgeType, set[tuple[int, int, int]]]  # (hop, original source, original destination)


def sample(
    exchange: Exchange,
    meta: PartitionMeta,
    replicated: bool,
    ntype: str,
    seeds: Any,
    fanouts: Any,
    replace: bool = False,
    weight: str | None = None,
    banned: Any = None,
) -> Drawn:
    """Return the sampled edges for original seed ids, which are the same on each rank."""
    shard = shard_of(exchange, meta, replicated=replicated, reads=EdgeReads(weight=weight))
    to_original = {t: everyones(exchange, shard.original[t]) for t in shard.ntypes}
    to_new = {t: np.argsort(o) for t, o in to_original.items()}
    sampler = NeighborSampler(shard, exchange, seed=5, replace=replace, weighted=weight is not None)
    bans = None
    if banned is not None:
        bans = Banned(
            {e: (to_new[e[0]][src], to_new[e[2]][dst]) for e, (src, dst) in banned.items()}
        )
    blocks, inputs = sampler.sample(
        {ntype: to_new[ntype][seeds]},
        resolve_fanouts(fanouts, shard.etypes),
        epoch=2,
        step=3,
        banned=bans,
    )
    drawn: Drawn = {e: set() for e in shard.etypes}
    nodes = inputs
    for hop, block in reversed(list(enumerate(reversed(blocks)))):
        for etype, adj in block.adj.items():
            src = to_original[etype[0]][nodes[etype[0]][adj.src.numpy()]]
            dst = to_original[etype[2]][nodes[etype[2]][adj.dst.numpy()]]
            drawn[etype] |= set(zip([hop] * len(src), src.tolist(), dst.tolist()))
        nodes = {t: ids[: block.num_dst[t]] for t, ids in nodes.items()}
    assert np.array_equal(to_original[ntype][nodes[ntype]], seeds)
    return drawn


def full_neighborhood(data: GraphData, ntype: str, seeds: np.ndarray, hops: int) -> Drawn:
    drawn: Drawn = {e: set() for e in data.edges}
    frontier = {t: set() for t in data.nodes}
    frontier[ntype] = set(seeds.tolist())
    for hop in range(hops):
        reached = {t: set(ids) for t, ids in frontier.items()}
        for etype, edges in data.edges.items():
            for src, dst in zip(edges.src.tolist(), edges.dst.tolist()):
                if dst in frontier[etype[2]]:
                    drawn[etype].add((hop, src, dst))
                    reached[etype[0]].add(src)
        frontier = reached
    return drawn


def everywhere(
    workers: int, data: GraphData, directory: Path, placements: Any, *given: Any
) -> list[list[Drawn]]:
    """Run `sample` for each ``(parts, method)`` of a partition, with either topology."""
    metas = [partitioned(data, directory, *placement) for placement in placements]
    arguments = [(meta, replicated, *given) for meta in metas for replicated in (True, False)]
    return run_each(workers, sample, arguments)


GRAPHS = {"homogeneous": (random_graph, "_N"), "typed": (typed_graph, ITEM)}


@pytest.mark.parametrize("kind", GRAPHS)
def test_all_neighbors(kind: str, tmp_path: Path) -> None:
    make, ntype = GRAPHS[kind]
    data = make()
    meta = partitioned(data, tmp_path, 3)
    seeds = np.array([0, 7, 33])
    expected = full_neighborhood(data, ntype, seeds, 2)
    given = (ntype, seeds, [-1, -1])
    for ranks in run_each(2, sample, [(meta, True, *given), (meta, False, *given)]):
        assert ranks == [expected, expected]


PAIRS = pytest.mark.parametrize(("replace", "kind"), [*zip((False, True), GRAPHS)])


@PAIRS
def test_samples_do_not_depend_on_partition_workers_or_topology(
    replace: bool, kind: str, tmp_path: Path
) -> None:
    make, ntype = GRAPHS[kind]
    data = make()
    given = (ntype, np.array([3, 4, 50, 99]), [3, 2], replace)
    (expected,) = run_ranks(1, sample, partitioned(data, tmp_path, 1), True, *given)
    assert any(expected.values())
    for workers, placements in ((2, ((2, "metis"), (3, "random"))), (3, ((2, "random"),))):
        for ranks in everywhere(workers, data, tmp_path, placements, *given):
            assert ranks == [expected] * workers


def _lopsided(exchange: Exchange, meta: PartitionMeta) -> int:
    """Sample with seeds on rank 0 only; return the number of seeds of the last block."""
    shard = shard_of(exchange, meta, replicated=False)
    sampler = NeighborSampler(shard, exchange)
    mine = np.arange(10) if exchange.world.rank == 0 else np.empty(0, np.int64)
    fanouts = resolve_fanouts([2, 2, 2], shard.etypes)
    blocks, _ = sampler.sample({"_N": mine}, fanouts, epoch=0, step=0)
    return blocks[-1].num_dst["_N"]


def test_a_rank_without_seeds(tmp_path: Path) -> None:
    meta = partitioned(random_graph(), tmp_path, 2)
    assert run_ranks(3, _lopsided, meta) == [10, 0, 0]
    lonely = random_graph(nodes=30, degree=0)
    assert run_ranks(2, _lopsided, partitioned(lonely, tmp_path / "lonely", 2)) == [10, 0]


def _weighted(data: GraphData) -> GraphData:
    """Add weights to some edge types; a third of them are 0."""
    rng = np.random.default_rng(8)
    for etype in list(data.edges)[:2]:
        edges = data.edges[etype]
        edges.data["w"] = rng.choice([0.0, 0.5, 2.0], edges.num).astype(np.float32)
    return data


@PAIRS
def test_weighted_samples_do_not_depend_on_the_partition(
    replace: bool, kind: str, tmp_path: Path
) -> None:
    make, ntype = GRAPHS[kind]
    data = _weighted(make())
    seeds = np.array([3, 4, 50, 99])
    fanouts = [4, 3]
    some = list(data.edges)[:2]
    banned = {e: (data.edges[e].src[::3], data.edges[e].dst[::3]) for e in some}
    given = (ntype, seeds, fanouts, replace, "w", banned)
    (expected,) = run_ranks(1, sample, partitioned(data, tmp_path, 1), True, *given)
    for etype in some:
        edges = data.edges[etype]
        no = set(zip(banned[etype][0].tolist(), banned[etype][1].tolist()))
        kept = edges.data["w"] > 0
        yes = set(zip(edges.src[kept].tolist(), edges.dst[kept].tolist())) - no
        drawn = {(src, dst) for _, src, dst in expected[etype]}
        assert drawn <= yes
    assert any(expected.values())
    for ranks in everywhere(2, data, tmp_path, ((3, "random"),), *given):
        assert ranks == [expected, expected]


@pytest.mark.parametrize("replicated", [True, False])
def test_fanouts_by_edge_type(replicated: bool, tmp_path: Path) -> None:
    data = typed_graph()
    meta = partitioned(data, tmp_path, 2)
    seeds = np.arange(20)
    fanouts = [{"buys": 1, "item:also:item": 3, "*": 0}, {"*": 2}]
    for drawn in run_ranks(2, sample, meta, replicated, ITEM, seeds, fanouts):
        also, buys, bought_by, has = (drawn[e] for e in TYPED)
        for edges, most in ((also, 3), (buys, 1)):
            first = [(dst, src) for hop, src, dst in edges if hop == 0]
            counts = np.bincount([dst for dst, _ in first], minlength=20)
            assert 0 < counts.max() <= most
        assert not [e for e in bought_by | has if e[0] == 0]
        assert [e for e in bought_by if e[0] == 1]


def test_a_rank_that_owns_all_destinations_still_answers(tmp_path: Path) -> None:
    """The only rank with destinations holds every row."""
    data = typed_graph(items=1)
    data.edges = {e: edges for e, edges in data.edges.items() if e[2] == ITEM}
    meta = partitioned(data, tmp_path, 2)
    found = run_ranks(2, sample, meta, False, ITEM, np.array([0]), [3, 3])
    assert found[0] == found[1]
    assert any(found[0].values())


@pytest.mark.parametrize("kind", ["half", "column"])
def test_weights_of_other_shapes_and_dtypes(kind: str, tmp_path: Path) -> None:
    """Weights in half precision, or in one column, are the same."""
    found = []
    for changed in (False, True):
        data = _weighted(random_graph())
        frame = data.edges["_N", "_E", "_N"]
        if changed:
            weight = frame.data["w"]
            frame.data["w"] = weight.astype(np.float16) if kind == "half" else weight[:, None]
        meta = partitioned(data, tmp_path / str(changed), 1)
        found += run_ranks(1, sample, meta, True, "_N", np.arange(20), [3, 3], False, "w")
    assert any(found[0].values())
    assert found[0] == found[1]


def with_relations(data: GraphData, *names: EdgeType) -> GraphData:
    """Give every edge a number that depends on its ends, and parallel edges different ones."""
    for etype in names:
        edges = data.edges[etype]
        edges.src[1], edges.dst[1] = edges.src[0], edges.dst[0]
        relation = (edges.src * 7 + edges.dst * 3) % 50 + 1000 * np.arange(edges.num)
        edges.data["kind"] = relation.astype(np.int64)
        edges.data["amount"] = relation / 2
        edges.data["pair"] = np.stack([relation % 7, -relation], 1).astype(np.int32)
    return data


READS = EdgeReads(("amount", "pair"), categories=("kind",), relation="kind", weight="w")


def draw_relations(
    exchange: Exchange,
    meta: PartitionMeta,
    replicated: bool,
    ntype: str,
    fanouts: list[int],
    weighted: bool,
) -> list[Any]:
    """Return the edges of the blocks around the seeds in original ids: ``(hop, etype, src, dst,
    relation)``."""
    shard = shard_of(exchange, meta, replicated=replicated, reads=READS)
    original = {t: everyones(exchange, shard.original[t]) for t in shard.ntypes}
    sampler = NeighborSampler(shard, exchange, seed=5, weighted=weighted)
    seeds = {ntype: np.argsort(original[ntype])[[3, 4, 50, 99]]}
    hops = resolve_fanouts(fanouts, shard.etypes)
    blocks, nodes = sampler.sample(seeds, hops, epoch=2, step=3)
    (first, *_), _, _ = sampler.sample_open(seeds, hops, epoch=2, step=3)
    for etype, adj in first.adj.items():
        assert (adj.rows is None) == (blocks[0].adj[etype].rows is None)
        assert adj.rows is None or torch.equal(adj.rows, blocks[0].adj[etype].rows)
    found = []
    for hop, block in enumerate(blocks):
        for etype, adj in block.adj.items():
            if adj.relation is None:
                assert adj.rows is None
                assert not adj.categories
                continue
            assert torch.equal(adj.categories["kind"], adj.relation)
            columns = adj.relation / 2, adj.relation % 7, -adj.relation
            assert torch.equal(adj.rows, torch.stack(columns, 1).float())
            src = original[etype[0]][nodes[etype[0]][adj.src.numpy()]]
            dst = original[etype[2]][nodes[etype[2]][adj.dst.numpy()]]
            found += [(hop, etype, *edge) for edge in zip(src, dst, adj.relation.tolist())]
        nodes = {t: ids[: block.num_dst[t]] for t, ids in nodes.items()}
    return found


@pytest.mark.parametrize(
    ("weighted", "fanouts", "kind"),
    [(True, [-1, -1], "homogeneous"), (False, [3, 2], "homogeneous"),
     (False, [-1, -1], "typed"), (True, [3, 2], "typed")],
)  # fmt: skip
def test_blocks_carry_what_is_read_of_their_edges(
    weighted: bool, fanouts: list[int], kind: str, tmp_path: Path
) -> None:
    """Blocks carry the arrays of exactly the sampled edges, parallel ones included, on any rank."""
    make, ntype = GRAPHS[kind]
    graph = make()
    etypes = list(graph.edges)[:2]  # the others have no relations
    data = with_relations(graph, *etypes)
    for etype in etypes if weighted else []:
        data.edges[etype].data["w"] = np.ones(data.edges[etype].num, np.float32)
    every = {
        (etype, src, dst, relation)
        for etype in etypes
        for src, dst, relation in zip(
            *(a.tolist() for a in (data.edges[etype].src, data.edges[etype].dst)),
            data.edges[etype].data["kind"].tolist(),
        )
    }
    (expected,) = run_ranks(
        1, draw_relations, partitioned(data, tmp_path, 1), True, ntype, fanouts, weighted
    )
    assert {edge[1:] for edge in expected} <= every
    assert {edge[1] for edge in expected} == set(etypes)
    assert len(set(expected)) == len(expected)  # no edge is drawn twice in a hop
    for parts, workers in ((2, 2), (2, 3)):
        meta, given = partitioned(data, tmp_path, parts), (ntype, fanouts, weighted)
        arguments = [(meta, True, *given), (meta, False, *given)]
        for ranks in run_each(workers, draw_relations, arguments):
            assert [sorted(edges) for edges in ranks] == [sorted(expected)] * workers


TWINS: list[EdgeType] = [(DEFAULT_NTYPE, name, DEFAULT_NTYPE) for name in ("one", "other")]


def test_draws_depend_on_seed_epoch_step_hop_and_edge_type(tmp_path: Path) -> None:
    """The last hop is the same whether its sources are numbered or left as ids."""
    graph = random_graph(degree=30)
    (edges,) = graph.edges.values()
    graph.edges = {etype: EdgeFrame(edges.src, edges.dst) for etype in TWINS}
    exchange = Exchange(World(0, 1))
    shard = shard_of(exchange, partitioned(graph, tmp_path, 1), replicated=True)
    nodes, fanouts = {"_N": np.arange(50)}, resolve_fanouts([5, 5], shard.etypes)

    def drawn(seed: int, epoch: int, step: int) -> dict[Any, np.ndarray]:
        """Return the neighbours that the same nodes sample in both hops."""
        sampler = NeighborSampler(shard, exchange, seed=seed)
        when = {"epoch": epoch, "step": step}
        blocks, inputs = sampler.sample(nodes, fanouts, **when)
        _, _, last = sampler.sample_open(nodes, fanouts, **when)
        found = {}
        for hop, block in enumerate(reversed(blocks)):
            for etype, adj in block.adj.items():
                ids = inputs["_N"][adj.src.numpy()]
                if hop == 1:
                    assert np.array_equal(ids, last[etype].ids)
                found[hop, etype] = ids[: int(adj.indptr[50])]
        return found

    draws = [drawn(3, 0, 1), drawn(4, 0, 1), drawn(3, 2, 1), drawn(3, 0, 2), drawn(3, 1, 0)]
    each = [ids for one in draws for ids in one.values()]
    assert len(each) == 20
    assert len({ids.tobytes() for ids in each}) == 20
    assert all(np.array_equal(ids, draws[0][key]) for key, ids in drawn(3, 0, 1).items())
