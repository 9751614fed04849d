"""Export of trained networks as programs of torch operations, for serving without raygnn."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from raygnn.errors import CapabilityError, error_text
from raygnn.models.convolutions import GCNConv
from raygnn.models.decoders import Decoder
from raygnn.models.heads import EdgeModel, MultitaskModel, NodeHead
from raygnn.models.message_passing import NATIVE, SCATTER, Kernels
from raygnn.models.network import Direct, GraphNetwork, Network, Typed, members
from raygnn.models.typed_layers import Hidden, LightGCNLayer, key
from raygnn.sampling.batch import Adjacency, Block, etype_str
from raygnn.util.files import replacing

# name of an argument → an `InputSpec`, or a dictionary of these by type, and by name
InputSpecs = dict[str, Any]

GRAPHS, PAIRS, ROWS = "graphs", "pairs", "rows"  # sizes, beside `_nodes` and `_edges`
_MANY = 1000  # bound of random integers without a bound of their own
_TOLERANCE = 1e-4  # of the largest output


@dataclass(frozen=True)
class InputSpec:
    """Input tensor of a program.

    Attributes:
        shape: numbers of fixed sizes, and names of dynamic sizes.
        below: None: float32; else int64 from 0, with the exclusive bounds: for ends of edges the
            numbers of nodes at each end, for other integers their bound, if any.
        total: name of the size that the integers sum to, if any.
    """

    shape: tuple[int | str, ...]
    below: tuple[int | str, ...] | None = None
    total: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        known = {"below": self.below, "total": self.total}
        dtype = "float32" if self.below is None else "int64"
        return {"dtype": dtype, "shape": self.shape, **{n: v for n, v in known.items() if v}}

    def draw(self, sizes: Mapping[str, int], random: torch.Generator) -> Tensor:
        """Return a random tensor of this specification."""
        shape = [sizes[n] if isinstance(n, str) else n for n in self.shape]
        if self.below is None:
            return torch.randn(shape, generator=random)
        if self.total is not None:
            drawn = torch.randint(max(1, shape[0]), (sizes[self.total],), generator=random)
            return torch.bincount(drawn, minlength=shape[0])[: shape[0]]
        ends = [sizes[n] if isinstance(n, str) else n for n in self.below or (_MANY,)]
        rows = [torch.randint(max(1, end), shape[-1:], generator=random) for end in ends]
        return torch.stack(rows) if len(shape) > 1 else rows[0]


class Program(nn.Module):
    """Program of one file, in fp32 and without dropout, for inputs of any size."""

    inputs: InputSpecs  # keyword arguments of `forward`


class _EncoderProgram(Program):
    """Network on one graph: rows of its nodes by type, or of the target type only. They are exact
    if all in-edges within as many hops as there are layers are passed."""

    def __init__(self, network: Network, *, by_type: bool):
        super().__init__()
        self.network = network
        self.by_type = by_type
        self.inputs = _graph_inputs(network.schema)
        if any(isinstance(module, GCNConv | LightGCNLayer) for module in network.modules()):
            etypes = network.schema.etypes
            self.inputs["degree"] = {etype_str(e): InputSpec((_nodes(e[2]),), ()) for e in etypes}

    def forward(
        self,
        edges: dict[str, Tensor],
        x: Any = None,
        categories: Any = None,
        relation: Any = None,
        edge_x: Any = None,
        edge_categories: Any = None,
        elapsed: Any = None,
        degree: Any = None,
    ) -> Any:
        arrays = {"relation": relation, "rows": edge_x, "categories": edge_categories}
        arrays["elapsed"] = elapsed
        block = _block(self.network.schema, edges, x, categories, arrays)
        degrees = {e: (degree or {}).get(etype_str(e), adj.degree) for e, adj in block.adj.items()}
        blocks = [block] * self.network.num_layers
        h: Hidden = self.network.represent(blocks, x or {}, degrees, None, categories)
        return h if self.by_type else h[self.network.target]


class _GraphProgram(Program):
    """Network on a batch of graphs, joined one after the other: ``[graphs, out_features]``."""

    def __init__(self, network: GraphNetwork):
        super().__init__()
        self.network = network
        sizes = {t: InputSpec((GRAPHS,), (), _nodes(t)) for t in network.schema.widths}
        self.inputs = {**_graph_inputs(network.schema), "sizes": sizes}

    def forward(
        self,
        edges: dict[str, Tensor],
        sizes: dict[str, Tensor],
        x: Any = None,
        categories: Any = None,
        edge_x: Any = None,
        edge_categories: Any = None,
    ) -> Tensor:
        schema = self.network.schema
        arrays = {"rows": edge_x, "categories": edge_categories}
        block = _block(schema, edges, x, categories, arrays)
        graphs = {}
        for ntype, counts in sizes.items():
            num = block.num_src[ntype]
            graph = torch.repeat_interleave(counts, output_size=num)
            graphs[ntype] = members(counts, num).knowing(graph)
        return self.network.readout(self.network.pooled(block, x or {}, categories, graphs))


class _DecoderProgram(Program):
    """Decoder of the rows at both ends of edges: ``[pairs, out_features]``."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder
        rows = InputSpec((PAIRS, decoder.width))
        self.inputs = {"source": rows, "target": rows}
        if decoder.relations > 1 and getattr(decoder, "relation", None) is not None:
            self.inputs["relation"] = InputSpec((PAIRS,), (decoder.relations,))
        if (read := getattr(decoder, "features", None)) is not None:
            self.inputs["features"] = InputSpec((PAIRS, read.in_features))

    def forward(
        self, source: Tensor, target: Tensor, relation: Any = None, features: Any = None
    ) -> Tensor:
        return self.decoder(source, target, relation, features)


