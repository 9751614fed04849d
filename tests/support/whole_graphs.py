"""Small random graphs, and batches of them put together by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raygnn.graph.collection.mapped_collection import Sample
from raygnn.graph.dgl import dgl
from raygnn.models.message_passing import Kernels
from raygnn.models.network import GraphSchema
from raygnn.sampling.batch import EdgeType, GraphBatch

AnyModule = TypeVar("AnyModule", bound=nn.Module)

# node types are named so that they would clash with attributes of torch's containers
ATOM, RING = "items", "pop.ular"
PLAIN = GraphSchema({"_N": 5}, [("_N", "_E", "_N")], 3)
TYPED = GraphSchema(
    {ATOM: 5, RING: 2},
    [(ATOM, "bond", ATOM), (ATOM, "also", ATOM), (ATOM, "in", RING), (RING, "has", ATOM)],
    3,
)
CATEGORICAL = GraphSchema(
    {ATOM: 5, RING: 0}, TYPED.etypes, 3, {ATOM: {"kind": (4, 3)}, RING: {"kind": (3, 2)}}
)
BONDED = GraphSchema(
    CATEGORICAL.in_features,
    TYPED.etypes,
    3,
    CATEGORICAL.categories,
    edge_features=dict.fromkeys(TYPED.etypes[::2], 1),
    edge_categories={e: {"sort": (4, 3), "age": (2, 1)} for e in TYPED.etypes[:2]},
)


def random_sample(
    schema: GraphSchema, seed: int, nodes: int | Mapping[str, int], edges: int | None = None
) -> Sample:
    """Build a sample with features ``x`` (fp64), categories and edge data ``w``; multi-edges,
    loops, isolated nodes.

    Args:
        nodes: of each type.
        edges: of each edge type; None = twice the nodes. None where an end has no nodes.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = {t: nodes if isinstance(nodes, int) else nodes[t] for t in schema.widths}

    def numbers(below: int, count: int) -> Tensor:
        return torch.randint(0, max(1, below), (count,), generator=generator)

    ends: dict[EdgeType, tuple[Tensor, Tensor]] = {}
    for etype in schema.etypes:
        source, target = counts[etype[0]], counts[etype[2]]
        count = 2 * target if edges is None else edges
        count = count if source and target else 0
        ends[etype] = numbers(source, count), numbers(target, count)
    x = {
        t: {"x": torch.randn(counts[t], width, generator=generator, dtype=torch.float64)}
        for t, width in schema.in_features.items()
        if width
    }
    for ntype, named in schema.categories.items():
        x.setdefault(ntype, {}).update(
            {n: numbers(c, counts[ntype]) for n, (c, _) in named.items()}
        )
    weights = {
        etype: {"w": torch.rand(len(src), generator=generator, dtype=torch.float64)}
        for etype, (src, _) in ends.items()
    }
    for etype, kinds in schema.edge_categories.items():
        weights[etype] |= {n: numbers(c, len(ends[etype][0])) for n, (c, _) in kinds.items()}
    return Sample(counts, ends, x, weights)


def batch_of(
    schema: GraphSchema, samples: Sequence[Sample], dtype: torch.dtype = torch.float32
) -> GraphBatch:
    """Join samples by hand, with numbers in ``dtype``."""
    sizes = {t: [s.num_nodes[t] for s in samples] for t in schema.widths}
    edges: dict[EdgeType, tuple[Tensor, Tensor]] = {}
    for etype in schema.etypes:
        ends = []
        for end in (0, 1):
            ntype = etype[2 * end]
            first = [sum(sizes[ntype][:i]) for i in range(len(samples))]
            ends.append(torch.cat([s.edges[etype][end] + first[i] for i, s in enumerate(samples)]))
        edges[etype] = ends[0], ends[1]
    x = {
        t: torch.cat([s.node_data[t]["x"] for s in samples]).to(dtype)
        for t, width in schema.in_features.items()
        if width
    }
    return GraphBatch(
        seeds=torch.arange(len(samples)),
        y=torch.zeros(len(samples), dtype=torch.int64),
        weight=torch.ones(len(samples)),
        total=len(samples),
        window=len(samples),
        epoch=0,
        step=0,
        sizes={t: torch.tensor(counts) for t, counts in sizes.items()},
        edge_sizes={e: torch.tensor([len(s.edges[e][0]) for s in samples]) for e in schema.etypes},
        edges=edges,
        x=x,
        categories={
            t: {n: torch.cat([s.node_data[t][n] for s in samples]) for n in named}
            for t, named in schema.categories.items()
        },
        node_data={t: {"x": rows} for t, rows in x.items()},
        edge_data={
            e: {"w": torch.cat([s.edge_data[e]["w"] for s in samples]).to(dtype)}
            for e in schema.etypes
        },
        edge_x={
            e: torch.cat([s.edge_data[e]["w"] for s in samples]).to(dtype).unsqueeze(1)
            for e in schema.edge_features
        },
        edge_categories={
            e: {n: torch.cat([s.edge_data[e][n] for s in samples]) for n in named}
            for e, named in schema.edge_categories.items()
        },
    )


def as_dgl(sample: Sample, dtype: torch.dtype = torch.float32) -> Any:
    """Return the sample as a DGL graph, with numbers in ``dtype``."""
    graph = dgl().heterograph(dict(sample.edges), dict(sample.num_nodes))
    for ntype, named in sample.node_data.items():
        graph.nodes[ntype].data["x"] = named["x"].to(dtype)
    for etype, named in sample.edge_data.items():
        graph.edges[etype].data["w"] = named["w"].to(dtype)
    return graph


def permuted(sample: Sample, seed: int) -> Sample:
    """Return the same graph with nodes and edges in another order."""
    generator = torch.Generator().manual_seed(seed)
    order = {t: torch.randperm(n, generator=generator) for t, n in sample.num_nodes.items()}
    number = {t: torch.argsort(o) for t, o in order.items()}  # old → new
    edges, weights = {}, {}
    for etype, (src, dst) in sample.edges.items():
        shuffle = torch.randperm(len(src), generator=generator)
        edges[etype] = number[etype[0]][src][shuffle], number[etype[2]][dst][shuffle]
        weights[etype] = {n: v[shuffle] for n, v in sample.edge_data[etype].items()}
    data = {t: {n: v[order[t]] for n, v in named.items()} for t, named in sample.node_data.items()}
    return Sample(sample.num_nodes, edges, data, weights)


def on_kernels(kernels: Kernels, module: AnyModule) -> AnyModule:
    """The module, with message passing by these in all of its layers."""
    for layer in module.modules():
        if hasattr(layer, "kernels"):
            layer.kernels = kernels  # type: ignore[assignment]
    return module


def same_gradients(ours: Tensor, theirs: Tensor, leaves: Mapping[str, Tensor]) -> None:
    """Check for equal outputs, and equal gradients of their sums of squares by every leaf."""
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    values = list(leaves.values())
    mine = torch.autograd.grad(ours.square().sum(), values, retain_graph=True)
    other = torch.autograd.grad(theirs.square().sum(), values, retain_graph=True)
    for name, left, right in zip(leaves, mine, other, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4, msg=name)
        assert left.any(), name
