"""Lists of the best targets of sources, by a trained model of link prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import etype_str
from raygnn.models.heads import EdgeModel
from raygnn.sampling.negatives import KnownEdges
from raygnn.tasks.lightning_modules import MultitaskTask, TaskModule
from raygnn.tasks.top import Search
from raygnn.worker.job import Request
from raygnn.worker.planes.edge_plane import EdgePlane
from raygnn.worker.planes.multitask_plane import MultitaskPlane
from raygnn.worker.planes.prediction_rows import (
    Recommended,
    check_array,
    chosen_nodes,
    listed_nodes,
    relation_of,
)
from raygnn.worker.planes.seed_times import times_of


def recommend(plane: Any, task: TaskModule, request: Request) -> Iterator[Recommended]:
    """Yield lists for this rank's part of the requested sources, ascending by their ids. The
    iterator must be exhausted. Collective.

    A node is no candidate for itself.

    Args:
        plane: of the task, or of several, of which the request names one.

    Raises:
        InputError: a source, a candidate or the relation does not exist.
        DataError: a score is NaN.
    """
    if isinstance(plane, MultitaskPlane):
        assert isinstance(task, MultitaskTask)
        plane, task = plane.planes[request.task], task.of(request.task)
    model, lists, shard, control = task.model, request.lists, plane.shard, plane.control
    assert isinstance(model, EdgeModel)
    assert lists is not None
    source, target = plane.etype[0], plane.etype[2]
    words = plane.job.meta.names.get(f"{etype_str(plane.etype)}/{plane.target.relation}", ())
    relation = relation_of(lists.relation, plane.target.relation, words, plane.relations)
    first = shard.first(target)
    asked = chosen_nodes(plane.job, request, shard, source)
    among = _candidates(plane, lists.candidates, target)
    nodes = {source: shard.first(source) + np.sort(asked)}
    nodes[target] = np.union1d(nodes.get(target, among[:0]), among + first)
    rows = plane.inference.represent(model.encoder, nodes)
    search = Search(
        control,
        copy.deepcopy(model.decoder).float().eval(),
        among + first,
        rows[target].select(among + first),
        (first, first + shard.owned(target)),
        _known(plane, lists.known, relation),
        plane.relations,
        plane.ranks.device,
    )
    step = search.step(lists.k, control.world.size)
    for number in range(-(-control.max(len(asked)) // step)):
        some = asked[number * step : (number + 1) * step]
        ids = some + shard.first(source)
        keys, kept = ids * plane.relations + relation, rows[source].select(ids)
        scores, names = search.lists(keys, kept, lists.k, shard.original[target][among])
        if control.max(int(np.isnan(scores).any())):
            raise DataError(
                "scores of this model are NaN",
                where=str(request.weights.path),
                remedy="train again with finite weights: a lower train.lr, or train.clip",
            )
        yield Recommended(shard.original[source][some].astype(np.int64), names, scores)


def _candidates(plane: EdgePlane, candidates: Any, ntype: str) -> np.ndarray:
    """Return the positions of this rank's candidates, ascending by their original ids."""
    own, arrays = np.arange(plane.shard.owned(ntype)), plane.shard.node_data[ntype]
    if isinstance(candidates, str):
        check_array(candidates, ntype, {name: arrays[name].shape[1:] for name in arrays})
        own, candidates = own[arrays[candidates].numpy().ravel() != 0], None
    return listed_nodes(plane.job, candidates, plane.shard, ntype, own, "--candidates")


def _known(plane: EdgePlane, known: bool, relation: int) -> KnownEdges:
    """Return the pairs that are not recommended, with this rank's targets."""
    edges, shard, named = plane.edges, plane.shard, plane.target.relation
    keys, nodes = np.empty(0, np.int64), np.empty(0, np.int64)
    if known:
        kind = 0 if named is None else edges.column(named).astype(np.int64)
        keys, nodes = edges.src * plane.relations + kind, edges.dst
        time = plane.config.sampling.time
        when = None if time is None else time.seeds or time.edges
        if when is not None and when in edges:
            there = times_of(edges.column(when), plane.seed_type, when) < plane.clock.at
            keys, nodes = keys[there], nodes[there]
    if plane.etype[0] == plane.etype[2]:
        own = shard.first(plane.etype[0]) + np.arange(shard.owned(plane.etype[0]))
        keys, nodes = np.append(keys, own * plane.relations + relation), np.append(nodes, own)
    return KnownEdges.from_edges(keys, nodes)
