"""Filtered ranking of links, exact, over all ranks.

Of each edge, once the target and once the source is asked for: all nodes of that type are scored
in its place, those that are known to make an edge are left out (Bordes et al., 2013), and the
rank of the right one counts. Each rank scores the nodes that it owns; scores above and equal are
added up. Equal scores give the mean of the best and the worst rank (Sun et al., "A re-evaluation
of knowledge graph completion methods", ACL 2020).

In place of all nodes, some can be scored for each edge, or a list of edges that are not there for
all; with lists of the Open Graph Benchmark's (Hu et al., 2020) the metrics are its evaluator's.

Shapes: Q queries, K owned nodes, D numbers of a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision

from raygnn.models.decoders import Decoder
from raygnn.sampling.exchange import Exchange, ask_owners, group_by_owner
from raygnn.sampling.negatives import ENDS, ListedNegatives
from raygnn.sampling.seeds import OwnedEdges
from raygnn.tasks.metrics import score_order

_SCORES = 1 << 24  # of a round, on one rank: 64 MiB, and a few times that in passing
_NODES = 1 << 18  # on a device at a time
_PAIRS = 1 << 16  # of nodes that are compared at a time
# Products are of multiples of so many queries, and of so many nodes: for other shapes BLAS computes
# some rows and columns by other kernels, so that equal nodes would get unequal scores.
_QUERIES, _ROWS = 16, 512
_HITS = (1, 3, 10, 20, 50, 100)
_RANKS = ("mrr", *(f"hits@{limit}" for limit in _HITS))

# positions among the own edges → rows of their sources, on the CPU; collective
Sources = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Known:
    """The owned nodes that are known to make an edge with a node and a relation.

    Attributes:
        keys: int64 ``[E]``, sorted: node · R + relation, for R relations.
        nodes: int64 ``[E]``.
    """

    keys: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, nodes: np.ndarray) -> Known:
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], nodes[order])

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of a query's number and a node, for queries ``[Q]``."""
        low = np.searchsorted(self.keys, keys, side="left")
        count = np.searchsorted(self.keys, keys, side="right") - low
        query = np.repeat(np.arange(len(keys)), count)
        within = np.arange(len(query)) - np.repeat(np.cumsum(count) - count, count)
        return query, self.nodes[np.repeat(low, count) + within]


@dataclass(frozen=True)
class Candidates:
    """Nodes among which the right one is ranked, in place of all.

    Attributes:
        keys: int64 ``[n]``, what tells for each of the edges to rank which nodes they are.
        nodes: keys ``[Q]`` and ends ``[2, Q]`` of edges → end → global ids int64 ``[Q, C]``, on
            all ranks alike. Those that an edge ends at anyway do not count.
        number: C, at most.
        filtered: whether those do not count either that are known to make an edge.
    """

    keys: np.ndarray
    nodes: Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]]
    number: int
    filtered: bool


