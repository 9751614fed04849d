"""Answers of a model that predicts for nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from raygnn.errors import RaygnnError
from raygnn.graph.data import etype_str
from raygnn.prediction.request import moment_of
from raygnn.sampling.exchange import Ids, as_ids
from raygnn.sampling.plan import Fanout, resolve_fanouts
from raygnn.sampling.seeds import distinct
from raygnn.serving.explanations import Contributions, Explainer, largest
from raygnn.serving.questions import AnswerRows, NodeQuestion, RequestError
from raygnn.serving.served_run import ServedModel
from raygnn.worker.planes.prediction_rows import Format
from raygnn.worker.planes.vocabulary import target_key


class NodeAnswers:
    """Answers questions about nodes.

    Attributes:
        ids: of the nodes that are predicted for.
    """

    def __init__(self, model: ServedModel):
        self._model, self._config, self._plane = model, model.served.one, model.plane
        self._ntype: str = self._plane.ntype
        self.ids = self._model.ids(self._ntype)

    @cached_property
    def _classes(self) -> list[Any] | None:
        """Names of the classes; None if they are numbers, or there are none."""
        if not self._config.task.classifies:
            return None
        served = self._model.served
        found = served.words.get(target_key(self._config, served.task, self._ntype))
        return None if found is None else [*found]

    def schema(self) -> dict[str, Any]:
        """Return what a caller must know, as plain JSON types."""
        timed = self._config.sampling.time is not None
        return {**self._model.schema(self._ntype), "classes": self._classes, "times": timed}

    def answer(self, questions: Sequence[NodeQuestion]) -> list[AnswerRows | RequestError]:
        """Return the rows for each question, or what is wrong with it.

        Nodes of several questions are predicted in one batch where they sample alike; a node's
        sample does not depend on the others.
        """
        answers: list[Any] = [None] * len(questions)
        alike: dict[Any, list[tuple[int, np.ndarray, np.ndarray | None]]] = {}
        for number, one in enumerate(questions):
            try:
                self._check(one)
                positions = self.ids.positions(one.ids, "ids")
                found = number, positions, self._times(positions, one.at)
                alike.setdefault((one.fanout, one.scores), []).append(found)
            except RequestError as error:
                answers[number] = error
        for (fanout, scores), some in alike.items():
            _, nodes, times = zip(*some)
            rows = self._predict(fanout, scores, np.concatenate(nodes), times)
            for number, positions, when in some:
                own, rows = rows[: len(positions)], rows[len(positions) :]
                try:
                    answers[number] = self._explained(questions[number], own, positions, when)
                except RequestError as error:
                    answers[number] = error
        return answers

    def _check(self, one: NodeQuestion) -> None:
        depth, what, remedy = self._config.model.depth, None, "give equal ones"
        if one.fanout is not None and len(one.fanout) != depth:
            what = f"the model has {depth} layers"
            remedy = "give a number for each layer, from the nodes outward; -1 = all"
        elif self._config.model.draws_once and len({*(one.fanout or ())}) > 1:
            what = "all layers of this model see one graph, and these numbers differ"
        if what is not None:
            raise RequestError(what, where="fanout", remedy=remedy)

    def _predict(
        self, fanout: tuple[int, ...] | None, scores: bool, nodes: np.ndarray, every: Sequence[Any]
    ) -> AnswerRows:
        plane, ntype = self._plane, self._ntype
        timed = every[0] is not None
        given = nodes + plane.shard.first(ntype), np.concatenate(every) if timed else None
        ids, times, back = distinct(*given)
        when = times if timed else None
        model, hops = self._model.module.model, self._hops(fanout)
        outputs = plane.inference.outputs(model, ntype, ids, hops, times=when)
        return self._named(nodes, outputs[torch.from_numpy(back)], scores)

    def _hops(self, fanout: tuple[int, ...] | None) -> list[Fanout]:
        if fanout is None and self._plane.clock.latest:
            hops: list[Fanout] = self._plane.fanouts  # the model was trained on the latest edges
            return hops
        asked = (-1,) * self._config.model.depth if fanout is None else fanout
        return resolve_fanouts(asked, self._plane.shard.etypes)

    @cached_property
    def _explainer(self) -> Explainer:
        plane = self._plane
        columns = self._model.served.request.weights.columns or {}
        given = plane.inputs, plane.shard.node_data, columns
        return Explainer(self._model.module.model, *given)

    def _explained(
        self, one: NodeQuestion, rows: AnswerRows, positions: np.ndarray, times: np.ndarray | None
    ) -> AnswerRows:
        """Add an explanation to each row, if the question asks for it."""
        if not one.explain:
            return rows
        ntype, shard = self._ntype, self._plane.shard
        outputs = {**dict.fromkeys(shard.ntypes, 0), ntype: 1}
        every = [None] * len(positions) if times is None else times[:, None]
        for row, position, time in zip(rows, positions, every):
            seeds = {ntype: np.array([position + shard.first(ntype)])}
            when = None if time is None else {ntype: time}
            given, sources = self._plane.inference.neighbourhood(
                seeds, self._hops(one.fanout), when
            )
            found = self._explainer(given, outputs, self._scores)
            row["explanation"] = self._shown(found, sources, one.explain)
        return rows

    def _scores(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of classes or labels, or the first target."""
        task = self._config.task
        if task.classifies:
            return outputs.softmax(1)
        return outputs.sigmoid() if task.several_labels else outputs[:, :1]

    def _shown(self, found: Contributions, sources: Mapping[str, Ids], k: int) -> dict[str, Any]:
        def name(ntype: str, number: int) -> Any:
            (found,) = self._model.names(ntype, as_ids(sources[ntype])[[number]])
            return found

        return {
            "score": found.score,
            "without": found.without,
            "features": [
                {"type": ntype, "feature": feature, "contribution": value}
                for (ntype, feature), value in largest(found.features, k)
            ],
            "nodes": [
                {"type": ntype, "node": name(ntype, number), "contribution": value}
                for (ntype, number), value in largest(found.nodes, k)
            ],
            "edges": [
                {
                    "type": etype_str(etype),
                    "source": name(etype[0], source),
                    "target": name(etype[2], target),
                    "contribution": value,
                }
                for (etype, source, target), value in largest(found.edges, k)
            ],
        }

    def _named(self, nodes: np.ndarray, outputs: Tensor, scores: bool) -> AnswerRows:
        task = self._config.task
        form = Format("node", task.classifies, scores, task.several_labels)
        rows: AnswerRows = pa.table(form.columns(outputs)).to_pylist()
        names = self.ids.names(self._plane.shard.original[self._ntype][nodes])
        if self._classes is not None:
            for row in rows:
                row["prediction"] = self._classes[row["prediction"]]
        return [{"node": name, **row} for name, row in zip(names, rows)]

    def _times(self, positions: np.ndarray, at: Any) -> np.ndarray | None:
        """Return the time of each node, int64 ``[n]``; None if they have none."""
        plane, config = self._plane, self._config
        if config.sampling.time is None and at is None:
            return None
        if at is None and plane.clock.at is not None:
            return np.full(len(positions), plane.clock.at)
        if at is None and config.table is None and plane.time is not None:
            own: np.ndarray = plane.node_times(self._ntype)[positions]
            return own
        at = datetime.now(UTC).isoformat() if at is None else at
        try:
            moment = plane.clock.moment(moment_of(config, at, "at"), f"at {at}")
        except RaygnnError as error:
            raise RequestError(error.what, where="at", remedy=error.remedy) from None
        time = config.sampling.time
        if config.table is not None and time is not None and not time.strict:
            moment += 1  # a row sees what is of its own time
        return np.full(len(positions), moment)
