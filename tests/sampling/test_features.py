"""Rows arrive whole, whoever owns them, through one exchange for all types and columns."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.graph.data import GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.models.linear import join
from raygnn.sampling.cache import choose_for_host
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import (
    FEATURES,
    BufferRing,
    FeatureStore,
    Inputs,
    assemble,
    build_store,
    choose_inputs,
)
from raygnn.sampling.host_memory import Host
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from tests.support.graphs import (
    ITEM,
    TAG,
    USER,
    everyones,
    out_degrees,
    partitioned,
    shard_of,
    typed_graph,
    with_room,
)
from tests.support.ranks import run_each, run_ranks


def mixed_graph() -> GraphData:
    """Build items with plain, half, int8 and categorical arrays, users with other plain ones, and
    tags with categories only."""
    data = typed_graph()
    rng = np.random.default_rng(2)
    item, tag = data.nodes[ITEM], data.nodes[TAG]
    item.data["half"] = rng.normal(size=(item.num, 2)).astype(np.float16)
    item.data["count"] = rng.integers(0, 9, item.num)
    item.data["small"] = rng.integers(-128, 128, (item.num, 3)).astype(np.int8)
    item.data["small_scale"] = rng.random(item.num).astype(np.float32)
    item.data["brand"] = rng.integers(0, 12, item.num)
    del tag.data["feat"]
    tag.data["brand"] = rng.integers(0, 5, tag.num)
    return data


# and how closely sums agree in each
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float64: 1e-6}
WANTED = ("feat", "half", "count", "small"), ("brand",)


def expected(data: GraphData, ntype: str, ids: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    arrays = data.nodes[ntype].data
    parts = [
        torch.from_numpy(arrays[name]).reshape(len(arrays[name]), -1).to(dtype)
        for name in ("feat", "half", "count")
        if name in arrays
    ]
    if "small" in arrays:
        scale = torch.from_numpy(arrays["small_scale"]).to(dtype)
        parts.append(torch.from_numpy(arrays["small"]).to(dtype) * scale.unsqueeze(1))
    return torch.cat(parts, 1)[ids]


def host_of(exchange: Exchange, hosts: list[list[int]]) -> Host:
    """Build this rank's host from the ranks of each host."""
    (ranks,) = (ranks for ranks in hosts if exchange.world.rank in ranks)
    return Host(exchange, tuple(ranks), max(map(len, hosts)))


def gather(
    exchange: Exchange,
    meta: PartitionMeta,
    hosts: list[list[int]],
    cache: float,
    dtype: torch.dtype,
    resident: bool,
) -> tuple[list[Any], int, int, int, list[int]]:
    """Gather random ids three times, other ids on each rank, and none in one of the three."""
    rank, host = exchange.world.rank, host_of(exchange, hosts)
    shard = shard_of(exchange, meta, replicated=False)
    inputs = {t: choose_inputs(arrays, *WANTED) for t, arrays in shard.node_data.items()}
    store = build_store(
        shard,
        exchange,
        inputs,
        dtype=dtype,
        degree_etypes=shard.etypes,
        weighted=True,
        resident=resident,
        ring=4,
        host=host,
        cached=choose_for_host(out_degrees(shard), shard.bounds, host, cache),
    )
    original = {t: everyones(exchange, shard.original[t]) for t in shard.ntypes}
    sent, all_to_all = np.zeros(exchange.world.size, np.int64), exchange._all_to_all

    def counted(out: Any, values: Any, receive: Any, send: list[int] | None) -> None:
        if send is not None:  # ids and rows; their numbers are sent in any case
            sent[:] += send
        all_to_all(out, values, receive, send)

    exchange._all_to_all = counted  # type: ignore[method-assign]
    rng = np.random.default_rng(rank)
    before = exchange.messages
    found = []
    for n in (40, 0, 90):
        ids = {t: rng.integers(0, len(o), n) for t, o in original.items()}
        rows = store.gather(ids)
        x, categories = assemble(rows, inputs, {})
        found.append(
            (
                {t: original[t][i] for t, i in ids.items()},
                {t: v.clone() for t, v in x.items()},
                {t: {n: v.clone() for n, v in named.items()} for t, named in categories.items()},
                {n: v.clone() for n, v in rows[ITEM].items() if n.startswith(("deg", "wei"))},
            )
        )
    exchange._all_to_all = all_to_all  # type: ignore[method-assign]
    return found, store.remote, store.hits, exchange.messages - before, sent.tolist()


