"""Exact inference equals the model run on the whole graph at once, however it is spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raygnn.config.load import load_config
from raygnn.config.model import ModelConfig, read_model
from raygnn.graph.data import EdgeFrame, GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.shard import EdgeReads
from raygnn.models.network import Schema
from raygnn.models.registry import build_model, needs_degree
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import Inputs, Learned, build_store
from raygnn.tasks import inference
from raygnn.tasks.inference import Inference
from raygnn.worker.planes.model_inputs import make_embeddings
from tests.support.graphs import (
    ITEM,
    TAG,
    on_whole_graph,
    partitioned,
    random_graph,
    shard_of,
    typed_graph,
)
from tests.support.ranks import run_ranks

LAYERS = 3


def model_of(config: ModelConfig, data: GraphData, target: str, *others: str) -> torch.nn.Module:
    torch.manual_seed(3)
    widths = {t: frame.data["feat"].shape[1] for t, frame in data.nodes.items()}
    counts = {
        e: int(frame.data["relation"].max()) + 1
        for e, frame in data.edges.items()
        if "relation" in frame.data
    }
    schema = Schema(widths, list(data.edges), 4, {}, counts, target=target, others=others)
    return build_model(config, schema)


def infer(
    exchange: Exchange,
    meta: PartitionMeta,
    config: ModelConfig,
    data: GraphData,
    target: str,
    by_layer: bool,
    replicated: bool,
    share: float = 1.0,
    spare: float = 0,
    chunk_edges: int = inference.CHUNK_EDGES,
    others: tuple[str, ...] = (),
) -> tuple[np.ndarray, Tensor]:
    """Return original ids of a fraction of the owned nodes, in any order, and their outputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "CHUNK_EDGES", chunk_edges)
        given = exchange, meta, config, data, target, by_layer, replicated, share, spare
        return _infer(*given, others)


def _infer(
    exchange: Exchange,
    meta: PartitionMeta,
    config: ModelConfig,
    data: GraphData,
    target: str,
    by_layer: bool,
    replicated: bool,
    share: float,
    spare: float,
    others: tuple[str, ...],
) -> tuple[np.ndarray, Tensor]:
    shard = shard_of(exchange, meta, replicated=replicated, reads=EdgeReads(relation="relation"))
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    degree_etypes = shard.etypes if needs_degree(config) else []
    run = Inference(
        shard,
        exchange,
        build_store(
            shard,
            exchange,
            inputs,
            dtype=torch.float32,
            degree_etypes=degree_etypes,
            weighted=needs_degree(config),
            beside=True,
        ),
        inputs,
        num_layers=LAYERS,
        batch_size=17,
        device=torch.device("cpu"),
        spare=spare,
    )
    model = model_of(config, data, target, *others)
    if not by_layer:  # a module without visible layers
        inner = model
        model = torch.nn.Module()
        model.forward = inner.eval().forward  # type: ignore[method-assign]
    owned = np.random.default_rng(exchange.world.rank).permutation(shard.owned(target))
    owned = owned[: round(share * len(owned))] if share < 1 else np.sort(owned)
    ids = owned + shard.first(target)
    outputs = run.outputs(model, target, ids, again=True)
    if by_layer:  # which may have been kept
        assert torch.equal(run.outputs(model, target, ids, again=True), outputs)
    return shard.original[target][owned], outputs


def with_relations(data: GraphData) -> GraphData:
    """Add a relation to each edge of all types but the last."""
    rng = np.random.default_rng(1)
    for edges in list(data.edges.values())[:3]:
        edges.data["relation"] = rng.integers(0, 7, edges.num)
    return data


