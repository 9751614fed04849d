"""Negative sampling: nodes that replace an edge's source or target.

All edges of a step share the same nodes (as in PBG, Lerer et al., SysML 2019, and DGL-KE, Zheng et
al., SIGIR 2020), so that scores are one matrix product. These nodes are a function of (seed, epoch,
step, end), equal for any number of ranks and any partition, since nodes are sampled by their
original numbers. Only ``local`` depends on ownership.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from raygnn.config.task import NegativesConfig
from raygnn.graph.arrays import ranges
from raygnn.graph.data import NegativeLists
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.exchange import Exchange
from raygnn.util.hashing import derive_key, mix, uniform

End = Literal["source", "target"]
ENDS: tuple[End, End] = ("source", "target")

_POWER = 0.75  # of word2vec (Mikolov et al., NeurIPS 2013)
_PURPOSE = 0x6E6567  # separates these random numbers from neighbour sampling
_RANKED = 0x6576616C  # separates the candidates of rankings from the negatives of training


@dataclass(frozen=True)
class KnownEdges:
    """Nodes that form an edge with a node and a relation.

    Attributes:
        keys: int64 ``[E]``, sorted: node · R + relation, for R relations.
        nodes: int64 ``[E]``.
    """

    keys: np.ndarray
    nodes: np.ndarray

    @classmethod
    def from_edges(cls, keys: np.ndarray, nodes: np.ndarray) -> KnownEdges:
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], nodes[order])

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of a query's number and a node, for queries ``[Q]``."""
        low = np.searchsorted(self.keys, keys, side="left")
        count = np.searchsorted(self.keys, keys, side="right") - low
        return np.repeat(np.arange(len(keys)), count), self.nodes[ranges(low, count)]

    def among(self, keys: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Return which of ``nodes [K]`` form an edge with each query, bool ``[Q, K]``."""
        query, found = self.find(keys)
        pair, column = KnownEdges.from_edges(nodes, np.arange(len(nodes))).find(found)
        mask = np.zeros((len(keys), len(nodes)), np.bool_)
        mask[query[pair], column] = True
        return mask


@dataclass(eq=False)
class Negatives:
    """Samples negatives for a step.

    Attributes:
        ntypes: end → node type.
        config: ``task.negatives``.
        seed: of the run.
        number: nodes per sample; 0 = as in ``config``.
        sums: end → float64 ``[N]``, cumulative sampling weights, in the order of the user's graph;
            for ``degree``.
        ids: node type → global ids ``[N]`` in the order of the user's graph; for ``uniform`` and
            ``degree``.
        own: node type → this rank's first node and number of nodes; for ``local``.
        known: end → training edges by their other end, of all ranks; to filter negatives.
        relations: number of relations in ``known``.
        log_q: end → float32 ``[N]``, logarithm of the sampling probability by global id; for the
            correction of scores.
    """

    ntypes: Mapping[End, str]
    config: NegativesConfig
    seed: int
    number: int = 0
    sums: Mapping[End, np.ndarray] = field(default_factory=dict)
    ids: Mapping[str, np.ndarray] = field(default_factory=dict)
    own: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    known: Mapping[End, KnownEdges] = field(default_factory=dict)
    relations: int = 1
    log_q: Mapping[End, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = self.number or self.config.number
        self._ends = [end for end in ENDS if self.config.ends in ("both", end)]

    @property
    def in_batch(self) -> bool:
        """True if the ends of all ranks' edges serve as negatives."""
        return self.config.kind == "in_batch"

    def draw(self, epoch: int, step: int, ends: Mapping[End, np.ndarray]) -> dict[str, np.ndarray]:
        """Sample the nodes of a step.

        Args:
            ends: of the step's edges, used if `in_batch`.

        Returns:
            end → global ids, int64 ``[K]``, with repetitions.
        """
        if self.in_batch:
            return {end: ends[end] for end in self._ends}
        draws = np.arange(self.number, dtype=np.uint64)
        return {end: self._sample(end, epoch, step, draws) for end in self._ends}

    def facts(
        self, drawn: Mapping[str, np.ndarray], ends: np.ndarray, relation: np.ndarray | None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return `Batch.known` and `Batch.log_q` of edges, for nodes from `draw`.

        Args:
            ends: global ids, int64 ``[2, B]``; relation: int64 ``[B]``, None = they have none.
        """
        known, log_q = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for end, own, other in zip(ENDS, ends, ends[::-1]):
            if end in drawn and end in self.known:
                keys = other * self.relations + (0 if relation is None else relation)
                known[end] = torch.from_numpy(self.known[end].among(keys, drawn[end]))
            if end in drawn and end in self.log_q:
                nodes = np.concatenate([own, drawn[end]])
                log_q[end] = torch.from_numpy(self.log_q[end][nodes])
        return {"known": known, "log_q": log_q}

    def draw_each(self, epoch: int, step: int, edges: np.ndarray) -> dict[str, np.ndarray]:
        """Sample separate nodes for each edge: end → global ids, int64 ``[n, number]``.

        Args:
            edges: int64 ``[n]``, numbers of edges in the user's graph.
        """
        draws = np.arange(self.number, dtype=np.uint64)
        keys = mix(edges.astype(np.uint64)).reshape(-1, 1) + draws
        return {end: self._sample(end, epoch, step, mix(keys)) for end in self._ends}

    def _sample(self, end: End, epoch: int, step: int, draws: np.ndarray) -> np.ndarray:
        kind, ntype = self.config.kind, self.ntypes[end]
        key = np.uint64(derive_key(self.seed, epoch, step, _PURPOSE, ENDS.index(end)))
        place = uniform(mix(draws + key))
        if kind == "local":
            first, owned = self.own[ntype]
            return first + (place * owned).astype(np.int64)
        ids = self.ids[ntype]
        if kind == "uniform":
            return ids[(place * len(ids)).astype(np.int64)].astype(np.int64)
        sums = self.sums[end]
        at = np.searchsorted(sums, place * sums[-1], side="right")
        return ids[np.minimum(at, len(ids) - 1)].astype(np.int64)


def make_negatives(
    config: NegativesConfig,
    shard: Shard,
    exchange: Exchange,
    ntypes: Mapping[End, str],
    seed: int,
    ends: Mapping[End, np.ndarray],
    number: int = 0,
    known: Mapping[End, KnownEdges] | None = None,
    relations: int = 1,
) -> Negatives:
    """Build the `Negatives` of one edge type. Collective.

    Every rank stores 4 bytes (8 from 2³¹ nodes on) for each node, and for ``degree`` 8 more.

    Args:
        ends: global ids of this rank's training edges; empty = sample candidates of rankings.
        number, known, relations: see `Negatives`.
    """
    seed = seed if ends else derive_key(seed, _RANKED)
    degrees: dict[End, np.ndarray] = {}
    log_q, ids = dict[End, np.ndarray](), dict[str, np.ndarray]()
    sums, own = dict[End, np.ndarray](), dict[str, tuple[int, int]]()
    if config.kind == "degree" or config.correct:
        for end, ntype in ntypes.items():
            counts = np.bincount(ends[end], minlength=shard.num_nodes(ntype))
            degrees[end] = exchange.sum(torch.from_numpy(counts)).numpy()
    if config.correct:
        power = 1 if config.kind == "in_batch" else _POWER
        log_q = {end: _log_shares(each, power) for end, each in degrees.items()}
    if config.kind == "local":
        own = {t: _own(shard, t) for t in ntypes.values()}
    elif config.kind != "in_batch":
        ids = {t: _by_original(shard, exchange, t) for t in dict.fromkeys(ntypes.values())}
        for end, each in degrees.items():
            sums[end] = np.cumsum(each[ids[ntypes[end]]].astype(np.float64) ** _POWER)
    draws = sums, ids, own
    return Negatives(ntypes, config, seed, number, *draws, known or {}, relations, log_q)


def gather_known(
    ends: Mapping[End, np.ndarray], relation: np.ndarray | None, relations: int, exchange: Exchange
) -> dict[End, KnownEdges]:
    """Return the edges of all ranks, by replaced end. Collective; 32 bytes for each edge.

    Args:
        ends: global ids of this rank's edges, int64 ``[n]``; relation: of these edges.
    """
    src, dst = (exchange.gather_rows(torch.from_numpy(ends[end])).numpy() for end in ENDS)
    kind: Any = 0
    if relation is not None:
        kind = exchange.gather_rows(torch.from_numpy(relation)).numpy()
    return {
        "source": KnownEdges.from_edges(dst * relations + kind, src),
        "target": KnownEdges.from_edges(src * relations + kind, dst),
    }


def _log_shares(degrees: np.ndarray, power: float) -> np.ndarray:
    weights = degrees.astype(np.float64) ** power
    with np.errstate(divide="ignore"):  # nodes that are never sampled
        return np.log(weights / weights.sum()).astype(np.float32)


@dataclass(frozen=True)
class ListedNegatives:
    """Listed negatives of edges.

    Attributes:
        ids: end → global ids ``[N]`` in the order of the user's graph, sources first.
        rows: int64 ``[own]``, number of the list of each owned edge; -1 = none.
    """

    lists: NegativeLists
    ids: Mapping[End, np.ndarray]
    rows: np.ndarray

    @property
    def width(self) -> int:
        """Length of the longest lists."""
        return max([1, *(nodes.shape[1] for nodes in self.lists.others.values())])

    def global_ids(self) -> np.ndarray:
        """Return the ends of the pairs shared by all edges, or else of the edges with lists, int64
        ``[2, n]``."""
        given = self.lists.ends if self.lists.pairs is None else self.lists.pairs
        both = zip(self.ids.values(), given)
        return np.stack([ids[nodes] for ids, nodes in both]).astype(np.int64)

    def check_all_have(self, own: np.ndarray, edges: Any, exchange: Exchange) -> None:
        """Raise DataError if some of the edges ``own`` have no list. Collective."""
        bare = own[self.rows[own] < 0]
        one = np.stack([edges.src[bare[:1]], edges.dst[bare[:1]]], 1).astype(np.int64)
        firsts = exchange.gather_rows(torch.from_numpy(one)).numpy()
        if len(firsts):
            num = int(exchange.sum(torch.tensor(len(bare))))
            source, target = (int((i == n).argmax()) for i, n in zip(self.ids.values(), firsts[0]))
            raise self.lists.error(
                f"{num:,} training edges have no list, such as the edge from node {source} to "
                f"node {target}",
                "list some for each, or sample others with negatives.kind",
            )

    def nodes(self, rows: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
        """Return the listed nodes of edges with lists ``rows`` and ends ``[2, n]``: end → global
        ids, int64 ``[n, K]``; the edge's own node if it has no list."""
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
    """Assign lists to the owned edges. Collective; memory as in `make_negatives`.

    Args:
        edges: the `OwnedEdges` of the type.
        relation: int64 ``[own]``, of these edges; None = they have none.

    Raises:
        DataError: a list belongs to an edge that does not exist.
    """
    by_type = {t: _by_original(shard, exchange, t) for t in dict.fromkeys(ntypes.values())}
    ids = {end: by_type[ntype] for end, ntype in ntypes.items()}
    if lists.ends is None:
        return ListedNegatives(lists, ids, np.zeros(len(edges.src), np.int64))
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
        raise lists.error(message, "list existing edges, with their own relation", bad)
    rows = np.append(mine, -1)[row]  # row -1, no list, selects the last
    return ListedNegatives(lists, ids, rows)


def _first_places(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    order = np.argsort(values, kind="stable")
    at = np.searchsorted(values[order], wanted)
    place = np.append(order, -1)[np.minimum(at, len(order))]
    return np.where(np.append(values, 0)[place] == wanted, place, -1)


def _own(shard: Shard, ntype: str) -> tuple[int, int]:
    """Return the first owned node and their number; an arbitrary node if there are none."""
    first = min(shard.first(ntype), shard.num_nodes(ntype) - 1)
    return first, max(1, shard.owned(ntype))


def _by_original(shard: Shard, exchange: Exchange, ntype: str) -> np.ndarray:
    """Return global ids in the order of the user's graph."""
    original = exchange.gather_rows(torch.from_numpy(shard.original[ntype].astype(np.int64)))
    order: np.ndarray = torch.argsort(original).numpy()
    return order.astype(np.int32) if len(order) < 2**31 else order
