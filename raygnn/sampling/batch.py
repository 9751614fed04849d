"""Minibatches: blocks, features and seeds of one graph, or batches of graphs.

Shape suffixes: S source nodes, D destination nodes, E edges of a block, B seeds, F features.
A block's destination nodes are the first of its source nodes, per node type, so ``h[:D]`` of a
layer's input are the nodes that it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import DEFAULT_NTYPE, EdgeType, etype_str
from raygnn.graph.dgl import dgl

if TYPE_CHECKING:
    from typing import Self

    from raygnn.sampling.exchange import RowRoutes

__all__ = ["DEFAULT_NTYPE", "EdgeType", "dgl", "etype_str"]  # models import these from here alone


@dataclass(frozen=True)
class Adjacency:
    """In-edges of one edge type in a block, grouped by destination.

    Attributes:
        indptr: int64 ``[D+1]``.
        src: int64 ``[E]``, numbers of the source nodes within the block.
        relation: int64 ``[E]``, the relation of each edge; None if models do not read it.
        rows: ``[E, F]``, edge features in the compute dtype; None if there are none.
        categories: name → category numbers of the edges, int64 ``[E]``.
        elapsed: int64 ``[E]``, time from each edge to the destination's time; None if models do not
            read it.
        excluded: int64 ``[D]``, number of edges of each destination that this batch must not
            sample; None if there are none, or models do not read degrees.
    """

    indptr: Tensor
    src: Tensor
    relation: Tensor | None = None
    rows: Tensor | None = None
    categories: dict[str, Tensor] = field(default_factory=dict)
    elapsed: Tensor | None = None
    excluded: Tensor | None = None

    @staticmethod
    def of_edges(src: Tensor, dst: Tensor, num_dst: int, **arrays: Any) -> Adjacency:
        """Group edges ``src`` and ``dst``, int64 ``[E]``, by destination, in a stable order;
        ``arrays``: attributes from ``relation`` to ``elapsed``."""
        order = torch.argsort(dst, stable=True)
        starts = dst.new_zeros(num_dst + 1).index_add_(0, dst + 1, torch.ones_like(dst))
        grouped = Adjacency(starts.cumsum(0), src, **arrays)
        grouped = grouped.with_edges(order, grouped.indptr, src.index_select(0, order))
        return grouped.knowing(dst.index_select(0, order))

    def with_edges(self, edges: Tensor, indptr: Tensor, src: Tensor) -> Adjacency:
        """Return the lists ``indptr`` of the sources ``src`` with the arrays of ``edges``, int64
        ``[E]``."""

        def chosen(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.index_select(0, edges)

        categories = {name: n.index_select(0, edges) for name, n in self.categories.items()}
        arrays = chosen(self.relation), chosen(self.rows), categories, chosen(self.elapsed)
        return Adjacency(indptr, src, *arrays)

    def with_rows(self, rows: Tensor) -> Adjacency:
        """Return the same edges with ``rows`` ``[E, F]``, keeping cached properties."""
        other = copy(self)
        other.__dict__["rows"] = rows
        return other

    def knowing(self, dst: Tensor) -> Adjacency:
        """Set the cached value of `dst` and return itself."""
        self.__dict__["dst"] = dst
        return self

    @property
    def num_dst(self) -> int:
        """D; a symbol during an export, where ``len`` would fix a number."""
        return self.indptr.shape[0] - 1

    @cached_property
    def degree(self) -> Tensor:
        """Number of edges of each destination in this block, int64 ``[D]``."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def dst(self) -> Tensor:
        """Destination of each edge, int64 ``[E]``."""
        # the known output size saves waiting for a GPU; open blocks have no numbered sources
        return torch.repeat_interleave(self.degree, output_size=self.src.shape[0] or None)

    def csc(self) -> tuple[str, tuple[Tensor, Tensor, Tensor]]:
        """Return DGL's CSC arguments with edge ids, which some of its kernels require."""
        return "csc", (self.indptr, self.src, torch.arange(len(self.src), device=self.src.device))


@dataclass(frozen=True)
class Block:
    """Edges of one message-passing layer.

    Attributes:
        counted: node type → bool ``[D]``, the destinations that this rank counts in statistics over
            the rows of all ranks; all of them for missing types.
        until: node type → int64 ``[S]``, the seed's time of each source; empty unless models read
            it.
    """

    adj: dict[EdgeType, Adjacency]
    num_src: dict[str, int]
    num_dst: dict[str, int]
    counted: dict[str, Tensor] = field(default_factory=dict)
    until: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Block:
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=True))

    def to_dgl(self, shapes: Mapping[EdgeType, Mapping[str, tuple[int, ...]]] | None = None) -> Any:
        """Return a DGL block (MFG), for modules built from ``dgl.nn``.

        Args:
            shapes: edge type → name → row shape of the arrays in ``rows``, which become edge data
                beside the categories.
        """
        data: Any = {etype: adj.csc() for etype, adj in self.adj.items()}
        graph = dgl().create_block(data, self.num_src, self.num_dst)
        for etype, adj in self.adj.items():
            frame = graph.edges[etype].data
            frame.update(adj.categories)
            named = (shapes or {}).get(etype, {})
            if adj.rows is not None:
                parts = adj.rows.split([math.prod(shape) for shape in named.values()], 1)
                for (name, shape), rows in zip(named.items(), parts, strict=True):
                    frame[name] = rows.reshape(len(rows), *shape)
        return graph


