"""Exported networks: the same outputs as the network's own, for graphs of other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from raygnn.errors import InputError
from raygnn.models.network import Schema
from raygnn.models.program import describe, export, restore
from raygnn.sampling.batch import etype_str
from tests.models.test_networks import CATEGORICAL, FAMILIES, USER, names, network
from tests.models.test_typed_families import ETYPES, PLAIN, SIZES, random_block

TYPED = Schema({"a": 6, "b": 3}, ETYPES, 4, target="a")
RELATED = Schema({"a": 6, "b": 3}, ETYPES, 4, {}, dict.fromkeys(ETYPES[:3], 5), target="a")
BONDED = replace(
    TYPED,
    edge_features=dict.fromkeys(ETYPES[:2], 3),
    edge_categories={e: {"sort": (4, 2)} for e in ETYPES[1:3]},
)
ONE = Schema({"_N": 6}, PLAIN, 4, target="_N")


def compare(schema: Schema, family: dict[str, Any], sizes: dict[str, int]) -> None:
    net = network(family, schema).eval()
    program = export(net).module()
    for grown in (1, 3):
        nums = {t: n * grown for t, n in sizes.items()}
        block = random_block(list(schema.etypes), nums, max(schema.relations.values(), default=0))
        x = {t: torch.randn(nums[t], w) for t, w in schema.in_features.items() if w}
        categories = {
            t: {n: torch.randint(0, c, (nums[t],)) for n, (c, _) in named.items()}
            for t, named in schema.categories.items()
        }
        edge_x, edge_categories = {}, {}
        for etype, adj in block.adj.items():
            num = len(adj.src)
            if (width := schema.edge_features.get(etype)) is not None:
                adj = adj.with_rows(torch.randn(num, width))
            named = schema.edge_categories.get(etype, {})
            numbers = {n: torch.randint(0, count, (num,)) for n, (count, _) in named.items()}
            block.adj[etype] = replace(adj, categories=numbers)
        order = {e: torch.randperm(len(adj.src)) for e, adj in block.adj.items()}
        edges, relation = {}, {}
        for etype, adj in block.adj.items():  # in no order
            at = order[etype]
            edges[etype_str(etype)] = torch.stack([adj.src, adj.dst])[:, at]
            if etype in schema.relations:
                assert adj.relation is not None
                relation[etype_str(etype)] = adj.relation[at]
            if adj.rows is not None:
                edge_x[etype_str(etype)] = adj.rows[at]
            if adj.categories:
                edge_categories[etype_str(etype)] = {n: c[at] for n, c in adj.categories.items()}
        degree = {e: adj.degree for e, adj in block.adj.items()}
        with torch.no_grad():
            expected = net([block] * net.num_layers, x, degree, None, categories)
            more = (edge_x, edge_categories) if schema.edge_widths else ()
            found = program(x, edges, relation, categories, *more)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


FIRST = {f["kind"]: f for f in FAMILIES if f["kind"] in ("sage", "rgcn", "hgt")}.values()


@pytest.mark.parametrize("family", FIRST, **names)
def test_some_kinds_give_the_same(family: dict[str, Any]) -> None:
    compare(TYPED, family, SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, **names)
@pytest.mark.parametrize("schema", [ONE, TYPED], ids=["one type", "typed"])
def test_programs_give_the_same(schema: Schema, family: dict[str, Any]) -> None:
    compare(schema, family, SIZES if schema is TYPED else {"_N": 13})


@pytest.mark.parametrize("mean_over", ["relation", "all"])
def test_relations_are_inputs(mean_over: str) -> None:
    compare(RELATED, {"kind": "rgcn", "bases": 3, "mean_over": mean_over}, SIZES)


def test_categories_are_inputs() -> None:
    sizes = {t: 5 + len(t) for t in CATEGORICAL.widths}
    assert CATEGORICAL.in_features[USER] == 0
    compare(CATEGORICAL, {"kind": "sage"}, sizes)


EDGES = {"edge_features": "w", "edge_categories": {"sort": 2}}


@pytest.mark.parametrize("kind", ["sage", "gin", "gat", "gatv2", "hgt", "rgcn"])
def test_features_of_edges_are_inputs(kind: str) -> None:
    compare(BONDED, {"kind": kind, **EDGES}, SIZES)


@pytest.mark.parametrize("regularizer", ["block", "none"])
def test_matrices_of_each_relation_are_refused(regularizer: str) -> None:
    net = network({"kind": "rgcn", "regularizer": regularizer}, RELATED)
    with pytest.raises(InputError, match="can not be exported") as error:
        export(net)
    assert error.value.where == "model.regularizer"


@pytest.mark.parametrize("schema", [ONE, RELATED, CATEGORICAL, BONDED])
def test_a_schema_is_plain_json(schema: Schema) -> None:
    assert restore(describe(schema)) == schema
    for broken in (None, [], {}, {**describe(schema), "etypes": [["a"]]}):
        with pytest.raises(ValueError, match=r"description|unpack"):
            restore(broken)
    older = {name: value for name, value in describe(TYPED).items() if "edge_" not in name}
    assert restore(older) == TYPED
