"""Metrics, exact over all ranks, from torchmetrics."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_auroc,
)

from raygnn.config.task import TaskConfig
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.losses import Loss, label_entropy, make_loss

LOWER_IS_BETTER = ("mae", "rmse", "loss")
_LABEL_METRICS = {"roc_auc": binary_auroc, "average_precision": binary_average_precision}


def measure(
    outputs: Tensor, targets: Tensor, config: TaskConfig, exchange: Exchange
) -> dict[str, float]:
    """The metrics of a task; see `classification_metrics`, `label_metrics` and
    `regression_metrics`. Collective."""
    if config.several_labels:
        return label_metrics(outputs, targets, exchange)
    if config.classifies:
        return classification_metrics(outputs, targets, config.chosen_metric, exchange)
    return regression_metrics(outputs, targets, make_loss(config), exchange)


def regression_metrics(
    outputs: Tensor, targets: Tensor, loss: Loss, exchange: Exchange
) -> dict[str, float]:
    """Metrics over the numbers of all ranks. Collective.

    Args:
        outputs: float32 ``[n, K]`` of this rank's seeds; n may be 0.
        targets: ``[n]`` or ``[n, K]``.

    Returns:
        ``"mae"``, ``"rmse"`` and ``"r2"`` over all ``n · K`` numbers, and ``"loss"``, the mean
        loss of a seed. ``"r2"`` is NaN where there are fewer than two, or all are alike.
    """
    truth = targets.double().reshape(outputs.shape)
    error = outputs.double() - truth
    own = [error.abs().sum(), error.square().sum(), truth.sum(), loss(outputs, targets).sum()]
    counts = [torch.tensor(float(truth.numel())), torch.tensor(float(len(truth)))]
    sums = exchange.sum(torch.stack([value.double() for value in (*own, *counts)]))
    absolute, squares, total, lost, numbers, seeds = sums.tolist()
    spread = float(exchange.sum((truth - total / numbers).square().sum()))
    r2 = 1 - squares / spread if numbers > 1 and spread > 0 else math.nan
    return {
        "mae": absolute / numbers,
        "rmse": math.sqrt(squares / numbers),
        "r2": r2,
        "loss": lost / seeds,
    }


def classification_metrics(
    outputs: Tensor, labels: Tensor, wanted: str, exchange: Exchange
) -> dict[str, float]:
    """Metrics over the nodes of all ranks. Collective.

    Args:
        outputs: float32 ``[n, C]`` logits of this rank's nodes; n may be 0.
        labels: int64 ``[n]``.
        wanted: "accuracy", "f1" (macro average) or "roc_auc" (of class 1 for two classes, else
            the macro average of one class against the rest). The first two are always given;
            the area under the curve, for which all ranks need all scores, where it is wanted or
            the task is binary.

    Returns:
        name → value in 0 … 1, and ``"loss"``, the mean cross entropy.
    """
    classes = outputs.shape[1]
    scores = outputs.softmax(1)
    common: dict[str, Any] = {"process_group": exchange.group, "validate_args": False}
    metrics: dict[str, Metric] = {
        "accuracy": MulticlassAccuracy(classes, average="micro", **common),
        "f1": MulticlassF1Score(classes, average="macro", **common),
    }
    values = {}
    for name, metric in metrics.items():
        if len(labels):  # torchmetrics can not update with nothing, but it can sum zeros
            metric.update(scores, labels)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The ``compute`` method")
            values[name] = float(metric.compute())
    if classes == 2 or wanted == "roc_auc":
        everyone = exchange.gather_rows(scores[:, 1:] if classes == 2 else scores)
        truth = exchange.gather_rows(labels)
        values["roc_auc"] = float(
            binary_auroc(everyone[:, 0], truth)
            if classes == 2
            else multiclass_auroc(everyone, truth, classes)
        )
    loss = F.cross_entropy(outputs, labels, reduction="sum").double()
    total = exchange.sum(torch.stack([loss, torch.tensor(float(len(labels))).double()]))
    values["loss"] = float(total[0] / total[1])
    return values


def label_metrics(outputs: Tensor, labels: Tensor, exchange: Exchange) -> dict[str, float]:
    """Metrics of several labels over the seeds of all ranks. Collective.

    Args:
        outputs: float32 ``[n, K]`` logits of this rank's seeds; n may be 0.
        labels: int64 ``[n]`` or ``[n, K]``, see `as_labels`; -1 is left out.

    Returns:
        ``"roc_auc"`` and ``"average_precision"``, the means over the labels of which both 0 and 1
        are known, NaN where there are none; of label ``k``, if K is above 1, ``"roc_auc_k"`` and
        so on; and ``"loss"``, the mean of `label_entropy`.
    """
    # in float64, in which hardly any two logits become one probability
    scores = exchange.gather_rows(outputs.double()).sigmoid()
    truth = exchange.gather_rows(labels.reshape(outputs.shape))
    lost = float(exchange.sum(label_entropy(outputs, labels).double().sum()))
    values = {"loss": lost / len(truth)}
    for name, metric in _LABEL_METRICS.items():
        of_label = {}
        for k, (column, holds) in enumerate(zip(scores.T, truth.T)):
            known = holds >= 0
            if len(holds[known].unique()) == 2:
                of_label[f"{name}_{k}"] = float(metric(column[known], holds[known]))
        values[name] = sum(of_label.values()) / len(of_label) if of_label else math.nan
        values |= of_label if len(scores.T) > 1 else {}
    return values
