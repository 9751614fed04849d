"""The class that metrics of one class are of: by its word, named wherever they are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from raygnn.config.load import load_config
from raygnn.errors import ConfigError
from raygnn.runs.display import Display
from raygnn.runs.run import Run
from raygnn.runs.run_directory import EVENTS
from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.metrics import classification_metrics
from tests.support.small_jobs import ensure_partition, job, train_on_ranks

pytestmark = pytest.mark.long

PAYMENTS = 600


def payments(place: Path, words: tuple[str, str]) -> Path:
    """Write payments, one in twenty of which is of the first class, and cards that pay them."""
    rng = np.random.default_rng(0)
    rare = rng.random(PAYMENTS) < 0.05
    table = {"id": np.arange(PAYMENTS), "x": rng.normal(size=PAYMENTS) + rare, "y": 1.0}
    split = rng.choice(["train", "val", "test"], PAYMENTS)
    table |= {"kind": np.where(rare, *words), "split": split}
    pd.DataFrame(table).to_parquet(place / "p.parquet")
    made = {"a": rng.integers(0, PAYMENTS, 2000), "b": rng.integers(0, PAYMENTS, 2000)}
    pd.DataFrame(made).to_parquet(place / "e.parquet")
    node = {"files": "p.parquet", "id": "id", "features": {"feat": ["x", "y"]}, "label": "kind"}
    edge = {"files": "e.parquet", "source": "a", "target": "b"}
    described = {"nodes": {"p": {**node, "split": "split"}}, "edges": {"p:to:p": edge}}
    (place / "graph.yaml").write_text(yaml.safe_dump(described))
    return place / "graph.yaml"


def run(place: Path, words: tuple[str, str], name: str = "test", **task: Any) -> Run:
    if not (place / "graph.yaml").exists():
        payments(place, words)
    values = job(place, name=name, task={"kind": "node_classification", **task})
    values["graph"] = {"format": "tables", "path": str(place / "graph.yaml")}
    return train_on_ranks(load_config(values))


def told(run: Run) -> str:
    file = run.path / "logs" / EVENTS
    return " ".join(json.loads(line)["text"] for line in file.open()) if file.exists() else ""


def test_the_class_is_named_and_chosen_by_its_word(tmp_path: Path) -> None:
    words = ("fraud", "ok")
    first = run(tmp_path, words)
    assert first.summary["positive"] == {"": "ok"}
    assert "describe class 'ok'; set task.positive to 'fraud'" in told(first)
    assert "class 'ok', which average_precision describes, is 9" in told(first)
    asked = run(tmp_path, words, "asked", positive="fraud", metric="average_precision")
    assert asked.summary["positive"] == {"": "fraud"}
    assert "positive" not in told(asked)
    metric = "test/average_precision"
    # the same model, but the metrics select different epochs
    assert asked.summary["metrics"][metric] < 0.6 < 0.9 < first.summary["metrics"][metric]
    screen = Display(Console(file=(text := io.StringIO()), width=150))
    screen.closing(asked.summary, asked.path)
    assert "test/average_precision" in text.getvalue()
    assert text.getvalue().count("of 'fraud'") >= 2
    assert "average_precision of &#39;fraud&#39;" in asked.report().read_text()
    with pytest.raises((ConfigError, RuntimeError), match=r"no class 'frau'; .* fraud, ok"):
        run(tmp_path, words, "wrong", positive="frau")


def test_classes_that_need_no_word(tmp_path: Path) -> None:
    """The second of no and yes is positive; if the metric is of one class, a majority class is
    reported."""
    plain = run(tmp_path, ("yes", "no"))
    assert plain.summary["positive"] == {"": "yes"}
    assert "positive" not in told(plain)
    other = run(tmp_path, ("yes", "no"), "no", positive="no", metric="average_precision")
    assert "class 'no', which average_precision describes, is 9" in told(other)


def test_labels_of_one_class(tmp_path: Path) -> None:
    found = run(tmp_path, ("good", "good"))
    assert "all training seeds are of class 'good': there is nothing to learn" in told(found)


def test_a_word_of_no_row_is_no_class(tmp_path: Path) -> None:
    """Dropped edges, which lead to no node, leave their class in the vocabulary."""
    graph = payments(tmp_path, ("fraud", "ok"))
    rng = np.random.default_rng(1)
    words, ends = rng.choice(["bad", "good"], 900), rng.integers(0, PAYMENTS, 900)
    words[:3], ends[:3] = "other", PAYMENTS + 7
    made = {"a": rng.integers(0, PAYMENTS, 900), "b": ends, "kind": words}
    made["split"] = rng.choice(["train", "val", "test"], 900)
    pd.DataFrame(made).to_parquet(tmp_path / "e.parquet")
    described = yaml.safe_load(graph.read_text())
    described["edges"]["p:to:p"] |= {"label": "kind", "split": "split", "missing": "drop"}
    graph.write_text(yaml.safe_dump(described))
    values = job(tmp_path, task={"kind": "edge_classification"})
    values["graph"] = {"format": "tables", "path": str(graph)}
    assert "set task.positive to 'bad'" in told(train_on_ranks(load_config(values)))


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_of_the_positive_class(classes: int) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(500, classes), torch.randint(0, classes, (500,))
    exchange = Exchange(World(0, 1))
    for positive in range(classes):
        found = classification_metrics(outputs, labels, "recall@50", exchange, positive)
        truth, scores = labels == positive, outputs.softmax(1)[:, positive]
        found |= classification_metrics(outputs, labels, "roc_auc", exchange, positive)
        precision = binary_average_precision(scores, truth.long())
        assert found["average_precision"] == pytest.approx(float(precision))
        assert found["roc_auc"] == pytest.approx(float(binary_auroc(scores, truth.long())))
        among = truth[scores.topk(50).indices].sum() / truth.sum()
        assert found["recall@50"] == pytest.approx(float(among))


def test_the_best_and_the_last_epoch_have_a_name_each(tmp_path: Path) -> None:
    values = job(tmp_path, train={"epochs": 4, "select": "last", "lr": 0.3})
    done = train_on_ranks(load_config(values))
    scores = done.metrics["val/accuracy"].dropna().tolist()
    assert done.summary["best_metrics"]["val/accuracy"] == max(scores)
    assert done.summary["metrics"]["val/accuracy"] == pytest.approx(scores[-1])
    screen = Display(Console(file=(text := io.StringIO()), width=150))
    screen.closing(done.summary, done.path)
    lines = {line.split("  ")[0]: line for line in text.getvalue().splitlines()}
    assert "(last epoch)" in lines["val/accuracy"]
    assert f"(epoch {done.summary['best_epoch'] + 1})" in lines["val/accuracy, best"]
    assert "best epoch" not in text.getvalue()


@pytest.mark.parametrize("several", [False, True])
def test_nothing_of_the_partition_is_read_when_training_has_ended(
    several: bool, tmp_path: Path
) -> None:
    """Its storage may be unavailable by then, for longer than the run lasts."""
    task = {"kind": "node_classification", "positive": "fraud"}
    values = job(tmp_path, **({"tasks": {"a": task, "b": task}} if several else {"task": task}))
    values["graph"] = {"format": "tables", "path": str(payments(tmp_path, ("fraud", "ok")))}
    place = ensure_partition(load_config(values), 2).directory
    (manifest,) = Path(str(place)).glob("raygnn.json")
    values["train"]["callbacks"] = {"tests.support.own_steps:Away": {"file": str(manifest)}}
    done = train_on_ranks(load_config(values))
    assert not manifest.exists()
    assert done.summary["positive"] == ({"a": "fraud", "b": "fraud"} if several else {"": "fraud"})
