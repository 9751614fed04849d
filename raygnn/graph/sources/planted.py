"""Generated graphs like ogbn-products: power-law degrees, communities, features that need both.

A configuration model with planted communities (a degree-corrected block model, Karrer & Newman
2011, with stubs matched exactly): each node has a degree drawn from a power law with the
structural cut-off ``sqrt(nodes · degree)`` (Boguñá et al. 2004), a share ``homophily`` of its
stubs is matched within its community, the rest anywhere. A node's features are its community's
mean plus noise, ``noise`` times as large, scaled to variance 1: they hardly separate communities
until they are averaged over neighbours.

Random numbers are numpy's PCG64, one stream per sampled quantity, followed only by integer
arithmetic and correctly rounded operations (the noise is a sum of eight random bytes, not numpy's
normal), so that a seed yields the same graph on every machine.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from raygnn.config.graph import PlantedGraph
from raygnn.graph.arrays import Array, both_directions
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, MASKS, EdgeFrame, GraphData, NodeFrame

VERSION = 1

_BLOCK = 1 << 22  # features sampled at once
_NODE, _EDGE = 64, 52  # peak bytes while sampling, measured with 10 and 50 edges per node
_BYTE_SUM_MEAN, _BYTE_SUM_DEVIATION = 8 * 127.5, math.sqrt(8 * (256**2 - 1) / 12)

# One random stream per sampled quantity, so that a change of one leaves the others unchanged.
_LABELS, _DEGREES, _EDGES, _MEANS, _FEATURES, _SPLIT, _USERS, _PURCHASES = range(8)


def files(graph: PlantedGraph) -> list[Path]:
    """Return no files: the graph depends on its options alone."""
    return []


def reading_bytes(graph: PlantedGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`: features, sampled numbers per node, and the
    edges, whose matching needs several arrays at once. A typed graph needs a little less."""
    return round(graph.nodes * (4 * graph.features + _NODE + graph.degree * _EDGE))


def read(graph: PlantedGraph) -> GraphData:
    """Generate the graph: ``feat`` float32 ``[N, features]``, ``label`` int64, the three masks.

    Edges are undirected (both directions), without self-loops and duplicates; the mean degree
    is within a few percent of ``degree``. With ``typed``, four fifths of the nodes are ``item`` (as
    above) and one fifth ``user`` (half as many features, no labels), with the edge types
    ``(item, also, item)``, ``(user, buys, item)`` and ``(item, bought_by, user)``.
    :mod:`raygnn.config.rules` checks that the nodes suffice for degree, classes and split.
    """
    items = graph.labelled_nodes
    label = _stream(graph, _LABELS).integers(0, graph.classes, items)
    item = NodeFrame(items, {"feat": _features(graph, label, _FEATURES, graph.features)})
    item.data |= {"label": label, **_masks(graph, items, _stream(graph, _SPLIT).permutation(items))}
    also = EdgeFrame(*_edges(graph, label))
    if not graph.typed:
        return GraphData("planted", {DEFAULT_NTYPE: item}, {DEFAULT_ETYPE: also})
    users = graph.nodes - items
    taste = _stream(graph, _USERS).integers(0, graph.classes, users)
    width = max(graph.features // 2, 1)
    user = NodeFrame(users, {"feat": _features(graph, taste, _USERS, width)})
    buyer, bought = _purchases(graph, taste, label)
    buys, back = EdgeFrame(buyer, bought), EdgeFrame(bought.copy(), buyer.copy())
    edges = {
        ("item", "also", "item"): also,
        ("user", "buys", "item"): buys,
        ("item", "bought_by", "user"): back,
    }
    return GraphData("planted", {"item": item, "user": user}, edges)


def _stream(graph: PlantedGraph, thing: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([graph.seed, thing])))


def _masks(graph: PlantedGraph, num: int, order: Array) -> dict[str, Array]:
    """Build the masks; ``order``: the nodes, training nodes first."""
    train, val = int(graph.train * num), int(graph.val * num)
    masks = {name: np.zeros(num, np.bool_) for name in MASKS}
    for mask, chosen in zip(masks.values(), np.split(order, [train, train + val])):
        mask[chosen] = True
    return masks


