"""Probabilities of predictions come true, also where training weighted the classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raygnn
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.runs.run import Run
from tests.prediction.test_predict import ask
from tests.support.small_jobs import job, train_on_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Config]:
    """A run whose training weights one of two classes by 20."""
    place = tmp_path_factory.mktemp("calibrated")
    graph = {"classes": 2, "val": 0.4, "nodes": 4000, "noise": 8.0}
    task = {"class_weights": [1.0, 20.0]}
    config = load_config(job(place, graph=graph, task=task, train={"epochs": 3}))
    return train_on_ranks(config), config


def options_of(run: Run) -> dict[str, Any]:
    about = run.summary["calibration"][""]
    return {"calibration": (tuple(about["scale"]), tuple(about["bias"]))}


def test_probabilities_come_true(trained: tuple[Run, Config]) -> None:
    run, config = trained
    frames = [ask(run, config, 2, **options).to_pandas() for options in ({}, options_of(run))]
    for split, tolerance in (("val", 5e-3), ("test", 0.03)):
        shares = []
        for frame in frames:
            rows = frame[frame["split"] == split]
            shares.append(np.stack(rows["scores"])[:, 1].mean() - (rows["label"] == 1).mean())
        assert abs(shares[0]) > 0.2  # the model's own probabilities are far off
        assert abs(shares[1]) < tolerance
    for frame in frames:
        scores = np.stack(frame["scores"])
        assert (scores.argmax(1) == frame["prediction"]).all()
        assert (scores.max(1) == frame["probability"]).all()
    assert len(frames[1]) == 4000


def test_thresholds_are_those_of_the_predictions(trained: tuple[Run, Config]) -> None:
    run, config = trained
    rows = run.summary["thresholds"][""]
    assert len(rows) == 12
    for name, options in (("threshold", {}), ("calibrated", options_of(run))):
        frame = ask(run, config, 2, split="val", **options).to_pandas()
        scores, truth = np.stack(frame["scores"])[:, 1], frame["label"] == 1
        for row in rows:
            chosen = scores >= row[name]
            assert chosen.mean() == row["share"]
            assert truth[chosen].mean() == row["precision"]
            assert chosen[truth].mean() == row["recall"]
    page = run.report().read_text()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("<h3>Thresholds") :])
    scores = np.stack(ask(run, config, 2, split="val").to_pandas()["scores"])[:, 1]
    for row, cell in zip(rows, cells[::5]):
        # also in a database, which may compare in float64
        assert (scores.astype(float) >= float(cell)).mean() == row["share"]
    assert "<h3>Thresholds on the probability of 1, validation split</h3>" in page


def test_a_run_without_a_valid_calibration_is_refused(
    trained: tuple[Run, Config], tmp_path: Path
) -> None:
    run, _ = trained
    summary = json.loads((run.path / "summary.json").read_text())
    good, wrong = summary["calibration"][""], "are not as many finite"
    for said, about in (
        ("has no calibration", {}),
        ("has no calibration", {"scale": None}),
        (wrong, {**good, "scale": "x"}),
        (wrong, {**good, "bias": [0.0] * 3}),
        (wrong, {**good, "bias": [0, 10**400]}),
        (wrong, {**good, "bias": [0, float("nan")]}),
        ("fitted to other weights", good),
    ):
        damaged = {**summary, "calibration": {"": about}, "weights": ""}
        (run.path / "summary.json").write_text(json.dumps(damaged))
        with pytest.raises(InputError, match=said) as caught:
            raygnn.predict(run, out=tmp_path / "out.parquet", calibrated=True, display=False)
        assert caught.value.where == "--calibrated"
    with pytest.raises(InputError, match="trained without times"):
        raygnn.predict(run, out=tmp_path / "out.parquet", at=7, display=False)
    (run.path / "summary.json").write_text(json.dumps(summary))


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
def test_by_command(trained: tuple[Run, Config], tmp_path: Path) -> None:
    run, config = trained
    found = Run(run.path).predict("val", scores=True, calibrated=True)
    expected = ask(run, config, 2, split="val", **options_of(run)).to_pandas()
    mine, theirs = (np.stack(frame["scores"]) for frame in (found, expected))
    assert np.abs(mine - theirs).max() < 1e-5
