"""Best targets of sources: the search behind recommendations and metrics per source.

Each rank scores the candidates that it owns against the sources of a round, which come from all
ranks, in blocks, and keeps the best of each source.

Shapes: Q queries, a source and a relation each; C owned candidates; K best of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raygnn.config.task import TOP_METRICS
from raygnn.models.compiled import keep_best
from raygnn.models.decoders import ROWS, Decoder
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.negatives import KnownEdges

_BLOCK = 1 << 12  # candidates that are scored at a time
_AT_ONCE = 1 << 10  # queries of a round, of all ranks
_VALUES = 1 << 24  # of the lists of a round
# Products have multiples of _ROWS queries and ROWS nodes: for other shapes BLAS computes some rows
# and columns with other kernels, so that equal nodes would get unequal scores.
_ROWS = 16


def table(
    decoder: Decoder, kept: Tensor, nodes: Tensor, relation: Tensor, end: str, size: int
) -> Tensor:
    """Return scores float32 ``[Q, n]`` of ``n`` nodes, at most ``size``, at ``end`` of edges."""
    more = -len(kept) % _ROWS
    queries, kinds = F.pad(kept, (0, 0, 0, more)), F.pad(relation, (0, more))
    others = F.pad(nodes, (0, 0, 0, size - len(nodes)))
    scores = decoder.against(queries, others, kinds, end)
    return scores[: len(kept), : len(nodes)].float()


class Search:
    """Scores this rank's candidates against queries of all ranks. The constructor is collective.

    Args:
        decoder: in float32 and on ``device``.
        ids: int64 ``[C]``, owned candidates, global; of equal ones the first is the best.
        rows: their rows, float32 ``[C, D]`` on the CPU.
        span: the first node that this rank owns, and the one after its last.
        known: edges whose targets are not candidates.
        relations: their number, at least 1.
    """

    def __init__(
        self,
        exchange: Exchange,
        decoder: Decoder,
        ids: np.ndarray,
        rows: Tensor,
        span: tuple[int, int],
        known: KnownEdges,
        relations: int,
        device: torch.device,
    ):
        self._exchange, self._decoder, self._rows, self._device = exchange, decoder, rows, device
        self._known, self._relations, self._span = known, relations, span
        self.most = exchange.max(len(ids))
        self._size = max(ROWS, min(_BLOCK, -(-self.most // ROWS) * ROWS))
        self._column = np.full(span[1] - span[0], -1)
        self._column[ids - span[0]] = np.arange(len(ids))

    def step(self, k: int, workers: int) -> int:
        """Return the number of queries of each rank in a round with lists of ``k``."""
        return max(1, min(_AT_ONCE, _VALUES // max(1, min(k, self.most))) // workers)

    @torch.no_grad()
    def lists(
        self, keys: np.ndarray, kept: Tensor, k: int, names: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best candidates of all ranks for this rank's queries: scores float32
        ``[Q, n]``, descending, and names int64 ``[Q, n]``, ascending among equal scores, n at most
        ``k``; -inf and -1 where a list has no more; NaN leads. Collective.

        Args:
            keys, kept: see `blocks`; of this rank.
            names: int64 ``[C]`` of this rank's candidates, ascending.
        """
        exchange, world = self._exchange, self._exchange.world.size
        count = exchange.gather_rows(torch.tensor([len(keys)]))
        gathered = exchange.gather_rows(torch.from_numpy(keys)).numpy()
        width = max(1, min(k, self.most))
        best, columns = empty_lists(len(gathered), width)
        for start, scores in self.blocks(gathered, exchange.gather_rows(kept)):
            keep_best(scores.cpu().numpy(), start, best, columns)
        named = np.append(names, -1)[columns]
        send = np.repeat(count.numpy()[:, None], 2, axis=1)
        given = torch.from_numpy(best), torch.from_numpy(named)
        came = exchange.columns(given, send, exchange.counts(send))
        # lists of all ranks side by side
        found, named = (
            c.numpy().reshape(world, -1, width).swapaxes(0, 1).reshape(-1, world * width)
            for c in came
        )
        order = np.lexsort((named, np.nan_to_num(-found, nan=-np.inf)))[:, :k]
        return np.take_along_axis(found, order, 1), np.take_along_axis(named, order, 1)

    def columns(self, nodes: np.ndarray) -> np.ndarray:
        """Return the columns of nodes ``[n]``; -1 if this rank has no such candidate."""
        first, last = self._span
        owned = (nodes >= first) & (nodes < last)
        columns = np.full(len(nodes), -1)
        columns[owned] = self._column[nodes[owned] - first]
        return columns

    def blocks(self, keys: np.ndarray, kept: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the first column and the scores ``[Q, n]`` of blocks of candidates; -inf for known
        edges. ``keys``: int64 ``[Q]``, see `KnownEdges`; ``kept``: rows of the sources,
        ``[Q, D]``."""
        kept = kept.to(self._device)
        relation = torch.from_numpy(keys % self._relations).to(self._device)
        query, nodes = self._known.find(keys)
        columns = self.columns(nodes)
        for start in range(0, len(self._rows), self._size):
            some = self._rows[start : start + self._size].to(self._device)
            scores = table(self._decoder, kept, some, relation, "target", self._size)
            inside = within(columns, start, len(some))
            scores[query[inside], columns[inside] - start] = -torch.inf
            yield start, scores


def empty_lists(queries: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lists for `keep_best`."""
    return np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1)


def within(columns: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return which columns are in a block, as positions int64 ``[n]``."""
    return np.flatnonzero((columns >= start) & (columns < start + count))


def top_names(tops: Sequence[int]) -> list[str]:
    """Return the names of `list_metrics`."""
    return [f"{name}@{k}" for k in tops for name in TOP_METRICS]


def list_metrics(query: np.ndarray, ranks: np.ndarray, tops: Sequence[int]) -> np.ndarray:
    """Return the metrics of `top_names` for each query, float64 ``[M, Q]``.

    Args:
        query: int64 ``[n]``, a number of the query of each true target.
        ranks: float64 ``[n]``, of the true targets; those above the largest of ``tops`` may be any.
    """
    _, query, num = np.unique(query, return_inverse=True, return_counts=True)
    sizes = len(num)
    code = query * int(2 * ranks.max(initial=0) + 1) + (2 * ranks).astype(np.int64)
    ordered = np.sort(code)
    low, high = (np.searchsorted(ordered, code, side=side) for side in ("left", "right"))
    place = (low + high + 1) / 2 - (np.cumsum(num) - num)[query]  # among the query's own targets
    gains = np.cumsum(1 / np.log2(np.arange(num.max(initial=0)) + 2))
    found = []
    for k in tops:
        hit, most = ranks <= k, np.minimum(num, k)
        each = hit, hit / np.log2(1 + ranks), hit * place / ranks
        hits, gain, precise = (np.bincount(query, values, sizes) for values in each)
        found += [hits / num, gain / gains[most - 1], precise / most, hits / k, hits > 0]
    return np.array(found, np.float64).reshape(len(found), sizes)
