"""Modules of PyG's, and built of them, train unchanged, and the same on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.load import load_config
from raygnn.config.model import read_model
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, InputError
from raygnn.graph.sources import load_graph
from raygnn.models.network import Encoder, Schema
from raygnn.models.registry import build_model
from raygnn.prediction.driver_side import _few
from raygnn.sampling.batch import Adjacency, Block, EdgeType
from tests.conftest import CHECKOUT
from tests.models.test_networks import outcome
from tests.prediction.test_predict import ask
from tests.prediction.test_table_jobs import shop
from tests.support.small_jobs import JobFactory, losses, selected, train_on_ranks
from tests.worker.test_edge_inputs import TRAIN, payments
from tests.worker.test_edge_tasks import config_of
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import losses as graph_losses
from tests.worker.test_graph_tasks import make as graph_job

pytestmark = pytest.mark.long

OWN = "tests.support.pyg_models"
SAGE = {"kind": f"{OWN}:Sage", "interface": "pyg"}
TYPED = {
    "graph": {"typed": True, "nodes": 900, "degree": 6},
    "comm": {"find_unused_parameters": True},  # those of node types without a task
}


# ── the same as the built-in families ────────────────────────────────────────────────────────

PLAIN = Schema({"_N": 6}, [("_N", "_E", "_N")], 4, target="_N")
SHOP: list[EdgeType] = [("item", "also", "item"), ("user", "buys", "item"), ("item", "of", "user")]
MIXED = Schema({"item": 6, "user": 3}, SHOP, 4, target="item")
EVEN = Schema({"item": 8, "user": 8}, SHOP, 8, target="item")


def complete(schema: Schema, seeds: int = 5, inner: int = 14, nodes: int = 24) -> list[Block]:
    """Two layers with all neighbours: the second one is a part of the first. Without loops, which
    PyG would take out."""
    torch.manual_seed(5)
    first, last = {}, {}
    for etype in schema.etypes:
        own = seeds if etype[2] == schema.target else 0  # that the second layer computes
        degree = torch.randint(1, 4, (inner,))
        dst = torch.repeat_interleave(degree)
        below = torch.where(dst < own, inner, nodes) - 1
        src = (torch.rand(len(dst)) * below).long()
        src += src >= dst
        indptr = F.pad(degree.cumsum(0), (1, 0))
        first[etype] = Adjacency(indptr, src)
        last[etype] = Adjacency(indptr[: own + 1], src[: int(indptr[own])])
    all_, some = dict.fromkeys(schema.in_features, nodes), dict.fromkeys(schema.in_features, inner)
    ends = {t: seeds if t == schema.target else 0 for t in schema.in_features}
    return [Block(first, all_, some), Block(last, some, ends)]


def copied(theirs: nn.Module, pairs: dict[str, Tensor]) -> None:
    """Copy another module's parameters to a module."""
    own = dict(theirs.named_parameters())
    assert own.keys() == pairs.keys(), own.keys() ^ pairs.keys()
    with torch.no_grad():
        for name, value in pairs.items():
            own[name].copy_(value.reshape(own[name].shape))


def sage_weights(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"module.convs.{n}.{name}": ours[f"layers.{n}.{key}"]
        for n in (0, 1)
        for name, key in (
            ("lin_l.weight", "convs.:_N:_E:_N.weight"),
            ("lin_l.bias", "bias.:_N"),
            ("lin_r.weight", "own.:_N.weight"),
        )
    }


def attention_weights(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"att": "attn_src", "bias": "bias", "lin_l.weight": "src.weight"}
    names |= {"lin_l.bias": "src.bias", "lin_r.weight": "dst.weight", "lin_r.bias": "dst.bias"}
    return {
        f"module.{layer}.{name}": ours[f"layers.{n}.convs.:_N:_E:_N.{key}"]
        for n, layer in enumerate(("first", "second"))
        for name, key in names.items()
    }


