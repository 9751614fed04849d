"""Metrics, exact over all ranks; areas under curves are from torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from raygnn.config.task import TaskConfig
from raygnn.errors import TrainingError
from raygnn.models.user import load_function
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.calibration import Evaluated, class_log_odds
from raygnn.tasks.losses import Loss, plain_targets

_Metric: TypeAlias = Callable[[Tensor, Tensor], Any]
_CURVES: dict[str, _Metric] = {
    "roc_auc": lambda scores, truth: binary_auroc(score_order(scores), truth),
    "average_precision": lambda scores, truth: binary_average_precision(score_order(scores), truth),
}
_RECALL = "recall@"


def measure(
    outputs: Tensor,
    targets: Tensor,
    config: TaskConfig,
    loss: Loss,
    exchange: Exchange,
    positive: int | None = None,
    keep: dict[str, Evaluated] | None = None,
) -> dict[str, float]:
    """Compute a task's metrics (`classification_metrics`, `label_metrics` or `regression_metrics`),
    ``"loss"``, its mean over seeds, and a user's metric. Collective. ``positive``: number of the
    class ``task.positive``; ``keep``: receives this rank's outputs and targets, by ""."""
    if keep is not None:
        keep[""] = Evaluated(outputs, targets, positive)
    chosen = config.chosen_metric
    if config.several_labels:
        values = label_metrics(outputs, targets, chosen, exchange)
    elif config.classifies:
        values = classification_metrics(outputs, targets, chosen, exchange, positive)
    else:
        values = regression_metrics(outputs, targets, exchange)
    total, num = loss(outputs, targets).double().sum(), torch.tensor(len(targets)).double()
    lost, seeds = exchange.sum(torch.stack([total, num]))
    values["loss"] = float(lost / seeds)
    if "metric" in config.own:
        gathered = exchange.gather_rows(outputs), exchange.gather_rows(targets)
        # computed by rank 0 alone, so that ranks cannot get different values
        value = own_metric(config, *gathered) if exchange.world.rank == 0 else 0.0
        values[chosen] = float(exchange.sum(torch.tensor(value, dtype=torch.float64)))
    return values


def own_metric(config: TaskConfig, outputs: Tensor, targets: Tensor) -> float:
    """Call a user's function ``task.metric`` with all outputs, float32 ``[n, …]``, and their
    `plain_targets`. Raises TrainingError if it does not return a number."""
    function = load_function(config.own["metric"], "task.metric")
    value = function(outputs, plain_targets(config, outputs, targets))
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"{config.own['metric']} returned {type(value).__name__}, expected one number"
        remedy = "return a float; the highest value is the best"
        raise TrainingError(what, where="task.metric", remedy=remedy) from None


def every_class(task: TaskConfig, y: Tensor, num: int) -> Tensor:
    """Return example targets with two seeds of each class, or of 0 and 1 of each label, which some
    metrics require; for regression ``y``."""
    rows = torch.arange(2 * num)
    if task.several_labels:
        return (rows % 2)[:, None].repeat(1, num)
    return rows % num if task.classifies else y


def regression_metrics(outputs: Tensor, targets: Tensor, exchange: Exchange) -> dict[str, float]:
    """Compute regression metrics over all ranks from outputs float32 ``[n, K]`` and targets ``[n]``
    or ``[n, K]`` of this rank's seeds. Collective.

    Returns:
        ``"mae"``, ``"rmse"`` and ``"r2"`` over all ``n · K`` numbers. ``"r2"`` is NaN if there are
        fewer than two, or all are equal.
    """
    truth = targets.double().reshape(outputs.shape)
    error = outputs.double() - truth
    own = [error.abs().sum(), error.square().sum(), truth.sum(), torch.tensor(truth.numel())]
    sums = exchange.sum(torch.stack([value.double() for value in own]))
    absolute, squares, total, numbers = sums.tolist()
    spread = float(exchange.sum((truth - total / numbers).square().sum()))
    r2 = 1 - squares / spread if numbers > 1 and spread > 0 else math.nan
    return {"mae": absolute / numbers, "rmse": math.sqrt(squares / numbers), "r2": r2}


