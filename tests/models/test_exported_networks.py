"""Exported programs: the same outputs as the model's own, for inputs of other sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raygnn.config.model import ModelConfig, read_model
from raygnn.errors import CapabilityError
from raygnn.models import message_passing
from raygnn.models.decoders import make_decoder
from raygnn.models.heads import EdgeHead, EdgeModel, MultitaskModel, NodeHead
from raygnn.models.network import Direct, GraphSchema, Schema
from raygnn.models.program import InputSpec, Program, check, describe_inputs, programs, trace, write
from raygnn.models.registry import (
    build_edge_model,
    build_graph_model,
    build_model,
    describe,
    restore,
)
from raygnn.sampling.batch import Block, etype_str
from tests.models import test_graph_networks as graphs
from tests.models.test_networks import CATEGORICAL, FAMILIES, ITEM, USER, names, network
from tests.models.test_typed_families import ETYPES, PLAIN, SIZES, random_block
from tests.support import whole_graphs
from tests.support.small_jobs import slow_but

pytestmark = pytest.mark.long

TYPED = Schema({"a": 6, "b": 3}, ETYPES, 4, target="a")
RELATED = Schema({"a": 6, "b": 3}, ETYPES, 4, {}, dict.fromkeys(ETYPES[:3], 5), target="a")
BONDED = replace(
    TYPED,
    edge_features=dict.fromkeys(ETYPES[:2], 3),
    edge_categories={e: {"sort": (4, 2)} for e in ETYPES[1:3]},
)
TIMED = replace(BONDED, edge_times=dict.fromkeys(ETYPES[1:], 4))
ONE = Schema({"_N": 6}, PLAIN, 4, target="_N")
SEVERAL = Schema({"a": 6, "b": 3}, ETYPES, 8, target="a", others=("b",))
SAGE = read_model(kind="sage", hidden=8, layers=2)


def loaded(program: Program, file: Path) -> Callable[..., Any]:
    """Export a program to a file, and load it as a serving process does."""
    write(program, file)
    exported: Callable[..., Any] = torch.export.load(file).module()
    return exported


def random_data(schema: Schema, nums: dict[str, int]) -> tuple[Block, dict[str, Any]]:
    """Build a graph as a block, and as a program's input with its edges in random order."""
    relations = max(schema.relations.values(), default=0)
    block = random_block(list(schema.etypes), nums, relations)
    given: dict[str, Any] = {
        "x": {t: torch.randn(nums[t], w) for t, w in schema.in_features.items() if w},
        "edges": {},
        "categories": {
            t: {n: torch.randint(0, c or 10**12, (nums[t],)) for n, (c, _) in named.items()}
            for t, named in schema.categories.items()
        },
        **{name: {} for name in ("relation", "edge_x", "edge_categories", "elapsed")},
    }
    for etype, adj in block.adj.items():
        num, name = len(adj.src), etype_str(etype)
        at = torch.randperm(num)
        named = schema.edge_categories.get(etype, {})
        rows = torch.randn(num, width) if (width := schema.edge_features.get(etype)) else None
        numbers = {n: torch.randint(0, count, (num,)) for n, (count, _) in named.items()}
        ago = torch.randint(0, 10**6, (num,)) if etype in schema.edge_times else None
        block.adj[etype] = replace(adj, rows=rows, categories=numbers, elapsed=ago)
        given["edges"][name] = torch.stack([adj.src, adj.dst])[:, at]
        of_edges = {"edge_x": rows, "elapsed": ago}
        of_edges["relation"] = adj.relation if etype in schema.relations else None
        for argument, values in of_edges.items():
            if values is not None:
                given[argument][name] = values[at]
        if numbers:
            given["edge_categories"][name] = {n: c[at] for n, c in numbers.items()}
    return block, {argument: values for argument, values in given.items() if values}


def compare(schema: Schema, family: dict[str, Any], sizes: dict[str, int], file: Path) -> None:
    net = network(family, schema).eval()
    (program,) = programs(net).values()
    exported = loaded(program, file)
    for grown in (1, 3, 40):
        block, given = random_data(schema, {t: n * grown for t, n in sizes.items()})
        degree = {e: adj.degree for e, adj in block.adj.items()}
        if family["kind"] == "gcn":  # degrees in the whole graph, of which this is a part
            degree = {e: d + torch.randint(0, 9, d.shape) for e, d in degree.items()}
            given["degree"] = {etype_str(e): d for e, d in degree.items()}
        x, categories = given["x"], given.get("categories", {})
        with torch.no_grad():
            expected = net([block] * net.num_layers, x, degree, None, categories)
        same(exported(**given), expected)


def same(found: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_degrees_are_inputs(tmp_path: Path) -> None:
    compare(TYPED, {"kind": "gcn", "norm": "batch"}, SIZES, tmp_path / "a.pt2")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, **names)
@pytest.mark.parametrize("schema", [ONE, TYPED], ids=["one type", "typed"])
def test_programs_give_the_same(schema: Schema, family: dict[str, Any], tmp_path: Path) -> None:
    compare(schema, family, SIZES if schema is TYPED else {"_N": 13}, tmp_path / "a.pt2")


