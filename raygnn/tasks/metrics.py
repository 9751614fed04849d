"""Classification metrics, exact over all ranks, from torchmetrics."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.functional.classification import binary_auroc, multiclass_auroc

from raygnn.sampling.exchange import Exchange


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