HOSTS = [[[0], [1], [2]], [[0, 1], [2]], [[0, 2], [1]], [[0, 1, 2]]]


@pytest.mark.parametrize("resident", [False, True])
def test_gather_from_every_rank(resident: bool, tmp_path: Path) -> None:
    data = mixed_graph()
    meta = partitioned(data, tmp_path, 2)
    caches, dtypes = (0.3,) if resident else (0.0, 0.3, 1.0), cycle(DTYPES)
    cases = [(meta, hosts, cache, next(dtypes), resident) for hosts in HOSTS for cache in caches]
    # node → degrees and weights as they are without hosts
    plain: dict[tuple[str, int], torch.Tensor] = {}
    for (_, hosts, cache, dtype, _), ranks in zip(cases, run_each(3, gather, cases)):
        for rank, (found, remote, hits, messages, sent) in enumerate(ranks):
            for ids, x, categories, derived in found:
                assert set(x) == {ITEM, USER}
                for ntype, rows in x.items():
                    assert rows.dtype == dtype
                    assert torch.equal(rows, expected(data, ntype, ids[ntype], dtype))
                for ntype in (ITEM, TAG):
                    brands = torch.from_numpy(data.nodes[ntype].data["brand"][ids[ntype]])
                    assert torch.equal(categories[ntype]["brand"], brands)
                for name, values in derived.items():
                    for node, value in zip(ids[ITEM].tolist(), values):
                        assert torch.equal(value, plain.setdefault((name, node), value))
            (here,) = (host for host in hosts if rank in host)
            # counts, ids and rows, however many types and columns
            assert messages == (0 if len(hosts) == 1 else 9)
            assert not any(sent[other] for other in here)  # their rows are read
            assert (remote > 0) == (len(hosts) > 1)
            assert (hits > 0) == (cache > 0 and len(hosts) > 1)
            assert hits <= remote


def combine(exchange: Exchange, meta: PartitionMeta, how: str, dtype: torch.dtype) -> Any:
    """Compute the same combination by `combine` and by gathering every source row."""
    shard = shard_of(exchange, meta, replicated=True)
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    given: dict[str, Any] = {"dtype": dtype, "weighted": how == "weighted"}
    host = Host.discover(exchange)
    assert host.ranks == (0, 1)
    given["cached"] = choose_for_host(out_degrees(shard), shard.bounds, Host.alone(exchange), 0.3)
    store = build_store(shard, exchange, inputs, **given, beside=True)
    plain = build_store(shard, exchange, inputs, **given | {"cached": {}, "host": host})
    sampler = NeighborSampler(shard, exchange)
    seeds = {ITEM: np.arange(exchange.world.rank, 40, 3)}
    fanouts = resolve_fanouts([3, 4], shard.etypes)
    when = {"epoch": 0, "step": 1}
    blocks, nodes, draws = sampler.sample_open(seeds, fanouts, **when)
    closed, inner = sampler.sample(seeds, fanouts, **when)
    rows, combined = store.combine(nodes, draws, how)
    _, here = plain.combine(nodes, draws, how)  # to the bit, wherever rows are read
    assert all(torch.equal(here[e], values) for e, values in combined.items())
    sources = plain.gather(inner)
    wanted = {}
    for etype, adj in closed[0].adj.items():
        columns = sources[etype[0]]
        x = columns[FEATURES].double()
        if how == "weighted":
            x = x * columns[f"weight:{':'.join(etype)}"].double().unsqueeze(1)
        lists = [x[adj.src[a:b]] for a, b in zip(adj.indptr[:-1], adj.indptr[1:])]
        zero = torch.zeros(x.shape[1], dtype=torch.float64)
        add = {
            "mean": lambda r: r.mean(0),
            "sum": lambda r: r.sum(0),
            "weighted": lambda r: r.sum(0),
            "max": lambda r: r.max(0).values,
        }[how]
        added = [add(rows) if len(rows) else zero for rows in lists]
        wanted[etype] = torch.stack(added) if added else zero[None][:0]
        assert torch.equal(adj.indptr, blocks[0].adj[etype].indptr)
    for ntype, columns in rows.items():
        assert torch.equal(columns[FEATURES], sources[ntype][FEATURES][: len(nodes[ntype])])
        into = [e for e in combined if e[2] == ntype]
        if dtype == torch.float32 and len(into) == 1:
            own, other = columns[FEATURES], combined[into[0]]
            joined = join([own, other])
            assert joined.data_ptr() == own.data_ptr()  # nothing is moved
            assert torch.equal(joined, torch.cat([own, other], 1))
    return [(combined[e].double(), wanted[e], combined[e].dtype) for e in wanted]


