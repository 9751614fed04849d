"""Exact inference equals the model run on the whole graph at once, however it is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raygnn.config.graph import GraphConfig, NpzGraph, PlanetoidGraph, PlantedGraph
from raygnn.config.model import ModelConfig, read_model
from raygnn.graph.data import GraphData
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model, needs_degree
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import Inputs, build_store
from raygnn.tasks import inference
from raygnn.tasks.inference import Inference
from tests.graphs import (
    ITEM,
    on_whole_graph,
    partitioned,
    random_graph,
    shard_of,
    typed_graph,
)
from tests.ranks import run_ranks

LAYERS = 3


def model_of(config: ModelConfig, data: GraphData, target: str) -> torch.nn.Module:
    torch.manual_seed(3)
    widths = {t: frame.data["feat"].shape[1] for t, frame in data.nodes.items()}
    counts = {
        e: int(frame.data["relation"].max()) + 1
        for e, frame in data.edges.items()
        if "relation" in frame.data
    }
    return build_model(config, Schema(widths, list(data.edges), target, 4, {}, counts))


def infer(
    exchange: Exchange,
    meta: PartitionMeta,
    config: ModelConfig,
    data: GraphData,
    target: str,
    by_layer: bool,
    replicated: bool,
) -> tuple[np.ndarray, Tensor]:
    shard = shard_of(exchange, meta, replicated=replicated, edge_arrays=["relation"])
    inputs = {t: Inputs(("feat",), (), ()) for t in shard.ntypes}
    degree_etypes = shard.etypes if needs_degree(config) else []
    run = Inference(
        shard,
        exchange,
        build_store(shard, exchange, inputs, dtype=torch.float32, degree_etypes=degree_etypes),
        inputs,
        num_layers=LAYERS,
        batch_size=17,
        device=torch.device("cpu"),
        relation="relation",
    )
    model = model_of(config, data, target)
    if not by_layer:  # a module whose layers are not known
        inner = model
        model = torch.nn.Module()
        model.forward = inner.eval().forward  # type: ignore[method-assign]
    owned = np.arange(shard.owned(target))
    return shard.original[target], run.outputs(model, target, owned + shard.first(target))


def with_relations(data: GraphData) -> GraphData:
    """A relation for each edge of all types but the last."""
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


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("replicated", [True, False])
def test_layer_by_layer(
    kind: str, typed: bool, replicated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "CHUNK_EDGES", 100)  # many chunks, not equally many per rank
    data, target = (typed_graph(), ITEM) if typed else (random_graph(), "_N")
    if kind.startswith("rgcn"):
        data = with_relations(data)
    config = read_model(hidden=16, layers=LAYERS, **FAMILIES[kind])
    exact = on_whole_graph(model_of(config, data, target), LAYERS, data)
    for workers, parts in ((1, 1), (2, 2), (3, 2)):
        meta = partitioned(data, tmp_path, parts)
        results = run_ranks(workers, infer, meta, config, data, target, True, replicated)
        for original, outputs in results:
            assert torch.allclose(outputs, exact[original], atol=1e-5)
        assert sum(len(original) for original, _ in results) == len(exact)


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_by_batches(kind: str, tmp_path: Path) -> None:
    """For modules that do not show their layers: full neighbourhoods, batch by batch."""
    data = random_graph(nodes=90)
    config = read_model(kind=kind, hidden=16, layers=LAYERS)
    exact = on_whole_graph(model_of(config, data, "_N"), LAYERS, data)
    meta = partitioned(data, tmp_path, 2)
    for original, outputs in run_ranks(2, infer, meta, config, data, "_N", False, False):
        assert torch.allclose(outputs, exact[original], atol=1e-5)


def real_graph(name: str, directory: Path) -> tuple[GraphData, str]:
    graphs: dict[str, GraphConfig] = {
        "cora": PlanetoidGraph(format="planetoid", path=directory / "planetoid", name="cora"),
        "tolokers": NpzGraph(format="npz", path=directory / "npz" / "tolokers.npz"),
        "planted": PlantedGraph(format="planted", nodes=1500, degree=12, classes=5, typed=True),
    }
    data = load_graph(graphs[name])
    return data, next(t for t, frame in data.nodes.items() if "label" in frame.data)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    "name", ["cora", "planted", pytest.param("tolokers", marks=pytest.mark.slow)]
)
def test_real_graphs(kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """1, 2 and 3 workers, both topologies, against one process with the whole graph."""
    directory = tmp_path if name == "planted" else request.getfixturevalue("data_dir")
    data, target = real_graph(name, directory)
    if kind.startswith("rgcn"):
        data = with_relations(data)
    config = read_model(hidden=16, layers=LAYERS, **FAMILIES[kind])
    exact = on_whole_graph(model_of(config, data, target), LAYERS, data)
    bound = 1e-5 * float(exact.abs().max().clamp(min=1))
    for workers, replicated in ((1, True), (2, True), (2, False), (3, True), (3, False)):
        meta = partitioned(data, tmp_path, workers)
        results = run_ranks(workers, infer, meta, config, data, target, True, replicated)
        for original, outputs in results:
            assert (outputs - exact[original]).abs().max() <= bound, (workers, replicated)
        assert sum(len(original) for original, _ in results) == len(exact)
