"""Jobs of recommenders: embedding tables of people and things, without other weights."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.prediction.export import Exported, export
from tests.prediction.test_predict import ask
from tests.support.graphs import partitioned
from tests.support.pages import CHECKOUT
from tests.support.plain_embeddings import learned_rows
from tests.support.small_jobs import job, losses, train_on_ranks
from tests.worker.test_edge_tasks import LINKS, shop

pytestmark = pytest.mark.long

MODELS: dict[str, dict[str, Any]] = {
    "lightgcn": {"kind": "lightgcn", "layers": 2, "dim": 8},
    "factors": {"kind": "none", "dim": 8},
}


def recommender(tmp_path: Path, name: str, model: str, **more: Any) -> Config:
    """Return a job on people who like things, whose features it does not read."""
    data = shop()
    for frame in data.nodes.values() if model == "factors" else ():
        frame.data["unread"] = frame.data.pop("feat")[:, :1] > 0.5
    given = dict(MODELS[model])
    kind, dim, layers = given["kind"], given["dim"], given.get("layers", 0)
    workers = more.pop("workers", 2)
    sections: dict[str, Any] = {
        "task": {**LINKS, "loss": "bpr", "negatives": {"number": 40}, **more.pop("task", {})},
        "model": {"kind": kind, "decoder": "dot", "embedding": {"dim": dim}},
        "sampling": {"batch_size": 60 // workers},
        "cluster": {"workers": workers},
        "train": {"epochs": 1, "lr": 0.02, **more.pop("train", {})},
    }
    if layers:
        sections["model"]["layers"] = layers
        sections["sampling"]["fanout"] = [-1] * layers
    meta = partitioned(data, tmp_path, more.pop("parts", 2))
    values = job(tmp_path, name=name, **sections, **more)
    values |= {"graph": None, "partition": {"path": str(meta.directory)}}
    for section in ("model", "sampling"):
        values[section] = sections[section]  # without keys of other models
    return load_config(values)


@pytest.mark.parametrize(("model", "negatives"), [*zip(MODELS, ("uniform", "in_batch"))])
def test_any_ranks_train_the_same(model: str, negatives: str, tmp_path: Path) -> None:
    """Losses, rows and metrics are equal for full neighbourhoods and the same batches; negatives
    that form a training edge do not count on any rank."""
    found = []
    task: dict[str, Any] = {"negatives": {"number": 40}}
    if negatives == "in_batch":
        given = {"kind": "in_batch", "correct": True, "filtered": True}
        task = {"loss": "softmax", "temperature": 0.5, "negatives": given}
    for workers, parts, replicated in ((1, 1, True), (2, 2, True), (3, 2, False)):
        name = f"{workers}-{replicated}"
        config = recommender(tmp_path, name, model, workers=workers, parts=parts, task=task)
        run = train_on_ranks(config, replicated=replicated)
        found.append((losses(run), run.summary["metrics"], learned_rows(run)))
    for other, metrics, rows in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-4
        assert metrics == pytest.approx(found[0][1], abs=1e-3)
        assert all(np.abs(rows[t] - found[0][2][t]).max() < 1e-3 for t in rows)


@pytest.mark.parametrize("model", MODELS)
def test_a_resume_is_bitwise_identical(model: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"fault": {"checkpoint_every": 7}}
    train = {"epochs": 2}
    whole = train_on_ranks(recommender(tmp_path, "whole", model, train=train, **more))
    stop = {**train, "max_steps": 12}
    train_on_ranks(recommender(tmp_path, "half", model, train=stop, **more))
    resumed = train_on_ranks(recommender(tmp_path, "half", model, train=train, **more), resume=True)
    assert len(losses(whole)) > 17
    assert losses(resumed)[-5:].tolist() == losses(whole)[-5:].tolist()
    for ntype, rows in learned_rows(whole).items():
        assert np.array_equal(rows, learned_rows(resumed)[ntype])


@pytest.mark.parametrize("model", MODELS)
def test_recommendations_are_learnt_predicted_and_exported(model: str, tmp_path: Path) -> None:
    """Rows are all that is read; the only parameter stays 0. The exported programs give the scores
    of the predictions."""
    run = train_on_ranks(recommender(tmp_path, "run", model, train={"epochs": 20, "lr": 0.05}))
    assert losses(run)[-1] < 0.6 * losses(run)[0]
    assert run.summary["metrics"]["test/mrr"] > 0.1
    weights = torch.load(run.path / "checkpoints" / "selected.pt", weights_only=True)
    assert {name: value.tolist() for name, value in weights.items()} == {"idle": [0.0]}
    config = recommender(tmp_path, "run", model)
    scores = ask(run, config, 1)["score"].to_numpy()
    rows = {
        t: torch.tensor(
            np.stack(ask(run, config, 2, embeddings=True, ntype=t).to_pandas()["embedding"])
        )
        for t in ("person", "thing")
    }
    likes = shop().edges[("person", "likes", "thing")]
    pairs = [rows[t][ends] for t, ends in (("person", likes.src), ("thing", likes.dst))]
    assert np.allclose(scores, (pairs[0] * pairs[1]).sum(1), atol=1e-4)
    assert isinstance(export(run, out=tmp_path / "out"), Exported)


def test_stars_are_predicted_almost_as_well_as_can_be(tmp_path: Path) -> None:
    """The job of the documentation, on fewer customers and by one rank for a few epochs."""
    example = runpy.run_path(str(CHECKOUT / "examples" / "purchases.py"))
    example["write"](tmp_path, 400)
    changes = {"graph.path": str(tmp_path / "tables.yaml"), "storage": str(tmp_path / "runs")}
    changes |= {
        "cluster.workers": 1,
        "train.epochs": 12,
        "model.layers": 1,
        "sampling.fanout": [-1],
    }
    run = train_on_ranks(load_config(CHECKOUT / "jobs" / "purchase-stars.yaml", changes))
    spread = pandas.read_csv(tmp_path / "purchases.csv")["stars"].std()
    error = run.summary["metrics"]["test/rmse"]
    assert example["NOISE"] < error < 0.7 < spread / 1.8