@pytest.mark.parametrize("columns", slow_but("learned", ["raw", "learned"]))
def test_categories_are_inputs(columns: str, tmp_path: Path) -> None:
    """So are ages, which have no number of categories."""
    sizes = {t: 5 + len(t) for t in CATEGORICAL.widths}
    assert CATEGORICAL.in_features[USER] == 0
    named = {**CATEGORICAL.categories, ITEM: {"brand": (5, 3), "time": (0, 4)}}
    schema = CATEGORICAL if columns == "raw" else replace(CATEGORICAL, categories=named)
    compare(schema, {"kind": "sage", "columns": columns}, sizes, tmp_path / "a.pt2")


EDGES = {"edge_features": "w", "edge_categories": {"sort": 2}}


KINDS = ["sage", "gin", "gat", "gatv2", "hgt", "rgcn"]


@pytest.mark.parametrize("kind", slow_but("sage", KINDS))
def test_features_of_edges_are_inputs(kind: str, tmp_path: Path) -> None:
    compare(BONDED, {"kind": kind, **EDGES}, SIZES, tmp_path / "a.pt2")


def test_matrices_of_relations_are_told_what_edges_say(tmp_path: Path) -> None:
    schema = replace(BONDED, relations=RELATED.relations)
    compare(schema, {"kind": "rgcn", "regularizer": "none", **EDGES}, SIZES, tmp_path / "a.pt2")


@pytest.mark.parametrize("kind", slow_but("gatv2", ["sage", "gatv2"]))
def test_how_long_ago_edges_were_is_an_input(kind: str, tmp_path: Path) -> None:
    family = {"kind": kind, "time_encoding": 4, **EDGES}
    compare(TIMED, family, SIZES, tmp_path / "a.pt2")


GRAPHS = [
    {"kind": "gcn", "norm": "layer"},
    {"kind": "gin", "norm": "batch", "readout": "max", "edge_features": "w"},
]


@pytest.mark.parametrize(
    ("family", "schema"),
    [
        pytest.param(GRAPHS[0], whole_graphs.TYPED, marks=pytest.mark.slow),
        (GRAPHS[1], whole_graphs.BONDED),
        pytest.param({**GRAPHS[1], "kind": "gatv2"}, whole_graphs.BONDED, marks=pytest.mark.slow),
    ],
)
def test_graphs_give_the_same(family: dict[str, Any], schema: GraphSchema, tmp_path: Path) -> None:
    """Batches have any number of graphs, of any size, also without nodes."""
    net = graphs.network(family, schema).eval()
    (program,) = programs(net).values()
    exported = loaded(program, tmp_path / "a.pt2")
    samples = graphs.samples_of(schema)
    for some in (samples, samples[:1], samples[3:4] * 50):
        batch = whole_graphs.batch_of(schema, some)
        given = {
            "x": batch.x,
            "edges": {etype_str(e): torch.stack(ends) for e, ends in batch.edges.items()},
            "sizes": batch.sizes,
            "categories": batch.categories,
            "edge_x": {etype_str(e): rows for e, rows in batch.edge_x.items()},
            "edge_categories": {etype_str(e): n for e, n in batch.edge_categories.items()},
        }
        with torch.no_grad():
            same(exported(**{name: values for name, values in given.items() if values}), net(batch))


DECODERS = [("dot", 1), ("distmult", 1), ("complex", 4), ("rotate", 1), ("transe", 4), ("mlp", 3)]


@pytest.mark.parametrize(("kind", "relations"), DECODERS)
def test_decoders_give_the_same(kind: str, relations: int, tmp_path: Path) -> None:
    decoder = make_decoder(SAGE, kind, 8, relations, 5 if kind == "mlp" else 1, 2).eval()
    if kind == "mlp":  # of which one relation is as the other before it is trained
        nn.init.normal_(decoder.relation)  # type: ignore[arg-type]
    made = programs(EdgeModel(Direct(ONE, head=False), decoder, PLAIN[0]))
    assert list(made) == ["decoder"]  # a model without layers has no encoder
    exported = loaded(made["decoder"], tmp_path / "a.pt2")
    for num in (1, 4, 300):
        given = {"source": torch.randn(num, 8), "target": torch.randn(num, 8)}
        if relations > 1:
            given["relation"] = torch.randint(0, relations, (num,))
        if kind == "mlp":
            given["features"] = torch.randn(num, 2)
        expected = decoder(*(given.get(n) for n in ("source", "target", "relation", "features")))
        same(exported(**given), expected)


def several() -> MultitaskModel:
    torch.manual_seed(2)
    decoder = make_decoder(SAGE, "distmult", 8, 3, 1)
    heads = {"kind": NodeHead("a", 8, 3, 0.1), "like": EdgeHead(ETYPES[1], decoder, links=True)}
    return MultitaskModel(build_model(SAGE, SEVERAL), heads)