PAIRS: dict[str, Any] = {
    "Sage": ({"kind": "sage"}, "pyg", sage_weights),
    "LayeredSage": ({"kind": "sage"}, "pyg_layers", sage_weights),
    "Attention": ({"kind": "gatv2", "heads": 2, "activation": "relu"}, "pyg", attention_weights),
}


def built(schema: Schema, **model: Any) -> Encoder:
    torch.manual_seed(1)
    return build_model(read_model(layers=2, **model), schema)


@pytest.mark.parametrize("name", PAIRS)
def test_as_the_built_in_family(name: str) -> None:
    family, interface, weights_of = PAIRS[name]
    ours = built(PLAIN, hidden=16, dropout=0.0, **family)
    theirs = built(PLAIN, kind=f"{OWN}:{name}", interface=interface)
    copied(theirs, weights_of(dict(ours.named_parameters())))
    blocks, x = complete(PLAIN), {"_N": torch.randn(24, 6)}
    one, other = (outcome(model, blocks, x, {}) for model in (ours, theirs))
    torch.testing.assert_close(one["outputs"], other["outputs"], rtol=1e-5, atol=1e-5)
    gradients = weights_of({key: value for key, value in one.items() if key != "outputs"})
    for key, value in gradients.items():
        theirs_ = other[key].reshape(value.shape)
        torch.testing.assert_close(theirs_, value, rtol=1e-5, atol=1e-5)


