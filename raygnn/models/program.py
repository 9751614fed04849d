"""A trained network as a program of torch's own operations, for serving without raygnn."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from raygnn.errors import InputError
from raygnn.models.network import Network, Schema
from raygnn.models.rgcn import RGCNLayer
from raygnn.sampling.batch import Adjacency, Block, EdgeType, etype_str

T = TypeVar("T")

# what the program is traced with: no size of it stays in the program
_NODES, _EDGES = 7, 11


class Program(nn.Module):
    """A network on a whole graph, with plain tensors; see `export`."""

    def __init__(self, network: Network):
        super().__init__()
        self.network = network
        self.etypes = {etype_str(etype): etype for etype in network.schema.etypes}

    def forward(
        self,
        x: dict[str, Tensor],
        edges: dict[str, Tensor],
        relation: dict[str, Tensor],
        categories: dict[str, dict[str, Tensor]],
        edge_x: dict[str, Tensor] | None = None,
        edge_categories: dict[str, dict[str, Tensor]] | None = None,
    ) -> Tensor:
        adj, degree = {}, {}
        nums = {ntype: next(iter(named.values())).shape[0] for ntype, named in categories.items()}
        nums |= {ntype: rows.shape[0] for ntype, rows in x.items()}
        for name, etype in self.etypes.items():
            src, dst = edges[name].unbind(0)
            data = (edge_x or {}).get(name), (edge_categories or {}).get(name)
            adj[etype] = Adjacency.of_edges(src, dst, nums[etype[2]], relation.get(name), *data)
            degree[etype] = adj[etype].degree
        block = Block(adj, nums, nums)
        out: Tensor = self.network([block] * self.network.num_layers, x, degree, None, categories)
        return out


def export(network: Network) -> ExportedProgram:
    """The network in fp32, without dropout, for graphs of any size.

    Its inputs, by position:

    - node type → features, float32 ``[N, F]``; types that have none are left out;
    - edge type (``source:relation:target``) → its edges, int64 ``[2, E]``: sources and targets;
    - edge type → the relation of each edge, int64 ``[E]``, of types that have any;
    - node type → name → category numbers, int64 ``[N]``;
    - of a network that reads features of edges: edge type → features, float32 ``[E, F]``, and edge
      type → name → category numbers, int64 ``[E]``.

    The output is float32 ``[N, out_features]``, a row for each node of the target type. It is
    exact for nodes all of whose in-edges within as many hops as there are layers are given.

    Raises:
        InputError: R-GCN whose relations have blocks or matrices of their own, or a network that
            reads how long ago edges were.
    """
    schema = network.schema
    if schema.edge_times:
        raise InputError(
            "a network that reads how long ago edges were can not be exported: of a whole graph "
            "nodes have no times",
            where="model.time_encoding",
            remedy="train without model.time_encoding",
        )
    if any(isinstance(m, RGCNLayer) and m.blocks and schema.relations for m in network.modules()):
        raise InputError(
            "an rgcn whose relations have matrices of their own can not be exported: how often "
            "each occurs decides what is computed",
            where="model.regularizer",
            remedy="train with model.regularizer basis",
        )
    program = Program(copy.deepcopy(network).float().eval())
    for module in program.modules():
        if hasattr(module, "kernels"):
            vars(module)["kernels"] = "scatter"
    inputs = _example(schema)
    x, edges, relation, categories, *of_edges = inputs
    nodes = {t: Dim(f"nodes_{i}", min=1) for i, t in enumerate(schema.widths)}
    nums = {name: Dim(f"edges_{i}", min=1) for i, name in enumerate(edges)}
    shapes: Any = (
        {t: {0: nodes[t]} for t in x},
        {name: {1: nums[name]} for name in edges},
        {name: {0: nums[name]} for name in relation},
        {t: {name: {0: nodes[t]} for name in named} for t, named in categories.items()},
    )
    if of_edges:
        rows, numbers = of_edges
        shapes += ({name: {0: nums[name]} for name in rows},)
        shapes += ({e: {n: {0: nums[e]} for n in named} for e, named in numbers.items()},)
    with torch.no_grad():
        return torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)


def describe(schema: Schema) -> dict[str, Any]:
    """A schema as JSON; `restore` reads it."""
    return {
        "in_features": schema.in_features,
        "etypes": [list(etype) for etype in schema.etypes],
        "target": schema.target,
        "out_features": schema.out_features,
        "categories": schema.categories,
        "relations": _named(schema.relations),
        "edge_features": _named(schema.edge_features),
        "edge_categories": _named(schema.edge_categories),
        "edge_times": _named(schema.edge_times),
    }


def restore(values: Any) -> Schema:
    """The schema that `describe` has written.

    Raises:
        ValueError: it is none.
    """
    try:
        etypes = [(str(a), str(b), str(c)) for a, b, c in values["etypes"]]
        by_name: dict[str, EdgeType] = {etype_str(e): e for e in etypes}
        # files of older versions say nothing of edges' features
        rows, numbers = values.get("edge_features", {}), values.get("edge_categories", {})
        return Schema(
            {str(t): int(width) for t, width in values["in_features"].items()},
            etypes,
            int(values["out_features"]),
            {str(t): _categories(named) for t, named in values["categories"].items()},
            {by_name[e]: int(num) for e, num in values["relations"].items()},
            target=str(values["target"]),
            edge_features={by_name[e]: int(width) for e, width in rows.items()},
            edge_categories={by_name[e]: _categories(named) for e, named in numbers.items()},
            edge_times={by_name[e]: int(w) for e, w in values.get("edge_times", {}).items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no description of a network's data: {error}") from error


def _categories(named: Any) -> dict[str, tuple[int, int]]:
    return {str(name): (int(num), int(width)) for name, (num, width) in named.items()}


def _example(schema: Schema) -> tuple[Any, ...]:
    nodes = {t: _NODES + number for number, t in enumerate(schema.widths)}
    x = {t: torch.zeros(nodes[t], width) for t, width in schema.in_features.items() if width}
    edges, relation = {}, {}
    for number, etype in enumerate(schema.etypes):
        num = _EDGES + number
        edges[etype_str(etype)] = torch.arange(num).remainder(_NODES).expand(2, -1).contiguous()
        if etype in schema.relations:
            relation[etype_str(etype)] = torch.arange(num).remainder(schema.relations[etype])
    categories = {
        t: {name: torch.zeros(nodes[t], dtype=torch.int64) for name in named}
        for t, named in schema.categories.items()
    }
    if not schema.edge_widths:
        return x, edges, relation, categories
    sizes = {etype_str(e): _EDGES + number for number, e in enumerate(schema.etypes)}
    rows = {e: torch.zeros(sizes[e], w) for e, w in _named(schema.edge_features).items()}
    numbers = {
        e: {name: torch.zeros(sizes[e], dtype=torch.int64) for name in named}
        for e, named in _named(schema.edge_categories).items()
    }
    return x, edges, relation, categories, rows, numbers


def _named(by_etype: dict[EdgeType, T]) -> dict[str, T]:
    return {etype_str(etype): value for etype, value in by_etype.items()}
