"""Edges that are not there: nodes that take the place of an edge's source or target.

All edges of a step are told from the same nodes (as in PBG, Lerer et al., SysML 2019, and DGL-KE,
Zheng et al., SIGIR 2020), so that scores are one matrix product. Which nodes these are is a
function of (seed, epoch, step, end): the same on all ranks, for any number of them and in any
partition, since nodes are drawn by their numbers in the user's graph. Only ``local`` depends on
who owns what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from raygnn.config.task import NegativesConfig
from raygnn.graph.data import NegativeLists
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.exchange import Exchange
from raygnn.util.hashing import derive_key, mix, uniform

End = Literal["source", "target"]
ENDS: tuple[End, End] = ("source", "target")

_POWER = 0.75  # of word2vec (Mikolov et al., NeurIPS 2013)
_PURPOSE = 0x6E6567  # keeps these draws apart from those of neighbours
_RANKED = 0x6576616C  # keeps nodes that edges are ranked among apart from those of training


class Negatives:
    """Draws nodes for a step.

    Args:
        ntypes: end → node type.
        config: ``task.negatives``.
        number: nodes of a draw; None = what ``config`` says. An attribute, too.
        seed: of the run.
        weights: end → int64 ``[N]``, how many training edges have a node there, in the order of
            the user's graph; for ``degree``.
        ids: node type → global ids ``[N]`` in the order of the user's graph; for ``uniform`` and
            ``degree``.
        own: node type → first of this rank's nodes and how many there are; for ``local``.
    """

    def __init__(
        self,
        ntypes: Mapping[End, str],
        config: NegativesConfig,
        seed: int,
        *,
        number: int | None = None,
        weights: Mapping[End, np.ndarray] | None = None,
        ids: Mapping[str, np.ndarray] | None = None,
        own: Mapping[str, tuple[int, int]] | None = None,
    ):
        self._ntypes = ntypes
        self._config = config
        self.number = number or config.number
        self._seed = seed
        self._ids = ids or {}
        self._own = own or {}
        self._sums = {
            end: np.cumsum(w.astype(np.float64) ** _POWER) for end, w in (weights or {}).items()
        }

    @property
    def in_batch(self) -> bool:
        """Whether the ends of all ranks' edges are what is drawn."""
        return self._config.kind == "in_batch"

    def draw(self, epoch: int, step: int, ends: Mapping[End, np.ndarray]) -> dict[str, np.ndarray]:
        """The nodes of a step, as global ids.

        Args:
            ends: of the step's edges, where `in_batch`.

        Returns:
            end → int64 ``[K]``, some perhaps more than once.
        """
        wanted = [end for end in ENDS if self._config.ends in ("both", end)]
        return {end: self._drawn(end, epoch, step, ends[end]) for end in wanted}

    def draw_each(self, epoch: int, step: int, edges: np.ndarray) -> dict[str, np.ndarray]:
        """As `draw`, other nodes for each edge: end → int64 ``[n, number]``.

        Args:
            edges: int64 ``[n]``, their numbers in the user's graph.
        """
        draws = np.arange(self.number).astype(np.uint64)
        keys = mix(edges.astype(np.uint64)).reshape(-1, 1) + draws
        wanted = [end for end in ENDS if self._config.ends in ("both", end)]
        return {end: self._any(end, epoch, step, mix(keys)) for end in wanted}

    def _drawn(self, end: End, epoch: int, step: int, here: np.ndarray) -> np.ndarray:
        if self._config.kind == "in_batch":
            return here
        return self._any(end, epoch, step, np.arange(self.number, dtype=np.uint64))

    def _any(self, end: End, epoch: int, step: int, draws: np.ndarray) -> np.ndarray:
        """A node for each draw, by its number."""
        kind, ntype = self._config.kind, self._ntypes[end]
        key = np.uint64(derive_key(self._seed, epoch, step, _PURPOSE, ENDS.index(end)))
        place = uniform(mix(draws + key))
        if kind == "local":
            first, owned = self._own[ntype]
            return first + (place * owned).astype(np.int64)
        ids = self._ids[ntype]
        if kind == "uniform":
            return ids[(place * len(ids)).astype(np.int64)].astype(np.int64)
        sums = self._sums[end]
        at = np.searchsorted(sums, place * sums[-1], side="right")
        return ids[np.minimum(at, len(ids) - 1)].astype(np.int64)


def make_negatives(
    config: NegativesConfig,
    shard: Shard,
    exchange: Exchange,
    ntypes: Mapping[End, str],
    seed: int,
    ends: Mapping[End, np.ndarray],
    number: int | None = None,
) -> Negatives:
    """What draws them for one edge type. Collective.

    On every rank 4 bytes (8 from 2³¹ nodes on) for each node, and for ``degree`` 8 more.

    Args:
        ends: global ids of this rank's training edges; empty = nodes are to be ranked among.
        number: see `Negatives`.
    """
    seed = seed if ends else derive_key(seed, _RANKED)
    if config.kind == "in_batch":
        return Negatives(ntypes, config, seed)
    if config.kind == "local":
        own = {t: _own(shard, t) for t in ntypes.values()}
        return Negatives(ntypes, config, seed, number=number, own=own)
    ids = {t: _by_original(shard, exchange, t) for t in dict.fromkeys(ntypes.values())}
    weights: dict[End, np.ndarray] = {}
    if config.kind == "degree":
        for end, ntype in ntypes.items():
            counts = np.bincount(ends[end], minlength=shard.num_nodes(ntype))
            weights[end] = exchange.sum(torch.from_numpy(counts)).numpy()[ids[ntype]]
    return Negatives(ntypes, config, seed, number=number, weights=weights, ids=ids)