@pytest.mark.parametrize("how", ["mean", "sum", "max", "weighted"])
def test_combining_is_gathering_and_adding(how: str, tmp_path: Path) -> None:
    meta = partitioned(typed_graph(), tmp_path, 2)
    for dtype, ranks in zip(DTYPES, run_each(2, combine, [(meta, how, d) for d in DTYPES])):
        for combined, separate, kind in (triple for rank in ranks for triple in rank):
            assert kind == dtype
            close = DTYPES[dtype]
            assert torch.allclose(combined, separate, atol=close, rtol=close)


def _learned(exchange: Exchange, meta: PartitionMeta) -> bool:
    rank, host = exchange.world.rank, Host.discover(exchange)
    assert host.holds_all
    shard = shard_of(exchange, meta, replicated=False)
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    learned = {ITEM: with_room(torch.full((shard.owned(ITEM), 2), float(rank)), 120)}
    given: dict[str, Any] = {"dtype": torch.float32, "degree_etypes": shard.etypes}
    plain = build_store(shard, exchange, inputs, **given)
    store = build_store(shard, exchange, inputs, **given, learned=learned, host=host)
    ids = {t: np.arange(shard.num_nodes(t)) for t in shard.ntypes}
    owner = torch.from_numpy(np.repeat([0.0, 1.0], np.diff(shard.bounds[ITEM]))).float()
    for step in (0, 10):  # the stored rows change in between
        learned[ITEM][: shard.owned(ITEM)] = rank + step
        rows, stored = store.gather(ids), plain.gather(ids)
        assert torch.equal(rows[ITEM].pop("learned"), (owner + step).unsqueeze(1).expand(-1, 2))
        for ntype, columns in stored.items():
            assert list(columns) == list(rows[ntype])
            assert all(torch.equal(rows[ntype][name], values) for name, values in columns.items())
    return True


def test_learned_rows_are_asked_of_their_owner(tmp_path: Path) -> None:
    meta = partitioned(typed_graph(), tmp_path, 2)
    assert run_ranks(2, _learned, meta, fresh=True) == [True, True]


def test_the_cache_keeps_what_it_was_given_across_fills(tmp_path: Path) -> None:
    """The cache has more rows than one fetch, and none on one of the ranks."""
    meta = partitioned(typed_graph(items=300), tmp_path, 2)
    assert run_ranks(2, _uneven_fill, meta, fresh=True) == [True, True]


def _uneven_fill(exchange: Exchange, meta: PartitionMeta) -> bool:
    from raygnn.sampling import features

    features._FILL_AT_ONCE = 16
    shard = shard_of(exchange, meta, replicated=False)
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    low, high = shard.bounds[ITEM][exchange.world.rank : exchange.world.rank + 2]
    remote = np.array([i for i in range(300) if not low <= i < high])
    first = exchange.world.rank == 0
    cached = {ITEM: remote} if first else {}
    store = build_store(shard, exchange, inputs, dtype=torch.float32, cached=cached)
    plain = build_store(shard, exchange, inputs, dtype=torch.float32)
    ids = {t: np.arange(n) for t, n in ((ITEM, 300), (USER, 0), (TAG, 0))}
    rows = store.gather(ids)[ITEM][FEATURES]
    same = torch.equal(rows, plain.gather(ids)[ITEM][FEATURES])
    return same and store.hits == (len(remote) if first else 0)


