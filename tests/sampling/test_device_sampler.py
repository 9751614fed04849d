"""Batches made on a GPU against those made on the CPU, by Triton's interpreter."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from raygnn.errors import TrainingError
from raygnn.graph.data import DEFAULT_NTYPE, GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.sampling.cache import choose, choose_for_host, choose_near, inclusion
from raygnn.sampling.device import device_features
from raygnn.sampling.device.device_features import DeviceFeatures
from raygnn.sampling.device.device_sampler import DeviceSampler, difference
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import Inputs, build_store, choose_inputs
from raygnn.sampling.host_memory import Host
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from tests.support.elsewhere import Cudart
from tests.support.graphs import (
    ITEM,
    TAG,
    out_degrees,
    partitioned,
    random_graph,
    shard_of,
    typed_graph,
)
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
GRAPHS = {"homogeneous": (random_graph, DEFAULT_NTYPE), "typed": (typed_graph, ITEM)}
BY_TYPE = [{"also": 3, "*": 0}, {"buys": -1, "also": 2, "*": 4}]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize(
    ("fanouts", "once", "replace"),
    [([4, 3], False, False), ([-1, 2], True, False), ([2, 20, -1], False, True),
     ("by type", True, True)],
)  # fmt: skip
def test_blocks_are_those_of_the_cpu(
    fanouts: Any, once: bool, replace: bool, kind: str, tmp_path: Path
) -> None:
    make, ntype = GRAPHS[kind]
    if fanouts == "by type":
        fanouts = BY_TYPE if kind == "typed" else [5]
    exchange = Exchange(World(0, 1))
    shard = shard_of(exchange, partitioned(make(), tmp_path, 1), replicated=True)
    options = {"seed": 7, "replace": replace, "once": once}
    samplers: Any = (
        NeighborSampler(shard, exchange, **options),
        DeviceSampler(shard, CPU, **options),
    )
    hops = resolve_fanouts(fanouts, shard.etypes)
    if replace and any(-1 in hop.values() for hop in hops):
        hops = [{e: abs(n) for e, n in hop.items()} for hop in hops]
    for step, count in enumerate((25, 1, 0)):
        seeds = {ntype: np.random.default_rng(step).permutation(100)[:count]}
        expected, drawn = (s.sample(seeds, hops, epoch=3, step=step) for s in samplers)
        assert {t: ids.tolist() for t, ids in expected[1].items()} == {
            t: ids.tolist() for t, ids in drawn[1].items()
        }
        assert difference(expected[0], drawn[0]) is None
        assert (expected[0] != [] and difference(expected[0], drawn[0][1:])) is not None


def rows_of(exchange: Exchange, meta: PartitionMeta) -> list[Any]:
    """Return the rows that each store reads for some nodes; all rows are local, since ranks share a
    host."""
    shard = shard_of(exchange, meta, replicated=True)
    host = Host.discover(exchange)
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    store = build_store(
        shard, exchange, inputs, dtype=torch.bfloat16, degree_etypes=shard.etypes, host=host
    )
    fanouts = resolve_fanouts([3, 3], shard.etypes)
    scores = inclusion(shard, {ITEM: np.arange(20)}, 5, fanouts, replace=False)
    near = choose(scores, shard.bounds, (), 0.3)
    assert all(0 < len(ids) < shard.num_nodes(t) for t, ids in near.items() if t != "tag")
    ids = {t: np.arange(shard.num_nodes(t))[::-1].copy() for t in shard.ntypes}
    ids[ITEM] = np.array([3, 3, 0, 119, 50])
    found = []
    for some in (store, DeviceFeatures(store, CPU), DeviceFeatures(store, CPU, near)):
        found.append({t: dict(columns) for t, columns in some.gather(ids).items()})
    tensors = {t: torch.from_numpy(nodes) for t, nodes in ids.items()}
    return [*found, DeviceFeatures(store, CPU, {}).gather(tensors)]


def rows_of_hosts(
    exchange: Exchange, meta: PartitionMeta, hosts: list[list[int]], cache: float, dtype: Any
) -> list[Any]:
    """Return a store's rows and the same rows read as on a GPU, for ids that differ from rank to
    rank; then the counts of remote rows and hits, and the bytes sent for rows."""
    (mine,) = (ranks for ranks in hosts if exchange.world.rank in ranks)
    host = Host(exchange, tuple(mine), max(map(len, hosts)))
    shard = shard_of(exchange, meta, replicated=True)
    inputs = {t: choose_inputs(a, *WANTED) for t, a in shard.node_data.items()}
    cached = choose_for_host(out_degrees(shard), shard.bounds, host, cache)
    store = build_store(
        shard, exchange, inputs, dtype=dtype, degree_etypes=shard.etypes, host=host, cached=cached
    )
    over = Exchange(exchange.world, torch.distributed.new_group())
    near = choose_near(out_degrees(shard), shard.bounds, host.ranks, cached, 0.4)
    assert sum(map(len, near.values())) > 9
    rng = np.random.default_rng(exchange.world.rank)
    drawn = [
        {t: rng.integers(0, shard.num_nodes(t), n) for t in shard.ntypes} for n in (50, 0, 300)
    ]
    found: list[Any] = []
    counts: list[tuple[int, int]] = []
    for some in (store, *(DeviceFeatures(store, CPU, n, over) for n in (None, {}, near))):
        store.remote = store.hits = 0
        found.append([{t: dict(c) for t, c in some.gather(ids).items()} for ids in drawn])
        counts.append((some.remote, some.hits))
    assert len(set(counts)) == 1
    return [found, counts[0], over.sent_bytes]


def mixed_graph() -> GraphData:
    """Build a graph with rows of several dtypes and widths, and a type with categories only."""
    data = typed_graph()
    rng = np.random.default_rng(2)
    item, tag = data.nodes[ITEM], data.nodes[TAG]
    item.data["small"] = rng.integers(-128, 128, (item.num, 3)).astype(np.int8)
    item.data["small_scale"] = rng.random(item.num).astype(np.float32)
    del tag.data["feat"]
    tag.data["brand"] = rng.integers(0, 5, tag.num)
    return data


WANTED = ("feat", "small"), ("brand",)


@pytest.mark.parametrize(
    ("cache", "hosts"), [(0.0, [[0], [1]]), (0.3, [[0], [1]]), (0.3, [[0, 2], [1]])], ids=str
)
def test_rows_of_other_hosts_are_those_of_the_cpu(
    cache: float, hosts: list[list[int]], tmp_path: Path
) -> None:
    meta = partitioned(mixed_graph(), tmp_path, 2)
    ranks = run_ranks(sum(map(len, hosts)), rows_of_hosts, meta, hosts, cache, torch.bfloat16)
    for (expected, *others), (remote, hits), sent in ranks:
        assert remote > hits
        assert (hits > 0) == (cache > 0)
        assert sent > 0
        for given in others:
            for batch, rows in zip(expected, given, strict=True):
                assert {t: [*c] for t, c in rows.items()} == {t: [*c] for t, c in batch.items()}
                for ntype, columns in batch.items():
                    for name, column in columns.items():
                        assert torch.equal(rows[ntype][name], column), (ntype, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_are_those_of_the_cpu(ranks: int, tmp_path: Path) -> None:
    """Rows may be in any store and belong to any rank of the host."""
    for expected, *others in run_ranks(ranks, rows_of, partitioned(typed_graph(), tmp_path, ranks)):
        assert "degree:item:also:item" in expected[ITEM]
        for rows in others:
            assert rows.keys() == expected.keys()
            for ntype, columns in expected.items():
                assert rows[ntype].keys() == columns.keys()
                for name, column in columns.items():
                    assert torch.equal(rows[ntype][name], column), (ntype, name)


def locked_rows(
    exchange: Exchange, meta: PartitionMeta, most: int | None, copies: bool
) -> tuple[Any, ...]:
    """Read rows with two ranks on a host and one on another. Return whether they are right, shared
    and locked in place, the number of locks at the end, and log messages."""
    shard = shard_of(exchange, meta, replicated=True)
    host = Host(exchange, (0, 1) if exchange.world.rank < 2 else (2,), 2)
    cached = choose_for_host(out_degrees(shard), shard.bounds, host, 0.5)
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    store = build_store(
        shard, exchange, inputs, dtype=torch.float32, resident=True, host=host, cached=cached
    )
    messages = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("raygnn").addHandler(handler)
    over, cudart = Exchange(exchange.world, torch.distributed.new_group()), Cudart(most)
    try:
        with patch.object(device_features, "runtime", lambda device: cudart):
            made = DeviceFeatures(store, CPU, {}, over, copies)
    except TrainingError as error:
        return str(error), cudart.locked
    finally:
        logging.getLogger("raygnn").removeHandler(handler)
    ids = {t: np.arange(shard.num_nodes(t)) for t in shard.ntypes}
    right = all(
        torch.equal(made.gather(ids)[t]["features"], columns["features"])
        for t, columns in store.gather(ids).items()
    )
    tables = [store.here(t)["features"] for t in shard.ntypes]
    ranges = {rows.data_ptr(): rows.nbytes for rows in tables}
    locked = dict(cudart.locked)
    exchange.max(0)
    if host.leads:
        tables[0].zero_()  # of all ranks of the host, cached ones included
    exchange.max(0)
    own = slice(*(int(b) for b in shard.bounds[shard.ntypes[0]][exchange.world.rank :][:2]))
    some = {t: ids[t][own] if t == shard.ntypes[0] else ids[t][:0] for t in ids}
    shared = not made.gather(some)[shard.ntypes[0]]["features"].any()
    exchange.max(0)
    del made
    return right, shared, locked == ranges, len(cudart.locked), messages


def test_pages_are_locked_where_all_ranks_of_a_host_share_them(tmp_path: Path) -> None:
    """The pages are unlocked once they have no reader."""
    meta = partitioned(typed_graph(), tmp_path, 3)
    for right, shared, in_place, at_the_end, messages in run_ranks(
        3, locked_rows, meta, None, True
    ):
        assert right
        assert shared
        assert in_place
        assert at_the_end == 0
        assert messages == []


def test_pages_that_cannot_be_locked_are_copied(tmp_path: Path) -> None:
    """Pages that were locked before are unlocked, and the log has one line."""
    meta = partitioned(typed_graph(), tmp_path, 3)
    for right, shared, in_place, at_the_end, messages in run_ranks(3, locked_rows, meta, 1, True):
        assert right
        assert not shared
        assert not in_place
        assert at_the_end == 0
        assert len(messages) == 1
        assert "CUDA says error 2" in messages[0]
    for message, locked in run_ranks(3, locked_rows, meta, 1, False):
        assert "no memory for a copy" in message
        assert locked == {}