@dataclass(frozen=True)
class ListedNegatives:
    """Nodes that lists give for some edges, whoever asks.

    Attributes:
        ids: end → global ids ``[N]`` in the order of the user's graph, sources first.
        rows: int64 ``[own]``, which list each of this rank's edges has; -1 = none.
        each: int64 ``[2, n]``, an own edge for each list of such, and the list.
    """

    lists: NegativeLists
    ids: Mapping[End, np.ndarray]
    rows: np.ndarray
    each: np.ndarray

    @property
    def width(self) -> int:
        """Nodes of the longest lists."""
        return max([1, *(nodes.shape[1] for nodes in self.lists.others.values())])

    def global_ids(self) -> np.ndarray:
        """Of the ends of the pairs that all edges have, or else of those that have lists, int64
        ``[2, n]``."""
        given = self.lists.ends if self.lists.pairs is None else self.lists.pairs
        both = zip(self.ids.values(), given)
        return np.stack([ids[nodes] for ids, nodes in both]).astype(np.int64)

    def asked(self, own: np.ndarray) -> np.ndarray:
        """Which of the own edges ``own`` are to be ranked, and their lists, int64 ``[2, n]``: those
        that have one; of a dataset's lists each once, as it is counted there."""
        if not self.lists.digest:
            return self.each
        own = own[self.rows[own] >= 0]
        return np.stack([own, self.rows[own]])

    def check_all_have(self, own: np.ndarray, edges: Any, exchange: Exchange) -> None:
        """Raises DataError: some of the own edges ``own`` have no list. Collective."""
        bare = own[self.rows[own] < 0]
        one = np.stack([edges.src[bare[:1]], edges.dst[bare[:1]]], 1).astype(np.int64)
        firsts = exchange.gather_rows(torch.from_numpy(one)).numpy()
        if len(firsts):
            num = int(exchange.sum(torch.tensor(len(bare))))
            source, target = (int((i == n).argmax()) for i, n in zip(self.ids.values(), firsts[0]))
            raise self.lists.error(
                f"{num:,} edges to train on have no list, such as that from {source} to {target}, "
                "by their numbers",
                "list some for each, or let negatives.kind draw others",
            )

    def nodes(self, rows: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
        """End → int64 ``[n, K]``, global ids, of edges with these lists and ends ``[2, n]``; the
        edge's own where there is no list."""
        found: dict[str, np.ndarray] = {}
        for end, own in zip(ENDS, ends):
            if end in self.lists.others:
                given = self.ids[end][self.lists.others[end][rows]]
                found[end] = np.where(rows[:, None] < 0, own[:, None], given).astype(np.int64)
        return found


def find_lists(
    lists: NegativeLists,
    shard: Shard,
    exchange: Exchange,
    ntypes: Mapping[End, str],
    edges: Any,
    relation: np.ndarray | None,
) -> ListedNegatives:
    """Which lists the own edges have. Collective; memory as of `make_negatives`.

    Args:
        edges: the `OwnedEdges` of the type.
        relation: int64 ``[own]``, of these edges; None = they have none.

    Raises:
        DataError: a list is of an edge that is not there.
    """
    by_type = {t: _by_original(shard, exchange, t) for t in dict.fromkeys(ntypes.values())}
    ids = {end: by_type[ntype] for end, ntype in ntypes.items()}
    nobody = np.empty((2, 0), np.int64)
    if lists.ends is None:
        return ListedNegatives(lists, ids, np.zeros(len(edges.src), np.int64), nobody)
    src, dst = (ids[end][some].astype(np.int64) for end, some in zip(ENDS, lists.ends))
    first, owned = shard.first(ntypes["target"]), shard.owned(ntypes["target"])
    mine = np.flatnonzero((dst >= first) & (dst < first + owned))
    codes = np.concatenate([src[mine], edges.src])
    if relation is not None and lists.relation is not None:
        kinds = np.concatenate([lists.relation[mine], relation])
        codes = codes * (int(kinds.max(initial=0)) + 1) + kinds
    codes = np.unique(codes, return_inverse=True)[1].reshape(-1) * max(1, owned)
    codes += np.concatenate([dst[mine], edges.dst]) - first
    listed, wanted = codes[: len(mine)], codes[len(mine) :]
    edge, row = _first_places(wanted, listed), _first_places(listed, wanted)
    there = np.zeros(len(src), np.int32)
    there[mine[edge >= 0]] = 1
    found = exchange.sum(torch.from_numpy(there)).numpy() > 0
    if not found.all():
        bad = int(np.argmin(found))
        message = "the graph has no edge from {} to {}, by their numbers".format(
            *lists.ends[:, bad]
        )
        raise lists.error(message, "list edges that there are, with their own relation", bad)
    rows = np.append(mine, -1)[row]  # of which the last stands for none
    return ListedNegatives(lists, ids, rows, np.stack([edge, mine]))


def _first_places(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each of ``wanted`` is in ``values`` first; -1 = nowhere."""
    order = np.argsort(values, kind="stable")
    at = np.searchsorted(values[order], wanted)
    place = np.append(order, -1)[np.minimum(at, len(order))]
    return np.where(np.append(values, 0)[place] == wanted, place, -1)


def _own(shard: Shard, ntype: str) -> tuple[int, int]:
    """First own node and how many; any node where there are none."""
    first = min(shard.first(ntype), shard.num_nodes(ntype) - 1)
    return first, max(1, shard.owned(ntype))


def _by_original(shard: Shard, exchange: Exchange, ntype: str) -> np.ndarray:
    """Global ids in the order of the user's graph."""
    original = exchange.gather_rows(torch.from_numpy(shard.original[ntype].astype(np.int64)))
    order: np.ndarray = torch.argsort(original).numpy()
    return order.astype(np.int32) if len(order) < 2**31 else order
