"""Calibration of class probabilities, and precision and recall at thresholds on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from raygnn.config.schema import Config
from raygnn.config.task import TaskConfig
from raygnn.sampling.exchange import Exchange

# of all ranks' outputs that are used at most: fitting 2 million takes some seconds
_ROWS, _VALUES = 200_000, 2_000_000
_RECALLS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_ITERATIONS = 200


@dataclass(frozen=True)
class Evaluated:
    """Outputs and targets of one rank's seeds of a split."""

    outputs: Tensor  # float32 [n, C]
    targets: Tensor  # [n] or [n, C]; classes and labels are below 0 where unknown
    positive: int | None  # number of the class `task.positive`, if it is set


@dataclass(frozen=True)
class Calibration:
    """Logits as ``scale * logits + bias``: temperature scaling (Guo et al. 2017) with a bias for
    each class (Alexandari et al. 2020), which class weights need; in multi-label classification a
    scale and a bias for each label (Platt 1999)."""

    scale: tuple[float, ...]
    bias: tuple[float, ...]

    def apply(self, outputs: Tensor) -> Tensor:
        """Return calibrated logits, float64 ``[n, C]``."""
        scale = torch.tensor(self.scale, dtype=torch.float64)
        return outputs.double() * scale + torch.tensor(self.bias, dtype=torch.float64)


def calibrations(
    kept: Mapping[str, Evaluated], config: Config, exchange: Exchange
) -> dict[str, dict[str, Any]]:
    """Return what ``summary.json`` keeps of `calibrate`, by task. Collective."""
    found = {name: calibrate(seen, config.of(name).task, exchange) for name, seen in kept.items()}
    fitted = {name: both for name, both in found.items() if both is not None}
    return {
        "calibration": {name: about for name, (about, _) in fitted.items()},
        "thresholds": {name: rows for name, (_, rows) in fitted.items() if rows},
    }


