"""The neighbourhood of some nodes as a shard in memory, with nodes and edges that are added."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, as_matrix, ranges
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.staging.shard import (
    EdgeReads,
    InEdgeLists,
    Shard,
    TableLayout,
    carried_arrays,
)

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True)
class AddedEdges:
    """Edges that a graph does not have.

    Attributes:
        src, dst: global ids, int64 ``[E]``; added nodes follow the graph's.
        data: edge array → ``[E, …]``.
        order: numbers of the edges, by ``dst``.
    """

    src: Array = field(default_factory=_NOBODY.copy)
    dst: Array = field(default_factory=_NOBODY.copy)
    data: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def order(self) -> Array:
        return np.argsort(self.dst, kind="stable")

    @cached_property
    def _ordered(self) -> Array:
        return self.dst[self.order]

    def into(self, nodes: Array) -> tuple[Array, Array]:
        """Return the first in ``order`` of the edges into each node, and how many there are."""
        begin = np.searchsorted(self._ordered, nodes)
        return begin, np.searchsorted(self._ordered, nodes, side="right") - begin

    def and_then(self, more: AddedEdges) -> AddedEdges:
        """Return these edges followed by others of the same arrays."""
        ends = np.append(self.src, more.src), np.append(self.dst, more.dst)
        return AddedEdges(*ends, concatenated(self.data, more.data))


def concatenated(known: Mapping[str, Array], new: Mapping[str, Array]) -> dict[str, Array]:
    """Append the new rows of each array; either mapping may be empty."""
    if not known or not new:
        return dict(known or new)
    return {name: np.concatenate([known[name], array]) for name, array in new.items()}


NewNodes: TypeAlias = Mapping[str, Mapping[str, Array]]  # node type → array → [n, …]
NewEdges: TypeAlias = Mapping[EdgeType, AddedEdges]


@dataclass(frozen=True)
class Neighbourhood(Shard):
    """Some nodes of a shard, and of added ones, numbered anew.

    Attributes:
        ids: node type → global ids of the nodes, ascending, int64 ``[owned]``.
        degrees: edge type → in-degree of each node in the whole graph, int64 ``[owned]``.
    """

    ids: dict[str, Array]
    degrees: dict[EdgeType, Array]

    def in_degree(self, etype: EdgeType) -> Tensor:
        return torch.from_numpy(self.degrees[etype])

    def layout(self, ntype: str, ranks: Sequence[int], cached: int = 0) -> TableLayout:
        return TableLayout.local_only(self.bounds[ntype], self.rank)

    def rows(self, ntype: str, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return _joined([self.node_data[ntype][name] for name in names], dtype)

    def table(
        self,
        ntype: str,
        names: Sequence[str],
        dtype: torch.dtype,
        layout: TableLayout,
        handle: int | None = None,
    ) -> Tensor:
        return self.rows(ntype, names, dtype)


def neighbourhood(
    shard: Shard,
    added: tuple[NewNodes, NewEdges],
    targets: Mapping[str, Array],
    hops: int,
    reads: EdgeReads,
    arrays: Mapping[str, Collection[str]],
    most: int,
    cap: int | None = None,
) -> Neighbourhood:
    """Return all that messages of ``hops`` layers to ``targets`` read.

    Args:
        shard: of the whole graph.
        targets: node type → global ids.
        reads: of the shard.
        arrays: node type → names of the arrays to hold.
        cap: in-edges of each node and edge type, a uniform sample; None = all.

    Raises:
        DataError: there are more than ``most`` edges, or what is added lacks an array.
    """
    given, new_edges = added
    new = {etype: new_edges.get(etype, AddedEdges()) for etype in shard.etypes}
    met = {etype: [(_NOBODY, _NOBODY, _NOBODY)] for etype in shard.etypes}
    ids = {t: np.unique(targets.get(t, _NOBODY)) for t in shard.ntypes}
    frontier, total = dict(ids), 0
    for _ in range(hops):
        sources: dict[str, list[Array]] = {t: [_NOBODY] for t in shard.ntypes}
        for etype, lists in shard.topology.items():
            nodes, known = frontier[etype[2]], shard.num_nodes(etype[2])
            old = nodes[nodes < known]
            counts = lists.indptr[old + 1] - lists.indptr[old]
            total += int((counts if cap is None else np.minimum(counts, cap)).sum())
            if total > most:
                message = f"the nodes have more than {most:,} edges within {hops} layers"
                raise DataError(message, remedy="ask for fewer nodes at a time, or give a fanout")
            found = _in_edges(lists, old, counts, new[etype], nodes, cap)
            met[etype].append(found)
            places, _, chosen = found
            sources[etype[0]] += [lists.src[places], new[etype].src[chosen]]
        frontier = {t: np.setdiff1d(np.concatenate(some), ids[t]) for t, some in sources.items()}
        ids = {t: np.union1d(ids[t], frontier[t]) for t in ids}
    data = {t: _node_data(shard, t, ids[t], given.get(t, {}), arrays[t]) for t in ids}
    return Neighbourhood(
        rank=0,
        ntypes=shard.ntypes,
        etypes=shard.etypes,
        bounds={t: np.array([0, len(some)]) for t, some in ids.items()},
        topology={e: _lists(shard, e, ids, new[e], some, reads) for e, some in met.items()},
        node_data=data,
        original={},  # is not read
        replicated=True,
        staged=shard.staged,
        held=shard.held,
        ids=ids,
        degrees={e: _degrees(shard, e, ids[e[2]], new[e]) for e in shard.etypes},
    )


def _in_edges(
    lists: InEdgeLists, old: Array, counts: Array, new: AddedEdges, nodes: Array, cap: int | None
) -> tuple[Array, Array, Array]:
    """Return places in the lists, the node of each, and the numbers of added edges.

    Args:
        old, counts: ascending, the ``nodes`` that have lists, and the lengths of these.
    """
    starts, (begins, added) = lists.indptr[old], new.into(nodes)
    if cap is None:
        numbers = new.order[ranges(begins, added)]
        return ranges(starts, counts), np.repeat(old, counts), numbers
    found, more = [(_NOBODY,) * 3], np.zeros(len(nodes) - len(old), np.int64)
    rows = zip(nodes, np.append(starts, more), np.append(counts, more), begins, added)
    for node, start, count, begin, others in rows:
        many = count + others
        picks = np.arange(many)
        if many > cap:
            picks = np.random.default_rng(node).choice(many, cap, replace=False, shuffle=False)
        here, beyond = picks[picks < count], picks[picks >= count]
        numbers = new.order[begin + beyond - count]
        found.append((start + here, np.full(len(here), node), numbers))
    places, owners, numbers = map(np.concatenate, zip(*found))
    return places, owners, numbers


def _node_data(
    shard: Shard, ntype: str, ids: Array, new: Mapping[str, Array], names: Collection[str]
) -> dict[str, Tensor]:
    known = shard.num_nodes(ntype)
    old, rows = torch.from_numpy(ids[ids < known]), ids[ids >= known] - known
    stored = {name: shard.node_data[ntype][name][old].numpy() for name in names}
    return {n: torch.from_numpy(_appended(a, ntype, n, new, rows)) for n, a in stored.items()}


def _lists(
    shard: Shard,
    etype: EdgeType,
    ids: Mapping[str, Array],
    new: AddedEdges,
    met: Sequence[tuple[Array, Array, Array]],
    reads: EdgeReads,
) -> InEdgeLists:
    lists = shard.topology[etype]
    places, dst, chosen = map(np.concatenate, zip(*met))
    src = np.concatenate([lists.src[places], new.src[chosen]])
    dst = np.searchsorted(ids[etype[2]], np.concatenate([dst, new.dst[chosen]]))
    data = {
        name: _appended(array[places], etype_str(etype), name, new.data, chosen)
        for name, array in lists.data.items()
    }
    times = data.get(reads.time or "")
    order = np.argsort(dst, kind="stable") if times is None else np.lexsort((times, dst))
    data = {name: _frozen(array[order]) for name, array in data.items()}
    number = np.searchsorted(ids[etype[0]], src[order])
    nodes = ids[etype[2]]  # whose original ids follow the graph's, too, if they are added
    old = nodes < len(lists.keys)
    keys = np.concatenate([lists.keys[nodes[old]], nodes[~old]])
    ends = np.cumsum(np.bincount(dst, minlength=len(ids[etype[2]])))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in data.items()}
    return InEdgeLists(
        first=0,
        indptr=_frozen(np.concatenate([[0], ends]).astype(np.int64)),
        src=_frozen(number.astype(lists.src.dtype)),
        keys=_frozen(keys.astype(lists.keys.dtype)),
        data=data,
        carried=carried_arrays(
            reads, tensors, lambda names: _joined([tensors[name] for name in names], reads.dtype)
        ),
        times=None if times is None else data[str(reads.time)],
    )


def _degrees(shard: Shard, etype: EdgeType, ids: Array, new: AddedEdges) -> Array:
    indptr, known = shard.topology[etype].indptr, shard.num_nodes(etype[2])
    degrees, old = np.zeros(len(ids), np.int64), ids[ids < known]
    degrees[: len(old)] = indptr[old + 1] - indptr[old]
    degrees += new.into(ids)[1]
    return degrees


def _appended(
    stored: Array, kind: str, name: str, given: Mapping[str, Array], rows: Array
) -> Array:
    if not len(rows):
        return stored
    width = math.prod(stored.shape[1:])
    if name not in given or math.prod(given[name].shape[1:]) != width:
        message = f"the model reads {name!r} of {kind}, and these rows do not make it"
        raise DataError(message, remedy="give lists as long as in the training")
    new = given[name][rows].reshape(len(rows), *stored.shape[1:])
    return np.concatenate([stored, new.astype(stored.dtype)])


def _joined(arrays: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([as_matrix(array).to(dtype) for array in arrays], 1)


def _frozen(array: Array) -> Array:
    """Return an array that is read-only as mapped ones are, for which kernels are compiled."""
    array.flags.writeable = False
    return array
