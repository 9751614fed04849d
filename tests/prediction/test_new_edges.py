"""Predictions for edges of data that the model was not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raygnn
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.graph.data import GraphData
from raygnn.graph.dgl import dgl
from raygnn.prediction.driver_side import _since
from raygnn.prediction.request import ask as plan
from tests.prediction.test_new_data import asked
from tests.prediction.test_predict import ask
from tests.support.graphs import partitioned
from tests.support.small_jobs import train_on_ranks
from tests.worker.test_edge_tasks import LIKED_BY, LIKES, LINKS, config_of, shop
from tests.worker.test_events import events
from tests.worker.test_events import run as events_run
from tests.worker.test_multitask import KIND, TASKS, several

pytestmark = pytest.mark.long

STARS = {"kind": "edge_regression", "etype": "likes", "target": "stars", "reverse": "liked_by"}


def new(tmp_path: Path, data: GraphData, parts: int = 2) -> str:
    (tmp_path / "new").mkdir(exist_ok=True)
    return f"partition.path={partitioned(data, tmp_path / 'new', parts).directory}"


def without(*names: str) -> GraphData:
    data = shop()
    for name in names:
        del data.edges[LIKES].data[name]
    return data


@pytest.mark.parametrize(
    ("workers", "task"), [(1, KIND), (2, STARS), (2, {**LINKS, "negatives": {"number": 20}})]
)
def test_the_same_edges_get_the_same(workers: int, task: dict[str, Any], tmp_path: Path) -> None:
    """The training's edges, passed as new ones without labels, get the same predictions: edges for
    validation and test are hidden from messages here, too."""
    run = train_on_ranks(config_of(tmp_path, "edges", task=task, train={"epochs": 1}))
    config = Config.model_validate(run.config, strict=False)
    known = ask(run, config, 2).to_pandas()
    found = asked(run, new(tmp_path, without("label", "stars"), workers))
    frame = ask(run, found.config, workers, sizes=found.weights.sizes).to_pandas()
    assert frame["edge"].tolist() == known["edge"].tolist()
    value = "score" if task["kind"] == "link_prediction" else "prediction"
    assert frame[value].to_numpy() == pytest.approx(known[value].to_numpy(), abs=1e-4)
    assert (frame["split"].fillna("") == known["split"].fillna("")).all()
    assert "label" not in frame or frame["label"].isna().all()


def test_edges_without_masks(tmp_path: Path) -> None:
    """All edges are known: they carry messages, and none is in a split."""
    run = train_on_ranks(config_of(tmp_path, "edges", task=KIND, train={"epochs": 8}))
    masks = [f"{name}_mask" for name in ("train", "val", "test")]
    truth = shop().edges[LIKES].data["label"]
    found = asked(run, new(tmp_path, without("label", *masks)))
    frame = ask(run, found.config, 2, sizes=found.weights.sizes).to_pandas()
    assert (frame["prediction"] == truth).mean() > 0.8
    assert frame["split"].isna().all()
    assert not ask(run, found.config, 2, sizes=found.weights.sizes, split="test", rows=False)


def test_evaluated_where_they_have_labels(tmp_path: Path) -> None:
    run = train_on_ranks(config_of(tmp_path, "edges", task=KIND, train={"epochs": 2}))
    found = plan(
        run, ("test",), "test", overrides=[new(tmp_path, shop())], display=False, new_data=True
    )
    values = ask(run, found.config, 2, sizes=found.weights.sizes, split="test", rows=False)
    wanted = run.summary["metrics"]["test/accuracy"]
    assert values["test/accuracy"] == pytest.approx(wanted, abs=1e-6)


def test_several_tasks_too(tmp_path: Path) -> None:
    run = train_on_ranks(several(tmp_path, train={"epochs": 2}))
    config = Config.model_validate(run.config, strict=False)
    data = without("label")
    del data.nodes["thing"].data["price"]
    found = asked_of(run, "kind", new(tmp_path, data))
    for task in TASKS:
        known = ask(run, config, 2, task=task).to_pandas()
        frame = ask(run, found.config, 2, sizes=found.weights.sizes, task=task).to_pandas()
        value = "score" if task == "link" else "prediction"
        assert frame[value].to_numpy() == pytest.approx(known[value].to_numpy(), abs=1e-4)


def test_only_one_of_the_tasks_reads_relations(tmp_path: Path) -> None:
    """Edges of the other type have no relations, neither in the training's data nor in other
    data."""
    back = {"kind": "link_prediction", "etype": "liked_by", "reverse": "likes", "decoder": "dot"}
    masks = {
        f"{name}_mask": shop().edges[LIKES].data[f"{name}_mask"]
        for name in ("train", "val", "test")
    }
    data = shop()
    data.edges[LIKED_BY].data |= masks
    tasks = {"link": TASKS["link"], "back": back}
    run = train_on_ranks(several(tmp_path, data=data, tasks=tasks, train={"epochs": 1}))
    config = Config.model_validate(run.config, strict=False)
    found = asked_of(run, "back", new(tmp_path, data))
    for task in tasks:
        known = ask(run, config, 2, task=task).to_pandas()
        frame = ask(run, found.config, 2, sizes=found.weights.sizes, task=task).to_pandas()
        assert frame["score"].to_numpy() == pytest.approx(known["score"].to_numpy(), abs=1e-4)


@pytest.mark.dgl
@pytest.mark.parametrize("kind", ["edge_classification", "link_prediction"])
def test_only_later_edges(kind: str, tmp_path: Path) -> None:
    """A later month's data have the edges of the training, too: these get no row, unless they are
    asked for. Each row has its edge's time."""
    events(tmp_path / "whole.dgl")
    (graph,), _ = dgl().load_graphs(str(tmp_path / "whole.dgl"))
    at = graph.edata["at"].numpy()
    early = graph.edge_subgraph(torch.from_numpy(at < 870), relabel_nodes=False)
    dgl().save_graphs(str(tmp_path / "early.dgl"), [early])
    run = events_run(tmp_path, tmp_path / "early.dgl", kind, train={"epochs": 1})
    found = asked(run, f"graph.path={tmp_path / 'whole.dgl'}")

    def rows(workers: int, split: str | None = None, since: Any = None) -> Any:
        begin = _since(found, split, since)
        sizes = found.weights.sizes
        return ask(run, found.config, workers, sizes=sizes, since=begin).to_pandas()

    for workers in (1, 2):
        frame = rows(workers)
        assert frame["edge"].tolist() == np.flatnonzero(at >= 870).tolist()
        assert frame["time"].tolist() == at[at >= 870].tolist()
    every = rows(2, "all")
    assert every["time"].tolist() == at.tolist()
    value = "score" if kind == "link_prediction" else "probability"
    some = every.loc[frame["edge"], value].to_numpy()
    assert frame[value].to_numpy() == pytest.approx(some, abs=1e-4)
    assert rows(1, since="950")["edge"].tolist() == np.flatnonzero(at >= 950).tolist()
    config = Config.model_validate(run.config, strict=False)
    tests = ask(run, config, 2, split="test", since=850).to_pandas()  # of the training's data
    assert tests["time"].tolist() == [t for t in early.edata["at"].tolist() if t >= 850]
    assert _since(plan(run, display=False), None, None) is None
    data = [f"graph.path={tmp_path / 'whole.dgl'}"]
    new = plan(run, overrides=data, display=False, new_data=True, one=True, at=900)
    assert _since(new, None, None) is None


