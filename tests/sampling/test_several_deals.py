"""Seeds of several tasks: which come when, and what of one neighbourhood is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from raygnn.graph.partition.edge_target import EdgeSplit
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.plan import MultitaskPlan, SeedPlan
from raygnn.sampling.seeds import Edges, EdgeSeeds, MultitaskSeeds, NodeSeeds, TaskSeeds
from tests.graphs import partitioned, shard_of, typed_graph
from tests.ranks import run_ranks

BUYS = ("user", "buys", "item")

PLANS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(SeedPlan, num_seeds=st.integers(1, 60), global_batch=st.integers(1, 20)),
    min_size=1,
)


@given(PLANS, st.integers(1, 4), st.integers(1, 4))
def test_each_task_goes_through_its_own_epochs(
    plans: dict[str, SeedPlan], accumulate: int, epochs: int
) -> None:
    """No seed is left out or comes twice before all have come, however long the others take; and
    windows count what comes in them."""
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
    """What two tasks on nodes and one on edges are dealt, by ids in the user's graph."""
    shard = shard_of(exchange, place, replicated=True)
    whole = shard_of(exchange, place, replicated=False, split=EdgeSplit(BUYS, shares=(0.1, 0.1)))
    edges = Edges(whole, exchange, BUYS)
    items, users = (np.arange(shard.num_nodes(t)) for t in ("item", "user"))
    seeds: dict[str, Any] = {
        "items": NodeSeeds("item", items, torch.from_numpy(items)),
        "users": NodeSeeds("user", users, torch.from_numpy(users)),
        "buys": EdgeSeeds(edges, exclude="self"),
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
    """Each seed finds its own node, or the two ends of its edge, in what all share; on ranks that
    have no seed of a task, too."""
    place = partitioned(typed_graph(), tmp_path, 2)
    for workers in (1, 2, 4):
        ranks = run_ranks(workers, _deal, place)
        for step in zip(*ranks):
            total = {name: sum(each[name] for each in step) for name in step[0]}
            assert total["buys"] <= 40
            assert total["items"] == 8  # 15 steps, while the users begin again after 14
            assert total["users"] in (3, 40 % 3)