@dataclass(kw_only=True)
class Targets:
    """Seeds and their targets.

    Attributes:
        seeds: int64 ``[B]``: reshuffled global ids of nodes, positions of edges, or numbers of
            graphs.
        y: targets of the seeds, ``[B, …]``.
        weight: float32 ``[B]``, 1 for a real seed and 0 for padding.
        total: number of real seeds of this batch over all ranks.
        window: the same over all batches of one optimizer step, including graphs that could not be
            loaded.
    """

    seeds: Tensor
    y: Tensor
    weight: Tensor
    total: int
    window: int

    def to(self, device: torch.device) -> Self:
        """Move all but ``seeds`` to ``device``. Called by Lightning's transfer hook."""
        if device.type == "cpu":
            return self
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(kw_only=True)
class Share(Targets):
    """One rank's share of a step.

    Attributes:
        epoch, step: number of the batch; ``step`` counts within the epoch.
        seconds: build times ``sample``, ``features`` and ``exchange``.
    """

    epoch: int
    step: int
    seconds: dict[str, float] = field(default_factory=dict)

    def pinned(self, device: torch.device) -> Self:
        """Copy all but ``seeds`` to page-locked memory, from which ``device``, a GPU, copies while
        it computes. The allocator reuses that memory only after a copy is complete."""
        with torch.cuda.device(device):  # else a thread would initialise the first GPU
            return _mapped(self, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Record the use of GPU tensors on ``stream``, so that their memory is not reused before
        the work submitted to it until they are freed."""

        def use(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(stream)
            return tensor

        _mapped(self, use)


@dataclass(kw_only=True)
class Part(Targets):
    """One task's part of a batch.

    Attributes:
        nodes: for nodes as seeds, int64 ``[B]``: indices among the last block's destinations of
            their type; None for edges, and if seed b is destination b.
        pairs: for edges as seeds, int64 ``[2, B]``: source and destination of each, as indices
            among the last block's destinations of their types; else None.
        relation: of these edges, int64 ``[B]``; None if they have none.
        pair_features: of these edges, ``[B, F]``; None if no decoder reads any.
        instead: replaced end, ``"source"`` or ``"target"`` → negatives, int64 ``[K]``, numbered as
            in ``pairs``, or ``[B, K]`` if each edge has its own; listed negatives are
            ``"source_neg"`` and ``"target_neg"``.
        known: replaced end → which sampled negatives form a training edge, and so do not count,
            bool ``[B, K]``; empty = they count.
        log_q: replaced end → logarithm of the sampling probability of the edges' own nodes there
            and of the negatives, float32 ``[B + K]``; empty unless the loss reads it.
        instead_features: likewise → ``pair_features`` of the negative edges, ``[B, K, F]``.
    """

    nodes: Tensor | None = None
    pairs: Tensor | None = None
    relation: Tensor | None = None
    pair_features: Tensor | None = None
    instead: dict[str, Tensor] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    log_q: dict[str, Tensor] = field(default_factory=dict)
    instead_features: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AwaitedRows:
    """Rows for a GPU. Other hosts send some of them when the batch is handed over to training.

    Prepared when the batch is built, so that one all-to-all is left. W ranks, T node types.

    Attributes:
        rows: node type → column → ``[n, …]``, with gaps for the received rows.
        places: node type → int64 ``[m]``, the gaps; order: likewise, the index of each among the
            distinct received rows.
        given: node type → int64, slots of the rows to send, by rank.
        receive, send: rows from and to each rank, int64 ``[W, T]``.
        finish: returns the fields of the batch. Collective, called by the thread that trains.
    """

    rows: dict[str, dict[str, Tensor]]
    places: dict[str, Tensor]
    order: dict[str, Tensor]
    given: dict[str, Tensor]
    receive: np.ndarray
    send: np.ndarray
    finish: Callable[[AwaitedRows], dict[str, Any]] | None = None


@dataclass(kw_only=True)
class Batch(Part, Share):
    """Seeds, of the only task or of several, with the blocks around them.

    Attributes:
        blocks: from the input nodes to the seeds, one per layer.
        x: node type → features of the input nodes ``[S_0, F]``, in the compute dtype.
        combined: edge type → features of the first block's sources, aggregated per destination
            ``[D_0, F]``, for models that read nothing else of them; then sources are not numbered,
            and ``x``, ``degree`` and ``categories`` have destinations only. Else empty.
        degree: edge type → number of in-edges, in the complete graph, of the input nodes of its
            destination type, int32 ``[S_0]``; empty unless the model reads it.
        categories: node type → name → category numbers of the input nodes, int64 ``[S_0]``.
        routes: routes of the input nodes' embeddings, which ``x`` does not have yet; None if no
            node type has embeddings.
        awaited: rows that other hosts have yet to send; until then ``x``, ``degree`` and
            ``categories`` are empty. None if nothing is awaited.
        parts: task name → its part of a multi-task batch. Then ``seeds``, ``y`` and ``weight`` are
            empty, and ``total`` and ``window`` sums over the parts.
    """

    blocks: list[Block]
    x: dict[str, Tensor]
    combined: dict[EdgeType, Tensor]
    degree: dict[EdgeType, Tensor]
    categories: dict[str, dict[str, Tensor]]
    routes: RowRoutes | None = None
    awaited: AwaitedRows | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    def received(self) -> Batch:
        """Return the batch with its awaited rows. Collective if batches of this job await any, on
        the group of the gradients: the thread that trains calls it before each forward pass, and
        so in the same order relative to gradient reductions on all ranks."""
        awaited = self.awaited
        if awaited is None or awaited.finish is None:
            return self
        return replace(self, awaited=None, **awaited.finish(awaited))


@dataclass(kw_only=True)
class GraphBatch(Share):
    """Batch of graphs joined into one, with graphs as seeds. N nodes and E edges in total.

    Graphs follow each other; nodes and edges keep their order within a graph.

    Attributes:
        sizes: node type → nodes of each graph, int64 ``[B]``.
        edge_sizes: edge type → edges of each graph, int64 ``[B]``.
        edges: edge type → sources and destinations, int64 ``[E]`` each, numbered consecutively.
        x: node type → features ``[N, F]``, in the compute dtype.
        categories: node type → name → category numbers, int64 ``[N]``.
        node_data: node type → name → ``[N, …]``: the graphs' other arrays for a user's module,
            floating-point ones in the compute dtype.
        edge_data: edge type → name → ``[E, …]``, likewise.
        edge_x: edge type → features ``[E, F]``, in the compute dtype; only types with features.
        edge_categories: edge type → name → category numbers, int64 ``[E]``.
    """

    sizes: dict[str, Tensor]
    edge_sizes: dict[EdgeType, Tensor]
    edges: dict[EdgeType, tuple[Tensor, Tensor]]
    x: dict[str, Tensor]
    categories: dict[str, dict[str, Tensor]]
    node_data: dict[str, dict[str, Tensor]]
    edge_data: dict[EdgeType, dict[str, Tensor]]
    edge_x: dict[EdgeType, Tensor] = field(default_factory=dict)
    edge_categories: dict[EdgeType, dict[str, Tensor]] = field(default_factory=dict)

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        if moved is not self:  # reading these later would wait for the GPU
            moved.__dict__.update(num_nodes=self.num_nodes, padded=self.padded)
        return moved

    @cached_property
    def num_nodes(self) -> dict[str, int]:
        """Node type → N."""
        return {t: int(sizes.sum()) for t, sizes in self.sizes.items()}

    @cached_property
    def padded(self) -> bool:
        """True if the batch has padding graphs."""
        return not bool((self.weight > 0).all())

    @cached_property
    def block(self) -> Block:
        """Block of all graphs, for every layer; its destinations are all nodes."""
        nums = self.num_nodes
        adj = {}
        for etype, (src, dst) in self.edges.items():
            rows, categories = self.edge_x.get(etype), self.edge_categories.get(etype, {})
            adj[etype] = Adjacency.of_edges(
                src, dst, nums[etype[2]], rows=rows, categories=categories
            )
        counted = {}
        if self.padded:  # padding is excluded from statistics
            real = self.weight > 0
            counted = {
                t: torch.repeat_interleave(real, n, output_size=nums[t])
                for t, n in self.sizes.items()
            }
        return Block(adj, nums, nums, counted)

    def to_dgl(self) -> Any:
        """Return ``dgl.batch`` of the graphs with ``node_data`` and ``edge_data``."""
        graph = dgl().heterograph(dict(self.edges), self.num_nodes)
        graph.set_batch_num_nodes(dict(self.sizes))
        graph.set_batch_num_edges(dict(self.edge_sizes))
        for ntype, data in self.node_data.items():
            graph.nodes[ntype].data.update(data)
        for etype, data in self.edge_data.items():
            graph.edges[etype].data.update(data)
        return graph


_Value = TypeVar("_Value")


def _mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Apply ``function`` to each nested tensor except ``seeds`` and ``routes``."""
    mapped: Any = value
    if isinstance(value, Tensor):
        mapped = function(value)
    elif isinstance(value, (Adjacency, AwaitedRows, Block, Targets)):
        names = [f.name for f in fields(value) if f.name not in ("seeds", "routes")]
        mapped = replace(value, **{name: _mapped(getattr(value, name), function) for name in names})
    elif isinstance(value, dict):
        mapped = {key: _mapped(inner, function) for key, inner in value.items()}
    elif isinstance(value, (list, tuple)):
        mapped = type(value)(_mapped(inner, function) for inner in value)
    return mapped
