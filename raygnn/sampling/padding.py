"""Batches of few shapes: nodes and edges are added to blocks until there are as many as one of a
few sizes, so that what was compiled, or captured as a CUDA graph, for one batch fits another.

A block's destinations are the first of its sources, so that those which follow become further
destinations: nodes of the next hop, and added ones behind the last hop. All added edges lead to
these, from added nodes. No edge that was drawn leads from them, and no seed is one of them: what is
computed for them goes nowhere, and their gradients are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raygnn.sampling.batch import Adjacency, Block
from raygnn.sampling.exchange import Ids


def padded_size(count: int) -> int:
    """The smallest size that is not below ``count``, of four in each octave from 4 on."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def pad(
    blocks: Sequence[Block], frontier: Mapping[str, Ids]
) -> tuple[list[Block], dict[str, Tensor]]:
    """Blocks and their input nodes with added nodes and edges.

    Args:
        blocks: from the input nodes to the seeds, one at least.
        frontier: node type → int64 ``[S]``, ids of the input nodes, on any device.

    Returns:
        Blocks whose nodes are numbered as they were, and ids of which added nodes have one that is
        there. Of a node type that is not in the batch nothing is added.
    """
    reached = {t for t, nodes in frontier.items() if len(nodes)}

    def size(ntype: str, count: int) -> int:
        # one at least is added, for added edges to lead to or from
        return padded_size(count + 1) if ntype in reached else 0

    padded = []
    for block in blocks:
        num_src, num_dst = (
            {t: size(t, count) for t, count in nums.items()}
            for nums in (block.num_src, block.num_dst)
        )
        adj = {
            e: _longer(
                edges,
                range(block.num_src[e[0]], num_src[e[0]]),
                num_dst[e[2]] - block.num_dst[e[2]],
            )
            for e, edges in block.adj.items()
        }
        counted = {
            t: torch.cat([rows, rows.new_zeros(num_dst[t] - len(rows))])
            for t, rows in block.counted.items()
        }
        padded.append(Block(adj, num_src, num_dst, counted))
    ids = {}
    for ntype, nodes in frontier.items():
        given = torch.as_tensor(nodes)
        ids[ntype] = torch.cat([given, given[:1].repeat(size(ntype, len(given)) - len(given))])
    return padded, ids


def _longer(adj: Adjacency, sources: range, targets: int) -> Adjacency:
    """Edges and as many more as are missing to a size.

    Args:
        sources: numbers of those that added edges come from.
        targets: destinations that follow those that there are, among which added edges are shared
            out, lest one have them all.
    """
    edges = adj.src.shape[0]
    more = padded_size(edges) - edges
    places = torch.arange(max(targets, more), device=adj.src.device)
    shared = (places[:targets] + 1) * more // max(1, targets)

    def longer(values: Tensor) -> Tensor:
        return F.pad(values, (0, 0) * (values.dim() - 1) + (0, more))

    return replace(
        adj,
        indptr=torch.cat([adj.indptr, edges + shared]),
        src=torch.cat([adj.src, sources.start + places[:more] % max(1, len(sources))]),
        relation=None if adj.relation is None else longer(adj.relation),
        rows=None if adj.rows is None else longer(adj.rows),
        categories={name: longer(values) for name, values in adj.categories.items()},
        elapsed=None if adj.elapsed is None else longer(adj.elapsed),
    )