class _HeadProgram(Program):
    """Head on rows of nodes: ``[rows, out_features]``."""

    def __init__(self, head: nn.Module, width: int):
        super().__init__()
        self.head = head
        self.inputs = {ROWS: InputSpec((ROWS, width))}

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(rows)


def programs(model: nn.Module) -> dict[str, Program]:
    """Return the programs of a built-in model by name: a single ``model``, or an ``encoder`` of
    nodes, if there are layers, and a ``decoder`` of its rows (``decoder-<task>`` for several
    tasks)."""
    model = copy.deepcopy(model).float().eval().requires_grad_(False)
    if isinstance(model, GraphNetwork):
        return {"model": _GraphProgram(model)}
    if isinstance(model, Network):
        return {"model": _EncoderProgram(model, by_type=False)}
    if isinstance(model, Direct):
        return {"decoder": _HeadProgram(model.out, model.out.in_features)}
    assert isinstance(model, EdgeModel | MultitaskModel)
    heads: dict[str, Any] = {"decoder": model}
    if isinstance(model, MultitaskModel):
        heads = {f"decoder-{name}": model.heads[key(name)] for name in model.names}
    made: dict[str, Program] = {}
    if isinstance(model.encoder, Network):
        made["encoder"] = _EncoderProgram(model.encoder, by_type=True)
    for name, head in heads.items():
        made[name] = (
            _HeadProgram(head, head.width)
            if isinstance(head, NodeHead)
            else _DecoderProgram(head.decoder)
        )
    return made


def write(program: Program, file: Path) -> Any:
    """Write a file for ``torch.export.load``, after checking that the loaded program equals the
    network for inputs of other sizes.

    Returns:
        The widths of its outputs: a number, or one for each node type.

    Raises:
        CapabilityError: the export fails or differs; no file is written.
        OSError: it cannot be written.
    """
    content = io.BytesIO()
    try:
        torch.export.save(trace(program), content)
        content.seek(0)
        widths = check(program, torch.export.load(content).module())
    except Exception as error:  # torch has no common error type for failed exports
        what = f"torch {torch.__version__} cannot export this network with equal outputs: "
        what, remedy = what + error_text(error), "export it with another version of torch"
        raise CapabilityError(what, where=file.name, remedy=remedy) from error
    with replacing(file) as stream:
        stream.write(content.getbuffer())
    return widths


def trace(program: Program) -> ExportedProgram:
    """Export a program with dynamic sizes."""
    sizes = {name: 7 + 2 * number for number, name in enumerate(_sizes(program))}
    dims = {name: Dim(f"size_{number}", min=0) for number, name in enumerate(sizes)}

    def free(leaf: InputSpec) -> dict[int, Any]:
        return {at: dims[str(n)] for at, n in enumerate(leaf.shape) if n in dims}

    given = _drawn(program, sizes, torch.Generator())
    _use(program, SCATTER)
    with torch.no_grad():
        return torch.export.export(
            program, (), given, dynamic_shapes=_each(program.inputs, free), strict=False
        )