def classification_metrics(
    outputs: Tensor, labels: Tensor, wanted: str, exchange: Exchange, positive: int | None = None
) -> dict[str, float]:
    """Compute classification metrics over all ranks. Collective.

    Args:
        outputs: float32 ``[n, C]`` logits of this rank's seeds; n may be 0.
        labels: int64 ``[n]``.
        wanted: the requested metric.
        positive: class of one-class metrics; None = class 1 of two, else all classes.

    Returns:
        ``"accuracy"``, ``"f1"`` (macro average) and ``"mcc"``; ``"roc_auc"`` and
        ``"average_precision"`` if one of them is requested or there are two classes, and
        ``"recall@K"`` if requested, for which all ranks gather all scores: of the positive class,
        or else the mean over the existing classes, each against the rest.
    """
    classes = outputs.shape[1]
    agreement = exchange.sum(_agreement(labels, outputs.argmax(1), classes))
    of_class, guessed, right = agreement.double()
    f1 = 2 * right / (of_class + guessed)  # NaN of a class that is neither there nor predicted
    values = {
        "accuracy": float(right.sum() / of_class.sum()),
        "f1": float(f1.nanmean()),
        "mcc": correlation(agreement),
    }
    if classes == 2 or wanted in _CURVES or wanted.startswith(_RECALL):
        if positive is None and classes == 2:
            positive = 1
        chosen = list(range(classes)) if positive is None else [positive]
        gathered = exchange.gather_rows(class_log_odds(outputs)[:, chosen])
        truth = exchange.gather_rows(labels)
        columns = [(scored, (truth == c).long()) for c, scored in zip(chosen, gathered.T)]
        values |= {name: mean for name, (mean, _) in _over(columns, _CURVES, wanted).items()}
    broken = bool(outputs.isnan().any())  # argmax would turn NaN into a class
    return dict.fromkeys(values, math.nan) if exchange.max(int(broken)) else values


def label_metrics(
    outputs: Tensor, labels: Tensor, wanted: str, exchange: Exchange
) -> dict[str, float]:
    """Compute metrics of multi-label classification over all ranks. Collective.

    Args:
        outputs: float32 ``[n, K]`` logits of this rank's seeds; n may be 0.
        labels: int64 ``[n]`` or ``[n, K]``, see `as_labels`; -1 is ignored.
        wanted: the requested metric.

    Returns:
        ``"roc_auc"``, ``"average_precision"``, ``"mcc"``, and ``"recall@K"`` if requested, averaged
        over the labels with known seeds of both 0 and 1, NaN without such labels; and with several
        labels ``"roc_auc_k"`` and so on for label ``k``.
    """
    scores = exchange.gather_rows(outputs)
    truth = exchange.gather_rows(labels.reshape(outputs.shape))
    columns, values = [], dict[str, float]()
    for column, holds in zip(scores.T, truth.T):
        known = holds >= 0
        columns.append((column[known], holds[known]))
    metrics = {**_CURVES, "mcc": lambda s, y: correlation(_agreement(y, (s > 0).long(), 2))}
    for name, (mean, of_label) in _over(columns, metrics, wanted).items():
        values[name] = mean
        if len(columns) > 1:
            values |= {f"{name}_{k}": value for k, value in of_label.items()}
    return values


def score_order(scores: Tensor) -> Tensor:
    """Return the ranks of scores ``[n]`` among the distinct ones, float64 from 0 to 1: torchmetrics
    applies a sigmoid to scores outside 0 to 1, which ties those above 37."""
    order = torch.unique(scores, return_inverse=True)[1].double()
    return order / order.max().clamp(min=1)


def _over(
    columns: Sequence[tuple[Tensor, Tensor]], metrics: Mapping[str, _Metric], wanted: str
) -> dict[str, tuple[float, dict[int, float]]]:
    """Return each metric's mean over the columns (scores, 0 or 1) that have both 0 and 1, NaN
    without any, and its values by column."""
    if wanted.startswith(_RECALL):
        metrics = {**metrics, wanted: partial(recall_at, int(wanted[len(_RECALL) :]))}
    both = {k: pair for k, pair in enumerate(columns) if len(pair[1].unique()) == 2}
    found = {}
    for name, metric in metrics.items():
        # sorting puts NaN above all scores, where it looks like an order
        values = {
            k: math.nan if pair[0].isnan().any() else float(metric(*pair))
            for k, pair in both.items()
        }
        found[name] = sum(values.values()) / len(values) if values else math.nan, values
    return found


def _agreement(truth: Tensor, guess: Tensor, classes: int) -> Tensor:
    """Count the seeds of each class, predicted as each class, and both, ``[3, C]``."""
    counted = truth, guess, truth[truth == guess]
    return torch.stack([torch.bincount(one, minlength=classes) for one in counted])


def correlation(agreement: Tensor) -> float:
    """Return Matthews' coefficient (Gorodkin 2004) from `_agreement`; 0 if all seeds have, or are
    predicted as, one class, where torchmetrics returns a limit."""
    of_class, guessed, right = agreement.double()
    num = of_class.sum()
    spread = (num**2 - of_class @ of_class) * (num**2 - guessed @ guessed)
    return float((num * right.sum() - of_class @ guessed) / spread.sqrt()) if spread else 0.0


def recall_at(k: int, scores: Tensor, truth: Tensor) -> Tensor:
    """Return the share of rows with truth 1 that are among the k highest scores. Rows that tie for
    the last places count in part, the mean over all their orders: torchmetrics uses their order of
    arrival, which depends on the ranks."""
    k = min(k, len(scores))
    last = scores.topk(k).values[-1]
    above, tied = scores > last, scores == last
    share = (k - above.sum()) / tied.sum()
    return (truth[above].sum() + share * truth[tied].sum()) / truth.sum()