def test_several_tasks_are_an_encoder_and_decoders(tmp_path: Path) -> None:
    model = several().eval()
    made = {name: loaded(p, tmp_path / name) for name, p in programs(model).items()}
    assert list(made) == ["encoder", "decoder-kind", "decoder-like"]
    block, given = random_data(SEVERAL, {"a": 70, "b": 90})
    with torch.no_grad():
        rows = model.encoder.represent([block] * 2, given["x"], {})
        found = made["encoder"](**given)
        assert found.keys() == rows.keys() == {"a", "b"}
        for ntype, expected in rows.items():
            same(found[ntype], expected)
        like, kind = model.heads[":like"], model.heads[":kind"]
        same(made["decoder-kind"](rows=rows["a"]), kind(rows["a"]))
        pairs = rows["b"][:50], rows["a"][:50], torch.arange(50) % 3
        scores = made["decoder-like"](source=pairs[0], target=pairs[1], relation=pairs[2])
        same(scores, like.decoder(*pairs))  # type: ignore[operator]


def test_inputs_are_described() -> None:
    (program,) = programs(network({"kind": "gcn"}, ONE)).values()
    edges = {"dtype": "int64", "shape": (2, "edges of _N:_E:_N"), "below": ("nodes of _N",) * 2}
    assert describe_inputs(program) == {
        "edges": {"_N:_E:_N": edges},
        "x": {"_N": {"dtype": "float32", "shape": ("nodes of _N", 6)}},
        "degree": {"_N:_E:_N": {"dtype": "int64", "shape": ("nodes of _N",)}},
    }


class Fixed(Program):
    """A program with a dimension that torch cannot export as dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = {"rows": InputSpec(("rows", 2))}

    def forward(self, rows: Tensor) -> Tensor:
        return rows * torch.arange(len(rows)).unsqueeze(1)


def test_a_network_with_a_fixed_size_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="cannot export this network"):
        write(Fixed(), tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_a_program_with_other_outputs_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = programs(network({"kind": "sage"}, ONE)).values()
    exact = message_passing.SCATTER.aggregate

    def inexact(*given: Any) -> Tensor:
        return exact(*given) * 1.001

    monkeypatch.setattr(message_passing.SCATTER, "aggregate", inexact)
    with pytest.raises(CapabilityError, match="with equal outputs"):
        write(program, tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["many", "one", "no edges", "nothing", "nan"])
def test_several_sizes_are_compared(wrong: str) -> None:
    """None of them is that of the trace."""
    (program,) = programs(network({"kind": "sage"}, ONE)).values()
    exported, traced = trace(program).module(), 7

    def faulty(**given: Any) -> Tensor:
        nodes, edges = len(given["x"]["_N"]), given["edges"]["_N:_E:_N"].shape[1]
        assert nodes != traced
        out = exported(**given)
        bad = {
            "many": nodes > 9,
            "one": nodes == 1,
            "no edges": nodes and not edges,
            "nothing": not nodes,
            "nan": nodes > 9,
        }
        if not bad[wrong]:
            return out
        if wrong == "nothing":  # of no rows the widths can be wrong
            return out[:, 1:]
        return out * torch.nan if wrong == "nan" else out + 1e-3

    with pytest.raises(AssertionError):
        check(program, faulty)
    assert check(program, exported) == 4


def bare(model: nn.Module) -> ModelConfig:
    kind = "none" if isinstance(getattr(model, "encoder", model), Direct) else "sage"
    return read_model(kind=kind, **({} if kind == "none" else {"hidden": 8, "layers": 2}))


BUILT = {
    "nodes": lambda: build_model(SAGE, BONDED),
    "times": lambda: build_model(SAGE, TIMED),
    "categories": lambda: build_model(SAGE, CATEGORICAL),
    "links": lambda: build_edge_model(SAGE, SEVERAL, ETYPES[1], "distmult", 3, None),
    "edges": lambda: build_edge_model(SAGE, SEVERAL, ETYPES[1], "mlp", 1, 5, 2),
    "graphs": lambda: build_graph_model(SAGE, whole_graphs.BONDED),
    "several": several,
    "no layers": lambda: build_model(read_model(kind="none"), ONE),
    "no layers of edges": lambda: build_edge_model(
        read_model(kind="none"), ONE, PLAIN[0], "mlp", 2, 3
    ),
}


@pytest.mark.parametrize("make", BUILT.values(), ids=BUILT)
def test_a_model_is_made_of_json(make: Callable[[], nn.Module]) -> None:
    """A model rebuilt from JSON accepts the weights and has the same programs."""
    model = make()
    values = json.loads(json.dumps(describe(model)))
    again = restore(values, bare(model))
    again.load_state_dict(model.state_dict())
    assert describe(again) == describe(model)
    assert {n: p.inputs for n, p in programs(again).items()} == {
        n: p.inputs for n, p in programs(model).items()
    }


def test_a_damaged_description_is_refused() -> None:
    known = describe(build_model(SAGE, BONDED))
    for broken in ({}, {"schema": []}, {"schema": {**known["schema"], "etypes": [["a"]]}}):
        with pytest.raises(ValueError, match=r"description|unpack"):
            restore(broken, SAGE)
    assert describe(nn.Linear(2, 2)) == {}
