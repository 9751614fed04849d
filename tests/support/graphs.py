"""Small graphs and shards of them, for tests of what comes after the partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.config.schema import Config
from raygnn.graph.collection import CollectionMeta, MissingCollection, find_collection
from raygnn.graph.collection.pack import make_collection
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    EdgeFrame,
    EdgeSplit,
    EdgeType,
    GraphData,
    NodeFrame,
)
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.sources import load_graph
from raygnn.graph.staging.mapped import map_table
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import EdgeReads, Shard, load_shard
from raygnn.sampling.batch import Adjacency, Block
from raygnn.sampling.exchange import Exchange

ITEM, USER, TAG = "item", "user", "tag"
TYPED: list[EdgeType] = [
    (ITEM, "also", ITEM),
    (USER, "buys", ITEM),
    (ITEM, "bought_by", USER),
    (ITEM, "has", TAG),  # leads nowhere: no item depends on a tag
]


def ensure_collection(
    config: Config, progress: Callable[[str], object] | None = None
) -> CollectionMeta:
    """Return the collection that a job needs; pack it if it does not exist."""
    found = find_collection(config)
    return make_collection(found, progress) if isinstance(found, MissingCollection) else found


def ensure_partition(
    config: Config, parts: int, progress: Callable[[str], object] | None = None
) -> PartitionMeta:
    """Return the partition that a job needs; build it if it does not exist."""
    found = find_partition(config, parts)
    if isinstance(found, PartitionMeta):
        return found
    if progress is not None:
        progress("load")
    assert config.graph is not None
    data = load_graph(config.graph, needs_masks=config.needs_masks, trains=config.trains)
    return make_partition(found, data, progress)


def random_graph(
    nodes: int = 200, degree: int = 8, *, features: int = 5, classes: int = 3, seed: int = 0
) -> GraphData:
    """Build a homogeneous, directed graph with self-loops, multi-edges and isolated nodes."""
    rng = np.random.default_rng(seed)
    edges = nodes * degree
    src, dst = rng.integers(0, nodes, edges), rng.integers(0, max(1, nodes * 9 // 10), edges)
    frame = _labelled(rng, nodes, features, classes)
    return GraphData(
        "random", {DEFAULT_NTYPE: frame}, {DEFAULT_ETYPE: EdgeFrame(src.astype(np.int64), dst)}
    )


def typed_graph(items: int = 120, users: int = 40, *, seed: int = 0) -> GraphData:
    """Build a graph of three node types and four edge types; items have labels."""
    rng = np.random.default_rng(seed)

    def edges(sources: int, targets: int, count: int) -> EdgeFrame:
        return EdgeFrame(rng.integers(0, sources, count), rng.integers(0, targets, count))

    counts = {ITEM: items, USER: users, TAG: 30}
    return GraphData(
        "typed",
        {
            ITEM: _labelled(rng, items, 6, 4),
            USER: NodeFrame(users, {"feat": rng.normal(size=(users, 3)).astype(np.float32)}),
            TAG: NodeFrame(30, {"feat": rng.normal(size=(30, 2)).astype(np.float32)}),
        },
        {e: edges(counts[e[0]], counts[e[2]], items * 4) for e in TYPED},
    )


def shard_of(
    exchange: Exchange,
    meta: PartitionMeta,
    *,
    replicated: bool,
    edge_arrays: Sequence[str] = (),
    reads: EdgeReads | None = None,
    split: EdgeSplit | None = None,
    hide: Sequence[EdgeSplit] = (),
) -> Shard:
    """Load a rank's shard from a cache beside the partition."""
    return load_shard(
        meta,
        exchange.world.rank,
        exchange.world.size,
        replicated=replicated,
        stage=Stage(meta.directory.parent / "stage"),
        edge_arrays=edge_arrays,
        reads=reads or EdgeReads(),
        split=split,
        hide=hide,
    )


def with_room(rows: Tensor, total: int) -> Tensor:
    """Return a table ``[total, …]`` that begins with ``rows``."""
    table = map_table(rows.dtype, rows.shape[1:], total)
    table[: len(rows)] = rows
    return table


def everyones(exchange: Exchange, rows: np.ndarray) -> np.ndarray:
    """Return the owned rows of all ranks, in the order of new ids."""
    return exchange.gather_rows(torch.from_numpy(rows.astype(np.int64))).numpy()


def _labelled(rng: np.random.Generator, num: int, features: int, classes: int) -> NodeFrame:
    split = rng.integers(0, 3, num)
    masks = {f"{name}_mask": split == i for i, name in enumerate(("train", "val", "test"))}
    return NodeFrame(
        num,
        {
            "feat": rng.normal(size=(num, features)).astype(np.float32),
            "label": rng.integers(0, classes, num),
            **masks,
        },
    )


def partition_graph(
    data: GraphData, out: Path, parts: int = 2, method: str = "random", **more: Any
) -> PartitionMeta:
    """Write a graph as a partition in a directory; ``more``: digest, seed, progress."""
    digest, progress = more.pop("digest", "0" * 64), more.pop("progress", None)
    return make_partition(Missing(out, parts, method, digest, {}, out, **more), data, progress)


def partitioned(
    data: GraphData, directory: Path, parts: int, method: str = "random"
) -> PartitionMeta:
    """Write ``data`` as a partition with this number of parts."""
    return partition_graph(data, directory / f"{data.name}-{parts}-{method}", parts, method)


def on_whole_graph(model: nn.Module, layers: int, data: GraphData) -> Tensor:
    """Compute a network's outputs in original ids; every layer's block is the entire graph."""
    adj = {}
    degree = {}
    for etype, edges in data.edges.items():
        order = np.argsort(edges.dst, kind="stable")
        counts = np.bincount(edges.dst, minlength=data.nodes[etype[2]].num)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        relation = edges.data.get("relation")
        adj[etype] = Adjacency(
            torch.from_numpy(indptr),
            torch.from_numpy(edges.src[order]),
            None if relation is None else torch.from_numpy(relation[order]),
        )
        degree[etype] = torch.from_numpy(counts)
    sizes = {t: frame.num for t, frame in data.nodes.items()}
    block = Block(adj, sizes, sizes)
    x = {t: torch.from_numpy(frame.data["feat"]) for t, frame in data.nodes.items()}
    with torch.no_grad():
        out: Tensor = model.eval()([block] * layers, x, degree)
    return out


def out_degrees(shard: Shard) -> dict[str, np.ndarray]:
    """Count this rank's edges that come from each node: a baseline for scores of rows."""
    counts = {t: np.zeros(shard.num_nodes(t), np.float32) for t in shard.ntypes}
    for etype in shard.etypes:
        np.add.at(counts[etype[0]], shard.own_sources(etype), np.float32(1))
    return counts
