"""Classification metrics, exact over all ranks, from torchmetrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
)


def classification_metrics(
    outputs: Tensor, labels: Tensor, wanted: str, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Metrics over the nodes of all ranks. Collective over ``group``.

    Args:
        outputs: float32 ``[n, C]`` logits of this rank's nodes; n may be 0.
        labels: int64 ``[n]``.
        wanted: "accuracy", "f1" (macro average) or "roc_auc" (of class 1 for two classes, else
            the macro average of one class against the rest). The first two are always given;
            the area under the curve where it is wanted or the task is binary.

    Returns:
        name → value in 0 … 1, and ``"loss"``, the mean cross entropy.
    """
    classes = outputs.shape[1]
    common: dict[str, Any] = {"process_group": group, "validate_args": False}
    metrics: dict[str, Metric] = {
        "accuracy": MulticlassAccuracy(classes, average="micro", **common),
        "f1": MulticlassF1Score(classes, average="macro", **common),
    }
    scores = outputs.softmax(1)
    if classes == 2 or wanted == "roc_auc":
        metrics["roc_auc"] = (
            BinaryAUROC(**common) if classes == 2 else MulticlassAUROC(classes, **common)
        )
    values = {}
    for name, metric in metrics.items():
        binary = name == "roc_auc" and classes == 2
        metric.update(scores[:, 1] if binary else scores, labels)
        values[name] = float(metric.compute())
    total = torch.stack(
        [F.cross_entropy(outputs, labels, reduction="sum").double(), torch.tensor(len(labels))]
    )
    if group is not None:
        dist.all_reduce(total, group=group)
    values["loss"] = float(total[0] / total[1])
    return values
