"""Losses of classes and labels, and what classes count for, are those of their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raygnn.config.task import ClassTask
from raygnn.errors import ConfigError
from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.losses import balance, class_entropy, label_entropy, make_loss
from tests.support.builders import read_task
from tests.support.ranks import run_ranks

OPTIONS = {
    "num": st.integers(1, 6),
    "width": st.integers(2, 5),
    "smoothing": st.sampled_from([0.0, 0.1, 0.7]),
    "gamma": st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0]),
    "seed": st.integers(0, 10_000),
}


def drawn(num: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, classes and weights."""
    draw = np.random.default_rng(seed)
    outputs = torch.from_numpy(draw.normal(scale=3, size=(num, width)))
    y, weights = draw.integers(0, width, num), draw.uniform(0.1, 5, width)
    return outputs, torch.from_numpy(y), torch.from_numpy(weights)


def focal(p: float, q: float, weight: float, gamma: float) -> float:
    """Return the loss of a class with probability ``p`` and a target of ``q``."""
    return weight * q * (1 - p) ** gamma * -math.log(p)


@settings(max_examples=80, deadline=None)
@given(**OPTIONS)
def test_of_classes(num: int, width: int, smoothing: float, gamma: float, seed: int) -> None:
    outputs, y, weights = drawn(num, width, seed)
    found = class_entropy(outputs, y, weights, smoothing=smoothing, gamma=gamma)
    p = outputs.softmax(1).tolist()
    shares = (1 - smoothing) * np.eye(width)[y.numpy()] + smoothing / width
    for row, loss in enumerate(found.tolist()):
        terms = [focal(p[row][c], shares[row, c], float(weights[c]), gamma) for c in range(width)]
        assert loss == pytest.approx(sum(terms), rel=1e-6)


@settings(max_examples=80, deadline=None)
@given(**OPTIONS)
def test_of_labels(num: int, width: int, smoothing: float, gamma: float, seed: int) -> None:
    outputs, _, weights = drawn(num, width, seed)
    y = torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, (num, width)))
    found = label_entropy(outputs, y, weights, smoothing=smoothing, gamma=gamma)
    p = outputs.sigmoid().tolist()
    for row in range(num):
        total = 0.0
        for k in range(width):
            if y[row, k] >= 0:
                share = (1 - smoothing) * float(y[row, k]) + smoothing / 2
                total += focal(p[row][k], share, float(weights[k]), gamma)
                total += focal(1 - p[row][k], 1 - share, 1.0, gamma)
        assert float(found[row]) == pytest.approx(total / width, rel=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("entropy", [class_entropy, label_entropy])
def test_certain_predictions_have_finite_gradients(entropy: Any, gamma: float) -> None:
    outputs = torch.tensor([[80.0, -80.0], [-1e4, 1e4], [0.0, 0.0]], requires_grad=True)
    y = torch.tensor([0, 0, 1])
    y = y if entropy is class_entropy else F.one_hot(y)
    losses = entropy(outputs, y, gamma=gamma)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert outputs.grad[1].abs().max() > 0.4  # where it is certain and wrong


def config(**keys: Any) -> ClassTask:
    task = read_task(kind="node_classification", **keys)
    assert isinstance(task, ClassTask)
    return task


def spread(
    exchange: Exchange, task: ClassTask, labels: Tensor, num: int, cuts: list[int]
) -> list[float]:
    rank = exchange.world.rank
    return balance(task, labels[cuts[rank] : cuts[rank + 1]], num, exchange)


@pytest.mark.parametrize("cuts", [[0, 90], [0, 20, 90], [0, 0, 3, 90]])
@pytest.mark.parametrize("given", ["balanced", [1.0, 20.0, 3.0, 0.5]])
def test_the_mean_over_all_is_torchs_weighted_mean(given: Any, cuts: list[int]) -> None:
    """The mean does not depend on how seeds are spread, and its denominator is not a batch's."""
    draw = np.random.default_rng(0)
    labels = torch.from_numpy(draw.choice(4, 90, p=[0.7, 0.05, 0.25, 0.0]))
    outputs = torch.from_numpy(draw.normal(size=(90, 4)))
    counts = torch.bincount(labels, minlength=4)
    weights = 1 / counts.clamp(min=1) if given == "balanced" else torch.tensor(given)
    expected = F.cross_entropy(outputs, labels, weights.double())
    task = config(class_weights=given)
    for found in run_ranks(len(cuts) - 1, spread, task, labels, 4, cuts):
        assert make_loss(task, found)(outputs, labels).mean() == pytest.approx(float(expected))
        assert sum(found[int(c)] for c in labels) / 90 == pytest.approx(1)
    if given == "balanced":  # a class that is not there pushes nothing
        assert found == pytest.approx([90 / 3 / n if n else 0 for n in counts.tolist()])


def test_positive_labels_are_weighted_by_the_ratio_of_negatives() -> None:
    labels = torch.tensor([[1, 0, -1, 1], [0, 0, 0, 1], [0, 0, -1, 1], [0, -1, 1, 1]])
    task = config(labels="multi", class_weights="balanced")
    weights = balance(task, labels, 4, Exchange(World(0, 1)))
    assert weights == [3, 1, 1, 1]  # where one of both is missing there is nothing to balance
    outputs = torch.randn(4, 4)
    known = labels >= 0
    losses = F.binary_cross_entropy_with_logits(
        outputs, labels.float(), pos_weight=torch.tensor(weights), reduction="none"
    )
    found = make_loss(task, weights)(outputs, labels).sum()
    assert float(found) == pytest.approx(float(losses[known].sum()) / 4, rel=1e-5)
    as_given = config(labels="multi", class_weights=[2, 3, 4, 5])
    assert balance(as_given, labels, 4, Exchange(World(0, 1))) == [2, 3, 4, 5]


@pytest.mark.parametrize("keys", [{}, {"labels": "multi"}])
def test_one_weight_for_each(keys: dict[str, Any]) -> None:
    task = config(class_weights=[1.0, 2.0], **keys)
    with pytest.raises(ConfigError, match="there are 2 weights, and 3"):
        balance(task, torch.zeros(5, 3).long() if keys else torch.zeros(5).long(), 3, None)  # type: ignore[arg-type]


def test_options_of_the_task_are_those_of_the_loss() -> None:
    outputs, y, _ = drawn(6, 3, 0)
    focal_loss = make_loss(config(loss="focal", label_smoothing=0.2))
    assert torch.equal(focal_loss(outputs, y), class_entropy(outputs, y, smoothing=0.2, gamma=2.0))
    gamma = make_loss(config(loss="focal", gamma=0.5))
    assert torch.equal(gamma(outputs, y), class_entropy(outputs, y, gamma=0.5))
    assert torch.equal(
        make_loss(config())(outputs, y), F.cross_entropy(outputs, y, reduction="none")
    )
