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

# models know the graph through this module alone
__all__ = ["DEFAULT_NTYPE", "Adjacency", "Batch", "Block", "EdgeType", "etype_str"]


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
        from raygnn.graph.dgl import dgl

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
        degree: edge type → number of in-edges, in the whole graph, of the input nodes of its
            destination type, int64 ``[S_0]``; empty unless the model asks for it.
        seeds: int64 ``[B]``, reshuffled global ids.
        y: targets of the seeds, ``[B, …]``.
        weight: float32 ``[B]``, 1 for a real seed and 0 for padding.
        total: number of real seeds of this batch over all ranks.
        window: the same over all batches that make one optimizer step together.
        epoch, step: which batch this is; ``step`` counts within the epoch.
        seconds: what it cost to make: ``sample``, ``features``.
    """

    blocks: list[Block]
    x: dict[str, Tensor]
    degree: dict[EdgeType, Tensor]
    seeds: Tensor
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
            degree={t: v.to(device) for t, v in self.degree.items()},
            seeds=self.seeds,
            y=self.y.to(device),
            weight=self.weight.to(device),
            total=self.total,
            window=self.window,
            epoch=self.epoch,
            step=self.step,
            seconds=self.seconds,
        )