class Ranking:
    """Ranks edges of one type. Collective to make, and each call.

    Memory: 32 bytes for each own edge, besides the scores of a round.

    Args:
        edges: all of the type, of every split: those that are known.
        bounds: end → int64 ``[W+1]``, who owns which nodes.
        relation: the array with the edges' relations; None = they have none.
        relations: how many there are, at least 1.
    """

    def __init__(
        self,
        edges: OwnedEdges,
        bounds: Mapping[str, np.ndarray],
        relation: str | None,
        relations: int,
    ):
        self._edges = edges
        self._exchange = edges.exchange
        self._relations = relations
        self._bounds = bounds
        num = len(edges.src)
        given = np.zeros(num, np.int64) if relation is None else edges.column(relation)
        self._relation = given.astype(np.int64)
        src, dst, kind = self._to_sources()
        self._known = {
            "target": Known.of(edges.src * relations + self._relation, edges.dst),
            "source": Known.of(dst * relations + kind, src),
        }

    def _to_sources(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, target and relation of the edges whose sources are owned. Collective."""
        exchange, bounds = self._exchange, self._bounds["source"]
        order, send = group_by_owner(self._edges.src, bounds)
        columns = [
            torch.from_numpy(column[order])
            for column in (self._edges.src, self._edges.dst, self._relation)
        ]
        counts = np.repeat(send[:, None], 3, axis=1)
        came = exchange.columns(columns, counts, exchange.counts(counts))
        src, dst, kind = (column.numpy() for column in came)
        return src, dst, kind

    @torch.no_grad()
    def metrics(
        self,
        decoder: Decoder,
        own: np.ndarray,
        sources: Sources,
        rows: Mapping[str, Tensor],
        device: torch.device,
        candidates: Candidates | None = None,
    ) -> dict[str, float]:
        """``mrr`` and ``hits@1`` to ``hits@100``, over both directions, or those of candidates.

        Args:
            decoder: in float32 and on ``device``.
            own: int64 ``[n]``, which of the own edges are asked for.
            sources: gives the rows of these edges' sources.
            rows: end → of the owned nodes of its type, float32 ``[K, D]`` on the CPU.
            candidates: None = all nodes.

        Returns:
            NaN for all where a row is not finite or a score is none, the same on all ranks.
        """
        exchange = self._exchange
        if self._broken(rows):
            return dict.fromkeys(_RANKS, math.nan)
        most = exchange.max(max(len(each) for each in rows.values()))
        if candidates is not None:
            most = 4 * candidates.number
        step = max(1, _SCORES // max(1, most * exchange.world.size))
        found, among = [torch.empty(0, dtype=torch.float64)], candidates
        for number in range(-(-exchange.max(len(own)) // step)):
            some = own[number * step : (number + 1) * step]
            if candidates is not None:
                among = replace(candidates, keys=candidates.keys[number * step :][: len(some)])
            found += self._round(decoder, some, sources(some), rows, device, among)
        return _means(torch.cat(found))

    def _broken(self, rows: Mapping[str, Tensor]) -> bool:
        broken = any(not bool(torch.isfinite(each).all()) for each in rows.values())
        return self._exchange.max(int(broken)) > 0

    def _round(
        self,
        decoder: Decoder,
        own: np.ndarray,
        sources: Tensor,
        rows: Mapping[str, Tensor],
        device: torch.device,
        candidates: Candidates | None,
    ) -> list[Tensor]:
        """Ranks, float64 ``[Q]`` for each end, of some edges of all ranks."""
        exchange, edges = self._exchange, self._edges
        first = int(self._bounds["target"][exchange.world.rank])
        targets = rows["target"][torch.from_numpy(edges.dst[own] - first)]
        keys = own if candidates is None else candidates.keys
        facts = np.stack([edges.src[own], edges.dst[own], self._relation[own], keys], axis=1)
        everyones = exchange.gather_rows(torch.from_numpy(facts)).numpy()
        kept = {
            "target": exchange.gather_rows(sources.contiguous()).to(device),
            "source": exchange.gather_rows(targets).to(device),
        }
        relation = torch.from_numpy(np.ascontiguousarray(everyones[:, 2])).to(device)
        found, nodes = [], None
        if candidates is not None:
            nodes = candidates.nodes(everyones[:, 3], everyones[:, :2].T)
        for column, end in enumerate(ENDS):
            right, other = everyones[:, column], everyones[:, 1 - column]
            keys = other * self._relations + everyones[:, 2]
            if candidates is not None and nodes is not None:
                if end in nodes:
                    score_of = partial(_scores, decoder, kept[end], rows[end], relation, end)
                    left = keys if candidates.filtered else None
                    found.append(self._ranks_among(score_of, right, nodes[end], left, end))
                continue
            largest = int(np.diff(self._bounds[end]).max())  # of any rank: all have one shape
            size = min(_NODES, -(-largest // _ROWS) * _ROWS)
            blocks = [
                _table(decoder, kept[end], some.to(device), relation, end, size)
                for some in rows[end].split(size)
            ]
            scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
            found.append(self._ranks_of_all(scores, right, self._known[end].find(keys), end))
        return found

    def _ranks(self, scores: Tensor, score: Tensor) -> Tensor:
        """Places of the right nodes, with these scores ``[Q]`` on their owners and 0 elsewhere,
        among nodes with ``scores`` ``[Q, K]``, NaN where one is. Collective."""
        score = self._exchange.sum(score).unsqueeze(1)
        above = (scores > score).sum(1)
        equal = (scores == score).sum(1)
        # which is above nothing, and nothing above it
        none = (scores.isnan() | score.isnan()).any(1)
        counts = self._exchange.sum(torch.stack([above, equal, none]))
        ranks = 1 + counts[0].double() + counts[1].double() / 2
        return ranks.masked_fill(counts[2] > 0, torch.nan)

    def _ranks_of_all(
        self, scores: Tensor, right: np.ndarray, known: tuple[np.ndarray, np.ndarray], end: str
    ) -> Tensor:
        """As `_ranks`, of scores of all own nodes, which are written to."""
        first, last = self._span(end)
        mine = np.flatnonzero((right >= first) & (right < last))
        score = torch.zeros(len(right))
        score[mine] = scores[mine, right[mine] - first]
        scores[known[0], known[1] - first] = -torch.inf
        return self._ranks(scores, score)

    def _ranks_among(
        self,
        score_of: Callable[[np.ndarray, np.ndarray], Tensor],
        right: np.ndarray,
        nodes: np.ndarray,
        keys: np.ndarray | None,
        end: str,
    ) -> Tensor:
        """As `_ranks`, among ``nodes`` ``[Q, C]``.

        Args:
            score_of: scores of queries, by their numbers, with own nodes, by their places.
            keys: see `Known`, of what leaves out nodes; None = nothing does.
        """
        first, last = self._span(end)
        nodes = np.concatenate([right[:, None], nodes], axis=1)
        owned = (nodes >= first) & (nodes < last)
        owned[:, 1:] &= nodes[:, 1:] != right[:, None]
        query, at = np.nonzero(owned)
        local = nodes[query, at] - first
        if keys is not None:
            left = (at == 0) | ~self._are_known(end, keys, query, local)
            query, at, local = query[left], at[left], local[left]
        scores = torch.full(nodes.shape, -torch.inf)
        scores[query, at] = score_of(query, local)
        score = scores[:, 0].masked_fill(torch.from_numpy(~owned[:, 0]), 0)
        return self._ranks(scores[:, 1:], score)

    def _span(self, end: str) -> tuple[int, int]:
        """The owned nodes, from the first to behind the last."""
        first, last = self._bounds[end][self._exchange.world.rank :][:2]
        return int(first), int(last)

    def _are_known(
        self, end: str, keys: np.ndarray, query: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Which pairs of a query, with these keys, and an owned node are known, bool ``[n]``."""
        first, last = self._span(end)
        asked, nodes = self._known[end].find(keys)
        return np.isin(query * (last - first) + local, asked * (last - first) + nodes - first)

    def check_absent(self, listed: ListedNegatives) -> None:
        """Refuse lists of negatives in which an edge is that is there. Collective."""
        lists, both = listed.lists, listed.global_ids()
        bad = count = both.shape[1]
        size = max(1, _SCORES // listed.width)
        for start in range(0, count, size):
            rows = np.arange(start, min(start + size, count))
            ends = both[:, rows]
            others = listed.nodes(rows, ends) or {"target": ends[1][:, None]}
            for end, nodes in others.items():
                column, (first, last) = ENDS.index(end), self._span(end)
                mine = (nodes >= first) & (nodes < last)
                if lists.pairs is None:  # what fills up a list is no part of it
                    mine &= nodes != ends[column][:, None]
                query, at = np.nonzero(mine)
                keys = ends[1 - column] * self._relations
                keys += 0 if lists.relation is None else lists.relation[rows]
                known = self._are_known(end, keys, query, nodes[query, at] - first)
                bad = min([bad, *(query[known][:1] + start)])
        bad = count - self._exchange.max(count - int(bad))
        if bad < count:
            message = "there is an edge in it that the graph has"
            raise lists.error(message, "leave out what is true, in any split", bad)

    @torch.no_grad()
    def metrics_among(
        self,
        decoder: Decoder,
        own: np.ndarray,
        pairs: np.ndarray,
        rows: Mapping[str, Tensor],
        device: torch.device,
    ) -> dict[str, float]:
        """As `metrics`, each edge among the same edges that are not there, ``pairs`` ``[2, M]``.

        An edge is a hit where its score is above that of the k-th best of these, as OGB has it, so
        that equal scores are none.
        """
        edges, exchange = self._edges, self._exchange
        first, last = self._span("target")
        mine = pairs[:, (pairs[1] >= first) & (pairs[1] < last)]
        ends = mine, np.stack([edges.src[own], edges.dst[own]])
        others, scores = (self._scores(decoder, each, rows, device) for each in ends)
        others, scores = exchange.gather_rows(others).sort().values, exchange.gather_rows(scores)
        if self._broken(rows) or bool(others.isnan().any() or scores.isnan().any()):
            return dict.fromkeys(_RANKS, math.nan)
        above, reached = (
            len(others) - torch.searchsorted(others, scores, right=right) for right in (True, False)
        )
        return _means(1 + (above + reached).double() / 2, 1 + reached)

    def _scores(
        self, decoder: Decoder, ends: np.ndarray, rows: Mapping[str, Tensor], device: torch.device
    ) -> Tensor:
        """Scores float32 ``[n]`` of edges ``[2, n]`` without relations whose targets are owned.
        Collective."""
        (source, _), (target, _) = (self._span(end) for end in ENDS)
        ids, place = np.unique(ends[0], return_inverse=True)
        bounds, answer = self._bounds["source"], lambda own: [rows["source"][own - source]]
        (kept,) = ask_owners(ids, bounds, self._exchange, answer)
        return _scores(
            decoder, kept.to(device), rows["target"], None, "target", place, ends[1] - target
        )


def _table(
    decoder: Decoder, kept: Tensor, nodes: Tensor, relation: Tensor, end: str, size: int
) -> Tensor:
    """Return scores float32 ``[Q, K]``, on the CPU, of all queries with at most ``size`` nodes."""
    more = -len(kept) % _QUERIES
    queries, kinds = F.pad(kept, (0, 0, 0, more)), F.pad(relation, (0, more))
    others = F.pad(nodes, (0, 0, 0, size - len(nodes)))
    scores = decoder.against(queries, others, kinds, end)
    return scores[: len(kept), : len(nodes)].float().cpu()


def _scores(
    decoder: Decoder,
    kept: Tensor,
    rows: Tensor,
    relation: Tensor | None,
    end: str,
    query: np.ndarray,
    node: np.ndarray,
) -> Tensor:
    """Scores float32 ``[n]``, on the CPU, of single rows of ``kept``, on a device, with single ones
    of the nodes at ``end``."""
    scores = [torch.empty(0)]
    for start in range(0, len(query), _PAIRS):
        num = len(query[start : start + _PAIRS])
        some, more = slice(start, start + num), (0, -num % _ROWS)
        q = torch.from_numpy(np.pad(query[some], more)).to(kept.device)
        nodes = rows[torch.from_numpy(np.pad(node[some], more))].to(kept.device)
        ends = (nodes, kept[q]) if end == "source" else (kept[q], nodes)
        kinds = None if relation is None else relation[q]
        scores.append(decoder(*ends, kinds).flatten()[:num].float().cpu())
    return torch.cat(scores)


def _means(ranks: Tensor, places: Tensor | None = None) -> dict[str, float]:
    """The metrics of ranks float64 ``[n]``, in whatever order they come; NaN where one is. None has
    0.

    Args:
        places: what makes a hit, where these are not the ranks.
    """
    if bool(ranks.isnan().any()):
        return dict.fromkeys(_RANKS, math.nan)
    asked, places = max(1, len(ranks)), ranks if places is None else places
    hits = [float((places <= limit).sum()) / asked for limit in _HITS]
    return dict(zip(_RANKS, (float((1 / ranks.sort().values).sum()) / asked, *hits)))


def ranked_among_drawn(
    there: Tensor, absent: Sequence[Tensor], counts: Sequence[Tensor], exchange: Exchange
) -> dict[str, float]:
    """As `Ranking.metrics`, of each edge among some nodes that were drawn for it; and
    ``average_precision`` of edges among all that are not there. Collective.

    Args:
        there, absent, counts: scores of this rank's edges ``[n]``, and for each end that was
            replaced scores ``[n, K]`` and which of them count; see `LinkModel.decode`.

    Returns:
        NaN for all where a score is none, the same on all ranks.
    """
    scores = [there, *(other[counted] for other, counted in zip(absent, counts))]
    everyones = [exchange.gather_rows(some.float().cpu()) for some in scores]
    if any(bool(some.isnan().any()) for some in everyones) or not len(everyones[0]):
        return dict.fromkeys((*_RANKS, "average_precision"), math.nan)
    ranks = [
        1 + ((other > own) & counted).sum(1) + ((other == own) & counted).sum(1) / 2
        for own in [there.unsqueeze(1)]
        for other, counted in zip(absent, counts)
    ]
    means = _means(exchange.gather_rows(torch.cat(ranks).double().cpu()))
    scored = torch.cat(everyones)
    truth = (torch.arange(len(scored)) < len(everyones[0])).int()
    precision = binary_average_precision(score_order(scored), truth)
    return {**means, "average_precision": float(precision)}
