"""Nodes and edges as seeds, of one task and of several: which come when, and what of one
neighbourhood is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from raygnn.graph.data import EdgeSplit, EdgeType, GraphData
from raygnn.graph.partition.edges import TRAIN
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import Inputs, build_store
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import MultitaskPlan, SeedPlan, resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import (
    EdgeSeeds,
    MultitaskSeeds,
    NodeSeeds,
    OwnedEdges,
    SeedSlice,
    TaskSeeds,
    in_order,
)
from tests.support.graphs import (
    ITEM,
    USER,
    everyones,
    partitioned,
    random_graph,
    shard_of,
    typed_graph,
)
from tests.support.ranks import run_each, run_ranks

BUYS: EdgeType = (USER, "buys", ITEM)
BOUGHT_BY: EdgeType = (ITEM, "bought_by", USER)
PLAIN: EdgeType = ("_N", "_E", "_N")


def graph(typed: bool) -> GraphData:
    if not typed:
        data = random_graph(nodes=60, degree=5)
        data.edges[PLAIN].data["train_mask"] = np.arange(300) % 3 == 0
        return data
    data = typed_graph()
    buys, back = data.edges[BUYS], data.edges[BOUGHT_BY]
    back.src, back.dst = buys.dst.copy(), buys.src.copy()  # the reverses
    buys.data["train_mask"] = np.arange(buys.num) % 3 == 0
    return data


def epoch(
    exchange: Exchange, meta: PartitionMeta, replicated: bool, typed: bool, exclude: Any, split: Any
) -> list[Any]:
    """Return all batches of an epoch: the seeds' ends and the sampled edges, in original ids."""
    shard = shard_of(exchange, meta, replicated=replicated)
    original = {t: everyones(exchange, shard.original[t]) for t in shard.ntypes}
    etype, reverse = (BUYS, BOUGHT_BY) if typed else (PLAIN, None)
    whole = shard_of(exchange, meta, replicated=False, split=EdgeSplit(etype))
    edges = OwnedEdges(whole, exchange, etype)
    positions = in_order(edges, edges.chosen(TRAIN)) if split else np.arange(edges.bounds[-1])
    seeds = EdgeSeeds(edges, positions, exclude=exclude, reverse=reverse)
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    make = BatchMaker(
        seeds=TaskSeeds(SeedPlan(seeds.num, 64, seed=3), seeds, exchange.world),
        sampler=(sampler := Noting(shard, exchange, seed=1)),
        store=build_store(shard, exchange, inputs, dtype=torch.float32),
        fanouts=resolve_fanouts([5, 5], shard.etypes),
        inputs=inputs,
    )
    found = []
    for step in range(make.plan.steps_per_epoch):
        batch = make(0, step)
        nodes = {t: original[t][ids] for t, ids in sampler.inputs.items()}
        drawn = set()
        for block in batch.blocks:
            for e, adj in block.adj.items():
                src, dst = nodes[e[0]][adj.src.numpy()], nodes[e[2]][adj.dst.numpy()]
                drawn |= {(e, s, d) for s, d in zip(src.tolist(), dst.tolist())}
        last = batch.blocks[-1].num_dst
        assert batch.pairs is not None
        assert int(batch.pairs[0].max()) < last[etype[0]]
        ends = [nodes[t][batch.pairs[i].numpy()] for i, t in enumerate((etype[0], etype[2]))]
        real = int(batch.weight.sum())
        found.append((list(zip(*(end[:real].tolist() for end in ends))), drawn))
    return found


