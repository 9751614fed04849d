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

from raygnn.errors import DataError, RaygnnError
from raygnn.graph.data import etype_str
from raygnn.graph.staging.neighbourhood import neighbourhood
from raygnn.graph.staging.shard import Shard
from raygnn.prediction.request import moment_of
from raygnn.sampling.collate import names_of
from raygnn.sampling.exchange import Ids, as_ids
from raygnn.sampling.plan import Fanout, resolve_fanouts
from raygnn.sampling.seeds import distinct
from raygnn.serving.explanations import Contributions, Explainer, largest
from raygnn.serving.new_rows import RowReader
from raygnn.serving.questions import AnswerRows, NodeQuestion, RequestError, UserId
from raygnn.serving.served_run import ServedModel
from raygnn.worker.planes.prediction_rows import Format
from raygnn.worker.planes.vocabulary import edge_reads, target_key

_MOST_EDGES = 1_000_000  # of a neighbourhood with new rows


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
        found = {**self._model.schema(self._ntype), "classes": self._classes, "times": timed}
        try:
            return {**found, "new": self._rows.schema()}
        except RequestError:
            return found

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
                if one.nodes or one.edges:
                    answers[number] = self._with_new(one)
                    continue
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
        plane = self._plane
        times = None if every[0] is None else np.concatenate(every)
        ids = nodes + plane.shard.first(self._ntype)
        outputs = self._outputs(plane.inference, fanout, ids, times)
        names = self.ids.names(plane.shard.original[self._ntype][nodes])
        return self._named(names, outputs, scores)

    def _outputs(
        self,
        inference: Any,
        fanout: tuple[int, ...] | None,
        nodes: np.ndarray,
        times: np.ndarray | None,
    ) -> Tensor:
        ids, when, back = distinct(nodes, times)
        model, hops = self._model.module.model, self._hops(fanout)
        given = None if times is None else when
        outputs = inference.outputs(model, self._ntype, ids, hops, times=given)
        return outputs[torch.from_numpy(back)]

    @cached_property
    def _rows(self) -> RowReader:
        """Raises RequestError if a request cannot have new rows."""
        served, config, what = self._model.served, self._config, None
        graph, remedy = served.graph, "ask for nodes of the graph"
        if graph.get("format") != "tables":
            what = "the graph of this run is not made of tables"
        elif config.model.embedding is not None:
            what = "new nodes have no rows in the embedding table (model.embedding)"
        elif (how := graph.get("normalize")) not in (None, "none"):
            what = f"features are scaled by all of them (graph.normalize: {how})"
        if what is not None:
            raise RequestError(what, where="nodes, edges", remedy=remedy)
        try:
            about = served.request.weights.about
            return RowReader({**graph, "vocabulary": about}, self._model.ids, served.partition)
        except RaygnnError as error:
            raise RequestError(error.what, where=error.where, remedy=error.remedy) from None

    def _with_new(self, one: NodeQuestion) -> AnswerRows:
        """Return the rows for a question with new nodes or edges."""
        if one.explain:
            what = "predictions from new rows are not explained"
            raise RequestError(what, where="explain", remedy="leave it out")
        plane, ntype = self._plane, self._ntype
        added, numbers = self._rows.read(one.nodes, one.edges)
        own = numbers.get(ntype, {})
        known = [name for name in one.ids if name not in own]
        places = {**own, **dict(zip(known, self.ids.positions(known, "ids").tolist()))}
        ids = np.array([places[name] for name in one.ids])
        arrays = {t: {*names_of(inputs)} for t, inputs in plane.inputs.items()}
        if plane.time is not None and self._config.table is None:
            arrays[ntype].add(plane.time)
        reads = edge_reads(self._config)
        read = self._config.model.depth, reads, arrays, _MOST_EDGES
        try:
            for etype, edges in added[1].items():
                if (name := reads.time) is not None and name in edges.data:
                    times, kind = edges.data[name], etype_str(etype)
                    plane.clock.check(times, kind, name, note=" (of this request)")
            part = neighbourhood(plane.shard, added, {ntype: ids}, *read)
        except DataError as error:
            where = error.where or "ids"
            raise RequestError(error.what, where=where, remedy=error.remedy) from None
        local = np.searchsorted(part.ids[ntype], ids)
        when = self._times(local, one.at, part)
        outputs = self._outputs(plane.inference_over(part), one.fanout, local, when)
        return self._named(one.ids, outputs, one.scores)

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

    def _named(self, names: Sequence[UserId], outputs: Tensor, scores: bool) -> AnswerRows:
        task = self._config.task
        form = Format("node", task.classifies, scores, task.several_labels)
        rows: AnswerRows = pa.table(form.columns(outputs)).to_pylist()
        if self._classes is not None:
            for row in rows:
                row["prediction"] = self._classes[row["prediction"]]
        return [{"node": name, **row} for name, row in zip(names, rows)]

    def _times(
        self, positions: np.ndarray, at: Any, part: Shard | None = None
    ) -> np.ndarray | None:
        """Return the time of each node, int64 ``[n]``; None if they have none.

        Args:
            positions: in ``part``, or else in the shard.
        """
        plane, config = self._plane, self._config
        if config.sampling.time is None and at is None:
            return None
        if at is None and plane.clock.at is not None:
            return np.full(len(positions), plane.clock.at)
        if at is None and config.table is None and plane.time is not None:
            own: np.ndarray = plane.node_times(self._ntype)
            if part is not None:
                own = part.node_data[self._ntype][plane.time].flatten().numpy()
            return own[positions]
        at = datetime.now(UTC).isoformat() if at is None else at
        try:
            moment = plane.clock.moment(moment_of(config, at, "at"), f"at {at}")
        except RaygnnError as error:
            raise RequestError(error.what, where="at", remedy=error.remedy) from None
        time = config.sampling.time
        if config.table is not None and time is not None and not time.strict:
            moment += 1  # a row sees what is of its own time
        return np.full(len(positions), moment)
