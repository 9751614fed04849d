"""Neighbour sampling over a partitioned graph, the same whoever does it.

Which neighbours a node gives is keyed by (seed, epoch, step, hop, edge type, node), so that the
replicated and the partitioned topology, and any number of workers, draw the same blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import Shard
from raygnn.sampling import kernels
from raygnn.sampling.batch import Adjacency, Block
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
from raygnn.util.hashing import derive_key

Frontier = dict[str, np.ndarray]  # node type → distinct global ids
Draws = dict[EdgeType, Ragged]


@dataclass(frozen=True)
class Drawn:
    """What the nodes of a frontier drew.

    Attributes:
        ids: edge type → the sources that each node drew.
        relations: edge type → the relations of the edges to them, for the types that have any.
    """

    ids: Draws
    relations: Draws


@dataclass(frozen=True)
class Banned:
    """Edges that must not be drawn: those between the two ends of each pair, in one direction.

    Attributes:
        pairs: edge type → (source ids, destination ids), int64 ``[n]`` each; they may be given on
            any device.
    """

    pairs: Mapping[EdgeType, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = {e: (as_ids(src), as_ids(dst)) for e, (src, dst) in self.pairs.items()}
        object.__setattr__(self, "pairs", pairs)  # once, however many hops there are

    def of(self, etype: EdgeType, nodes: np.ndarray) -> Ragged:
        """The banned sources of each of ``nodes`` (distinct)."""
        src, dst = self.pairs[etype]
        order = np.argsort(nodes, kind="stable")
        at = np.searchsorted(nodes[order], dst)
        at[at == len(nodes)] = 0
        known = nodes[order[at]] == dst if len(nodes) else np.zeros(len(dst), bool)
        row = order[at[known]]
        by_row = np.argsort(row, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(nodes)))])
        return Ragged(indptr, src[known][by_row])


class NeighborSampler:
    """Draws the blocks of a minibatch.

    Args:
        shard: this worker's graph; sampling stays local where it holds all rows.
        exchange: the data plane's collectives. With a partitioned topology every rank calls
            the sampler the same number of times.
        seed: of the run.
        replace: draw with replacement.
        weight: edge array that neighbours are drawn in proportion to; None, and edge types that
            lack it, draw alike.
        relation: edge array that blocks shall carry (`Adjacency.relation`), of the edge types
            that have it; None = nothing.
    """

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        *,
        seed: int = 0,
        replace: bool = False,
        weight: str | None = None,
        relation: str | None = None,
    ):
        self._shard = shard
        self._exchange = exchange
        self._seed = seed
        self._replace = replace
        none = np.empty(0, np.float32)
        self._weights = {
            e: _weights(none if weight is None else rows.data.get(weight, none))
            for e, rows in shard.topology.items()
        }
        self._relations = {
            e: rows.data[relation]
            for e, rows in shard.topology.items()
            if relation is not None and relation in rows.data
        }
        fits = max(map(shard.num_nodes, shard.ntypes), default=0) < 2**31
        self._wire = np.dtype(np.int32 if fits else np.int64)  # of ids on their way
        # decided by what all ranks share: the exchanges of a partitioned topology are collective
        self._remote = exchange.world.size > 1 and not shard.replicated

    def sample(
        self,
        seeds: Mapping[str, Ids],
        fanouts: Sequence[Fanout],
        *,
        epoch: int,
        step: int,
        banned: Banned | None = None,
    ) -> tuple[list[Block], Frontier]:
        """The blocks for ``seeds``, from the input nodes to the seeds.

        Args:
            seeds: node type → int64 ``[B]``, distinct global ids, on any device; the last block's
                destinations, in the given order.
            fanouts: neighbours per edge type, from the seeds outward.
            banned: edges that no hop may draw. Collective: all ranks give some, or none does.

        Returns:
            ``(blocks, input ids per node type)``.
        """
        blocks: list[Block] = []
        frontier = self._seeds(seeds)
        for hop, fanout in enumerate(fanouts):
            key = derive_key(self._seed, epoch, step, hop)
            block, frontier = self.hop(frontier, fanout, key, banned)
            blocks.insert(0, block)
        return blocks, frontier

    def sample_open(
        self,
        seeds: Mapping[str, Ids],
        fanouts: Sequence[Fanout],
        *,
        epoch: int,
        step: int,
        banned: Banned | None = None,
    ) -> tuple[list[Block], Frontier, Draws]:
        """As `sample`, but the last hop is left as lists of ids.

        For models that only add up the input nodes' features: the first block has degrees and no
        sources, and its sources need no numbering.

        Returns:
            ``(blocks, destinations of the first block, their neighbours)``.
        """
        *inner, outer = fanouts
        blocks, frontier = self.sample(seeds, inner, epoch=epoch, step=step, banned=banned)
        key = derive_key(self._seed, epoch, step, len(inner))
        draws = self._draw(frontier, outer, key, banned).ids
        counts = {t: len(ids) for t, ids in frontier.items()}
        nothing = torch.empty(0, dtype=torch.int64)
        adj = {e: Adjacency(torch.from_numpy(d.indptr), nothing) for e, d in draws.items()}
        return [Block(adj, counts, counts), *blocks], frontier, draws

    def hop(
        self,
        nodes: Mapping[str, Ids],
        fanout: Fanout,
        key: int = 0,
        banned: Banned | None = None,
    ) -> tuple[Block, Frontier]:
        """One block whose destinations are ``nodes``; returns it and its source nodes."""
        frontier = {t: as_ids(ids) for t, ids in nodes.items()}
        drawn = self._draw(frontier, fanout, key, banned)
        draws = drawn.ids
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
                relation = drawn.relations.get(etype)
                adj[etype] = Adjacency(
                    torch.from_numpy(draws[etype].indptr),
                    torch.from_numpy(local[start:stop]),
                    None if relation is None else torch.from_numpy(relation.ids),
                )
                start = stop
        block = Block(
            adj={e: adj[e] for e in draws},
            num_src={t: len(ids) for t, ids in sources.items()},
            num_dst={t: len(ids) for t, ids in frontier.items()},
        )
        return block, sources

    def _seeds(self, seeds: Mapping[str, Ids]) -> Frontier:
        return {t: as_ids(seeds.get(t, np.empty(0, np.int64))) for t in self._shard.ntypes}

    def _draw(self, frontier: Frontier, fanout: Fanout, key: int, banned: Banned | None) -> Drawn:
        bans: Draws = {}
        if banned is not None:
            bans = {e: banned.of(e, frontier[e[2]]) for e in banned.pairs}
        if self._remote:
            return self._ask_owners(frontier, fanout, key, bans)
        return self._draw_here(frontier, fanout, key, bans)

    def _draw_here(self, nodes: Frontier, fanout: Fanout, key: int, bans: Draws) -> Drawn:
        """Draw for nodes whose rows are held here."""
        ids, relations = {}, {}
        for number, etype in enumerate(self._shard.etypes):
            chosen = nodes[etype[2]]
            rows, weight = self._shard.topology[etype], self._weights[etype]
            relation = self._relations.get(etype, np.empty(0, np.int64))
            index = chosen - rows.first
            keyed = np.uint64(derive_key(key, number))
            given = (index, rows.keys[index], fanout[etype], self._replace, keyed)
            if not len(weight) and etype not in bans:
                drawn = kernels.sample_rows(rows.indptr, rows.src, relation, *given)
            else:
                ban = bans.get(etype, Ragged.empty(len(chosen)))
                drawn = kernels.draw_rows(
                    rows.indptr, rows.src, relation, weight, *given, ban.indptr, ban.ids
                )
            indptr, sources, edge_relations = drawn
            ids[etype] = Ragged(indptr, sources)
            if etype in self._relations:
                relations[etype] = Ragged(indptr, edge_relations)
        return Drawn(ids, relations)

    def _ask_owners(self, frontier: Frontier, fanout: Fanout, key: int, bans: Draws) -> Drawn:
        """Draw where the rows are: four all-to-alls, whatever the number of edge types."""
        order, cuts = {}, {}
        for ntype, nodes in frontier.items():
            order[ntype], counts = group_by_owner(nodes, self._shard.bounds[ntype])
            cuts[ntype] = offsets(counts)
        questions = [
            RaggedByRank(Ragged.of_one(nodes[order[t]]), cuts[t]) for t, nodes in frontier.items()
        ]
        questions += [RaggedByRank(ban.take(order[e[2]]), cuts[e[2]]) for e, ban in bans.items()]
        asked = exchange_ragged(self._exchange, questions, self._wire)
        here = dict(zip(frontier, asked))
        drawn = self._draw_here(
            {t: nodes.lists.ids for t, nodes in here.items()},
            fanout,
            key,
            {e: ban.lists for e, ban in zip(bans, asked[len(here) :])},
        )
        both = [*drawn.ids.items(), *drawn.relations.items()]
        answers = [RaggedByRank(lists, here[e[2]].cuts) for e, lists in both]
        came = exchange_ragged(self._exchange, answers, self._wire)
        back = {t: inverse(order[t]) for t in order}
        lists = [answer.lists.take(back[e[2]]) for (e, _), answer in zip(both, came)]
        ids = dict(zip(drawn.ids, lists))
        return Drawn(ids, dict(zip(drawn.relations, lists[len(ids) :])))


def _weights(weight: np.ndarray) -> np.ndarray:
    """As the kernels take them: one number per edge, of a type that numba knows."""
    flat = weight.reshape(len(weight)) if weight.ndim > 1 else weight
    return flat.astype(np.float32) if flat.dtype == np.float16 else flat