class Noting(NeighborSampler):
    """Sampler that keeps the input ids of the last batch."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        blocks, self.inputs = super().sample(*args, **kwargs)
        return blocks, self.inputs


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("split", [None, "train"])
def test_an_epoch_has_every_edge_once(typed: bool, split: Any, tmp_path: Path) -> None:
    data = graph(typed)
    etype = BUYS if typed else PLAIN
    edges = data.edges[etype]
    chosen = edges.data["train_mask"] if split else np.ones(edges.num, bool)
    expected = sorted(zip(edges.src[chosen].tolist(), edges.dst[chosen].tolist()))
    meta = partitioned(data, tmp_path, 2)
    for workers, replicated in ((1, True), (2, True), (3, False)):
        ranks = run_ranks(workers, epoch, meta, replicated, typed, None, split)
        assert sorted(pair for rank in ranks for pairs, _ in rank for pair in pairs) == expected


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("exclude", [None, "self", "reverse"])
def test_batches_do_not_see_their_seeds(typed: bool, exclude: Any, tmp_path: Path) -> None:
    meta = partitioned(graph(typed), tmp_path, 2)
    etype, back = (BUYS, BOUGHT_BY) if typed else (PLAIN, PLAIN)
    arguments = [(meta, replicated, typed, exclude, "train") for replicated in (True, False)]
    topologies = run_each(2, epoch, arguments)
    for ranks in topologies:
        seen, seen_back = 0, 0
        for batches in zip(*ranks):  # no rank sees the seeds of another either
            pairs = [pair for own, _ in batches for pair in own]
            drawn = set().union(*(drawn for _, drawn in batches))
            seen += sum((etype, src, dst) in drawn for src, dst in pairs)
            seen_back += sum((back, dst, src) in drawn for src, dst in pairs if src != dst)
        assert (seen == 0) == (exclude is not None)
        if typed:
            assert (seen_back == 0) == (exclude == "reverse")
        elif exclude == "reverse":
            assert seen_back == 0
    assert topologies[0] == topologies[1]  # the same batches with either topology


@pytest.mark.parametrize("typed", [False, True])
def test_steps_are_the_same_for_any_ranks_and_parts(typed: bool, tmp_path: Path) -> None:
    """Edges have the user's numbers, and the hidden edges of a step are the same."""
    data, found = graph(typed), []
    for workers, parts in ((1, 1), (2, 2), (3, 3), (2, 3)):
        meta = partitioned(data, tmp_path, parts)
        ranks = run_ranks(workers, epoch, meta, False, typed, "reverse", "train")
        steps = [[pair for pairs, _ in step for pair in pairs] for step in zip(*ranks)]
        seen = [set().union(*(drawn for _, drawn in step)) for step in zip(*ranks)]
        found.append(([sorted(pairs) for pairs in steps], seen))
    assert all(each == found[0] for each in found)


def banned(exchange: Exchange, meta: PartitionMeta) -> tuple[Any, Any]:
    shard = shard_of(exchange, meta, replicated=False, split=EdgeSplit(BUYS))
    edges = OwnedEdges(shard, exchange, BUYS)
    seeds = EdgeSeeds(edges, np.arange(edges.bounds[-1]), exclude="reverse")
    start = seeds.start(SeedSlice(np.arange(8), np.arange(8), 0, 0))
    assert start.banned is not None
    pairs = start.fields["pairs"].numpy()
    nodes = [start.nodes[t][pairs[i]] for i, t in enumerate((USER, ITEM))]
    return start.banned.pairs, nodes


def test_edges_between_two_types_are_no_reverses_of_each_other(tmp_path: Path) -> None:
    """Ids of two types overlap, so a reversed edge would ban an unrelated one."""
    ((pairs, (src, dst)),) = run_ranks(1, banned, partitioned(graph(True), tmp_path, 1))
    assert pairs.keys() == {BUYS}
    assert sorted(zip(*pairs[BUYS])) == sorted(zip(src, dst))


PLANS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(SeedPlan, num_seeds=st.integers(1, 60), global_batch=st.integers(1, 20)),
    min_size=1,
)


