"""Losses of single seeds, from float32 outputs and targets to ``[B]``, and losses of links.

Of links, the score of each edge is set against those of edges that are not there: scores of edges
``[B]``; for each end that was replaced, scores ``[B, K]`` and which of them count, bool ``[B, K]``.
Each gives ``[B]``; both ends count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raygnn.config.task import (
    EdgeRegression,
    GraphRegression,
    LinkPrediction,
    NodeRegression,
    TaskConfig,
)

Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: TaskConfig) -> Loss:
    """The loss of a task: cross entropy for classes, else of numbers what ``task.loss`` says."""
    if config.several_labels:
        return label_entropy
    if isinstance(config, (NodeRegression, EdgeRegression, GraphRegression)):
        return absolute if config.loss == "l1" else squared
    return cross_entropy


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """``outputs [B, C]``, classes ``y``, whole numbers of any dtype ``[B]`` or ``[B, 1]``."""
    return F.cross_entropy(outputs, y.long().flatten(), reduction="none")


def label_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross entropy of ``outputs [B, K]`` and labels ``y [B]`` or ``[B, K]``, of which those
    that are neither 0 nor 1 (-1, NaN) are not known: the sum over the known ones, divided by K.

    So each known label counts the same, whatever else is known of its seed.
    """
    rows = y.float().view_as(outputs)
    known = rows >= 0
    losses = F.softplus(outputs) - outputs * rows.masked_fill(~known, 0)
    return losses.masked_fill(~known, 0).mean(1)


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """``outputs [B, K]``, numbers ``y [B]`` or ``[B, K]``; the mean over K."""
    return F.mse_loss(outputs, y.float().view_as(outputs), reduction="none").mean(1)


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    """As `squared`, of the absolute difference."""
    return F.l1_loss(outputs, y.float().view_as(outputs), reduction="none").mean(1)


LinkLoss = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]

_MARGIN = 1.0
_SHIFT = 9.0  # γ of Sun et al. (2019) for FB15k-237


def make_link_loss(config: LinkPrediction, *, distance: bool) -> LinkLoss:
    """What ``task.loss`` says.

    Args:
        distance: whether scores are distances below 0, to which ``task.margin`` is added where a
            loss asks on which side of 0 they are.
    """
    shift = (_SHIFT if config.margin is None else config.margin) if distance else 0.0
    kinds: dict[str, LinkLoss] = {
        "bce": partial(binary_cross_entropy, shift=shift),
        "softmax": softmax_cross_entropy,
        "margin": partial(margin, gap=_MARGIN if config.margin is None else config.margin),
        "self_adversarial": partial(
            self_adversarial, shift=shift, temperature=config.temperature or 1.0
        ),
    }
    return kinds[config.chosen_loss]


def binary_cross_entropy(
    there: Tensor, absent: Sequence[Tensor], counts: Sequence[Tensor], *, shift: float
) -> Tensor:
    """Half for the edge, half for the mean of the others."""
    others = [_mean(F.softplus(s + shift), c) for s, c in zip(absent, counts)]
    return (F.softplus(-there - shift) + _both(others)) / 2


def softmax_cross_entropy(
    there: Tensor, absent: Sequence[Tensor], counts: Sequence[Tensor]
) -> Tensor:
    """Of the edge among itself and the others, as Lacroix, Usunier & Obozinski, "Canonical tensor
    decomposition for knowledge base completion" (ICML 2018), with all nodes."""
    found = []
    for scores, counted in zip(absent, counts):
        others = scores.masked_fill(~counted, -torch.inf)
        total = torch.cat([there.unsqueeze(1), others], dim=1).logsumexp(1)
        found.append(total - there)
    return _both(found)


def margin(
    there: Tensor, absent: Sequence[Tensor], counts: Sequence[Tensor], *, gap: float
) -> Tensor:
    """By how much the others are not yet ``gap`` below the edge (Bordes et al., 2013)."""
    others = [_mean(F.relu(gap - there.unsqueeze(1) + s), c) for s, c in zip(absent, counts)]
    return _both(others)


def self_adversarial(
    there: Tensor,
    absent: Sequence[Tensor],
    counts: Sequence[Tensor],
    *,
    shift: float,
    temperature: float,
) -> Tensor:
    """Sun et al., "RotatE" (ICLR 2019), equation 5: the others in proportion to the exponential
    of their scores."""
    found = []
    for scores, counted in zip(absent, counts):
        weight = (scores.detach() * temperature).masked_fill(~counted, -torch.inf).softmax(1)
        weight = weight.nan_to_num()  # of an edge for which none counts
        found.append((weight * F.softplus(scores + shift)).sum(1))
    return (F.softplus(-there - shift) + _both(found)) / 2


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Over those that count; 0 where none does."""
    return values.masked_fill(~counted, 0).sum(1) / counted.sum(1).clamp_min(1)


def _both(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean(0)
