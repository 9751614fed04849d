"""Lists of the best targets of sources, by a trained model of link prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.data import etype_str
from raygnn.models.heads import EdgeModel
from raygnn.sampling.negatives import KnownEdges
from raygnn.tasks.inference import NodeRows
from raygnn.tasks.lightning_modules import MultitaskTask, TaskModule
from raygnn.tasks.top import Search
from raygnn.worker.job import Request
from raygnn.worker.planes.edge_plane import EdgePlane
from raygnn.worker.planes.multitask_plane import MultitaskPlane
from raygnn.worker.planes.partition_plane import union
from raygnn.worker.planes.prediction_rows import (
    Recommended,
    check_array,
    chosen_nodes,
    listed_nodes,
    relation_of,
)
from raygnn.worker.planes.seed_times import times_of

_NONE = np.empty(0, np.int64)


class Recommender:
    """Searches the best targets of sources. Collective.

    A node is no candidate for itself.

    Args:
        plane: plane of the task, or of several tasks, one of them named by the request.
        sources: positions int64 ``[n]`` of this rank's sources, whose rows are computed with the
            candidates' rows, unless these are given.
        rows: rows of all sources and candidates, by node type.

    Raises:
        InputError: a candidate or the relation does not exist.
    """

    def __init__(
        self,
        plane: Any,
        task: TaskModule,
        request: Request,
        sources: np.ndarray = _NONE,
        rows: dict[str, NodeRows] | None = None,
    ):
        lists = request.lists
        assert lists is not None
        self.plane, task = one_task(plane, task, request)
        plane, shard, target = self.plane, self.plane.shard, self.plane.etype[2]
        assert isinstance(task.model, EdgeModel)
        words = plane.job.meta.names.get(f"{etype_str(plane.etype)}/{plane.target.relation}", ())
        self.relation = relation_of(lists.relation, plane.target.relation, words, plane.relations)
        self._weights, first = request.weights.path, shard.first(target)
        among = _candidates(plane, lists.candidates, target)
        if rows is None:
            nodes = {plane.etype[0]: shard.first(plane.etype[0]) + sources}, {target: among + first}
            rows = plane.inference.represent(task.model.encoder, union(nodes))
        self.rows = rows
        self._names = shard.original[target][among]
        self.search = Search(
            plane.control,
            copy.deepcopy(task.model.decoder).float().eval(),
            among + first,
            self.rows[target].select(among + first),
            (first, first + shard.owned(target)),
            _known(plane, lists.known, self.relation),
            plane.relations,
            plane.ranks.device,
        )

    def lists(self, sources: np.ndarray, kept: Tensor, k: int) -> Recommended:
        """Return the lists of ``k`` of this rank's sources.

        Args:
            sources: their positions, int64 ``[n]``.
            kept: their rows, float32 ``[n, D]``.

        Raises:
            DataError: a score is NaN.
        """
        plane = self.plane
        shard, source = plane.shard, plane.etype[0]
        keys = (sources + shard.first(source)) * plane.relations + self.relation
        scores, names = self.search.lists(keys, kept, k, self._names)
        if plane.control.max(int(np.isnan(scores).any())):
            remedy = "train again with finite weights: a lower train.lr, or train.clip"
            raise DataError("scores of this model are NaN", where=str(self._weights), remedy=remedy)
        return Recommended(shard.original[source][sources].astype(np.int64), names, scores)


def one_task(plane: Any, task: TaskModule, request: Request) -> tuple[Any, TaskModule]:
    """Return the plane and the module of the request's task, which may be one of several."""
    if isinstance(plane, MultitaskPlane):
        assert isinstance(task, MultitaskTask)
        return plane.planes[request.task], task.of(request.task)
    return plane, task


def recommend(plane: Any, task: TaskModule, request: Request) -> Iterator[Recommended]:
    """Yield lists for this rank's part of the requested sources, ascending by their ids. The
    iterator must be exhausted. Collective. See `Recommender`. Raises InputError if a source does
    not exist."""
    assert request.lists is not None
    one, _ = one_task(plane, task, request)
    source, k, control = one.etype[0], request.lists.k, one.control
    asked = chosen_nodes(one.job, request, one.shard, source)
    found = Recommender(plane, task, request, np.sort(asked))
    step = found.search.step(k, control.world.size)
    for number in range(-(-control.max(len(asked)) // step)):
        some = asked[number * step : (number + 1) * step]
        kept = found.rows[source].select(some + one.shard.first(source))
        yield found.lists(some, kept, k)


def _candidates(plane: EdgePlane, candidates: Any, ntype: str) -> np.ndarray:
    """Return the positions of this rank's candidates, ascending by their original ids."""
    own, arrays = np.arange(plane.shard.owned(ntype)), plane.shard.node_data[ntype]
    if isinstance(candidates, str):
        check_array(candidates, ntype, {name: arrays[name].shape[1:] for name in arrays})
        own, candidates = own[arrays[candidates].numpy().ravel() != 0], None
    return listed_nodes(plane.job, candidates, plane.shard, ntype, own, "--candidates")


def _known(plane: EdgePlane, known: bool, relation: int) -> KnownEdges:
    """Return the pairs that are not recommended, with this rank's targets."""
    edges, shard, kinds = plane.edges, plane.shard, plane.kinds()
    keys = nodes = _NONE
    if known:
        keys, nodes = edges.src * plane.relations + (0 if kinds is None else kinds), edges.dst
        when = plane.when
        if when is not None and when in edges:
            there = times_of(edges.column(when), plane.seed_type, when) < plane.clock.at
            keys, nodes = keys[there], nodes[there]
    if plane.etype[0] == plane.etype[2]:
        own = shard.first(plane.etype[0]) + np.arange(shard.owned(plane.etype[0]))
        keys, nodes = np.append(keys, own * plane.relations + relation), np.append(nodes, own)
    return KnownEdges.from_edges(keys, nodes)