@given(PLANS, st.integers(1, 4), st.integers(1, 4))
@example({"a": SeedPlan(50, 10), "b": SeedPlan(30, 10)}, 1, 3)
def test_each_task_goes_through_its_own_epochs(
    plans: dict[str, SeedPlan], accumulate: int, epochs: int
) -> None:
    """No seed is skipped or repeated within its task's epoch, however long other epochs are;
    windows count their own seeds."""
    plan = MultitaskPlan(plans, accumulate)
    assert plan.steps_per_epoch == max(p.steps_per_epoch for p in plans.values())
    steps = [(e, s) for e in range(epochs) for s in range(plan.steps_per_epoch)]
    for name, own in plans.items():
        at = [plan.position(name, *when) for when in steps]
        assert at == [divmod(n, own.steps_per_epoch) for n in range(len(steps))]
        dealt = np.concatenate([own.batch(*each) for each in at])
        for first in range(0, len(dealt) - own.num_seeds + 1, own.num_seeds):
            assert sorted(dealt[first : first + own.num_seeds]) == list(range(own.num_seeds))
        for epoch in range(epochs):
            found = [plan.seeds_in_window(name, epoch, s) for s in range(plan.steps_per_epoch)]
            sizes = [len(own.batch(*plan.position(name, epoch, s))) for s in range(len(found))]
            for step, total in enumerate(found):
                first = step // accumulate * accumulate
                assert total == sum(sizes[first : first + accumulate])


def _deal(exchange: Exchange, place: Any) -> list[dict[str, Any]]:
    """Return the seeds of two node tasks and one edge task on this rank, in the user's ids."""
    shard = shard_of(exchange, place, replicated=True)
    whole = shard_of(exchange, place, replicated=False, split=EdgeSplit(BUYS, shares=(0.1, 0.1)))
    edges = OwnedEdges(whole, exchange, BUYS)
    items, users = (np.arange(shard.num_nodes(t)) for t in ("item", "user"))
    seeds: dict[str, Any] = {
        "items": NodeSeeds("item", items, torch.from_numpy(items)),
        "users": NodeSeeds("user", users, torch.from_numpy(users)),
        "buys": EdgeSeeds(edges, np.arange(edges.bounds[-1]), exclude="self"),
    }
    sizes = {"items": 8, "users": 3, "buys": 40}
    plans = {name: SeedPlan(s.num, sizes[name], seed=4) for name, s in seeds.items()}
    deals = {name: TaskSeeds(plans[name], s, exchange.world) for name, s in seeds.items()}
    deal = MultitaskSeeds(MultitaskPlan(plans), deals)
    found = []
    for step in range(deal.plan.steps_per_epoch):
        dealt = deal(1, step)
        parts = dealt.fields["parts"]
        buys = parts["buys"]
        ends = edges.rows(buys.seeds.numpy(), [])[0]
        real = {name: int(part.weight.sum()) for name, part in parts.items()}
        for name, part in parts.items():
            assert part.window == deal.plan.seeds_in_window(name, 1, step)
        for nodes in dealt.nodes.values():
            assert len(np.unique(nodes)) == len(nodes)
        for name, ntype in (("items", "item"), ("users", "user")):
            part = parts[name]
            assert (dealt.nodes[ntype][part.nodes.numpy()] == part.seeds.numpy()).all()
            assert (part.y == part.seeds).all()  # the targets above
        for end, ntype, rows in zip(ends, ("user", "item"), buys.pairs.numpy()):
            assert (dealt.nodes[ntype][rows] == end).all()
        assert dealt.banned is not None
        assert set(dealt.banned.pairs) == {BUYS}
        assert dealt.fields["total"] == sum(part.total for part in parts.values())
        found.append(real)
    return found


def test_one_neighbourhood_serves_all_tasks(tmp_path: Path) -> None:
    """Each seed finds its node, or the ends of its edge, in the shared neighbourhood, also on ranks
    without a seed of a task."""
    place = partitioned(typed_graph(), tmp_path, 2)
    for workers in (1, 2, 4):
        ranks = run_ranks(workers, _deal, place)
        for step in zip(*ranks):
            total = {name: sum(each[name] for each in step) for name in step[0]}
            assert total["buys"] <= 40
            assert total["items"] == 8  # 15 steps, while the users begin again after 14
            assert total["users"] in (3, 40 % 3)