@pytest.mark.dgl
def test_later_edges_in_another_unit(tmp_path: Path) -> None:
    """Training used seconds; new data in milliseconds would all be later."""
    file = tmp_path / "graph.dgl"
    events(file)
    (graph,), _ = dgl().load_graphs(str(file))
    graph.edata["at"] += 1_700_000_000
    dgl().save_graphs(str(file), [graph])
    task = {"split": {"by": "time", "val": 0.1, "test": 0.1}}
    run = events_run(tmp_path, file, "edge_classification", task=task, train={"epochs": 1})
    graph.edata["at"] *= 1000
    dgl().save_graphs(str(tmp_path / "new.dgl"), [graph])
    found = asked(run, f"graph.path={tmp_path / 'new.dgl'}")
    sizes, begin = found.weights.sizes, _since(found, None, None)
    message = r"'at' of edge type .*: 17.*, milliseconds .*; --since 17.*, seconds"
    with pytest.raises((DataError, RuntimeError), match=message):
        ask(run, found.config, 1, sizes=sizes, since=begin)
    assert ask(run, found.config, 1, sizes=sizes, since=1_700_000_500_000).num_rows > 0


@pytest.mark.dgl
def test_since_needs_edges_with_times(tmp_path: Path) -> None:
    events(tmp_path / "graph.dgl")
    nodes = events_run(tmp_path, tmp_path / "graph.dgl", "node_classification", train={"epochs": 1})
    timeless = train_on_ranks(config_of(tmp_path, "edges", task=KIND, train={"epochs": 1}))
    for run, what in ((nodes, "predicts for nodes"), (timeless, "trained without times")):
        with pytest.raises(InputError, match=what) as error:
            raygnn.predict(run, out=tmp_path / "out.parquet", since=5, display=False)
        assert "--since 5" in str(error.value)


def asked_of(run: Any, task: str, *overrides: str) -> Any:
    return plan(run, overrides=overrides, display=False, new_data=True, task=task, one=True)


def test_edges_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    """Refused are more classes than the model knows, and edges without the relations that its
    decoder reads."""
    decoder = {"decoder": "distmult"}
    run = train_on_ranks(
        config_of(tmp_path, "links", task=LINKS, model=decoder, train={"epochs": 1})
    )
    found = asked(run, new(tmp_path, without("relation")))
    assert found.config.model.relation == "relation"
    with pytest.raises(AssertionError, match="no array 'relation'"):
        ask(run, found.config, 1, sizes=found.weights.sizes)

    run = train_on_ranks(config_of(tmp_path, "kinds", task=KIND, train={"epochs": 1}))
    data = shop()
    data.edges[LIKES].data["label"] = data.edges[LIKES].data["label"] + 3
    (tmp_path / "more").mkdir()
    found = asked(run, new(tmp_path / "more", data))
    with pytest.raises(RuntimeError, match="7 classes, but the model was trained for 4"):
        ask(run, found.config, 2, sizes=found.weights.sizes)

    data = shop()
    data.edges[LIKED_BY].src = np.flip(data.edges[LIKED_BY].src)
    with pytest.raises(InputError, match="no new data are named"):
        asked(run)
