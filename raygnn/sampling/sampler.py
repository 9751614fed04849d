"""Neighbour sampling over a partitioned graph.

The sampled neighbours of a node are keyed by (seed, epoch, step, hop, edge type, node), so that the
replicated and the partitioned topology, and any number of workers, give the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import CATEGORY, FEATURES, RELATION, TIME, InEdgeLists, Shard
from raygnn.sampling import drawing, kernels
from raygnn.sampling.batch import Adjacency, Block
from raygnn.sampling.drawing import ALL
from raygnn.sampling.exchange import (
    Exchange,
    Ids,
    Ragged,
    RaggedByRank,
    as_ids,
    exchange_ragged,
    group_by_owner,
    inverse,
    offsets,
)
from raygnn.sampling.plan import Fanout
from raygnn.util.hashing import derive_key, mix

_ALIKE = np.frombuffer(b"", np.float32)  # read-only as weights are, so that one kernel is compiled

Frontier = dict[str, np.ndarray]  # node type → distinct global ids, or pairs of `Bounds`
Draws = dict[EdgeType, Ragged]


@dataclass(frozen=True)
class Timing:
    """Temporal sampling: only edges before a node's time are sampled.

    Attributes:
        latest: sample the latest ones instead of random ones.
        window: largest age of an edge, in the units of the times; None = unlimited.
        ages: blocks have `Block.until`.
    """

    latest: bool = False
    window: int | None = None
    ages: bool = False


@dataclass(frozen=True)
class Bounds:
    """Times of a batch, before which edges must be. A seed's time holds for all hops from it, so
    nodes are reached as pairs of a node and a time: distinct numbers with the index of the time in
    the upper bits and the node in the lower ones.

    Attributes:
        times: int64 ``[T]``, distinct.
        bits: node type → number of bits of a node.
    """

    times: np.ndarray
    bits: Mapping[str, int]

    @staticmethod
    def pair(
        nodes: Mapping[str, np.ndarray], times: Mapping[str, np.ndarray], bits: Mapping[str, int]
    ) -> tuple[Bounds, Frontier]:
        """Pair nodes with times, int64 ``[n]`` each."""
        distinct, place = np.unique(np.concatenate(list(times.values())), return_inverse=True)
        places = np.split(place, np.cumsum([len(values) for values in times.values()])[:-1])
        pairs = {t: (at << bits[t]) | nodes[t] for t, at in zip(times, places)}
        return Bounds(distinct, bits), pairs

    def nodes(self, pairs: Frontier) -> Frontier:
        return {t: numbers & ((1 << self.bits[t]) - 1) for t, numbers in pairs.items()}

    def times_of(self, pairs: Frontier) -> Frontier:
        """Return the times of pairs, by node type."""
        return {t: self.times[numbers >> self.bits[t]] for t, numbers in pairs.items()}

    def sources(self, etype: EdgeType, pairs: np.ndarray, drawn: Ragged) -> np.ndarray:
        """Pair the sources that destinations drew with the destinations' times."""
        source, _, target = etype
        places = (pairs >> self.bits[target]) << self.bits[source]
        numbers: np.ndarray = np.repeat(places, np.diff(drawn.indptr)) | drawn.ids
        return numbers


