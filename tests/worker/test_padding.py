"""Added nodes and edges, ``sampling.pad``: few shapes, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raygnn.config.load import load_config
from raygnn.config.model import read_model
from raygnn.errors import ConfigError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.models.network import Network, Schema
from raygnn.models.registry import build_model
from raygnn.sampling.batch import Adjacency, Batch, Block
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.padding import pad, padded_size
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from tests.graphs import ITEM, partitioned, random_graph, shard_of, typed_graph
from tests.ranks import run_ranks
from tests.small_jobs import job, losses, selected, train_on_ranks
from tests.worker.test_edge_tasks import LINKS, config_of
from tests.worker.test_gradients import job_of, reduced

PRICES = {"kind": "node_regression", "ntype": "thing", "target": "price"}
KINDS: dict[str, dict[str, Any]] = {
    "sage": {"kind": "sage", "edge_features": "stars"},
    "sage max": {"kind": "sage", "aggregator": "max", "norm": "batch"},
    "gcn": {"kind": "gcn"},
    "gin": {"kind": "gin", "norm": "batch", "residual": True},
    "gat": {"kind": "gat", "heads": 2},
    "gatv2": {"kind": "gatv2", "heads": 2, "edge_features": "stars", "norm": "layer"},
    "rgcn": {"kind": "rgcn", "bases": 2, "relation": "relation"},
    "hgt": {"kind": "hgt", "heads": 2, "norm": "batch"},
    "han": {"kind": "han", "heads": 2},
}


def test_sizes_are_few_and_near() -> None:
    assert [padded_size(n) for n in (0, 1, 3, 4, 7, 8, 9, 11, 33, 40, 41, 64, 65)] == [
        *(0, 1, 3, 4, 7, 8, 10, 12, 40, 40, 48, 64, 80)
    ]
    sizes = {padded_size(n) for n in range(2**10, 2**11)}
    assert len(sizes) == 5
    assert all(n <= padded_size(n) < 1.25 * n for n in range(8, 5000))


def sampled(tmp_path: Path, kind: str = "typed") -> tuple[Any, list[Block], dict[str, Any]]:
    exchange = Exchange(World(0, 1))
    make, ntype = {"typed": (typed_graph, ITEM), "plain": (random_graph, DEFAULT_NTYPE)}[kind]
    shard = shard_of(exchange, partitioned(make(), tmp_path, 1), replicated=True)
    fanouts = resolve_fanouts([4, 3], shard.etypes)
    sampler = NeighborSampler(shard, exchange)
    blocks, frontier = sampler.sample({ntype: np.arange(10, 21)}, fanouts, epoch=0, step=0)
    return shard, blocks, frontier


@pytest.mark.parametrize("kind", ["typed", "plain"])
def test_edges_are_those_that_were_drawn_and_lead_nowhere_else(kind: str, tmp_path: Path) -> None:
    _, blocks, frontier = sampled(tmp_path, kind)
    padded, ids = pad(blocks, frontier)
    seeds = blocks[-1].num_dst
    for ntype, nodes in frontier.items():
        assert ids[ntype][: len(nodes)].tolist() == list(nodes)
        assert set(ids[ntype].tolist()) == set(nodes.tolist())
        assert len(ids[ntype]) == padded[0].num_src[ntype]
    for number, (block, before) in enumerate(zip(padded, blocks)):
        assert number == 0 or block.num_src == padded[number - 1].num_dst
        for etype, adj in block.adj.items():
            assert len(adj.src) == padded_size(len(adj.src)) == int(adj.indptr[-1])
            assert len(adj.indptr) == block.num_dst[etype[2]] + 1
            old, count = before.adj[etype], len(before.adj[etype].src)
            named = [ids[etype[0]][adj.src], ids[etype[2]][adj.dst]]
            drawn = [
                torch.as_tensor(frontier[t])[e] for t, e in zip(etype[::2], (old.src, old.dst))
            ]
            assert [one[:count].tolist() for one in named] == [one.tolist() for one in drawn]
            if (more := len(adj.src) - count) == 0:
                continue
            # the others: from added nodes alone, to none that anything reads, as many to each
            last = adj.dst[count:]
            assert int(last.min()) >= before.num_dst[etype[2]] >= seeds[etype[2]]
            assert int(adj.src[count:].min()) >= before.num_src[etype[0]]
            assert int(last.bincount().max()) <= -(-more // (len(adj.indptr) - len(old.indptr)))


def test_what_edges_carry_is_kept() -> None:
    src = torch.tensor([1, 2, 0, 2, 1, 2, 1, 2, 2])
    adj = Adjacency(
        torch.tensor([0, 4, 9]),
        src,
        relation=torch.arange(9),
        rows=torch.arange(18.0).view(9, 2),
        categories={"kind": torch.arange(9)},
        elapsed=torch.arange(9),
    )
    nums = {DEFAULT_NTYPE: 3}, {DEFAULT_NTYPE: 2}
    counted = {DEFAULT_NTYPE: torch.tensor([True, False])}
    (block,), ids = pad(
        [Block({DEFAULT_ETYPE: adj}, *nums, counted)], {DEFAULT_NTYPE: np.array([5, 6, 7])}
    )
    (longer,) = block.adj.values()
    assert ids[DEFAULT_NTYPE].tolist() == [5, 6, 7, 5]
    assert longer.indptr.tolist() == [0, 4, 9, 10]
    assert longer.src.tolist() == [*src.tolist(), 3]
    assert longer.categories["kind"].tolist() == [*range(9), 0]
    for values, before in ((longer.relation, adj.relation), (longer.elapsed, adj.elapsed)):
        assert values is not None
        assert before is not None
        assert values.tolist() == [*before.tolist(), 0]
    assert longer.rows is not None
    assert longer.rows.tolist() == [[2.0 * i, 2.0 * i + 1] for i in range(9)] + [[0.0, 0.0]]
    assert block.counted[DEFAULT_NTYPE].tolist() == [True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_added_rows_have_no_influence(kind: str, tmp_path: Path) -> None:
    """To the bit, whatever they are; on running statistics neither."""
    keys = {k: v for k, v in KINDS[kind].items() if k not in ("edge_features", "relation")}
    shard, blocks, frontier = sampled(tmp_path)
    counted = [
        Block(b.adj, b.num_src, b.num_dst, {t: torch.ones(n) > 0 for t, n in b.num_dst.items()})
        for b in blocks
    ]
    padded, ids = pad(counted, frontier)
    widths = {t: a["feat"].shape[1] for t, a in shard.node_data.items()}
    found = []
    for scale in (1.0, -1000.0):
        torch.manual_seed(0)
        schema = Schema(widths, shard.etypes, 3, target=ITEM)
        model = build_model(read_model(hidden=8, dropout=0.0, **keys), schema).double().train()
        assert isinstance(model, Network)
        x, degree = {}, {}
        for ntype, nodes in ids.items():
            x[ntype] = scale * torch.rand(len(nodes), widths[ntype], dtype=torch.float64)
            given = shard.node_data[ntype]["feat"][frontier[ntype]].double()
            x[ntype][: len(given)] = given
        for etype in shard.etypes:
            degree[etype] = torch.full((len(ids[etype[2]]),), 7, dtype=torch.int32)
        out = model(padded, x, degree)[:11]
        out.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        found.append({"out": out.detach(), **gradients, **dict(model.named_buffers())})
    for name, values in found[0].items():
        assert values is not None
        assert values.isfinite().all()
        assert torch.equal(values, found[1][name]), name


@pytest.mark.parametrize(
    ("task", "model"),
    [
        *((PRICES, model) for model in KINDS.values()),
        ({**LINKS, "negatives": {"number": 20}}, {"kind": "sage", "norm": "batch"}),
        (
            {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"},
            {"kind": "gat"},
        ),
    ],
    ids=lambda value: value["kind"],
)
def test_gradients_are_the_same(
    task: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    """Of one rank and of two, with batch normalisation over both."""
    found: list[Any] = []
    for number, padded in enumerate((False, True)):
        config = config_of(
            tmp_path / str(number),
            "test",
            parts=3,
            task=task,
            model={"hidden": 8, "layers": 2, "dropout": 0.0, **model},
            sampling={"fanout": [4, 3], "pad": padded},
        )
        found.append(
            [run_ranks(workers, reduced, job_of(config), fresh=True) for workers in (1, 2)]
        )
    for before, after in zip(*found):
        for gradients, others in zip(before, after, strict=True):
            assert len(gradients) == len(others) > 5
            for own, right in zip(others, gradients):
                assert own.keys() == right.keys()
                for name, values in right.items():
                    assert torch.allclose(own[name], values, rtol=1e-9, atol=1e-10), name


@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_has_few_shapes_and_the_same_losses(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And running statistics; metrics are of nodes that nothing is added to."""
    make, shapes = BatchMaker.__call__, tmp_path / "shapes"
    runs = []

    def noted(self: BatchMaker, epoch: int, step: int) -> Batch:
        batch = make(self, epoch, step)
        tensors: list[Tensor] = [batch.y, *batch.x.values()]
        for block in batch.blocks:
            tensors += [t for adj in block.adj.values() for t in (adj.indptr, adj.src)]
        with shapes.open("a") as file:
            file.write(f"{[tuple(tensor.shape) for tensor in tensors]}\n")
        return batch

    for padded in (False, True):
        model = {
            "kind": "gat",
            "hidden": 8,
            "norm": "batch",
            "embedding": {"dim": 4, "ntypes": ["_N"]},
        }
        # Adam would make steps of the rounding of gradients that are zero
        train = {"optimizer": "sgd", "lr": 0.05}
        config = job(
            tmp_path, name=f"{padded}", model=model, cluster={"workers": workers}, train=train
        )
        config["sampling"] |= {"pad": padded}
        with monkeypatch.context() as patch:
            if padded:
                patch.setattr(BatchMaker, "__call__", noted)
            runs.append(train_on_ranks(load_config(config)))
    plain, padded_run = runs
    assert len(losses(plain)) >= 6
    assert np.allclose(losses(plain), losses(padded_run), rtol=1e-4)
    weights, others = selected(plain), selected(padded_run)
    assert any("running_var" in name for name in weights)
    for name, values in weights.items():
        assert torch.allclose(values, others[name], rtol=1e-3, atol=1e-4), name
    expected = plain.summary["metrics"]
    assert padded_run.summary["metrics"] == pytest.approx(expected, abs=0.02)
    lines = shapes.read_text().splitlines()
    assert len(set(lines)) <= 6 < len(lines) / 2


@pytest.mark.parametrize("key", ["model", "task"])
def test_classes_of_your_own_are_refused(key: str, tmp_path: Path) -> None:
    section = {"model": {"kind": "a.b:C"}, "task": {"kind": "a.b:C"}}[key]
    config = job(tmp_path, **{key: section})
    config["sampling"] |= {"pad": True}
    with pytest.raises(ConfigError, match=r"sampling\.pad.*a\.b:C would take added nodes for data"):
        load_config(config)
