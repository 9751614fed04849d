"""Ids on a GPU are taken by every look-up, by one explicit transfer: what DGL's partition book
could not do (dmlc/dgl#7333).

On a machine without a GPU by a stand-in that refuses to be taken for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raygnn.config.model import EmbeddingConfig, read_model
from raygnn.graph.data import EdgeType
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.shard import Shard
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.sampling.cache import inclusion
from raygnn.sampling.exchange import Exchange, as_ids, route_rows
from raygnn.sampling.features import FeatureStore, Inputs, build_store
from raygnn.sampling.host_memory import Host
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import Banned, NeighborSampler
from raygnn.sampling.seeds import EdgeSeeds, NodeSeeds, OwnedEdges
from raygnn.tasks.embeddings import first_rows
from raygnn.tasks.inference import Inference
from tests.support.elsewhere import PLACES, Elsewhere, elsewhere
from tests.support.graphs import ITEM, USER, partitioned, shard_of, typed_graph
from tests.support.ranks import run_ranks

ALSO: EdgeType = (ITEM, "also", ITEM)
NODES = np.array([3, 77, 0, 41, 119, 20])

Put = Callable[[np.ndarray], Any]
LookUp = Callable[[Shard, Exchange, Put], Any]


def store(shard: Shard, exchange: Exchange) -> FeatureStore:
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    return build_store(shard, exchange, inputs, dtype=torch.float32)


def everywhere(shard: Shard, put: Put) -> dict[str, Any]:
    """Return some ids of two types, and none of the other types."""
    few = {ITEM: NODES, USER: NODES[:3] // 2}
    return {t: put(few.get(t, NODES[:0])) for t in shard.ntypes}


def filled(shard: Shard, exchange: Exchange, put: Put) -> Any:
    cached, rank = store(shard, exchange), exchange.world.rank
    first, last = shard.bounds[ITEM][rank : rank + 2]
    remote = NODES[(first > NODES) | (last <= NODES)]
    cached.fill_cache({ITEM: put(remote)}, Host.alone(exchange))
    rows = cached.gather(everywhere(shard, np.asarray))
    return rows, cached.hits


def combined(shard: Shard, exchange: Exchange, put: Put) -> Any:
    sampler = NeighborSampler(shard, exchange, seed=1)
    fanouts = resolve_fanouts([3], shard.etypes)
    _, nodes, draws = sampler.sample_open({ITEM: put(NODES)}, fanouts, epoch=0, step=1)
    draws = {e: d for e, d in draws.items() if e == ALSO}
    return store(shard, exchange).combine({t: put(i) for t, i in nodes.items()}, draws, "mean")


def sampled(shard: Shard, exchange: Exchange, put: Put, banned: bool = False) -> Any:
    sampler = NeighborSampler(shard, exchange, seed=1)
    fanouts = resolve_fanouts([3, 2], shard.etypes)
    ends: Any = (put(NODES), put(NODES[::-1].copy())) if banned else None
    bans = Banned({ALSO: ends}) if banned else None
    return sampler.sample({ITEM: put(NODES)}, fanouts, epoch=0, step=1, banned=bans)


def hop(shard: Shard, exchange: Exchange, put: Put) -> Any:
    (fanout,) = resolve_fanouts([3], shard.etypes)
    return NeighborSampler(shard, exchange).hop(everywhere(shard, put), fanout, 5)


def outputs(shard: Shard, exchange: Exchange, put: Put) -> Any:
    torch.manual_seed(0)
    widths = {t: a["feat"].shape[1] for t, a in shard.node_data.items()}
    model = build_model(
        read_model(kind="sage", hidden=4), Schema(widths, shard.etypes, 3, target=ITEM)
    )
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    run = Inference(
        shard,
        exchange,
        store(shard, exchange),
        inputs,
        num_layers=2,
        batch_size=None,
        device=torch.device("cpu"),
    )
    owned = np.arange(shard.owned(ITEM))[::3] + shard.first(ITEM)
    return run.outputs(model, ITEM, put(owned))


def edge_seeds(shard: Shard, exchange: Exchange, put: Put) -> EdgeSeeds:
    return EdgeSeeds(OwnedEdges(shard, exchange, ALSO), put(np.arange(0, 99, 3)))


def rows(ids: Any) -> Tensor:
    out = torch.empty(len(NODES), 4)
    first_rows(EmbeddingConfig(dim=4), 1, ITEM, ids, out)
    return out


def routes(shard: Shard, exchange: Exchange, put: Put) -> Any:
    found = route_rows(everywhere(shard, put), shard.bounds, exchange)
    return vars(found)


# each look-up by ids that there is
LOOK_UPS: dict[str, LookUp] = {
    "rows of a store": lambda s, e, put: store(s, e).gather(everywhere(s, put)),
    "rows to keep": filled,
    "rows added up": combined,
    "blocks": sampled,
    "blocks without some edges": lambda s, e, put: sampled(s, e, put, banned=True),
    "a block": hop,
    "owners of learned rows": routes,
    "first rows": lambda s, e, put: rows(put(NODES)),
    "outputs": outputs,
    "ends of edges": lambda s, e, put: OwnedEdges(s, e, ALSO).rows(put(NODES), []),
    "numbered edges": lambda s, e, put: edge_seeds(s, e, put).ids(put(NODES[:2] % 9)),
    "numbered nodes": lambda s, e, put: NodeSeeds(ITEM, put(NODES), torch.ones(6)).ids(
        put(np.array([5, 1]))
    ),
    "chances to be read": lambda s, e, put: inclusion(
        s, {ITEM: put(NODES)}, 3, resolve_fanouts([2], s.etypes), replace=False
    ),
}


def plain(value: Any) -> Any:
    """Return numbers without their containers for a comparison."""
    if isinstance(value, Tensor):
        assert type(value) is Tensor
        assert value.device.type == "cpu"
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else value


def _all(exchange: Exchange, meta: PartitionMeta, replicated: bool, place: str) -> None:
    shard = shard_of(exchange, meta, replicated=replicated)
    given: list[Tensor] = []

    def put(ids: np.ndarray) -> Tensor:
        given.append(PLACES[place](torch.from_numpy(ids)))
        return given[-1]

    for name, look_up in LOOK_UPS.items():
        expected = plain(look_up(shard, exchange, np.asarray))
        given.clear()
        before = Elsewhere.transfers
        assert plain(look_up(shard, exchange, put)) == expected, name
        assert given, name
        if place == "stand-in":
            assert Elsewhere.transfers - before == len(given), name


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("size", "replicated"), [(1, True), (2, False), (3, True)])
def test_every_look_up_takes_ids_of_a_gpu(
    size: int, replicated: bool, place: str, tmp_path: Path
) -> None:
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    meta = partitioned(typed_graph(), tmp_path, 2)
    run_ranks(size, _all, meta, replicated, place)


def _moved(exchange: Exchange, place: str) -> list[Any]:
    """Call each collective with tensors on another device; it fills ``out`` and sums there."""
    put, rank, size = PLACES[place], exchange.world.rank, exchange.world.size
    own = torch.arange(2 * size).reshape(size, 2) + 10 * rank
    before = Elsewhere.transfers
    columns = [put(own.flatten()), put(own.flatten().float())]
    counts = np.full((size, 2), 2)
    found: list[Any] = [plain(column) for column in exchange.columns(columns, counts, counts)]
    outs = [put(torch.empty(2 * size, dtype=column.dtype)) for column in columns]
    exchange.columns(columns, counts, counts, outs)
    assert [plain(out.cpu()) for out in outs] == found
    out = put(torch.empty(2 * size, dtype=torch.int64))
    exchange.columns([put(own.flatten())], counts[:, :1], counts[:, :1], [out])
    found.append(out.cpu().tolist())
    total = put(torch.tensor([1.5 + rank]))
    assert exchange.sum(total) is total
    found.append(total.cpu().tolist())
    found.append(plain(exchange.gather_rows(put(torch.arange(rank)))))
    assert place != "stand-in" or Elsewhere.transfers > before
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_gets_tensors_in_the_memory_of_the_cpu(size: int, place: str) -> None:
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    for rank, found in enumerate(run_ranks(size, _moved, place)):
        sources = [[2 * rank + 10 * r, 2 * rank + 1 + 10 * r] for r in range(size)]
        ids, numbers, out, total, everyone = found
        assert ids == out == [i for ids in sources for i in ids]
        assert numbers == [float(i) for i in ids]
        assert total == [sum(1.5 + r for r in range(size))]
        assert everyone == [i for r in range(size) for i in range(r)]


def test_the_stand_in_refuses_what_cuda_refuses() -> None:
    ids = elsewhere(torch.arange(5))
    assert ids.is_cuda
    assert ids.device.type == "cuda"
    for wrong in (ids.numpy, lambda: np.asarray(ids), lambda: np.searchsorted(NODES, ids)):
        with pytest.raises(TypeError, match="cuda:0"):
            wrong()
    for mixed in (lambda: ids + torch.arange(5), lambda: torch.arange(9).index_select(0, ids)):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert type(ids + ids) is Elsewhere
    assert type(ids.cpu()) is type(ids.to("cpu")) is Tensor
    assert as_ids(ids).tolist() == [0, 1, 2, 3, 4]
