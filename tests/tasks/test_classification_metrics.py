"""Metrics over several ranks equal their definitions over all nodes at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks import metrics
from raygnn.tasks.losses import make_loss
from tests.support.builders import read_task
from tests.support.ranks import run_ranks


def measure(
    exchange: Exchange, outputs: torch.Tensor, labels: torch.Tensor, cuts: list[int], wanted: str
) -> dict[str, float]:
    mine = slice(cuts[exchange.world.rank], cuts[exchange.world.rank + 1])
    task = read_task(kind="node_classification", metric=wanted)
    return metrics.measure(outputs[mine], labels[mine], task, make_loss(task), exchange)


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

    def recall(c: int) -> float:
        first = np.argsort(-scores[:, c])[:30]
        return float(np.sum(truth[first] == c) / np.sum(truth == c))

    def mcc() -> float:
        """Return the correlation of the predictions' and the truth's indicator vectors."""
        one, other = np.eye(classes)[guess], np.eye(classes)[truth]
        covariances = [np.sum((a - a.mean(0)) * (b - b.mean(0))) for a, b in (
            (one, other), (one, one), (other, other)
        )]  # fmt: skip
        return float(covariances[0] / np.sqrt(covariances[1] * covariances[2]))

    ones = [1] if classes == 2 else range(classes)
    expected = {
        "accuracy": np.mean(guess == truth),
        "f1": np.mean([f1(c) for c in range(classes)]),
        "mcc": mcc(),
        "roc_auc": np.mean([area(scores[:, c], truth == c) for c in ones]),
        "average_precision": np.mean([precision(scores[:, c], truth == c) for c in ones]),
        "recall@30": np.mean([recall(c) for c in ones]),
        "loss": -np.mean(np.log(scores[np.arange(200), truth])),
    }
    for found in run_ranks(len(cuts) - 1, measure, outputs, labels, cuts, "recall@30"):
        assert found == pytest.approx(expected, abs=1e-5)


def area(scores: np.ndarray, holds: np.ndarray) -> float:
    """Return the fraction of pairs in order, with half of the equal ones."""
    above = scores[holds][:, None] - scores[~holds][None, :]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def precision(scores: np.ndarray, holds: np.ndarray) -> float:
    """Return the precision at the score of each positive row, without ties."""
    sorted_holds = holds[np.argsort(-scores)]
    return float(np.mean((np.cumsum(sorted_holds) / np.arange(1, len(holds) + 1))[sorted_holds]))


@pytest.mark.parametrize("labels", ["one", "multi"])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 40.0, 120.0])
def test_probabilities_that_round_to_one_do_not_tie(
    scale: float, classes: int, labels: str
) -> None:
    """Ranking by probability equals scikit-learn's ranking by logits. With several classes it goes
    by log odds, also for class 0, which most rows are predicted as with near certainty."""
    draw = np.random.default_rng(classes)
    truth = draw.integers(0, classes, 1000)
    holds = np.eye(classes, dtype=bool)[truth]
    logits = torch.from_numpy((draw.normal(size=holds.shape) + holds) * scale).float()
    logits[:, 0] += scale
    outputs = logits.double().numpy()
    others = [np.delete(outputs, c, 1) for c in range(classes)]
    columns = [outputs[:, c] - np.logaddexp.reduce(rest, 1) for c, rest in enumerate(others)]
    targets = torch.from_numpy(truth)
    if labels == "multi":
        columns, targets = list(outputs.T), torch.from_numpy(holds.astype(int))
    ones = [1] if classes == 2 and labels == "one" else range(classes)
    task = read_task(kind="node_classification", labels=labels, metric="recall@50")
    found = metrics.measure(logits, targets, task, make_loss(task), Exchange(World(0, 1)))
    first = [np.argsort(-columns[c])[:50] for c in ones]
    expected = {
        "roc_auc": np.mean([area(columns[c], holds[:, c]) for c in ones]),
        "average_precision": np.mean([precision(columns[c], holds[:, c]) for c in ones]),
        "recall@50": np.mean([holds[f, c].sum() / holds[:, c].sum() for c, f in zip(ones, first)]),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_f1_is_the_mean_over_classes_that_are_there_or_predicted() -> None:
    outputs, labels = torch.eye(4)[[0, 1, 1, 0]], torch.tensor([0, 1, 0, 2])
    found = metrics.classification_metrics(outputs, labels, "f1", Exchange(World(0, 1)))
    assert found["f1"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)


def test_the_area_is_computed_only_on_request() -> None:
    outputs, labels = torch.randn(20, 3), torch.randint(0, 3, (20,))
    found = metrics.classification_metrics(outputs, labels, "accuracy", Exchange(World(0, 1)))
    assert set(found) == {"accuracy", "f1", "mcc"}


class Counting(Exchange):
    """Exchange of a single rank that records how many numbers it adds up at once."""

    largest = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, values.numel())
        return super().sum(values)


def test_many_classes_need_no_table_of_pairs() -> None:
    exchange = Counting(World(0, 1))
    metrics.classification_metrics(torch.eye(300), torch.arange(300), "accuracy", exchange)
    assert exchange.largest <= 3 * 300


def thirds(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 1 / 3 + len(targets)


def test_a_metric_of_the_users_own_keeps_its_bits() -> None:
    task = read_task(kind="node_classification", metric=f"{__name__}:thirds")
    alone = Exchange(World(0, 1))
    found = metrics.measure(torch.eye(4), torch.arange(4), task, make_loss(task), alone)
    assert found["thirds"] == 1 / 3 + 4


def test_a_class_that_is_not_there_has_no_curve() -> None:
    outputs, labels = torch.randn(20, 3), torch.arange(20) % 2
    found = measure(Exchange(World(0, 1)), outputs, labels, [0, 20], "average_precision")
    curves = [
        metrics.binary_average_precision(outputs.softmax(1)[:, c], labels == c) for c in (0, 1)
    ]
    assert found["average_precision"] == pytest.approx(float(sum(curves)) / 2, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(num=st.integers(2, 7), k=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_recall_is_the_mean_over_all_orders_of_what_ties(num: int, k: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    scores, truth = draw.integers(0, 3, num), draw.integers(0, 2, num)
    truth[0] = 1
    recalls = []
    for order in itertools.permutations(range(num)):
        first = sorted(order, key=lambda i: -scores[i])[:k]  # which keeps the order of ties
        recalls.append(truth[first].sum() / truth.sum())
    found = metrics.recall_at(k, torch.from_numpy(scores), torch.from_numpy(truth))
    assert float(found) == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize("metric", ["roc_auc", "recall@3"])
@pytest.mark.parametrize("rows", [1, 10])
def test_an_output_that_is_not_a_number_has_no_metric(metric: str, rows: int) -> None:
    """Neither scores nor classes of NaN have an order, on any rank."""
    outputs, labels = torch.randn(10, 2), torch.arange(10) % 2
    outputs[10 - rows :] = torch.nan
    for found in run_ranks(2, measure, outputs, labels, [0, 6, 10], metric):
        assert found.keys() >= {metric, "accuracy", "f1", "mcc", "average_precision", "loss"}
        assert np.isnan([*found.values()]).all()
