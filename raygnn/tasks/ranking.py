"""Filtered ranking of links, exact, over all ranks.

Of each edge, once the target and once the source is asked for: all nodes of that type are scored
in its place, those that are known to make an edge are left out (Bordes et al., 2013), and the
rank of the right one counts. Each rank scores the nodes that it owns; scores above and equal are
added up. Equal scores give the mean of the best and the worst rank (Sun et al., "A re-evaluation
of knowledge graph completion methods", ACL 2020).

Shapes: Q queries, K owned nodes, D numbers of a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision

from raygnn.models.decoders import Decoder
from raygnn.sampling.exchange import Exchange, group_by_owner
from raygnn.sampling.negatives import ENDS
from raygnn.sampling.seeds import Edges

_SCORES = 1 << 24  # of a round, on one rank: 64 MiB, and a few times that in passing
_NODES = 1 << 18  # on a device at a time
_HITS = (1, 3, 10)
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
        edges: Edges,
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
    ) -> dict[str, float]:
        """``mrr``, ``hits@1``, ``hits@3`` and ``hits@10``, over both directions.

        Args:
            decoder: in float32 and on ``device``.
            own: int64 ``[n]``, which of the own edges are asked for.
            sources: gives the rows of these edges' sources.
            rows: end → of the owned nodes of its type, float32 ``[K, D]`` on the CPU.

        Returns:
            NaN for all where a row is not finite or a score is none, the same on all ranks.
        """
        exchange = self._exchange
        broken = any(not bool(torch.isfinite(each).all()) for each in rows.values())
        if exchange.max(int(broken)):
            return dict.fromkeys(_RANKS, math.nan)
        most = exchange.max(max(len(each) for each in rows.values()))
        step = max(1, _SCORES // max(1, most * exchange.world.size))
        sums, asked = dict.fromkeys(_RANKS, 0.0), 0
        for number in range(-(-exchange.max(len(own)) // step)):
            some = own[number * step : (number + 1) * step]
            for ranks in self._round(decoder, some, sources(some), rows, device):
                if bool(ranks.isnan().any()):  # on all ranks alike
                    return dict.fromkeys(_RANKS, math.nan)
                asked += len(ranks)
                for name, value in zip(_RANKS, _sums(ranks)):
                    sums[name] += value
        return {name: value / max(1, asked) for name, value in sums.items()}

    def _round(
        self,
        decoder: Decoder,
        own: np.ndarray,
        sources: Tensor,
        rows: Mapping[str, Tensor],
        device: torch.device,
    ) -> list[Tensor]:
        """Ranks, float64 ``[Q]`` for each end, of some edges of all ranks."""
        exchange, edges = self._exchange, self._edges
        first = int(self._bounds["target"][exchange.world.rank])
        targets = rows["target"][torch.from_numpy(edges.dst[own] - first)]
        facts = np.stack([edges.src[own], edges.dst[own], self._relation[own]], axis=1)
        everyones = exchange.gather_rows(torch.from_numpy(facts)).numpy()
        kept = {
            "target": exchange.gather_rows(sources.contiguous()).to(device),
            "source": exchange.gather_rows(targets).to(device),
        }
        relation = torch.from_numpy(np.ascontiguousarray(everyones[:, 2])).to(device)
        found = []
        for column, end in enumerate(ENDS):
            right, other = everyones[:, column], everyones[:, 1 - column]
            blocks = [
                decoder.against(kept[end], some.to(device), relation, end).float().cpu()
                for some in rows[end].split(_NODES)
            ]
            scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
            keys = other * self._relations + everyones[:, 2]
            found.append(self._ranks(scores, right, self._known[end].find(keys), end))
        return found

    def _ranks(
        self, scores: Tensor, right: np.ndarray, known: tuple[np.ndarray, np.ndarray], end: str
    ) -> Tensor:
        """Places of the right nodes, NaN where a score is; ``scores`` ``[Q, K]`` are written to.
        Collective."""
        rank = self._exchange.world.rank
        first, last = self._bounds[end][rank : rank + 2]
        mine = np.flatnonzero((right >= first) & (right < last))
        score = torch.zeros(len(right))
        score[mine] = scores[mine, right[mine] - first]
        score = self._exchange.sum(score).unsqueeze(1)
        scores[known[0], known[1] - first] = -torch.inf
        above = (scores > score).sum(1)
        equal = (scores == score).sum(1)
        # which is above nothing, and nothing above it
        none = (scores.isnan() | score.isnan()).any(1)
        counts = self._exchange.sum(torch.stack([above, equal, none]))
        ranks = 1 + counts[0].double() + counts[1].double() / 2
        return ranks.masked_fill(counts[2] > 0, torch.nan)


def _sums(ranks: Tensor) -> list[float]:
    """Over ranks, of what `_RANKS` are the means of."""
    hits = [(ranks <= limit).sum() for limit in _HITS]
    return [float(value) for value in ((1 / ranks).sum(), *hits)]


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
    sums = torch.tensor(_sums(torch.cat(ranks).double()), dtype=torch.float64)
    asked = len(everyones[0]) * len(ranks)
    means = exchange.sum(sums) / asked
    scored = torch.cat(everyones)
    truth = (torch.arange(len(scored)) < len(everyones[0])).int()
    # their order as numbers from 0 to 1: others torchmetrics takes for what a sigmoid is to be of
    order = torch.unique(scored, return_inverse=True)[1].double()
    precision = binary_average_precision(order / max(1.0, float(order.max())), truth)
    return {**dict(zip(_RANKS, means.tolist())), "average_precision": float(precision)}