FAMILIES: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn", "residual": True},
    "sage": {"kind": "sage", "norm": "layer"},
    "gat": {"kind": "gat"},
    "gatv2": {"kind": "gatv2"},
    "gin": {"kind": "gin"},
    "rgcn": {"kind": "rgcn", "bases": 3, "residual": True},
    "rgcn-block": {"kind": "rgcn", "regularizer": "block", "bases": 2, "norm": "layer"},
    "hgt": {"kind": "hgt", "heads": 4},
    "han": {"kind": "han", "heads": 4},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "kind"),
    [(False, "sage"), (False, "gatv2"), (False, "gin"), (False, "rgcn-block"),
     *((True, kind) for kind in ("sage", "gcn", "gat", "rgcn", "hgt", "han"))],
)  # fmt: skip
def test_layer_by_layer(typed: bool, kind: str, tmp_path: Path) -> None:
    """Outputs are exact for many chunks, and for ranks with unequal numbers of them."""
    data, target = (typed_graph(), ITEM) if typed else (random_graph(), "_N")
    if kind.startswith("rgcn"):
        data = with_relations(data)
    config = read_model(hidden=16, layers=LAYERS, **FAMILIES[kind])
    exact = on_whole_graph(model_of(config, data, target), LAYERS, data)
    for workers, parts, replicated in ((1, 1, True), (3, 2, typed)):
        meta = partitioned(data, tmp_path, parts)
        given = (meta, config, data, target, True, replicated, 1.0, 0, 200)
        results = run_ranks(workers, infer, *given)
        for original, outputs in results:
            assert torch.allclose(outputs, exact[original], atol=1e-5)
        assert sum(len(original) for original, _ in results) == len(exact)


@pytest.mark.parametrize(("typed", "kind"), [(False, "sage"), (True, "rgcn"), (True, "han")])
def test_some_of_the_nodes(typed: bool, kind: str, tmp_path: Path) -> None:
    """Some nodes are computed in any order, and again from the kept inputs of the first layer."""
    data, target = (typed_graph(), ITEM) if typed else (random_graph(), "_N")
    if kind.startswith("rgcn"):
        data = with_relations(data)
    config = read_model(hidden=16, layers=LAYERS, **FAMILIES[kind])
    exact = on_whole_graph(model_of(config, data, target), LAYERS, data)
    for workers, replicated, share in ((1, True, 0.3), (2, True, 0.02), (3, False, 0.1)):
        meta = partitioned(data, tmp_path, 2)
        given = (meta, config, data, target, True, replicated, share, 1e9, 60)
        for original, outputs in run_ranks(workers, infer, *given):
            assert len(original) < share * len(exact) + 1
            assert torch.allclose(outputs, exact[original], atol=1e-5)


def test_an_edge_type_that_some_ranks_have_no_edge_of(tmp_path: Path) -> None:
    """Some ranks therefore have no relation of that type either."""
    data = typed_graph()
    rare = EdgeFrame(np.array([3]), np.array([5]), {"relation": np.array([2])})
    data = with_relations(replace(data, edges={(ITEM, "rare", ITEM): rare, **data.edges}))
    config = read_model(kind="rgcn", hidden=16, layers=LAYERS)
    exact = on_whole_graph(model_of(config, data, ITEM), LAYERS, data)
    given = (partitioned(data, tmp_path, 3), config, data, ITEM)
    for by_layer in (False, True):
        for original, outputs in run_ranks(3, infer, *given, by_layer, False):
            assert torch.allclose(outputs, exact[original], atol=1e-5)


def sent(exchange: Exchange, meta: PartitionMeta, config: ModelConfig, data: GraphData) -> int:
    """Return the bytes that a rank sends for the outputs of all nodes."""
    infer(exchange, meta, config, data, "_N", by_layer=True, replicated=True)
    return exchange.sent_bytes


def test_rows_that_a_layer_makes_narrower_are_sent_as_such(tmp_path: Path) -> None:
    """The mean of transformed rows is the transformed mean; this does not hold for a maximum."""
    data = random_graph(nodes=900, degree=3)
    meta, bytes_of = partitioned(data, tmp_path, 2), {}
    for aggregator in ("mean", "max"):
        config = read_model(kind="sage", hidden=128, layers=LAYERS, aggregator=aggregator)
        bytes_of[aggregator] = sum(run_ranks(2, sent, meta, config, data))
    assert bytes_of["mean"] < 0.7 * bytes_of["max"]


