"""Answers of models that score links, or predict for the graphs in a request."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from raygnn.errors import InputError
from raygnn.graph.arrays import dtype_name
from raygnn.graph.collection.mapped_collection import Sample
from raygnn.graph.data import EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.sources import normalize
from raygnn.models.heads import EdgeModel
from raygnn.sampling.collate import arrays_of, names_of
from raygnn.sampling.negatives import ENDS
from raygnn.serving.questions import (
    AnswerRows,
    GraphQuestion,
    GraphRows,
    ListQuestion,
    PairQuestion,
    RequestError,
)
from raygnn.serving.served_run import ServedModel
from raygnn.worker.job import TopLists
from raygnn.worker.planes.prediction_rows import Format, relation_of
from raygnn.worker.planes.recommendations import Recommender

_SEARCHES = 8  # cached searches, one for each relation
_SEE = "see /schema"


class LinkAnswers:
    """Answers questions about links, from embeddings of all sources and targets."""

    def __init__(self, served: ServedModel):
        self._model, self._plane, self._request = served, served.plane, served.served.request
        shard, model = self._plane.shard, served.module.model
        assert isinstance(model, EdgeModel)
        self._ends = self._plane.etype[0], self._plane.etype[2]
        nodes = {t: shard.first(t) + np.arange(shard.owned(t)) for t in self._ends}
        self._rows = self._plane.inference.represent(model.encoder, nodes)
        self._decoder = copy.deepcopy(model.decoder).float().eval()
        self._search = lru_cache(_SEARCHES)(self._new_search)

    @property
    def _relations(self) -> list[str]:
        """Names of the relations; empty if edges have one."""
        array = self._plane.target.relation
        if array is None:
            return []
        words = self._model.served.words.get(f"{etype_str(self._plane.etype)}/{array}", ())
        return [str(word) for word in words or range(self._plane.relations)]

    def schema(self) -> dict[str, object]:
        """Describe the model for callers, as plain JSON types."""
        return {**self._model.schema(*self._ends), "relations": self._relations}

    def answer(
        self, questions: Sequence[PairQuestion | ListQuestion]
    ) -> list[AnswerRows | RequestError]:
        """Return the rows for each question, or its error."""
        answers: list[AnswerRows | RequestError] = []
        for one in questions:
            try:
                relation = self._relation(one.relation)
                if isinstance(one, ListQuestion):
                    answers.append(self._lists(one))
                else:
                    answers.append(self._scores(one, relation))
            except RequestError as error:
                answers.append(error)
        return answers

    def _relation(self, asked: str | None) -> int:
        plane = self._plane
        try:
            return relation_of(asked, plane.target.relation, self._relations, plane.relations)
        except InputError as error:
            remedy = (error.remedy or "").replace("--relation", "it")
            raise RequestError(error.what, where="relation", remedy=remedy) from None

    def _lists(self, one: ListQuestion) -> AnswerRows:
        search, source = self._search(one.relation, one.known == "keep"), self._ends[0]
        sources = self._model.ids(source).positions(one.ids, "ids")
        found = search.lists(sources, self._of(source, sources), one.k).table()
        rows: AnswerRows = found.to_pylist()
        for end, ntype in zip(ENDS, self._ends):
            names = self._model.ids(ntype).names(found[end].to_numpy())
            rows = [{**row, end: name} for row, name in zip(rows, names)]
        return rows

    def _scores(self, one: PairQuestion, relation: int) -> AnswerRows:
        named = zip(self._ends, zip(*one.pairs))
        rows = [self._of(t, self._model.ids(t).positions(ids, "pairs")) for t, ids in named]
        kinds = torch.full((len(one.pairs),), relation, device=self._plane.ranks.device)
        with torch.no_grad():
            scores = self._decoder.scores(*rows, kinds).float().cpu().tolist()
        return [{"source": s, "target": t, "score": x} for (s, t), x in zip(one.pairs, scores)]

    def _of(self, ntype: str, positions: np.ndarray) -> Tensor:
        rows = self._rows[ntype].rows[torch.from_numpy(positions)]
        return rows.to(self._plane.ranks.device)

    def _new_search(self, relation: str | None, known: bool) -> Recommender:
        lists = TopLists(1, known=not known, relation=relation)
        request = replace(self._request, lists=lists)
        return Recommender(*self._model.opened, request, rows=self._rows)


class GraphAnswers:
    """Answers questions about graphs with the schema of the training graphs."""

    def __init__(self, model: ServedModel):
        self._model, self._config, self._plane = model, model.served.one, model.plane
        self._pattern: Sample = self._plane.pattern

    def schema(self) -> dict[str, Any]:
        """Describe the model for callers, as plain JSON types: with the dtype and shape of a row of
        each array that it reads, by node and edge type."""

        def arrays(kind: str | EdgeType) -> dict[str, Any]:
            likes = arrays_of(self._pattern, kind)
            return {
                name: [dtype_name(likes[name]), list(likes[name].shape[1:])]
                for name in self._read(kind)
            }

        nodes = {ntype: arrays(ntype) for ntype in self._pattern.num_nodes}
        edges = {etype_str(etype): arrays(etype) for etype in self._pattern.edges}
        return {**self._model.schema(), "nodes": nodes, "edges": edges}

    def answer(self, questions: Sequence[GraphQuestion]) -> list[AnswerRows | RequestError]:
        """Return the rows for each question, or its error."""
        samples, errors = list[Sample](), dict[int, RequestError]()
        for number, one in enumerate(questions):
            try:
                samples += [self._sample(g, f"graphs[{k}]") for k, g in enumerate(one.graphs)]
            except RequestError as error:
                errors[number] = error
        outputs = torch.empty(0)
        if samples:
            outputs = self._plane.outputs(self._model.module, samples)
        answers, task = list[AnswerRows | RequestError](), self._config.task
        for number, one in enumerate(questions):
            if number in errors:
                answers.append(errors[number])
                continue
            count = len(one.graphs)
            form = Format("graph", task.classifies, one.scores, task.several_labels)
            rows = pa.table(form.columns(outputs[:count])).to_pylist()
            answers.append([{"graph": graph, **row} for graph, row in enumerate(rows)])
            outputs = outputs[count:]
        return answers

    def _sample(self, graph: GraphRows, where: str) -> Sample:
        """Return a graph of a request. Raises RequestError if the model cannot read it."""
        types = {etype_str(etype): etype for etype in self._pattern.edges}
        _check_names(graph.nodes, self._pattern.num_nodes, f"{where}.nodes")
        _check_names(graph.edges, types, f"{where}.edges")
        edges, edge_data = {}, {}
        nodes = {t: self._arrays(t, of, f"{where}.nodes.{t}") for t, of in graph.nodes.items()}
        sizes = {ntype: len(next(iter(arrays.values()))) for ntype, arrays in nodes.items()}
        for name, given in graph.edges.items():
            arrays = self._arrays(types[name], given, f"{where}.edges.{name}")
            ends = [arrays.pop(end) for end in ENDS]
            for end, ids, ntype in zip(ENDS, ends, types[name][::2]):
                _check_range(ids, sizes[ntype], f"{where}.edges.{name}.{end}")
            edges[types[name]], edge_data[types[name]] = (ends[0], ends[1]), arrays
        frames = {ntype: NodeFrame(sizes[ntype], arrays) for ntype, arrays in nodes.items()}
        normalize(GraphData("", frames, {}), self._model.served.graph.get("normalize") or "none")
        return Sample(sizes, edges, nodes, edge_data, self._pattern.y)

    def _arrays(
        self, kind: str | EdgeType, given: Mapping[str, Sequence[Any]], where: str
    ) -> dict[str, Tensor]:
        """Return the arrays of a type that the model reads, for edges also their ends."""
        likes = {name: arrays_of(self._pattern, kind)[name] for name in self._read(kind)}
        if not isinstance(kind, str):
            likes |= dict.fromkeys(ENDS, torch.empty(0, dtype=torch.int64))
        _check_names(given, likes, where)
        if not likes:
            what = "the model reads no array of these nodes, from which to count them"
            raise RequestError(what, where=where, remedy="use predict with --new-data")
        schema = self._plane.schema
        categories = {**schema.categories, **schema.edge_categories}.get(kind, {})
        arrays = {name: _rows(given[name], like, f"{where}.{name}") for name, like in likes.items()}
        first = min(arrays)
        for name, rows in arrays.items():
            if len(rows) != len(arrays[first]):
                what = f"it has {len(rows)} rows, and {first} {len(arrays[first])}"
                raise RequestError(what, where=f"{where}.{name}", remedy="give equally many")
            if name in categories:
                _check_range(rows, categories[name][0], f"{where}.{name}")
        return arrays

    def _read(self, kind: str | EdgeType) -> Collection[str]:
        """Return the names of the arrays of a type that the model reads."""
        if self._config.model.takes_dgl:
            return arrays_of(self._pattern, kind)
        inputs = {**self._plane.inputs, **self._plane.edge_inputs}
        return names_of(inputs[kind]) if kind in inputs else ()


def _check_names(given: Mapping[str, Any], wanted: Collection[str], where: str) -> None:
    for name in sorted({*given} ^ {*wanted}):
        what = f"{name!r} is missing" if name in wanted else f"the model does not read {name!r}"
        raise RequestError(what, where=where, remedy=f"give {', '.join(wanted) or 'none'}; {_SEE}")


def _check_range(numbers: Tensor, count: int, where: str) -> None:
    for number in numbers[(numbers < 0) | (numbers >= count)].tolist():
        what = f"there is no {number} among the {count}, which are numbered from 0"
        raise RequestError(what, where=where, remedy=f"give numbers below {count}")


def _rows(given: Sequence[Any], like: Tensor, where: str) -> Tensor:
    """Return rows with the shape and dtype of the rows of ``like``."""
    shape, floating = (len(given), *like.shape[1:]), like.is_floating_point()
    kinds = "if" if floating else "b" if like.dtype == torch.bool else "i"
    try:
        rows = np.array(given) if given else np.empty(shape, np.int64)
    except ValueError:  # ragged
        rows = np.empty(0, object)
    if given and (rows.shape != shape or rows.dtype.kind not in kinds):
        what = f"expected a list of rows of shape {list(shape[1:])} and {dtype_name(like)}"
        raise RequestError(what, where=where, remedy=_SEE)
    found = torch.from_numpy(rows).to(like.dtype)
    whole = found.isfinite() if floating else found == torch.from_numpy(rows)
    if not whole.all():
        what = "a number is not finite as" if floating else "a number does not fit"
        raise RequestError(f"{what} {dtype_name(like)}", where=where, remedy=_SEE)
    return found