def check(program: Program, exported: Callable[..., Any]) -> Any:
    """Compare an exported program with the network's own kernels, for several sizes; returns as
    `write`. Raises AssertionError if outputs differ by more than 1e-4 of the largest."""
    _use(program, NATIVE)
    random = torch.Generator().manual_seed(1)
    names = _sizes(program)
    many = {name: 23 + 31 * number for number, name in enumerate(names)}
    lonely = {name: 0 if name.startswith(_EDGES) else 5 for name in names}
    widths: Any = None
    for sizes in (many, dict.fromkeys(names, 1), lonely, dict.fromkeys(names, 0)):
        given = _drawn(program, sizes, random)
        with torch.no_grad():
            out, expected = exported(**given), program(**given)
        several = isinstance(expected, dict)
        for kind in expected if several else [None]:
            found, wanted = (out[kind], expected[kind]) if several else (out, expected)
            largest = max([1.0, *wanted.abs().flatten().tolist()])
            torch.testing.assert_close(found, wanted, rtol=0, atol=_TOLERANCE * largest)
        widths = {t: h.shape[1] for t, h in expected.items()} if several else expected.shape[1]
    return widths


def describe_inputs(program: Program) -> dict[str, Any]:
    """Return a program's inputs as JSON types."""
    return _each(program.inputs, InputSpec.to_dict)


def _use(program: Program, kernels: Kernels) -> None:
    for module in program.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels  # type: ignore[assignment]


def _each(inputs: InputSpecs, function: Callable[[InputSpec], Any]) -> dict[str, Any]:
    return {
        name: _each(one, function) if isinstance(one, dict) else function(one)
        for name, one in inputs.items()
    }


def _sizes(program: Program) -> list[str]:
    found: list[str] = []
    _each(program.inputs, lambda leaf: found.extend(n for n in leaf.shape if isinstance(n, str)))
    return list(dict.fromkeys(found))


def _drawn(program: Program, sizes: Mapping[str, int], random: torch.Generator) -> dict[str, Any]:
    return _each(program.inputs, lambda leaf: leaf.draw(sizes, random))


def _nodes(ntype: str) -> str:
    return f"nodes of {ntype}"


_EDGES = "edges of "


def _graph_inputs(schema: Typed) -> InputSpecs:

    def numbers(of: str, named: Mapping[str, tuple[int, int]]) -> InputSpecs:
        return {n: InputSpec((of,), (num,) if num else ()) for n, (num, _) in named.items()}

    edges = {e: f"{_EDGES}{etype_str(e)}" for e in schema.etypes}
    inputs = {
        "edges": {
            etype_str(e): InputSpec((2, of), (_nodes(e[0]), _nodes(e[2])))
            for e, of in edges.items()
        },
        "x": {t: InputSpec((_nodes(t), width)) for t, width in schema.in_features.items() if width},
        "categories": {t: numbers(_nodes(t), named) for t, named in schema.categories.items()},
        "relation": {
            etype_str(e): InputSpec((edges[e],), (n,)) for e, n in schema.relations.items()
        },
        "edge_x": {etype_str(e): InputSpec((edges[e], w)) for e, w in schema.edge_features.items()},
        "edge_categories": {
            etype_str(e): numbers(edges[e], named) for e, named in schema.edge_categories.items()
        },
        "elapsed": {etype_str(e): InputSpec((edges[e],), ()) for e in schema.edge_times},
    }
    return {name: of_types for name, of_types in inputs.items() if of_types}


def _block(schema: Typed, edges: Any, x: Any, categories: Any, arrays: Mapping[str, Any]) -> Block:
    """Build the block of one graph, for every layer. ``arrays``: see `Adjacency.of_edges`, each by
    edge type; None = no array."""
    nums = {t: next(iter(named.values())).shape[0] for t, named in (categories or {}).items()}
    nums |= {t: rows.shape[0] for t, rows in (x or {}).items()}
    adj = {}
    for etype in schema.etypes:
        name = etype_str(etype)
        src, dst = edges[name].unbind(0)
        own = {kind: given[name] for kind, given in arrays.items() if name in (given or {})}
        adj[etype] = Adjacency.of_edges(src, dst, nums[etype[2]], **own)
    return Block(adj, nums, nums)