def test_a_target_without_edges(tmp_path: Path) -> None:
    """Outputs are exact if the last layer transforms rows before they are read, and reads none of
    the target's."""
    data = typed_graph()
    data = replace(data, edges={e: edges for e, edges in data.edges.items() if TAG not in e})
    config = read_model(kind="sage", hidden=16, layers=LAYERS)
    exact = on_whole_graph(model_of(config, data, ITEM, TAG), LAYERS, data)
    given = (partitioned(data, tmp_path, 2), config, data, ITEM, True, True)
    for original, outputs in run_ranks(2, partial(infer, others=(TAG,)), *given):
        assert torch.allclose(outputs, exact[original], atol=1e-5)


def work(
    exchange: Exchange,
    meta: PartitionMeta,
    config: ModelConfig,
    data: GraphData,
    spares: Sequence[float],
    carried: tuple[str, ...] = (),
) -> tuple[list[int], list[int], list[int]]:
    """Compute outputs of two nodes per rank repeatedly. Return these nodes, the rows that each
    layer computes here in a second call, and the chunks combined in a first call, a second one and
    one for other nodes.

    Args:
        spares: bytes that each rank may keep; carried: features of edges.
    """
    shard = shard_of(exchange, meta, replicated=False, reads=EdgeReads(carried))
    inputs = {"_N": Inputs(("feat",), (), ())}
    store = build_store(shard, exchange, inputs, dtype=torch.float32)
    run = Inference(
        shard,
        exchange,
        store,
        inputs,
        num_layers=LAYERS,
        batch_size=None,
        device=torch.device("cpu"),
        spare=spares[exchange.world.rank],
    )
    model: Any = model_of(config, data, "_N")
    layer, combine = model.layer, store.combine
    rows, combined = [0] * LAYERS, [0, 0, 0]
    asked = np.arange(2)
    for call in range(3):

        def noted(number: int, block: Any, *given: Any, call: int = call) -> Any:
            rows[number] += block.num_dst["_N"] if call == 1 else 0
            return layer(number, block, *given)

        def counted(*given: Any, call: int = call) -> Any:
            combined[call] += 1
            return combine(*given)

        model.layer, store.combine = noted, counted  # type: ignore[method-assign]
        run.outputs(model, "_N", shard.first("_N") + asked + 2 * (call == 2), again=True)
    return shard.original["_N"][asked].tolist(), rows, combined


@pytest.mark.parametrize("spare", [0.0, 1e6])
def test_a_layer_computes_what_the_next_one_reads(spare: float, tmp_path: Path) -> None:
    """Each node is computed once for all readers; its chunks are combined again only if they were
    not kept."""
    data = random_graph(nodes=900, degree=3)
    config = read_model(kind="sage", hidden=16, layers=LAYERS)
    (edges,) = data.edges.values()
    for workers in (1, 2, 3):
        meta = partitioned(data, tmp_path, 2)
        results = run_ranks(workers, work, meta, config, data, [spare] * workers)
        needed = {node for asked, _, _ in results for node in asked}
        for number in reversed(range(LAYERS)):
            assert sum(rows[number] for _, rows, _ in results) == len(needed)
            needed |= set(edges.src[np.isin(edges.dst, list(needed))].tolist())
        for _, _, combined in results:
            assert combined == ([1, 0, 1] if spare else [1, 1, 1])


def test_all_ranks_keep_or_none_does(tmp_path: Path) -> None:
    """If one rank has too little memory, all ranks compute again."""
    data = random_graph(nodes=900, degree=3)
    config = read_model(kind="sage", hidden=16, layers=LAYERS)
    meta = partitioned(data, tmp_path, 2)
    for _, _, combined in run_ranks(2, work, meta, config, data, [1e6, 100.0]):
        assert combined == [1, 1, 1]


