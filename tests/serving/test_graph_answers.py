"""A served model of whole graphs answers what predictions of the same run say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import raygnn
from raygnn.errors import InputError
from raygnn.graph.collection import MissingCollection, find_collection
from raygnn.graph.collection.mapped_collection import Sample, open_collection
from raygnn.graph.collection.pack import make_collection
from raygnn.graph.data import etype_str
from raygnn.prediction.request import ask as plan
from raygnn.runs.run import Run
from raygnn.sampling.collate import arrays_of
from raygnn.serving.application import _kinds
from raygnn.serving.link_graph_answers import GraphAnswers
from raygnn.serving.questions import GraphQuestion, RequestError
from raygnn.serving.served_run import Served, ServedModel
from tests.prediction.test_predict import ask
from tests.support.small_jobs import train_on_ranks
from tests.worker.test_graph_tasks import dataset, make

GRAPHS = {
    "features": {"graph": dataset(num=30)},
    "scaled": {"graph": {**dataset(num=30), "normalize": "row"}},
    "arrays on edges": {
        "graph": dataset("Bonds", num=30),
        "model": {
            "kind": "gin", "hidden": 8, "edge_features": "amount", "edge_categories": {"kind": 4},
        },
    },
    "your own class": {
        "graph": dataset("Bonds", num=30),
        "model": {"kind": "tests.worker.test_graph_tasks:OwnGin"},
    },
}  # fmt: skip


def serve(run: Run) -> GraphAnswers:
    (served,) = Served.find(run)
    return GraphAnswers(ServedModel(served))


def as_request(sample: Sample, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a graph as a request has it."""
    nodes, edges = {}, {}
    for ntype, arrays in schema["nodes"].items():
        nodes[ntype] = {name: sample.node_data[ntype][name].tolist() for name in arrays}
    for etype, (source, target) in sample.edges.items():
        name = etype_str(etype)
        edges[name] = {"source": source.tolist(), "target": target.tolist()}
        for array in schema["edges"][name]:
            edges[name][array] = arrays_of(sample, etype)[array].tolist()
    return {"nodes": nodes, "edges": edges}


