"""Answers of a model that predicts for nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from raygnn.graph.data import etype_str
from raygnn.graph.staging.neighbourhood import Neighbourhood, neighbourhood
from raygnn.prediction.request import check_fanout, moment_of
from raygnn.sampling.collate import names_of
from raygnn.sampling.exchange import as_ids
from raygnn.sampling.plan import Fanout, resolve_fanouts
from raygnn.sampling.seeds import distinct
from raygnn.serving.explanations import Contributions, Explainer, largest
from raygnn.serving.new_rows import AllRows, NewRows
from raygnn.serving.questions import AnswerRows, NodeQuestion, RequestError, UserId, request_errors
from raygnn.serving.served_run import ServedModel
from raygnn.tasks.inference import Inference
from raygnn.worker.planes.prediction_rows import Format
from raygnn.worker.planes.vocabulary import edge_reads, target_key

_MOST_EDGES = 1_000_000  # of a neighbourhood with new rows


@dataclass(frozen=True)
class _Located:
    """Question, its number in the batch, and the ids of its nodes, int64 ``[n]``.

    Attributes:
        nodes: global ids in the graph with the new rows, or numbers in a part of it.
        times: int64 ``[n]``, time of each node; None = no times.
    """

    number: int
    question: NodeQuestion
    new: NewRows
    nodes: np.ndarray
    times: np.ndarray | None = None


class NodeAnswers:
    """Answers questions about nodes.

    Args:
        rows: new rows that every question sees; None = no rows.

    Attributes:
        ids: ids of the task's node type.
    """

    def __init__(self, model: ServedModel, rows: AllRows | None = None):
        self._all_rows = rows or AllRows(model)
        self._model, self._config, self._plane = model, model.served.one, model.plane
        self._ntype: str = self._plane.ntype
        self.ids = self._model.ids(self._ntype)

    @cached_property
    def _classes(self) -> list[Any] | None:
        """Names of the classes; None if they are numbers, or the task has none."""
        served = self._model.served
        found = served.words.get(target_key(self._config, served.task, self._ntype))
        return [*found] if found is not None and self._config.task.classifies else None

    def schema(self) -> dict[str, Any]:
        """Describe the model for callers, as plain JSON types."""
        timed = self._config.sampling.time is not None
        found = {**self._model.schema(self._ntype), "classes": self._classes, "times": timed}
        try:
            return {**found, "new": self._all_rows.reader.schema()}
        except RequestError:
            return found

    def answer(self, questions: Sequence[NodeQuestion]) -> list[AnswerRows | RequestError]:
        """Return the rows for each question, or its error.

        Questions with equal fanouts are predicted in one batch; a node's sample does not depend on
        the other nodes.
        """
        answers: dict[int, AnswerRows | RequestError] = {}
        alike: dict[Any, list[_Located]] = {}
        for number, one in enumerate(questions):
            try:
                if one.fanout is not None and (found := check_fanout(self._config, one.fanout)):
                    raise RequestError(found[0], where="fanout", remedy=found[1])
                new = self._all_rows.beside(one.nodes, one.edges)
                nodes = self.ids.positions(one.ids, "ids", new.numbers.get(self._ntype, {}))
                placed = _Located(number, one, new, nodes)
                alike.setdefault((one.fanout, one.scores, id(new)), []).append(placed)
            except RequestError as error:
                answers[number] = error
        for some in alike.values():
            answers |= self._answers(some)
        return [answers[number] for number in range(len(questions))]

    def _answers(
        self, asked: Sequence[_Located], sampled: bool = False
    ) -> dict[int, AnswerRows | RequestError]:
        """Return the answers to questions with equal fanouts, in the same graph, by number.

        Args:
            sampled: with new rows, copy only as many of each node's edges as the fanout needs, a
                sample.
        """
        answers: dict[int, AnswerRows | RequestError] = {}
        fanout, timed_edges = asked[0].question.fanout or (-1,), self._config.sampling.time
        cap = None if min(fanout) < 0 or timed_edges else max(fanout)
        try:
            part = self._around(asked, cap if sampled else None)
        except RequestError as error:
            if len(asked) > 1:
                half = len(asked) // 2
                return self._answers(asked[:half]) | self._answers(asked[half:])
            if sampled or cap is None:
                return {asked[0].number: error}
            return self._answers(asked, sampled=True)
        inference = self._plane.inference if part is None else self._plane.inference_over(part)
        timed: list[_Located] = []
        for one in asked:
            local = one.nodes
            if part is not None:
                local = np.searchsorted(part.ids[self._ntype], local)
            try:
                times = self._times(local, one.question.at, part)
                timed.append(replace(one, nodes=local, times=times))
            except RequestError as error:
                answers[one.number] = error
        if not timed:
            return answers
        outputs = self._outputs(inference, timed)
        names = [name for one in timed for name in one.question.ids]
        rows = self._named(names, outputs, asked[0].question.scores)
        for one in timed:
            own, rows = rows[: len(one.nodes)], rows[len(one.nodes) :]
            try:
                answers[one.number] = self._explained(one, own, inference, part)
            except RequestError as error:
                answers[one.number] = error
        return answers

    def _around(self, asked: Sequence[_Located], cap: int | None) -> Neighbourhood | None:
        """Return the nodes' neighbourhood in the graph with new rows; None if there are none."""
        new, nodes = asked[0].new, np.concatenate([one.nodes for one in asked])
        if not new.count:
            return None
        plane, ntype, model = self._plane, self._ntype, self._config.model
        arrays = {t: {*names_of(inputs)} for t, inputs in plane.inputs.items()}
        if plane.time is not None and self._config.table is None:
            arrays[ntype].add(plane.time)
        read = model.depth, edge_reads(self._config), arrays, _MOST_EDGES, cap
        with request_errors("ids"):
            return neighbourhood(plane.shard, (new.nodes, new.edges), {ntype: nodes}, *read)

    def _outputs(self, inference: Inference, asked: Sequence[_Located]) -> Tensor:
        when = [one.times for one in asked if one.times is not None]
        nodes = np.concatenate([one.nodes for one in asked])
        ids, times, back = distinct(nodes, np.concatenate(when) if when else None)
        given = self._model.module.model, self._ntype, ids, self._hops(asked[0].question.fanout)
        outputs = inference.outputs(*given, times=times if when else None)
        return outputs[torch.from_numpy(back)]

    def _hops(self, fanout: tuple[int, ...] | None) -> list[Fanout]:
        if fanout is None and self._plane.clock.latest:
            hops: list[Fanout] = self._plane.fanouts  # the model was trained on the latest edges
            return hops
        asked = (-1,) * self._config.model.depth if fanout is None else fanout
        return resolve_fanouts(asked, self._plane.shard.etypes)

    @cached_property
    def _explainer(self) -> Explainer:
        columns, plane = self._model.served.request.weights.columns or {}, self._plane
        model = self._model.module.model
        return Explainer(model, plane.inputs, plane.shard.node_data, columns)

    def _explained(
        self, asked: _Located, rows: AnswerRows, inference: Inference, part: Neighbourhood | None
    ) -> AnswerRows:
        """Add an explanation to each row, if requested."""
        one, times = asked.question, asked.times
        if not one.explain:
            return rows
        outputs = {**dict.fromkeys(self._plane.shard.ntypes, 0), self._ntype: 1}
        every = [None] * len(rows) if times is None else times[:, None]
        for row, node, time in zip(rows, asked.nodes, every):
            seeds = {self._ntype: np.array([node])}
            when = None if time is None else {self._ntype: time}
            given, sources = inference.neighbourhood(seeds, self._hops(one.fanout), when)
            found = self._explainer(given, outputs, self._scores)
            numbers = {t: as_ids(ids) for t, ids in sources.items()}
            if part is not None:
                numbers = {t: part.ids[t][ids] for t, ids in numbers.items()}
            row["explanation"] = self._shown(found, numbers, one.explain, asked.new)
        return rows

    def _scores(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of classes or labels, or the first target."""
        task = self._config.task
        if task.classifies:
            return outputs.softmax(1)
        return outputs.sigmoid() if task.several_labels else outputs[:, :1]

    def _shown(
        self, found: Contributions, nodes: Mapping[str, np.ndarray], k: int, new: NewRows
    ) -> dict[str, Any]:
        added = {ntype: list(ids) for ntype, ids in new.numbers.items()}  # in order of the numbers

        def name(ntype: str, number: int) -> Any:
            node, known = nodes[ntype][number], self._plane.shard.num_nodes(ntype)
            if node >= known:
                return added[ntype][node - known]
            return self._model.names(ntype, node[None])[0]

        features = [
            {"type": ntype, "feature": feature, "contribution": value}
            for (ntype, feature), value in largest(found.features, k)
        ]
        contributors = [
            {"type": ntype, "node": name(ntype, number), "contribution": value}
            for (ntype, number), value in largest(found.nodes, k)
        ]
        edges = []
        for (etype, source, target), value in largest(found.edges, k):
            ends = {"source": name(etype[0], source), "target": name(etype[2], target)}
            edges.append({"type": etype_str(etype), **ends, "contribution": value})
        scores = {"score": found.score, "without": found.without}
        return {**scores, "features": features, "nodes": contributors, "edges": edges}

    def _named(self, names: Sequence[UserId], outputs: Tensor, scores: bool) -> AnswerRows:
        task = self._config.task
        form = Format("node", task.classifies, scores, task.several_labels)
        rows: AnswerRows = pa.table(form.columns(outputs)).to_pylist()
        if self._classes is not None:
            for row in rows:
                row["prediction"] = self._classes[row["prediction"]]
        return [{"node": name, **row} for name, row in zip(names, rows)]

    def _times(
        self, positions: np.ndarray, at: Any, part: Neighbourhood | None
    ) -> np.ndarray | None:
        """Return the time of each node, int64 ``[n]``; None without times. ``positions``: in
        ``part``, or if it is None in the shard."""
        plane, config = self._plane, self._config
        if config.sampling.time is None and at is None:
            return None
        if at is None and plane.clock.at is not None:
            return np.full(len(positions), plane.clock.at)
        if at is None and config.table is None and plane.time is not None:
            if part is not None:
                return part.node_data[self._ntype][plane.time].flatten().numpy()[positions]
            own: np.ndarray = plane.node_times(self._ntype)
            return own[positions]
        at = datetime.now(UTC).isoformat() if at is None else at
        with request_errors("at"):
            moment = plane.clock.moment(moment_of(config, at, "at"), f"at {at}")
        time = config.sampling.time
        if config.table is not None and time is not None and not time.strict:
            moment += 1  # a row sees edges at its own time
        return np.full(len(positions), moment)