def test_edge_features_are_kept_only_if_memory_suffices(tmp_path: Path) -> None:
    data = random_graph(nodes=900, degree=3)
    (edges,) = data.edges.values()
    edges.data["w"] = np.ones((edges.num, 500), np.float32)
    config = read_model(kind="sage", hidden=16, layers=LAYERS)
    meta = partitioned(data, tmp_path, 2)
    for carried, kept in (((), [1, 0, 1]), (("w",), [1, 1, 1])):
        for _, _, combined in run_ranks(2, work, meta, config, data, [5e4, 5e4], carried):
            assert combined == kept


class Others(Exchange):
    """Exchange with another rank, which requests and sends nothing."""

    def counts(self, send: np.ndarray) -> np.ndarray:
        return np.zeros_like(send)

    def columns(self, columns: Any, send: Any, receive: Any, out: Any = None) -> list[Tensor]:
        assert not send.any()
        return [column[:0] for column in columns]

    def max(self, value: int) -> int:
        return value


def committed() -> int:
    """Bytes that the system has promised this process: of private memory that can be written to,
    and was not mapped without a promise."""
    total, size, private = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            private = values[0][1] == "w" and values[0][3] == "p"
        elif name == "Size:":
            size = int(values[0]) << 10
        elif name == "VmFlags:":
            total += size * (private and "nr" not in values)
    return total


def promised(_: Exchange, meta: PartitionMeta, config: ModelConfig, num: int) -> int:
    """Bytes, at most, while this rank evaluates its nodes, all of whose neighbours it owns, and
    learns rows of them, in a graph of so many."""
    exchange = Others(World(0, 1))
    shard = shard_of(exchange, meta, replicated=False)
    exchange.world = World(0, 2)
    bounds = {"_N": np.array([0, shard.owned("_N"), num])}
    shard = replace(shard, bounds=bounds)
    learned = {"_N": Learned(8, torch.float32)}
    inputs = {"_N": Inputs(("feat",), (), (), learned["_N"])}
    before, most = committed(), 0
    settings = load_config(
        {
            "name": "share",
            "graph": {"format": "planted", "nodes": 100},
            "task": {"kind": "node_classification"},
            "model": {"kind": "gcn", "embedding": {"dim": 8}},
        }
    )
    ranks: Any = SimpleNamespace(step=exchange)
    embeddings = make_embeddings(settings, shard, inputs, ranks)
    assert embeddings is not None
    store = build_store(
        shard,
        exchange,
        inputs,
        dtype=torch.float32,
        degree_etypes=shard.etypes,
        weighted=True,
        learned=embeddings.tables,
    )
    run = Inference(
        shard,
        exchange,
        store,
        inputs,
        num_layers=LAYERS,
        batch_size=None,
        device=torch.device("cpu"),
    )
    model: Any = build_model(config, Schema({"_N": 13}, shard.etypes, 4, target="_N"))
    layer = model.layer

    def noted(*given: Any) -> Any:
        nonlocal most
        most = max(most, committed())
        return layer(*given)

    model.layer = noted
    run.outputs(model, "_N", np.arange(shard.owned("_N")))
    return most - before


def test_memory_is_that_of_a_ranks_share(tmp_path: Path) -> None:
    """The size of the graph does not matter: rows of a billion nodes would be 64 GB for each
    layer."""
    meta = partitioned(random_graph(), tmp_path, 1)
    config = read_model(kind="gcn", hidden=16, layers=LAYERS)
    small, large = (run_ranks(1, promised, meta, config, n, fresh=True)[0] for n in (1000, 10**9))
    assert large < small + (8 << 20)


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_by_batches(kind: str, tmp_path: Path) -> None:
    """Modules without visible layers use full neighbourhoods, batch by batch."""
    data = random_graph(nodes=90)
    config = read_model(kind=kind, hidden=16, layers=LAYERS)
    exact = on_whole_graph(model_of(config, data, "_N"), LAYERS, data)
    meta = partitioned(data, tmp_path, 2)
    for original, outputs in run_ranks(2, infer, meta, config, data, "_N", False, False):
        assert torch.allclose(outputs, exact[original], atol=1e-5)
