"""What a model sees of a graph: blocks, features and seeds of one minibatch.

Shape suffixes: S source nodes, D destination nodes, E edges of a block, B seeds, F features.
A block's destination nodes are the first of its source nodes, per node type, so ``h[:D]`` of a
layer's input are the nodes that it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from raygnn.graph.data import DEFAULT_NTYPE, EdgeType, etype_str
from raygnn.graph.dgl import dgl, require

# models know the graph, and DGL, through this module alone
__all__ = [
    "DEFAULT_NTYPE",
    "Adjacency",
    "Batch",
    "Block",
    "EdgeType",
    "dgl",
    "etype_str",
    "require",
]


@dataclass(frozen=True)
class Adjacency:
    """The in-edges of one edge type in a block, grouped by destination.

    Attributes:
        indptr: int64 ``[D+1]``.
        src: int64 ``[E]``, numbers of the source nodes within the block.
    """

    indptr: Tensor
    src: Tensor

    @cached_property
    def degree(self) -> Tensor:
        """Edges of each destination in this block, int64 ``[D]``."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def dst(self) -> Tensor:
        """The destination of each edge, int64 ``[E]``."""
        return torch.repeat_interleave(self.degree)

    def to_dgl(self, num_src: int) -> Any:
        """The same as a DGL block of one type with ``num_src`` sources; built once."""
        graph = self.__dict__.get("_dgl")
        if graph is None:
            # edge ids are spelled out: some of DGL's kernels refuse a CSC without them
            edge = torch.arange(len(self.src), device=self.src.device)
            csc = ("csc", (self.indptr, self.src, edge))
            graph = dgl().create_block(csc, num_src, len(self.indptr) - 1)
            self.__dict__["_dgl"] = graph
        return graph

    def to(self, device: torch.device) -> Adjacency:
        return Adjacency(self.indptr.to(device), self.src.to(device))


@dataclass(frozen=True)
class Block:
    """One message-passing layer's part of the graph."""

    adj: dict[EdgeType, Adjacency]
    num_src: dict[str, int]
    num_dst: dict[str, int]

    def to(self, device: torch.device) -> Block:
        adj = {etype: a.to(device) for etype, a in self.adj.items()}
        return Block(adj, self.num_src, self.num_dst)

    def to_dgl(self) -> Any:
        """The same as a DGL block (MFG), for modules that are built from ``dgl.nn``."""
        # edge ids are spelled out: some of DGL's kernels refuse a CSC without them
        data: Any = {
            etype: ("csc", (a.indptr, a.src, torch.arange(len(a.src), device=a.src.device)))
            for etype, a in self.adj.items()
        }
        if list(self.num_src) == [DEFAULT_NTYPE] and len(data) == 1:
            (csc,) = data.values()
            return dgl().create_block(csc, self.num_src[DEFAULT_NTYPE], self.num_dst[DEFAULT_NTYPE])
        return dgl().create_block(data, self.num_src, self.num_dst)


@dataclass
class Batch:
    """One rank's share of one step.

    Attributes:
        blocks: from the input nodes to the seeds, one per layer.
        x: node type → features of the input nodes ``[S_0, F]``, in the compute dtype.
        combined: edge type → features of the first block's sources, added up per destination
            ``[D_0, F]``, for a model that only needs these; then its sources are not numbered,
            and ``x``, ``degree`` and ``categories`` are those of its destinations alone. Else
            empty.
        degree: edge type → number of in-edges, in the whole graph, of the input nodes of its
            destination type, int32 ``[S_0]``; empty unless the model asks for it.
        categories: node type → name → category numbers of the input nodes, int64 ``[S_0]``.
        seeds: int64 ``[B]``: reshuffled global ids of nodes, or positions of edges.
        pairs: for edges as seeds, int64 ``[2, B]``: the source and the destination of each, as
            numbers of the last block's destinations of their types; else None.
        y: targets of the seeds, ``[B, …]``.
        weight: float32 ``[B]``, 1 for a real seed and 0 for padding.
        total: number of real seeds of this batch over all ranks.
        window: the same over all batches that make one optimizer step together.
        epoch, step: which batch this is; ``step`` counts within the epoch.
        seconds: what it cost to make: ``sample``, ``features``.
    """

    blocks: list[Block]
    x: dict[str, Tensor]
    combined: dict[EdgeType, Tensor]
    degree: dict[EdgeType, Tensor]
    categories: dict[str, dict[str, Tensor]]
    seeds: Tensor
    pairs: Tensor | None
    y: Tensor
    weight: Tensor
    total: int
    window: int
    epoch: int
    step: int
    seconds: dict[str, float] = field(default_factory=dict)

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``. Called by Lightning's transfer hook."""
        if device.type == "cpu":
            return self
        return Batch(
            blocks=[block.to(device) for block in self.blocks],
            x={t: v.to(device, non_blocking=True) for t, v in self.x.items()},
            combined={e: v.to(device, non_blocking=True) for e, v in self.combined.items()},
            degree={e: v.to(device) for e, v in self.degree.items()},
            categories={
                t: {name: v.to(device) for name, v in named.items()}
                for t, named in self.categories.items()
            },
            seeds=self.seeds,
            pairs=None if self.pairs is None else self.pairs.to(device),
            y=self.y.to(device),
            weight=self.weight.to(device),
            total=self.total,
            window=self.window,
            epoch=self.epoch,
            step=self.step,
            seconds=self.seconds,
        )