@dataclass(frozen=True)
class Drawn:
    """Sampled neighbours of a frontier.

    Attributes:
        ids: edge type → sources sampled for each node.
        columns: edge type → arrays of the edges to them that blocks carry, ``[E, …]`` each: see
            `InEdgeLists.carried`.
        excluded: edge type → number of banned edges of each node, int64 ``[n]``.
    """

    ids: Draws
    columns: dict[EdgeType, dict[str, Tensor]]
    excluded: dict[EdgeType, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Banned:
    """Edges that must not be sampled: those from the first to the second node of each pair.

    Attributes:
        pairs: edge type → (source ids, destination ids), int64 ``[n]`` each, on any device.
    """

    pairs: Mapping[EdgeType, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = {}
        for etype, ends in self.pairs.items():
            src, dst = map(as_ids, ends)
            order = np.lexsort((src, dst))
            pairs[etype] = src[order], dst[order]
        object.__setattr__(self, "pairs", pairs)  # sorted once for all hops

    def sources(self, etype: EdgeType, nodes: np.ndarray) -> Ragged:
        """Return the banned sources of each of ``nodes``, ascending."""
        src, dst = self.pairs[etype]
        return Ragged(*drawing.lists_of(dst, src, nodes))


@dataclass(eq=False)
class NeighborSampler:
    """Samples the blocks of a minibatch.

    Attributes:
        shard: this worker's graph; sampling is local if it holds all rows.
        exchange: the data plane's collectives. With a partitioned topology every rank calls
            the sampler the same number of times.
        seed: of the run.
        replace: sample with replacement.
        weighted: sample in proportion to the edges' weights, where the shard has some.
        timing: temporal sampling; times ascend in the shard's lists.
        once: sample the same neighbours of a node at every hop with an equal fanout.
        count_banned: blocks have `Adjacency.excluded`, for models that read degrees.
    """

    shard: Shard
    exchange: Exchange
    seed: int = 0
    replace: bool = False
    weighted: bool = False
    timing: Timing | None = None
    once: bool = False
    count_banned: bool = False

    def __post_init__(self) -> None:
        shard = self.shard
        self._bits = {t: max(1, shard.num_nodes(t)).bit_length() for t in shard.ntypes}
        fits = max(map(shard.num_nodes, shard.ntypes), default=0) < 2**31
        # dtype of transmitted ids and times
        self._wire = np.dtype(np.int32 if fits and self.timing is None else np.int64)
        # equal on all ranks, since the exchanges of a partitioned topology are collective
        self._remote = self.exchange.world.size > 1 and not shard.replicated

    def sample(
        self,
        seeds: Mapping[str, Ids],
        fanouts: Sequence[Fanout],
        *,
        epoch: int,
        step: int,
        banned: Banned | None = None,
        times: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[list[Block], Frontier]:
        """Sample the blocks for ``seeds``, from the input nodes to the seeds.

        Args:
            seeds: node type → int64 ``[B]``, global ids on any device; the last block's
                destinations, in the given order. Distinct; with ``times`` as pairs with these.
            fanouts: neighbours per edge type, from the seeds outward.
            banned: edges that no hop may sample; None on all ranks or on none.
            times: node type → int64 ``[B]``, before which all edges around a seed must be; given
                if and only if there is a `Timing`.

        Returns:
            ``(blocks, input ids per node type)``; with times, ids occur once for each time.
        """
        blocks, frontier, bounds = self._hops(seeds, fanouts, epoch, step, banned, times)
        return blocks, frontier if bounds is None else bounds.nodes(frontier)

    def sample_open(
        self,
        seeds: Mapping[str, Ids],
        fanouts: Sequence[Fanout],
        *,
        epoch: int,
        step: int,
        banned: Banned | None = None,
        times: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[list[Block], Frontier, Draws]:
        """Sample as `sample` does, but leave the last hop as lists of ids.

        For models that only aggregate the input nodes' features: the first block has degrees but no
        sources, which need no numbering.

        Returns:
            ``(blocks, destinations of the first block, their neighbours)``.
        """
        *inner, outer = fanouts
        blocks, frontier, bounds = self._hops(seeds, inner, epoch, step, banned, times)
        key = derive_key(self.seed, epoch, step, len(inner))
        drawn = self._draw(frontier, outer, key, banned, bounds)
        counts = {t: len(ids) for t, ids in frontier.items()}
        nothing = torch.empty(0, dtype=torch.int64)
        adj = {e: _adjacency(drawn, e, nothing) for e in drawn.ids}
        nodes = frontier if bounds is None else bounds.nodes(frontier)
        return [Block(adj, counts, counts), *blocks], nodes, drawn.ids

    def _hops(
        self,
        seeds: Mapping[str, Ids],
        fanouts: Sequence[Fanout],
        epoch: int,
        step: int,
        banned: Banned | None,
        times: Mapping[str, np.ndarray] | None,
    ) -> tuple[list[Block], Frontier, Bounds | None]:
        assert (times is None) == (self.timing is None)
        nobody = np.empty(0, np.int64)
        frontier = {t: as_ids(seeds.get(t, nobody)) for t in self.shard.ntypes}
        bounds = None
        if times is not None:
            given = {t: times.get(t, nobody) for t in frontier}
            bounds, frontier = Bounds.pair(frontier, given, self._bits)
        blocks: list[Block] = []
        for hop, fanout in enumerate(fanouts):
            hop = 0 if self.once else hop
            key = derive_key(self.seed, epoch, step, hop)
            block, frontier = self.hop(frontier, fanout, key, banned, bounds)
            blocks.insert(0, block)
        return blocks, frontier, bounds

    def hop(
        self,
        nodes: Mapping[str, Ids],
        fanout: Fanout,
        key: int = 0,
        banned: Banned | None = None,
        bounds: Bounds | None = None,
    ) -> tuple[Block, Frontier]:
        """Sample one block with the destinations ``nodes`` (pairs, with ``bounds``); return it and
        its source nodes (or pairs)."""
        frontier = {t: as_ids(ids) for t, ids in nodes.items()}
        drawn = self._draw(frontier, fanout, key, banned, bounds)
        draws = drawn.ids
        if bounds is not None:
            pairs = {e: bounds.sources(e, frontier[e[2]], lists) for e, lists in draws.items()}
            draws = {e: Ragged(lists.indptr, pairs[e]) for e, lists in draws.items()}
        adj: dict[EdgeType, Adjacency] = {}
        sources: Frontier = {}
        for ntype, known in frontier.items():
            etypes = [e for e in draws if e[0] == ntype]
            ids = [draws[e].ids for e in etypes]
            joined = ids[0] if len(ids) == 1 else np.concatenate([known[:0], *ids])
            sources[ntype], local = kernels.relabel(known, joined)
            start = 0
            for etype in etypes:
                stop = start + len(draws[etype].ids)
                adj[etype] = _adjacency(drawn, etype, torch.from_numpy(local[start:stop]))
                start = stop
        until: Frontier = {}
        if bounds is not None and self.timing is not None and self.timing.ages:
            until = bounds.times_of(sources)
        block = Block(
            adj={e: adj[e] for e in draws},
            num_src={t: len(ids) for t, ids in sources.items()},
            num_dst={t: len(ids) for t, ids in frontier.items()},
            until={t: torch.from_numpy(times) for t, times in until.items()},
        )
        return block, sources

    def _draw(
        self,
        frontier: Frontier,
        fanout: Fanout,
        key: int,
        banned: Banned | None,
        bounds: Bounds | None,
    ) -> Drawn:
        nodes, times = frontier, None
        if bounds is not None:
            nodes, times = bounds.nodes(frontier), bounds.times_of(frontier)
        bans: Draws = {}
        if banned is not None:
            bans = {e: banned.sources(e, nodes[e[2]]) for e in banned.pairs}
        draw = self._draw_at_owners if self._remote else self._draw_here
        drawn = draw(nodes, fanout, key, bans, times)
        for etype, columns in drawn.columns.items():
            if TIME in columns:
                assert times is not None
                until = np.repeat(times[etype[2]], np.diff(drawn.ids[etype].indptr))
                columns[TIME] = torch.from_numpy(until) - columns[TIME]
        return drawn

    def _draw_here(
        self, nodes: Frontier, fanout: Fanout, key: int, bans: Draws, times: Frontier | None
    ) -> Drawn:
        """Sample for nodes with local rows, from the edges before ``times``."""
        ids: Draws = {}
        columns: dict[EdgeType, dict[str, Tensor]] = {}
        excluded: dict[EdgeType, np.ndarray] = {}
        for number, etype in enumerate(self.shard.etypes):
            chosen = nodes[etype[2]]
            rows = self.shard.topology[etype]
            index, most = chosen - rows.first, fanout[etype]
            whole: tuple[np.ndarray, np.ndarray] = drawing.spans(rows.indptr, index)
            span = whole
            row_keys = rows.keys[index]
            if self.timing is not None and times is not None and rows.times is not None:
                until = times[etype[2]]
                span = _before(self.timing, rows, index, until, most)
                most = ALL if self.timing.latest else most
                row_keys = mix(row_keys.astype(np.uint64) ^ mix(until.astype(np.uint64)))
            lists = drawing.RowLists(*span, rows.src, row_keys)
            keyed = np.uint64(derive_key(key, number))
            how = most, self.replace, keyed, bool(rows.carried)
            weights = rows.weights if self.weighted else None
            if weights is None and etype not in bans:
                drawn = drawing.sample_rows(lists, *how)
            else:
                ban = bans.get(etype) or Ragged.empty(len(chosen))
                weight, alias = weights or (_ALIKE, _ALIKE.view(np.uint64))
                bias = drawing.DrawBias(*whole, weight, alias, ban.indptr, ban.ids)
                drawn = drawing.draw_rows(lists, bias, *how)
            if self.count_banned and etype in bans:
                ban = bans[etype]
                excluded[etype] = drawing.count_banned(*whole, rows.src, ban.indptr, ban.ids)
            indptr, sources, places = drawn
            ids[etype] = Ragged(indptr, sources)
            columns[etype] = {n: _take(c, places) for n, c in rows.carried.items()}
        return Drawn(ids, columns, excluded)

    def _draw_at_owners(
        self, frontier: Frontier, fanout: Fanout, key: int, bans: Draws, times: Frontier | None
    ) -> Drawn:
        """Sample at the owners of the rows: four all-to-alls for any number of edge types."""
        order, cuts = {}, {}
        for ntype, nodes in frontier.items():
            order[ntype], counts = group_by_owner(nodes, self.shard.bounds[ntype])
            cuts[ntype] = offsets(counts)
        questions = [
            RaggedByRank(Ragged.of_one(nodes[order[t]]), cuts[t]) for t, nodes in frontier.items()
        ]
        for t, until in (times or {}).items():
            questions.append(RaggedByRank(Ragged.of_one(until[order[t]]), cuts[t]))
        questions += [RaggedByRank(ban.take(order[e[2]]), cuts[e[2]]) for e, ban in bans.items()]
        asked = exchange_ragged(self.exchange, questions, self._wire)
        rest = iter(asked)
        here = dict(zip(frontier, rest))
        named = {t: lists.lists.ids for t, lists in here.items()}
        limits = times and {t: next(rest).lists.ids for t in times}
        drawn = self._draw_here(
            named, fanout, key, {e: ban.lists for e, ban in zip(bans, rest)}, limits
        )
        answers = [RaggedByRank(lists, here[e[2]].cuts) for e, lists in drawn.ids.items()]
        numbers = [
            RaggedByRank(Ragged.of_one(number), here[e[2]].cuts)
            for e, number in drawn.excluded.items()
        ]
        came = exchange_ragged(self.exchange, [*answers, *numbers], self._wire)
        back = {t: inverse(order[t]) for t in order}
        ids = {e: lists.lists.take(back[e[2]]) for e, lists in zip(drawn.ids, came)}
        rest = iter(came[len(answers) :])
        excluded = {e: next(rest).lists.take(back[e[2]]).ids for e in drawn.excluded}
        return Drawn(ids, self._exchange_columns(drawn, answers, came, back), excluded)

    def _exchange_columns(
        self,
        drawn: Drawn,
        answers: Sequence[RaggedByRank],
        came: Sequence[RaggedByRank],
        back: Mapping[str, np.ndarray],
    ) -> dict[EdgeType, dict[str, Tensor]]:
        """Exchange the arrays of edges that blocks carry, if any: one all-to-all.

        Args:
            drawn: for all ranks; answers: its lists, by edge type.
            came: the lists of this rank's nodes, from their owners; back: node type → the order
                in which they were requested.
        """
        values, send, receive, orders = [], [], [], []
        for etype, given, got in zip(drawn.ids, answers, came):
            if not drawn.columns[etype]:
                continue
            places = Ragged(got.lists.indptr, np.arange(len(got.lists.ids)))
            order = torch.from_numpy(places.take(back[etype[2]]).ids)
            for column in drawn.columns[etype].values():
                values.append(column)
                send.append(np.diff(given.lists.indptr[given.cuts]))
                receive.append(np.diff(got.lists.indptr[got.cuts]))
                orders.append(order)
        if not values:
            return drawn.columns
        columns = self.exchange.columns(values, np.stack(send, 1), np.stack(receive, 1))
        ordered = iter([column.index_select(0, order) for column, order in zip(columns, orders)])
        return {e: {n: next(ordered) for n in named} for e, named in drawn.columns.items()}


def _before(
    timing: Timing, rows: InEdgeLists, index: np.ndarray, until: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the spans of edges that may be sampled; with ``timing.latest`` those sampled."""
    window = -1 if timing.window is None else timing.window
    start, degree = drawing.spans_before(rows.indptr, rows.times, index, until, window)
    if not timing.latest or most == ALL:
        return start, degree
    kept = np.minimum(degree, most)
    return start + degree - kept, kept


def _take(column: Tensor, places: np.ndarray) -> Tensor:
    assert column.is_contiguous()
    out = column.new_empty(len(places), *column.shape[1:])
    if not len(places):  # torch gives an empty numpy array a stride that permits no view
        return out
    width = column.shape[1:].numel() * column.element_size()
    size = math.gcd(width, 8)  # bytes of the widest integers that rows consist of
    words = [t.reshape(-1).view(torch.uint8).numpy().view(f"i{size}") for t in (column, out)]
    kernels.take_words(words[0], width // size, places, words[1])
    return out


def _adjacency(drawn: Drawn, etype: EdgeType, src: Tensor) -> Adjacency:
    """Build an `Adjacency` of sampled edges; ``src``: numbers of their sources."""
    columns = drawn.columns[etype]
    relation, excluded = columns.get(RELATION), drawn.excluded.get(etype)
    return Adjacency(
        torch.from_numpy(drawn.ids[etype].indptr),
        src,
        None if relation is None else relation.long(),
        rows=columns.get(FEATURES),
        elapsed=columns.get(TIME),
        categories={
            name.removeprefix(CATEGORY): numbers.long()
            for name, numbers in columns.items()
            if name.startswith(CATEGORY)
        },
        excluded=None if excluded is None else torch.from_numpy(excluded),
    )
