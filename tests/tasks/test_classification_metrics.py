"""Metrics over several ranks equal scikit-learn's definitions over all nodes at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.metrics import classification_metrics
from tests.ranks import run_ranks


def measure(
    exchange: Exchange, outputs: torch.Tensor, labels: torch.Tensor, cuts: list[int], wanted: str
) -> dict[str, float]:
    mine = slice(cuts[exchange.world.rank], cuts[exchange.world.rank + 1])
    return classification_metrics(outputs[mine], labels[mine], wanted, exchange)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("cuts", [[0, 200], [0, 150, 200], [0, 0, 30, 200]])
def test_exact_however_the_nodes_are_spread(classes: int, cuts: list[int]) -> None:
    torch.manual_seed(classes)
    outputs = torch.randn(200, classes)
    labels = torch.randint(0, classes, (200,))
    scores, truth = outputs.softmax(1).numpy(), labels.numpy()
    guess = scores.argmax(1)

    def f1(c: int) -> float:
        hit = np.sum((guess == c) & (truth == c))
        return 2 * hit / (np.sum(guess == c) + np.sum(truth == c))

    def auc(c: int) -> float:
        positive, negative = scores[truth == c, c], scores[truth != c, c]
        return float(np.mean(positive[:, None] > negative[None, :]))

    expected = {
        "accuracy": np.mean(guess == truth),
        "f1": np.mean([f1(c) for c in range(classes)]),
        "roc_auc": auc(1) if classes == 2 else np.mean([auc(c) for c in range(classes)]),
        "loss": -np.mean(np.log(scores[np.arange(200), truth])),
    }
    for found in run_ranks(len(cuts) - 1, measure, outputs, labels, cuts, "roc_auc"):
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_area_is_left_out_where_nobody_asks() -> None:
    outputs, labels = torch.randn(20, 3), torch.randint(0, 3, (20,))
    assert set(classification_metrics(outputs, labels, "accuracy", Exchange(World(0, 1)))) == {
        "accuracy", "f1", "loss",
    }  # fmt: skip