@pytest.mark.dgl
@pytest.mark.parametrize("kind", GRAPHS)
def test_answers_are_predictions(kind: str, tmp_path: Path) -> None:
    """Also those of graphs without nodes, or without edges, and of several requests in a batch."""
    run = train_on_ranks(make(tmp_path, **GRAPHS[kind], train={"epochs": 1}))
    assert _kinds(run, None) == {"graph"}
    model = serve(run)
    config = plan(run, overrides=["cluster.workers=1"], display=False).config
    known = ask(run, config, 1).to_pandas()
    raw = config.model_copy(update={"graph": config.graph.model_copy(update={"normalize": None})})
    found = find_collection(raw)
    meta = make_collection(found) if isinstance(found, MissingCollection) else found
    samples = open_collection(config, meta.directory)
    graphs = [as_request(samples[number], model.schema()) for number in range(samples.num)]
    first, second = model.answer(
        [GraphQuestion(graphs[:7], scores=True), GraphQuestion(graphs[7:])]
    )
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert list(first[0]) == ["graph", "prediction", "probability", "scores"]
    assert [row["graph"] for row in second] == list(range(23))
    answers = pandas.DataFrame([*first, *second])
    np.testing.assert_allclose(answers["probability"], known["probability"], atol=1e-6)
    assert answers["prediction"].tolist() == known["prediction"].tolist()
    scores = np.stack(known["scores"])[:7]
    np.testing.assert_allclose(np.stack([row["scores"] for row in first]), scores, atol=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GraphAnswers:
    sections = GRAPHS["arrays on edges"]
    place = tmp_path_factory.mktemp("bonds")
    return serve(train_on_ranks(make(place, **sections, train={"epochs": 1})))


def bond(nodes: Any = None, **edges: Any) -> dict[str, Any]:
    arrays = {"source": [0, 1], "target": [1, 0], "amount": [0.5, 1], "kind": [0, 2], **edges}
    arrays = {name: rows for name, rows in arrays.items() if rows is not None}
    feat = [[0, 0, 0, 1], [1, 0, 0, 0.5]]
    return {"nodes": nodes or {"_N": {"feat": feat}}, "edges": {"_N:_E:_N": arrays}}


EDGES = "graphs[1].edges._N:_E:_N"


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("graph", "where", "what"),
    [
        (bond({"atom": {"feat": [[0, 0, 0, 1]]}}), "graphs[1].nodes", "'_N' is missing"),
        (bond({"_N": {"feat": [[1, 2, 3, 4]], "x": [1]}}), "graphs[1].nodes._N", "read 'x'"),
        (bond({"_N": {}}), "graphs[1].nodes._N", "'feat' is missing"),
        (bond({"_N": {"feat": [[1, 2]]}}), "graphs[1].nodes._N.feat", "rows of shape [4]"),
        (bond({"_N": {"feat": [[1, 2, 3, 4], [1]]}}), "graphs[1].nodes._N.feat", "shape [4]"),
        (bond({"_N": {"feat": [["a", 2, 3, 4]]}}), "graphs[1].nodes._N.feat", "float32"),
        (bond({"_N": {"feat": [[None, 2, 3, 4]]}}), "graphs[1].nodes._N.feat", "float32"),
        (bond({"_N": {"feat": [[True, True, True, True]]}}), "graphs[1].nodes._N.feat", "float32"),
        (bond({"_N": {"feat": [[1e39, 2, 3, 4]]}}), "graphs[1].nodes._N.feat", "finite"),
        (bond(source=None), EDGES, "'source' is missing"),
        (bond(source=[0, 2]), f"{EDGES}.source", "no 2 among the 2"),
        (bond(target=[-1, 0]), f"{EDGES}.target", "no -1 among the 2"),
        (bond(target=[0.5, 0]), f"{EDGES}.target", "int64"),
        (bond(target=[0]), f"{EDGES}.target", "it has 1 rows, and amount 2"),
        (bond(target=[10**30, 0]), f"{EDGES}.target", "int64"),
        (bond(kind=[0, 3]), f"{EDGES}.kind", "no 3 among the 3"),
        (bond(amount=[[1], [2]]), f"{EDGES}.amount", "rows of shape []"),
        (bond(weight=[1, 2]), EDGES, "read 'weight'"),
    ],
)
def test_what_the_model_cannot_read(
    model: GraphAnswers, graph: dict[str, Any], where: str, what: str
) -> None:
    alone, other, fine = model.answer(
        [GraphQuestion([bond()]), GraphQuestion([bond(), graph]), GraphQuestion([bond(), bond()])]
    )
    assert isinstance(other, RequestError)
    assert (other.where, what in other.what) == (where, True), other
    assert other.remedy
    assert isinstance(alone, list)
    assert isinstance(fine, list)
    assert fine[1]["probability"] == pytest.approx(alone[0]["probability"], abs=1e-6)


@pytest.mark.dgl
def test_the_schema_says_what_to_send(model: GraphAnswers) -> None:
    schema = model.schema()
    assert schema["nodes"] == {"_N": {"feat": ["float32", [4]]}}
    edges = schema["edges"]["_N:_E:_N"]
    assert edges == {"amount": ["float32", []], "kind": ["int64", []]}


@pytest.mark.dgl
def test_features_that_were_scaled_over_all_graphs(tmp_path: Path) -> None:
    graph = {**dataset(num=30), "normalize": "standard"}
    run = train_on_ranks(make(tmp_path, graph=graph, train={"epochs": 1}))
    with pytest.raises(InputError, match="scales features over all graphs"):
        Served.find(run)


@pytest.mark.dgl
def test_nodes_that_cannot_be_counted_fail_their_request_alone(
    model: GraphAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_read", lambda kind: ())
    graph = {"nodes": {"_N": {}}, "edges": {"_N:_E:_N": {"source": [], "target": []}}}
    (answer,) = model.answer([GraphQuestion([graph])])
    assert isinstance(answer, RequestError)
    assert (answer.where, "count them" in answer.what) == ("graphs[0].nodes._N", True)


@pytest.mark.dgl
def test_graphs_are_not_explained(model: GraphAnswers) -> None:
    with pytest.raises(InputError, match="predictions for nodes are explained"):
        raygnn.explain(model._model.served.config.run_dir, [3])