def calibrate(
    seen: Evaluated, task: TaskConfig, exchange: Exchange
) -> tuple[dict[str, Any], list[dict[str, float | None]]] | None:
    """Fit a calibration to all ranks' outputs, and tabulate thresholds. Collective.

    Returns:
        What ``summary.json`` keeps: ``scale`` and ``bias`` (see `Calibration`), the mean ``loss``
        in nats ``before`` and after it, and the number of ``seeds``; and the rows of `thresholds`,
        of the positive class. None if the task predicts no classes, or an output is not finite.
    """
    if not task.classifies and not task.several_labels:
        return None
    width = max(1, seen.outputs.shape[1])
    total = int(exchange.sum(torch.tensor(len(seen.outputs))))
    every = -(-total // max(1, min(_ROWS, _VALUES // width)))
    own = exchange.gather_rows(seen.outputs[::every].contiguous())
    outputs = own.double()
    targets = exchange.gather_rows(seen.targets[::every].contiguous())
    if not outputs.isfinite().all():  # training diverged
        return None
    if task.several_labels:
        targets = targets.reshape(outputs.shape)
    fitted = fit(outputs, targets)
    after = fitted.apply(outputs)
    about = {
        "scale": list(fitted.scale),
        "bias": list(fitted.bias),
        "before": float(_loss(outputs, targets)),
        "loss": float(_loss(after, targets)),
        "seeds": len(outputs),
    }
    positive = 1 if seen.positive is None and width == 2 else seen.positive
    if task.several_labels or positive is None:
        return about, []
    # in float32, as predictions are written: high probabilities round to the same number
    scores, calibrated = (each.softmax(1)[:, positive].float() for each in (own, after))
    # with more classes calibration changes the order of a class's probabilities
    return about, thresholds(scores, calibrated if width == 2 else None, targets == positive)


def fit(outputs: Tensor, targets: Tensor) -> Calibration:
    """Return the calibration that makes targets likeliest, or none if that would be worse.

    A Gaussian prior of one observation's weight, on the logarithms of the scales of logits with a
    mean square of 1 and on the biases, keeps them finite where a class is absent or all are right.

    Args:
        outputs: float64 ``[n, C]`` logits.
        targets: int64 ``[n]`` classes, or 0 and 1 ``[n, C]`` of labels; below 0 where unknown.
    """
    classes = outputs.shape[1]
    known = int((targets >= 0).sum())
    none = Calibration((1.0,) * (classes if targets.dim() == 2 else 1), (0.0,) * classes)
    if not known:
        return none
    size = outputs.square().mean(0 if targets.dim() == 2 else None).sqrt().reshape(-1)
    size = size.where(size > 0, 1.0)
    free = torch.zeros(len(size) + classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [free], max_iter=_ITERATIONS, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        scale, bias = free[:-classes].exp(), free[-classes:]
        loss = _loss(outputs / size * scale + bias, targets) + free.square().sum() / (2 * known)
        loss.backward()
        return loss

    optimizer.step(closure)
    scale, bias = free[:-classes].detach().exp() / size, free[-classes:].detach()
    found = Calibration(tuple(scale.tolist()), tuple(bias.tolist()))
    return min(none, found, key=lambda each: float(_loss(each.apply(outputs), targets)))


def thresholds(
    before: Tensor, after: Tensor | None, truth: Tensor
) -> list[dict[str, float | None]]:
    """Tabulate what is found and how much of it is right at thresholds on a class's probability.

    Args:
        before: ``[n]`` probabilities of the class as predictions have them.
        after: the same, calibrated; None if their order is another.
        truth: bool ``[n]``.

    Returns:
        A row for each recall from 5 % to 100 %, at the highest threshold that reaches it: the
        ``threshold`` on the class's ``scores`` in predictions, the ``calibrated`` one that selects
        the same seeds (None without ``after``), ``precision``, ``recall``, and the ``share`` of
        seeds selected. Empty if all seeds or none are of the class.
    """
    positives = int(truth.sum())
    if positives in (0, len(truth)):
        return []
    order = before.argsort(descending=True, stable=True)
    found, apart, lows = truth[order].cumsum(0), torch.ones_like(truth), list[Tensor]()
    for scores in (each[order] for each in (before, after) if each is not None):
        # seeds with equal scores are above a threshold together
        lows.append(scores.cummin(0).values)
        apart[:-1] &= lows[-1][:-1] > scores.flip(0).cummax(0).values.flip(0)[1:]
    last = apart.nonzero().flatten()
    rows = []
    for wanted in _RECALLS:
        at = int(last[torch.searchsorted(found[last], math.ceil(wanted * positives - 1e-9))])
        rows.append(
            {
                "threshold": float(lows[0][at]),
                "calibrated": None if after is None else float(lows[1][at]),
                "precision": int(found[at]) / (at + 1),
                "recall": int(found[at]) / positives,
                "share": (at + 1) / len(truth),
            }
        )
    return [row for row, later in zip(rows, [*rows[1:], None]) if row != later]


def class_log_odds(outputs: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of each class's probability p from logits ``[n, C]``: float64
    ``[n, C]``. Probabilities of logits that differ by 37 or more round to 1, and their logarithms
    to 0; log odds stay apart."""
    wide = outputs.double()
    if wide.shape[1] == 2:
        return wide - wide.flip(1)
    logs = wide.log_softmax(1)
    best = wide.argmax(1, keepdim=True)
    of_others = wide.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    odds = logs - torch.log1p(-logs.exp())
    # the probability of the likeliest class alone can be so close to 1 that 1 - p is rounding
    return odds.scatter(1, best, wide.gather(1, best) - of_others)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    known = targets >= 0
    if targets.dim() == 1:
        return F.cross_entropy(logits[known], targets[known])
    return F.binary_cross_entropy_with_logits(logits[known], targets[known].double())
