"""Several labels, many not known: loss and metrics are those of the definitions, entry by entry."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raygnn.errors import DataError
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.seeds import as_labels, known
from raygnn.tasks.losses import label_entropy, make_loss
from raygnn.tasks.metrics import label_metrics, measure, recall_at
from tests.support.builders import read_task
from tests.support.ranks import run_ranks
from tests.tasks.test_classification_metrics import area


def entries(num: int, labels: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with ties, and labels of which some are unknown."""
    draw = np.random.default_rng(seed)
    logits = draw.integers(-4, 5, (num, labels)) / 2
    return torch.tensor(logits).float(), torch.tensor(draw.choice([-1, 0, 1], (num, labels)))


def precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """Return the precision at each threshold times the recall that it adds."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = truth[scores >= threshold]
        recall = chosen.sum() / truth.sum()
        total, before = total + chosen.mean() * (recall - before), recall
    return total


def correlation(guess: np.ndarray, truth: np.ndarray) -> float:
    """Compute Matthews' correlation of two rows of 0 and 1; 0 if all guesses are equal."""
    return float(np.corrcoef(guess, truth)[0, 1]) if len(set(guess)) == 2 else 0.0


def expected(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    found: dict[str, float] = {}
    lost, shape = 0.0, outputs.shape
    for k in range(shape[1]):
        rows = labels[:, k] >= 0
        scores, truth = outputs[rows, k].double().numpy(), labels[rows, k].numpy()
        lost += float(np.sum(np.log1p(np.exp(np.where(truth == 1, -scores, scores)))))
        if 0 < truth.sum() < len(truth):
            found[f"roc_auc_{k}"] = area(scores, truth == 1)
            found[f"average_precision_{k}"] = precision(scores, truth)
            found[f"mcc_{k}"] = correlation(scores > 0, truth)
            found[f"recall@4_{k}"] = float(
                recall_at(4, torch.from_numpy(scores), torch.from_numpy(truth))
            )
    for name in ("roc_auc", "average_precision", "mcc", "recall@4"):
        each = [value for key, value in found.items() if key.startswith(name)]
        found[name] = float(np.mean(each)) if each else math.nan
    if shape[1] == 1:
        found = {name: value for name, value in found.items() if "_0" not in name}
    return {**found, "loss": lost / (shape[0] * shape[1])}


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 12), labels=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_loss_and_metrics_are_those_of_the_known_entries(num: int, labels: int, seed: int) -> None:
    outputs, truth = entries(num, labels, seed)
    found = spread(Exchange(World(0, 1)), outputs, truth, [0, num])
    assert found == pytest.approx(expected(outputs, truth), abs=1e-5, nan_ok=True)
    outputs.requires_grad_()
    label_entropy(outputs, truth).sum().backward()
    assert outputs.grad is not None
    assert (outputs.grad[truth < 0] == 0).all()
    assert (outputs.grad[truth >= 0] != 0).all()
    stored = truth.float().masked_fill(truth < 0, torch.nan)  # as edges store them
    assert torch.equal(label_entropy(outputs, stored), label_entropy(outputs, truth))


def spread(
    exchange: Exchange, outputs: Tensor, labels: Tensor, cuts: list[int]
) -> dict[str, float]:
    mine = slice(cuts[exchange.world.rank], cuts[exchange.world.rank + 1])
    task = read_task(kind="node_classification", labels="multi", metric="recall@4")
    return measure(outputs[mine], labels[mine], task, make_loss(task), exchange)


@pytest.mark.parametrize("cuts", [[0, 25, 60], [0, 0, 1, 60]])
def test_exact_however_the_seeds_are_spread(cuts: list[int]) -> None:
    outputs, labels = entries(60, 5, 0)
    labels[1:, 2] = -1  # a label's only known entry does not count
    for found in run_ranks(len(cuts) - 1, spread, outputs, labels, cuts):
        assert found == pytest.approx(expected(outputs, labels), abs=1e-5)
        assert "roc_auc_2" not in found


@pytest.mark.parametrize("value", [2.0, 0.5, -2.0, math.inf])
def test_invalid_labels_are_refused(value: float) -> None:
    with pytest.raises(DataError, match=f"a label is {value:g}"):
        as_labels(torch.tensor([0, 1, math.nan, value]), "here")


def test_a_seed_counts_where_one_of_its_labels_is_known() -> None:
    labels = as_labels(torch.tensor([[math.nan, -1], [0, math.nan], [1, 0]]), "here")
    assert labels.tolist() == [[-1, -1], [0, -1], [1, 0]]
    assert known(labels).tolist() == [False, True, True]


def test_a_label_whose_output_is_not_a_number_has_no_metric() -> None:
    outputs, labels = entries(30, 2, 0)
    outputs[3, 1], labels[3, 1] = torch.nan, 1
    found = label_metrics(outputs, labels, "recall@3", Exchange(World(0, 1)))
    for name in ("roc_auc", "average_precision", "mcc", "recall@3"):
        assert np.isfinite(found[f"{name}_0"])
        assert np.isnan(found[f"{name}_1"])
        assert np.isnan(found[name])