def _features(graph: PlantedGraph, label: Array, thing: int, width: int) -> Array:
    """Generate float32 ``[len(label), width]``, variance 1: means of ±1 per class under noise."""
    random = _stream(graph, thing)
    signs = _stream(graph, _MEANS).integers(0, 2, (graph.classes, width))
    scale = 1 / math.sqrt(1 + graph.noise**2)
    means = ((2 * signs - 1) * scale).astype(np.float32)
    slope = np.float32(graph.noise * scale / _BYTE_SUM_DEVIATION)
    feat = np.empty((len(label), width), dtype=np.float32)
    rows = max(_BLOCK // width, 1)
    for start in range(0, len(label), rows):
        block = feat[start : start + rows]
        noise = _byte_sums(random, block.size).reshape(block.shape)
        np.multiply(noise, slope, out=block)
        block += means[label[start : start + rows]]
    return feat


def _byte_sums(random: np.random.Generator, count: int) -> Array:
    """Return sums of eight random bytes less their mean, float32 ``[count]``: nearly normal."""
    words = random.integers(0, 2**64, count, dtype=np.uint64)
    lanes = np.uint64(0x00FF00FF00FF00FF)
    words = (words & lanes) + ((words >> np.uint64(8)) & lanes)
    words += words >> np.uint64(32)
    words += words >> np.uint64(16)
    words &= np.uint64(0xFFFF)
    sums = words.astype(np.float32)
    sums -= np.float32(_BYTE_SUM_MEAN)
    return sums


def _edges(graph: PlantedGraph, label: Array) -> tuple[Array, Array]:
    random = _stream(graph, _EDGES)
    num = len(label)
    degrees = _degrees(graph, num)
    order = np.argsort(label, kind="stable")
    communities = np.split(order, np.searchsorted(label[order], np.arange(1, graph.classes)))
    source = target = np.empty(0, dtype=np.int64)
    for _ in range(2):  # the second time for those that were lost as duplicates
        missing = max(1 - len(source) / (graph.degree * num), 0)
        stubs = _round(degrees * missing, random)
        within = _round(stubs * graph.homophily, random)
        pairs = [_match(np.repeat(nodes, within[nodes]), random) for nodes in communities]
        pairs.append(_match(np.repeat(np.arange(num), stubs - within), random))
        fresh = source < target
        a = np.concatenate([source[fresh], *(pair[0] for pair in pairs)])
        b = np.concatenate([target[fresh], *(pair[1] for pair in pairs)])
        del pairs, fresh, source, target
        keep = a != b
        source, target = both_directions(a[keep], b[keep], num)
    return source, target


def _degrees(graph: PlantedGraph, num: int) -> Array:
    """Generate int64 ``[num]`` with the power law's shape and, but for rounding, the given mean."""
    random = _stream(graph, _DEGREES)
    weight = (1 - random.random(num)) ** (-1 / (graph.power - 1))
    # Whole numbers from here on: their sums do not depend on the order of the additions.
    weight = np.minimum(weight, 2.0**20) * 1024 // 1
    cut = int(math.sqrt(num * graph.degree))
    degrees = np.zeros(num)
    scale = graph.degree * num / weight.astype(np.int64).sum()
    for _ in range(8):  # cutting the largest lowers the mean, so the others are scaled up again
        degrees = np.minimum(weight * scale, cut)
        scale *= graph.degree * num / degrees.astype(np.int64).sum()
    return np.minimum(_round(degrees, random), cut)


def _round(values: Array, random: np.random.Generator) -> Array:
    """Round up or down at random such that the mean stays."""
    return np.floor(values + random.random(len(values))).astype(np.int64)


def _match(stubs: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Pair up the stubs at random (an odd one is left over)."""
    random.shuffle(stubs)
    half = len(stubs) // 2
    return stubs[:half], stubs[half : 2 * half]


def _purchases(graph: PlantedGraph, taste: Array, label: Array) -> tuple[Array, Array]:
    """Generate (user, item) pairs, each once: mostly users of the item's own community."""
    random = _stream(graph, _PURCHASES)
    mean = np.full(len(label), min(graph.degree / 5, len(taste) / 4))  # users that buy an item
    item = np.repeat(np.arange(len(label)), _round(mean, random))
    order = np.argsort(taste, kind="stable")
    start = np.searchsorted(taste[order], label[item])
    size = np.searchsorted(taste[order], label[item], side="right") - start
    like = (random.random(len(item)) < graph.homophily) & (size > 0)
    start, size = np.where(like, start, 0), np.where(like, size, len(taste))
    user = order[start + (random.random(len(item)) * size).astype(np.int64) % size]
    keys = np.unique(item * len(taste) + user)
    return keys % len(taste), keys // len(taste)