def test_hgt_but_for_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG applies GELU before the transform of the outputs; DGL and raygnn do not."""
    ours = build_model(read_model(kind="hgt", heads=2, hidden=8, layers=1, dropout=0.0), EVEN)
    one = {"kind": f"{OWN}:OneHgt", "interface": "pyg", "layers": 1}
    theirs = build_model(read_model(**one, args={"heads": 2}), EVEN)
    from_ours = dict(ours.named_parameters())
    pairs: dict[str, Tensor] = {}
    for t in ("item", "user"):
        for name, shape in (("weight", (8, 8)), ("bias", (8,))):
            nothing = torch.zeros(shape)  # of users there is no last output, and so no query

            def of(kind: str, t: str = t, name: str = name, nothing: Tensor = nothing) -> Tensor:
                return from_ours.get(f"layers.0.{kind}.:{t}.{name}", nothing)

            parts = [of("keys"), of("queries"), of("values")]
            pairs[f"module.conv.kqv_lin.lins.{t}.{name}"] = torch.cat(parts)
            pairs[f"module.conv.out_lin.lins.{t}.{name}"] = of("out")
        pairs[f"module.conv.skip.{t}"] = torch.ones(1)
    into = [etype for etype in SHOP if etype[2] == "item"]
    for kind, name in (("attention", "k_rel"), ("message", "v_rel")):
        squares = torch.zeros(2, 3, 4, 4)
        for number, etype in enumerate(SHOP):
            if etype in into:
                squares[:, number] = from_ours[f"layers.0.{kind}.:{':'.join(etype)}"]
        pairs[f"module.conv.{name}.weight"] = squares.flatten(0, 1)
    for etype in SHOP:
        pairs[f"module.conv.p_rel.{'__'.join(etype)}"] = torch.ones(1, 2)
    copied(theirs, pairs)
    blocks = complete(EVEN)[1:]
    x = {t: torch.randn(count, 8) for t, count in blocks[0].num_src.items()}
    monkeypatch.setattr(F, "gelu", lambda rows: rows)
    torch.testing.assert_close(theirs(blocks, x, {}), ours(blocks, x, {}), rtol=1e-5, atol=1e-5)


def test_to_hetero_is_typed_sage() -> None:
    """A pass over a tiny graph initialises the lazy model, as in PyG's documentation, alike on all
    ranks."""
    ours = built(MIXED, kind="sage", hidden=16, dropout=0.0)
    model = {"kind": f"{OWN}:Hetero", "interface": "pyg"}
    theirs, again = built(MIXED, **model), built(MIXED, **model)
    assert theirs.training
    own, mine = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in again.named_parameters())
    with torch.no_grad():
        for number, layer in enumerate(("first", "second")):
            for etype in SHOP:
                head = f"module.net.{layer}.{'__'.join(etype)}.lin"
                there = [e for e in SHOP if e[2] == etype[2]]
                named = {"_l.weight": f"convs.:{':'.join(etype)}.weight"}
                named |= {"_l.bias": f"bias.:{etype[2]}", "_r.weight": f"own.:{etype[2]}.weight"}
                for end, name in named.items():  # PyG adds the node's own term once for each type
                    value = mine.get(f"layers.{number}.{name}")
                    if value is not None:
                        share = 1.0 if end == "_l.weight" else 1 / len(there)
                        own[head + end].copy_(value * share)
    blocks = complete(MIXED)
    x = {t: torch.randn(24, width) for t, width in MIXED.in_features.items()}
    torch.testing.assert_close(theirs(blocks, x, {}), ours(blocks, x, {}), rtol=1e-5, atol=1e-5)


# ── the same on any ranks ────────────────────────────────────────────────────────────────────

JOBS: dict[str, dict[str, Any]] = {
    "one graph": {"model": SAGE},
    "layers": {
        "model": {"kind": f"{OWN}:LayeredSage", "interface": "pyg_layers"},
        "sampling": {"fanout": [5, 3]},
    },
    "pyg's own": {
        "model": {
            "kind": "torch_geometric.nn:GraphSAGE",
            "interface": "pyg",
            "args": {"hidden_channels": 16, "num_layers": 2},
        }
    },
    "typed": {
        **TYPED,
        "model": {"kind": f"{OWN}:Hgt", "interface": "pyg", "args": {"target": "item"}},
    },
    "typed layers": {
        **TYPED,
        "model": {
            "kind": f"{OWN}:LayeredHetero",
            "interface": "pyg_layers",
            "layers": 1,
            "args": {
                "etypes": [
                    ["item", "also", "item"],
                    ["user", "buys", "item"],
                    ["item", "bought_by", "user"],
                ]
            },
        },
        "sampling": {"fanout": [5]},
    },
    "links": {"model": {**SAGE}, "task": {"kind": "link_prediction", "negatives": {"number": 50}}},
    "bf16": {"model": SAGE, "precision": "bf16"},
}


@pytest.mark.parametrize("case", JOBS)
def test_as_many_ranks_as_you_like(case: str, make_job: JobFactory) -> None:
    """A node's sample does not depend on the seed that it is sampled for, also in one graph."""
    sections = JOBS[case]
    found = []
    for workers, replicated in ((1, True), (2, False)):
        config = make_job(
            name=f"on-{workers}-{replicated}",
            partition={"parts": 2, "method": "random"},
            cluster={"workers": workers},
            train={"epochs": 1, "max_steps": 8, "lr": 0.05, "optimizer": "sgd", "log_every": 1},
            **{
                **sections,
                "graph": {"nodes": 900, "degree": 8, **sections.get("graph", {})},
                "sampling": {"batch_size": 64 // workers, **sections.get("sampling", {})},
            },
        )
        run = train_on_ranks(config, replicated=replicated)
        found.append((losses(run), run.summary["metrics"]))
    assert len(found[0][0]) > 1
    tolerance = 0.03 if case == "bf16" else 1e-4
    for values, metrics in found[1:]:
        assert np.abs(values - found[0][0]).max() < tolerance
        for name, value in metrics.items():
            assert value == pytest.approx(found[0][1][name], abs=max(tolerance, 2e-3)), name


def test_hgt_on_tables(tmp_path: Path) -> None:
    model = {"kind": f"{OWN}:Hgt", "interface": "pyg", "args": {"target": "item"}}
    config = shop(tmp_path, model=model, comm=TYPED["comm"], train={"epochs": 8, "lr": 0.02})
    assert train_on_ranks(config).summary["metrics"]["test/accuracy"] > 0.9


def test_evaluation_is_the_module_on_the_whole_graph(make_job: JobFactory) -> None:
    """Neighbourhoods are complete, for the loss and for every prediction."""
    assert_as_whole_graph(
        make_job(graph={"nodes": 600, "degree": 6}, model=SAGE, train={"epochs": 1})
    )


def assert_as_whole_graph(config: Config) -> None:
    """Check that a run's loss is that of its module on the whole graph."""
    run = train_on_ranks(config)
    assert config.graph is not None
    data = load_graph(config.graph)
    (nodes,), (edges,) = data.nodes.values(), data.edges.values()
    model = build_model(config.model, Schema({"_N": 16}, [("_N", "_E", "_N")], 4, target="_N"))
    model.load_state_dict(selected(run))
    index = torch.from_numpy(np.stack([edges.src, edges.dst]))
    out = model.module(torch.from_numpy(nodes.data["feat"]), index).detach()  # type: ignore[operator]
    test = torch.from_numpy(nodes.data["test_mask"])
    label = torch.from_numpy(nodes.data["label"])
    loss = float(F.cross_entropy(out[test], label[test]))
    assert run.summary["metrics"]["test/loss"] == pytest.approx(loss, abs=1e-5)


def test_a_prediction_from_few_neighbours(make_job: JobFactory) -> None:
    """Neighbours are sampled once for both layers, whatever other nodes are requested."""
    run = train_on_ranks(config := make_job(model=SAGE, train={"epochs": 1}))
    nodes = pa.array(range(0, 1500, 25))
    found = [ask(run, config, workers, wanted=nodes, fanout=(3, 3)) for workers in (1, 2)]
    alone = ask(run, config, 1, wanted=nodes[:7], fanout=(3, 3))
    for other, rows in ((found[1], 60), (alone, 7)):
        one, same = (np.stack(table["scores"].to_numpy()) for table in (found[0], other))
        assert np.abs(one[:rows] - same).max() < 1e-5


def test_a_layer_that_reads_degrees(make_job: JobFactory) -> None:
    """Degrees of a layer's sources come from one more hop than the model has layers."""
    config = make_job(
        graph={"nodes": 600, "degree": 6},
        model={"kind": f"{OWN}:Gcn", "interface": "pyg", "layers": 3},
        sampling={"fanout": [-1, -1, -1], "batch_size": 64},
        train={"epochs": 1},
    )
    assert_as_whole_graph(config)


def test_features_of_edges(tmp_path: Path) -> None:
    """``edge_attr`` has the arrays side by side, with whole numbers as floats."""
    model = {"kind": f"{OWN}:Amounts", "interface": "pyg", "layers": 1}
    model |= {"edge_features": ["amount", "kind"]}
    found = []
    for workers, replicated in ((1, True), (2, False)):
        config = config_of(
            tmp_path,
            f"on-{workers}",
            data=payments(),
            parts=workers,
            model=model,
            sampling={"fanout": [6], "batch_size": 24 // workers},
            cluster={"workers": workers},
            train={**TRAIN, "lr": 0.05, "max_steps": None if workers == 1 else 5},
        )
        run = train_on_ranks(config, replicated=replicated)
        assert workers > 1 or run.summary["metrics"]["test/accuracy"] >= 0.9
        found.append(losses(run))
    assert np.abs(found[0][:5] - found[1][:5]).max() < 1e-4


GRAPHS = {
    "plain": ({"kind": f"{OWN}:Gin"}, dataset(num=31), 0.0),
    "bonds": (
        {"kind": f"{OWN}:Gine", "edge_features": "amount", "args": {"edges": 1}},
        dataset("Bonds", num=60),
        0.9,
    ),
}


@pytest.mark.dgl
@pytest.mark.parametrize("case", GRAPHS)
def test_whole_graphs(case: str, tmp_path: Path) -> None:
    """Graphs without nodes, and padding, have a row, too."""
    model, graph, least = GRAPHS[case]
    curves = []
    for workers in (1, 2):
        config = graph_job(
            tmp_path,
            name=f"on-{workers}",
            model={**model, "interface": "pyg"},
            graph=graph,
            cluster={"workers": workers, "num_cpus": 4},
            sampling={"batch_size": 6 // workers},
            train={"epochs": 12},
        )
        run = train_on_ranks(config)
        assert run.summary["metrics"]["test/accuracy"] >= least
        curves.append(graph_losses(run))
    assert np.allclose(*curves, atol=1e-5)


def test_the_example(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(CHECKOUT / "examples")
    keys = {"storage": str(tmp_path), "train.epochs": 3, "logging.loggers": []}
    run = train_on_ranks(load_config("pyg_model.yaml", keys))
    assert run.summary["metrics"]["test/accuracy"] > 0.5


# ── ranks that differ ────────────────────────────────────────────────────────────────────────

ODD: dict[str, dict[str, Any]] = {
    "dgl": {"model": {"kind": f"{OWN}:OddDgl"}},
    "gatv2": {"model": {"kind": f"{OWN}:OddAttention", "interface": "pyg"}},
    "hgt": {
        **TYPED,
        "model": {"kind": f"{OWN}:OddHgt", "interface": "pyg", "args": {"target": "item"}},
    },
}
SAID = {
    "frozen": "parameter model.module.extra: requires_grad true on rank 0, false on rank 1",
    "noise": "ranks differ: contents of model.module.",
    "branch": "no gradient for model.module.extra",
}


@pytest.mark.parametrize(
    ("sections", "how"),
    [
        ("dgl", "frozen"),
        *(("gatv2", how) for how in SAID),
        *(("hgt", how) for how in ("frozen", "noise")),  # which looks for unused parameters
    ],
)
def test_the_guard_sees_ranks_that_differ(sections: str, how: str, make_job: JobFactory) -> None:
    job = ODD[sections]
    model = {**job["model"], "args": {**job["model"].get("args", {}), "how": how}}
    more = {"guard": {"every": 2}, "train": {"epochs": 3}}
    config = make_job(**{**job, "model": model, **more})
    with pytest.raises(RuntimeError) as caught:
        train_on_ranks(config)
    assert SAID[how] in str(caught.value)


@pytest.mark.parametrize(
    "comm",
    [{"overlap": False}, {"compression": "bf16"}, {"shard": "optimizer"}],
    ids=lambda comm: "-".join(map(str, comm.values())),
)
def test_ranks_that_agree(comm: dict[str, Any], make_job: JobFactory) -> None:
    """Gradients and weights are bitwise identical, however they are exchanged."""
    config = make_job(
        graph={"nodes": 900},
        model={"kind": f"{OWN}:Attention", "interface": "pyg"},
        comm=comm,
        guard={"every": 1},
        train={"accumulate": 2},
    )
    train_on_ranks(config)


# ── what is refused ──────────────────────────────────────────────────────────────────────────


def test_different_fanouts_of_one_graph(make_job: JobFactory) -> None:
    with pytest.raises(ConfigError, match=r"(?s)fanouts \[5, 3\] differ.*pyg_layers"):
        make_job(model=SAGE, sampling={"fanout": [5, 3]})


def test_whole_graphs_have_no_layers(tmp_path: Path) -> None:
    model = {"kind": f"{OWN}:Gine", "interface": "pyg_layers", "layers": 1}
    with pytest.raises(ConfigError, match="one edge_index for all layers"):
        graph_job(tmp_path, model=model)


def test_different_fanouts_of_a_prediction(make_job: JobFactory, tmp_path: Path) -> None:
    config, ids = make_job(model=SAGE), tmp_path / "ids.txt"
    with pytest.raises(InputError, match="these numbers differ"):
        _few(config, ids, [5, 3])
