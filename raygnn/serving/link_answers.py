"""Answers of a model that scores links."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import InputError
from raygnn.graph.data import etype_str
from raygnn.models.heads import EdgeModel
from raygnn.serving.questions import AnswerRows, ListQuestion, PairQuestion, RequestError
from raygnn.serving.served_run import ServedModel
from raygnn.worker.job import TopLists
from raygnn.worker.planes.prediction_rows import relation_of
from raygnn.worker.planes.recommendations import Recommender

_SEARCHES = 8  # cached searches, one for each relation


class LinkAnswers:
    """Answers questions about links, from embeddings of all sources and targets."""

    def __init__(self, served: ServedModel):
        self._model, self._plane, self._request = served, served.plane, served.served.request
        shard, model = self._plane.shard, served.module.model
        assert isinstance(model, EdgeModel)
        self._ends = self._plane.etype[0], self._plane.etype[2]
        nodes = {t: shard.first(t) + np.arange(shard.owned(t)) for t in self._ends}
        with ExitStack() as held:
            inference = self._plane.inference
            held.enter_context(inference.represented(model.encoder, nodes))
            self._rows = inference.represent(model.encoder, nodes)
            held.pop_all()  # every search reads the rows, so they are never released
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
        for end, ntype in zip(("source", "target"), self._ends):
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
        return Recommender(*self._model.opened, replace(self._request, lists=lists))