def test_buffers_are_reused() -> None:
    bounds = {"_N": np.array([0, 3])}
    store = FeatureStore(bounds, _alone(), {"_N": {FEATURES: with_room(torch.eye(3), 3)}}, ring=2)
    first = store.gather({"_N": np.array([2, 0])})["_N"][FEATURES]
    assert first.tolist() == [[0, 0, 1], [1, 0, 0]]
    second = store.gather({"_N": np.array([1])})["_N"][FEATURES]
    assert second.data_ptr() != first.data_ptr()
    third = store.gather({"_N": np.array([1])})["_N"][FEATURES]
    assert third.data_ptr() == first.data_ptr()


def _alone() -> Exchange:
    from raygnn.sampling.exchange import World

    return Exchange(World(0, 1))


def test_buffers_come_round() -> None:
    ring, table, some = BufferRing(2), torch.eye(9), torch.arange(5)
    first, second = (ring.gather("a", table, some) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert ring.gather("a", table, some[:2]).data_ptr() == first.data_ptr()
    assert ring.gather("a", table, torch.zeros(100, dtype=torch.long)).shape == (100, 9)
    fresh = BufferRing(0)
    assert fresh.gather("a", table, some).data_ptr() != fresh.gather("a", table, some).data_ptr()


def test_buffers_may_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gather has its own memory, since a GPU may still be copying from the last one's."""
    asked, empty = [], torch.empty

    def locked(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", locked)
    ring, some = BufferRing(0, pinned=True), torch.tensor([4, 0])
    first, second = (ring.gather("a", torch.eye(9), some) for _ in range(2))
    assert asked == [True, True]
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, torch.eye(9)[some])


def _one_column(exchange: Exchange) -> tuple[list[float], int, int]:
    """Return rows of the second type, which alone has a column, the number of remote rows and the
    bytes sent."""
    rank = exchange.world.rank
    bounds = {"bare": np.array([0, 2, 3]), "full": np.array([0, 1, 5])}
    low, high = bounds["full"][rank : rank + 2]
    own = torch.arange(low, high, dtype=torch.float32)
    store = FeatureStore(bounds, exchange, {"bare": {}, "full": {FEATURES: with_room(own, 5)}})
    rows = store.gather({"bare": np.array([0, 2]), "full": np.array([4, 0, 2, 0])})
    assert rows["bare"] == {}
    return rows["full"][FEATURES].tolist(), store.remote, exchange.sent_bytes


def test_of_a_type_without_columns_no_row_is_asked_for() -> None:
    """A type with embedding tables only is such a type."""
    rows = [4.0, 0.0, 2.0, 0.0]
    # counts of one type, ids of 8 bytes each and rows of 4 each; the first rank has node 0
    assert run_ranks(2, _one_column) == [(rows, 2, 8 + 2 * 8 + 4), (rows, 1, 8 + 8 + 2 * 4)]


def test_int8_rows_are_multiplied_by_their_scale() -> None:
    inputs = {
        "_N": choose_inputs(
            {"emb": torch.zeros(2, 3, dtype=torch.int8), "emb_scale": torch.zeros(2)}, ["emb"], []
        )
    }
    rows = {
        "_N": {
            "int8:emb": torch.tensor([[1, -2, 127], [4, 0, -128]], dtype=torch.int8),
            "scale:emb": torch.tensor([0.5, 2.0]),
        }
    }
    x, _ = assemble(rows, inputs, {})
    assert x["_N"].tolist() == [[0.5, -1.0, 63.5], [8.0, 0.0, -256.0]]
