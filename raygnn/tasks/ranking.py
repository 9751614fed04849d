"""Link-prediction metrics: exact filtered ranking over all ranks.

For each edge the target, and then the source, is replaced by every node of its type; nodes that
make a known edge are excluded (Bordes et al., 2013), and the rank of the true node counts. Each
rank scores the nodes that it owns; higher and equal scores are counted over all ranks. Ties give
the mean of the best and the worst rank (Sun et al., "A re-evaluation of knowledge graph completion
methods", ACL 2020).

Metrics per source are computed from the list of the K best targets of each source.

Alternatively each edge is ranked among some candidates, or among one list of negative edges. With
lists of the Open Graph Benchmark (Hu et al., 2020) the metrics equal its evaluator's.

Shapes: Q queries, K owned nodes, D numbers of a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision

from raygnn.graph.staging.shard import SPLIT
from raygnn.models.compiled import keep_best
from raygnn.models.decoders import ROWS, Decoder
from raygnn.sampling.exchange import Exchange, ask_owners, group_by_owner
from raygnn.sampling.negatives import ENDS, KnownEdges, ListedNegatives
from raygnn.sampling.seeds import OwnedEdges
from raygnn.tasks.metrics import score_order
from raygnn.tasks.top import Search, empty_lists, list_metrics, table, top_names, within

_SCORES = 1 << 24  # of a round, on one rank: 64 MiB, and temporarily a few times that
_NODES = 1 << 18  # on a device at a time
_PAIRS = 1 << 16  # pairs of nodes that are compared at a time
_HITS = (1, 3, 10, 20, 50, 100)
_RANKS = ("mrr", *(f"hits@{limit}" for limit in _HITS))

# positions among the owned edges → rows of their sources, on the CPU; collective
Sources = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Candidates:
    """Nodes among which the true one is ranked, instead of all.

    Attributes:
        keys: int64 ``[n]``, a key for the candidates of each ranked edge.
        nodes: keys ``[Q]`` and ends ``[2, Q]`` of edges → end → global ids int64 ``[Q, C]``, the
            same on all ranks. An edge's own ends do not count.
        number: upper limit of C.
        filtered: exclude nodes that make a known edge, too.
    """

    keys: np.ndarray
    nodes: Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]]
    number: int
    filtered: bool


class Ranking:
    """Ranks edges of one type, with 32 bytes for each owned edge, and the scores of a round. The
    constructor and each call are collective.

    Args:
        edges: all known edges of the type, of every split.
        bounds: end → int64 ``[W+1]``, ranges of nodes that ranks own.
        relation: array with the edges' relations; None = they have none.
        relations: number of relations, at least 1.
    """

    def __init__(
        self,
        edges: OwnedEdges,
        bounds: Mapping[str, np.ndarray],
        relation: str | None,
        relations: int,
    ):
        self._edges, self._exchange = edges, edges.exchange
        self._relations, self._bounds = relations, bounds
        num = len(edges.src)
        given = np.zeros(num, np.int64) if relation is None else edges.column(relation)
        self._relation = given.astype(np.int64)
        src, dst, kind = self._to_sources(np.arange(num))
        self._known = {
            "target": KnownEdges.from_edges(edges.src * relations + self._relation, edges.dst),
            "source": KnownEdges.from_edges(dst * relations + kind, src),
        }

    def _to_sources(self, own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return source, target and relation of some owned edges to their sources' owners.
        Collective."""
        exchange, edges = self._exchange, self._edges
        order, send = group_by_owner(edges.src[own], self._bounds["source"])
        given = (edges.src, edges.dst, self._relation)
        columns = [torch.from_numpy(column[own[order]]) for column in given]
        counts = np.repeat(send[:, None], 3, axis=1)
        src, dst, kind = exchange.columns(columns, counts, exchange.counts(counts))
        return src.numpy(), dst.numpy(), kind.numpy()

    @torch.no_grad()
    def metrics(
        self,
        decoder: Decoder,
        own: np.ndarray,
        sources: Sources,
        rows: Mapping[str, Tensor],
        device: torch.device,
        candidates: Candidates | None = None,
        ends: Sequence[str] = ENDS,
    ) -> dict[str, float]:
        """Compute ``mrr`` and ``hits@1`` to ``hits@100``.

        Args:
            decoder: in float32 and on ``device``.
            own: int64 ``[n]``, indices of the owned edges to rank.
            sources: returns the rows of these edges' sources.
            rows: end → rows of the owned nodes of its type, float32 ``[K, D]`` on the CPU.
            candidates: None = all nodes.
            ends: which are replaced, unless candidates say so.

        Returns:
            Metrics; all NaN if a row is not finite or a score is NaN. The same on all ranks.
        """
        exchange = self._exchange
        if self._broken(rows):
            return dict.fromkeys(_RANKS, math.nan)
        most = exchange.max(max(len(each) for each in rows.values()))
        if candidates is not None:
            most = 4 * candidates.number
        step = max(1, _SCORES // max(1, most * exchange.world.size))
        found = [torch.empty(0, dtype=torch.float64)]
        for number in range(-(-exchange.max(len(own)) // step)):
            some = slice(number * step, (number + 1) * step)
            keys = (own if candidates is None else candidates.keys)[some]
            given = own[some], keys, sources(own[some])
            found += self._round(decoder, *given, rows, device, candidates, ends)
        return _means(torch.cat(found))

    @torch.no_grad()
    def metrics_per_source(
        self,
        decoder: Decoder,
        split: int,
        rows: Mapping[str, Tensor],
        device: torch.device,
        tops: Sequence[int],
    ) -> dict[str, float]:
        """Compute ``recall@K``, … of the best targets, averaged over the sources that have edges in
        a split; with relations, over pairs of a source and a relation.

        Targets of edges of earlier splits, or of no split, are not candidates; the other true
        targets of this split are.

        Args:
            decoder, rows, device: see `metrics`.
            split: position in `raygnn.worker.job.SPLITS`.
            tops: each K, ascending.

        Returns:
            The same on all ranks; see `metrics`.
        """
        exchange, edges, relations = self._exchange, self._edges, self._relations
        names = top_names(tops)
        if self._broken(rows):
            return dict.fromkeys(names, math.nan)
        keys, codes = edges.src * relations + self._relation, edges.column(SPLIT)
        earlier, span = codes < split, self._span("target")
        known = KnownEdges.from_edges(keys[earlier], edges.dst[earlier])
        ids = np.arange(*span)
        search = Search(exchange, decoder, ids, rows["target"], span, known, relations, device)
        src, dst, kind = self._to_sources(np.flatnonzero(codes == split))
        pairs = np.unique(np.stack([src * relations + kind, dst], axis=1), axis=0)
        starts = np.unique(pairs[:, 0], return_index=True)[1]
        # A rank up to K is exact from the 2 K best: above and equal ones are fewer than that.
        step = search.step(2 * tops[-1], exchange.world.size)
        total, count, broken = np.zeros(len(names)), 0, False
        for number in range(-(-exchange.max(len(starts)) // step)):
            here = starts[number * step : (number + 1) * step + 1]
            last = len(pairs) if len(here) <= step else here[step]
            some = pairs[here[0] : last] if len(here) else pairs[:0]
            query, ranks, unsure = self._ranks_in_lists(search, some, rows["source"], tops[-1])
            found = list_metrics(query, ranks, tops)
            total, count, broken = total + found.sum(1), count + found.shape[1], broken or unsure
        if broken:
            return dict.fromkeys(names, math.nan)
        return dict(zip(names, (total / max(1, count)).tolist()))

    def _ranks_in_lists(
        self, search: Search, pairs: np.ndarray, rows: Tensor, k: int
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return the queries and ranks of all ranks' pairs, and if a score is NaN. Collective.

        Args:
            pairs: int64 ``[n, 2]``, see `KnownEdges`, sorted: keys of owned sources, and targets.
            rows: of the owned sources.
            k: up to which ranks are exact.
        """
        exchange = self._exchange
        own = np.unique(pairs[:, 0]) // self._relations - self._span("source")[0]
        kept = exchange.gather_rows(rows[torch.from_numpy(own)])
        keys, target = exchange.gather_rows(torch.from_numpy(pairs)).numpy().T
        keys, query = np.unique(keys, return_inverse=True)
        columns, score = search.columns(target), torch.zeros(len(target))
        best, places = empty_lists(len(keys), 2 * k)
        for start, scores in search.blocks(keys, kept):
            mine = within(columns, start, scores.shape[1])
            score[mine] = scores[query[mine], columns[mine] - start].cpu()
            keep_best(scores.cpu().numpy(), start, best, places)
        score, counts = exchange.sum(score), torch.empty(2, len(score), dtype=torch.int64)
        size = max(1, _SCORES // max(1, best.shape[1]))
        for start in range(0, len(score), size):
            part = slice(start, start + size)
            others, one = torch.from_numpy(best[query[part]]), score[part].unsqueeze(1)
            counts[:, part] = torch.stack([(others > one).sum(1), (others == one).sum(1)])
        above, equal = exchange.sum(counts).double().numpy()
        there = (score > -torch.inf).numpy()  # else it is known of an earlier split
        unsure = exchange.max(int(np.isnan(best).any())) > 0
        return query[there], (above + (equal + 1) / 2)[there], unsure

    def _broken(self, rows: Mapping[str, Tensor]) -> bool:
        broken = any(not bool(torch.isfinite(each).all()) for each in rows.values())
        return self._exchange.max(int(broken)) > 0

    def _round(
        self,
        decoder: Decoder,
        own: np.ndarray,
        keys: np.ndarray,
        sources: Tensor,
        rows: Mapping[str, Tensor],
        device: torch.device,
        candidates: Candidates | None,
        ends: Sequence[str],
    ) -> list[Tensor]:
        """Return ranks, float64 ``[Q]`` for each replaced end, of a round of all ranks' edges."""
        exchange, edges = self._exchange, self._edges
        first = self._span("target")[0]
        facts = np.stack([edges.src[own], edges.dst[own], self._relation[own], keys], axis=1)
        gathered = exchange.gather_rows(torch.from_numpy(facts)).numpy()
        relation = torch.from_numpy(np.ascontiguousarray(gathered[:, 2])).to(device)
        found, nodes = [], None
        if candidates is not None:
            nodes = candidates.nodes(gathered[:, 3], gathered[:, :2].T)
        stays = {"target": sources}
        stays["source"] = rows["target"][torch.from_numpy(edges.dst[own] - first)]
        for column, end in enumerate(ENDS):
            if end not in (ends if nodes is None else nodes):
                continue
            right, other = gathered[:, column], gathered[:, 1 - column]
            keys = other * self._relations + gathered[:, 2]
            kept = exchange.gather_rows(stays[end].contiguous()).to(device)
            if candidates is not None and nodes is not None:
                score_of = partial(_scores, decoder, kept, rows[end], relation, end)
                left = keys if candidates.filtered else None
                found.append(self._ranks_among(score_of, right, nodes[end], left, end))
                continue
            largest = int(np.diff(self._bounds[end]).max())  # of any rank: all have one shape
            size = min(_NODES, -(-largest // ROWS) * ROWS)
            blocks = [
                table(decoder, kept, some.to(device), relation, end, size).cpu()
                for some in rows[end].split(size)
            ]
            scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
            low, high = self._span(end)
            mine = np.flatnonzero((right >= low) & (right < high))
            score = torch.zeros(len(right))
            score[mine] = scores[mine, right[mine] - low]
            query, known = self._known[end].find(keys)
            scores[query, known - low] = -torch.inf
            found.append(self._ranks(scores, score))
        return found

    def _ranks(self, scores: Tensor, score: Tensor) -> Tensor:
        """Return the ranks of the true nodes, with ``score [Q]`` on their owners and 0 elsewhere,
        among nodes with ``scores [Q, K]``; NaN if a score is NaN. Collective."""
        score = self._exchange.sum(score).unsqueeze(1)
        # NaN compares as neither above nor equal
        compared = scores > score, scores == score, scores.isnan() | score.isnan()
        counts = self._exchange.sum(torch.stack([each.sum(1) for each in compared]))
        ranks = 1 + counts[0].double() + counts[1].double() / 2
        return ranks.masked_fill(counts[2] > 0, torch.nan)

    def _ranks_among(
        self,
        score_of: Callable[[np.ndarray, np.ndarray], Tensor],
        right: np.ndarray,
        nodes: np.ndarray,
        keys: np.ndarray | None,
        end: str,
    ) -> Tensor:
        """Return `_ranks` among ``nodes [Q, C]``.

        Args:
            score_of: numbers of queries, indices of owned nodes → scores.
            keys: see `KnownEdges`, to exclude nodes; None = exclude none.
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
        first, last = self._bounds[end][self._exchange.world.rank :][:2]
        return int(first), int(last)

    def _are_known(
        self, end: str, keys: np.ndarray, query: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Return which pairs of a query with ``keys`` and an owned node are known, bool ``[n]``."""
        first, last = self._span(end)
        asked, nodes = self._known[end].find(keys)
        return np.isin(query * (last - first) + local, asked * (last - first) + nodes - first)

    def check_absent(self, listed: ListedNegatives) -> None:
        """Raise if a list of negatives contains an existing edge. Collective."""
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
                if lists.pairs is None:  # lists are padded with the edge's own node
                    mine &= nodes != ends[column][:, None]
                query, at = np.nonzero(mine)
                keys = ends[1 - column] * self._relations
                keys += 0 if lists.relation is None else lists.relation[rows]
                known = self._are_known(end, keys, query, nodes[query, at] - first)
                bad = min([bad, *(query[known][:1] + start)])
        bad = count - self._exchange.max(count - int(bad))
        if bad < count:
            message = "it lists an edge that the graph has"
            raise lists.error(message, "remove the true edges of all splits", bad)

    @torch.no_grad()
    def metrics_among(
        self,
        decoder: Decoder,
        own: np.ndarray,
        pairs: np.ndarray,
        rows: Mapping[str, Tensor],
        device: torch.device,
    ) -> dict[str, float]:
        """Compute `metrics` of each edge among the same negative edges, ``pairs [2, M]``. An edge
        is a hit if its score is above the k-th best of these scores, as in OGB."""
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
        """Return scores float32 ``[n]`` of edges ``[2, n]`` without relations, whose targets are
        owned. Collective."""
        (source, _), (target, _) = (self._span(end) for end in ENDS)
        ids, place = np.unique(ends[0], return_inverse=True)
        bounds, answer = self._bounds["source"], lambda own: [rows["source"][own - source]]
        (kept,) = ask_owners(ids, bounds, self._exchange, answer)
        return _scores(
            decoder, kept.to(device), rows["target"], None, "target", place, ends[1] - target
        )


def _scores(
    decoder: Decoder,
    kept: Tensor,
    rows: Tensor,
    relation: Tensor | None,
    end: str,
    query: np.ndarray,
    node: np.ndarray,
) -> Tensor:
    """Return scores float32 ``[n]``, on the CPU, of rows of ``kept`` with ``node`` at ``end``."""
    scores = [torch.empty(0)]
    for start in range(0, len(query), _PAIRS):
        some = slice(start, start + _PAIRS)
        q = torch.from_numpy(query[some]).to(kept.device)
        nodes = rows[torch.from_numpy(node[some])].to(kept.device)
        ends = (nodes, kept[q]) if end == "source" else (kept[q], nodes)
        kinds = None if relation is None else relation[q]
        scores.append(decoder.scores(*ends, kinds).float().cpu())
    return torch.cat(scores)


def _means(ranks: Tensor, places: Tensor | None = None) -> dict[str, float]:
    """Return the metrics of ranks float64 ``[n]``, independent of their order; NaN if one is, 0
    without ranks. ``places``: decide about hits instead of the ranks."""
    if bool(ranks.isnan().any()):
        return dict.fromkeys(_RANKS, math.nan)
    asked, places = max(1, len(ranks)), ranks if places is None else places
    hits = [float((places <= limit).sum()) / asked for limit in _HITS]
    return dict(zip(_RANKS, (float((1 / ranks.sort().values).sum()) / asked, *hits)))


def ranked_among_drawn(
    there: Tensor, absent: Sequence[Tensor], counts: Sequence[Tensor], exchange: Exchange
) -> dict[str, float]:
    """Compute the metrics of `Ranking.metrics` among the negatives sampled for each edge, and
    ``average_precision`` of edges among all negatives. Collective.

    Args:
        there, absent, counts: scores of this rank's edges ``[n]``, and for each replaced end scores
            ``[n, K]`` and which of them count; see `LinkModel.decode`.

    Returns:
        Metrics; all NaN if a score is NaN. The same on all ranks.
    """
    scores = [there, *(other[counted] for other, counted in zip(absent, counts))]
    gathered = [exchange.gather_rows(some.float().cpu()) for some in scores]
    if any(bool(some.isnan().any()) for some in gathered) or not len(gathered[0]):
        return dict.fromkeys((*_RANKS, "average_precision"), math.nan)
    ranks = [1 + ranked_above(there, other, counted) for other, counted in zip(absent, counts)]
    means = _means(exchange.gather_rows(torch.cat(ranks).cpu()))
    scored = torch.cat(gathered)
    truth = (torch.arange(len(scored)) < len(gathered[0])).int()
    precision = binary_average_precision(score_order(scored), truth)
    return {**means, "average_precision": float(precision)}


def ranked_above(there: Tensor, absent: Tensor, counted: Tensor) -> Tensor:
    """Return how many negatives are ranked above each edge, float64 ``[n]``: half of those with an
    equal score; NaN if a score is NaN. Arguments: see `ranked_among_drawn`."""
    own = there.unsqueeze(1)
    above, equal = (((other(absent, own)) & counted).sum(1) for other in (torch.gt, torch.eq))
    broken = (absent.isnan() & counted).any(1) | there.isnan()
    return (above + equal.double() / 2).masked_fill(broken, torch.nan)


def metrics_of_ranks(ranks: Tensor, total: int, exchange: Exchange) -> dict[str, float]:
    """Compute the metrics of `Ranking.metrics` from this rank's ranks of edges, float64 ``[n]``.
    Collective.

    Args:
        total: number of edges of all ranks; if fewer were ranked, at random, then also
            ``mrr_error``, the standard error of ``mrr``.
    """
    gathered = exchange.gather_rows(ranks)
    metrics, num = _means(gathered), len(gathered)
    if num < total:
        spread = float((1 / gathered).sort().values.std())
        metrics["mrr_error"] = spread * math.sqrt((1 - num / total) / num)
    return metrics


def metrics_of_lists(
    asked: Tensor, ranks: Tensor, tops: Sequence[int], exchange: Exchange
) -> dict[str, float]:
    """Compute the metrics of `Ranking.metrics_per_source`, averaged over sources, relations and
    times. Collective. ``asked``: source, relation, time and target of this rank's edges, int64
    ``[n, 4]``; ``ranks``: rank of each target among the untrue ones, float64 ``[n]``."""
    names = top_names(tops)
    gathered = exchange.gather_rows(ranks).numpy()
    if np.isnan(gathered).any():
        return dict.fromkeys(names, math.nan)
    pairs, first = np.unique(exchange.gather_rows(asked).numpy(), axis=0, return_index=True)
    query = np.unique(pairs[:, :3], axis=0, return_inverse=True)[1].ravel()
    order = np.lexsort((gathered[first], query))
    query = query[order]
    above = np.arange(len(query)) - np.searchsorted(query, query)  # other true targets
    found = list_metrics(query, gathered[first][order] + above, tops)
    return dict(zip(names, found.mean(1).tolist()))
